"""The storm breaker at work: an outage costs no attempts, and its end is found by itself."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from bartleby import Bartleby, Message, Queue
from tests.kit.worker import Told, drain, row, state, until, working

Conn = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def app(dsn: str) -> Iterator[Bartleby]:
    made = Bartleby(dsn)
    yield made
    made.client.close()


class Bank:
    """Something outside that is there or is not."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.asked = 0

    def ask(self) -> None:
        self.asked += 1
        if self.closed.is_set():
            raise ConnectionError("the bank is closed")


def with_bank(app: Bartleby, bank: Bank, *, awaited: bool, **options: Any) -> None:
    def handle(message: Message) -> None:
        bank.ask()

    async def handle_awaited(message: Message) -> None:
        await asyncio.sleep(0)
        bank.ask()

    app.handler("orders", **options)(handle_awaited if awaited else handle)


def queue_of(app: Bartleby, name: str = "orders") -> Queue:
    return next(queue for queue in app.client.queues() if queue.name == name)


def events(conn: Conn) -> list[tuple[str, str]]:
    query = "select type, queue from bartleby.events where type like 'io.bartleby.breaker.%' order by id"
    return [(kind.rpartition(".")[2], queue) for kind, queue in conn.execute(query)]


def test_an_outage_opens_it_costs_no_attempts_and_ends_by_itself(app: Bartleby, conn: Conn) -> None:
    bank = Bank()
    bank.closed.set()
    # long enough that nothing is back before ten have failed: twice would be too often
    with_bank(app, bank, awaited=False, retry={"max_attempts": 2, "backoff": "fixed", "base": 2})
    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(300)])
    with working(app) as running, Told.listening() as told:
        until(lambda: queue_of(app).breaker == "open")
        asked = bank.asked
        found = queue_of(app)
        assert found.breaker_cause == "ConnectionError: the bank is closed"
        assert found.breaker_since is not None
        # probes only: one, and perhaps a second, while two seconds pass
        until(lambda: row(conn, "select probe_wait > interval '1 second' from bartleby.breaker"))
        probes = bank.asked - asked
        bank.closed.clear()
        until(lambda: running.worker.counts["done"] == 300, 30)
        assert queue_of(app).breaker == "closed"
        running.end()
    assert running.worker.counts["dead"] == 0
    assert state(conn) == (0, 0, 0, 0)
    assert events(conn) == [("opened", "orders"), ("closed", "orders")]
    assert probes <= 310, "what had been claimed before it opened, and the probes"
    assert told.of("breaker.opened")
    most = row(
        conn,
        "select max(attempts) from (select count(*) filter (where rule not like '%%not charged%%') attempts"
        " from bartleby.attempts group by message_id) a",
    )
    assert most <= 1, "nothing was charged twice"


def test_while_it_is_open_failures_charge_nothing_and_say_why(app: Bartleby, conn: Conn) -> None:
    bank = Bank()
    bank.closed.set()
    with_bank(app, bank, awaited=True, retry={"max_attempts": 1})
    app.client.create_queue("orders")
    sent = app.send_many("orders", [{"payload": number} for number in range(60)])
    app.client.force_breaker("orders", actor="me", reason="test")
    app.client.close_breaker("orders", actor="me", reason="test")
    with working(app) as running:
        until(lambda: queue_of(app).breaker == "open" and running.worker.counts["retried"] >= 10)
        running.end()
    # max_attempts is 1: only what failed before there was evidence enough may have died
    assert state(conn)[3] <= 9
    rules = [each.rule or "" for message in sent for each in app.client.attempts(message)]
    assert any("not charged: the breaker is open" in rule for rule in rules)


def test_a_single_bad_message_or_a_bug_among_good_ones_opens_nothing(app: Bartleby, conn: Conn) -> None:
    @app.handler("orders", retry={"backoff": "none", "max_attempts": 20})
    async def handle(message: Message) -> None:
        if message.payload < 3:
            raise ConnectionError("always this one")

    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(200)])
    counts = drain(app)
    assert (counts["done"], counts["dead"]) == (197, 3)
    assert queue_of(app).breaker == "closed"
    assert events(conn) == []


