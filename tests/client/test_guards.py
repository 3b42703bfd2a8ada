"""Defects that a worker had once: lanes that slept for ever, and settlements that cost others theirs."""

import threading
import time
from collections.abc import Callable

import pytest

from bartleby import Bartleby, Message, Retry, Snooze, heartbeat, outcomes
from tests.kit.guards import BOTH, Conn, endless, handled_by, make_solo, refused
from tests.kit.worker import Told, drain, lapse, state, until, working

Later = Callable[[float], object]
LATER = pytest.mark.parametrize("later", [Snooze, lambda seconds: Retry(after=seconds)], ids=["snooze", "retry"])


# Lanes that fall asleep


@BOTH
def test_a_lane_whose_waiting_messages_were_put_back_claims_again(app: Bartleby, conn: Conn, awaited: bool) -> None:
    """At one start in seconds nothing runs most of the time, so nothing ends either: nobody else looks for room."""
    seen: list[object] = []
    alone = threading.Event()
    handled_by(app, lambda message: seen.append(message.payload), awaited=awaited, rate=0.4)

    @app.handler("others")
    async def other(message: Message) -> None:
        alone.set()

    make_solo(app, conn, "others")
    app.send_many("orders", [{"payload": number} for number in range(3)])
    with working(app):
        until(lambda: len(seen) == 2 and state(conn)[1] == 1)  # the third waits for its turn
        app.client.resume_queue("others")
        assert alone.wait(30)
        until(lambda: len(seen) == 3)


@BOTH
def test_a_lane_whose_waiting_messages_were_of_a_lost_lease_claims_again(
    app: Bartleby, conn: Conn, awaited: bool
) -> None:
    seen: list[object] = []
    handled_by(app, lambda message: seen.append(message.payload), awaited=awaited, rate=0.4, lease=3)
    app.send_many("orders", [{"payload": number} for number in range(3)])
    with working(app):
        until(lambda: len(seen) == 2 and state(conn)[1] == 1)
        lapse(conn)
        until(lambda: len(seen) == 3)
    assert seen == [0, 1, 2]


# Settlements that the database refuses


@BOTH
def test_a_refused_settlement_does_not_block_what_waits_behind_it(
    app: Bartleby, conn: Conn, told: Told, awaited: bool
) -> None:
    seen: list[object] = []
    handled_by(app, lambda message: seen.append(message.payload), awaited=awaited, rate=10, concurrency=1, lease=1)
    with working(app) as running:
        app.send("orders", "first")  # from here on it knows that the handler is quick, and claims ahead
        until(lambda: running.worker.counts["done"] == 1)
        with refused(conn):
            app.send_many("orders", [{"payload": number} for number in range(10)])
            until(lambda: told.of("settlement.impossible"))
        until(lambda: running.worker.counts["done"] == 11, 60)
    assert set(map(str, seen)) == {"first", *map(str, range(10))}
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
        assert cancelled.wait(30)
        until(lambda: running.worker.running == 0)
    assert len(told.of("lease.lost")) == 1


# One bad settlement among others


@BOTH
@LATER
def test_a_delay_of_thousands_of_years_is_a_hundred(
    app: Bartleby, conn: Conn, told: Told, *, awaited: bool, later: Later
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
    app: Bartleby,
    conn: Conn,
    told: Told,
    monkeypatch: pytest.MonkeyPatch,
    *,
    awaited: bool,
    later: Callable[[float], object],
) -> None:
    monkeypatch.setattr(outcomes, "_CENTURY", float("inf"))  # the worker believes that the core takes any delay
    everybody = threading.Barrier(4)

    def handle(message: Message) -> object:
        if not awaited:
            everybody.wait(30)  # so that they are settled together
        return later(1e12 if message.payload == "bad" else 3000)

    handled_by(app, handle, awaited=awaited, concurrency=4)
    app.send_many("orders", [{"payload": payload} for payload in (0, 1, "bad", 3)])
    with working(app):
        until(lambda: told.of("settlement.refused"))
        assert state(conn) == (0, 1, 3, 0)
    assert [record.fields["messages"] for record in told.of("settlement.refused")] == [1]  # type: ignore[attr-defined]
    assert not told.of("settlement.impossible")


# A loop that is blocked


def test_a_handler_that_blocks_the_loop_is_told_of_once(app: Bartleby, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_STUCK", 2.0)
    free = threading.Event()

    @app.handler("orders", concurrency=1)
    async def handle(message: Message) -> None:
        free.wait(message.payload)

    with Told.listening() as told, working(app) as running:
        app.send("orders", 0.01)
        until(lambda: running.worker.counts["done"] == 1)
        assert not told.of("loop.blocked")
        app.send("orders", 60)
        until(lambda: told.of("loop.blocked"))
        began = time.monotonic()
        until(lambda: time.monotonic() - began > 0.5)  # two more beats, which say nothing
        free.set()
        until(lambda: running.worker.counts["done"] == 2)
        (record,) = told.of("loop.blocked")
    assert "declare it with def, or await" in record.getMessage()
