"""A whole worker: what it claims and how much, when it is idle, how it keeps its leases and loses them."""

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import psycopg
import pytest

from bartleby import Bartleby, Client, Message, Snooze, UnknownQueue, calls, fetching, heartbeat, holding
from bartleby.calls import Call
from bartleby.link import Link
from bartleby.waking import Listener
from bartleby.worker import Worker
from tests.kit.worker import (
    LONG,
    Conn,
    Gate,
    Running,
    Told,
    claim_ahead,
    drain,
    handler_of,
    lapse,
    renew_now,
    row,
    sessions,
    state,
    until,
    working,
)

BOTH = pytest.mark.parametrize("awaited", [False, True])


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"payload": number} for number in range(count)]


# Queues


@pytest.mark.own_database
def test_missing_queue_is_created_by_a_worker_that_may_do_so(app: Bartleby, conn: Conn, dsn: str, told: Told) -> None:
    conn.execute("create role worker_only login password 'x' in role bartleby_worker")
    try:
        limited = Bartleby(dsn.replace(dsn.partition("//")[2].partition("@")[0], "worker_only:x"))
        for each in (app, limited):
            each.handler("mails")(lambda _: None)
        with pytest.raises(UnknownQueue, match="may not create it") as caught:
            drain(limited)
        assert "bartleby queues create mails" in (caught.value.hint or "")
        assert drain(app) == {}
        assert told.of("queue.created")
        app.send("mails", 1)
        assert drain(limited) == {"done": 1}
    finally:
        conn.execute("drop owned by worker_only; drop role worker_only")


def test_queues_do_not_wait_for_each_other(app: Bartleby) -> None:
    gate = Gate()
    app.handler("slow")(gate.handler(awaited=False))
    app.handler("quick")(handler_of(lambda _: None, awaited=True))
    for queue in ("slow", "quick"):
        app.client.create_queue(queue)
    app.send_many("slow", numbered(30))
    with working(app) as running:
        gate.wait_for_start()
        app.send_many("quick", numbered(100))
        until(lambda: running.worker.counts["done"] == 100)
        gate.open()
        until(lambda: running.worker.counts["done"] == 130)


