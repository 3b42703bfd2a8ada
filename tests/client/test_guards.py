"""Defects that a worker had once: lanes that slept, settlements that affected others, messages that were lost."""

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any
from uuid import UUID

import psycopg
import pydantic
import pytest
from psycopg import errors

from bartleby import AlreadyHandled, Bartleby, Message, Retry, Snooze, heartbeat, outcomes, supervisor
from bartleby.holding import Holding
from bartleby.worker import Worker
from tests.kit.guards import BOTH, Conn, endless, handled_by, make_solo, refused
from tests.kit.worker import Told, drain, lapse, row, state, until, working

# Lanes that fall asleep


def test_lane_whose_waiting_messages_were_put_back_claims_again(app: Bartleby, conn: Conn) -> None:
    """At one start in seconds nothing runs most of the time, so no end of a handler starts the next claim."""
    seen: list[object] = []
    alone = threading.Event()
    handled_by(app, lambda message: seen.append(message.payload), awaited=True, rate=0.4)

    @app.handler("others")
    async def other(message: Message) -> None:
        alone.set()

    make_solo(app, conn, "others")
    app.send_many("orders", [{"payload": number} for number in range(3)])
    with working(app):
        until(lambda: len(seen) == 2 and state(conn)[1] == 1)  # the third waits for its turn
        app.client.resume_queue("others")
        assert alone.wait(30)
        until(lambda: len(seen) == 3)


def test_lane_whose_waiting_messages_lost_their_lease_claims_again(app: Bartleby, conn: Conn) -> None:
    seen: list[object] = []
    handled_by(app, lambda message: seen.append(message.payload), awaited=False, rate=0.4, lease=9)
    app.send_many("orders", [{"payload": number} for number in range(3)])
    with working(app):
        until(lambda: len(seen) == 2 and state(conn)[1] == 1)
        lapse(conn)
        until(lambda: len(seen) == 3)
    assert seen == [0, 1, 2]


# Settlements that the database refuses


@pytest.mark.own_database
def test_refused_settlement_does_not_block_later_ones(app: Bartleby, conn: Conn, told: Told) -> None:
    seen: list[object] = []
    handled_by(app, lambda message: seen.append(message.payload), awaited=False, rate=10, concurrency=1, lease=1)
    with working(app) as running:
        app.send("orders", "first")  # so that it claims ahead
        until(lambda: running.worker.counts["done"] == 1)
        with refused(conn):
            app.send_many("orders", [{"payload": number} for number in range(10)])
            until(lambda: told.of("settlement.impossible"))
        until(lambda: running.worker.counts["done"] == 11, 60)
    assert set(map(str, seen)) == {"first", *map(str, range(10))}
    assert state(conn) == (0, 0, 0, 0)


@pytest.mark.own_database
@BOTH
def test_refused_settlement_cancels_the_handlers_of_its_lease(
    app: Bartleby, conn: Conn, told: Told, awaited: bool
) -> None:
    """The lease is not renewed any more, so their results could not be settled either."""
    cancelled = threading.Event()
    app.handler("orders", concurrency=2)(endless(cancelled, awaited=awaited))
    app.send_many("orders", [{"payload": "quick"}, {"payload": "endless"}])
    with refused(conn), working(app) as running:
        until(lambda: told.of("settlement.impossible"))
        assert cancelled.wait(30)
        until(lambda: running.worker.running == 0)
    assert len(told.of("lease.lost")) == 1


def test_delay_of_thousands_of_years_becomes_a_hundred(app: Bartleby, conn: Conn, told: Told) -> None:
    def handle(message: Message) -> object:
        later, seconds = message.payload
        return Snooze(seconds) if later == "snooze" else Retry(after=seconds)

    handled_by(app, handle, awaited=True)
    app.send_many("orders", [{"payload": [later, far]} for later in ("snooze", "retry") for far in (3000, 1e12)])
    counts = drain(app)
    assert (sum(counts.values()), counts["refused"]) == (4, 0)
    assert not told.of("settlement.impossible")
    assert state(conn) == (0, 0, 4, 0)
    waits = "select run_at - now() > interval '90 years' from bartleby.deferred order by run_at"
    assert [far for (far,) in conn.execute(waits)] == [False, False, True, True]


