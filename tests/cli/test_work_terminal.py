"""A worker on a terminal: the status line, what handlers print, Ctrl-C, and handlers that do not end."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest

from bartleby import Bartleby
from bartleby.surfaces.cli import work
from tests.kit.worker import ENVIRONMENT, LONG, Program, state, until

Conn = psycopg.Connection[tuple[Any, ...]]

SHOP = """
import asyncio, pathlib, sys, time
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
    elif message.payload == "stderr":
        print("to stderr", file=sys.stderr)
    elif message.payload == "buffer":
        sys.stdout.buffer.write(b"bytes\\n")
        sys.stdout.buffer.flush()
    elif message.payload == "encoding":
        note(sys.stdout.encoding.lower())
    else:
        print("fulfilled", message.payload)

@app.handler("blocks")
async def blocks(message):
    note("begin")
    while message.payload == "go" and not pathlib.Path("go").exists():
        time.sleep(0.01)
    if message.payload != "go":
        time.sleep(message.payload)
    note("end")

@app.handler("stubborn")
async def stubborn(message):
    note("begin")
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            note("no")
"""


class Terminal:
    """`bartleby work shop:app` with a terminal of 100 columns, and the lines that stand on it."""

    def __init__(self, dsn: str, *arguments: str, cwd: Path) -> None:
        self._mine, its = pty.openpty()
        command = [sys.executable, "-m", "bartleby", "--dsn", dsn, "work", "shop:app", *arguments]
        environment = {**ENVIRONMENT, "COLUMNS": "100"}
        self.process = subprocess.Popen(command, cwd=cwd, env=environment, stdin=its, stdout=its, stderr=its)
        os.close(its)
        self._seen = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other side was closed
            while True:
                self._seen += os.read(self._mine, 65536)

    @property
    def lines(self) -> list[str]:
        """Return the lines on the screen now."""
        lines, column = [""], 0
        text = self._seen.decode().replace("\x1b[K", "\0")
        for each in text:
            if each == "\n":
                lines.append("")
                column = 0
            elif each == "\r":
                column = 0
            elif each == "\0":
                lines[-1] = lines[-1][:column]
            else:
                lines[-1] = lines[-1][:column] + each + lines[-1][column + 1 :]
                column += 1
        return lines

    def wait_for(self, text: str) -> str:
        """Return the first line with this text."""
        found = until(lambda: [line for line in self.lines if text in line], LONG, f"{text!r} among {self.lines}")
        return str(found[0])

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        os.close(self._mine)


@pytest.fixture
def app(dsn: str) -> Iterator[Bartleby]:
    made = Bartleby(dsn)
    for queue in ("prints", "blocks", "stubborn"):
        made.client.create_queue(queue)
    yield made
    made.client.close()


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def notes(shop: Path) -> list[str]:
    file = shop / "notes"
    return file.read_text().split() if file.exists() else []


def is_status(line: str) -> bool:
    return "running" in line and "done" in line


def test_handlers_print_above_the_status_line(app: Bartleby, conn: Conn, shop: Path, dsn: str) -> None:
    with Terminal(dsn, cwd=shop) as terminal:
        terminal.wait_for("running 0")
        app.send_many("prints", [{"payload": each} for each in (1, 2, "half", 3)])
        terminal.wait_for("done 4")
        lines = terminal.lines
        # a handler must not fail only because its output is a terminal
        app.send_many("prints", [{"payload": each} for each in ("stderr", "buffer", "encoding")])
        terminal.wait_for("done 7")
        assert "to stderr" in terminal.lines
        terminal.interrupt()
        assert terminal.process.wait(LONG) == 0
        terminal.wait_for("has stopped")
        last = terminal.lines
    printed = [line for line in lines if "fulfilled" in line or "half" in line]
    assert printed == ["fulfilled 1", "fulfilled 2", "half and whole", "fulfilled 3"]
    assert [is_status(line) for line in lines] == [False] * (len(lines) - 1) + [True]
    assert not is_status([line for line in last if line][-1])  # it is cleared at the end
    assert [line for line in last if "fulfilled" in line or "half" in line] == printed
    assert not any("finishing" in line for line in last)  # an idle worker has nothing to wait for


def test_first_interrupt_says_what_is_awaited_and_the_second_does_not_wait(
    app: Bartleby, conn: Conn, shop: Path, dsn: str
) -> None:
    app.send("stubborn", 1)  # which also refuses to be cancelled
    with Terminal(dsn, "--grace", "50", cwd=shop) as terminal:
        until(lambda: notes(shop) == ["begin"])
        terminal.interrupt()
        shown = terminal.wait_for("finishing 1 running handler")
        assert ("50 s" in shown, "again" in shown, terminal.process.poll()) == (True, True, None)
        terminal.interrupt()
        assert terminal.process.wait(LONG) == 0
        terminal.wait_for("has stopped")
    assert "no" in notes(shop)
    assert state(conn, "stubborn")[1] == 0


def test_interrupt_while_a_handler_blocks_the_loop_stops_the_worker_afterwards(
    app: Bartleby, conn: Conn, shop: Path, dsn: str
) -> None:
    app.send_many("blocks", [{"payload": "go"}, {"payload": "go"}])
    with Program(dsn, "shop:app", "--queue", "blocks", "--concurrency", "1", "--log", "json", cwd=shop) as program:
        until(lambda: notes(shop) == ["begin"])
        program.term()
        (shop / "go").touch()
        assert program.end() == 0
        assert program.events()[-1]["done"] == 1
    assert notes(shop) == ["begin", "end"]
    ready, leased, deferred, _ = state(conn, "blocks")
    assert (ready + deferred, leased) == (1, 0)


def test_second_interrupt_ends_a_worker_whose_loop_is_blocked(app: Bartleby, conn: Conn, shop: Path, dsn: str) -> None:
    impatient = "from bartleby.surfaces.cli import main, work; work._LAST_MOMENTS = 0.5; main()"
    command = [sys.executable, "-c", impatient, "--dsn", dsn, "work", "shop:app"]
    app.send("blocks", 60)
    with subprocess.Popen(command, cwd=shop, env=ENVIRONMENT, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: notes(shop) == ["begin"])
            process.send_signal(signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.7)  # the first one waits for the handler
            process.send_signal(signal.SIGINT)
            assert process.wait(LONG) == 1
        finally:
            process.kill()
    assert work._LAST_MOMENTS <= 10
    assert state(conn, "blocks")[1] == 1  # until its lease lapses
