"""Upkeep: who holds the duty, what is forgotten when it is old, and what an idle queue waits for."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from tests.kit import sql
from tests.kit.clock import Clock
from tests.kit.refusals import assert_refused
from tests.kit.sql import Connect, Connection, Row

DAY = 86400
# A session that sets test.gate reads the time, and then waits at the gate before it uses it, longer than take_duty()
# waits for locks.
GATED_CLOCK = """
create or replace function bartleby.clock() returns timestamptz language plpgsql set lock_timeout = 0 as $$
declare v_now timestamptz := clock_timestamp();
begin
  perform pg_advisory_xact_lock(current_setting('test.gate')::bigint) where current_setting('test.gate', true) <> '';
  return v_now;
end $$
"""
KINDS = (
    "handled", "events", "unresolved dead letters", "resolved and discarded letters", "payloads", "attempts", "replays",
    "groups", "credentials", "answers", "workers",
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("q")


class TestDuty:
    def take(self, conn: Connection, holder: str = "a", seconds: str = "10 s", duty: str = "upkeep") -> bool:
        return bool(sql.value(conn, "select bartleby.take_duty(%s, %s, %s)", duty, holder, seconds))

    def leave(self, conn: Connection, holder: str = "a") -> None:
        conn.execute("select bartleby.leave_duty('upkeep', %s)", [holder])

    def test_one_holder_at_a_time_until_it_lapses(self, conn: Connection, clock: Clock) -> None:
        clock.stop()
        self.leave(conn)
        for _ in range(5):
            assert self.take(conn)
            clock.advance(9)
            with conn.transaction():
                assert not self.take(conn, "b")
                assert sql.value(conn, "select pg_current_xact_id_if_assigned() is null"), "a refusal writes nothing"
        assert self.take(conn, "b", duty="another")
        clock.advance(2)
        assert [self.take(conn, "b"), self.take(conn)] == [True, False]
        clock.advance(100)
        assert self.take(conn, "b"), "a late holder may take it again"
        clock.advance(-3600)
        assert self.take(conn), "a clock set back does not keep it for ever"
        self.leave(conn, "b")
        assert not self.take(conn, "b"), "only its holder can leave it"
        self.leave(conn)
        assert self.take(conn, "b")
        for given in (
            (None, "h", "1 s"), ("", "h", "1 s"), ("d", None, "1 s"), ("d", "", "1 s"), ("d", "h", None),
            ("d", "h", "0"), ("d", "h", "-1 s"), ("d", "h", "1000 years"),
        ):  # fmt: skip
            assert_refused(conn, "ZB008", "duty", "select bartleby.take_duty(%s, %s, %s)", *given)

    @pytest.mark.own_database
    @pytest.mark.parametrize("before", ["free", "lapsed", "held"])
    def test_slow_session_does_not_take_it_from_a_new_holder(
        self, conn: Connection, connect: Connect, before: str
    ) -> None:
        """The time that the slow session read is older than the duty: that is not a clock set back."""
        if before != "free":
            assert self.take(conn)
        if before == "lapsed":
            conn.execute("update bartleby.duty set taken_at = taken_at - interval '1h', until = until - interval '1h'")
        conn.execute(GATED_CLOCK)
        slow = connect()
        slow.execute("set test.gate = '4711'")
        conn.execute("select pg_advisory_lock(4711)")
        with ThreadPoolExecutor(1) as other:
            taken = other.submit(self.take, slow, "b", "1 hour")
            at_the_gate = "select wait_event = 'advisory' from pg_stat_activity where pid = %s"
            sql.await_true(lambda: sql.value(conn, at_the_gate, slow.info.backend_pid))
            assert self.take(conn, seconds="1 hour")
            conn.execute("select pg_advisory_unlock(4711)")
            assert not taken.result(30)
        assert sql.value(conn, "select bartleby.on_duty('upkeep')") == "a"

    def test_no_session_waits_for_one_that_takes_it(self, clock: Clock, connect: Connect) -> None:
        first, second, late = connect(autocommit=False), connect(), connect(autocommit=False)
        second.execute("set statement_timeout = '30s'")
        for before in ("never taken", "lapsed", "left"):
            assert self.take(first, seconds="1 hour"), before
            assert not self.take(second, "b"), before
            first.rollback()
            assert self.take(first, seconds="1 hour"), before
            first.commit()
            assert not self.take(second, "b"), before
            clock.advance(7200)
            if before == "lapsed":
                self.leave(first)
                assert not self.take(second, "b"), "nor for one that leaves it"
                first.commit()
        late.execute("set transaction isolation level repeatable read")
        late.execute("select 1 from bartleby.queue")
        assert self.take(second, "b")
        with sql.refused("40001"):
            self.take(late, "c")


class TestForgetting:
    def prune(self, conn: Connection, limit: int = 10000) -> dict[str, int]:
        return {found["what"]: found["rows"] for found in sql.rows(conn, "select * from bartleby.prune(%s)", limit)}

    def mark(self, conn: Connection, *keys: str, queue: str = "q") -> None:
        for key in keys:
            conn.execute("select bartleby.mark_handled(%s, 'c', %s)", [queue, key])

    def left(self, conn: Connection) -> set[str]:
        return set(sql.column(conn, "select key from bartleby.handled"))

    def test_handled_keys_are_kept_as_long_as_the_queue_says(self, conn: Connection, clock: Clock) -> None:
        sql.create(conn, "short", retention="1 day")
        sql.create(conn, "none", retention=0)
        self.mark(conn, "id:1")
        assert self.prune(conn) == dict.fromkeys(KINDS, 0)
        self.mark(conn, "id:2", queue="short")
        self.mark(conn, "id:0", queue="none")
        clock.advance(DAY - 60)
        assert self.prune(conn)["handled"] == 1
        clock.advance(120)
        self.mark(conn, "id:3", queue="short")
        conn.execute("select bartleby.force_breaker('q', 'me', 'because')")
        assert self.prune(conn)["handled"] == 1
        assert self.left(conn) == {"id:1", "id:3"}
        clock.advance(29 * DAY)
        conn.execute("select bartleby.close_breaker('q', 'me', 'because')")
        found = self.prune(conn)
        assert (found["handled"], found["events"]) == (2, 0)
        clock.advance(2 * DAY)
        assert self.prune(conn)["events"] == 1, "events are kept for a month"
        assert sql.column(conn, "select type from bartleby.events") == ["io.bartleby.breaker.closed"]

    def test_handled_key_of_a_dead_letter_is_kept_until_it_is_done(
        self, conn: Connection, clock: Clock, connect: Connect
    ) -> None:
        sql.create(conn, "other")
        sql.send(conn, 0, "other", key="elsewhere")
        sql.fail_all(conn, sql.claim(conn, queue="other"), verdict="dead")
        ids = [sql.send(conn, 1), sql.send(conn, 2, key="order"), sql.send(conn, 3)]
        keys = [f"id:{number}" for number in ids]
        self.mark(conn, *keys, "key:order", "key:elsewhere", "key:none", "id:99", "odd", "id:", "id:x", "key:")
        sql.fail_all(conn, sql.claim(conn, 3), verdict="dead")
        conn.execute("select bartleby.hold(%s, 'me', 'evidence')", [ids])
        clock.advance(31 * DAY)
        assert self.prune(conn)["handled"] == 7
        assert self.left(conn) == {*keys, "key:order"}
        conn.execute("select bartleby.hold(%s, 'me', 'enough', p_on => false)", [ids[:2]])
        operator = connect(autocommit=False)
        operator.execute("select bartleby.replay(%s, 'me', 'again')", [ids[:2]])
        assert self.prune(conn)["handled"] == 0, "while the replay is not committed"
        operator.commit()
        assert self.prune(conn)["handled"] == 0
        sql.ack(conn, sql.claim(conn, 2).lease)
        assert self.prune(conn)["handled"] == 3
        assert self.left(conn) == {keys[2]}
        conn.execute("select bartleby.hold(%s, 'me', 'enough', p_on => false)", [ids[2:]])
        assert self.prune(conn)["unresolved dead letters"] == 1
        assert self.prune(conn)["handled"] == 1

    def test_limit_bounds_each_kind_and_two_sessions_share_the_work(
        self, conn: Connection, clock: Clock, connect: Connect
    ) -> None:
        sql.create(conn, "other")
        for queue in ("q", "other"):
            self.mark(conn, *(f"id:{queue}-{number}" for number in range(5)), queue=queue)
        for _ in range(5):
            conn.execute("select bartleby.force_breaker('q', 'me', 'because')")
            conn.execute("select bartleby.close_breaker('q', 'me', 'because')")
        clock.advance(31 * DAY)
        first, second = connect(autocommit=False), connect()
        second.execute("set statement_timeout = '30s'")
        some = [dict.fromkeys(KINDS, 0) | {"handled": number, "events": number} for number in (4, 4, 2, 0)]
        assert self.prune(first, 4) == some[0]
        assert [self.prune(second, 4) for _ in range(3)] == some[1:]
        first.rollback()
        assert self.prune(second) == some[0]
        for limit in (None, 0, -1, 1_000_001):
            assert_refused(conn, "ZB008", "limit", "select bartleby.prune(%s)", limit)


def test_outlook_names_what_an_idle_queue_waits_for(conn: Connection, clock: Clock) -> None:
    def outlook() -> Row:
        return sql.row(conn, "select * from bartleby.outlook('q')")

    clock.stop()
    sql.create(conn, "other")
    sql.send(conn, 1, "other", delay="1 hour")
    assert outlook() == {"due_in": None, "breaker": "closed", "paused": False}
    sql.send(conn, 1, delay="1 hour")
    last = sql.send(conn, 2, delay="1 minute")
    assert sql.value(conn, "select bartleby.last_message_id()") == last
    for seconds, due in ((0, 60), (61, -1)):
        clock.advance(seconds)
        assert outlook()["due_in"] == timedelta(seconds=due)
    sql.ack(conn, sql.claim(conn).lease)
    assert outlook()["due_in"] == timedelta(minutes=59, seconds=-1)
    conn.execute("select bartleby.pause_queue('q'), bartleby.open_breaker('q', 'storm', '0')")
    assert (outlook()["breaker"], outlook()["paused"]) == ("open", True)
    conn.execute("select bartleby.force_breaker('q', 'me', 'because')")
    assert outlook()["breaker"] == "forced"
    conn.execute("select bartleby.close_breaker('q', 'me', 'because')")
    sql.create(conn, "q", breaker="off", lease=2.5)
    assert outlook()["breaker"] == "off"
    lengths = sql.column(conn, "select bartleby.lease_length(name) from bartleby.queue order by name")
    assert lengths == [timedelta(minutes=1), timedelta(seconds=2.5)]
