"""Retention: old evidence is deleted in bounded steps and never silently; what is held or alive stays."""

from datetime import timedelta
from typing import Any

import pytest

from tests.kit import plans, sql
from tests.kit.clock import Clock
from tests.kit.plans import (
    adds_up,
    change,
    command,
    die,
    die_of,
    events,
    kill_all,
    letter_of,
    plan,
    started,
    status_by_id,
)
from tests.kit.sql import NO_WAIT, Connect, Connection, claim, column, create, refused, rows, send_count, value

DAY = 86400
pytestmark = pytest.mark.usefixtures("quick")


def prune(conn: Connection, limit: int = 10000) -> dict[str, int]:
    found = rows(conn, "select * from bartleby.prune(%s)", limit)
    return {each["what"]: each["rows"] for each in found if each["rows"] and each["what"] != "events"}


def expiring(conn: Connection, within: str = "7 days") -> list[tuple[Any, ...]]:
    return conn.execute("select queue, what, letters, first_at from bartleby.expiring(%s)", [within]).fetchall()


class TestLetters:
    @pytest.mark.seed("brighter-56")
    def test_each_status_counts_from_its_own_time(self, conn: Connection, clock: Clock) -> None:
        """Thirty days since it died, was discarded or restored; a message that is alive keeps its letter."""
        discarded, restored, replayed, _ = die(conn, 4)
        clock.advance(10 * DAY)
        change(conn, "discard", discarded, restored)
        change(conn, "replay", replayed)
        clock.advance(10 * DAY)
        change(conn, "restore", restored)
        clock.advance(10 * DAY - 60)
        assert prune(conn) == {}
        clock.advance(120)
        assert prune(conn)["unresolved dead letters"] == 1
        assert set(status_by_id(conn)) == {discarded, restored, replayed}
        clock.advance(10 * DAY)
        assert prune(conn)["resolved and discarded letters"] == 1
        clock.advance(10 * DAY)
        assert prune(conn)["unresolved dead letters"] == 1
        clock.advance(1000 * DAY)
        prune(conn)
        assert plans.work_all(conn) == [replayed]
        adds_up(conn)

    @pytest.mark.seed("pgmq-60")
    def test_held_letter_is_kept_with_its_payload_and_its_ledger(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", payload_retention="1 day")
        ids = die(conn, 2)
        change(conn, "discard", ids[1])
        change(conn, "hold", *ids)
        clock.advance(1000 * DAY)
        prune(conn)
        assert [letter_of(conn, each)["payload"] for each in ids] == [1, 2]
        assert column(conn, "select message_id from bartleby.attempts order by 1") == ids
        change(conn, "release", *ids)
        prune(conn)
        assert (status_by_id(conn), column(conn, "select message_id from bartleby.attempts")) == ({}, [])

    @pytest.mark.seed("pgmq-58", "pulse-37")
    def test_unresolved_letters_are_warned_of_and_reported_when_they_go(self, conn: Connection, clock: Clock) -> None:
        create(conn, "other", retention="1000 days")
        ids = die(conn, 5)
        first = letter_of(conn, ids[0])["dead_at"]
        clock.advance(5)
        last = letter_of(conn, *die(conn))["dead_at"]
        change(conn, "discard", ids[1])
        change(conn, "hold", ids[2])
        change(conn, "replay", ids[3])
        die(conn, 1, "other")
        clock.advance(22 * DAY)
        assert expiring(conn) == []
        die(conn, 5)
        clock.advance(2 * DAY)
        assert expiring(conn) == [("q", "letters", 3, first + timedelta(days=30))]
        clock.advance(7 * DAY)
        found = prune(conn)
        assert (found["unresolved dead letters"], found["resolved and discarded letters"]) == (3, 1)
        (event,) = events(conn, "dead_letter.expired")
        assert event["unresolved"] == 3
        times = "select %s::timestamptz = %s and %s::timestamptz = %s"
        assert value(conn, times, event["died_from"], first, event["died_until"], last)

    def test_limit_and_retention_are_those_of_each_queue(self, conn: Connection, clock: Clock) -> None:
        create(conn, "short", retention="1 day")
        ids = die(conn, 5) + die(conn, 3, "short")
        change(conn, "discard", *ids[:2])
        left = []
        for days in (1.1, 30, 0, 0):
            clock.advance(days * DAY)
            prune(conn, 2)
            left.append(len(status_by_id(conn)))
        assert left == [6, 4, 2, 0]


class TestPayloads:
    def test_payload_is_deleted_before_its_letter(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", payload_retention="7 days")
        failure = {"error": "e", "traceback": "t", "fingerprint": "f"}
        alive, sent = die_of(conn, 5), die_of(conn, {"secret": 1}, headers={"h": 1}, key="k", failure=failure)
        for secret in ("s2", "s3"):
            started(conn, [sent], patch=[{"op": "replace", "path": "/secret", "value": secret}])
            plans.steps(conn)
            kill_all(conn, **failure)
        change(conn, "replay", alive)
        number = started(conn, [sent])
        clock.advance(7 * DAY - 60)
        assert prune(conn) == {}
        clock.advance(120)
        assert [prune(conn), prune(conn)] == [{"payloads": 1}, {}]
        found = letter_of(conn, sent)
        kept = {"status": "dead", "key": "k", "attempts": 1, "cycle": 3, **failure}
        assert {name: found[name] for name in kept} == kept
        assert (found["payload"], found["headers"], found["erased_at"] is None) == (None, None, False)
        assert (len(found["failure_history"]), "s2" in str(found), "s3" in str(found)) == (2, False, False)
        assert change(conn, "replay", sent) == []
        plans.steps(conn)
        assert plans.replay_of(conn, number)["skipped"] == 1
        assert letter_of(conn, alive)["payload"] == 5
        adds_up(conn)

    def test_expiring_payloads_of_unresolved_letters_are_reported(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", payload_retention="7 days")
        ids = die(conn, 4)
        change(conn, "discard", ids[0])
        assert expiring(conn, "6 days") == []
        clock.advance(5 * DAY)
        assert [each[:3] for each in expiring(conn, "3 days")] == [("q", "payloads", 3)]
        clock.advance(3 * DAY)
        assert prune(conn) == {"payloads": 4}
        assert [event["unresolved"] for event in events(conn, "dead_letter.payload_expired")] == [3]
        assert expiring(conn) == []
        change(conn, "discard", *die(conn, 2))
        clock.advance(8 * DAY)
        assert prune(conn) == {"payloads": 2}
        assert len(events(conn, "dead_letter.payload_expired")) == 1

    def test_changed_retention_holds_for_old_letters(self, conn: Connection, clock: Clock) -> None:
        change(conn, "discard", *die(conn, 7)[:3])
        clock.advance(10 * DAY)
        create(conn, "q", payload_retention="20 days")
        assert prune(conn) == {}
        create(conn, "q", payload_retention="5 days")
        assert [prune(conn, 3) for _ in range(4)] == [{"payloads": 3}, {"payloads": 3}, {"payloads": 1}, {}]

    def test_erasing_waits_for_no_sender(self, conn: Connection, clock: Clock, connect: Connect) -> None:
        """Every other action would wait with it; a message under way dies without its payload."""
        sent = die_of(conn, {"secret": "s"}, key="k", unique_for="1 minute")
        change(conn, "replay", sent)
        clock.advance(61)
        sender = connect(autocommit=False)
        sender.execute("select bartleby.send('q', '2', p_key => 'k', p_unique_for => '1 hour')")
        assert value(connect(options=NO_WAIT), "select bartleby.erase_key('k', 'ann', 'asked')") == 1
        kill_all(conn)
        found = letter_of(conn, sent)
        assert (found["status"], found["payload"], found["edited"], found["key"]) == ("dead", None, None, None)
        sender.commit()
        assert len(plans.work_all(conn)) == 1


def test_ledger_of_messages_that_did_not_die_is_deleted(conn: Connection, clock: Clock) -> None:
    send_count(conn, 5)
    sql.fail_all(conn, claim(conn, 5), delay=40 * DAY)
    clock.advance(31 * DAY)
    assert [prune(conn, 2) for _ in range(4)] == [{"attempts": 2}, {"attempts": 2}, {"attempts": 1}, {}]


class TestPlans:
    def test_plan_is_kept_for_a_month_after_it_ended(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", retention="1000 days")
        started(conn, die(conn))
        plans.steps(conn)
        plans.work_all(conn)
        assert plans.steps(conn)[0]["status"] == "finished"
        ids = die(conn, 4)
        cancelled, paused = started(conn, ids[:1]), started(conn, ids[1:])
        plans.steps(conn, 1)
        command(conn, "cancel", cancelled)
        command(conn, "pause", paused)
        clock.advance(29 * DAY)
        assert prune(conn) == {}
        clock.advance(2 * DAY)
        for _ in range(3):
            prune(conn)
        assert column(conn, "select id from bartleby.replays") == [paused]
        assert set(column(conn, "select replay_id from bartleby.replay_items")) == {paused}
        assert (plans.work_all(conn), plans.steps(conn)) == (ids[:2], []), "late outcomes do no harm"
        assert column(conn, "select replay_id from bartleby.replay_delta") == []
        adds_up(conn)

    def test_half_deleted_draft_cannot_be_started(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", retention="1000 days")
        number = plan(conn, die(conn, 7))
        clock.advance(31 * DAY)
        assert prune(conn, 3) == {"replays": 3}
        with refused("ZB015", "is cancelled"):
            plans.start(conn, number)
        assert [prune(conn, 3), prune(conn, 3), prune(conn, 3)] == [{"replays": 3}, {"replays": 1}, {}]
        assert rows(conn, "select * from bartleby.replays") == []


class TestGroups:
    def group_ids(self, conn: Connection) -> list[int]:
        return column(conn, "select id from bartleby.failure_group order by id")

    def test_group_is_kept_as_long_as_its_letters(self, conn: Connection, clock: Clock) -> None:
        die(conn, fingerprint="f")
        clock.advance(31 * DAY)
        prune(conn)
        plans.tally(conn)
        conn.execute("update bartleby.failure_group set restless = true")
        assert "groups" not in prune(conn), "letters may return to it"
        for _ in range(2):  # the second walk finds that no letter has come since the first
            conn.execute("select bartleby.regroup(100)")
        assert prune(conn)["groups"] == 1
        for table in ("failure_group", "letter_count", "letter_delta", "group_hour"):
            assert rows(conn, f"select * from bartleby.{table}") == [], table
        create(conn, "q", retention="1000 days")
        die(conn, fingerprint="f")
        plans.tally(conn)
        clock.advance(31 * DAY)
        prune(conn)
        assert rows(conn, "select * from bartleby.group_hour") == [], "hours are kept for a month"
        assert len(self.group_ids(conn)) == 1

    def test_group_with_a_rule_stays_and_a_resolved_one_for_a_year(self, conn: Connection, clock: Clock) -> None:
        for fingerprint in "abcd":
            die(conn, fingerprint=fingerprint, worker_version="1")
        a, b, c, d = self.group_ids(conn)
        conn.execute("select bartleby.merge_groups(array[%s::bigint], %s, 'ann', 'x')", [a, b])
        clock.advance(20 * DAY)
        for group in (c, d):
            conn.execute("select bartleby.resolve_group(%s, 'ann', 'fixed', '2')", [group])
        clock.advance(340 * DAY)
        for _ in range(3):
            prune(conn)
            plans.tally(conn)
        assert self.group_ids(conn) == [a, b, c, d]
        die(conn, fingerprint="d", worker_version="2")
        clock.advance(30 * DAY)
        prune(conn)
        assert self.group_ids(conn) == [a, b, d]

    def test_letter_under_way_keeps_its_group(self, conn: Connection, clock: Clock, connect: Connect) -> None:
        create(conn, "q", retention="1 day")
        die(conn, fingerprint="f")
        clock.advance(2 * DAY)
        prune(conn)
        plans.tally(conn)
        send_count(conn, 1)
        claimed = claim(conn)
        worker, janitor = connect(autocommit=False), connect(options=NO_WAIT)
        conn.execute("update bartleby.failure_group set state_at = state_at - interval '10 days'")
        conn.execute("delete from bartleby.group_hour")
        plans.kill(worker, claimed, fingerprint="f")
        assert prune(janitor) == {}
        worker.commit()
        assert prune(janitor) == {}
        assert value(conn, "select dead from bartleby.groups") == 1
        adds_up(conn)
