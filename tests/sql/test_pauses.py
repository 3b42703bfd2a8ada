"""Pauses that end by themselves: when they end, what the audit log records, and that no session waits for another."""

from datetime import timedelta
from typing import Any

import pytest

from tests.kit import sql
from tests.kit.clock import Clock
from tests.kit.refusals import assert_refused
from tests.kit.sql import Connect, Connection

AGAIN = "select bartleby.pause_queue('q', 'ben', 'not yet', p_until => bartleby.clock() + interval '1 hour')"
PAUSED = ("ana", "queue.pause", "wrong mails")
OVER = ("bartleby", "queue.resume", "the pause is over")
NOT_YET = ("ben", "queue.pause", "not yet")
pytestmark = pytest.mark.usefixtures("q")


def pause(conn: Connection, minutes: float = 30, queue: str = "q") -> None:
    conn.execute(
        "select bartleby.pause_queue(%s, 'ana', 'wrong mails', 'r-1', bartleby.clock() + %s)",
        [queue, timedelta(minutes=minutes)],
    )


def paused(conn: Connection, queue: str = "q") -> tuple[bool, bool]:
    """Whether it is paused, and whether that has an end."""
    found = sql.stats(conn, queue)
    return found["paused"], found["paused_until"] is not None


def lines(conn: Connection) -> list[tuple[Any, ...]]:
    """The lines of the audit log since the queues were created."""
    query = "select actor, action, reason from bartleby.audit_log where action <> 'queue.create' order by id"
    return conn.execute(query).fetchall()


class TestEnd:
    def test_first_reap_after_its_time_ends_it(self, conn: Connection, clock: Clock, connect: Connect) -> None:
        worker = connect()
        worker.execute(f'listen "{sql.value(conn, "select bartleby.channel(%s)", "q")}"')
        clock.stop()
        sql.send(conn, 1)
        pause(conn)
        assert sql.stats(conn)["paused_until"] - sql.value(conn, "select bartleby.clock()") == timedelta(minutes=30)
        end = sql.value(conn, "select to_jsonb(paused_until) from bartleby.queue")
        conn.execute("select bartleby.open_breaker('q', 'storm', '0')")
        clock.advance(29 * 60)
        sql.reap(conn)
        with conn.transaction():
            sql.reap(conn)
            assert sql.value(conn, "select pg_current_xact_id_if_assigned()") is None, (
                "before its end it writes nothing"
            )
        clock.advance(7 * 86400)
        assert sql.claim(conn).messages == [], "a claim ends nothing, however late it is"
        with conn.transaction(force_rollback=True):
            sql.reap(conn)
            assert paused(conn) == (False, False)
        assert paused(conn) == (True, True)
        conn.execute("set role bartleby_worker")
        sql.reap(conn)
        sql.reap(conn)
        conn.execute("reset role")
        assert [notice.pid for notice in worker.notifies(timeout=60, stop_after=1)] == [conn.info.backend_pid]
        assert (paused(conn), sql.stats(conn)["breaker"]) == ((False, False), "open"), "the breaker is left alone"
        assert lines(conn) == [PAUSED, OVER]
        changed = "select subject, before, after, request_id from bartleby.audit_log order by id desc limit 1"
        assert tuple(sql.row(conn, changed).values()) == (
            {"queue": "q"}, {"paused": True, "paused_until": end}, {"paused": False}, None,
        )  # fmt: skip
        assert sql.claim(conn).payloads == [1]

    def test_latest_pause_replaces_the_earlier_end(self, conn: Connection, clock: Clock) -> None:
        pause(conn)
        again = "select bartleby.pause_queue('q', 'ben', 'not yet', null, bartleby.clock() + %s::interval)"
        for until, over in (("10 min", True), ("1 hour", False), (None, False)):
            with conn.transaction(force_rollback=True):
                conn.execute(again, [until])
                clock.advance(1801)
                sql.reap(conn)
                assert lines(conn) == [PAUSED, NOT_YET, *([OVER] if over else [])], until
                assert paused(conn)[0] is not over, until
        conn.execute("select bartleby.resume_queue('q', 'ben', 'all is well')")
        assert paused(conn) == (False, False)
        clock.advance(1801)
        conn.execute(again, [None])
        sql.reap(conn)
        assert paused(conn) == (True, False), "resuming forgets the end"
        assert lines(conn) == [PAUSED, ("ben", "queue.resume", "all is well"), NOT_YET]

    def test_end_must_be_in_the_future_and_is_recorded_once(self, conn: Connection) -> None:
        for _ in range(2):
            conn.execute("select bartleby.pause_queue('q', 'ana', 'wrong mails', null, '2099-01-01')")
        for end in ("-infinity", "1999-01-01", "now", "2999-01-01", "infinity"):
            word = "a queue is paused until a time to come"
            assert_refused(conn, "ZB008", word, "select bartleby.pause_queue('q', 'ben', 'x', null, %s)", end)
        assert (paused(conn), lines(conn)) == ((True, True), [PAUSED])


