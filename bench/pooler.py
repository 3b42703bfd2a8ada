"""A pgbouncer in transaction mode before the server, for what has to work through one."""

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from psycopg.conninfo import make_conninfo

from bartleby import binaries
from bench.lab import Lab

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
"""


@contextlib.contextmanager
def pooled(lab: Lab, database: str) -> Iterator[str | None]:
    """A connection string that leads through the pooler, or None where there is no pgbouncer."""
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin")
    if program is None:
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="bartleby-pgbouncer-"))
    folder.chmod(0o711)
    account = binaries.account_for(folder)
    port = free_port()
    for name, text in {
        "ini": INI.format(server=lab.server.port, port=port, folder=folder),
        "users": f'"postgres" "{lab.server.password}"\n',
    }.items():
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(text)
        account.own(folder / name)
    with (folder / "log").open("wb") as log:
        process = account.popen([program, "-q", folder / "ini"], log)
    try:
        wait_for(port)
        yield make_conninfo(lab.server.dsn, port=port, dbname=database, host="127.0.0.1")
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int) -> None:
    """Return when somebody listens there."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.01)
    raise RuntimeError("pgbouncer did not start")
