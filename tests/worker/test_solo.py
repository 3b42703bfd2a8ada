"""The solo lane: a message that may have killed a worker runs when nothing else is in its process."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from bartleby import Bartleby, Client, Message, holding
from bartleby.heartbeat import Heartbeat
from tests.kit.worker import Told, drain, lapse, row, state, until, working

Conn = psycopg.Connection[tuple[Any, ...]]
BOTH = pytest.mark.parametrize("awaited", [False, True])


@pytest.fixture
def app(dsn: str) -> Iterator[Bartleby]:
    made = Bartleby(dsn)
    yield made
    made.client.close()


def make_solo(app: Bartleby, conn: Conn, queue: str, count: int = 1) -> list[int]:
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
    """Who is inside a handler at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.inside: list[object] = []
        self.beside_solo: list[list[object]] = []
        self.ran: list[object] = []

    @contextlib.contextmanager
    def entered(self, message: Message) -> Iterator[None]:
        name = "solo" if message.solo else message.payload
        with self._lock:
            if message.solo or "solo" in self.inside:
                self.beside_solo.append([name, *self.inside])
            self.inside.append(name)
            self.ran.append(name)
        try:
            yield
        finally:
            with self._lock:
                self.inside.remove(name)


def busy_app(app: Bartleby, floor: Floor, seconds: float = 0.02) -> None:
    @app.handler("threads", concurrency=4)
    def handle(message: Message) -> None:
        with floor.entered(message):
            time.sleep(seconds)

    @app.handler("coroutines", concurrency=20)
    async def handle_awaited(message: Message) -> None:
        with floor.entered(message):
            await asyncio.sleep(seconds)


@pytest.mark.parametrize("queue", ["threads", "coroutines"])
def test_a_solo_message_runs_alone_though_both_kinds_of_lanes_are_busy(app: Bartleby, conn: Conn, queue: str) -> None:
    floor = Floor()
    busy_app(app, floor)
    solo = make_solo(app, conn, queue, 3)
    app.client.resume_queue(queue)
    for each in ("threads", "coroutines"):
        app.client.create_queue(each)
        app.send_many(each, [{"payload": number} for number in range(100)])
    counts = drain(app)
    assert counts["done"] == 203
    assert floor.ran.count("solo") == 3
    assert floor.beside_solo == [["solo"]] * 3
    for message_id in solo:
        assert app.client.find_message(message_id) is None
        assert [each.outcome for each in app.client.attempts(message_id)] == ["lost"]
    assert state(conn, "threads") == state(conn, "coroutines") == (0, 0, 0, 0)


def test_unstarted_neighbours_are_released_uncharged(
    app: Bartleby, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "_PUT_BACK_EVERY", 3600.0)
    started, go = threading.Semaphore(0), threading.Event()
    floor = Floor()

    @app.handler("orders", concurrency=2)
    def handle(message: Message) -> None:
        with floor.entered(message):
            if message.payload == "quick":
                return
            started.release()
            go.wait(60)

    @app.handler("others")
    async def other(message: Message) -> None:
        with floor.entered(message):
            await asyncio.sleep(0)

    app.client.create_queue("orders")
    make_solo(app, conn, "others")
    # quick ones first, so that the worker claims ahead
    app.send_many("orders", [{"payload": "quick"}] * 200)
    with working(app) as running, Told.listening() as told:
        until(lambda: running.worker.counts["done"] == 200)
        app.send_many("orders", [{"payload": number} for number in range(30)])
        assert started.acquire(timeout=30)
        assert started.acquire(timeout=30)
        until(lambda: state(conn, "orders")[1] > 2)
        app.client.resume_queue("others")
        until(lambda: told.of("message.released"))
        assert state(conn, "orders")[1] == 2 or until(lambda: state(conn, "orders")[1] == 2)
        assert not floor.beside_solo
        go.set()
        until(lambda: running.worker.counts["done"] == 231)
    assert floor.beside_solo == [["solo"]]
    assert row(conn, "select count(*) from bartleby.attempts") == 1  # that of the victim
    assert "run alone" in told.of("message.released")[0].getMessage()


@BOTH
def test_a_solo_message_that_fails_or_waits_is_treated_like_any_other(app: Bartleby, conn: Conn, awaited: bool) -> None:
    def handle(message: Message) -> None:
        if message.attempt < 3:
            raise ValueError

    async def handle_awaited(message: Message) -> None:
        if message.attempt < 3:
            raise ValueError

    app.handler("orders", retry={"backoff": "none"})(handle_awaited if awaited else handle)
    (sent,) = make_solo(app, conn, "orders")
    app.client.resume_queue("orders")
    assert drain(app) == {"retried": 2, "done": 1}
    assert [each.outcome for each in app.client.attempts(sent)] == ["lost", "failed", "failed"]


@BOTH
def test_a_solo_message_whose_lease_is_lost_frees_the_worker(app: Bartleby, conn: Conn, awaited: bool) -> None:
    started, cancelled = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        if message.payload != "solo" or started.is_set():
            return
        started.set()
        try:
            while True:
                time.sleep(0.002)
        finally:
            cancelled.set()

    async def handle_awaited(message: Message) -> None:
        if message.payload != "solo" or started.is_set():
            return
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    app.handler("orders", lease=3)(handle_awaited if awaited else handle)
    make_solo(app, conn, "orders")
    app.client.resume_queue("orders")
    with working(app) as running:
        assert started.wait(30)
        app.send_many("orders", [{"payload": number} for number in range(10)])
        lapse(conn)
        assert cancelled.wait(30)
        until(lambda: running.worker.counts["done"] == 11)


