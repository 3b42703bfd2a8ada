"""Counts of letters: kept without counting, always right, and no session waits for them."""

import psycopg
import pytest

from tests.kit.clock import Clock
from tests.kit.letters import letter
from tests.kit.plans import adds_up, bury, change, die, events, kill_all, started, steps
from tests.kit.refusals import assert_refused
from tests.kit.sql import Connect, Connection, ack, claim, column, create, rows, stats, value, waiting

DAY = 86400


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, max_attempts=2, backoff="none")
    return conn


def tally(conn: Connection, limit: int = 10000) -> int:
    return int(value(conn, "select bartleby.tally(%s)", limit))


def counts(conn: Connection) -> dict[str, int]:
    found = rows(conn, "select status, sum(letters)::int as letters from bartleby.letter_counts group by status")
    return {each["status"]: each["letters"] for each in found if each["letters"]}


def deltas(conn: Connection) -> list[int]:
    return column(conn, "select letters from bartleby.letter_delta")


class TestCounts:
    def test_every_change_of_a_letter_is_counted(self, conn: Connection, clock: Clock) -> None:
        create(conn, "other")
        ids = die(conn, 8, fingerprint="f")
        adds_up(conn)
        for verb, numbers in (("discard", ids[:2]), ("restore", ids[:1]), ("hold", ids[2:3]), ("replay", ids[3:7])):
            change(conn, verb, *numbers)
            adds_up(conn)
        claimed = claim(conn, 2)
        ack(conn, claimed.lease)
        adds_up(conn)
        kill_all(conn, fingerprint="g")
        adds_up(conn)
        assert counts(conn) == {"dead": 5, "discarded": 1, "resolved": 2}
        started(conn, ids[5:7], to="other")
        steps(conn)
        kill_all(conn, "other", fingerprint="f")
        adds_up(conn)
        assert (stats(conn)["dead"], stats(conn, "other")["dead"]) == (3, 2)
        conn.execute("select bartleby.merge_groups(array[%s::bigint], %s, 'ann', 'x')", [2, 1])
        adds_up(conn)
        clock.advance(31 * DAY)
        conn.execute("select bartleby.prune()")
        adds_up(conn)
        assert counts(conn) == {"dead": 1}

    def test_batch_writes_one_row_and_what_changes_no_count_none(self, conn: Connection) -> None:
        ids = die(conn, 100, fingerprint="f")
        die(conn, 100, fingerprint="f")
        assert len(deltas(conn)) <= 2
        while tally(conn):
            pass
        change(conn, "hold", *ids)
        change(conn, "release", *ids)
        assert deltas(conn) == []

    def test_letters_written_by_hand_are_counted(self, conn: Connection) -> None:
        (sent,) = die(conn)
        conn.execute("update bartleby.dead_letter set status = 'discarded'")
        adds_up(conn)
        conn.execute("delete from bartleby.dead_letter")
        adds_up(conn)
        letter(conn, message_id=sent)
        adds_up(conn)

    @pytest.mark.own_database
    def test_counts_without_triggers_are_repaired_by_recount(self, conn: Connection, clock: Clock) -> None:
        clock.half_past()
        ids = die(conn, 5, fingerprint="f")
        hours = value(conn, "select deaths_by_hour from bartleby.groups")
        conn.execute("alter table bartleby.dead_letter disable trigger user")
        change(conn, "discard", *ids[:2])
        conn.execute("delete from bartleby.dead_letter where message_id = %s", [ids[2]])
        conn.execute("alter table bartleby.dead_letter enable trigger user")
        tally(conn)
        assert counts(conn) == {"dead": 5}
        conn.execute("select bartleby.recount()")
        adds_up(conn)
        assert counts(conn) == {"dead": 2, "discarded": 2}
        assert value(conn, "select deaths_by_hour from bartleby.groups") == hours


class TestAtOnce:
    def test_two_tallies_take_different_changes_and_do_not_wait(self, conn: Connection, connect: Connect) -> None:
        for fingerprint in "abcd":
            die(conn, fingerprint=fingerprint)
        one, two = connect(autocommit=False), connect()
        two.execute("set statement_timeout = '30s'")
        assert tally(one, 2) == 2
        assert tally(two) == 2
        one.rollback()
        adds_up(conn)
        assert tally(conn) == 2
        adds_up(conn)
        assert tally(conn) == 0
        for limit in (None, -1, 0, 1_000_001):
            assert_refused(conn, "ZB008", "limit", "select bartleby.tally(%s)", limit)

    def test_locked_group_does_not_stop_the_others(self, conn: Connection, connect: Connect) -> None:
        (one,) = die(conn, fingerprint="a")
        tally(conn)
        change(conn, "discard", one)
        holder = connect(autocommit=False)
        holder.execute("select from bartleby.failure_group for no key update")
        tally(conn)  # leaves a mark that the group is to be looked at
        die(conn, 3, fingerprint="b")
        rounds = 0
        while tally(conn, 1):
            rounds += 1
            assert rounds < 20
        assert deltas(conn) == [0]
        holder.rollback()
        assert tally(conn, 1) == 1
        assert deltas(conn) == []

    def test_old_snapshot_adds_nothing_twice(self, conn: Connection, connect: Connect) -> None:
        (sent,) = die(conn, fingerprint="f")
        change(conn, "replay", sent)
        claimed = claim(conn)
        janitor, worker = connect(autocommit=False), connect(autocommit=False)
        for late in (janitor, worker):
            late.execute("set transaction isolation level repeatable read")
            late.execute("select 1 from bartleby.queue")
        die(conn, fingerprint="g")
        change(conn, "hold", sent)
        tally(conn)
        with pytest.raises(psycopg.errors.SerializationFailure):
            tally(janitor)
        with pytest.raises(psycopg.errors.SerializationFailure):
            bury(worker, claimed, fingerprint="g")
        janitor.rollback()
        worker.rollback()
        bury(conn, claimed, fingerprint="g")
        adds_up(conn)


