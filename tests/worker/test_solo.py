"""The solo lane: a message that may have killed a worker runs when nothing else is in its process."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from bartleby import Bartleby, Client, Message, holding
from bartleby.heartbeat import Heartbeat
from bartleby.threads import ThreadLane
from tests.kit.worker import (
    LONG,
    Conn,
    Gate,
    Told,
    claim_ahead,
    drain,
    handler_of,
    lapse,
    renew_now,
    row,
    state,
    until,
    working,
)

BOTH = pytest.mark.parametrize("awaited", [False, True])


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solo message waits as long as a busy machine needs, unless the test says otherwise."""
    monkeypatch.setattr(holding, "_PATIENT", LONG)
    monkeypatch.setattr(holding, "_PUT_BACK_EVERY", 3600.0)


def send_solo(app: Bartleby, conn: Conn, queue: str, count: int = 1) -> list[int]:
    """Send messages whose first worker dies, so that they come back marked solo; the queue is paused then."""
    app.client.create_queue(queue)
    sent: list[int] = list(app.send_many(queue, [{"payload": "solo"}] * count))
    with Client(app.settings.dsn) as victim:
        lease = victim.claim(queue, "victim", limit=count)
        assert lease is not None
        assert len(lease) == count
    lapse(conn)
    app.client.pause_queue(queue)
    for each in sent:
        found = app.client.find_message(each)
        assert found is not None
        assert (found.solo, found.attempts) == (True, 0)
    return sent


