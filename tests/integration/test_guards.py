"""Defects that a worker had once: a lane that sleeps for ever, a slot that is lost, a message that is done unseen."""

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import psycopg
import pytest

from bartleby import AlreadyHandled, Bartleby, Client, Message, Retry, Snooze, outcomes
from tests.integration.worker_kit import Told, drain, lapse, row, state, until, working

Conn = psycopg.Connection[tuple[Any, ...]]
BOTH = pytest.mark.parametrize("awaited", [False, True], ids=["def", "async def"])
LATER = pytest.mark.parametrize("later", [Snooze, lambda seconds: Retry(after=seconds)], ids=["snooze", "retry"])


@pytest.fixture
def app(dsn: str) -> Iterator[Bartleby]:
    made = Bartleby(dsn)
    made.client.create_queue("orders")
    yield made
    made.client.close()


@pytest.fixture
def told() -> Iterator[Told]:
    with Told.listening() as listening:
        yield listening


def make_solo(app: Bartleby, conn: Conn, queue: str) -> None:
    """Send a message whose first worker dies, so that it comes back to run alone; the queue is paused then."""
    app.client.create_queue(queue)
    app.send(queue, "solo")
    with Client(app.settings.dsn) as victim:
        assert victim.claim(queue, "victim") is not None
    lapse(conn)
    app.client.pause_queue(queue)


def handled_by(app: Bartleby, handle: Callable[[Message], object], *, awaited: bool, **options: Any) -> None:
    async def handle_awaited(message: Message) -> object:
        return handle(message)

    app.handler("orders", **options)(handle_awaited if awaited else handle)


def endless(cancelled: threading.Event, *, awaited: bool) -> Callable[[Message], Any]:
    """Return a handler that returns for 'quick', and for others never does unless it is cancelled."""

    def handle(message: Message) -> None:
        if message.payload == "quick":
            return
        try:
            while True:
                time.sleep(0.002)
        finally:
            cancelled.set()

    async def handle_awaited(message: Message) -> None:
        if message.payload == "quick":
            return
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    return handle_awaited if awaited else handle


@contextlib.contextmanager
def refused(conn: Conn, sqlstate: str = "XX000") -> Iterator[None]:
    """Let the server refuse every ack, in a way that trying again does not help."""
    conn.execute("alter function bartleby.ack(bigint, bigint[]) rename to ack_away")
    conn.execute(
        f"create function bartleby.ack(p_lease_id bigint, p_positions bigint[] default null) returns void language"
        f" plpgsql as $$ begin raise exception 'no' using errcode = '{sqlstate}'; end $$".encode()
    )
    try:
        yield
    finally:
        conn.execute("drop function bartleby.ack(bigint, bigint[])")
        conn.execute("alter function bartleby.ack_away(bigint, bigint[]) rename to ack")


# Lanes that fall asleep


@BOTH
def test_a_lane_whose_waiting_messages_were_put_back_claims_again(app: Bartleby, conn: Conn, awaited: bool) -> None:
    """At one start a second nothing runs most of the time, so nothing ends either: nobody else looks for room."""
    seen: list[object] = []
    alone = threading.Event()
    handled_by(app, lambda message: seen.append(message.payload), awaited=awaited, rate=1)

    @app.handler("others")
    async def other(message: Message) -> None:
        alone.set()

    make_solo(app, conn, "others")
    app.send_many("orders", [{"payload": number} for number in range(3)])
    with working(app):
        until(lambda: len(seen) == 2 and state(conn)[1] == 1)  # the third waits for its turn
        app.client.resume_queue("others")
        assert alone.wait(5)
        until(lambda: len(seen) == 3, 6)


@BOTH
def test_a_lane_whose_waiting_messages_were_of_a_lost_lease_claims_again(
    app: Bartleby, conn: Conn, awaited: bool
) -> None:
    seen: list[object] = []
    handled_by(app, lambda message: seen.append(message.payload), awaited=awaited, rate=1, lease=0.6)
    app.send_many("orders", [{"payload": number} for number in range(3)])
    with working(app):
        until(lambda: len(seen) == 2 and state(conn)[1] == 1)
        lapse(conn)
        until(lambda: len(seen) == 3, 6)
    assert seen == [0, 1, 2]


# Settlements that the database refuses


