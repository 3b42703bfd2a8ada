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

from bartleby import Client, dev
from bartleby.surfaces.cli import cli, connecting
from tests.cli.conftest import Run
from tests.kit.commands import PROGRAM, check_refusals


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
    environment = {**given, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen([*program, *words], cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def test_server_runs_until_a_signal_or_stop(bartleby: Run, folder: Path) -> None:
    dev_here = ("dev", "--directory", "pg")
    process = start(folder, *dev_here)
    assert process.stdout is not None
    line = process.stdout.readline()
    command = ["sh", "-c", f'{line}printf %s "$BARTLEBY_DSN"']
    with Client(subprocess.run(command, capture_output=True, text=True, check=True).stdout) as client:
        assert client.drift() == []
    assert finish(start(folder, *dev_here)) == (0, line, "it is running already\n")
    process.send_signal(signal.SIGINT)
    told = f"PostgreSQL lives in {folder / 'pg'}; Ctrl-C stops it, its data stays\nstopped\n"
    assert finish(process) == (0, "", told)
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
    created = CliRunner().invoke(cli, ["queues", "create", "orders"], catch_exceptions=False)
    where = f"using the embedded PostgreSQL in {folder / 'pg'} (see `bartleby dev`)"
    assert (created.exit_code, created.stderr) == (0, f"no --dsn and no BARTLEBY_DSN: {where}\n")
    assert dev.running(folder / "pg") is None
    place = f"from bartleby import dev; dev.default_directory = lambda: dev.Path({str(folder)!r}, 'pg')"
    program = [sys.executable, "-c", f"{place}; from bartleby.surfaces.cli import main; main()"]
    with ThreadPoolExecutor(4) as threads:  # none stops the server while another uses it
        creating = [start(folder, "queues", "create", f"q{number}", program=program) for number in range(6)]
        assert [code for code, _, _ in threads.map(finish, creating)] == [0] * 6
    assert dev.running(folder / "pg") is None
    listed = CliRunner().invoke(cli, ["queues"], catch_exceptions=False).stdout
    assert [line.split()[0] for line in listed.splitlines()[1:]] == ["orders", *(f"q{each}" for each in range(6))]
    with dev.start() as server:  # one that `dev` started survives them
        with connecting.embedded() as same:
            assert same.pid == server.pid
        assert dev.running() is not None