class TestLockedGroups:
    """An operator has locked a group: no session waits for it, and its events are emitted afterwards."""

    @pytest.fixture
    def janitor(self, connect: Connect) -> Connection:
        session = connect(autocommit=False)
        session.execute("set statement_timeout = '30s'")
        session.commit()
        return session

    @pytest.fixture
    def operator(self, connect: Connect) -> Connection:
        return connect(autocommit=False)

    def hold(self, operator: Connection, fingerprint: str) -> None:
        number = value(operator, "select id from bartleby.failure_group where fingerprint = %s", fingerprint)
        operator.execute("select bartleby.acknowledge_group(%s, 'ann', 'looking')", [number])

    def emitted(self, conn: Connection, kind: str) -> list[tuple[str, int]]:
        return [(each["fingerprint"], each["dead"]) for each in events(conn, f"group.{kind}")]

    def test_its_events_follow_those_of_others(
        self, conn: Connection, operator: Connection, janitor: Connection
    ) -> None:
        for fingerprint in "ab":
            die(conn, 9, fingerprint=fingerprint)
        emptied = die(conn, 2, fingerprint="c")
        tally(conn)
        change(conn, "discard", *emptied)
        self.hold(operator, "a")
        self.hold(operator, "c")
        for fingerprint in "ab":
            die(conn, 3, fingerprint=fingerprint)
        while tally(janitor):
            janitor.commit()
        janitor.commit()
        assert (self.emitted(conn, "escalated"), self.emitted(conn, "drained")) == ([("b", 12)], [])
        assert counts(conn) == {"dead": 24, "discarded": 2}
        operator.commit()
        tally(conn)
        tally(conn)
        assert self.emitted(conn, "escalated") == [("b", 12), ("a", 12)]
        assert self.emitted(conn, "drained") == [("c", 0)]
        assert deltas(conn) == []
        adds_up(conn)

    def test_operator_with_two_groups_does_not_deadlock(
        self, conn: Connection, operator: Connection, janitor: Connection
    ) -> None:
        """The tally has passed its news to the second group, and does not wait for the first."""
        die(conn, 9, fingerprint="a")
        die(conn, fingerprint="b", worker_version="1")
        tally(conn)
        self.hold(operator, "b")
        die(conn, fingerprint="b", worker_version="2")
        operator.commit()
        die(conn, 3, fingerprint="a")
        self.hold(operator, "a")
        tally(janitor)
        with waiting(conn, operator, lambda conn: self.hold(conn, "b"), for_whom=janitor) as second:
            janitor.commit()
            second.result()
        operator.commit()
        tally(conn)
        assert self.emitted(conn, "escalated") == [("a", 12)]
        assert value(conn, "select seen_versions from bartleby.failure_group where fingerprint = 'b'") == ["1", "2"]

    def test_tally_until_nothing_is_left_ends(
        self, conn: Connection, operator: Connection, janitor: Connection
    ) -> None:
        die(conn, fingerprint="f", worker_version="1")
        self.hold(operator, "f")
        for version in range(2, 11):
            die(conn, fingerprint="f", worker_version=str(version))
        done: list[int] = []
        while not done or done[-1] > 0:
            done.append(tally(janitor))
            janitor.commit()
            assert len(done) < 10, done
        assert self.emitted(conn, "escalated") == []
        assert value(conn, "select count(*) from bartleby.group_news") == 9
        operator.commit()
        tally(conn)
        assert self.emitted(conn, "escalated") == [("f", 10)]
        assert rows(conn, "select * from bartleby.group_news") == []
        seen = value(conn, "select seen_versions from bartleby.failure_group")
        assert seen == [str(version) for version in range(1, 11)]
        adds_up(conn)

    def test_recount_waits_for_no_operator(self, conn: Connection, operator: Connection, janitor: Connection) -> None:
        die(conn, 12, fingerprint="f")
        self.hold(operator, "f")
        janitor.execute("select bartleby.recount()")
        janitor.commit()
        operator.commit()
        tally(conn)
        assert self.emitted(conn, "escalated") == [("f", 12)]
        adds_up(conn)
