"""Pauses that end by themselves: when, told by whom, and that nobody waits for anybody because of them."""

from datetime import timedelta
from typing import Any

import pytest

from tests.kit.clock import Clock
from tests.kit.sql import (
    ROLES,
    Connect,
    Connection,
    claim,
    column,
    create,
    drain,
    reap,
    refused,
    row,
    rows,
    send,
    stats,
    value,
    waiting,
)

AGAIN = "select bartleby.pause_queue('q', 'ben', 'not yet', p_until => bartleby.clock() + interval '1 hour')"


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn)
    return conn


def pause(conn: Connection, minutes: float = 30, queue: str = "q") -> None:
    conn.execute(
        "select bartleby.pause_queue(%s, 'ana', 'wrong mails', 'r-1', bartleby.clock() + %s)",
        [queue, timedelta(minutes=minutes)],
    )


def paused(conn: Connection, queue: str = "q") -> tuple[bool, bool]:
    """Whether it is paused, and whether that has an end."""
    found = stats(conn, queue)
    return found["paused"], found["paused_until"] is not None


def lines(conn: Connection) -> list[tuple[Any, ...]]:
    """The lines of the audit since the queues were made."""
    query = "select actor, action, reason from bartleby.audit_log where action <> 'queue.create' order by id"
    return conn.execute(query).fetchall()


PAUSED = ("ana", "queue.pause", "wrong mails")
OVER = ("bartleby", "queue.resume", "the pause is over")
NOT_YET = ("ben", "queue.pause", "not yet")


class TestItEnds:
    """By the first reap after its time, and not before."""

    def test_when_its_time_has_come(self, conn: Connection, clock: Clock) -> None:
        send(conn, 1)
        pause(conn)
        end = stats(conn)["paused_until"]
        assert timedelta(minutes=29) < end - value(conn, "select bartleby.clock()") <= timedelta(minutes=30)
        clock.advance(29 * 60)
        reap(conn)
        assert claim(conn).messages == []
        assert paused(conn) == (True, True)
        clock.advance(60)
        reap(conn)
        assert paused(conn) == (False, False)
        assert drain(conn) == [1]

    def test_with_a_line_in_the_audit(self, conn: Connection, clock: Clock) -> None:
        pause(conn)
        end = value(conn, "select to_jsonb(paused_until) from bartleby.queue")
        clock.advance(1801)
        reap(conn)
        reap(conn)
        assert lines(conn) == [PAUSED, OVER]
        found = row(conn, "select subject, before, after, request_id from bartleby.audit_log order by id desc limit 1")
        assert found == {
            "subject": {"queue": "q"},
            "before": {"paused": True, "paused_until": end},
            "after": {"paused": False},
            "request_id": None,
        }
        assert rows(conn, "select * from bartleby.verify_audit()") == []

    def test_and_those_who_wait_are_woken(self, connect: Connect, conn: Connection, clock: Clock) -> None:
        worker = connect()
        worker.execute(f'listen "{value(conn, "select bartleby.channel(%s)", "q")}"')
        pause(conn)
        clock.advance(1801)
        reap(conn)
        assert [notice.pid for notice in worker.notifies(timeout=15, stop_after=1)] == [conn.info.backend_pid]

    def test_each_queue_at_its_own(self, conn: Connection, clock: Clock) -> None:
        for name, minutes in (("a", 10.0), ("b", 20.0), ("c", 10.0)):
            create(conn, name)
            pause(conn, minutes, name)
        conn.execute("select bartleby.pause_queue('q')")
        clock.advance(601)
        reap(conn)
        assert column(conn, "select name from bartleby.queues where paused order by 1") == ["b", "q"]
        clock.advance(100 * 86400)
        reap(conn)
        assert column(conn, "select name from bartleby.queues where paused") == ["q"]

    def test_though_nobody_reaped_when_it_came(self, connect: Connect, conn: Connection, clock: Clock) -> None:
        """Nothing of it is in a session: whoever reaps first after days, a restart or a restore ends it."""
        pause(conn)
        clock.advance(7 * 86400)
        assert claim(conn).messages == []
        reap(connect())
        assert paused(conn) == (False, False)

    def test_or_not_at_all_if_that_is_rolled_back(self, conn: Connection, clock: Clock) -> None:
        pause(conn)
        clock.advance(1801)
        with conn.transaction(force_rollback=True):
            reap(conn)
            assert paused(conn) == (False, False)
        assert (paused(conn), lines(conn)) == ((True, True), [PAUSED])
        reap(conn)
        assert (paused(conn), lines(conn)) == ((False, False), [PAUSED, OVER])

    def test_and_the_breaker_is_another_matter(self, conn: Connection, clock: Clock) -> None:
        send(conn, 1)
        pause(conn)
        conn.execute("select bartleby.force_breaker('q', 'ana', 'for good')")
        clock.advance(1801)
        reap(conn)
        assert (paused(conn), stats(conn)["breaker"]) == ((False, False), "forced")
        assert claim(conn).messages == []

    def test_and_costs_nothing_before(self, conn: Connection) -> None:
        pause(conn)
        reap(conn)
        with conn.transaction():
            reap(conn)
            assert value(conn, "select pg_current_xact_id_if_assigned()") is None


