"""A pgbouncer in transaction mode before a server, for what has to work through one."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bartleby import binaries, dev

INI = """
[databases]
* = host=127.0.0.1 port={server}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = scram-sha-256
auth_file = {folder}/users
pool_mode = transaction
default_pool_size = 10
server_round_robin = 1
"""


def program() -> str | None:
    """Where pgbouncer is; Debian has it where only root looks."""
    return shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin")


@contextlib.contextmanager
def pgbouncer(server: dev.Server, parent: Path | None = None, port: int | None = None) -> Iterator[int]:
    """The port of a pgbouncer that hands every transaction to the server process that waited longest.

    Without `port` it is one that is free now, and that another process may take before pgbouncer listens on it.
    """
    found = program()
    if found is None:
        raise RuntimeError("there is no pgbouncer on this machine")
    folder = Path(tempfile.mkdtemp(prefix="bartleby-pgbouncer-", dir=parent))
    folder.chmod(0o711)
    account = binaries.account_for(folder)
    port = port or free_port()
    for name, text in {
        "ini": INI.format(server=server.port, port=port, folder=folder),
        "users": f'"postgres" "{server.password}"\n',
    }.items():
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(text)
        account.own(folder / name)
    with (folder / "log").open("wb") as log:
        process = account.popen([found, "-q", folder / "ini"], log)
    try:
        wait_for_port(port, process, folder / "log")
        yield port
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the process listens there."""
    deadline = time.monotonic() + 60
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(log.read_text())
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.01)
