"""A whole worker: what it claims and how much, how it settles, keeps its leases and loses them."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from bartleby import Bartleby, Client, Message, Snooze, UnknownQueue, heartbeat
from bartleby.worker import Worker
from tests.kit.clock import move_clock
from tests.kit.worker import Told, drain, lapse, row, sessions, state, until, working

Conn = psycopg.Connection[tuple[Any, ...]]
BOTH = pytest.mark.parametrize("awaited", [False, True])


@pytest.fixture
def app(dsn: str) -> Bartleby:
    return Bartleby(dsn, version="1.2.3")


@pytest.fixture
def counted(conn: Conn, dsn: str) -> Callable[[str], int]:
    """How often a function of the core was called, by sessions that have ended."""
    conn.execute(f"alter database {dsn.rpartition('/')[2]} set track_functions = 'pl'".encode())

    def calls(name: str) -> int:
        conn.execute("select pg_stat_clear_snapshot()")
        query = "select coalesce(sum(calls), 0)::integer from pg_stat_user_functions where funcname = %s"
        return int(row(conn, query, name))

    return calls


# What it works on


def test_a_queue_that_is_not_there_is_made(app: Bartleby, conn: Conn, told: Told) -> None:
    app.handler("orders")(print)
    assert drain(app) == {}
    assert state(conn) == (0, 0, 0, 0)
    assert told.of("queue.created")


def test_who_may_not_make_a_queue_is_told_who_can(app: Bartleby, conn: Conn, dsn: str) -> None:
    conn.execute("create role worker_only login password 'x' in role bartleby_worker")
    try:
        limited = Bartleby(dsn.replace(dsn.partition("//")[2].partition("@")[0], "worker_only:x"))
        limited.handler("orders")(print)
        with pytest.raises(UnknownQueue, match="may not create it") as caught:
            drain(limited)
        assert "bartleby queues create orders" in (caught.value.hint or "")
        app.client.create_queue("orders")
        app.send("orders", 1)
        assert drain(limited) == {"done": 1}
    finally:
        app.client.close()
        conn.execute("drop owned by worker_only; drop role worker_only")


def test_only_the_queues_that_were_named(app: Bartleby, conn: Conn) -> None:
    seen: list[str] = []
    for queue in ("a", "b", "c"):
        app.handler(queue)(lambda message: seen.append(message.queue))
        app.client.create_queue(queue)
        app.send(queue, 1)
    assert drain(app, queues=["a", "c"]) == {"done": 2}
    assert sorted(seen) == ["a", "c"]
    assert state(conn, "b")[0] == 1


def test_queues_do_not_wait_for_each_other(app: Bartleby) -> None:
    blocked, go = threading.Event(), threading.Event()

    @app.handler("slow")
    def slow(message: Message) -> None:
        blocked.set()
        go.wait(60)

    @app.handler("quick")
    async def quick(message: Message) -> None:
        await asyncio.sleep(0)

    for queue in ("slow", "quick"):
        app.client.create_queue(queue)
    app.send_many("slow", [{"payload": 1}] * 30)
    with working(app) as running:
        assert blocked.wait(10)
        app.send_many("quick", [{"payload": 1}] * 300)
        until(lambda: running.worker.counts["done"] == 300)
        go.set()
        until(lambda: running.worker.counts["done"] == 330)


@BOTH
def test_a_message_that_is_sent_while_it_sleeps_is_run_at_once(app: Bartleby, awaited: bool) -> None:
    seen: list[float] = []

    def handle(message: Message) -> None:
        seen.append(time.monotonic())

    async def handle_awaited(message: Message) -> None:
        seen.append(time.monotonic())

    app.handler("orders")(handle_awaited if awaited else handle)
    app.client.create_queue("orders")
    with working(app, poll=30) as running:
        until(lambda: running.worker._shared.listener.listening)
        waits = []
        for number in range(1, 21):
            sent = time.monotonic()
            app.send("orders", number)
            until(lambda: len(seen) == number)  # noqa: B023 - at once
            waits.append(seen[-1] - sent)
    # without a word it would be seconds; how many parts of one depends on who else wants the processor
    assert min(waits) < 0.1, waits
    assert sorted(waits)[10] < 2, waits


def test_a_retry_is_run_when_it_is_due(app: Bartleby) -> None:
    seen: list[float] = []

    @app.handler("orders")
    async def handle(message: Message) -> object:
        seen.append(time.monotonic())
        return Snooze(0.4) if len(seen) == 1 else None

    app.client.create_queue("orders")
    app.send("orders", 1)
    with working(app, poll=30) as running:
        until(lambda: running.worker.counts["done"] == 1)
    assert 0.35 < seen[1] - seen[0] < 4  # who only polls sleeps for five seconds


# Until idle


def test_until_idle_waits_for_what_is_due_soon_and_not_for_tomorrow(app: Bartleby, conn: Conn) -> None:
    seen: list[object] = []

    @app.handler("orders", retry={"backoff": "fixed", "base": 0.6})
    async def handle(message: Message) -> None:
        seen.append((message.payload, message.attempt))
        if message.attempt == 1:
            raise ValueError

    app.client.create_queue("orders")
    app.send("orders", "now")
    app.send("orders", "tomorrow", delay=86400)
    assert drain(app) == {"retried": 1, "done": 1}
    assert seen == [("now", 1), ("now", 2)]
    assert state(conn) == (0, 0, 1, 0)


def test_until_idle_sees_what_handlers_send_to_other_queues(app: Bartleby, conn: Conn) -> None:
    queues = ["a", "b", "c", "d"]
    seen: list[str] = []

    def passing_on(queue: str, to: str | None) -> None:
        if queue in {"a", "c"}:

            @app.handler(queue)
            async def handle(message: Message) -> None:
                seen.append(message.queue)
                await asyncio.sleep(0.1)
                if to:
                    await app.asend(to, 1)
        else:

            @app.handler(queue)
            def handle_here(message: Message) -> None:
                seen.append(message.queue)
                time.sleep(0.3)
                if to:
                    app.send(to, 1)

    for queue, to in zip(queues, [*queues[1:], None], strict=True):
        passing_on(queue, to)
        app.client.create_queue(queue)
    app.send("a", 1)

    async def work() -> Any:
        try:
            return await Worker(app, until_idle=True).run()
        finally:
            await app.async_client.close()

    counts = asyncio.run(work())
    app.client.close()
    assert seen == queues
    assert counts == {"done": 4}


def test_it_goes_on_when_a_pause_is_over(app: Bartleby, conn: Conn) -> None:
    """Its own janitor ends it."""
    clock = move_clock(conn)
    handled: list[Any] = []
    app.handler("orders")(lambda message: handled.append(message.payload))
    app.client.create_queue("orders")
    app.client.pause_queue("orders", until=datetime.now(UTC) + timedelta(hours=1))
    app.send("orders", 1)
    with working(app) as running:
        until(lambda: row(conn, "select bartleby.on_duty('janitor')"))
        assert (handled, app.client.queues()[0].paused) == ([], True)
        clock.advance(3601)
        until(lambda: running.worker.counts["done"])
        running.end()
    assert handled == [1]
    resumed = app.client.audit_log(action="queue.resume")
    assert [(each.actor, each.reason) for each in resumed] == [("bartleby", "the pause is over")]


@pytest.mark.parametrize("obstacle", ["paused", "forced", "newer", "leased by another"])
def test_until_idle_does_not_wait_for_what_it_cannot_run(app: Bartleby, conn: Conn, obstacle: str) -> None:
    app.handler("orders")(print)
    app.client.create_queue("orders")
    app.send("orders", 1, generation=7 if obstacle == "newer" else None)
    app.send("orders", 1, delay=0.01, generation=7 if obstacle == "newer" else None)
    match obstacle:
        case "paused":
            app.client.pause_queue("orders")
        case "forced":
            app.client.force_breaker("orders", actor="me", reason="test")
        case "leased by another":
            until(lambda: (app.client.claim("orders", "another", limit=10), state(conn)[1])[1] == 2)
        case _:
            pass
    counts = drain(app)
    assert counts["done"] == 0


# How much it claims


@BOTH
def test_slow_handlers_do_not_hoard(app: Bartleby, conn: Conn, awaited: bool) -> None:
    """What a worker does not run now is there for others: `leased` stays near the concurrency.

    What is done and not yet acknowledged does not count: that is how busy the database is.
    """
    most = 0

    def handle(message: Message) -> None:
        time.sleep(0.2)

    async def handle_awaited(message: Message) -> None:
        await asyncio.sleep(0.2)

    app.handler("orders", concurrency=4)(handle_awaited if awaited else handle)
    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(40)])
    with working(app) as running:
        lanes = running.worker._shared.holding.lanes
        until(lambda: lanes)
        lane = lanes["orders"]
        while running.worker.counts["done"] < 20:
            done = lane.backlog.count
            leased = state(conn)[1]
            most = max(most, leased - max(done, lane.backlog.count))
    assert 4 <= most <= 12, most


@BOTH
def test_before_anything_is_known_no_more_is_claimed_than_can_run(app: Bartleby, conn: Conn, awaited: bool) -> None:
    go, started = threading.Event(), threading.Semaphore(0)

    def handle(message: Message) -> None:
        started.release()
        go.wait(60)

    async def handle_awaited(message: Message) -> None:
        started.release()
        while not go.is_set():  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.005)

    app.handler("orders", concurrency=3)(handle_awaited if awaited else handle)
    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(50)])
    with working(app) as running:
        for _ in range(3):
            assert started.acquire(timeout=30)
        assert state(conn) == (47, 3, 0, 0)
        go.set()
        until(lambda: running.worker.counts["done"] == 50)


def test_two_workers_share_slow_messages(app: Bartleby, conn: Conn) -> None:
    seen: list[str] = []
    lock = threading.Lock()

    @app.handler("orders", concurrency=2)
    def handle(message: Message) -> None:
        with lock:
            seen.append(row_of(message))
        time.sleep(0.1)

    def row_of(message: Message) -> str:
        return str(threading.current_thread().ident)

    app.client.create_queue("orders")
    with working(app) as one, working(app) as two:
        # who has not begun yet would find nothing left to share
        until(lambda: one.worker._shared.listener.listening and two.worker._shared.listener.listening)
        app.send_many("orders", [{"payload": number} for number in range(80)])
        until(lambda: one.worker.counts["done"] + two.worker.counts["done"] == 80)
        assert min(one.worker.counts["done"], two.worker.counts["done"]) >= 20
    assert len(seen) == 80


@BOTH
def test_quick_messages_cost_few_statements(
    app: Bartleby, conn: Conn, counted: Callable[[str], int], awaited: bool
) -> None:
    def handle(message: Message) -> None: ...

    async def handle_awaited(message: Message) -> None: ...

    app.handler("orders")(handle_awaited if awaited else handle)
    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(5000)])
    assert drain(app) == {"done": 5000}
    app.client.close()
    until(lambda: counted("claim"))
    claims, acks = counted("claim"), counted("ack")
    assert acks <= 60, (claims, acks)
    assert claims <= 80, (claims, acks)


@BOTH
def test_a_slow_neighbour_does_not_hold_back_acks(app: Bartleby, conn: Conn, awaited: bool) -> None:
    go = threading.Event()

    def handle(message: Message) -> None:
        if message.payload == 0:
            go.wait(60)

    async def handle_awaited(message: Message) -> None:
        while message.payload == 0 and not go.is_set():  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.005)

    app.handler("orders", concurrency=5)(handle_awaited if awaited else handle)
    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(5)])
    with working(app) as running:
        until(lambda: state(conn) == (0, 1, 0, 0))
        go.set()
        until(lambda: running.worker.counts["done"] == 5)


# Leases


def test_a_lease_is_kept_while_a_handler_blocks_the_event_loop(
    app: Bartleby, conn: Conn, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_STUCK", 1.0)
    runs: list[int] = []

    @app.handler("orders", lease=6)
    async def handle(message: Message) -> None:
        runs.append(message.attempt)
        time.sleep(6.5)  # noqa: ASYNC251 - the point

    app.client.create_queue("orders")
    app.send("orders", 1)
    with working(app) as running, Client(app.settings.dsn) as other:
        until(lambda: runs)
        while not running.worker.counts["done"]:
            assert other.reap() == []
            time.sleep(0.05)
    assert runs == [1]
    assert state(conn) == (0, 0, 0, 0)
    assert "blocked the event loop" in told.of("loop.blocked")[0].getMessage()


def test_a_lease_is_kept_while_all_threads_are_busy(app: Bartleby, conn: Conn) -> None:
    runs: list[int] = []

    @app.handler("orders", lease=6, concurrency=2)  # for here the heartbeat also waits for the interpreter
    def handle(message: Message) -> None:
        runs.append(message.id)
        deadline = time.monotonic() + 6.5
        while time.monotonic() < deadline:
            sum(range(1000))

    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": 1}] * 2)
    with working(app) as running, Client(app.settings.dsn) as other:
        until(lambda: runs)
        while running.worker.counts["done"] < 2:
            assert other.reap() == []
            time.sleep(0.05)
    assert len(runs) == len(set(runs)) == 2


@BOTH
def test_a_handler_whose_lease_was_lost_is_cancelled_and_its_result_refused(  # noqa: PLR0915 - two handlers
    app: Bartleby, conn: Conn, told: Told, awaited: bool
) -> None:
    started, cancelled, go = threading.Semaphore(0), threading.Event(), threading.Event()
    first = True

    def handle(message: Message) -> None:
        nonlocal first
        if not first:
            return
        first = False
        started.release()
        try:
            while not go.is_set():
                time.sleep(0.002)
        except BaseException:
            cancelled.set()
            raise

    async def handle_awaited(message: Message) -> None:
        nonlocal first
        if not first:
            return
        first = False
        started.release()
        try:
            while not go.is_set():  # noqa: ASYNC110 - another thread sets it
                await asyncio.sleep(0.002)
        except BaseException:
            cancelled.set()
            raise

    app.handler("orders", lease=3)(handle_awaited if awaited else handle)
    app.client.create_queue("orders")
    sent = app.send("orders", 1)
    with working(app) as running:
        assert started.acquire(timeout=30)
        lapse(conn)
        assert cancelled.wait(30)
        until(lambda: running.worker.counts["done"] == 1)
        running.end()
    assert told.of("lease.lost")
    (lost,) = app.client.attempts(sent)
    assert (lost.outcome, lost.verdict) == ("lost", "retry")
    assert state(conn) == (0, 0, 0, 0)


@BOTH
@pytest.mark.parametrize("answer", ["done", "failed"])
def test_who_lost_a_lease_settles_nothing_of_its_next_owner(  # noqa: PLR0915 - two handlers
    app: Bartleby, conn: Conn, awaited: bool, answer: str
) -> None:
    """The handler ignores its cancellation and ends: by then the message belongs to another worker."""
    started, go, over = threading.Event(), threading.Event(), threading.Event()

    def end() -> None:
        over.set()
        if answer == "failed":
            raise ValueError

    def handle(message: Message) -> None:
        started.set()
        while not go.is_set():
            with contextlib.suppress(BaseException):
                time.sleep(0.002)
        end()

    async def handle_awaited(message: Message) -> None:
        started.set()
        while not go.is_set():
            with contextlib.suppress(BaseException):
                await asyncio.sleep(0.002)
        end()

    app.handler("orders", lease=3, concurrency=1)(handle_awaited if awaited else handle)
    app.client.create_queue("orders")
    sent = app.send("orders", 1)
    with working(app) as running, Told.listening() as told, Client(app.settings.dsn) as other:
        assert started.wait(30)
        app.client.pause_queue("orders")
        lapse(conn)
        app.client.resume_queue("orders")
        lease = until(lambda: other.claim("orders", "the next owner"))
        assert lease is not None
        until(lambda: told.of("lease.lost"))
        go.set()
        assert over.wait(30)
        running.end()
        assert running.worker.counts["done"] == running.worker.counts["dead"] == running.worker.counts["retried"] == 0
        assert state(conn) == (0, 1, 0, 0)
        assert other.ack(lease.id) == 1
    assert [each.outcome for each in app.client.attempts(sent)] == ["lost"]


def test_a_result_that_comes_too_late_is_refused_and_counted(app: Bartleby, conn: Conn, told: Told) -> None:
    """The lease was lost before the heartbeat could know: the database says no."""

    @app.handler("orders")
    async def handle(message: Message) -> None:
        # in this order: a claim is on its way already, and must not find it
        app.client.pause_queue("orders")
        lapse(conn)

    app.client.create_queue("orders")
    app.send("orders", 1)
    with working(app) as running:
        until(lambda: running.worker.counts["refused"])
        running.end()
    assert running.worker.counts == {"refused": 1}
    assert told.of("settlement.refused")
    assert row(conn, "select count(*) from bartleby.messages") == 1


def test_the_queues_lease_is_used_and_the_handlers_goes_before_it(app: Bartleby, conn: Conn) -> None:
    lengths: dict[str, float] = {}
    query = "select extract(epoch from leased_until - bartleby.clock())::float8 from bartleby.messages where queue = %s"

    def look(message: Message) -> None:
        with psycopg.connect(str(app.settings.dsn)) as mine:
            lengths[message.queue] = float(row(mine, query, message.queue))

    app.handler("orders")(look)
    app.handler("parcels", lease=40)(look)
    for queue in ("orders", "parcels"):
        app.client.create_queue(queue, {"lease": 100})
        app.send(queue, 1)
    assert drain(app) == {"done": 2}
    assert 80 < lengths["orders"] <= 100
    assert 20 < lengths["parcels"] <= 40


def test_the_worker_and_its_version_stand_in_the_evidence(app: Bartleby) -> None:
    @app.handler("orders", terminal=[ValueError])
    def handle(message: Message) -> None:
        raise ValueError

    app.client.create_queue("orders")
    sent = app.send("orders", 1)
    with working(app, until_idle=True) as running:
        running.join()
        (attempt,) = app.client.attempts(sent)
        letter = app.client.dead_letter(sent)
    assert (attempt.worker, attempt.worker_version) == (running.worker.name, "1.2.3")
    assert letter is not None
    assert (letter.worker, letter.worker_version) == (running.worker.name, "1.2.3")


# Once


def test_what_was_handled_is_acked_without_running(app: Bartleby, conn: Conn) -> None:
    ran: list[int] = []

    @app.handler("orders", once=True)
    def handle(message: Message) -> None:
        ran.append(message.id)
        with psycopg.connect(str(app.settings.dsn)) as mine:
            app.mark_handled(message, mine)

    app.client.create_queue("orders")
    sent = app.send_many("orders", [{"payload": number} for number in range(4)])
    with psycopg.connect(str(app.settings.dsn)) as mine:
        for message_id in sent[:2]:
            mine.execute("select bartleby.mark_handled('orders', 'orders', %s)", [f"id:{message_id}"])
    assert drain(app) == {"done": 4}
    assert sorted(ran) == sent[2:]


def test_if_the_look_at_what_was_handled_fails_nothing_is_lost(app: Bartleby, conn: Conn) -> None:
    ran: list[int] = []

    @app.handler("orders", once=True)
    async def handle(message: Message) -> None:
        ran.append(message.id)

    app.client.create_queue("orders")
    sent = app.send_many("orders", [{"payload": number} for number in range(3)])
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


def test_a_worker_leaves_no_thread_and_no_session_behind(app: Bartleby, conn: Conn) -> None:
    @app.handler("orders")
    def handle(message: Message) -> None:
        time.sleep(0.002)

    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(50)])
    app.client.close()
    before = threading.active_count()
    drain(app)
    until(lambda: threading.active_count() <= before)
    names = ("claims", "settles", "heartbeat", "listener", "janitor", "replays")
    until(lambda: not any(sessions(conn, name) for name in names))


def test_a_worker_that_cannot_start_leaves_nothing_open(app: Bartleby, conn: Conn) -> None:
    app.handler("not a queue name!" * 50)(print)
    with pytest.raises(Exception, match="name"):
        drain(app)


@BOTH
def test_a_run_that_is_cancelled_starts_nothing_more(app: Bartleby, conn: Conn, awaited: bool) -> None:
    """As by asyncio.wait_for: the leases lapse, but no handler goes on by itself."""
    ran: list[int] = []

    def handle(message: Message) -> None:
        ran.append(message.payload)
        time.sleep(0.05)

    async def handle_awaited(message: Message) -> None:
        ran.append(message.payload)
        await asyncio.sleep(0.05)

    app.handler("orders", concurrency=2)(handle_awaited if awaited else handle)
    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(200)])
    app.client.close()

    async def work() -> None:
        worker = Worker(app)
        task = asyncio.create_task(worker.run())
        while len(ran) < 6:  # noqa: ASYNC110 - threads add to it
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        count = len(ran)
        await asyncio.sleep(0.3)
        assert len(ran) <= count + 2

    asyncio.run(work())
