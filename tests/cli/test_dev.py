"""`bartleby dev` starts a server, says how to use it, and leaves none behind."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from bartleby import Client, dev
from bartleby.surfaces.cli import connecting

PROGRAM = [sys.executable, "-c", "from bartleby.surfaces.cli import main; main()"]


@pytest.fixture
def folder(scratch: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="bartleby-cli-", dir=scratch))
    path.chmod(0o755)
    yield path
    left = dev.running(path / "pg")
    if left is not None:
        left.stop("immediate")
    shutil.rmtree(path)


def start(folder: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    given = {name: value for name, value in os.environ.items() if name != "BARTLEBY_DSN"}
    return subprocess.Popen(
        [*PROGRAM, *words],
        cwd=folder,
        env={**given, "PYTHONUNBUFFERED": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def run(folder: Path, *words: str, **environment: str) -> tuple[int, str, str]:
    return finish(start(folder, *words, **environment))


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_dev_prints_an_export_line_that_works_and_stops_on_a_signal(folder: Path, number: signal.Signals) -> None:
    process = start(folder, "dev", "--directory", "pg")
    line = first_line(process)
    shell = subprocess.run(
        ["sh", "-c", f'{line}; printf %s "$BARTLEBY_DSN"'], capture_output=True, text=True, check=True
    )
    with Client(shell.stdout) as client:
        client.create_queue("orders")
        assert client.drift() == []
    again = run(folder, "dev", "--directory", "pg")
    assert again == (0, f"{line}\n", "it is running already\n")
    process.send_signal(number)
    code, out, err = finish(process)
    assert (code, out) == (0, "")
    assert err.splitlines() == [f"PostgreSQL lives in {folder / 'pg'}; Ctrl-C stops it, its data stays", "stopped"]
    assert dev.running(folder / "pg") is None
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(shell.stdout)


def test_dev_stop_stops_it_from_elsewhere_and_the_data_stays(folder: Path) -> None:
    process = start(folder, "dev", "--directory", "pg")
    line = first_line(process)
    with Client(line.partition("=")[2]) as client:
        client.create_queue("orders")
    assert run(folder, "dev", "--directory", "pg", "--stop") == (0, "", "stopped\n")
    assert finish(process)[0] == 0
    assert run(folder, "dev", "--directory", "pg", "--stop") == (0, "", "no embedded PostgreSQL is running there\n")
    process = start(folder, "dev", "--directory", "pg")
    assert first_line(process) == line
    with Client(line.partition("=")[2]) as client:
        assert [queue.name for queue in client.queues()] == ["orders"]
    process.terminate()
    assert finish(process)[0] == 0


def test_dev_says_why_it_cannot_live_somewhere(folder: Path) -> None:
    (folder / "full").mkdir()
    (folder / "full" / "mine").touch()
    code, out, err = run(folder, "dev", "--directory", "full")
    assert (code, out) == (1, "")
    assert "has other things in it" in err
    code, _, err = run(folder, "dev", "--directory", "pg", BARTLEBY_PG_BIN="/nonexistent")
    assert code == 1
    assert err.startswith("bartleby: BARTLEBY_PG_BIN is /nonexistent")


def test_without_a_dsn_a_command_uses_the_embedded_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from bartleby.surfaces.cli import cli

    monkeypatch.setenv("BARTLEBY_DSN", "")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(dev, "default_directory", lambda: folder / "pg")
    created = CliRunner().invoke(cli, ["queues", "create", "orders"], catch_exceptions=False)
    assert created.exit_code == 0
    assert (
        created.stderr
        == f"no --dsn and no BARTLEBY_DSN: using the embedded PostgreSQL in {folder / 'pg'} (see `bartleby dev`)\n"
    )
    listed = CliRunner().invoke(cli, ["queues"], catch_exceptions=False)
    assert "orders" in listed.stdout
    assert dev.running(folder / "pg") is None


def test_commands_that_share_the_embedded_server_do_not_stop_it_under_each_other(folder: Path) -> None:
    place = f"from bartleby import dev; dev.default_directory = lambda: dev.Path({str(folder)!r}, 'pg')"
    program = [sys.executable, "-c", f"{place}; from bartleby.surfaces.cli import main; main()"]
    environment = {name: value for name, value in os.environ.items() if name != "BARTLEBY_DSN"}

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*program, *words], capture_output=True, text=True, check=False, env=environment, cwd=folder
        )

    with ThreadPoolExecutor(6) as threads:
        done = list(threads.map(lambda number: command("queues", "create", f"q{number}"), range(12)))
    assert [each.stderr for each in done if each.returncode] == []
    assert dev.running(folder / "pg") is None
    assert [line.split()[0] for line in command("queues").stdout.splitlines()[1:]] == sorted(f"q{n}" for n in range(12))


def test_a_server_that_dev_runs_survives_the_commands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev, "default_directory", lambda: folder / "pg")
    with dev.start() as server:
        with connecting.embedded() as same:
            assert same.pid == server.pid
        assert dev.running() is not None