@pytest.fixture
def lapsed(conn: Connection, clock: Clock, q: None) -> Clock:
    """The pause is over, and so is a lease."""
    sql.send(conn, 1)
    sql.claim(conn)
    pause(conn)
    clock.advance(1801)
    conn.execute("set statement_timeout = '30s'")
    return clock


class TestAtOnce:
    """A reap waits for no operator, and overrules none."""

    def test_operator_that_pauses_meanwhile_wins(self, conn: Connection, lapsed: Clock, connect: Connect) -> None:
        operator = connect(autocommit=False)
        operator.execute(AGAIN)
        sql.reap(conn)
        operator.commit()
        sql.reap(conn)
        assert (paused(conn), lines(conn)) == ((True, True), [PAUSED, NOT_YET])
        lapsed.advance(3600)
        janitor = connect(autocommit=False)
        sql.reap(janitor)
        with sql.waiting(conn, operator, lambda other: other.execute(AGAIN), for_whom=janitor) as second:
            janitor.commit()
            second.result()
        operator.commit()
        assert (paused(conn), lines(conn)) == ((True, True), [PAUSED, NOT_YET, OVER, NOT_YET])
        assert sql.rows(conn, "select * from bartleby.verify_audit()") == []

    @pytest.mark.usefixtures("lapsed")
    def test_lapsed_leases_return_whatever_is_locked(self, conn: Connection, connect: Connect) -> None:
        other = connect(autocommit=False)
        for locking in (
            AGAIN,
            "select bartleby.create_queue('other')",
            "lock table bartleby.queue in share row exclusive mode",
            "select bartleby.open_breaker('q', 'storm', '0')",
        ):
            other.execute(locking.encode())
            with conn.transaction(force_rollback=True):
                assert len(sql.reap(conn)) == 1, locking
                assert paused(conn) == (True, True), locking
            other.rollback()
        with conn.transaction(force_rollback=True):
            conn.execute("set local session_replication_role = replica")
            conn.execute("delete from bartleby.audit_head")
            assert len(sql.reap(conn)) == 1
            assert paused(conn) == (True, True), "nothing is done that cannot be recorded"
        sql.reap(conn)
        assert (paused(conn), lines(conn)) == ((False, False), [PAUSED, OVER])

    def test_each_queue_ends_at_its_own_time_though_others_are_locked(
        self, conn: Connection, clock: Clock, connect: Connect
    ) -> None:
        for name, minutes in (("a", 10.0), ("b", 20.0), ("c", 10.0)):
            sql.create(conn, name)
            pause(conn, minutes, name)
        conn.execute("select bartleby.pause_queue('q')")
        clock.advance(601)
        other = connect(autocommit=False)
        other.execute("select bartleby.open_breaker('c', 'storm', '0')")
        sql.reap(conn)
        assert sql.column(conn, "select name from bartleby.queues where paused order by 1") == ["b", "c", "q"]
        other.commit()
        sql.reap(conn)
        assert sql.column(conn, "select name from bartleby.queues where paused order by 1") == ["b", "q"]
        clock.advance(100 * 365 * 86400)
        sql.reap(conn)
        assert sql.column(conn, "select name from bartleby.queues where paused") == ["q"]