def test_bad_payloads_and_terminal_errors_open_nothing(app: Bartleby, conn: Conn) -> None:
    @app.handler("orders", terminal=[ValueError])
    async def handle(number: int) -> None:
        raise ValueError

    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number if number % 2 else "x"} for number in range(200)])
    assert drain(app) == {"dead": 200}
    assert events(conn) == []


def test_a_disabled_breaker_never_opens(app: Bartleby, conn: Conn) -> None:
    bank = Bank()
    bank.closed.set()
    with_bank(app, bank, awaited=True, retry={"max_attempts": 1})
    app.client.create_queue("orders", {"breaker": "off"})
    app.send_many("orders", [{"payload": number} for number in range(100)])
    assert drain(app) == {"dead": 100}
    assert queue_of(app).breaker == "off"
    assert events(conn) == []


def test_a_forced_breaker_hands_out_nothing_until_it_is_closed(app: Bartleby, conn: Conn) -> None:
    bank = Bank()
    with_bank(app, bank, awaited=True)
    app.client.create_queue("orders")
    app.client.force_breaker("orders", actor="ann", reason="the bank asked for it")
    app.send_many("orders", [{"payload": number} for number in range(20)])
    with working(app) as running:
        until(lambda: running.worker._shared.listener.listening)
        found = queue_of(app)
        assert (found.breaker, found.ready, found.leased) == ("forced", 20, 0)
        assert found.next_probe_at is None
        assert "ann" in (found.breaker_cause or "")
        assert bank.asked == 0
        app.client.close_breaker("orders", actor="ann", reason="it is fine again")
        until(lambda: running.worker.counts["done"] == 20)
    assert events(conn) == [("opened", "orders"), ("closed", "orders")]


def test_an_outage_of_one_queue_leaves_the_others_alone(app: Bartleby, conn: Conn) -> None:
    bank = Bank()
    bank.closed.set()
    with_bank(app, bank, awaited=True, retry={"backoff": "fixed", "base": 1})

    @app.handler("parcels")
    def handle(message: Message) -> None: ...

    for queue in ("orders", "parcels"):
        app.client.create_queue(queue)
        app.send_many(queue, [{"payload": number} for number in range(100)])
    with working(app) as running:
        until(lambda: queue_of(app).breaker == "open" and running.worker.counts["done"] == 100)
        assert queue_of(app, "parcels").breaker == "closed"


def test_trouble_of_the_database_in_handlers_opens_it_too(app: Bartleby, conn: Conn) -> None:
    @app.handler("orders", retry={"max_attempts": 1})
    async def handle(message: Message) -> None:
        raise psycopg.errors.DiskFull("could not extend file: No space left on device")

    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(40)])
    with working(app):
        until(lambda: queue_of(app).breaker == "open")
    assert state(conn)[3] == 0
    assert row(conn, "select count(*) from bartleby.attempts") == 0
    assert "53100" in (queue_of(app).breaker_cause or "")


def test_two_workers_probe_one_at_a_time_and_open_it_once(app: Bartleby, conn: Conn, dsn: str) -> None:
    bank = Bank()
    bank.closed.set()
    with_bank(app, bank, awaited=True, retry={"backoff": "fixed", "base": 0.1}, concurrency=5)
    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(200)])
    with working(app) as one, working(app) as two:
        until(lambda: queue_of(app).breaker == "open")
        until(lambda: state(conn)[1] <= 1)
        most = 0
        deadline = row(conn, "select since + interval '2.5 s' from bartleby.breaker")
        while row(conn, "select bartleby.clock() < %s", deadline):
            most = max(most, state(conn)[1])
        assert most <= 1
        bank.closed.clear()
        until(lambda: one.worker.counts["done"] + two.worker.counts["done"] == 200, 30)
    assert events(conn) == [("opened", "orders"), ("closed", "orders")]
    assert state(conn) == (0, 0, 0, 0)


def test_until_idle_does_not_wait_for_an_open_breaker(app: Bartleby, conn: Conn) -> None:
    bank = Bank()
    bank.closed.set()
    with_bank(app, bank, awaited=True, retry={"backoff": "fixed", "base": 0.1, "max_attempts": 100})
    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(50)])
    with Told.listening() as told:
        drain(app)
    assert told.of("worker.gave_up")
    assert queue_of(app).breaker == "open"
    assert state(conn)[3] == 0
