"""Waking up: a busy queue pays for no notification, and no idle worker misses one."""

from datetime import timedelta

import pytest

from tests.kit.clock import Clock
from tests.kit.sql import (
    Connect,
    Connection,
    ack,
    claim,
    create,
    drain,
    fail_all,
    reap,
    refused,
    reject,
    release,
    send,
    send_count,
    value,
)

SOON = timedelta(milliseconds=10)
LONG = timedelta(seconds=30)


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn)
    return conn


@pytest.fixture
def worker(connect: Connect, conn: Connection) -> Connection:
    listening = connect()
    listening.execute(f'listen "{value(conn, "select bartleby.channel(%s)", "q")}"')
    listening.execute("listen mark")
    return listening


def idle(conn: Connection, seconds: float = 30, queue: str = "q") -> timedelta:
    found = value(conn, "select bartleby.idle(%s, make_interval(secs => %s))", queue, float(seconds))
    assert isinstance(found, timedelta)
    return found


def heard(conn: Connection, worker: Connection) -> int:
    """How often the worker was notified by what has committed so far: notifications come in order of commits."""
    conn.execute("notify mark")
    for count, notice in enumerate(worker.notifies(timeout=10)):
        if notice.channel == "mark":
            return count
    pytest.fail("the mark never came")


def test_nobody_is_notified_when_nobody_is_idle(conn: Connection, worker: Connection) -> None:
    send(conn, 1)
    send_count(conn, 10)
    send(conn, 2, delay="1 second")
    drain(conn)
    assert heard(conn, worker) == 0


def test_an_idle_worker_is_notified(conn: Connection, worker: Connection) -> None:
    assert idle(worker) == LONG
    send(conn, 1)
    assert heard(conn, worker) == 1
    assert claim(worker).payloads == [1]


def test_one_transaction_is_one_notification(conn: Connection, worker: Connection) -> None:
    idle(worker)
    with conn.transaction():
        for n in range(10):
            send(conn, n)
        send_count(conn, 100)
    assert heard(conn, worker) == 1


def test_a_bulk_is_one_notification(conn: Connection, worker: Connection) -> None:
    idle(worker)
    send_count(conn, 1000)
    assert heard(conn, worker) == 1


def test_the_notification_carries_nothing(conn: Connection, worker: Connection) -> None:
    idle(worker)
    send(conn, "secret", key="secret")
    assert [notice.payload for notice in worker.notifies(timeout=10, stop_after=1)] == [""]


def test_workers_of_other_queues_sleep_on(conn: Connection, worker: Connection) -> None:
    create(conn, "other")
    idle(worker)
    send(conn, 1, "other")
    assert heard(conn, worker) == 0


def test_nobody_is_notified_after_the_idle_time_is_over(conn: Connection, worker: Connection, clock: Clock) -> None:
    idle(worker, 30)
    clock.advance(91)
    send(conn, 1)
    assert heard(conn, worker) == 0
    assert claim(conn).payloads == [1]


def test_a_worker_that_keeps_being_idle_keeps_being_notified(
    conn: Connection, worker: Connection, clock: Clock
) -> None:
    for n in range(10):
        assert idle(worker) == LONG
        clock.advance(25)
        send(conn, n)
        assert heard(conn, worker) == 1
        assert drain(worker) == [n]


class TestHandshake:
    """The worker says that it is idle and then looks; the sender draws its position and then looks."""

    def test_the_sender_comes_after_the_worker(self, conn: Connection, worker: Connection) -> None:
        idle(worker)
        with conn.transaction():
            send(conn, 1)
        assert heard(conn, worker) == 1

    def test_the_worker_comes_while_the_sender_is_under_way(
        self, connect: Connect, conn: Connection, worker: Connection
    ) -> None:
        sender = connect(autocommit=False)
        send(sender, 1)
        assert claim(worker).messages == []
        assert idle(worker) <= SOON
        sender.commit()
        assert heard(conn, worker) == 0
        assert claim(worker).payloads == [1]

    def test_the_worker_comes_after_the_sender(self, conn: Connection, worker: Connection) -> None:
        send(conn, 1)
        assert idle(worker) <= SOON
        assert claim(worker).payloads == [1]
        assert idle(worker) == LONG

    def test_a_sender_whose_hole_was_passed_keeps_the_worker_looking(
        self, connect: Connect, conn: Connection, worker: Connection
    ) -> None:
        sender = connect(autocommit=False)
        send(sender, 1)
        send_count(conn, 5)
        drain(conn)
        assert idle(worker) <= timedelta(seconds=1)
        sender.commit()
        assert claim(worker).payloads == [1]

    def test_a_rolled_back_sender_does_not_eat_the_wake_up_of_the_next(
        self, connect: Connect, conn: Connection, worker: Connection
    ) -> None:
        sender = connect(autocommit=False)
        idle(worker)
        send(sender, 1)
        sender.rollback()
        assert heard(conn, worker) == 0
        send(conn, 2)
        assert heard(conn, worker) == 1
        assert drain(worker) == [2]

    def test_a_rolled_back_idle_worker_is_still_notified(self, conn: Connection, worker: Connection) -> None:
        with worker.transaction(force_rollback=True):
            idle(worker)
        send(conn, 1)
        assert heard(conn, worker) == 1


