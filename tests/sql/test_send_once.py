"""Sending once: a second send of the same key within its time returns the id of the first."""

import pytest

from tests.kit.clock import move_clock
from tests.kit.sql import Connect, Connection, claim, column, create, drain, refused, send, waiting


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn)
    return conn


class TestUniqueness:
    def test_a_second_send_of_the_key_returns_the_first_id(self, conn: Connection) -> None:
        first = send(conn, 1, key="k", unique_for="1 hour")
        assert send(conn, 2, key="k", unique_for="1 hour") == first
        assert drain(conn) == [1]
        assert send(conn, 3, key="k", unique_for="1 hour") == first
        assert claim(conn).messages == []

    def test_after_its_time_the_key_is_free_again(self, conn: Connection) -> None:
        clock = move_clock(conn)
        clock.stop()
        first = send(conn, 1, key="k", unique_for="60 seconds")
        clock.advance(59.9)
        assert send(conn, 2, key="k", unique_for="60 seconds") == first
        clock.advance(0.1)
        second = send(conn, 3, key="k", unique_for="60 seconds")
        assert second > first
        assert send(conn, 4, key="k", unique_for="60 seconds") == second
        assert drain(conn) == [1, 3]

    def test_reaping_forgets_keys_whose_time_is_over(self, conn: Connection) -> None:
        clock = move_clock(conn)
        send(conn, 1, key="short", unique_for="60 seconds")
        send(conn, 2, key="long", unique_for="2 hours")
        clock.advance(3600)
        conn.execute("select bartleby.reap()")
        assert column(conn, "select key from bartleby.unique_key") == ["long"]

    def test_keys_without_uniqueness_may_repeat(self, conn: Connection) -> None:
        assert send(conn, 1, key="k") != send(conn, 2, key="k")
        send(conn, 3, key="k", unique_for="1 hour")
        send(conn, 4, key="k")
        assert drain(conn) == [1, 2, 3, 4]

    def test_keys_of_different_queues_do_not_meet(self, conn: Connection) -> None:
        create(conn, "other")
        first = send(conn, 1, key="k", unique_for="1 hour")
        assert send(conn, 2, "other", key="k", unique_for="1 hour") != first
        assert drain(conn) + drain(conn, "other") == [1, 2]

    def test_a_concurrent_second_sender_waits_and_returns_the_first_id(
        self, connect: Connect, conn: Connection
    ) -> None:
        first, second = connect(autocommit=False), connect()
        sent = send(first, 1, key="k", unique_for="1 hour")

        def again(conn: Connection) -> int:
            return send(conn, 2, key="k", unique_for="1 hour")

        with waiting(conn, second, again, for_whom=first) as under_way:
            first.commit()
            assert under_way.result() == sent
        assert drain(conn) == [1]

    def test_if_the_first_rolls_back_the_second_is_sent(self, connect: Connect, conn: Connection) -> None:
        first, second = connect(autocommit=False), connect()
        sent = send(first, 1, key="k", unique_for="1 hour")

        def again(conn: Connection) -> int:
            return send(conn, 2, key="k", unique_for="1 hour")

        with waiting(conn, second, again, for_whom=first) as under_way:
            first.rollback()
            assert under_way.result() != sent
        assert drain(conn) == [2]

    def test_a_key_is_needed(self, conn: Connection) -> None:
        with refused("ZB004", "key"):
            send(conn, 1, unique_for="1 hour")

    def test_its_time_is_bounded(self, conn: Connection) -> None:
        for bad in ("0 seconds", "-1 second", "101 years"):
            with refused("ZB004", "unique_for"):
                send(conn, 1, key="k", unique_for=bad)

    def test_a_delayed_unique_message_is_sent_once(self, conn: Connection) -> None:
        clock = move_clock(conn)
        first = send(conn, 1, key="k", unique_for="1 hour", delay="10 seconds")
        assert send(conn, 2, key="k", unique_for="1 hour", delay="10 seconds") == first
        clock.advance(11)
        assert drain(conn) == [1]
