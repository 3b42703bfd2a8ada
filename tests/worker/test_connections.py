"""A worker and its connections: each may be cut, hang, or be refused, and no message is lost or charged."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from bartleby import Bartleby, Message, Snooze, dev, janitor, replaying
from bartleby import worker as worker_module
from tests.kit import worker as kit
from tests.kit.proxy import Proxy, proxied
from tests.kit.sql import value
from tests.kit.worker import BOTH, LONG, CapturedLog, Conn, Gate, handler_of, numbered, state, until, working

NAMES = ["claims", "settles", "heartbeat", "listener", "janitor", "replays"]


class Ledger:
    """What handlers did, kept outside of the database."""

    def __init__(self, app: Bartleby, **options: Any) -> None:
        self.runs: list[object] = []
        self.attempts: set[int] = set()

        @app.handler("orders", **options)
        async def handle(message: Message) -> None:
            self.runs.append(message.payload)
            self.attempts.add(message.attempt)
            await asyncio.sleep(0.001)


@pytest.fixture
def proxy(server: dev.Server) -> Iterator[Proxy]:
    with proxied(server.port) as made:
        yield made


@pytest.fixture
def through(app: Bartleby, proxy: Proxy, dsn: str) -> Bartleby:
    """An application that reaches the server through the proxy; `app` does not need it."""
    return Bartleby(proxy.dsn(dsn))


def fill(app: Bartleby, count: int, first: int = 0) -> None:
    app.client.send_many("orders", numbered(count, first))


# Sessions that are ended


def test_each_connection_is_made_anew_when_its_session_is_ended(app: Bartleby, conn: Conn, log: CapturedLog) -> None:
    ledger, gate = Ledger(app, lease=600), Gate()
    app.handler("slow", lease=600)(gate.handler(awaited=False))  # held all the time: the heartbeat has work
    app.client.create_queue("slow")
    app.client.send("slow", 1)
    with working(app) as running:
        running.worker._shared.link.deadline = kit.LONG  # a claim that takes long would be a second loss
        gate.wait_for_start()
        until(lambda: running.worker._shared.listener.listening)
        for number, name in enumerate(NAMES):
            (before,) = until(lambda: kit.sessions(conn, name))  # noqa: B023 - at once
            conn.execute("select pg_terminate_backend(%s, 30000)", [before])
            kit.renew_now(running.worker)
            fill(app, 5, 5 * number)
            until(lambda: running.worker.counts["done"] == 5 * (number + 1))  # noqa: B023 - at once
            until(lambda: kit.sessions(conn, name) not in ([], [before]))  # noqa: B023 - at once
        until(lambda: running.worker._shared.listener.listening)
        gate.open()
        until(lambda: running.worker.counts["done"] == 5 * len(NAMES) + 1)
    assert sorted(ledger.runs) == list(range(5 * len(NAMES)))  # type: ignore[type-var]
    assert ledger.attempts == {1}
    assert value(conn, "select count(*) from bartleby.attempts") == 0
    assert log.of("listener.lost")
    for event in ("database.away", "database.back"):
        assert [each.fields["connection"] for each in log.of(event)].count("claims") == 1  # type: ignore[attr-defined]


# The database refuses


def refuse(conn: Conn, name: str, sqlstate: str) -> str:
    """Let a function of the core fail, count its calls, and return its definition for `accept`.

    It is replaced and never dropped: a call under way would fail with XX000, which no worker repeats.
    """
    conn.execute("create sequence if not exists refusals; select setval('refusals', 1)")
    query = """select pg_get_functiondef(oid), pg_get_function_arguments(oid), pg_get_function_result(oid)
        from pg_proc where pronamespace = 'bartleby'::regnamespace and proname = %s"""
    [(definition, arguments, returns)] = conn.execute(query, [name]).fetchall()
    conn.execute(
        f"create or replace function bartleby.{name}({arguments}) returns {returns} language plpgsql as $$ begin"
        f" perform nextval('public.refusals'); raise exception 'no' using errcode = '{sqlstate}'; end $$".encode()
    )
    return str(definition)


def accept(conn: Conn, definition: str) -> None:
    conn.execute(definition.encode())


@pytest.mark.seed("cordum-13")
@pytest.mark.own_database
def test_call_that_the_server_cannot_take_now_is_repeated(app: Bartleby, conn: Conn, log: CapturedLog) -> None:
    """A full disk, a deadlock, a read-only server: repeated until it is accepted, and the handler runs once."""
    runs: list[str] = []

    @app.handler("orders", terminal=[KeyError], lease=600)
    async def handle(message: Message) -> None:
        runs.append(message.payload)
        if message.payload == "fail":
            raise KeyError
        if message.payload == "release":
            raise Snooze(1000)

    refusals = [("ack", each) for each in ("53100", "53200", "57014", "40P01", "55P03", "25006", "57P01")]
    refusals += [("fail", "53100"), ("release", "53100"), ("claim", "53100")]
    with working(app) as running:
        until(lambda: running.worker._shared.listener.listening)
        for number, (name, sqlstate) in enumerate(refusals):
            definition = refuse(conn, name, sqlstate)
            app.client.send("orders", name)
            until(lambda: log.of("settlement.impossible") or value(conn, "select last_value > 3 from refusals"))
            assert not log.of("settlement.impossible"), (name, sqlstate)
            assert running.worker.counts.total() == number, (name, sqlstate)
            accept(conn, definition)
            until(lambda: running.worker.counts.total() == number + 1, what=f"{name} {sqlstate}")  # noqa: B023
        assert running.end() == {"done": 8, "dead": 1, "released": 1}
    assert runs == [name for name, _ in refusals]
    assert state(conn) == (0, 0, 1, 1)


@pytest.mark.own_database
@BOTH
def test_claims_wait_while_nothing_can_be_settled(app: Bartleby, conn: Conn, awaited: bool) -> None:
    runs: list[int] = []
    function = handler_of(lambda message: runs.append(message.payload), awaited=awaited)
    app.handler("orders", concurrency=10, lease=600)(function)
    fill(app, 1500)
    definition = refuse(conn, "ack", "53100")
    with working(app, claim_limit=50) as running:
        lane = kit.present(until(lambda: running.worker._shared.holding.lanes.get("orders")))
        until(lambda: lane.backlog.count > 4 * 50)
        assert lane.room() == 0
        assert len(runs) < 1000
        accept(conn, definition)
        until(lambda: running.worker.counts["done"] == 1500)
    assert sorted(runs) == list(range(1500))


@pytest.mark.own_database
@BOTH
def test_settlement_that_is_never_accepted_ends_with_its_lease(
    app: Bartleby, conn: Conn, log: CapturedLog, awaited: bool
) -> None:
    """Later ones are not blocked; the lease is not renewed, so the other handlers of it are cancelled."""
    begun = threading.Event()

    def holds(message: Message) -> bool:
        if message.payload == 1:
            begun.set()
            return True
        if not awaited:
            begun.wait(LONG)  # or the refusal might come before the other thread has begun
        return False

    gate = Gate(holds)
    app.handler("orders", lease=600, concurrency=2)(gate.handler(awaited=awaited))
    definition = refuse(conn, "ack", "XX000")
    fill(app, 2)
    with working(app) as running:
        until(lambda: log.of("settlement.impossible"))
        assert gate.cancelled.wait(LONG)
        accept(conn, definition)
        fill(app, 5, 2)
        until(lambda: running.worker.counts["done"] == 5)
        assert state(conn)[1] == 2, "until it lapses"
        assert len(log.of("lease.lost")) == 1


@pytest.mark.own_database
def test_messages_are_released_if_the_look_at_what_was_handled_fails(app: Bartleby, conn: Conn) -> None:
    ran: list[int] = []
    app.handler("orders", once=True)(handler_of(lambda message: ran.append(message.id), awaited=True))
    sent = app.send_many("orders", numbered(3))
    definition = refuse(conn, "handled_keys", "53100")
    with working(app) as running:
        until(lambda: running.worker.counts["released"] >= 3)
        assert not ran
        accept(conn, definition)
        until(lambda: running.worker.counts["done"] == 3)
    assert sorted(ran) == sent
    assert not app.client.attempts(sent[0])


# A wire that hangs


def let_lease_run_out(running: kit.Running) -> None:
    """Let the time of the only lease be over while its renewal is under way."""
    [held] = running.worker._shared.holding.leases.values()
    kit.renew_now(running.worker)
    until(lambda: held.extended == float("-inf"))
    held.deadline -= held.length


def test_handler_whose_lease_cannot_be_renewed_is_cancelled_and_the_worker_can_be_stopped(
    app: Bartleby, through: Bartleby, proxy: Proxy, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half-open: nothing is closed, nothing answers. The lease is given up here before it lapses there."""
    monkeypatch.setattr(worker_module, "_LAST_WORDS", 0.2)
    for duty in (janitor, replaying):
        monkeypatch.setattr(duty, "_LEAVE_SECONDS", 0.2)
    gate, stuck = Gate(kit.first_only()), Gate()
    through.handler("orders", lease=600)(gate.handler(awaited=True))
    through.handler("others", lease=600)(stuck.handler(awaited=False))
    app.client.create_queue("others")
    sent = app.client.send("orders", 1)
    with working(through, grace=0.5) as running:
        gate.wait_for_start()
        proxy.mode = "blackhole"
        let_lease_run_out(running)
        assert gate.cancelled.wait(LONG)
        kit.lapse(conn)
        proxy.mode = "pass"
        until(lambda: running.worker.counts["done"] == 1)
        app.client.send("others", 1)
        stuck.wait_for_start()
        for link in (running.worker._settles, running.worker._shared.link):
            link.deadline = 3600.0
        proxy.mode = "blackhole"
        running.stop()
        running.stop()
        stuck.open()
        try:
            running.join()
        finally:
            proxy.mode = "pass"
    assert {each.outcome for each in app.client.attempts(sent)} == {"crashed"}


# A pooler between


@pytest.mark.seed("outbox-3")
@pytest.mark.pgbouncer
def test_worker_polls_behind_a_pooler(app: Bartleby, pooled_dsn: str, conn: Conn, log: CapturedLog) -> None:
    pooled = Bartleby(pooled_dsn)
    ledger = Ledger(pooled)
    with working(pooled) as running:
        until(lambda: log.of("listener.off"))
        for number in range(3):
            fill(app, 1, number)
            until(lambda: len(ledger.runs) == number + 1)  # noqa: B023 - at once
        fill(app, 100, 3)
        until(lambda: running.worker.counts["done"] == 103)
        assert not running.worker._shared.listener.listening
    assert ledger.attempts == {1}
    assert state(conn) == (0, 0, 0, 0)
