"""Upkeep: who does it, what it forgets, and what a queue that hands out nothing is waiting for."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tests.kit.clock import Clock
from tests.kit.sql import (
    Connect,
    Connection,
    ack,
    await_true,
    claim,
    column,
    create,
    fail_all,
    pages_read,
    refused,
    row,
    rows,
    send,
    send_count,
    value,
)

DAY = 86400
# Somebody who sets test.pause has the time in hand for so long before they use it.
SLOW_CLOCK = """
create or replace function bartleby.clock() returns timestamptz language plpgsql as $$
declare v_now timestamptz := clock_timestamp();
begin
  perform pg_advisory_xact_lock(current_setting('test.gate')::bigint) where current_setting('test.gate', true) <> '';
  return v_now;
end $$
"""
KINDS = (
    "handled",
    "events",
    "unresolved dead letters",
    "resolved and discarded letters",
    "payloads",
    "attempts",
    "replays",
    "groups",
    "credentials",
    "answers",
    "workers",
)


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn)
    return conn


class TestDuty:
    def take(self, conn: Connection, holder: str = "a", seconds: str = "10 s", duty: str = "upkeep") -> bool:
        return bool(value(conn, "select bartleby.take_duty(%s, %s, %s)", duty, holder, seconds))

    def leave(self, conn: Connection, holder: str = "a") -> None:
        conn.execute("select bartleby.leave_duty('upkeep', %s)", [holder])

    def test_one_holds_it_at_a_time(self, conn: Connection) -> None:
        assert self.take(conn)
        assert not self.take(conn, "b")
        assert self.take(conn)

    def test_each_duty_has_a_holder_of_its_own(self, conn: Connection) -> None:
        assert self.take(conn)
        assert self.take(conn, "b", duty="another")

    def test_it_lapses(self, conn: Connection, clock: Clock) -> None:
        clock.stop()
        assert self.take(conn)
        clock.advance(9)
        assert not self.take(conn, "b")
        clock.advance(2)
        assert self.take(conn, "b")
        assert not self.take(conn)

    def test_its_holder_may_keep_it(self, conn: Connection, clock: Clock) -> None:
        clock.stop()
        for _ in range(5):
            assert self.take(conn)
            clock.advance(9)
            assert not self.take(conn, "b")

    def test_a_late_holder_may_take_it_again_if_nobody_did(self, conn: Connection, clock: Clock) -> None:
        assert self.take(conn)
        clock.advance(100)
        assert self.take(conn)

    def test_it_can_be_left_to_others(self, conn: Connection) -> None:
        assert self.take(conn)
        self.leave(conn, "b")
        assert not self.take(conn, "b")
        self.leave(conn)
        assert self.take(conn, "b")
        self.leave(conn)
        assert not self.take(conn)

    def test_leaving_what_nobody_holds(self, conn: Connection) -> None:
        self.leave(conn)
        assert self.take(conn)

    @pytest.mark.parametrize("before", ["free", "lapsed", "held"])
    def test_who_is_slow_does_not_take_it_from_who_has_just_taken_it(
        self, conn: Connection, connect: Connect, before: str
    ) -> None:
        """What the slow one knows of the time is older than the duty: that is no clock set back."""
        if before != "free":
            assert self.take(conn)
        if before == "lapsed":
            conn.execute("update bartleby.duty set taken_at = taken_at - interval '1h', until = until - interval '1h'")
        conn.execute(SLOW_CLOCK)
        slow = connect()
        slow.execute("set test.gate = '4711'")
        slow.execute("set lock_timeout = '30s'")
        conn.execute("select pg_advisory_lock(4711)")
        with ThreadPoolExecutor(1) as other:
            taken = other.submit(self.take, slow, "b")
            at_the_gate = "select wait_event = 'advisory' from pg_stat_activity where pid = %s"
            await_true(lambda: value(conn, at_the_gate, slow.info.backend_pid))
            assert self.take(conn)
            conn.execute("select pg_advisory_unlock(4711)")
            assert not taken.result(30)
        assert value(conn, "select bartleby.on_duty('upkeep')") == "a"

    def test_a_clock_set_back_does_not_keep_it_for_ever(self, conn: Connection, clock: Clock) -> None:
        assert self.take(conn)
        clock.advance(-3600)
        assert self.take(conn, "b")

    def test_whoever_does_not_get_it_writes_nothing(self, conn: Connection) -> None:
        assert self.take(conn)
        with conn.transaction():
            assert not self.take(conn, "b")
            assert value(conn, "select pg_current_xact_id_if_assigned() is null")

    @pytest.mark.parametrize("commits", [True, False])
    @pytest.mark.parametrize("before", ["never", "lapsed", "left"])
    def test_nobody_waits_for_one_who_is_taking_it(
        self, conn: Connection, clock: Clock, connect: Connect, before: str, commits: bool
    ) -> None:
        if before != "never":
            assert self.take(conn, "old")
            clock.advance(60)
            if before == "left":
                self.leave(conn, "old")
        first, second = connect(autocommit=False), connect()
        second.execute("set statement_timeout = '20s'")
        assert self.take(first)
        assert not self.take(second, "b")
        if commits:
            first.commit()
        else:
            first.rollback()
        assert self.take(second, "b") is not commits

    def test_nobody_waits_for_one_who_is_leaving_it(self, conn: Connection, clock: Clock, connect: Connect) -> None:
        assert self.take(conn)
        clock.advance(60)
        first, second = connect(autocommit=False), connect()
        self.leave(first)
        assert not self.take(second, "b")
        first.commit()
        assert self.take(second, "b")

    def test_an_old_snapshot_takes_nothing_from_others(self, conn: Connection, clock: Clock, connect: Connect) -> None:
        assert self.take(conn)
        clock.advance(60)
        late = connect(autocommit=False)
        late.execute("set transaction isolation level repeatable read")
        late.execute("select 1 from bartleby.queue")
        assert self.take(conn, "b")
        with pytest.raises(psycopg.errors.SerializationFailure):
            self.take(late, "c")

    @pytest.mark.parametrize(
        "given",
        [
            (None, "h", "1 s"),
            ("", "h", "1 s"),
            ("d", None, "1 s"),
            ("d", "", "1 s"),
            ("d", "h", None),
            ("d", "h", "0"),
            ("d", "h", "-1 s"),
            ("d", "h", "1000 years"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, conn: Connection, given: tuple[str | None, ...]) -> None:
        with refused("ZB008", "duty"):
            conn.execute("select bartleby.take_duty(%s, %s, %s)", given)


class TestPrune:
    def prune(self, conn: Connection, limit: int = 10000) -> dict[str, int]:
        return {found["what"]: found["rows"] for found in rows(conn, "select * from bartleby.prune(%s)", limit)}

    def mark(self, conn: Connection, *keys: str, queue: str = "q") -> None:
        for key in keys:
            conn.execute("select bartleby.mark_handled(%s, 'c', %s)", [queue, key])

    def left(self, conn: Connection) -> set[str]:
        return set(column(conn, "select key from bartleby.handled"))

    def test_there_is_nothing_to_forget(self, conn: Connection) -> None:
        self.mark(conn, "id:1")
        assert self.prune(conn) == dict.fromkeys(KINDS, 0)

    def test_what_was_handled_longer_ago_than_the_queue_keeps_things(self, conn: Connection, clock: Clock) -> None:
        create(conn, "short", retention="1 day")
        self.mark(conn, "id:1")
        self.mark(conn, "id:2", queue="short")
        clock.advance(DAY - 60)
        assert self.prune(conn)["handled"] == 0
        clock.advance(120)
        self.mark(conn, "id:3", queue="short")
        assert self.prune(conn)["handled"] == 1
        assert self.left(conn) == {"id:1", "id:3"}
        clock.advance(29 * DAY)
        assert self.prune(conn)["handled"] == 2

    def test_events_of_a_month_ago(self, conn: Connection, clock: Clock) -> None:
        conn.execute("select bartleby.force_breaker('q', 'me', 'because')")
        clock.advance(29 * DAY)
        conn.execute("select bartleby.close_breaker('q', 'me', 'because')")
        assert self.prune(conn)["events"] == 0
        clock.advance(2 * DAY)
        assert self.prune(conn)["events"] == 1
        assert column(conn, "select type from bartleby.events") == ["io.bartleby.breaker.closed"]

    def test_what_a_dead_letter_may_yet_need_is_kept(self, conn: Connection, clock: Clock) -> None:
        """As long as it can be replayed, and then until it is done."""
        ids = [send(conn, 1), send(conn, 2, key="order"), send(conn, 3)]
        self.mark(
            conn, *(f"id:{number}" for number in ids), "key:order", "key:other", "id:99", "odd", "id:", "id:x", "key:"
        )
        work = claim(conn, 3)
        fail_all(conn, work, verdict="dead")
        conn.execute("select bartleby.hold(%s, 'me', 'evidence')", [ids])
        clock.advance(31 * DAY)
        assert self.prune(conn)["handled"] == 6
        kept = {f"id:{number}" for number in ids} | {"key:order"}
        assert self.left(conn) == kept
        conn.execute("select bartleby.hold(%s, 'me', 'enough', p_on => false)", [ids[:2]])
        conn.execute("select bartleby.replay(%s, 'me', 'again')", [ids[:2]])
        assert self.prune(conn)["handled"] == 0
        ack(conn, claim(conn, 2).lease)
        assert self.prune(conn)["handled"] == 3
        assert self.left(conn) == {f"id:{ids[2]}"}
        conn.execute("select bartleby.hold(%s, 'me', 'enough', p_on => false)", [ids[2:]])
        assert self.prune(conn)["unresolved dead letters"] == 1
        assert self.prune(conn)["handled"] == 1

    def test_a_key_of_another_queues_dead_letter_is_no_reason_to_keep_it(self, conn: Connection, clock: Clock) -> None:
        create(conn, "other")
        send(conn, 1, "other", key="order")
        fail_all(conn, claim(conn, queue="other"), verdict="dead")
        self.mark(conn, "key:order")
        clock.advance(31 * DAY)
        assert self.prune(conn)["handled"] == 1

    def test_a_replay_under_way_keeps_it(self, conn: Connection, clock: Clock, connect: Connect) -> None:
        sent = send(conn, 1)
        self.mark(conn, f"id:{sent}")
        fail_all(conn, claim(conn), verdict="dead")
        clock.advance(31 * DAY)
        operator = connect(autocommit=False)
        operator.execute("select bartleby.replay(%s, 'me', 'again')", [[sent]])
        assert self.prune(conn)["handled"] == 0
        operator.commit()
        assert self.prune(conn)["handled"] == 0
        assert self.left(conn) == {f"id:{sent}"}

    def test_it_is_bounded(self, conn: Connection, clock: Clock) -> None:
        create(conn, "other")
        for queue in ("q", "other"):
            self.mark(conn, *(f"id:{queue}-{number}" for number in range(5)), queue=queue)
        for _ in range(5):
            conn.execute("select bartleby.force_breaker('q', 'me', 'because')")
            conn.execute("select bartleby.close_breaker('q', 'me', 'because')")
        clock.advance(31 * DAY)
        assert [self.prune(conn, 4) for _ in range(4)] == [
            dict.fromkeys(KINDS, 0) | {"handled": 4, "events": 4},
            dict.fromkeys(KINDS, 0) | {"handled": 4, "events": 4},
            dict.fromkeys(KINDS, 0) | {"handled": 2, "events": 2},
            dict.fromkeys(KINDS, 0),
        ]

    def test_two_at_once_do_not_wait_for_each_other(self, conn: Connection, clock: Clock, connect: Connect) -> None:
        self.mark(conn, *(f"id:{number}" for number in range(6)))
        clock.advance(31 * DAY)
        first, second = connect(autocommit=False), connect()
        second.execute("set statement_timeout = '20s'")
        assert self.prune(first, 4)["handled"] == 4
        assert self.prune(second)["handled"] == 2
        first.rollback()
        assert self.prune(second)["handled"] == 4

    def test_a_queue_without_retention_keeps_nothing(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", retention=0)
        self.mark(conn, "id:1")
        clock.advance(1)
        assert self.prune(conn)["handled"] == 1

    @pytest.mark.parametrize("limit", [None, 0, -1, 1_000_001])
    def test_a_bad_limit_is_refused(self, conn: Connection, limit: int | None) -> None:
        with refused("ZB008", "limit"):
            conn.execute("select bartleby.prune(%s)", [limit])

    def test_its_cost_does_not_grow_with_what_is_kept(self, conn: Connection, clock: Clock) -> None:
        """The blocks it touches when nothing is to be done, beside a hundred rows and beside forty thousand."""
        clock.advance(0)
        insert = (
            "insert into bartleby.handled (consumer, key, queue, handled_at)"
            " select 'c', 'id:' || n, 1, bartleby.clock() from generate_series(%s::int, %s::int) n"
        )
        conn.execute(insert, [1, 100])
        conn.execute("analyze bartleby.handled")
        few = pages_read(conn, "select bartleby.prune()")
        conn.execute(insert, [101, 40000])
        conn.execute("analyze bartleby.handled")
        assert pages_read(conn, "select bartleby.prune()") <= few + 20


class TestOutlook:
    def outlook(self, conn: Connection) -> dict[str, Any]:
        return row(conn, "select * from bartleby.outlook('q')")

    def test_a_queue_that_waits_for_nothing(self, conn: Connection) -> None:
        assert self.outlook(conn) == {"due_in": None, "breaker": "closed", "paused": False}

    def test_the_next_that_is_due(self, conn: Connection, clock: Clock) -> None:
        send(conn, 1, delay="1 hour")
        send(conn, 2, delay="1 minute")
        assert timedelta(seconds=58) < self.outlook(conn)["due_in"] <= timedelta(minutes=1)
        clock.advance(61)
        assert self.outlook(conn)["due_in"] <= timedelta(0)
        ack(conn, claim(conn).lease)
        assert self.outlook(conn)["due_in"] > timedelta(minutes=50)

    def test_what_another_queue_waits_for_is_not_its_own(self, conn: Connection) -> None:
        create(conn, "other")
        send(conn, 1, "other", delay="1 hour")
        assert self.outlook(conn)["due_in"] is None

    def test_its_breaker_and_whether_it_is_paused(self, conn: Connection) -> None:
        conn.execute("select bartleby.pause_queue('q'), bartleby.open_breaker('q', 'storm', '0')")
        assert self.outlook(conn) == {"due_in": None, "breaker": "open", "paused": True}
        conn.execute("select bartleby.force_breaker('q', 'me', 'because')")
        assert self.outlook(conn)["breaker"] == "forced"
        conn.execute("select bartleby.close_breaker('q', 'me', 'because')")
        create(conn, "q", breaker="off")
        assert self.outlook(conn)["breaker"] == "off"


def test_the_length_of_a_lease(conn: Connection) -> None:
    assert value(conn, "select bartleby.lease_length('q')") == timedelta(minutes=1)
    create(conn, "q", lease=2.5)
    assert value(conn, "select bartleby.lease_length('q')") == timedelta(seconds=2.5)


def test_the_last_id(conn: Connection) -> None:
    assert value(conn, "select bartleby.last_message_id()") == 0
    ids = send_count(conn, 3)
    assert value(conn, "select bartleby.last_message_id()") == ids[-1]