def test_a_solo_message_is_given_back_when_the_worker_stops(app: Bartleby, conn: Conn) -> None:
    started, go = threading.Event(), threading.Event()

    @app.handler("slow")
    def slow(message: Message) -> None:
        started.set()
        go.wait(60)

    @app.handler("orders")
    async def handle(message: Message) -> None: ...

    app.client.create_queue("slow")
    app.send("slow", 1)
    (sent,) = make_solo(app, conn, "orders")
    with working(app) as running:
        assert started.wait(30)
        app.client.resume_queue("orders")
        until(lambda: state(conn, "orders")[1] == 1)  # claimed, and waiting for the other to end
        running.stop()
        until(lambda: state(conn, "orders")[1] == 0)
        go.set()
        counts = running.join()
    assert counts == {"done": 1, "released": 1}
    assert [each.outcome for each in app.client.attempts(sent)] == ["lost"]


def test_an_innocent_solo_message_is_not_charged_for_the_wait(app: Bartleby, conn: Conn) -> None:
    """It waits for another handler of its process, and that one's end is the end of both leases."""
    started, go = threading.Event(), threading.Event()

    @app.handler("slow")
    def slow(message: Message) -> None:
        started.set()
        go.wait(60)

    @app.handler("orders", lease=30)
    async def handle(message: Message) -> None: ...

    app.client.create_queue("slow")
    app.send("slow", 1)
    (sent,) = make_solo(app, conn, "orders")
    with working(app) as running:
        assert started.wait(30)
        app.client.resume_queue("orders")
        until(lambda: state(conn, "orders")[1] == 1)
        app.client.pause_queue("orders")
        lapse(conn)
        go.set()
        running.end()
    assert [(each.outcome, each.verdict) for each in app.client.attempts(sent)] == [("lost", "retry")] * 2
    found = app.client.find_message(sent)
    assert found is not None
    assert (found.attempts, found.crashes) == (0, 0)


def test_a_solo_message_whose_lease_was_given_up_during_the_wait_does_not_begin(
    app: Bartleby, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker could not renew the lease, and so will not run it: it must not say that it does."""
    started, go = threading.Event(), threading.Event()

    async def renew_nothing(*_: object) -> None: ...

    monkeypatch.setattr(Heartbeat, "_renew", renew_nothing)

    @app.handler("slow", lease=60)
    def slow(message: Message) -> None:
        started.set()
        go.wait(60)

    @app.handler("orders", lease=3)
    async def handle(message: Message) -> None: ...

    app.client.create_queue("slow")
    app.send("slow", 1)
    (sent,) = make_solo(app, conn, "orders")
    with Told.listening() as told, working(app) as running:
        assert started.wait(30)
        app.client.resume_queue("orders")
        # the database does not know yet that it is lost
        until(lambda: conn.execute("update bartleby.lease set until = until + '1 hour' where unconfirmed").rowcount)
        app.client.pause_queue("orders")
        until(lambda: told.of("lease.lost"))
        go.set()
        app.send("slow", 2)
        until(lambda: running.worker.counts["done"] == 2)  # the turn of the one that has to run alone is over
        lapse(conn)
        running.end()
    assert [(each.outcome, each.verdict) for each in app.client.attempts(sent)] == [("lost", "retry")] * 2
    found = app.client.find_message(sent)
    assert found is not None
    assert (found.attempts, found.crashes) == (0, 0)


def test_a_solo_message_beside_a_handler_without_end_does_not_stop_the_other_queues(app: Bartleby, conn: Conn) -> None:
    started, go = threading.Event(), threading.Event()

    @app.handler("endless")
    def endless(message: Message) -> None:
        started.set()
        go.wait(60)

    @app.handler("solos")
    async def solo(message: Message) -> None: ...

    @app.handler("orders")
    async def handle(message: Message) -> None: ...

    for queue in ("endless", "orders"):
        app.client.create_queue(queue)
    app.send("endless", 1)
    make_solo(app, conn, "solos")
    with working(app) as running:
        assert started.wait(30)
        app.client.resume_queue("solos")
        until(lambda: state(conn, "solos")[1] == 1)
        app.send_many("orders", [{"payload": 1}] * 5)
        try:
            until(lambda: running.worker.counts["done"] >= 5)
        finally:
            go.set()


def test_solo_messages_in_a_row_do_not_meet_what_one_of_them_left_behind(app: Bartleby, conn: Conn) -> None:
    """The first times out inside C: its message is settled, but its thread is still in the process."""
    stuck, inside, beside = threading.Lock(), threading.Event(), threading.Event()
    stuck.acquire()
    runs: list[int] = []

    @app.handler("orders", timeout=1, retry={"max_attempts": 1})
    def handle(message: Message) -> None:
        runs.append(message.id)
        if len(runs) == 1:
            inside.set()
            stuck.acquire(timeout=60)
            inside.clear()
        elif inside.is_set():
            beside.set()

    make_solo(app, conn, "orders", 2)
    app.client.resume_queue("orders")
    with working(app) as running:
        until(lambda: running.worker.counts["dead"] == 1)
        # the other has its chance now: settled or put back, but not run beside the first
        until(lambda: running.worker.counts["done"] or running.worker.counts["released"])
        stuck.release()
    assert not beside.is_set()
