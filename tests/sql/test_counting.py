"""Counts of letters: kept without counting, always right, and no session waits for them."""

import pytest

from tests.kit.clock import Clock
from tests.kit.letters import letter
from tests.kit.plans import adds_up, change, die, events, tally
from tests.kit.refusals import assert_refused
from tests.kit.sql import NO_WAIT, Connect, Connection, column, rows, value, waiting

pytestmark = pytest.mark.usefixtures("quick")


def counts(conn: Connection) -> dict[str, int]:
    found = rows(conn, "select status, sum(letters)::int as letters from bartleby.letter_counts group by status")
    return {each["status"]: each["letters"] for each in found if each["letters"]}


def deltas(conn: Connection) -> list[int]:
    return column(conn, "select letters from bartleby.letter_delta")


class TestCounts:
    def test_batch_writes_one_row_and_unchanged_counts_write_no_row(self, conn: Connection) -> None:
        ids = die(conn, 100, fingerprint="f")
        assert len(deltas(conn)) == 1
        tally(conn)
        change(conn, "hold", *ids)
        change(conn, "release", *ids)
        assert deltas(conn) == []

    def test_letters_written_by_hand_are_counted(self, conn: Connection) -> None:
        (sent,) = die(conn)
        for change_by_hand in (
            "update bartleby.dead_letter set status = 'discarded'",
            "delete from bartleby.dead_letter",
        ):
            conn.execute(change_by_hand)
            adds_up(conn)
        letter(conn, message_id=sent)
        adds_up(conn)

    @pytest.mark.own_database
    def test_recount_repairs_what_triggers_missed(self, conn: Connection, clock: Clock, connect: Connect) -> None:
        """It does not wait for a session that has locked a group."""
        clock.half_past()
        ids = die(conn, 5, fingerprint="f")
        hours = value(conn, "select deaths_by_hour from bartleby.groups")
        conn.execute("alter table bartleby.dead_letter disable trigger user")
        change(conn, "discard", *ids[:2])
        conn.execute("delete from bartleby.dead_letter where message_id = %s", [ids[2]])
        conn.execute("alter table bartleby.dead_letter enable trigger user")
        tally(conn)
        assert counts(conn) == {"dead": 5}
        connect(autocommit=False).execute("select from bartleby.failure_group for update")
        connect(options=NO_WAIT).execute("select bartleby.recount()")
        adds_up(conn)
        assert counts(conn) == {"dead": 2, "discarded": 2}
        assert value(conn, "select deaths_by_hour from bartleby.groups") == hours


class TestAtOnce:
    def test_two_tallies_take_different_changes_and_do_not_wait(self, conn: Connection, connect: Connect) -> None:
        for fingerprint in "abcd":
            die(conn, fingerprint=fingerprint)
        one, two = connect(autocommit=False), connect(options=NO_WAIT)
        assert tally(one, 2) == 2
        assert tally(two) == 2
        one.rollback()
        assert tally(conn) == 2
        adds_up(conn)
        assert tally(conn) == 0
        for limit in (None, -1, 0, 1_000_001):
            assert_refused(conn, "ZB008", "limit", "select bartleby.tally(%s)", limit)


class TestLockedGroups:
    """An operator has locked a group: no session waits for it, and its events are emitted afterwards."""

    def hold(self, operator: Connection, fingerprint: str) -> None:
        number = value(operator, "select id from bartleby.failure_group where fingerprint = %s", fingerprint)
        operator.execute("select bartleby.acknowledge_group(%s, 'ann', 'looking')", [number])

    def emitted(self, conn: Connection, kind: str) -> list[tuple[str, int]]:
        return [(each["fingerprint"], each["dead"]) for each in events(conn, f"group.{kind}")]

    def test_events_of_a_locked_group_come_after_others(self, conn: Connection, connect: Connect) -> None:
        operator, janitor = connect(autocommit=False), connect(options=NO_WAIT)
        for fingerprint in "ab":
            die(conn, 9, fingerprint=fingerprint)
        emptied = die(conn, 2, fingerprint="c")
        tally(conn)
        change(conn, "discard", *emptied)
        self.hold(operator, "a")
        self.hold(operator, "c")
        for fingerprint in "ab":
            die(conn, 3, fingerprint=fingerprint)
        while tally(janitor, 1):  # it does not stop at what waits for the operator
            pass
        assert (self.emitted(conn, "escalated"), self.emitted(conn, "drained")) == ([("b", 12)], [])
        assert counts(conn) == {"dead": 24, "discarded": 2}
        operator.commit()
        tally(conn)
        tally(conn)
        assert self.emitted(conn, "escalated") == [("b", 12), ("a", 12)]
        assert self.emitted(conn, "drained") == [("c", 0)]
        assert deltas(conn) == []
        adds_up(conn)

    def test_operator_with_two_groups_does_not_deadlock(self, conn: Connection, connect: Connect) -> None:
        """The tally has passed its news to the second group, and does not wait for the first."""
        operator, janitor = connect(autocommit=False), connect(autocommit=False, options=NO_WAIT)
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

    def test_tally_until_nothing_is_left_ends(self, conn: Connection, connect: Connect) -> None:
        operator, janitor = connect(autocommit=False), connect(options=NO_WAIT)
        die(conn, fingerprint="f", worker_version="1")
        self.hold(operator, "f")
        for version in range(2, 11):
            die(conn, fingerprint="f", worker_version=str(version))
        while tally(janitor):
            pass
        assert self.emitted(conn, "escalated") == []
        assert value(conn, "select count(*) from bartleby.group_news") == 9
        operator.commit()
        tally(conn)
        assert self.emitted(conn, "escalated") == [("f", 10)]
        assert rows(conn, "select * from bartleby.group_news") == []
        seen = value(conn, "select seen_versions from bartleby.failure_group")
        assert seen == [str(version) for version in range(1, 11)]
        adds_up(conn)