@pytest.mark.parametrize("later", [Snooze, lambda seconds: Retry(after=seconds)], ids=["snooze", "retry"])
def test_settlement_that_is_refused_does_not_affect_others(
    app: Bartleby, conn: Conn, told: Told, monkeypatch: pytest.MonkeyPatch, later: Callable[[float], object]
) -> None:
    monkeypatch.setattr(outcomes, "_CENTURY", float("inf"))  # the worker believes that the core takes any delay
    together = threading.Barrier(4)

    def handle(message: Message) -> object:
        together.wait(30)  # so that they are settled together
        return later(1e12 if message.payload == "bad" else 3000)

    handled_by(app, handle, awaited=False, concurrency=4)
    app.send_many("orders", [{"payload": payload} for payload in (0, 1, "bad", 3)])
    with working(app):
        until(lambda: told.of("settlement.refused"))
        assert state(conn) == (0, 1, 3, 0)
    assert [record.fields["messages"] for record in told.of("settlement.refused")] == [1]  # type: ignore[attr-defined]
    assert not told.of("settlement.impossible")


@pytest.mark.own_database
def test_breaker_that_cannot_be_opened_prevents_no_settlement(app: Bartleby, conn: Conn, told: Told) -> None:
    conn.execute(
        "create or replace function bartleby.open_breaker(p_queue text, p_cause text, p_over interval) returns boolean"
        " language plpgsql as $$ begin raise exception 'no' using errcode = 'XX000'; end $$"
    )

    def handle(message: Message) -> None:
        raise ConnectionError

    handled_by(app, handle, awaited=True, retry={"max_attempts": 1})
    app.send_many("orders", [{"payload": number} for number in range(20)])
    assert drain(app) == {"dead": 20}
    assert told.of("breaker.failed")
    assert not told.of("settlement.impossible")
    assert state(conn) == (0, 0, 0, 20)


# The event loop and the heartbeat


