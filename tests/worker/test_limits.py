"""Attempts end: workers that die, servers that die, and errors that only look like an outage."""

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest

from bartleby import Bartleby, Message, link, pooling
from bartleby.calls import Call
from bartleby.held import Held
from bartleby.holding import Holding
from bartleby.link import Link
from tests.kit import worker as kit
from tests.kit.own_server import OwnServer
from tests.kit.sql import value
from tests.kit.worker import BOTH, CapturedLog, Conn, Gate, Program, handler_of, numbered, state, until, working

APP = """
import os
from bartleby import Bartleby

app = Bartleby()
note = os.open("notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

@app.handler("orders", concurrency={concurrency}, retry={retry})
{kind} handle(message):
    os.write(note, f"{{message.payload}}\\n".encode())
    if message.payload == "kill":
        os._exit(9)
"""


SLOW = """
@app.handler("slow", concurrency=2)
def wait(message):
    import time
    os.write(note, f"{message.payload}\\n".encode())
    time.sleep(600)
"""

# by whom a message may start how often; a queue's own limit of 3 holds for one that is alone in its lease
LIMITS = [("queue", 1), ("handler", 1), ("message", 1), ("record_starts", 3), ("queue", 3)]


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_message_that_kills_its_worker_is_started_no_more_often_than_its_limit(
    app: Bartleby, conn: Conn, tmp_path: Path, kind: str, limit: tuple[str, int]
) -> None:
    """It was claimed together with others, where its start is recorded; none of them is charged."""
    by, most = limit
    dsn = kit.present(app.settings.dsn)
    retry = {"backoff": "none"} | ({"max_attempts": most} if by == "handler" else {})
    (tmp_path / "shop.py").write_text(APP.format(retry=retry, kind=kind, concurrency=1))
    policy = {"backoff": "none", "crash_budget": 9, "max_attempts": most if by in {"queue", "record_starts"} else 5}
    app.client.create_queue("orders", {**policy, "record_starts": by == "record_starts"})
    sent = app.send("orders", "kill", max_attempts=most if by == "message" else None)
    others = 0 if limit == ("queue", 3) else 3
    app.client.send_many("orders", numbered(others))
    for _ in range(most):
        with Program(dsn, "shop:app", cwd=tmp_path) as program:
            assert program.end() == 9
        kit.lapse(conn)
    with Program(dsn, "shop:app", "--until-idle", cwd=tmp_path) as program:
        assert program.end() == 0
    runs = (tmp_path / "notes").read_text().split()
    assert runs.count("kill") == most
    assert sorted(each for each in runs if each != "kill") == [str(number) for number in range(others)]
    assert state(conn) == (0, 0, 0, 1)
    letter = kit.present(app.client.dead_letter(sent))
    assert (letter.reason, letter.attempts) == ("crashed", most)
    assert {each.outcome for each in app.client.attempts(sent)} == {"crashed"}


def test_message_beside_the_one_that_kills_the_worker_is_not_charged(
    app: Bartleby, conn: Conn, dsn: str, tmp_path: Path
) -> None:
    """In a quiet queue each has a lease of its own."""
    (tmp_path / "shop.py").write_text(APP.format(retry={}, kind="def", concurrency=2) + SLOW)
    app.client.create_queue("orders", {"crash_budget": 1})
    app.client.create_queue("slow", {"crash_budget": 1})
    innocent = app.send("slow", "innocent")
    with Program(dsn, "shop:app", cwd=tmp_path) as program:
        until(lambda: (tmp_path / "notes").exists() and "innocent" in (tmp_path / "notes").read_text())
        guilty = app.send("orders", "kill")
        assert program.end() == 9
    kit.lapse(conn)
    for message_id in (innocent, guilty):
        assert [each.outcome for each in app.client.attempts(message_id)] == ["lost"]
        assert kit.present(app.client.find_message(message_id)).solo


@BOTH
def test_message_of_a_claim_whose_answer_was_lost_is_not_charged(
    app: Bartleby, conn: Conn, monkeypatch: pytest.MonkeyPatch, awaited: bool
) -> None:
    plain, lost = Link.run, list[int]()

    async def run(self: Link, call: Call[Any]) -> Any:
        answer = await plain(self, call)
        if "bartleby.claim(" in call.text and answer is not None and not lost:
            lost.append(answer.id)
            raise psycopg.OperationalError("the connection is lost")
        return answer

    monkeypatch.setattr(Link, "run", run)
    app.handler("orders", lease=600)(handler_of(lambda _: None, awaited=awaited))
    sent = app.send("orders", 1)
    with working(app) as running:
        until(lambda: running.worker.counts["done"])
    assert lost
    assert app.client.attempts(sent) == []