class Floor:
    """Records which messages are inside handlers at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.inside: list[object] = []
        self.beside_solo: list[list[object]] = []

    @contextlib.contextmanager
    def entered(self, message: Message) -> Iterator[None]:
        name = "solo" if message.solo else message.payload
        with self._lock:
            if message.solo or "solo" in self.inside:
                self.beside_solo.append([name, *self.inside])
            self.inside.append(name)
        try:
            yield
        finally:
            with self._lock:
                self.inside.remove(name)


@pytest.mark.parametrize("queue", ["threads", "coroutines"])
def test_solo_message_runs_alone_among_busy_lanes(app: Bartleby, conn: Conn, queue: str) -> None:
    floor = Floor()

    @app.handler("threads", concurrency=4)
    def handle(message: Message) -> None:
        with floor.entered(message):
            time.sleep(0.005)

    @app.handler("coroutines", concurrency=20)
    async def handle_awaited(message: Message) -> None:
        with floor.entered(message):
            await asyncio.sleep(0.005)

    solo = send_solo(app, conn, queue, 3)
    app.client.resume_queue(queue)
    for each in ("threads", "coroutines"):
        app.client.create_queue(each)
        app.send_many(each, [{"payload": number} for number in range(60)])
    assert drain(app)["done"] == 123
    assert floor.beside_solo == [["solo"]] * 3
    for message_id in solo:
        assert [each.outcome for each in app.client.attempts(message_id)] == ["lost"]
    assert state(conn, "threads") == state(conn, "coroutines") == (0, 0, 0, 0)


def test_neighbours_that_have_not_started_are_released_uncharged(app: Bartleby, conn: Conn, told: Told) -> None:
    gate = Gate()
    app.handler("orders", concurrency=2)(gate.handler(awaited=False))
    floor = Floor()

    @app.handler("others")
    async def other(message: Message) -> None:
        with floor.entered(message):
            await asyncio.sleep(0)

    send_solo(app, conn, "others")
    with working(app) as running:
        claim_ahead(running)
        app.send_many("orders", [{"payload": number} for number in range(30)])
        gate.wait_for_start(2)
        until(lambda: state(conn, "orders")[1] > 2)
        app.client.resume_queue("others")
        until(lambda: state(conn, "orders")[1] == 2)
        assert not floor.beside_solo
        gate.open()
        until(lambda: running.worker.counts["done"] == 31)
    assert floor.beside_solo == [["solo"]]
    assert row(conn, "select count(*) from bartleby.attempts") == 1, "that of the victim"
    assert "run alone" in told.of("message.released")[0].getMessage()


@BOTH
def test_solo_message_that_fails_is_retried_like_any_other(app: Bartleby, conn: Conn, awaited: bool) -> None:
    def fail_twice(message: Message) -> None:
        if message.attempt < 3:
            raise ValueError

    app.handler("orders", retry={"backoff": "none"})(handler_of(fail_twice, awaited=awaited))
    (sent,) = send_solo(app, conn, "orders")
    app.client.resume_queue("orders")
    assert drain(app) == {"retried": 2, "done": 1}
    assert [each.outcome for each in app.client.attempts(sent)] == ["lost", "failed", "failed"]


@BOTH
def test_solo_message_that_loses_its_lease_frees_the_worker(app: Bartleby, conn: Conn, awaited: bool) -> None:
    runs: list[object] = []

    def is_first(message: Message) -> bool:
        runs.append(message.payload)
        return len(runs) == 1

    gate = Gate(is_first)
    app.handler("orders", lease=600)(gate.handler(awaited=awaited))
    send_solo(app, conn, "orders")
    app.client.resume_queue("orders")
    with working(app) as running:
        gate.wait_for_start()
        app.send_many("orders", [{"payload": number} for number in range(10)])
        lapse(conn)
        renew_now(running)
        assert gate.cancelled.wait(LONG)
        until(lambda: running.worker.counts["done"] == 11)


@pytest.mark.parametrize("end", ["stop", "lapse"])
def test_solo_message_is_not_charged_while_it_waits_for_its_turn(app: Bartleby, conn: Conn, end: str) -> None:
    """It waits for another handler of its process: the worker is stopped, or both leases lapse."""
    gate = Gate()
    app.handler("slow")(gate.handler(awaited=False))
    app.handler("orders", lease=600)(handler_of(lambda _: None, awaited=True))
    app.client.create_queue("slow")
    app.send("slow", 1)
    (sent,) = send_solo(app, conn, "orders")
    with working(app) as running:
        gate.wait_for_start()
        app.client.resume_queue("orders")
        until(lambda: state(conn, "orders")[1] == 1)
        app.client.pause_queue("orders")
        if end == "stop":
            running.stop()
            until(lambda: state(conn, "orders")[1] == 0)
        else:
            lapse(conn)
        gate.open()
        counts = running.join() if end == "stop" else running.end()
    if end == "stop":
        assert counts == {"done": 1, "released": 1}
    lost = 1 if end == "stop" else 2
    assert [(each.outcome, each.verdict) for each in app.client.attempts(sent)] == [("lost", "retry")] * lost
    found = app.client.find_message(sent)
    assert found is not None
    assert (found.attempts, found.crashes) == (0, 0)


def test_solo_message_whose_lease_was_given_up_while_it_waited_does_not_start(
    app: Bartleby, conn: Conn, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker could not renew the lease, and so will not run it: it must not report its start."""

    async def renew_nothing(*_: object) -> None: ...

    monkeypatch.setattr(Heartbeat, "_renew", renew_nothing)
    gate, ran = Gate(lambda message: message.payload == 1), list[int]()
    app.handler("slow", lease=600)(gate.handler(awaited=False))
    app.handler("orders", lease=600)(handler_of(lambda message: ran.append(message.id), awaited=True))
    app.client.create_queue("slow")
    app.send("slow", 1)
    (sent,) = send_solo(app, conn, "orders")
    with working(app) as running:
        gate.wait_for_start()
        app.client.resume_queue("orders")
        until(lambda: row(conn, "select count(*) from bartleby.lease where unconfirmed") == 1)
        app.client.pause_queue("orders")
        (waiting,) = until(lambda: [held for held in running.worker._shared.holding.leases.values() if held.solo])
        waiting.deadline = 0.0  # the database does not know yet that it is given up
        until(lambda: told.of("lease.lost"))
        gate.open()
        app.send("slow", 2)
        until(lambda: running.worker.counts["done"] == 2)  # the turn of the one that has to run alone is over
        lapse(conn)
        running.end()
    assert not ran
    assert [(each.outcome, each.verdict) for each in app.client.attempts(sent)] == [("lost", "retry")] * 2
    found = app.client.find_message(sent)
    assert found is not None
    assert (found.attempts, found.crashes) == (0, 0)


def test_endless_handler_beside_a_solo_message_does_not_stop_other_queues(
    app: Bartleby, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "_PATIENT", 0.1)
    gate = Gate()
    app.handler("endless")(gate.handler(awaited=False))
    for queue in ("solos", "orders"):
        app.handler(queue)(handler_of(lambda _: None, awaited=True))
    for queue in ("endless", "orders"):
        app.client.create_queue(queue)
    app.send("endless", 1)
    send_solo(app, conn, "solos")
    with working(app) as running:
        gate.wait_for_start()
        app.client.resume_queue("solos")
        until(lambda: state(conn, "solos")[1] == 1 or running.worker.counts["released"])
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

    send_solo(app, conn, "orders", 2)
    app.client.resume_queue("orders")
    with working(app) as running:
        assert inside.wait(LONG)
        lane = running.worker._shared.holding.lanes["orders"]
        assert isinstance(lane, ThreadLane)
        for run in lane._runs.values():
            run.began -= 3601
        until(lambda: running.worker.counts["dead"] == 1)
        # the other is settled or put back now, but not run beside the first
        until(lambda: running.worker.counts["done"] or running.worker.counts["released"])
        stuck.release()
    assert not beside.is_set()
