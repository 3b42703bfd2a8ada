"""A worker on a terminal: the status line, what handlers print, Ctrl-C, and handlers that do not end."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bartleby import Bartleby
from bartleby.surfaces.cli import work
from tests.cli.conftest import Conn
from tests.kit.screen import CTRL_C, Screen
from tests.kit.worker import ENVIRONMENT, state, until

SHOP = """
import asyncio, sys, time
from bartleby import Bartleby

app = Bartleby()

def note(text):
    with open("notes", "a") as file:
        file.write(text + "\\n")

@app.handler("prints", concurrency=1)
def prints(message):
    if message.payload == "half":
        print("half", end="", flush=True)
        time.sleep(0.5)  # a status line comes several times a second
        print(" and whole")
    elif message.payload == "others":  # a handler must not fail only because its output is a terminal
        print("to stderr", file=sys.stderr)
        sys.stdout.buffer.write(f"{sys.stdout.encoding}\\n".encode())
        sys.stdout.buffer.flush()
    else:
        print("fulfilled", message.payload)

@app.handler("blocks")
async def blocks(message):
    note("begin")
    time.sleep(60)

@app.handler("stubborn")
async def stubborn(message):
    note("begin")
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            note("no")
"""


@pytest.fixture
def shop(app: Bartleby, tmp_path: Path) -> Path:
    for queue in ("prints", "blocks", "stubborn"):
        app.client.create_queue(queue)
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def working_on_a_terminal(dsn: str, shop: Path, *options: str) -> Screen:
    return Screen("--dsn", dsn, "work", "shop:app", *options, environment=ENVIRONMENT, cwd=shop)


def notes(shop: Path) -> list[str]:
    file = shop / "notes"
    return file.read_text().split() if file.exists() else []


def is_status(line: str) -> bool:
    return "running" in line and "done" in line


def test_handlers_print_above_the_status_line(app: Bartleby, shop: Path, dsn: str) -> None:
    with working_on_a_terminal(dsn, shop) as terminal:
        terminal.wait_for("running 0")
        app.send_many("prints", [{"payload": each} for each in (1, 2, "half", 3)])
        terminal.wait_for("done 4")
        lines = until(lambda: shown if is_status((shown := terminal.lines)[-1]) else [])
        app.send("prints", "others")
        terminal.wait_for("done 5")
        assert "to stderr" in terminal.lines
        terminal.press(CTRL_C)
        assert terminal.end() == 0
        last = terminal.lines
    printed = [line for line in lines if "fulfilled" in line or "half" in line]
    assert printed == ["fulfilled 1", "fulfilled 2", "half and whole", "fulfilled 3"]
    assert [is_status(line) for line in lines] == [False] * (len(lines) - 1) + [True]
    assert "has stopped" in [line for line in last if line][-1]  # and the status line is cleared
    assert [line for line in last if "fulfilled" in line or "half" in line] == printed
    assert not any("finishing" in line for line in last)  # an idle worker has nothing to wait for


def test_first_interrupt_says_what_is_awaited_and_the_second_does_not_wait(
    app: Bartleby, conn: Conn, shop: Path, dsn: str
) -> None:
    app.send("stubborn", 1)  # which also refuses to be cancelled
    with working_on_a_terminal(dsn, shop, "--grace", "50") as terminal:
        until(lambda: notes(shop) == ["begin"])
        terminal.press(CTRL_C)
        terminal.wait_for("finishing 1 running handler")
        [line] = [line for line in terminal.lines if "finishing" in line]
        assert ("50 s" in line, "again" in line, terminal.process.poll()) == (True, True, None)
        terminal.press(CTRL_C)
        assert terminal.end() == 0
        assert "has stopped" in terminal.shown
    assert "no" in notes(shop)
    assert state(conn, "stubborn")[1] == 0


def interrupted_ends(process: subprocess.Popen[bytes]) -> bool:
    """Interrupt a process; say whether it ended soon after. Two signals sent at once may arrive as one."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.7)
    return process.returncode is not None


def test_second_interrupt_ends_a_worker_whose_loop_is_blocked(app: Bartleby, conn: Conn, shop: Path, dsn: str) -> None:
    impatient = "from bartleby.surfaces.cli import main, work; work._LAST_MOMENTS = 0.5; main()"
    command = [sys.executable, "-c", impatient, "--dsn", dsn, "work", "shop:app"]
    app.send("blocks", 1)
    with subprocess.Popen(command, cwd=shop, env=ENVIRONMENT, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: notes(shop) == ["begin"])
            assert not interrupted_ends(process), "the first one waits for the handler"
            until(lambda: interrupted_ends(process))
            assert process.returncode == 1
        finally:
            process.kill()
    assert work._LAST_MOMENTS <= 10
    assert state(conn, "blocks")[1] == 1  # until its lease lapses