class TestTheWordOfPeople:
    """The last one counts."""

    def test_resuming_forgets_the_end(self, conn: Connection, clock: Clock) -> None:
        pause(conn)
        conn.execute("select bartleby.resume_queue('q', 'ben', 'all is well')")
        assert paused(conn) == (False, False)
        clock.advance(1801)
        conn.execute("select bartleby.pause_queue('q', 'ben', 'not yet')")
        reap(conn)
        assert paused(conn) == (True, False)
        assert lines(conn) == [PAUSED, ("ben", "queue.resume", "all is well"), NOT_YET]

    @pytest.mark.parametrize(("minutes", "over"), [(10, True), (60, False), (None, False)])
    def test_pausing_again_replaces_it(self, conn: Connection, clock: Clock, minutes: float | None, over: bool) -> None:
        pause(conn)
        text = "select bartleby.pause_queue('q', 'ben', 'not yet', null, bartleby.clock() + %s::interval)"
        conn.execute(text, [None if minutes is None else timedelta(minutes=minutes)])
        clock.advance(1801)
        reap(conn)
        assert lines(conn) == [PAUSED, NOT_YET, *([OVER] if over else [])]
        assert paused(conn)[0] is not over

    def test_saying_the_same_twice_is_one_line(self, conn: Connection) -> None:
        for _ in range(2):
            conn.execute("select bartleby.pause_queue('q', 'ana', 'wrong mails', null, '2099-01-01')")
        assert lines(conn) == [PAUSED]

    def test_as_before_it_may_have_no_end(self, conn: Connection, clock: Clock) -> None:
        conn.execute("select bartleby.pause_queue('q', 'ana', 'wrong mails', 'r-1')")
        clock.advance(100 * 365 * 86400)
        reap(conn)
        assert paused(conn) == (True, False)

    @pytest.mark.parametrize("end", ["-infinity", "1999-01-01", "now", "2999-01-01", "infinity"])
    def test_an_end_is_to_come_and_within_reach(self, conn: Connection, end: str) -> None:
        pause(conn)
        with refused("ZB008", "a queue is paused until a time to come"):
            conn.execute("select bartleby.pause_queue('q', 'ben', 'x', null, %s)", [end])
        assert (paused(conn), lines(conn)) == ((True, True), [PAUSED])


