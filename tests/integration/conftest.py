"""What tests of clients and commands share: a pgbouncer, every way to run a call, the command line."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner

from bartleby import binaries, dev
from bartleby.surfaces.cli import main
from tests.integration.commands import Done, checked
from tests.integration.ways import WAYS, Way

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


@pytest.fixture(scope="session")
def pgbouncer(server: dev.Server, scratch: Path) -> Iterator[int]:
    """The port of a pgbouncer that hands every transaction to the server process that waited longest."""
    folder = Path(tempfile.mkdtemp(prefix="bartleby-pgbouncer-", dir=scratch))
    folder.chmod(0o711)
    account = binaries.account_for(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    for name, text in {
        "ini": INI.format(server=server.port, port=port, folder=folder),
        "users": f'"postgres" "{server.password}"\n',
    }.items():
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(text)
        account.own(folder / name)
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin")
    assert program is not None
    with (folder / "log").open("wb") as log:
        process = account.popen([program, "-q", folder / "ini"], log)
    try:
        wait_for_port(port, process, folder / "log")
        yield port
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder)


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 10
    while True:
        assert process.poll() is None, log.read_text()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)


@pytest.fixture
def pooled_dsn(pgbouncer: int, server: dev.Server, dsn: str) -> str:
    """The test's own database, seen through pgbouncer."""
    return dsn.replace(f":{server.port}/", f":{pgbouncer}/")


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.pgbouncer if "pgbouncer" in name else ()) for name in WAYS]
)
def way(request: pytest.FixtureRequest, dsn: str) -> Iterator[Way]:
    """Each way to run calls, one after the other."""
    address = request.getfixturevalue("pooled_dsn") if "pgbouncer" in request.param else dsn
    with WAYS[request.param](address) as opened:
        yield opened


@pytest.fixture
def wait_for() -> Callable[[Callable[[], object]], None]:
    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.005)

    return wait


@pytest.fixture
def is_waiting(conn: psycopg.Connection[tuple[object, ...]]) -> Callable[[], bool]:
    """Whether a session of this database waits for a lock."""

    def look() -> bool:
        query = "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        return conn.execute(query).rowcount > 0

    return look


@pytest.fixture
def bartleby(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Done]]:
    """Run the command line as `main` does, in this process, against the test's database."""
    monkeypatch.chdir(tmp_path)
    kept = signal.getsignal(signal.SIGTERM)

    def run(*words: str, stdin: str | bytes = "", address: str | None = dsn) -> Done:
        monkeypatch.setattr(sys, "argv", ["bartleby", *words])
        monkeypatch.setenv("BARTLEBY_DSN", address or "")
        with CliRunner().isolation(input=stdin) as (out, err, _), pytest.raises(SystemExit) as end:
            main()
        code = end.value.code
        return checked(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())

    yield run
    signal.signal(signal.SIGTERM, kept)