class TestSleep:
    def test_it_is_as_long_as_asked_when_there_is_nothing(self, conn: Connection) -> None:
        assert idle(conn, 30) == LONG
        assert idle(conn, 5) == timedelta(seconds=5)

    def test_it_ends_when_the_next_message_is_due(self, conn: Connection, clock: Clock) -> None:
        send(conn, 1, delay="1 hour")
        send(conn, 2, delay="20 seconds")
        assert timedelta(seconds=19) < idle(conn, 30) <= timedelta(seconds=20)
        assert idle(conn, 5) == timedelta(seconds=5)
        clock.advance(15)
        assert timedelta(seconds=4) < idle(conn, 30) <= timedelta(seconds=5)
        clock.advance(10)
        assert idle(conn, 30) == timedelta(0)
        assert claim(conn).payloads == [2]
        assert idle(conn, 30) == LONG

    def test_it_is_never_negative(self, conn: Connection, clock: Clock) -> None:
        send(conn, 1, delay="1 second")
        clock.advance(1000)
        assert idle(conn, 30) == timedelta(0)

    def test_looking_often_takes_no_transaction_id(self, conn: Connection) -> None:
        idle(conn)
        for _ in range(10):
            with conn.transaction():
                idle(conn)
                assert value(conn, "select pg_current_xact_id_if_assigned() is null")


class TestOtherVerbs:
    """Whatever brings a message back wakes a worker too."""

    def test_a_delayed_send(self, conn: Connection, worker: Connection) -> None:
        idle(worker)
        send(conn, 1, delay="1 second")
        assert heard(conn, worker) == 1
        assert idle(worker) <= timedelta(seconds=1)

    def test_a_release(self, conn: Connection, worker: Connection) -> None:
        send(conn, 1)
        claimed = claim(conn)
        idle(worker)
        release(conn, claimed.lease)
        assert heard(conn, worker) == 1

    def test_a_failure(self, conn: Connection, worker: Connection) -> None:
        send(conn, 1)
        claimed = claim(conn)
        idle(worker)
        fail_all(conn, claimed)
        assert heard(conn, worker) == 1

    def test_a_lapsed_lease(self, conn: Connection, worker: Connection, clock: Clock) -> None:
        send(conn, 1)
        claim(conn)
        clock.advance(61)
        idle(worker)
        reap(conn)
        assert heard(conn, worker) == 1

    def test_a_route(self, conn: Connection, worker: Connection) -> None:
        create(conn, "source", dead_letter_to="q")
        send(conn, 1, "source")
        claimed = claim(conn, queue="source")
        idle(worker)
        reject(conn, claimed.lease, claimed.positions[0], "delivery_error")
        assert heard(conn, worker) == 1

    def test_an_ack_wakes_nobody(self, conn: Connection, worker: Connection) -> None:
        send(conn, 1)
        claimed = claim(conn)
        idle(worker)
        ack(conn, claimed.lease)
        assert heard(conn, worker) == 0


def test_a_sender_in_two_phases_does_without_notification(
    connect: Connect, conn: Connection, worker: Connection
) -> None:
    """PostgreSQL prepares no transaction that notifies."""
    idle(worker)
    sender = connect(autocommit=False)
    sender.execute("set bartleby.notify = off")
    send(sender, 1)
    sender.execute("prepare transaction 'two phases'")
    conn.execute("commit prepared 'two phases'")
    assert heard(conn, worker) == 0
    assert claim(worker).payloads == [1]


def test_a_channel_belongs_to_one_queue(conn: Connection) -> None:
    create(conn, "other")
    assert value(conn, "select bartleby.channel('q')") != value(conn, "select bartleby.channel('other')")
    with refused("ZB001"):
        conn.execute("select bartleby.channel('nowhere')")


def test_a_tail_that_was_rolled_back_does_not_keep_workers_awake(
    connect: Connect, conn: Connection, clock: Clock
) -> None:
    """Nothing is under way, so nothing is worth looking for a hundred times a second."""
    sender = connect(autocommit=False)
    send(sender, 1)
    sender.rollback()
    for _ in range(4):
        clock.advance(2)
        assert claim(conn).messages == []
    assert idle(conn) == LONG


def test_a_sender_that_stays_open_at_the_tail_does_not_keep_workers_awake(
    connect: Connect, conn: Connection, clock: Clock
) -> None:
    sender = connect(autocommit=False)
    send(sender, 1)
    for _ in range(4):
        clock.advance(2)
        assert claim(conn).messages == []
    assert idle(conn) == timedelta(seconds=1)
    sender.commit()
    assert claim(conn).payloads == [1]
    assert idle(conn) == LONG


def test_a_paused_queue_lets_its_workers_sleep_and_resuming_wakes_them(conn: Connection, worker: Connection) -> None:
    send_count(conn, 3)
    conn.execute("select bartleby.pause_queue('q')")
    assert idle(conn) == timedelta(seconds=1)
    assert heard(conn, worker) == 0
    conn.execute("select bartleby.resume_queue('q')")
    assert heard(conn, worker) == 1
    assert drain(conn) == [1, 2, 3]