def test_idle_worker_is_woken_by_a_message_and_when_one_is_due(app: Bartleby, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sleeps for an hour otherwise."""
    idle = calls.idle
    monkeypatch.setattr(fetching, "_LONGEST_SLEEP", 3600.0)
    monkeypatch.setattr(calls, "idle", lambda queue, _: idle(queue, 3600))
    seen: list[object] = []

    @app.handler("orders")
    async def handle(message: Message) -> object:
        seen.append(message.payload)
        return Snooze(0.3) if seen.count("snooze") == 1 else None

    with working(app, poll=3600) as running:
        until(lambda: running.worker._shared.listener.listening)
        for number in range(1, 5):
            app.send("orders", number)
            until(lambda: running.worker.counts["done"] == number)  # noqa: B023 - at once
        app.send("orders", "snooze")
        until(lambda: running.worker.counts["done"] == 5)
    assert seen == [1, 2, 3, 4, "snooze", "snooze"]


# Until idle


def test_until_idle_waits_for_what_is_due_soon_and_not_for_tomorrow(app: Bartleby, conn: Conn) -> None:
    seen: list[object] = []

    @app.handler("orders", retry={"backoff": "fixed", "base": 0.6})
    async def handle(message: Message) -> None:
        seen.append((message.payload, message.attempt))
        if message.attempt == 1:
            raise ValueError

    app.send("orders", "now")
    app.send("orders", "tomorrow", delay=86400)
    assert drain(app) == {"retried": 1, "done": 1}
    assert seen == [("now", 1), ("now", 2)]
    assert state(conn) == (0, 0, 1, 0)


def test_until_idle_waits_for_what_a_running_handler_sends(app: Bartleby, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both queues were found empty, more than once, while the handler ran."""
    plain, looks = Link.run, Counter[Any]()

    async def run(self: Link, call: Call[Any]) -> Any:
        answer = await plain(self, call)
        looks[call.parameters[0] if "bartleby.idle(" in call.text else None] += 1
        return answer

    def wait_for_looks() -> None:
        before = looks.copy()
        until(lambda: all(looks[queue] > before[queue] + 1 for queue in ("orders", "parcels")))

    @app.handler("orders")
    def order(message: Message) -> None:
        wait_for_looks()
        monkeypatch.setattr(fetching, "_LOOK_EVERY", 2.0)
        wait_for_looks()
        app.send("parcels", 1)

    app.handler("parcels")(handler_of(lambda _: None, awaited=True))
    app.client.create_queue("parcels")
    app.send("orders", 1)
    monkeypatch.setattr(Link, "run", run)
    monkeypatch.setattr(Listener, "run", deaf)
    monkeypatch.setattr(fetching, "_LOOK_EVERY", 0.02)
    assert Running(Worker(app, until_idle=True, poll=5)).join() == {"done": 2}


async def deaf(_listener: Listener) -> None:
    await asyncio.Event().wait()


def test_until_idle_sees_what_is_sent_while_it_looks_at_a_queue(app: Bartleby, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queue parcels was just found empty when a message of queue orders runs and sends to it."""
    plain, looked = Link.run, False
    app.handler("orders")(handler_of(lambda message: app.send("parcels", message.payload), awaited=False))
    app.handler("parcels")(handler_of(lambda _: None, awaited=True))
    for queue in ("orders", "parcels"):
        app.client.create_queue(queue)
    worker = Worker(app, until_idle=True, poll=5)

    async def run(self: Link, call: Call[Any]) -> Any:
        nonlocal looked
        if "outlook" in call.text and call.parameters == ("parcels",) and not looked:
            looked = True
            await asyncio.to_thread(app.send, "orders", 1)
            while not (worker.counts["done"] == 1 and "orders" in worker._shared.idle):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return await plain(self, call)

    monkeypatch.setattr(Link, "run", run)
    monkeypatch.setattr(Listener, "run", deaf)
    assert Running(worker).join() == {"done": 2}


def test_until_idle_does_not_wait_for_what_it_cannot_run(app: Bartleby, conn: Conn) -> None:
    for queue in ("paused", "forced", "newer", "leased"):
        app.handler(queue)(print)
        app.client.create_queue(queue)
        for delay in (None, 0.01):
            app.send(queue, 1, delay=delay, generation=7 if queue == "newer" else None)
    app.client.pause_queue("paused")
    app.client.force_breaker("forced", actor="me", reason="test")
    until(lambda: (app.client.claim("leased", "another", limit=10), state(conn, "leased")[1])[1] == 2)
    assert drain(app)["done"] == 0


# How much it claims


@BOTH
def test_first_claim_takes_no_more_than_can_run(app: Bartleby, conn: Conn, awaited: bool) -> None:
    gate = Gate()
    app.handler("orders", concurrency=3)(gate.handler(awaited=awaited))
    app.send_many("orders", numbered(50))
    with working(app) as running:
        gate.wait_for_start(3)
        assert state(conn) == (47, 3, 0, 0)
        gate.open()
        until(lambda: running.worker.counts["done"] == 50)


@BOTH
def test_slow_message_does_not_hold_back_the_acks_of_others(app: Bartleby, conn: Conn, awaited: bool) -> None:
    gate = Gate(lambda message: message.payload == 0)
    app.handler("orders", concurrency=5)(gate.handler(awaited=awaited))
    app.send_many("orders", numbered(5))
    with working(app) as running:
        until(lambda: state(conn) == (0, 1, 0, 0))
        gate.open()
        until(lambda: running.worker.counts["done"] == 5)


# Leases


@BOTH
def test_lease_is_renewed_while_handlers_keep_the_worker_busy(
    app: Bartleby, conn: Conn, told: Told, monkeypatch: pytest.MonkeyPatch, *, awaited: bool
) -> None:
    """An async handler blocks the event loop, plain ones compete for the interpreter."""
    monkeypatch.setattr(heartbeat, "_STUCK", 0.5)
    busy, enough = threading.Semaphore(0), threading.Event()

    def spin(_: Message) -> None:
        busy.release()
        while not enough.is_set():
            sum(range(1000))

    async def block(_: Message) -> None:
        busy.release()
        enough.wait(LONG)

    app.handler("orders", lease=600, concurrency=2)(block if awaited else spin)
    app.send_many("orders", numbered(1 if awaited else 2))
    ends = "select min(until) from bartleby.lease where not isempty(pending)"
    with working(app) as running:
        for _ in range(1 if awaited else 2):
            assert busy.acquire(timeout=LONG)
        for _ in range(2):
            before = row(conn, ends)
            renew_now(running)
            until(lambda: row(conn, ends) > before)  # noqa: B023 - at once
        if awaited:
            until(lambda: told.of("loop.blocked"))
        enough.set()
        until(lambda: running.worker.counts["done"] == (1 if awaited else 2))
    assert row(conn, "select count(*) from bartleby.attempts") == 0


@BOTH
def test_handler_that_lost_its_lease_is_cancelled(app: Bartleby, conn: Conn, told: Told, awaited: bool) -> None:
    runs: list[int] = []

    def is_first(message: Message) -> bool:
        runs.append(message.attempt)
        return len(runs) == 1

    gate = Gate(is_first)
    app.handler("orders", lease=600)(gate.handler(awaited=awaited))
    sent = app.send("orders", 1)
    with working(app) as running:
        gate.wait_for_start()
        lapse(conn)
        renew_now(running)
        assert gate.cancelled.wait(LONG)
        until(lambda: running.worker.counts["done"] == 1)
        assert running.end() == {"done": 1}
    assert told.of("lease.lost")
    assert [(each.outcome, each.verdict) for each in app.client.attempts(sent)] == [("lost", "retry")]
    assert state(conn) == (0, 0, 0, 0)


@BOTH
def test_handler_that_lost_its_lease_settles_nothing_of_the_next_owner(
    app: Bartleby, conn: Conn, told: Told, awaited: bool
) -> None:
    """The handler ignores its cancellation and ends, well or badly: the message belongs to another worker."""
    gate = Gate(stubborn=True)

    def end_badly(message: Message) -> None:
        gate.handler(awaited=False)(message)
        raise ValueError

    app.handler("orders", lease=600, concurrency=1)(gate.handler(awaited=True) if awaited else end_badly)
    sent = app.send("orders", 1)
    with working(app) as running, Client(app.settings.dsn) as other:
        gate.wait_for_start()
        app.client.pause_queue("orders")
        lapse(conn)
        app.client.resume_queue("orders")
        lease = until(lambda: other.claim("orders", "the next owner", lease=600))
        assert lease is not None
        renew_now(running)
        until(lambda: told.of("lease.lost"))
        gate.open()
        running.end()
        assert running.worker.counts["done"] == running.worker.counts["dead"] == running.worker.counts["retried"] == 0
        assert state(conn) == (0, 1, 0, 0)
        assert other.ack(lease.id) == 1
    assert [each.outcome for each in app.client.attempts(sent)] == ["lost"]


def test_late_result_is_refused_and_counted(app: Bartleby, conn: Conn, told: Told) -> None:
    """The lease was lost before the heartbeat could know: the database refuses the settlement."""

    @app.handler("orders")
    async def handle(message: Message) -> None:
        # in this order: a claim may be under way, and must not find it
        app.client.pause_queue("orders")
        lapse(conn)

    app.send("orders", 1)
    with working(app) as running:
        until(lambda: running.worker.counts["refused"])
        running.end()
    assert running.worker.counts == {"refused": 1}
    assert told.of("settlement.refused")
    assert row(conn, "select count(*) from bartleby.messages") == 1


def test_lease_of_the_handler_goes_before_that_of_the_queue(app: Bartleby) -> None:
    lengths: dict[str, float] = {}
    query = "select extract(epoch from leased_until - bartleby.clock())::float8 from bartleby.messages where queue = %s"

    def look(message: Message) -> None:
        with psycopg.connect(str(app.settings.dsn)) as mine:
            lengths[message.queue] = float(row(mine, query, message.queue))

    app.handler("orders")(look)
    app.handler("parcels", lease=400)(look)
    for queue in ("orders", "parcels"):
        app.client.create_queue(queue, {"lease": 1000})
        app.send(queue, 1)
    assert drain(app) == {"done": 2}
    assert 600 < lengths["orders"] <= 1000
    assert 0 < lengths["parcels"] <= 400


# Once


def test_message_that_was_handled_before_is_acked_without_running(app: Bartleby) -> None:
    ran: list[int] = []

    @app.handler("orders", once=True)
    def handle(message: Message) -> None:
        ran.append(message.id)
        with psycopg.connect(str(app.settings.dsn)) as mine:
            app.mark_handled(message, mine)

    sent = app.send_many("orders", numbered(4))
    with psycopg.connect(str(app.settings.dsn)) as mine:
        for message_id in sent[:2]:
            mine.execute("select bartleby.mark_handled('orders', 'orders', %s)", [f"id:{message_id}"])
    assert drain(app) == {"done": 4}
    assert sorted(ran) == sent[2:]


@pytest.mark.own_database
def test_messages_are_released_if_the_look_at_what_was_handled_fails(app: Bartleby, conn: Conn) -> None:
    ran: list[int] = []
    app.handler("orders", once=True)(handler_of(lambda message: ran.append(message.id), awaited=True))
    sent = app.send_many("orders", numbered(3))
    conn.execute("alter function bartleby.handled_keys(text, text[]) rename to handled_keys_away")
    conn.execute("""create function bartleby.handled_keys(text, text[]) returns setof text language plpgsql as $$ begin
        raise exception 'could not extend file' using errcode = '53100'; end $$""")
    with working(app) as running:
        until(lambda: running.worker.counts["released"] >= 3)
        assert not ran
        conn.execute("drop function bartleby.handled_keys(text, text[])")
        conn.execute("alter function bartleby.handled_keys_away(text, text[]) rename to handled_keys")
        until(lambda: running.worker.counts["done"] == 3)
    assert sorted(ran) == sent
    assert not app.client.attempts(sent[0])


# Its own end


def test_worker_leaves_no_thread_and_no_session_behind(app: Bartleby, conn: Conn) -> None:
    app.handler("orders")(handler_of(lambda _: time.sleep(0.002), awaited=False))
    app.send_many("orders", numbered(50))
    app.client.close()
    before = threading.active_count()
    drain(app)
    until(lambda: threading.active_count() <= before)
    names = ("claims", "settles", "heartbeat", "listener", "janitor", "replays", "spool")
    until(lambda: not any(sessions(conn, name) for name in names))


@BOTH
def test_cancelled_run_starts_nothing_more(
    app: Bartleby, conn: Conn, monkeypatch: pytest.MonkeyPatch, awaited: bool
) -> None:
    """As by asyncio.wait_for: the leases lapse, but no handler goes on by itself."""
    monkeypatch.setattr(holding, "_PUT_BACK_EVERY", 3600.0)
    started: list[int] = []

    def holds(message: Message) -> bool:
        started.append(message.id)
        return True

    gate = Gate(holds)
    app.handler("orders", concurrency=2)(gate.handler(awaited=awaited))

    async def work() -> None:
        running = Running.__new__(Running)
        running.worker = Worker(app, poll=0.05)
        task = asyncio.create_task(running.worker.run())
        await asyncio.to_thread(claim_ahead, running)
        await asyncio.to_thread(app.send_many, "orders", numbered(20))
        await asyncio.to_thread(gate.wait_for_start, 2)
        await asyncio.to_thread(until, lambda: state(conn)[1] > 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()

    asyncio.run(work())
    until(lambda: not [each for each in threading.enumerate() if each.name == "bartleby-orders"])
    assert len(started) == 2