@pytest.fixture
def slow_start(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Starts are recorded only when the second event is set; the first says that one is to be."""
    plain, asked, go = Holding.begin, threading.Event(), threading.Event()

    async def begin(self: Holding, held: Held, positions: Sequence[int] | None = None) -> bool:
        asked.set()
        await asyncio.to_thread(go.wait, kit.LONG)
        return await plain(self, held, positions)

    monkeypatch.setattr(Holding, "begin", begin)
    return asked, go


def test_time_of_a_handler_begins_after_its_start_was_recorded(
    app: Bartleby, slow_start: tuple[threading.Event, threading.Event]
) -> None:
    asked, go = slow_start
    app.handler("orders", timeout=3600, retry={"max_attempts": 1})(handler_of(lambda _: None, awaited=False))
    app.send("orders", 1)
    with working(app) as running:
        assert asked.wait(kit.LONG)
        kit.time_out(running)
        running.wait_for_loop()
        go.set()
        until(lambda: running.worker.counts["done"])
        assert running.end() == {"done": 1}


def test_lease_that_is_lost_while_a_start_is_recorded_stops_only_its_message(
    app: Bartleby, conn: Conn, log: CapturedLog, slow_start: tuple[threading.Event, threading.Event]
) -> None:
    asked, go = slow_start
    app.handler("orders", lease=600, retry={"max_attempts": 1})(handler_of(lambda _: None, awaited=False))
    app.send("orders", 1)
    with working(app) as running:
        assert asked.wait(kit.LONG)
        kit.lapse(conn)
        kit.renew_now(running.worker)
        until(lambda: log.of("lease.lost"))
        go.set()
        app.send_many("orders", numbered(20))
        until(lambda: running.worker.counts["done"] == 21)
        assert running.end()["done"] == 21


def end_own_session(dsn: str) -> None:
    """What an administrator, a timeout of a pooler or a bug does to one session of a handler."""
    with psycopg.connect(dsn) as own:
        own.execute("select pg_terminate_backend(pg_backend_pid())")


@BOTH
def test_trouble_of_the_server_that_only_the_handler_sees_is_charged(
    app: Bartleby, conn: Conn, dsn: str, awaited: bool
) -> None:
    app.client.create_queue("orders", {"max_attempts": 2, "backoff": "none", "breaker": "off"})
    app.handler("orders")(handler_of(lambda _: end_own_session(dsn), awaited=awaited))
    sent = app.send("orders", 1)
    assert kit.drain(app) == {"retried": 1, "dead": 1}
    attempts = app.client.attempts(sent)
    assert [each.outcome for each in attempts] == ["failed", "failed"]
    rule = "psycopg.errors.AdminShutdown (SQLSTATE 57P01) is trouble of a database server, but Bartleby's own has none"
    assert attempts[1].rule == f"{rule}; attempt 2 of 2"


def test_trouble_that_bartleby_has_too_is_released_and_in_the_ledger(app: Bartleby, conn: Conn, dsn: str) -> None:
    gate = Gate(kit.first_only())

    @app.handler("orders", retry={"max_attempts": 1})
    def handle(message: Message) -> None:
        gate.handler(awaited=False)(message)
        if value(conn, "select count(*) from bartleby.attempts") == 0:
            end_own_session(dsn)

    sent = app.send("orders", 1)
    with working(app) as running:
        gate.wait_for_start()
        conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'bartleby settles'"
        )
        gate.open()
        until(lambda: running.worker.counts["done"])
    (released,) = app.client.attempts(sent)
    assert (released.outcome, released.verdict, released.attempt) == ("released", "retry", 1)
    assert (released.rule or "").endswith("and Bartleby's own has it too; not charged: release 1 of 10")


def test_trouble_that_bartleby_has_only_when_it_settles_is_its_own_as_well(
    app: Bartleby, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk takes looks, and no writes."""
    plain, full = pooling.async_rows, [True]

    async def async_rows(connection: Any, text: LiteralString, parameters: tuple[object, ...]) -> Any:
        if full and "bartleby.fail(" in text:
            full.clear()
            raise psycopg.errors.DiskFull("could not extend file")
        return await plain(connection, text, parameters)

    monkeypatch.setattr(link, "async_rows", async_rows)
    first = kit.first_only()

    @app.handler("orders", retry={"max_attempts": 1})
    async def handle(message: Message) -> None:
        if first(message):
            raise psycopg.errors.DiskFull("could not extend file")

    sent = app.send("orders", 1)
    with working(app) as running:
        until(lambda: running.worker.counts["done"])
    assert [each.outcome for each in app.client.attempts(sent)] == ["released"]


async def ask_again_and_again(asked: Link, call: Call[str]) -> None:
    while True:
        await asked.run(call)


async def test_claims_wait_for_the_disk_after_trouble(app: Bartleby, conn: Conn) -> None:
    """Else a crash of the server would undo the claim of a message that crashes it, every time, and leave no trace."""
    claims = Link(app.settings, "claims")
    call = Call("select 'waits'", (), lambda rows: rows[0][0], relaxed="select 'does not wait'")
    assert await claims.run(call) == "does not wait"
    conn.execute("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'bartleby claims'")
    with pytest.raises(psycopg.OperationalError):
        await ask_again_and_again(claims, call)
    assert await claims.run(call) == "waits"
    await claims.close()


def test_message_whose_statement_crashes_the_server_becomes_a_dead_letter(scratch: Path) -> None:
    with OwnServer(scratch, {"fsync": "off"}) as server:
        app, starts = Bartleby(server.dsn), list[int]()
        app.client.create_queue("orders", {"max_attempts": 3, "backoff": "none", "breaker": "off"})

        @app.handler("orders", lease=1)
        def handle(message: Message) -> None:
            starts.append(message.id)
            with psycopg.connect(server.dsn) as own:
                os.kill(own.info.backend_pid, signal.SIGKILL)  # as a bug of an extension does
                own.execute("select pg_sleep(60)")

        sent = app.send("orders", 1)
        with working(app):

            def dead() -> bool:
                try:
                    with server.connect() as conn:
                        return bool(value(conn, "select count(*) from bartleby.dead_letters") == 1)
                except psycopg.OperationalError:
                    return False

            until(dead)
        attempts = app.client.attempts(sent)
        assert len(starts) <= 1 + 3, attempts
        assert [(each.verdict, each.outcome in {"failed", "crashed", "lost"}) for each in attempts][-1] == (
            "dead",
            True,
        )
