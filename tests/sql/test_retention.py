"""Retention: old evidence is deleted in bounded steps and never silently; what is held or alive stays."""

from typing import Any

import pytest

from tests.kit import plans, sql
from tests.kit.clock import Clock
from tests.kit.plans import adds_up, change, command, die, die_of, events, kill_all, letter_of, plan, started, statuses
from tests.kit.refusals import refused_row
from tests.kit.sql import Connect, Connection, claim, column, create, refused, rows, send_count, value

DAY = 86400


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, max_attempts=2, backoff="none")
    return conn


@pytest.fixture
def janitor(connect: Connect) -> Connection:
    """A session that prunes while another one is in the way."""
    session = connect()
    session.execute("set statement_timeout = '30s'")
    return session


def prune(conn: Connection, limit: int = 10000) -> dict[str, int]:
    found = rows(conn, "select * from bartleby.prune(%s)", limit)
    return {each["what"]: each["rows"] for each in found if each["rows"] and each["what"] != "events"}


def tally(conn: Connection) -> None:
    while value(conn, "select bartleby.tally()"):
        pass


def expiring(conn: Connection, within: str = "7 days") -> list[tuple[Any, ...]]:
    return conn.execute("select queue, what, letters from bartleby.expiring(%s)", [within]).fetchall()


