"""Upkeep: the holder of the duty, deletion of old rows, and the next event that an idle queue waits for."""

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from tests.kit import sql
from tests.kit.clock import Clock
from tests.kit.plans import change, die_of
from tests.kit.refusals import assert_refused
from tests.kit.sql import NO_WAIT, Connect, Connection, Row

DAY = 86400
LEFT = "select key from bartleby.handled"
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

    def test_taking_a_duty_never_waits(self, clock: Clock, connect: Connect) -> None:
        first, second = connect(autocommit=False), connect(options=NO_WAIT)
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


class TestForgetting:
    def prune(self, conn: Connection, limit: int = 10000) -> Counter[str]:
        found = sql.rows(conn, "select * from bartleby.prune(%s)", limit)
        return Counter({each["what"]: each["rows"] for each in found})

    def mark(self, conn: Connection, *keys: str, queue: str = "q") -> None:
        for key in keys:
            conn.execute("select bartleby.mark_handled(%s, 'c', %s)", [queue, key])

    def test_handled_keys_are_kept_as_long_as_the_queue_says(self, conn: Connection, clock: Clock) -> None:
        sql.create(conn, "short", retention="1 day")
        sql.create(conn, "none", retention=0)
        for number, queue in enumerate(("q", "short", "none")):
            self.mark(conn, f"id:{number}", queue=queue)
        for days, left in ((0.9, {"id:0", "id:1"}), (0.2, {"id:0"}), (30, set())):
            clock.advance(days * DAY)
            assert self.prune(conn)["handled"] == 1
            assert set(sql.column(conn, LEFT)) == left

    def test_handled_key_of_a_dead_letter_is_kept_until_it_is_done(
        self, conn: Connection, clock: Clock, connect: Connect
    ) -> None:
        sql.create(conn, "other")
        die_of(conn, 0, "other", key="elsewhere")
        ids = [die_of(conn, 1), die_of(conn, 2, key="order"), die_of(conn, 3)]
        keys = [f"id:{number}" for number in ids]
        self.mark(conn, *keys, "key:order", "key:elsewhere", "key:none", "id:99", "odd", "id:", "id:x", "key:")
        change(conn, "hold", *ids)
        clock.advance(31 * DAY)
        assert self.prune(conn)["handled"] == 7
        assert set(sql.column(conn, LEFT)) == {*keys, "key:order"}
        change(conn, "release", *ids[:2])
        operator = connect(autocommit=False)
        change(operator, "replay", *ids[:2])
        assert self.prune(conn)["handled"] == 0, "while the replay is not committed"
        operator.commit()
        assert self.prune(conn)["handled"] == 0
        sql.ack(conn, sql.claim(conn, 2).lease)
        assert self.prune(conn)["handled"] == 3
        assert set(sql.column(conn, LEFT)) == {keys[2]}
        change(conn, "release", ids[2])
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
        first, second = connect(autocommit=False), connect(options=NO_WAIT)
        some = [Counter(handled=number, events=number) for number in (4, 4, 2, 0)]
        assert self.prune(first, 4) == some[0]
        assert [self.prune(second, 4) for _ in range(3)] == some[1:]
        first.rollback()
        assert self.prune(second) == some[0]
        for limit in (None, 0, -1, 1_000_001):
            assert_refused(conn, "ZB008", "limit", "select bartleby.prune(%s)", limit)


def test_outlook_names_what_an_idle_queue_waits_for(conn: Connection, clock: Clock) -> None:
    def outlook() -> Row:
        return sql.row(conn, "select * from bartleby.outlook('q')")

    def due_in(generation: int) -> Any:
        return sql.value(conn, "select due_in from bartleby.outlook('q', %s)", generation)

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
    for generation in (7, 8):
        sql.send(conn, 3, delay=f"{generation} minutes", generation=generation)
    found = [due_in(generation) for generation in (8, 7, 6, 0)]
    assert found == [timedelta(minutes=7), timedelta(minutes=7), *[timedelta(minutes=59, seconds=-1)] * 2]
    conn.execute("select bartleby.pause_queue('q'), bartleby.open_breaker('q', 'storm', '0')")
    assert (outlook()["breaker"], outlook()["paused"]) == ("open", True)
    sql.create(conn, "q", breaker="off", lease=2.5)
    conn.execute("select bartleby.close_breaker('q', 'me', 'because')")
    assert outlook()["breaker"] == "off"
    lengths = sql.column(conn, "select bartleby.lease_length(name) from bartleby.queue order by name")
    assert lengths == [timedelta(minutes=1), timedelta(seconds=2.5)]
