"""The end of a worker: what runs is finished within the grace, the rest goes back uncharged."""

import asyncio
import time
from unittest import mock

import pytest

from bartleby import Bartleby, heartbeat, holding
from bartleby.config import Settings
from bartleby.holding import Holding
from bartleby.link import Link
from tests.kit.sql import value
from tests.kit.worker import BOTH, LONG, CapturedLog, Conn, Gate, claim_ahead, numbered, state, until, working


def nothing_was_charged(conn: Conn) -> bool:
    """Return whether nothing is leased, and no message lost an attempt."""
    query = "select count(*) filter (where attempts > 0 or state = 'leased') from bartleby.messages"
    failed = "select count(*) from bartleby.attempts where outcome <> 'lost'"
    return bool(value(conn, query) == 0 and value(conn, failed) == 0)


@BOTH
def test_running_handlers_finish_and_the_rest_is_released(
    app: Bartleby, conn: Conn, monkeypatch: pytest.MonkeyPatch, awaited: bool
) -> None:
    monkeypatch.setattr(holding, "_PUT_BACK_EVERY", 3600.0)
    gate = Gate()
    app.handler("orders", concurrency=2, retry={"max_attempts": 1})(gate.handler(awaited=awaited))
    with working(app) as running:
        claim_ahead(running)
        app.send_many("orders", numbered(20))
        gate.wait_for_start(2)
        until(lambda: state(conn)[1] > 2)
        running.stop()
        until(lambda: state(conn)[1] == 2)
        assert running.thread.is_alive()
        assert not gate.another_started
        gate.open()
        counts = running.join()
    assert (counts["done"], counts["dead"], counts["retried"], counts["refused"]) == (2, 0, 0, 0)
    ready, leased, deferred, dead = state(conn)
    assert (ready + deferred, leased, dead) == (18, 0, 0)
    assert nothing_was_charged(conn)


@BOTH
@pytest.mark.parametrize("order", ["second stop", "end of the grace", "end of the grace, ignored"])
def test_handler_that_does_not_end_is_cancelled_and_its_message_released(
    app: Bartleby, conn: Conn, awaited: bool, order: str
) -> None:
    gate = Gate(stubborn=order.endswith("ignored"))
    app.handler("orders", retry={"max_attempts": 1})(gate.handler(awaited=awaited))
    app.send("orders", 1)
    with working(app, grace=3600 if order == "second stop" else 0.1) as running:
        gate.wait_for_start()
        running.stop()
        until(running.worker._shared.stopping.is_set)
        if order == "second stop":
            assert running.thread.is_alive()
            running.stop()
        until(lambda: state(conn)[1] == 0)
        if not order.endswith("ignored"):
            assert gate.cancelled.wait(LONG)
            assert running.join() == {"released": 1}
        gate.open()
    assert state(conn)[3] == 0
    assert nothing_was_charged(conn)


def test_idle_worker_stops_without_its_sleep_being_over(app: Bartleby, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bartleby.fetching._LONGEST_SLEEP", 3600.0)
    monkeypatch.setattr("bartleby.worker._LAST_WORDS", 3600.0)
    app.handler("orders")(print)
    for begun in (True, False):
        with working(app, poll=3600) as running:
            until(lambda: not begun or running.worker._shared.listener.listening)  # noqa: B023 - at once
            assert running.end() == {}


async def test_stopping_worker_is_not_reported_as_a_blocked_loop(dsn: str, log: CapturedLog) -> None:
    settings = Settings(dsn=dsn)
    holding = Holding(settings, Link(settings, "settles"), asyncio.Event())
    showing = asyncio.create_task(holding.show_life())
    await asyncio.sleep(0)
    assert holding._heartbeat.seen_alive <= time.monotonic()
    showing.cancel()
    await asyncio.wait([showing])
    with mock.patch.object(heartbeat, "_STUCK", 0.0):
        holding._heartbeat._watch_loop()
    assert not log.of("loop.blocked")