@BOTH
def test_a_refused_settlement_does_not_block_what_waits_behind_it(
    app: Bartleby, conn: Conn, told: Told, awaited: bool
) -> None:
    seen: list[object] = []
    handled_by(app, lambda message: seen.append(message.payload), awaited=awaited, rate=3, lease=0.25)
    with working(app) as running:
        with refused(conn):
            app.send_many("orders", [{"payload": number} for number in range(3)])  # one lease, and the third waits
            until(lambda: told.of("settlement.impossible"))
        until(lambda: running.worker.counts["done"] == 3, 8)
    assert set(map(str, seen)) == {"0", "1", "2"}
    assert state(conn) == (0, 0, 0, 0)


@BOTH
def test_a_refused_settlement_cancels_the_handlers_of_its_lease(
    app: Bartleby, conn: Conn, told: Told, awaited: bool
) -> None:
    """Nobody renews it any more, so their results could not be settled either."""
    cancelled = threading.Event()
    app.handler("orders", concurrency=2)(endless(cancelled, awaited=awaited))
    app.send_many("orders", [{"payload": "quick"}, {"payload": "endless"}])
    with refused(conn), working(app) as running:
        until(lambda: told.of("settlement.impossible"))
        assert cancelled.wait(5)
        until(lambda: running.worker.running == 0)
    assert len(told.of("lease.lost")) == 1


# One bad settlement among others


@BOTH
@LATER
def test_a_delay_of_thousands_of_years_is_a_hundred(
    app: Bartleby, conn: Conn, told: Told, *, awaited: bool, later: Callable[[float], object]
) -> None:
    def handle(message: Message) -> object:
        return later(1e12 if message.payload == "bad" else 3000)

    handled_by(app, handle, awaited=awaited)
    app.send_many("orders", [{"payload": payload} for payload in (0, 1, "bad", 3)])
    counts = drain(app)
    assert sum(counts.values()) == 4
    assert counts["refused"] == 0
    assert not told.of("settlement.impossible")
    assert state(conn) == (0, 0, 4, 0)
    waits = "select run_at - now() > interval '90 years' from bartleby.deferred order by run_at"
    assert [far for (far,) in conn.execute(waits)] == [False, False, False, True]


@BOTH
@LATER
def test_a_settlement_that_cannot_be_taken_costs_no_other_its_own(
    app: Bartleby, conn: Conn, told: Told, monkeypatch: pytest.MonkeyPatch, *, awaited: bool, later: Any
) -> None:
    monkeypatch.setattr(outcomes, "_CENTURY", float("inf"))  # the worker believes that the core takes any delay
    everybody = threading.Barrier(4)

    def handle(message: Message) -> object:
        if not awaited:
            everybody.wait(5)  # so that they are settled together
        return later(1e12 if message.payload == "bad" else 3000)

    handled_by(app, handle, awaited=awaited, concurrency=4)
    app.send_many("orders", [{"payload": payload} for payload in (0, 1, "bad", 3)])
    with working(app):
        until(lambda: told.of("settlement.refused"))
        assert state(conn) == (0, 1, 3, 0)
    assert [record.fields["messages"] for record in told.of("settlement.refused")] == [1]  # type: ignore[attr-defined]
    assert not told.of("settlement.impossible")


# Threads


class Django(ModuleType):
    """What a worker sees of Django when the application has imported it."""

    def __init__(self, close_old_connections: Callable[[], None]) -> None:
        super().__init__("django.db")
        self.close_old_connections = close_old_connections
        self.connections = SimpleNamespace(close_all=close_old_connections)


