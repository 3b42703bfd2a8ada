"""A whole worker: what it claims and how much, when it is idle, how it keeps its leases and loses them."""

import asyncio
import threading
from collections import Counter
from typing import Any

import pytest

from bartleby import Bartleby, BartlebyError, Message, Snooze, calls, fetching, heartbeat, holding, lanes, presence
from bartleby.calls import Call
from bartleby.link import Link
from bartleby.waking import Listener
from bartleby.worker import Worker
from tests.kit import worker as kit
from tests.kit.sql import value
from tests.kit.worker import BOTH, CapturedLog, Conn, Gate, drain, handler_of, lapse, numbered, state, until, working

# Queues


def test_slow_messages_do_not_delay_other_queues_or_acks(app: Bartleby, conn: Conn) -> None:
    gate = Gate(lambda message: message.payload == 0)
    app.handler("threads", concurrency=5)(gate.handler(awaited=False))
    app.handler("coroutines", concurrency=5)(gate.handler(awaited=True))
    for queue in ("threads", "coroutines"):
        app.client.create_queue(queue)
        app.send_many(queue, numbered(5))
    with working(app) as running:
        gate.wait_for_start(2)
        app.send_many("coroutines", numbered(100, 1))
        until(lambda: running.worker.counts["done"] == 108)
        until(lambda: state(conn, "threads") == state(conn, "coroutines") == (0, 1, 0, 0))
        gate.open()
        until(lambda: running.worker.counts["done"] == 110)


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


