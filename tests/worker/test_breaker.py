"""The breaker in a worker: an outage opens it, costs no attempts, and ends when probes succeed."""

import psycopg
import pytest

from bartleby import Bartleby, Message, Queue
from tests.kit.clock import move_clock
from tests.kit.sql import value
from tests.kit.worker import CapturedLog, Conn, drain, handler_of, numbered, state, until, working


class Bank:
    """A service outside."""

    def __init__(self) -> None:
        self.closed = True
        self.asked = 0

    def ask(self, _: Message) -> None:
        self.asked += 1
        if self.closed:
            raise ConnectionError("the bank is closed")


def queue_of(app: Bartleby, name: str = "orders") -> Queue:
    return next(queue for queue in app.client.queues() if queue.name == name)


def events(conn: Conn) -> list[tuple[str, str]]:
    query = "select type, queue from bartleby.events where type like 'io.bartleby.breaker.%' order by id"
    return [(kind.rpartition(".")[2], queue) for kind, queue in conn.execute(query)]


def send(app: Bartleby, count: int, queue: str = "orders") -> None:
    app.send_many(queue, numbered(count))


@pytest.mark.own_database
def test_outage_costs_no_attempts_and_ends_when_probes_succeed(  # noqa: PLR0915 - one story
    app: Bartleby, conn: Conn, log: CapturedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers open it once and probe one message at a time; another queue goes on."""
    monkeypatch.setattr("bartleby.fetching._LONGEST_SLEEP", 0.1)  # the clock moves without a word to sleepers
    clock = move_clock(conn)
    clock.stop()
    bank = Bank()
    # nothing is due again before ten have failed: a second failure could be charged
    app.handler("orders", retry={"max_attempts": 2, "backoff": "fixed", "base": 600})(
        handler_of(bank.ask, awaited=True)
    )
    app.handler("parcels")(handler_of(lambda _: None, awaited=False))
    for queue in ("orders", "parcels"):
        app.client.create_queue(queue, {"lease": 86400})
    send(app, 100)
    with working(app) as one, working(app) as two:
        until(lambda: queue_of(app).breaker == "open")
        found = queue_of(app)
        assert found.breaker_cause == "ConnectionError: the bank is closed"
        until(lambda: state(conn)[1] == 0)
        send(app, 20, "parcels")
        until(lambda: one.worker.counts["done"] + two.worker.counts["done"] == 20)
        assert queue_of(app, "parcels").breaker == "closed"
        for _ in range(3):
            asked = bank.asked
            clock.advance(700)
            until(lambda: bank.asked > asked and state(conn)[1] == 0)  # noqa: B023 - at once
            assert bank.asked == asked + 1, "a probe, and nothing beside it"
        bank.closed = False

        def all_done() -> bool:
            if state(conn)[1] == 0:
                clock.advance(700)
            return one.worker.counts["done"] + two.worker.counts["done"] == 120

        until(all_done)
        assert queue_of(app).breaker == "closed"
    assert (one.worker.counts + two.worker.counts)["dead"] == 0
    assert state(conn) == (0, 0, 0, 0)
    assert events(conn) == [("opened", "orders"), ("closed", "orders")]
    assert log.of("breaker.opened")
    charged = (
        "select max(n) from (select count(*) filter (where rule not like '%%not charged%%') n"
        " from bartleby.attempts group by message_id) a"
    )
    assert value(conn, charged) <= 1


def test_database_errors_in_handlers_open_the_breaker(app: Bartleby, conn: Conn) -> None:
    @app.handler("orders", retry={"max_attempts": 1})
    async def handle(message: Message) -> None:
        raise psycopg.errors.DiskFull("could not extend file: No space left on device")

    send(app, 40)
    with working(app):
        until(lambda: queue_of(app).breaker == "open")
    assert state(conn)[3] == 0
    rules = value(conn, "select array_agg(distinct verdict || ': ' || rule) from bartleby.attempts")
    why = "psycopg.errors.DiskFull (SQLSTATE 53100) is trouble of a database server, but Bartleby's own has none"
    assert rules == [f"retry: {why}; attempt 1 of 1; not charged: the breaker is open"]
    assert "No space left" in (queue_of(app).breaker_cause or "")


@pytest.mark.own_database
def test_breaker_that_cannot_be_opened_prevents_no_settlement(app: Bartleby, conn: Conn, log: CapturedLog) -> None:
    conn.execute(
        "create or replace function bartleby.open_breaker(p_queue text, p_cause text, p_over interval) returns boolean"
        " language plpgsql as $$ begin raise exception 'no' using errcode = 'XX000'; end $$"
    )
    app.handler("orders", retry={"max_attempts": 1})(handler_of(Bank().ask, awaited=True))
    send(app, 20)
    assert drain(app) == {"dead": 20}
    assert log.of("breaker.failed")
    assert not log.of("settlement.impossible")
    assert state(conn) == (0, 0, 0, 20)