def test_a_django_that_is_not_configured_harms_nobody(
    app: Bartleby, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("settings are not configured")

    monkeypatch.setitem(sys.modules, "django.db", Django(fail))
    handled_by(app, lambda _: None, awaited=False)
    app.send_many("orders", [{"payload": number} for number in range(20)])
    assert drain(app) == {"done": 20}
    assert state(conn) == (0, 0, 0, 0)
    until(lambda: not [each for each in threading.enumerate() if each.name == "bartleby-orders"])


def test_a_timeout_is_kept_though_django_takes_its_time_before_the_handler_begins(
    app: Bartleby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "django.db", Django(lambda: time.sleep(0.05)))
    cancelled = threading.Event()
    app.handler("orders", timeout=0.2, retry={"max_attempts": 1})(endless(cancelled, awaited=False))
    app.send("orders", "endless")
    with working(app) as running:
        until(lambda: running.worker.counts["dead"] == 1, 5)
        assert cancelled.wait(5)


def test_a_thread_that_does_not_come_back_holds_up_neither_solo_messages_nor_the_end(app: Bartleby, conn: Conn) -> None:
    go, ran, alone = threading.Event(), threading.Semaphore(0), threading.Event()

    @app.handler("orders", timeout=0.1, retry={"max_attempts": 1}, concurrency=1)
    def stuck(message: Message) -> None:
        if message.payload == "stuck":
            go.wait()  # no exception gets in there
        ran.release()

    @app.handler("others")
    async def other(message: Message) -> None:
        alone.set()

    make_solo(app, conn, "others")
    app.send("orders", "stuck")
    try:
        with working(app, grace=60) as running:
            until(lambda: running.worker.counts["dead"] == 1)
            assert running.worker.running == 0
            app.client.resume_queue("others")
            assert alone.wait(5)  # and does not wait for a lease of 60 s
            until(lambda: running.worker.counts["done"] == 1)
            began = time.monotonic()
            running.end(10)
            assert time.monotonic() - began < 5  # nor for the grace
    finally:
        go.set()


def test_the_slot_of_a_thread_that_comes_back_late_is_used_again(app: Bartleby) -> None:
    go, ran = threading.Event(), threading.Semaphore(0)

    @app.handler("orders", timeout=0.1, retry={"max_attempts": 1}, concurrency=1)
    def handle(message: Message) -> None:
        if message.payload == "stuck":
            go.wait(10)
        ran.release()

    app.send("orders", "stuck")
    with working(app) as running:
        until(lambda: running.worker.counts["dead"] == 1)
        app.send("orders", "next")
        assert not ran.acquire(timeout=0.1)
        go.set()
        assert ran.acquire(timeout=5)
        until(lambda: running.worker.counts["done"] == 1)
        lane = running.worker._shared.holding.lanes["orders"]
        until(lambda: (lane.running, lane.stuck) == (0, 0))


# Batches


@BOTH
def test_one_message_that_was_handled_before_does_not_make_its_batch_done(
    app: Bartleby, conn: Conn, dsn: str, awaited: bool
) -> None:
    conn.execute("create table effect (id bigint primary key)")

    def handle(messages: list[Message]) -> None:
        with psycopg.connect(dsn) as mine:
            for message in messages:
                app.mark_handled(message, mine)
                mine.execute("insert into effect values (%s)", [message.id])

    async def handle_awaited(messages: list[Message]) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as mine:
            for message in messages:
                await app.amark_handled(message, mine)
                await mine.execute("insert into effect values (%s)", [message.id])

    def answered(messages: list[Message]) -> dict[int, None]:
        handle(messages)
        return dict.fromkeys(message.id for message in messages)

    async def answered_awaited(messages: list[Message]) -> dict[int, None]:
        await handle_awaited(messages)
        return dict.fromkeys(message.id for message in messages)

    app.handler("orders", batch=10)(answered_awaited if awaited else answered)
    sent = list(app.send_many("orders", [{"payload": number} for number in range(10)]))
    before = sent[4], sent[7]
    for each in before:
        assert row(conn, "select bartleby.mark_handled('orders', 'orders', %s)", f"id:{each}")
    counts = drain(app)
    assert counts["done"] == 10
    assert counts["retried"] == counts["dead"] == 0
    assert {each for (each,) in conn.execute("select id from effect")} == set(sent) - set(before)
    assert row(conn, "select count(*) from bartleby.attempts") == 0
    assert state(conn) == (0, 0, 0, 0)


@BOTH
def test_already_handled_of_nobody_in_a_batch_fails_it(app: Bartleby, conn: Conn, awaited: bool) -> None:
    def handle(messages: list[Message]) -> None:
        raise AlreadyHandled

    async def handle_awaited(messages: list[Message]) -> None:
        raise AlreadyHandled

    app.handler("orders", batch=3, retry={"max_attempts": 1})(handle_awaited if awaited else handle)
    app.send_many("orders", [{"payload": number} for number in range(3)])
    assert drain(app) == {"dead": 3}
    assert "of which message" in row(conn, "select error from bartleby.dead_letters limit 1")