class TestLetters:
    @pytest.mark.seed("brighter-56")
    def test_each_status_counts_from_its_own_time(self, conn: Connection, clock: Clock) -> None:
        """Thirty days since it died, was discarded, or was done."""
        dead, discarded, resolved, replayed, restored = die(conn, 5)
        clock.advance(10 * DAY)
        change(conn, "discard", discarded, restored)
        change(conn, "replay", resolved)
        plans.work_all(conn)
        change(conn, "replay", replayed)
        clock.advance(10 * DAY)
        change(conn, "restore", restored)
        clock.advance(10 * DAY - 60)
        assert prune(conn) == {}
        clock.advance(120)
        assert prune(conn)["unresolved dead letters"] == 1
        assert set(statuses(conn)) == {discarded, resolved, replayed, restored}
        clock.advance(10 * DAY)
        assert prune(conn)["resolved and discarded letters"] == 2
        assert statuses(conn) == {replayed: "replayed", restored: "dead"}
        clock.advance(10 * DAY)
        assert prune(conn)["unresolved dead letters"] == 1
        clock.advance(1000 * DAY)
        prune(conn)
        assert plans.work_all(conn) == [replayed], "what is alive is kept however old it is"
        assert statuses(conn) == {replayed: "resolved"}
        assert dead not in statuses(conn)
        adds_up(conn)

    @pytest.mark.seed("pgmq-60")
    def test_held_letter_is_kept_with_its_payload_and_its_ledger(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", payload_retention="1 day")
        ids = die(conn, 3)
        change(conn, "discard", ids[1])
        change(conn, "replay", ids[2])
        plans.work_all(conn)
        change(conn, "hold", *ids)
        clock.advance(1000 * DAY)
        prune(conn)
        assert list(statuses(conn).values()) == ["dead", "discarded", "resolved"]
        assert [letter_of(conn, each)["payload"] for each in ids] == [1, 2, 3]
        assert column(conn, "select message_id from bartleby.attempts order by 1") == ids
        change(conn, "release", *ids)
        prune(conn)
        assert statuses(conn) == {}
        assert column(conn, "select message_id from bartleby.attempts") == []

    @pytest.mark.seed("pgmq-58", "pulse-37")
    def test_unresolved_letters_are_reported_when_they_go(self, conn: Connection, clock: Clock) -> None:
        ids = die(conn, 3)
        first = letter_of(conn, ids[0])["dead_at"]
        clock.advance(5)
        last = letter_of(conn, *die(conn))["dead_at"]
        change(conn, "discard", ids[1])
        clock.advance(31 * DAY)
        found = prune(conn)
        assert (found["unresolved dead letters"], found["resolved and discarded letters"]) == (3, 1)
        (event,) = events(conn, "dead_letter.expired")
        assert event["unresolved"] == 3
        times = "select %s::timestamptz = %s and %s::timestamptz = %s"
        assert value(conn, times, event["died_from"], first, event["died_until"], last)
        change(conn, "discard", *die(conn, 2))
        clock.advance(31 * DAY)
        prune(conn)
        assert events(conn, "dead_letter.expired") == [], "discarded ones are not, and the first event has expired"

    def test_limit_and_retention_are_those_of_each_queue(self, conn: Connection, clock: Clock) -> None:
        create(conn, "short", retention="1 day")
        create(conn, "none", retention=0)
        ids = die(conn, 5) + die(conn, 3, "short")
        die(conn, 1, "none")
        change(conn, "discard", *ids[:2])
        clock.advance(60)
        prune(conn)
        assert list(statuses(conn)) == ids
        clock.advance(DAY)
        prune(conn, 2)
        assert len(statuses(conn)) == 6
        clock.advance(30 * DAY)
        gone = []
        while (found := prune(conn, 2)).keys() & {"unresolved dead letters", "resolved and discarded letters"}:
            gone.append(found.get("unresolved dead letters", 0) + found.get("resolved and discarded letters", 0))
            adds_up(conn)
        assert gone == [2, 2, 2]
        events_of = "select sum((data -> 'unresolved')::int) from bartleby.events where type like '%%.expired'"
        assert value(conn, events_of) == 6, "the event of the first letter has expired itself"


class TestPayloads:
    def test_they_go_first_and_the_evidence_stays(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", payload_retention="7 days")
        failure = {"error": "e", "traceback": "t", "fingerprint": "f"}
        alive, sent = die_of(conn, 5), die_of(conn, {"a": 1}, headers={"h": 1}, key="k", failure=failure)
        change(conn, "replay", alive)
        clock.advance(7 * DAY - 60)
        assert prune(conn) == {}
        clock.advance(120)
        assert prune(conn) == {"payloads": 1}
        found = letter_of(conn, sent)
        assert (found["payload"], found["headers"], found["edited"]) == (None, None, None)
        assert found["erased_at"] is not None
        kept = {"status": "dead", "key": "k", "attempts": 1, **failure}
        assert {name: found[name] for name in kept} == kept
        assert prune(conn) == {}
        clock.advance(23 * DAY)
        assert prune(conn)["unresolved dead letters"] == 1
        assert letter_of(conn, alive)["payload"] == 5

    def test_unresolved_ones_are_warned_of_and_reported(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", payload_retention="7 days")
        ids = die(conn, 4)
        change(conn, "discard", ids[0])
        assert expiring(conn, "6 days") == []
        clock.advance(5 * DAY)
        assert expiring(conn, "3 days") == [("q", "payloads", 3)]
        clock.advance(3 * DAY)
        assert prune(conn) == {"payloads": 4}
        assert [event["unresolved"] for event in events(conn, "dead_letter.payload_expired")] == [3]
        assert expiring(conn) == []
        change(conn, "discard", *die(conn, 2))
        clock.advance(8 * DAY)
        assert prune(conn) == {"payloads": 2}
        assert len(events(conn, "dead_letter.payload_expired")) == 1

    def test_edited_payload_goes_too_and_the_letter_cannot_be_replayed(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", payload_retention="1 day")
        sent = die_of(conn, {"secret": 1})
        for secret in (2, 3):
            started(conn, [sent], patch=[{"op": "replace", "path": "/secret", "value": f"s{secret}"}])
            plans.steps(conn)
            kill_all(conn)
        number = started(conn, [sent])
        clock.advance(2 * DAY)
        prune(conn)
        found = letter_of(conn, sent)
        assert (found["edited"], found["cycle"], len(found["failure_history"])) == (None, 3, 2)
        assert [secret for secret in ("s2", "s3") if secret in str(found)] == []
        assert change(conn, "replay", sent) == []
        plans.steps(conn)
        assert plans.replay_of(conn, number)["skipped"] == 1
        adds_up(conn)

    def test_changed_retention_holds_for_old_letters(self, conn: Connection, clock: Clock) -> None:
        ids = die(conn, 7)
        change(conn, "discard", *ids[:3])
        clock.advance(10 * DAY)
        for longer in ("60 days", "20 days"):
            create(conn, "q", payload_retention=longer)
            assert prune(conn) == {}, longer
        create(conn, "q", payload_retention="5 days")
        assert [prune(conn, 3) for _ in range(4)] == [{"payloads": 3}, {"payloads": 3}, {"payloads": 1}, {}]
        bad: list[Any] = [-1, "soon", [], True]
        for retention in bad:
            with refused_row(retention, "ZB003", "payload_retention"):
                create(conn, "q", payload_retention=retention)

    def test_erased_message_dies_without_payload_and_erasing_waits_for_no_sender(
        self, conn: Connection, clock: Clock, connect: Connect, janitor: Connection
    ) -> None:
        """Every other action would wait with it."""
        sent = die_of(conn, {"secret": "s"}, key="k", unique_for="1 minute")
        change(conn, "replay", sent)
        clock.advance(61)
        sender = connect(autocommit=False)
        sender.execute("select bartleby.send('q', '2', p_key => 'k', p_unique_for => '1 hour')")
        assert value(janitor, "select bartleby.erase_key('k', 'ann', 'asked')") == 1
        kill_all(conn)
        found = letter_of(conn, sent)
        assert (found["status"], found["payload"], found["edited"], found["key"]) == ("dead", None, None, None)
        sender.commit()
        assert len(plans.work_all(conn)) == 1
        adds_up(conn)


def test_ledger_of_messages_that_did_not_die_is_deleted(conn: Connection, clock: Clock) -> None:
    send_count(conn, 5)
    sql.fail_all(conn, claim(conn, 5), delay=40 * DAY)
    clock.advance(31 * DAY)
    assert [prune(conn, 2) for _ in range(4)] == [{"attempts": 2}, {"attempts": 2}, {"attempts": 1}, {}]
    clock.advance(10 * DAY)
    assert len(plans.work_all(conn)) == 5


class TestPlans:
    @pytest.fixture
    def conn(self, conn: Connection) -> Connection:
        create(conn, "q", retention="1000 days")
        return conn

    def test_plan_is_kept_for_a_month_after_it_ended(self, conn: Connection, clock: Clock) -> None:
        ids = die(conn, 4)
        plan(conn, ids[:1])
        command(conn, "cancel", plan(conn, ids[:1]))
        started(conn, ids[:1])
        paused = started(conn, ids[1:])
        plans.steps(conn, 1)
        command(conn, "pause", paused)
        plans.work_all(conn)
        plans.steps(conn)
        clock.advance(29 * DAY)
        assert prune(conn) == {}
        clock.advance(2 * DAY)
        for _ in range(5):
            prune(conn)
        assert column(conn, "select id from bartleby.replays") == [paused]
        assert set(column(conn, "select replay_id from bartleby.replay_items")) == {paused}

    def test_half_deleted_draft_cannot_be_started(self, conn: Connection, clock: Clock) -> None:
        number = plan(conn, die(conn, 7))
        clock.advance(31 * DAY)
        assert prune(conn, 3) == {"replays": 3}
        with refused("ZB015", "is cancelled"):
            plans.start(conn, number)
        assert [prune(conn, 3), prune(conn, 3), prune(conn, 3)] == [{"replays": 3}, {"replays": 1}, {}]
        assert rows(conn, "select * from bartleby.replays") == []

    def test_outcome_after_the_plan_is_forgotten_is_harmless(self, conn: Connection, clock: Clock) -> None:
        ids = die(conn, 2)
        number = started(conn, ids)
        plans.step(conn, 1)
        command(conn, "cancel", number)
        clock.advance(31 * DAY)
        prune(conn)
        assert (plans.work_all(conn), plans.steps(conn)) == (ids[:1], [])
        assert rows(conn, "select * from bartleby.replay_delta") == []
        adds_up(conn)


class TestGroups:
    def group_ids(self, conn: Connection) -> list[int]:
        return column(conn, "select id from bartleby.failure_group order by id")

    def test_group_is_kept_as_long_as_its_letters(self, conn: Connection, clock: Clock) -> None:
        die(conn, fingerprint="f")
        clock.advance(31 * DAY)
        prune(conn)
        tally(conn)
        prune(conn)
        assert self.group_ids(conn) == []
        for table in ("letter_count", "letter_delta", "group_hour"):
            assert rows(conn, f"select * from bartleby.{table}") == [], table
        die(conn, fingerprint="f")
        assert len(self.group_ids(conn)) == 1
        adds_up(conn)
        create(conn, "q", retention="1000 days")
        tally(conn)
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
            tally(conn)
        assert self.group_ids(conn) == [a, b, c, d]
        die(conn, fingerprint="d", worker_version="2")
        assert value(conn, "select state from bartleby.groups where id = %s", d) == "regressed"
        clock.advance(30 * DAY)
        prune(conn)
        assert self.group_ids(conn) == [a, b, d]

    def test_group_stays_while_letters_may_return_to_it(self, conn: Connection, clock: Clock) -> None:
        die(conn, fingerprint="f")
        clock.advance(31 * DAY)
        prune(conn)
        tally(conn)
        conn.execute("update bartleby.failure_group set restless = true")
        assert "groups" not in prune(conn)
        for _ in range(2):  # the second walk finds that no letter has come since the first
            conn.execute("select bartleby.regroup(100)")
        assert prune(conn)["groups"] == 1
        assert self.group_ids(conn) == []

    def test_letter_that_is_being_buried_keeps_its_group(
        self, conn: Connection, clock: Clock, connect: Connect, janitor: Connection
    ) -> None:
        create(conn, "q", retention="1 day")
        die(conn, fingerprint="f")
        clock.advance(2 * DAY)
        prune(conn)
        tally(conn)
        send_count(conn, 1)
        claimed = claim(conn)
        worker = connect(autocommit=False)
        conn.execute("update bartleby.failure_group set state_at = state_at - interval '10 days'")
        conn.execute("delete from bartleby.group_hour")
        plans.bury(worker, claimed, fingerprint="f")
        prune(janitor)
        worker.commit()
        prune(janitor)
        assert value(conn, "select dead from bartleby.groups") == 1
        adds_up(conn)

    def test_pruning_gives_up_while_letters_are_written(
        self, conn: Connection, clock: Clock, connect: Connect, janitor: Connection
    ) -> None:
        create(conn, "q", retention="1 day")
        die(conn, fingerprint="f")
        clock.advance(3 * DAY)
        send_count(conn, 1)
        claimed = claim(conn)
        writer = connect(autocommit=False)
        writer.execute("lock table bartleby.dead_letter in row exclusive mode")
        assert prune(janitor) == {"unresolved dead letters": 1}
        assert prune(janitor) == {}  # first it is recorded that the group is empty
        conn.execute("select bartleby.tally()")
        assert prune(janitor) == {}
        plans.bury(conn, claimed, fingerprint="g")
        writer.rollback()
        assert prune(janitor) == {"groups": 1}
        assert column(conn, "select fingerprint from bartleby.groups") == ["g"]


def test_unresolved_letters_that_go_soon_are_listed(conn: Connection, clock: Clock) -> None:
    create(conn, "other")
    ids = die(conn, 6)
    die(conn, 1, "other")
    change(conn, "hold", ids[0])
    change(conn, "discard", ids[1])
    change(conn, "replay", *ids[2:4])
    sql.ack(conn, claim(conn).lease)
    clock.advance(22 * DAY)
    assert expiring(conn) == []
    die(conn, 5)
    clock.advance(2 * DAY)
    assert expiring(conn) == [("q", "letters", 2), ("other", "letters", 1)]
    first = "select dead_at + interval '30 days' from bartleby.dead_letters where message_id = %s"
    assert value(conn, "select first_at from bartleby.expiring('7 days') limit 1") == value(conn, first, ids[4])
