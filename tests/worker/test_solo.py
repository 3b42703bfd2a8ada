"""The solo lane: a message that may have killed a worker runs when nothing else is in its process."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from unittest import mock

import pytest

from bartleby import Bartleby, Message, Snooze, holding
from bartleby.heartbeat import Heartbeat
from bartleby.holding import Holding
from bartleby.threads import ThreadLane
from tests.kit import worker as kit
from tests.kit.sql import value
from tests.kit.worker import BOTH, Conn, Gate, drain, handler_of, numbered, state, until, working


@pytest.mark.parametrize("queue", ["threads", "coroutines"])
def test_solo_messages_run_alone_among_busy_lanes(
    app: Bartleby, conn: Conn, monkeypatch: pytest.MonkeyPatch, queue: str
) -> None:
    """One of them fails, one snoozes, and both run again beside others; many empty the process once, not once each."""
    monkeypatch.setattr(holding, "_PATIENT", 3600.0)
    monkeypatch.setattr(holding, "_ALONE_IN_A_ROW", 3600.0)
    inside, beside_solo, solo = list[object](), list[list[object]](), list[int]()

    @contextlib.contextmanager
    def entered(message: Message) -> Iterator[None]:
        name = "alone" if message.solo else message.payload
        inside.append(name)  # of two that enter at once, the second finds both
        if "alone" in inside:
            beside_solo.append(list(inside))
        yield
        inside.remove(name)

    @app.handler("threads", concurrency=4)
    def handle(message: Message) -> None:
        with entered(message):
            time.sleep(0.005)

    @app.handler("coroutines", concurrency=20, retry={"backoff": "none"})
    async def handle_awaited(message: Message) -> object:
        with entered(message):
            await asyncio.sleep(0.005)
        if message.id == solo[0] and message.attempt == 1:
            raise ValueError
        return Snooze(0.01) if message.id == solo[1] and message.solo else None

    solo += kit.send_solo(app, conn, queue, 12)
    app.client.resume_queue(queue)
    for each in ("threads", "coroutines"):
        app.client.create_queue(each)
        app.send_many(each, numbered(60))
    with mock.patch.object(Holding, "pause", autospec=True, side_effect=Holding.pause) as pause:
        assert drain(app)["done"] == 132
    assert beside_solo == [["alone"]] * 12
    assert sum("alone" in call.args[1] for call in pause.call_args_list) <= 4
    outcomes = [[each.outcome for each in app.client.attempts(message_id)] for message_id in solo]
    assert outcomes == [["lost"] + ["failed"] * (queue == "coroutines")] + [["lost"]] * 11
    assert state(conn, "threads") == state(conn, "coroutines") == (0, 0, 0, 0)


@BOTH
def test_solo_message_that_loses_its_lease_is_charged_and_frees_the_worker(
    app: Bartleby, conn: Conn, awaited: bool
) -> None:
    gate = Gate(kit.first_only())
    app.handler("orders", lease=600)(gate.handler(awaited=awaited))
    (sent,) = kit.send_solo(app, conn, "orders")
    app.client.resume_queue("orders")
    with working(app) as running:
        gate.wait_for_start()
        app.send_many("orders", numbered(10))
        kit.lapse(conn)
        kit.renew_now(running.worker)
        assert gate.cancelled.wait(kit.LONG)
        until(lambda: running.worker.counts["done"] == 11)
    assert [each.outcome for each in app.client.attempts(sent)] == ["lost", "crashed"]


@pytest.mark.parametrize("end", ["stop", "lapse", "given up"])
def test_solo_message_is_not_charged_while_it_waits_for_its_turn(  # noqa: PLR0915 - three ends of one story
    app: Bartleby, conn: Conn, log: kit.CapturedLog, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """It waits for another handler: the worker is stopped, the leases lapse, or its own cannot be renewed."""

    async def renew_nothing(*_: object) -> None: ...

    monkeypatch.setattr(Heartbeat, "_renew", renew_nothing)
    gate, ran = Gate(), list[int]()
    app.handler("slow", lease=600)(gate.handler(awaited=False))
    app.handler("orders", lease=600)(handler_of(lambda message: ran.append(message.id), awaited=True))
    app.client.create_queue("slow")
    app.send("slow", 1)
    (sent,) = kit.send_solo(app, conn, "orders")
    with working(app) as running:
        gate.wait_for_start()
        app.client.resume_queue("orders")
        until(lambda: value(conn, "select count(*) from bartleby.lease where solo") == 1)
        app.client.pause_queue("orders")
        if end == "stop":
            running.stop()
            until(lambda: state(conn, "orders")[1] == 0)
        elif end == "lapse":
            kit.lapse(conn)
        else:
            (waiting,) = until(lambda: [held for held in running.worker._shared.holding.leases.values() if held.solo])
            waiting.deadline = 0.0  # the database does not know yet that it is given up
            until(lambda: log.of("lease.lost"))
        gate.open()
        if end == "given up":
            app.send("slow", 2)
            until(lambda: running.worker.counts["done"] == 2)  # the turn of the one that has to run alone is over
            kit.lapse(conn)
        counts = running.join() if end == "stop" else running.end()
    if end == "stop":
        assert counts == {"done": 1, "released": 1}
        assert value(conn, "select run_at <= now() from bartleby.deferred")  # another worker may have it at once
    assert not ran
    lost = 1 if end == "stop" else 2
    assert [(each.outcome, each.verdict) for each in app.client.attempts(sent)] == [("lost", "retry")] * lost
    found = kit.present(app.client.find_message(sent))
    assert (found.solo, found.attempts, found.crashes) == (True, 0, 0)


def test_endless_handler_holds_up_a_solo_message_but_no_other_queue(
    app: Bartleby, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "_PATIENT", 0.1)
    gate, ran = Gate(), list[Message]()
    app.handler("endless")(gate.handler(awaited=False))
    app.handler("solos")(handler_of(ran.append, awaited=True))
    app.handler("orders")(handler_of(lambda _: None, awaited=True))
    for queue in ("endless", "orders"):
        app.client.create_queue(queue)
    app.send("endless", 1)
    kit.send_solo(app, conn, "solos")
    with working(app) as running:
        gate.wait_for_start()
        app.client.resume_queue("solos")
        until(lambda: running.worker.counts["released"] or ran)
        assert not ran
        app.send_many("orders", [{"payload": 1}] * 5)
        try:
            until(lambda: running.worker.counts["done"] >= 5)
        finally:
            gate.open()


def test_next_solo_message_does_not_run_beside_a_thread_that_was_left_behind(app: Bartleby, conn: Conn) -> None:
    """The first times out inside C: its message is settled, but its thread is still in the process."""
    stuck, inside, beside = threading.Lock(), threading.Event(), threading.Event()
    stuck.acquire()
    runs: list[int] = []

    @app.handler("orders", timeout=3600, retry={"max_attempts": 1})
    def handle(message: Message) -> None:
        runs.append(message.id)
        if len(runs) == 1:
            inside.set()
            stuck.acquire(timeout=60)
            inside.clear()
        elif inside.is_set():
            beside.set()

    kit.send_solo(app, conn, "orders", 2)
    app.client.resume_queue("orders")
    with working(app) as running:
        assert inside.wait(kit.LONG)
        lane = running.worker._shared.holding.lanes["orders"]
        assert isinstance(lane, ThreadLane)
        for run in lane._runs.values():
            run.began -= 3601
        until(lambda: running.worker.counts["dead"] == 1)
        # the other is settled or put back now, but not run beside the first
        until(lambda: running.worker.counts["done"] or running.worker.counts["released"])
        stuck.release()
    assert not beside.is_set()
