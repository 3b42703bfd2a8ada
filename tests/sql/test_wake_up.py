"""Waking up: a busy queue sends no notifications, and no idle worker misses one."""

from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from tests.kit import sql
from tests.kit.clock import Clock
from tests.kit.sql import Connect, Connection

SOON = timedelta(milliseconds=10)
SECOND = timedelta(seconds=1)
LONG = timedelta(seconds=30)
pytestmark = pytest.mark.usefixtures("q")


@pytest.fixture
def worker(connect: Connect, conn: Connection) -> Connection:
    listening = connect()
    listening.execute(f'listen "{sql.value(conn, "select bartleby.channel(%s)", "q")}"')
    listening.execute("listen mark")
    return listening


def idle(conn: Connection, seconds: float = 30) -> timedelta:
    found = sql.value(conn, "select bartleby.idle('q', make_interval(secs => %s))", float(seconds))
    assert isinstance(found, timedelta)
    return found


def heard(conn: Connection, worker: Connection) -> int:
    """How often the worker was notified by what has committed so far: notifications come in order of commits."""
    conn.execute("notify mark")
    for count, notice in enumerate(worker.notifies(timeout=60)):
        if notice.channel == "mark":
            return count
        assert notice.payload == ""
    pytest.fail("the mark never came")


def test_idle_worker_is_notified_until_its_idle_time_is_over(
    conn: Connection, worker: Connection, clock: Clock
) -> None:
    clock.stop()
    sql.create(conn, "other")
    sql.send(conn, "busy")
    sql.send(conn, "busy", delay="1 second")
    clock.advance(2)
    assert (sql.drain(conn), heard(conn, worker)) == (["busy", "busy"], 0), "no worker sleeps"
    for n in range(10):
        assert idle(worker) == LONG
        sql.send(conn, n, "other")
        clock.advance(25)
        sql.send(conn, n)
        assert heard(conn, worker) == 1
        assert sql.drain(worker) == [n]
    clock.advance(91)
    sql.send(conn, "late")
    assert heard(conn, worker) == 0
    assert sql.drain(worker) == ["late"]


def test_worker_that_comes_during_or_after_a_send_looks_again_soon(
    connect: Connect, conn: Connection, worker: Connection, clock: Clock
) -> None:
    """The worker writes that it is idle and then looks; the sender draws its position and then looks."""
    clock.stop()
    sender = connect(autocommit=False)
    sql.send(sender, 1)
    assert sql.claim(worker).messages == []
    assert idle(worker) <= SOON
    sender.commit()
    assert heard(conn, worker) == 0
    assert sql.claim(worker).payloads == [1]
    sql.send(sender, 2)
    sql.send_count(conn, 5)
    assert len(sql.drain(conn)) == 5
    assert idle(worker) <= SOON
    sender.commit()
    assert sql.claim(worker).payloads == [2]
    sql.send(conn, 3)
    assert idle(worker) <= SOON
    assert sql.claim(worker).payloads == [3]
    assert idle(worker) == LONG


def test_sleep_ends_when_the_next_message_is_due(conn: Connection, clock: Clock) -> None:
    clock.stop()
    assert [idle(conn, 30), idle(conn, 5)] == [LONG, timedelta(seconds=5)]
    sql.send(conn, 1, delay="1 hour")
    sql.send(conn, 2, delay="20 seconds")
    for advance, sleeps in ((0, 20), (15, 5), (10, 0), (1000, 0)):
        clock.advance(advance)
        assert idle(conn, 30) == timedelta(seconds=sleeps)
        assert idle(conn, 5) == timedelta(seconds=min(5, sleeps))
    assert sql.claim(conn).payloads == [2]
    assert idle(conn, 30) == LONG
    with conn.transaction():
        idle(conn)
        assert sql.value(conn, "select pg_current_xact_id_if_assigned() is null")


def reject_at_the_source(conn: Connection) -> None:
    sql.create(conn, "source", dead_letter_to="q")
    sql.send(conn, 1, "source")
    claimed = sql.claim(conn, queue="source")
    sql.reject(conn, claimed.lease, claimed.positions[0], "delivery_error")


def test_every_verb_that_brings_a_message_wakes_a_worker(conn: Connection, worker: Connection, clock: Clock) -> None:
    sql.send_count(conn, 4)
    first, second, third, _ = [sql.claim(conn) for _ in range(4)]
    clock.advance(61)
    calls: dict[str, partial[Any]] = {
        "ack": partial(sql.ack, conn, first.lease),
        "release": partial(sql.release, conn, second.lease),
        "fail": partial(sql.fail_all, conn, third),
        "reap": partial(sql.reap, conn),
        "delay": partial(sql.send, conn, 1, delay="1 second"),
        "route": partial(reject_at_the_source, conn),
    }
    for verb, call in calls.items():
        idle(worker)
        call()
        assert heard(conn, worker) == (verb != "ack"), verb


def test_sender_that_stays_open_or_rolled_back_does_not_keep_workers_awake(
    connect: Connect, conn: Connection, clock: Clock
) -> None:
    sender = connect(autocommit=False)
    for commits in (False, True):
        sql.send(sender, 1)
        if not commits:
            sender.rollback()
        for _ in range(4):
            clock.advance(2)
            assert sql.claim(conn).messages == []
        assert idle(conn) == (SECOND if commits else LONG)
    sender.commit()
    assert sql.claim(conn).payloads == [1]
    assert idle(conn) == LONG