def test_handler_that_blocks_the_loop_is_logged_once(app: Bartleby, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_STUCK", 2.0)
    watch, free = heartbeat.Heartbeat._watch_loop, threading.Event()
    beats: list[None] = []

    def counted(self: heartbeat.Heartbeat) -> None:
        watch(self)
        beats.append(None)

    monkeypatch.setattr(heartbeat.Heartbeat, "_watch_loop", counted)

    @app.handler("orders", concurrency=1)
    async def handle(message: Message) -> None:
        free.wait(message.payload)

    with Told.listening() as told, working(app) as running:
        app.send("orders", 0.01)
        until(lambda: running.worker.counts["done"] == 1)
        assert not told.of("loop.blocked")
        app.send("orders", 60)
        until(lambda: told.of("loop.blocked"))
        beats.clear()
        until(lambda: len(beats) >= 2)
        free.set()
        until(lambda: running.worker.counts["done"] == 2)
        (record,) = told.of("loop.blocked")
    assert "declare it with def, or await" in record.getMessage()


def test_heartbeat_survives_its_own_failures(
    app: Bartleby, conn: Conn, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew, faults = heartbeat.Heartbeat._renew, [RuntimeError("cannot be"), MemoryError()]
    go, seen = threading.Event(), []

    async def faulty(self: heartbeat.Heartbeat, *arguments: Any) -> None:
        if faults and self._held:
            raise faults.pop()
        await renew(self, *arguments)

    @app.handler("orders", lease=4)
    def handle(message: Message) -> None:
        seen.append(message.attempt)
        go.wait(60)

    def lapses() -> Any:
        return row(conn, "select until from bartleby.lease where not isempty(pending)")

    monkeypatch.setattr(heartbeat.Heartbeat, "_renew", faulty)
    app.send("orders", 1)
    with working(app) as running:
        first = until(lapses)
        until(lambda: len(told.of("heartbeat.failed")) == 2)
        second = until(lambda: (found := lapses()) > first and found)
        until(lambda: lapses() > second)
        go.set()
        until(lambda: running.worker.counts["done"] == 1)
    assert seen == [1]
    assert not told.of("lease.lost")


# Messages that have to run alone


def test_many_solo_messages_empty_the_process_once(app: Bartleby, conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[str] = []
    pause = Holding.pause

    def counted(self: Holding, why: str) -> None:
        pauses.append(why)
        pause(self, why)

    monkeypatch.setattr(Holding, "pause", counted)
    seen: list[bool] = []
    handled_by(app, lambda message: seen.append(message.solo), awaited=True)
    make_solo(app, conn, "orders", 30)
    app.client.resume_queue("orders")
    assert drain(app) == {"done": 30}
    assert seen == [True] * 30
    assert sum("alone" in why for why in pauses) <= 3


def test_message_that_snoozed_alone_runs_beside_others_again(app: Bartleby, conn: Conn) -> None:
    seen: list[bool] = []

    def handle(message: Message) -> object:
        seen.append(message.solo)
        return Snooze(0.01) if len(seen) < 4 else None

    handled_by(app, handle, awaited=True)
    make_solo(app, conn, "orders")
    app.client.resume_queue("orders")
    drain(app)
    assert seen == [True, False, False, False]


def test_message_that_could_not_run_alone_still_has_to(app: Bartleby, conn: Conn) -> None:
    """It was put back before it began, so nothing is known about it."""
    go, started, ran = threading.Event(), threading.Event(), threading.Event()

    @app.handler("slow")
    def slow(message: Message) -> None:
        started.set()
        go.wait(60)

    @app.handler("orders")
    async def handle(message: Message) -> None:
        ran.set()

    app.client.create_queue("slow")
    app.send("slow", 1)
    sent = make_solo(app, conn, "orders")
    with working(app) as running:
        assert started.wait(30)
        app.client.resume_queue("orders")
        until(lambda: state(conn)[1] == 1)
        running.stop()
        until(lambda: state(conn)[1] == 0)
        go.set()
        running.join()
    assert not ran.is_set()
    found = app.client.find_message(sent)
    assert found is not None
    assert (found.solo, found.attempts) == (True, 0)
    assert row(conn, "select run_at <= now() from bartleby.deferred")  # another worker may have it at once


# Batches and marks


def test_message_that_was_handled_before_does_not_make_its_batch_done(app: Bartleby, conn: Conn, dsn: str) -> None:
    conn.execute("create table effect (id bigint primary key)")

    @app.handler("orders", batch=10)
    async def handle(messages: list[Message]) -> dict[int, None]:
        async with await psycopg.AsyncConnection.connect(dsn) as mine:
            for message in messages:
                await app.amark_handled(message, mine)
                await mine.execute("insert into effect values (%s)", [message.id])
        return dict.fromkeys(message.id for message in messages)

    sent = list(app.send_many("orders", [{"payload": number} for number in range(10)]))
    before = sent[4], sent[7]
    for each in before:
        assert row(conn, "select bartleby.mark_handled('orders', 'orders', %s)", f"id:{each}")
    counts = drain(app)
    assert (counts["done"], counts["retried"], counts["dead"]) == (10, 0, 0)
    assert {each for (each,) in conn.execute("select id from effect")} == set(sent) - set(before)
    assert row(conn, "select count(*) from bartleby.attempts") == 0
    assert state(conn) == (0, 0, 0, 0)


def test_already_handled_of_no_message_of_the_batch_fails_it(app: Bartleby, conn: Conn) -> None:
    errors = [AlreadyHandled("of another queue", message_id=1 << 40), AlreadyHandled()]

    @app.handler("orders", batch=3, retry={"max_attempts": 1})
    def handle(messages: list[Message]) -> None:
        raise errors.pop()

    for dead in (3, 6):
        app.send_many("orders", [{"payload": number} for number in range(3)])
        assert drain(app) == {"dead": 3}
        assert state(conn) == (0, 0, 0, dead)
    said = conn.execute("select distinct error like '%not of a message in it%' from bartleby.dead_letters").fetchall()
    assert (said, errors) == ([(True,)], [])


def test_exception_group_of_only_already_handled_is_done(app: Bartleby) -> None:
    inner = ExceptionGroup("inner", [AlreadyHandled()])
    cases: dict[str, tuple[list[Exception], str]] = {
        "one": ([AlreadyHandled()], "done"),
        "nested": ([AlreadyHandled(), inner], "done"),
        "mixed": ([AlreadyHandled(), ValueError()], "dead"),
    }
    for queue, (leaves, outcome) in cases.items():

        def handle(message: Message, leaves: Sequence[Exception] = leaves) -> None:
            raise ExceptionGroup("of a task group", leaves)

        app.handler(queue, retry={"max_attempts": 1})(lambda message, handle=handle: handle(message))
        app.client.create_queue(queue)
        app.send(queue, 1)
        assert drain(app, queues=[queue]) == {outcome: 1}, queue


# Handlers and payloads


def test_queues_of_a_worker_may_be_a_generator(app: Bartleby) -> None:
    seen: list[object] = []
    for queue in ("orders", "others"):
        app.handler(queue)(lambda message: seen.append(message.queue))
    app.client.create_queue("others")
    for queue in ("orders", "others"):
        app.send(queue, 1)
    assert drain(app, queues=(each for each in ["orders"])) == {"done": 1}
    assert seen == ["orders"]
    assert [each.queue for each in Worker(app, queues=iter(["others"]))._handlers] == ["others"]


def test_second_parameter_gets_the_message_though_it_has_a_default(app: Bartleby) -> None:
    seen: list[Message | None] = []

    @app.handler("orders")
    def plain(order: int, message: Message = None) -> None:  # type: ignore[assignment]
        seen.append(message)

    @app.handler("others")
    def union(order: int, message: Message | None = None) -> None:
        seen.append(message)

    app.client.create_queue("others")
    sent = {app.send(queue, 7) for queue in ("orders", "others")}
    assert drain(app) == {"done": 2}
    assert {each and each.id for each in seen} == sent


class Kind(Enum):
    PARCEL = "parcel"


class Strict(pydantic.BaseModel, strict=True):
    id: UUID
    kind: Kind
    sent: datetime
    sizes: tuple[int, int]


def test_strict_model_accepts_values_in_json_form(app: Bartleby, conn: Conn) -> None:
    seen: list[Strict] = []

    @app.handler("orders")
    def handle(parcel: Strict) -> None:
        seen.append(parcel)

    app.send("orders", {"id": str(UUID(int=1)), "kind": "parcel", "sent": "2026-01-02T03:04:05Z", "sizes": [1, 2]})
    app.send("orders", {"id": str(UUID(int=1)), "kind": "parcel", "sent": "2026-01-02T03:04:05Z", "sizes": ["1", 2]})
    assert drain(app) == {"done": 1, "dead": 1}
    assert (seen[0].kind, seen[0].sizes) == (Kind.PARCEL, (1, 2))
    assert row(conn, "select error from bartleby.dead_letters").startswith("payload.sizes[0]: ")


@dataclass
class Add:
    left: "Add | Mul | int"


@dataclass
class Mul:
    left: "Add | Mul | int"


def test_payload_with_exponentially_many_readings_is_refused(app: Bartleby, conn: Conn) -> None:
    @app.handler("orders")
    async def handle(formula: Add) -> None: ...

    payload: object = "no number"
    for _ in range(100):
        payload = {"left": payload}
    app.send("orders", payload)
    assert drain(app) == {"dead": 1}
    assert row(conn, "select reason from bartleby.dead_letters") == "unacceptable"


def test_resources_that_a_query_of_the_message_uses_up_are_charged(app: Bartleby, conn: Conn) -> None:
    def handle(message: Message) -> None:
        error = errors.OutOfMemory if message.payload else errors.ConfigurationLimitExceeded
        raise error("temporary file size exceeds temp_file_limit")

    handled_by(app, handle, awaited=True, retry={"max_attempts": 2, "backoff": "none"})
    app.send_many("orders", [{"payload": 0}, {"payload": 1}])
    assert drain(app) == {"retried": 2, "dead": 2}
    assert row(conn, "select count(*) from bartleby.attempts") == 4


# Logs


def test_text_of_an_exception_cannot_forge_a_log_line(app: Bartleby, told: Told) -> None:
    def handle(message: Message) -> None:
        raise ValueError("two\nlines and \x1b[31mcolour")

    handled_by(app, handle, awaited=False, retry={"max_attempts": 1})
    app.send("orders", 1)
    drain(app)
    (record,) = told.of("message.dead")
    assert record.getMessage().isprintable()


def test_messages_that_are_released_together_are_logged_together(app: Bartleby, told: Told) -> None:
    handled_by(app, lambda _: Snooze(3000, "not today"), awaited=True)
    app.send_many("orders", [{"payload": number} for number in range(50)])
    assert drain(app) == {"released": 50}
    lines = told.of("message.released")
    assert sum(record.fields["messages"] for record in lines) == 50  # type: ignore[attr-defined]
    assert len(lines) < 10


def test_until_idle_does_not_log_at_every_look_that_a_breaker_is_open(app: Bartleby, told: Told) -> None:
    app.handler("orders")(print)
    tries: list[int] = []

    @app.handler("others", retry={"base": 0.3, "backoff": "fixed"})
    async def retried(message: Message) -> None:
        tries.append(message.id)
        if len(tries) < 3:
            raise ValueError

    app.client.create_queue("others")
    app.send("orders", 1)
    app.send("others", 1)
    app.client.force_breaker("orders", actor="me", reason="a test")
    assert drain(app) == {"retried": 2, "done": 1}
    # once, and perhaps again after each claim; it looked dozens of times
    assert 1 <= len(told.of("worker.gave_up")) < 10


# Processes


def test_child_that_cannot_be_started_now_does_not_end_the_others(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    popen, refusals = subprocess.Popen, [BlockingIOError("no more processes")]

    def scarce(*arguments: Any, **options: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return popen(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", scarce)
    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE", 0.1)
    made = supervisor.Supervisor([sys.executable, "-c", ""], {}, 2, 1.0)
    assert made.run() == 0
    assert len(told.of("worker.not_started")) == 1
