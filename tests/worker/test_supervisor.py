"""Several processes under one supervisor: restarted when they die, stopped with one signal, and none left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bartleby import Bartleby, supervisor
from bartleby.supervisor import Supervisor
from tests.kit.sql import value
from tests.kit.worker import LONG, CapturedLog, Conn, Program, children_of, state, until

SHOP = """
import os, time
from bartleby import Bartleby, heartbeat, presence

presence.EVERY = 0.2  # users have ten seconds
presence._UNDER_WAY = presence._LAST_WORDS = heartbeat._JOIN_SECONDS = 60.0  # and a busy machine is slow
app = Bartleby(version="2.4.1")
note = os.open("notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

@app.handler("orders", concurrency=1)
def handle(message):
    os.write(note, f"{os.getpid()}\\n".encode())
    while message.payload == "wait" and not os.path.exists("go"):
        time.sleep(0.01)
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def workers(shop: Path) -> list[int]:
    notes = shop / "notes"
    return [int(line) for line in notes.read_text().split()] if notes.exists() else []


def keep_all_busy(app: Bartleby, shop: Path, count: int) -> None:
    """Give each process a message that it cannot finish before every other has one too."""
    before = len(workers(shop))
    app.client.send_many("orders", [{"payload": "wait"}] * count)
    until(lambda: len(set(workers(shop)[before:])) == count)


def lapse(conn: Conn, pid: int) -> None:
    """Let the leases of one process lapse."""
    query = "update bartleby.lease set until = bartleby.clock() - interval '1 s' where worker like %s"
    conn.execute(query, [f"%:{pid}:%"])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_killed_process_is_replaced_its_message_comes_back_and_one_signal_ends_all(
    app: Bartleby, conn: Conn, shop: Path, dsn: str
) -> None:
    words = ("--processes", "2", "--grace", "600", "--log", "json")
    with Program(dsn, "shop:app", *words, cwd=shop) as program:
        program.wait_for("worker.started", 2)
        killed, kept = children_of(program.pid)
        keep_all_busy(app, shop, 2)
        os.kill(killed, signal.SIGKILL)
        program.wait_for("was killed by SIGKILL")
        program.wait_for("worker.started", 3)
        children = children_of(program.pid)
        assert (len(children), kept in children, killed in children) == (2, True, False)
        lapse(conn, killed)
        until(lambda: set(workers(shop)) == {killed, *children})
        app.client.send_many("orders", [{"payload": 1}] * 8)
        program.term()
        program.wait_for("finishing 1 running handlers", 2)
        (shop / "go").touch()
        assert program.end() == 0
        stopped = [event for event in program.events() if event["event"] == "worker.stopped"]
    assert [event["done"] for event in stopped] == [1, 1]
    assert not any(alive(pid) for pid in children)
    assert value(conn, "select array_agg(outcome) from bartleby.attempts") == ["crashed"]
    assert state(conn)[1] == 0
    assert value(conn, "select count(*) from bartleby.messages") == 8


def test_drained_process_is_not_replaced_and_the_program_ends_well(
    app: Bartleby, conn: Conn, shop: Path, dsn: str
) -> None:
    client = app.client
    with Program(dsn, "shop:app", "--processes", "2", cwd=shop) as program:
        until(lambda: len(client.workers()) == 2)
        first, second = client.workers()
        assert (first.version, first.pid == program.pid) == ("2.4.1", False)
        client.drain_worker(first.name, actor="ana", reason="deploy")
        until(lambda: [each.name for each in client.workers()] == [second.name])
        client.send("orders", 0)
        until(lambda: state(conn) == (0, 0, 0, 0))
        client.drain_worker(second.name, actor="ana", reason="deploy")
        assert program.end() == 0
        assert program.text().count("worker.draining") == 2
    assert client.workers() == []


def test_no_process_outlives_its_supervisor(app: Bartleby, shop: Path, dsn: str) -> None:
    with Program(dsn, "shop:app", "--processes", "2", cwd=shop) as program:
        program.wait_for("worker.started", 2)
        children = children_of(program.pid)
        program.process.kill()
        until(lambda: not any(alive(pid) for pid in children))


# The supervisor alone


@contextlib.contextmanager
def stopped_when(*conditions: Callable[[], object]) -> Iterator[None]:
    """Send a signal to this process when each condition holds, one after the other: SIGTERM, then SIGINT."""

    def stop() -> None:
        for condition, number in zip(conditions, (signal.SIGTERM, signal.SIGINT), strict=False):
            until(lambda: over.is_set() or condition())  # noqa: B023 - at once
            if over.is_set():
                return
            os.kill(os.getpid(), number)

    over, thread = threading.Event(), threading.Thread(target=stop)
    thread.start()
    try:
        yield
    except BaseException:
        over.set()  # a signal after the end would hit the tests themselves
        raise
    finally:
        thread.join()


def supervised(code: str, processes: int = 1) -> Supervisor:
    return Supervisor([sys.executable, "-S", "-c", code], os.environ, processes, 1.0)


def test_each_signal_is_passed_on_and_the_worst_exit_code_returned(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    code = f"""
import os, signal, sys, time
os.chdir({str(tmp_path)!r})
try:
    os.mkdir("first")
    code = 0
except FileExistsError:
    code = 3
def hear(*_):
    name = "heard" + str(os.getpid())
    if os.path.exists(name):
        sys.exit(code)
    open(name, "w").close()
signal.signal(signal.SIGTERM, hear)
open("ready" + str(os.getpid()), "w").close()
while True:
    time.sleep(600)
"""
    running = supervised(code, 2)
    running._patience = LONG
    names = ("ready*", "heard*")  # two signals at once would be one
    with stopped_when(*(lambda name=name: len(list(tmp_path.glob(name))) == 2 for name in names)):
        assert running.run() == 3
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_signal_that_comes_while_a_process_is_started_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    born: list[subprocess.Popen[bytes]] = []

    class Birth(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            born.append(self)
            os.kill(os.getpid(), signal.SIGTERM)  # before the supervisor knows of this process

    monkeypatch.setattr(subprocess, "Popen", Birth)
    assert supervised("import time; time.sleep(600)").run() == 0
    assert born[0].poll() is not None


def test_process_that_does_not_end_is_killed_after_its_grace(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    running = supervised(f"{ignores}; open({str(ready)!r}, 'w'); time.sleep(600)")
    running._patience = 0.5
    with stopped_when(ready.exists):
        assert running.run() == signal.SIGKILL


def test_process_that_cannot_live_is_restarted_with_growing_pauses(
    log: CapturedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE", 0.4)
    monkeypatch.setattr(supervisor, "_LIVED_LONG", 3600.0)
    running = supervised("raise SystemExit(1)")
    pauses: list[float] = []

    def died_often() -> bool:
        died = len(log.of("worker.died"))  # before the pause, which is changed before a death is logged
        pauses.append(running._places[0].pause)
        return died >= 4

    with stopped_when(died_often):
        running.run()
    assert pauses[-1] == 0.4
    assert "ended with code 1" in log.of("worker.died")[0].getMessage()


def test_process_that_cannot_be_started_now_ends_no_other(log: CapturedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    popen, refusals = subprocess.Popen, [BlockingIOError("no more processes")]

    def scarce(*arguments: Any, **options: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return popen(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", scarce)
    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE", 0.1)
    assert supervised("", 2).run() == 0
    assert len(log.of("worker.not_started")) == 1
