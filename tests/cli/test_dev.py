"""`bartleby dev`: starts a server, prints how to use it, and leaves none behind."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from bartleby import Bartleby, Client, InvalidSettings, dev
from bartleby.surfaces.cli import cli, connecting
from tests.cli.conftest import Conn, Run
from tests.kit.commands import PROGRAM, check_refusals
from tests.kit.sinks.servers import free_port


@pytest.fixture
def folder(scratch: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="bartleby-cli-", dir=scratch))
    path.chmod(0o755)
    yield path
    left = dev.running(path / "pg")
    if left is not None:
        left.stop("immediate")
    shutil.rmtree(path)


def start(folder: Path, *words: str, program: list[str] = PROGRAM) -> subprocess.Popen[str]:
    given = {name: value for name, value in os.environ.items() if name != "BARTLEBY_DSN"}
    pipe = subprocess.PIPE
    return subprocess.Popen([*program, *words], cwd=folder, env=given, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_server_runs_until_a_signal_or_stop(bartleby: Run, folder: Path) -> None:
    dev_here = ("dev", "--directory", "pg")
    (folder / "pg").mkdir()
    (folder / "pg" / "lock").touch()
    (folder / "pg" / "port").write_text(str(free_port()))  # as if it had run there: no other test takes it meanwhile
    process = start(folder, *dev_here)
    assert process.stdout is not None
    line = process.stdout.readline()
    command = ["sh", "-c", f'{line}printf %s "$BARTLEBY_DSN"']
    with Client(subprocess.run(command, capture_output=True, text=True, check=True).stdout) as client:
        assert client.drift() == []
    assert finish(start(folder, *dev_here)) == (0, line, "it is running already\n")
    process.send_signal(signal.SIGINT)
    expected = f"PostgreSQL lives in {folder / 'pg'}; Ctrl-C stops it, its data stays\nstopped\n"
    assert finish(process) == (0, "", expected)
    assert dev.running(folder / "pg") is None
    process = start(folder, *dev_here)
    assert process.stdout is not None
    assert process.stdout.readline() == line
    assert finish(start(folder, *dev_here, "--stop")) == (0, "", "stopped\n")
    assert finish(process)[0] == 0
    assert finish(start(folder, *dev_here, "--stop")) == (0, "", "no embedded PostgreSQL is running there\n")
    (folder / "full").mkdir()
    (folder / "full" / "mine").touch()
    check_refusals(bartleby, [(["dev", "--directory", str(folder / "full")], 1, "has other things in it")])


def test_commands_without_a_dsn_share_the_embedded_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARTLEBY_DSN", "")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(dev, "default_directory", lambda: folder / "pg")
    place = f"from bartleby import dev; dev.default_directory = lambda: dev.Path({str(folder)!r}, 'pg')"
    program = [sys.executable, "-c", f"{place}; from bartleby.surfaces.cli import main; main()"]
    with ThreadPoolExecutor(4) as threads:  # none stops the server while another uses it
        creating = [start(folder, "queues", "create", f"q{number}", program=program) for number in range(6)]
        assert [code for code, _, _ in threads.map(finish, creating)] == [0] * 6
    assert dev.running(folder / "pg") is None
    listed = CliRunner().invoke(cli, ["queues"], catch_exceptions=False)
    where = f"using the embedded PostgreSQL in {folder / 'pg'} (see `bartleby dev`)"
    assert listed.stderr == f"no --dsn and no BARTLEBY_DSN: {where}\n"
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:]] == [f"q{each}" for each in range(6)]
    with dev.start() as server:  # one that `dev` started survives them
        with connecting.embedded() as same:
            assert same.pid == server.pid
        assert dev.running() is not None


def test_embedded_server_is_used_where_nothing_is_configured(
    server: dev.Server, conn: Conn, dsn: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BARTLEBY_DSN", "")
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(dev, "default_directory", lambda: server.directory)
        app = Bartleby()
        assert (app.settings.dsn, app.configured.dsn) == (server.dsn, None)
        assert app.client.facts().data_directory == str(server.directory / "data")
        app.client.close()
        patched.setattr(dev, "default_directory", lambda: tmp_path / "none")
        with pytest.raises(InvalidSettings, match="no database") as caught:
            Bartleby().send("orders", 1)
    for each in ("Bartleby('postgresql://", "BARTLEBY_DSN", "bartleby dev"):
        assert each in (caught.value.hint or "")
    monkeypatch.setattr(dev, "running", lambda: pytest.fail("looked for the embedded server"))
    made = Bartleby()
    made.connect_to(dsn)
    monkeypatch.setenv("BARTLEBY_DSN", "postgresql://127.0.0.1/environment")
    assert made.settings.dsn == Bartleby(dsn).settings.dsn == dsn
    assert Bartleby().settings.dsn == "postgresql://127.0.0.1/environment"
