"""Several processes under one: restarted when they die, told when it is over, and none left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import Bartleby
from bartleby.supervisor import Supervisor
from tests.kit.worker import Program, children_of, row, state, until

Conn = psycopg.Connection[tuple[Any, ...]]

SHOP = """
import os, signal, time
from bartleby import Bartleby

app = Bartleby()
note = os.open("notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

@app.handler("orders", concurrency=1)
def handle(message):
    os.write(note, f"{os.getpid()}\\n".encode())
    if message.payload == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if message.payload == "wait":
        while not os.path.exists("go"):
            time.sleep(0.01)
    else:
        time.sleep(message.payload)
"""


@pytest.fixture
def app(dsn: str) -> Iterator[Bartleby]:
    made = Bartleby(dsn)
    made.client.create_queue("orders")
    yield made
    made.client.close()


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def workers(shop: Path) -> list[int]:
    notes = shop / "notes"
    return [int(line) for line in notes.read_text().split()] if notes.exists() else []


def all_at_work(app: Bartleby, shop: Path, count: int) -> None:
    """Give each process a message that it cannot end before every other has one too."""
    before = len(workers(shop))
    app.client.send_many("orders", [{"payload": "wait"}] * count)
    until(lambda: len(set(workers(shop)[before:])) == count)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_processes_share_the_work_and_end_with_one_signal(app: Bartleby, conn: Conn, shop: Path, dsn: str) -> None:
    with Program(dsn, "shop:app", "--processes", "3", "--log", "json", cwd=shop) as program:
        program.wait_for("worker.started", 3)
        all_at_work(app, shop, 3)
        app.client.send_many("orders", [{"payload": 0.01}] * 27)
        (shop / "go").touch()
        until(lambda: len(workers(shop)) == 30)
        until(lambda: state(conn) == (0, 0, 0, 0))
        children = children_of(program.pid)
        assert set(workers(shop)) == set(children)
        program.term()
        assert program.end() == 0
        events = program.events()
    assert not any(alive(pid) for pid in children)
    stopped = [event for event in events if event["event"] == "worker.stopped"]
    assert sum(event["done"] for event in stopped) == 30
    assert len(stopped) == 3


@pytest.mark.parametrize("order", [signal.SIGTERM, signal.SIGINT])
def test_what_runs_in_the_children_is_finished(
    app: Bartleby, conn: Conn, shop: Path, dsn: str, order: signal.Signals
) -> None:
    with Program(dsn, "shop:app", "--processes", "2", cwd=shop) as program:
        program.wait_for("worker.started", 2)
        all_at_work(app, shop, 2)
        os.kill(program.pid, order)
        program.wait_for("finishing 1 running handlers", 2)
        (shop / "go").touch()
        assert program.end() == 0
    assert state(conn) == (0, 0, 0, 0)


def test_a_second_signal_reaches_the_children_too(app: Bartleby, conn: Conn, shop: Path, dsn: str) -> None:
    with Program(dsn, "shop:app", "--processes", "2", "--grace", "60", cwd=shop) as program:
        program.wait_for("worker.started", 2)
        all_at_work(app, shop, 2)
        program.term()
        program.wait_for("finishing 1 running handlers", 2)  # two signals at once would be one
        assert program.process.poll() is None
        program.term()
        assert program.end() == 0
    assert state(conn)[1] == 0
    assert row(conn, "select count(*) from bartleby.attempts where outcome <> 'lost'") == 0


def test_a_child_that_dies_is_started_again(app: Bartleby, conn: Conn, shop: Path, dsn: str) -> None:
    with Program(dsn, "shop:app", "--processes", "2", cwd=shop) as program:
        program.wait_for("worker.started", 2)
        before = children_of(program.pid)
        os.kill(before[0], signal.SIGKILL)
        program.wait_for("worker.died")
        program.wait_for("worker.started", 3)
        after = children_of(program.pid)
        assert len(after) == 2
        assert before[1] in after
        assert before[0] not in after
        assert "was killed by SIGKILL" in program.text()
        all_at_work(app, shop, 2)
        assert set(workers(shop)) == set(after)
        (shop / "go").touch()
        until(lambda: state(conn) == (0, 0, 0, 0))
        program.term()
        assert program.end() == 0


def test_a_message_that_kills_costs_its_workers_and_no_neighbour(
    app: Bartleby, conn: Conn, shop: Path, dsn: str
) -> None:
    app.client.configure_queue("orders", {"crash_budget": 2, "lease": 2})
    deadly = app.client.send("orders", "die")
    app.client.send_many("orders", [{"payload": 0.01}] * 20)
    with Program(dsn, "shop:app", "--processes", "2", cwd=shop) as program:
        until(lambda: app.client.dead_letter(deadly), 60)
        until(lambda: state(conn)[:3] == (0, 0, 0), 30)
        program.term()
        assert program.end() == 0
        deaths = program.text().count("worker.died")
    assert deaths <= 3, program.text()
    letter = app.client.dead_letter(deadly)
    assert letter is not None
    assert (letter.reason, letter.crashes) == ("crashed", 2)
    assert state(conn) == (0, 0, 0, 1)


def test_until_idle_ends_when_all_children_have(app: Bartleby, conn: Conn, shop: Path, dsn: str) -> None:
    app.client.send_many("orders", [{"payload": 0.01}] * 40)
    with Program(dsn, "shop:app", "--processes", "2", "--until-idle", cwd=shop) as program:
        assert program.end() == 0
    assert len(workers(shop)) == 40
    assert state(conn) == (0, 0, 0, 0)


def test_children_do_not_outlive_a_supervisor_that_was_killed(app: Bartleby, shop: Path, dsn: str) -> None:
    with Program(dsn, "shop:app", "--processes", "2", cwd=shop) as program:
        program.wait_for("worker.started", 2)
        children = children_of(program.pid)
        program.process.kill()
        until(lambda: not any(alive(pid) for pid in children))


# The supervisor alone


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({ready!r}, 'w'); time.sleep(60)"


def test_the_worst_code_of_the_children_is_the_code_of_all(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys, time
try:
    os.mkdir({str(tmp_path / "first")!r})
    code = 0
except FileExistsError:
    code = 3
signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
open({str(tmp_path)!r} + "/ready" + str(os.getpid()), "w").close()
time.sleep(60)
"""
    stopper = threading.Thread(target=stop_when, args=(lambda: len(list(tmp_path.glob("ready*"))) == 2,))
    stopper.start()
    assert Supervisor(python(code), os.environ, 2, 1.0).run() == 3
    stopper.join()


def stop_when(condition: Callable[[], object]) -> None:
    until(condition)
    os.kill(os.getpid(), signal.SIGTERM)


def test_an_order_to_stop_while_a_child_is_being_born_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    born: list[subprocess.Popen[bytes]] = []

    class Birth(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            born.append(self)
            os.kill(os.getpid(), signal.SIGTERM)  # before anybody knows of this child

    monkeypatch.setattr(subprocess, "Popen", Birth)
    began = time.monotonic()
    code = Supervisor(python("import time; time.sleep(60)"), os.environ, 1, 1.0).run()
    assert time.monotonic() - began < 30
    assert code == 0
    assert born[0].poll() is not None


def test_a_child_that_will_not_end_is_killed_after_its_grace(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    running = Supervisor(python(IGNORES.format(ready=str(ready))), os.environ, 1, 0.1)
    running._patience = 0.5
    stopper = threading.Thread(target=stop_when, args=(ready.exists,))
    stopper.start()
    began = time.monotonic()
    code = running.run()
    stopper.join()
    assert time.monotonic() - began < 30
    assert code != 0


def test_signals_are_as_before_when_it_is_over() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    Supervisor(python("pass"), os.environ, 1, 1.0).run()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_child_that_cannot_live_is_not_started_in_a_tight_circle(tmp_path: Path) -> None:
    file = tmp_path / "starts"
    file.touch()
    code = f"open({str(file)!r}, 'a').write('x'); raise SystemExit(1)"
    stopper = threading.Thread(target=stop_when, args=(lambda: len(file.read_text()) >= 5,))
    stopper.start()
    began = time.monotonic()
    Supervisor(python(code), os.environ, 1, 1.0).run()
    stopper.join()
    assert time.monotonic() - began > 0.1 + 0.2 + 0.4 + 0.8