class TestTwoAtOnce:
    """Who reaps waits for no operator, and no operator is overruled."""

    def test_who_is_just_pausing_again_wins(self, connect: Connect, conn: Connection, clock: Clock) -> None:
        pause(conn)
        clock.advance(1801)
        operator = connect(autocommit=False)
        operator.execute(AGAIN)
        reap(conn)
        operator.commit()
        reap(conn)
        assert (paused(conn), lines(conn)) == ((True, True), [PAUSED, NOT_YET])
        clock.advance(3600)
        reap(conn)
        assert lines(conn) == [PAUSED, NOT_YET, OVER]

    def test_who_thinks_better_of_it_leaves_the_end_as_it_was(
        self, connect: Connect, conn: Connection, clock: Clock
    ) -> None:
        pause(conn)
        clock.advance(1801)
        operator = connect(autocommit=False)
        operator.execute(AGAIN)
        reap(conn)
        assert paused(conn) == (True, True)
        operator.rollback()
        reap(conn)
        assert lines(conn) == [PAUSED, OVER]

    def test_who_pauses_again_while_it_ends_comes_after(self, connect: Connect, conn: Connection, clock: Clock) -> None:
        pause(conn)
        clock.advance(1801)
        janitor, operator = connect(autocommit=False), connect()
        reap(janitor)
        with waiting(conn, operator, lambda other: other.execute(AGAIN), for_whom=janitor) as second:
            janitor.commit()
            second.result()
        assert (paused(conn), lines(conn)) == ((True, True), [PAUSED, OVER, NOT_YET])
        assert rows(conn, "select * from bartleby.verify_audit()") == []

    @pytest.mark.parametrize(
        "deed",
        [
            AGAIN,
            "select bartleby.create_queue('other')",
            "lock table bartleby.queue in share row exclusive mode",
            "select bartleby.open_breaker('q', 'storm', '0')",
        ],
        ids=["a deed", "a creation", "the table", "the row"],
    )
    def test_lapsed_leases_come_back_whatever_is_locked(
        self, connect: Connect, conn: Connection, clock: Clock, deed: str
    ) -> None:
        send(conn, 1)
        claim(conn)
        pause(conn)
        clock.advance(1801)
        other = connect(autocommit=False)
        other.execute(deed.encode())
        conn.execute("set statement_timeout = '15s'")
        assert len(reap(conn)) == 1
        assert paused(conn) == (True, True)
        other.rollback()
        reap(conn)
        assert paused(conn) == (False, False)

    def test_the_others_end_though_one_is_locked(self, connect: Connect, conn: Connection, clock: Clock) -> None:
        create(conn, "a")
        pause(conn)
        pause(conn, queue="a")
        clock.advance(1801)
        other = connect(autocommit=False)
        other.execute("select bartleby.open_breaker('q', 'storm', '0')")
        reap(conn)
        assert (paused(conn), paused(conn, "a")) == ((True, True), (False, False))
        other.commit()
        reap(conn)
        assert (paused(conn), stats(conn)["breaker"]) == ((False, False), "open")

    def test_and_an_audit_without_a_head_stops_no_upkeep(self, conn: Connection, clock: Clock) -> None:
        """It stays paused, for nothing is done that cannot be written down."""
        send(conn, 1)
        claim(conn)
        pause(conn)
        clock.advance(1801)
        with conn.transaction():
            conn.execute("set local session_replication_role = replica")
            conn.execute("delete from bartleby.audit_head")
        assert len(reap(conn)) == 1
        assert paused(conn) == (True, True)


@pytest.mark.parametrize("role", ROLES)
def test_whoever_may_reap_ends_it_and_only_operators_pause(conn: Connection, clock: Clock, role: str) -> None:
    pause(conn)
    clock.advance(1801)
    conn.execute(f"set role {role}")
    for direct in ("select bartleby.end_pauses(now())", "update bartleby.queue set paused_until = null"):
        with refused("42501"):
            conn.execute(direct.encode())
    may_reap = role in {"bartleby_worker", "bartleby_operator", "bartleby_relay"}
    if may_reap:
        reap(conn)
    if role == "bartleby_operator":
        conn.execute(AGAIN)
    else:
        with refused("42501"):
            conn.execute(AGAIN)
    conn.execute("reset role")
    again = [NOT_YET] if role == "bartleby_operator" else []
    assert lines(conn) == [PAUSED, *([OVER] if may_reap else []), *again]