@pytest.mark.parametrize("end", ["put back", "lost"])
def test_lane_whose_waiting_messages_are_gone_claims_again(
    app: Bartleby, conn: Conn, log: CapturedLog, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """At a low rate nothing runs most of the time, so no end of a handler starts the next claim."""
    seen: list[object] = []
    turns = [0.0, 0.0]

    class Turns(lanes.Pace):
        def wait(self) -> float:
            return turns.pop() if turns else 0.01

    monkeypatch.setattr(lanes, "Pace", Turns)
    app.handler("orders", rate=0.4, lease=600)(handler_of(lambda message: seen.append(message.payload), awaited=True))
    app.handler("others")(handler_of(lambda _: None, awaited=True))
    kit.send_solo(app, conn, "others")
    app.send_many("orders", numbered(3))
    with working(app) as running:
        until(lambda: len(seen) == 2 and state(conn) == (0, 1, 0, 0))  # the third waits for its turn
        if end == "put back":
            app.client.resume_queue("others")
            until(lambda: running.worker.counts["done"] == 3)
        else:
            lapse(conn)
            kit.renew_now(running.worker)
            until(lambda: log.of("lease.lost"))
        turns.append(0.0)
        until(lambda: len(seen) == 3)
    assert seen == [0, 1, 2]


# Until idle


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
        monkeypatch.setattr(fetching, "_LOOK_EVERY", 0.2)
        wait_for_looks()
        app.send("parcels", 1)

    app.handler("parcels")(handler_of(lambda _: None, awaited=True))
    app.client.create_queue("parcels")
    app.send("orders", 1)
    monkeypatch.setattr(Link, "run", run)
    monkeypatch.setattr(Listener, "run", deaf)
    monkeypatch.setattr(fetching, "_LOOK_EVERY", 0.02)
    assert kit.Running(Worker(app, until_idle=True, poll=5)).join() == {"done": 2}


async def deaf(_listener: Listener) -> None:
    await asyncio.Event().wait()


def test_until_idle_sees_what_is_sent_while_it_looks_at_a_queue(app: Bartleby, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queue parcels was just found empty when a message of queue orders runs and sends to it."""
    plain, looked = Link.run, False
    app.handler("orders")(handler_of(lambda message: app.send("parcels", message.payload), awaited=False))
    app.handler("parcels")(handler_of(lambda _: None, awaited=True))
    app.client.create_queue("parcels")
    worker = Worker(app, until_idle=True, poll=5)

    async def run(self: Link, call: Call[Any]) -> Any:
        nonlocal looked
        if "outlook" in call.text and call.parameters[0] == "parcels" and not looked:
            looked = True
            await asyncio.to_thread(app.send, "orders", 1)
            while not (worker.counts["done"] == 1 and "orders" in worker._shared.idle):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return await plain(self, call)

    monkeypatch.setattr(Link, "run", run)
    monkeypatch.setattr(Listener, "run", deaf)
    assert kit.Running(worker).join() == {"done": 2}


def test_until_idle_does_not_wait_for_messages_it_cannot_run(
    app: Bartleby, conn: Conn, log: CapturedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_SOON", 3600.0)
    tries: list[int] = []

    def fail_twice(message: Message) -> None:
        tries.append(message.id)
        if len(tries) < 3:
            raise ValueError

    for queue, delay in (("paused", 0.01), ("forced", 0.01), ("newer", 3000), ("leased", 0.01)):
        app.handler(queue)(print)
        app.client.create_queue(queue)
        for each in (None, delay):
            app.send(queue, 1, delay=each, generation=7 if queue == "newer" else None)
    app.client.pause_queue("paused")
    app.client.force_breaker("forced", actor="me", reason="test")
    until(lambda: (app.client.claim("leased", "another", limit=10, lease=3600), state(conn, "leased")[1])[1] == 2)
    app.handler("orders", retry={"base": 0.3, "backoff": "fixed"})(handler_of(fail_twice, awaited=True))
    app.send("orders", 1)
    counts = drain(app)
    assert (counts["retried"], counts["done"]) == (2, 1)
    # once, and perhaps again after each claim; it looked dozens of times
    gave_up = [each for each in log.of("worker.gave_up") if each.fields["queue"] == "forced"]  # type: ignore[attr-defined]
    assert 1 <= len(gave_up) < 10


# Leases


@BOTH
def test_lease_is_renewed_while_handlers_keep_the_worker_busy(
    app: Bartleby, conn: Conn, log: CapturedLog, monkeypatch: pytest.MonkeyPatch, *, awaited: bool
) -> None:
    """An async handler blocks the event loop, which is logged once; plain ones compete for the interpreter."""
    monkeypatch.setattr(heartbeat, "_STUCK", 3600.0)  # a busy machine also delays the loop
    monkeypatch.setattr(presence, "EVERY", 0.05)
    busy, enough = threading.Semaphore(0), threading.Event()

    def spin(_: Message) -> None:
        busy.release()
        while not enough.is_set():
            sum(range(1000))

    async def block(_: Message) -> None:
        busy.release()
        enough.wait(kit.LONG)

    app.handler("orders", lease=600, concurrency=2)(block if awaited else spin)
    app.send_many("orders", numbered(1 if awaited else 2))
    ends = "select min(until) from bartleby.lease where not isempty(pending)"
    with working(app) as running:
        for _ in range(1 if awaited else 2):
            assert busy.acquire(timeout=kit.LONG)
        if awaited:
            monkeypatch.setattr(heartbeat, "_STUCK", 0.5)
            until(lambda: log.of("loop.blocked"))
            monkeypatch.setattr(heartbeat, "_STUCK", 3600.0)
        for _ in range(2):
            before = value(conn, ends)
            kit.renew_now(running.worker)
            until(lambda: value(conn, ends) > before)  # noqa: B023 - at once
        seen = until(app.client.workers)[0].seen_at
        until(lambda: app.client.workers()[0].seen_at > seen)
        enough.set()
        until(lambda: running.worker.counts["done"] == (1 if awaited else 2))
        blocked = [record.getMessage() for record in log.of("loop.blocked")]
        assert ["declare it with def, or await" in text for text in blocked] == [True] * awaited
    assert value(conn, "select count(*) from bartleby.attempts") == 0


def test_heartbeat_survives_its_own_failures(
    app: Bartleby, conn: Conn, log: CapturedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew, faults, gate = heartbeat.Heartbeat._renew, [RuntimeError("cannot be"), MemoryError()], Gate()

    async def faulty(self: heartbeat.Heartbeat, *arguments: Any) -> None:
        if faults and self._held:
            raise faults.pop()
        for held in self._held.values():
            held.extended = float("-inf")  # it is renewed at every beat
        await renew(self, *arguments)

    ends = "select until from bartleby.lease where not isempty(pending)"
    monkeypatch.setattr(heartbeat.Heartbeat, "_renew", faulty)
    app.handler("orders", lease=600)(gate.handler(awaited=False))
    app.send("orders", 1)
    with working(app) as running:
        until(lambda: len(log.of("heartbeat.failed")) == 2)
        for _ in range(2):
            before = value(conn, ends)
            until(lambda: value(conn, ends) > before)  # noqa: B023 - at once
        gate.open()
        until(lambda: running.worker.counts["done"] == 1)
    assert not log.of("lease.lost")


@BOTH
def test_handler_that_lost_its_lease_is_cancelled(app: Bartleby, conn: Conn, log: CapturedLog, awaited: bool) -> None:
    gate = Gate(kit.first_only())
    app.handler("orders", lease=600)(gate.handler(awaited=awaited))
    sent = app.send("orders", 1)
    with working(app) as running:
        gate.wait_for_start()
        lapse(conn)
        kit.renew_now(running.worker)
        assert gate.cancelled.wait(kit.LONG)
        until(lambda: running.worker.counts["done"] == 1)
        assert running.end() == {"done": 1}
    assert log.of("lease.lost")
    assert [(each.outcome, each.verdict) for each in app.client.attempts(sent)] == [("crashed", "retry")]
    assert state(conn) == (0, 0, 0, 0)


def test_late_result_is_refused_and_counted(app: Bartleby, conn: Conn, log: CapturedLog) -> None:
    """The lease was lost before the heartbeat could know: the database refuses the settlement."""

    @app.handler("orders", lease=600)
    async def handle(message: Message) -> None:
        # in this order: a claim may be under way, and must not find it
        app.client.pause_queue("orders")
        lapse(conn)

    app.send("orders", 1)
    with working(app) as running:
        until(lambda: running.worker.counts["refused"])
        running.end()
    assert running.worker.counts == {"refused": 1}
    assert log.of("settlement.refused")
    assert value(conn, "select count(*) from bartleby.messages") == 1


def test_lease_of_the_handler_takes_precedence_over_that_of_the_queue(app: Bartleby, conn: Conn) -> None:
    gate = Gate()
    app.handler("orders")(gate.handler(awaited=False))
    app.handler("parcels", lease=400)(gate.handler(awaited=True))
    for queue in ("orders", "parcels"):
        app.client.create_queue(queue, {"lease": 1000})
        app.send(queue, 1)
    query = "select extract(epoch from leased_until - bartleby.clock())::float8 from bartleby.messages order by queue"
    with working(app):
        gate.wait_for_start(2)
        orders, parcels = (seconds for (seconds,) in conn.execute(query))
        gate.open()
    assert 600 < orders <= 1000
    assert 0 < parcels <= 400


# Its own end


def test_worker_leaves_no_thread_and_no_session_behind(app: Bartleby, conn: Conn) -> None:
    app.handler("orders")(handler_of(lambda _: None, awaited=False))
    app.send_many("orders", numbered(50))
    app.client.close()
    before = threading.active_count()
    drain(app)
    names = ("claims", "settles", "heartbeat", "listener", "janitor", "replays")
    until(lambda: threading.active_count() <= before and not any(kit.sessions(conn, name) for name in names))
    app.handler("n" * 500)(print)
    with pytest.raises(BartlebyError, match="name"):
        drain(app)
    until(lambda: threading.active_count() <= before and not any(kit.sessions(conn, name) for name in names))


@BOTH
def test_cancelled_run_starts_nothing_more(
    app: Bartleby, conn: Conn, monkeypatch: pytest.MonkeyPatch, awaited: bool
) -> None:
    """As by asyncio.wait_for: the leases lapse, but no handler goes on by itself."""
    monkeypatch.setattr(holding, "_PUT_BACK_EVERY", 3600.0)
    gate = Gate()
    app.handler("orders", concurrency=2)(gate.handler(awaited=awaited))

    async def work() -> None:
        running = kit.Running.__new__(kit.Running)
        running.worker = Worker(app, poll=0.05)
        task = asyncio.create_task(running.worker.run())
        await asyncio.to_thread(kit.claim_ahead, running)
        await asyncio.to_thread(app.send_many, "orders", numbered(20))
        await asyncio.to_thread(gate.wait_for_start, 2)
        await asyncio.to_thread(until, lambda: state(conn)[1] > 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()

    asyncio.run(work())
    until(lambda: not [each for each in threading.enumerate() if each.name == "bartleby-orders"])
    assert not gate.another_started
