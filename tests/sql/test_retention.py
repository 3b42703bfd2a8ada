"""Retention: what is old goes, a stretch at a time and never silently; what is held or alive stays."""

from typing import Any

import pytest

from tests.kit.clock import Clock
from tests.kit.plans import (
    adds_up,
    bury,
    change,
    command,
    die,
    die_of,
    events,
    kill_all,
    letter_of,
    plan,
    replay_of,
    start,
    started,
    statuses,
    step,
    steps,
    work_all,
)
from tests.kit.sql import (
    Connect,
    Connection,
    ack,
    claim,
    column,
    create,
    fail_all,
    pages_read,
    refused,
    row,
    rows,
    send_count,
    value,
)

DAY = 86400


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, max_attempts=2, backoff="none")
    return conn


def prune(conn: Connection, limit: int = 10000) -> dict[str, int]:
    found = rows(conn, "select * from bartleby.prune(%s)", limit)
    return {each["what"]: each["rows"] for each in found if each["rows"] and each["what"] != "events"}


class TestLetters:
    def test_each_status_by_its_own_time(self, conn: Connection, clock: Clock) -> None:
        """Thirty days since it died, was discarded, or was done."""
        dead, discarded, resolved, replayed, restored = die(conn, 5)
        clock.advance(10 * DAY)
        change(conn, "discard", discarded, restored)
        change(conn, "replay", resolved)
        work_all(conn)
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
        assert statuses(conn) == {replayed: "replayed"}
        assert dead not in statuses(conn)
        adds_up(conn)

    def test_what_is_alive_is_kept_however_old(self, conn: Connection, clock: Clock) -> None:
        (sent,) = die(conn)
        change(conn, "replay", sent)
        clock.advance(1000 * DAY)
        prune(conn)
        assert work_all(conn) == [sent]
        assert statuses(conn) == {sent: "resolved"}

    @pytest.mark.parametrize("status", ["dead", "discarded", "resolved"])
    def test_what_is_held_is_kept_however_old(self, conn: Connection, clock: Clock, status: str) -> None:
        (sent,) = die(conn)
        if status == "discarded":
            change(conn, "discard", sent)
        elif status == "resolved":
            change(conn, "replay", sent)
            work_all(conn)
        change(conn, "hold", sent)
        create(conn, "q", payload_retention="1 day")
        clock.advance(1000 * DAY)
        prune(conn)
        assert statuses(conn) == {sent: status}
        assert letter_of(conn, sent)["payload"] == 1
        change(conn, "release", sent)
        prune(conn)
        assert statuses(conn) == {}

    def test_each_queue_has_its_own(self, conn: Connection, clock: Clock) -> None:
        create(conn, "short", retention="1 day")
        create(conn, "none", retention=0)
        ids = {queue: die(conn, 1, queue)[0] for queue in ("q", "short", "none")}
        clock.advance(60)
        prune(conn)
        assert set(statuses(conn)) == {ids["q"], ids["short"]}
        clock.advance(DAY)
        prune(conn)
        assert set(statuses(conn)) == {ids["q"]}

    def test_the_unresolved_do_not_go_silently(self, conn: Connection, clock: Clock) -> None:
        ids = die(conn, 3)
        first = letter_of(conn, ids[0])["dead_at"]
        clock.advance(5)
        last = letter_of(conn, *die(conn))["dead_at"]
        change(conn, "discard", ids[1])
        clock.advance(31 * DAY)
        assert prune(conn) | {"groups": 0} == {
            "unresolved dead letters": 3, "resolved and discarded letters": 1, "groups": 0,
        }  # fmt: skip
        (told,) = events(conn, "dead_letter.expired")
        assert told["unresolved"] == 3
        assert value(
            conn,
            "select %s::timestamptz = %s and %s::timestamptz = %s",
            told["died_from"],
            first,
            told["died_until"],
            last,
        )

    def test_nothing_is_told_of_the_others(self, conn: Connection, clock: Clock) -> None:
        change(conn, "discard", *die(conn, 2))
        clock.advance(31 * DAY)
        prune(conn)
        assert events(conn, "dead_letter.expired") == []

    def test_a_stretch_at_a_time(self, conn: Connection, clock: Clock) -> None:
        create(conn, "other")
        ids = die(conn, 5)
        die(conn, 3, "other")
        change(conn, "discard", *ids[:2])
        clock.advance(31 * DAY)
        gone = []
        while (found := prune(conn, 3)).keys() & {"unresolved dead letters", "resolved and discarded letters"}:
            gone.append(found.get("unresolved dead letters", 0) + found.get("resolved and discarded letters", 0))
            adds_up(conn)
        assert gone == [3, 3, 2]
        assert sum(told["unresolved"] for told in events(conn, "dead_letter.expired")) == 6

    def test_their_ledger_goes_with_them(self, conn: Connection, clock: Clock) -> None:
        die(conn, 2)
        clock.advance(20 * DAY)
        kept = die(conn, 1)
        clock.advance(11 * DAY)
        prune(conn)
        assert column(conn, "select message_id from bartleby.attempts") == kept

    def test_those_that_somebody_is_at_are_left(self, conn: Connection, clock: Clock, connect: Connect) -> None:
        ids = die(conn, 3)
        clock.advance(31 * DAY)
        operator, janitor = connect(autocommit=False), connect()
        janitor.execute("set statement_timeout = '20s'")
        change(operator, "replay", ids[1])
        prune(janitor)
        assert set(statuses(conn)) == {ids[1]}
        operator.commit()
        prune(janitor)
        assert work_all(conn) == [ids[1]]
        adds_up(conn)

    def test_one_that_was_replayed_in_time(self, conn: Connection, clock: Clock) -> None:
        ids = die(conn, 2)
        clock.advance(31 * DAY)
        change(conn, "replay", ids[0])
        prune(conn)
        assert statuses(conn) == {ids[0]: "replayed"}
        assert value(conn, "select count(*) from bartleby.attempts") == 1

    def test_two_at_once_do_not_wait_for_each_other(self, conn: Connection, clock: Clock, connect: Connect) -> None:
        die(conn, 6)
        clock.advance(31 * DAY)
        first, second = connect(autocommit=False), connect()
        second.execute("set statement_timeout = '20s'")
        assert prune(first, 4)["unresolved dead letters"] == 4
        assert prune(second)["unresolved dead letters"] == 2
        first.rollback()
        assert prune(second)["unresolved dead letters"] == 4
        adds_up(conn)


class TestPayloads:
    def test_they_go_first_and_the_evidence_stays(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", payload_retention="7 days")
        sent = die_of(
            conn, {"a": 1}, headers={"h": 1}, key="k", failure={"error": "e", "traceback": "t", "fingerprint": "f"}
        )
        clock.advance(7 * DAY - 60)
        assert prune(conn) == {}
        clock.advance(120)
        assert prune(conn) == {"payloads": 1}
        found = letter_of(conn, sent)
        assert (found["payload"], found["headers"], found["edited"]) == (None, None, None)
        assert found["erased_at"] is not None
        assert {name: found[name] for name in ("status", "key", "error", "traceback", "fingerprint", "attempts")} == {
            "status": "dead", "key": "k", "error": "e", "traceback": "t", "fingerprint": "f", "attempts": 1,
        }  # fmt: skip
        assert prune(conn) == {}
        clock.advance(23 * DAY)
        assert prune(conn)["unresolved dead letters"] == 1

    def test_the_unresolved_do_not_lose_theirs_silently(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", payload_retention="7 days")
        ids = die(conn, 4)
        change(conn, "discard", ids[0])
        assert rows(conn, "select letters from bartleby.expiring('6 days')") == []
        clock.advance(5 * DAY)
        (warned,) = rows(conn, "select * from bartleby.expiring('3 days')")
        assert (warned["queue"], warned["what"], warned["letters"]) == ("q", "payloads", 3)
        clock.advance(3 * DAY)
        assert prune(conn) == {"payloads": 4}
        (told,) = events(conn, "dead_letter.payload_expired")
        assert told["unresolved"] == 3
        assert rows(conn, "select * from bartleby.expiring('7 days')") == []

    def test_of_the_others_nothing_is_told(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", payload_retention="7 days")
        change(conn, "discard", *die(conn, 2))
        clock.advance(8 * DAY)
        assert prune(conn) == {"payloads": 2}
        assert events(conn, "dead_letter.payload_expired") == []

    def test_what_is_erased_cannot_be_replayed(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", payload_retention="1 day")
        ids = die(conn, 2)
        number = started(conn, ids[:1])
        clock.advance(2 * DAY)
        prune(conn)
        assert change(conn, "replay", *ids) == []
        steps(conn)
        assert replay_of(conn, number)["skipped"] == 1
        adds_up(conn)

    def test_what_was_edited_goes_too(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", payload_retention="1 day")
        sent = die_of(conn, {"secret": 1})
        for secret in (2, 3):
            started(conn, [sent], patch=[{"op": "replace", "path": "/secret", "value": f"s{secret}"}])
            steps(conn)
            kill_all(conn)
        clock.advance(2 * DAY)
        prune(conn)
        found = letter_of(conn, sent)
        assert (found["edited"], found["cycle"], len(found["failure_history"])) == (None, 3, 2)
        assert "s2" not in str(found)
        assert "s3" not in str(found)

    def test_not_while_it_lives_and_not_on_hold(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", payload_retention="1 day")
        alive, held, other = die(conn, 3)
        change(conn, "replay", alive)
        change(conn, "hold", held)
        clock.advance(2 * DAY)
        assert prune(conn) == {"payloads": 1}
        assert [letter_of(conn, each)["payload"] for each in (alive, held, other)] == [1, 2, None]
        change(conn, "release", held)
        work_all(conn)
        clock.advance(DAY + 60)
        assert prune(conn) == {"payloads": 2}

    def test_a_shorter_time_holds_for_what_is_there(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", payload_retention="20 days")
        die(conn, 2)
        clock.advance(10 * DAY)
        assert prune(conn) == {}
        create(conn, "q", payload_retention="5 days")
        assert prune(conn) == {"payloads": 2}

    def test_and_none_at_all_until_it_is_said(self, conn: Connection, clock: Clock) -> None:
        die(conn, 2)
        clock.advance(20 * DAY)
        assert prune(conn) == {}
        create(conn, "q", payload_retention="60 days")
        assert prune(conn) == {}
        create(conn, "q", payload_retention="15 days")
        assert prune(conn) == {"payloads": 2}

    def test_a_stretch_at_a_time(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", payload_retention="1 day")
        ids = die(conn, 7)
        change(conn, "discard", *ids[:3])
        clock.advance(2 * DAY)
        assert [prune(conn, 3) for _ in range(4)] == [{"payloads": 3}, {"payloads": 3}, {"payloads": 1}, {}]

    def test_those_that_somebody_is_at_are_left_for_later(
        self, conn: Connection, clock: Clock, connect: Connect
    ) -> None:
        create(conn, "q", payload_retention="1 day")
        ids = die(conn, 3)
        clock.advance(2 * DAY)
        somebody, janitor = connect(autocommit=False), connect()
        janitor.execute("set statement_timeout = '20s'")
        change(somebody, "hold", ids[1])
        prune(janitor)
        assert [letter_of(conn, each)["payload"] for each in ids] == [None, 2, None]
        somebody.rollback()
        clock.advance(DAY + 60)
        prune(janitor)
        assert letter_of(conn, ids[1])["payload"] is None

    def test_erased_and_dead_again_keeps_no_payload(self, conn: Connection) -> None:
        sent = die_of(conn, {"secret": "s"}, key="k")
        change(conn, "replay", sent)
        conn.execute("select bartleby.erase_key('k', 'ann', 'asked')")
        kill_all(conn)
        found = letter_of(conn, sent)
        assert (found["status"], found["payload"], found["edited"], found["key"]) == ("dead", None, None, None)
        adds_up(conn)

    def test_erasing_waits_for_no_open_sender(self, conn: Connection, clock: Clock, connect: Connect) -> None:
        """It would keep every other deed waiting: they come one after another."""
        die_of(conn, 1, key="k", unique_for="1 minute")
        clock.advance(61)
        sender, operator = connect(autocommit=False), connect()
        sender.execute("select bartleby.send('q', '2', p_key => 'k', p_unique_for => '1 hour')")
        operator.execute("set statement_timeout = '20s'")
        assert value(operator, "select bartleby.erase_key('k', 'ann', 'asked')") == 1
        sender.commit()
        assert len(work_all(conn)) == 1

    @pytest.mark.parametrize("bad", [-1, "soon", [], True])
    def test_a_bad_time_is_refused(self, conn: Connection, bad: Any) -> None:
        with refused("ZB003", "payload_retention"):
            create(conn, "q", payload_retention=bad)


class TestLedger:
    def test_of_messages_that_did_not_die(self, conn: Connection, clock: Clock) -> None:
        send_count(conn, 2)
        fail_all(conn, claim(conn, 2))
        clock.advance(1)
        work_all(conn)
        clock.advance(31 * DAY)
        assert prune(conn) == {"attempts": 2}

    def test_of_letters_it_is_kept(self, conn: Connection, clock: Clock) -> None:
        (sent,) = die(conn)
        change(conn, "hold", sent)
        clock.advance(100 * DAY)
        prune(conn)
        assert column(conn, "select message_id from bartleby.attempts") == [sent]

    def test_a_stretch_at_a_time(self, conn: Connection, clock: Clock) -> None:
        send_count(conn, 5)
        fail_all(conn, claim(conn, 5))
        clock.advance(1)
        work_all(conn)
        clock.advance(31 * DAY)
        assert [prune(conn, 2) for _ in range(4)] == [{"attempts": 2}, {"attempts": 2}, {"attempts": 1}, {}]

    def test_of_one_who_waits_for_long_it_is_old_all_the_same(self, conn: Connection, clock: Clock) -> None:
        send_count(conn, 1)
        fail_all(conn, claim(conn), delay=40 * DAY)
        clock.advance(31 * DAY)
        assert prune(conn) == {"attempts": 1}
        clock.advance(10 * DAY)
        assert len(work_all(conn)) == 1


class TestPlans:
    def test_those_that_ended_a_month_ago(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", retention="1000 days")
        ids = die(conn, 4)
        draft, cancelled = plan(conn, ids[:1]), plan(conn, ids[:1])
        command(conn, "cancel", cancelled)
        finished, paused = started(conn, ids[:1]), started(conn, ids[1:])
        steps(conn, 1)
        command(conn, "pause", paused)
        work_all(conn)
        steps(conn)
        clock.advance(29 * DAY)
        assert prune(conn) == {}
        clock.advance(2 * DAY)
        for _ in range(5):
            prune(conn)
        assert column(conn, "select id from bartleby.replays") == [paused]
        assert set(column(conn, "select replay_id from bartleby.replay_items")) == {paused}
        assert draft != finished

    def test_a_stretch_at_a_time(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", retention="1000 days")
        number = plan(conn, die(conn, 7))
        clock.advance(31 * DAY)
        assert prune(conn, 3) == {"replays": 3}
        with refused("ZB015", "is cancelled"):
            start(conn, number)
        assert [prune(conn, 3), prune(conn, 3), prune(conn, 3)] == [{"replays": 3}, {"replays": 1}, {}]
        assert rows(conn, "select * from bartleby.replays") == []

    def test_an_outcome_that_comes_after_its_plan_is_forgotten(self, conn: Connection, clock: Clock) -> None:
        ids = die(conn, 2)
        number = started(conn, ids)
        step(conn, 1)
        command(conn, "cancel", number)
        clock.advance(31 * DAY)
        prune(conn)
        assert work_all(conn) == ids[:1]
        assert steps(conn) == []
        assert rows(conn, "select * from bartleby.replay_delta") == []
        adds_up(conn)


class TestGroups:
    def group_ids(self, conn: Connection) -> list[int]:
        return column(conn, "select id from bartleby.failure_group order by id")

    def test_those_without_letters_for_as_long_as_letters_are_kept(self, conn: Connection, clock: Clock) -> None:
        die(conn, fingerprint="f")
        clock.advance(31 * DAY)
        prune(conn)
        conn.execute("select bartleby.tally()")
        prune(conn)
        assert self.group_ids(conn) == []
        for table in ("letter_count", "letter_delta", "group_hour"):
            assert rows(conn, f"select * from bartleby.{table}") == [], table
        die(conn, fingerprint="f")
        assert len(self.group_ids(conn)) == 1
        adds_up(conn)

    def test_not_one_that_somebody_cares_about(self, conn: Connection, clock: Clock) -> None:
        for fingerprint in "abc":
            die(conn, fingerprint=fingerprint)
        a, b, c = self.group_ids(conn)
        conn.execute("select bartleby.merge_groups(array[%s::bigint], %s, 'ann', 'x')", [a, b])
        clock.advance(20 * DAY)
        conn.execute("select bartleby.resolve_group(%s, 'ann', 'fixed')", [c])
        clock.advance(11 * DAY)
        for _ in range(2):
            prune(conn)
            conn.execute("select bartleby.tally()")
        assert self.group_ids(conn) == [a, b, c]
        # a bug that comes back within a year is a regression
        clock.advance(330 * DAY)
        prune(conn)
        assert self.group_ids(conn) == [a, b, c]
        clock.advance(30 * DAY)
        prune(conn)
        assert self.group_ids(conn) == [a, b]

    def test_not_one_to_which_letters_may_yet_come_back(self, conn: Connection, clock: Clock) -> None:
        die(conn, fingerprint="f")
        (number,) = self.group_ids(conn)
        clock.advance(31 * DAY)
        prune(conn)
        conn.execute("select bartleby.tally()")
        conn.execute("update bartleby.failure_group set restless = true")
        assert "groups" not in prune(conn)
        assert self.group_ids(conn) == [number]
        for _ in range(2):  # the second walk finds that nobody has come since the first
            conn.execute("select bartleby.regroup(100)")
        assert prune(conn)["groups"] == 1
        assert self.group_ids(conn) == []

    def test_a_bug_that_was_resolved_is_known_when_it_comes_back(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", retention="1 day")
        die(conn, fingerprint="f", worker_version="1")
        conn.execute("select bartleby.resolve_group(%s, 'ann', 'fixed', '2')", self.group_ids(conn))
        clock.advance(60 * DAY)
        for _ in range(2):
            prune(conn)
            conn.execute("select bartleby.tally()")
        die(conn, fingerprint="f", worker_version="2")
        assert column(conn, "select state from bartleby.groups") == ["regressed"]

    def test_a_worker_that_is_just_burying_a_letter_in_it(
        self, conn: Connection, clock: Clock, connect: Connect
    ) -> None:
        create(conn, "q", retention="1 day")
        die(conn, fingerprint="f")
        clock.advance(2 * DAY)
        prune(conn)
        while value(conn, "select bartleby.tally()"):
            pass
        send_count(conn, 1)
        claimed = claim(conn)
        worker, janitor = connect(autocommit=False), connect()
        janitor.execute("set statement_timeout = '20s'")
        conn.execute("update bartleby.failure_group set state_at = state_at - interval '10 days'")
        conn.execute("delete from bartleby.group_hour")
        bury(worker, claimed, fingerprint="f")
        prune(janitor)
        worker.commit()
        prune(janitor)
        assert value(conn, "select dead from bartleby.groups") == 1
        adds_up(conn)

    def test_workers_do_not_wait_for_it(self, conn: Connection, clock: Clock, connect: Connect) -> None:
        """It gives up at once if somebody is writing letters, and holds its lock only until it ends."""
        create(conn, "q", retention="1 day")
        die(conn, fingerprint="f")
        clock.advance(3 * DAY)
        send_count(conn, 1)
        claimed = claim(conn)
        writer = connect(autocommit=False)
        writer.execute("lock table bartleby.dead_letter in row exclusive mode")
        janitor = connect()
        janitor.execute("set statement_timeout = '20s'")
        assert prune(janitor) == {"unresolved dead letters": 1}
        assert prune(janitor) == {}  # first it is told that the group is empty
        conn.execute("select bartleby.tally()")
        assert prune(janitor) == {}
        bury(conn, claimed, fingerprint="g")
        writer.rollback()
        assert prune(janitor) == {"groups": 1}
        assert column(conn, "select fingerprint from bartleby.groups") == ["g"]

    def test_hours_of_a_month_ago(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", retention="1000 days")
        die(conn, fingerprint="f")
        conn.execute("select bartleby.tally()")
        clock.advance(31 * DAY)
        prune(conn)
        assert rows(conn, "select * from bartleby.group_hour") == []
        assert len(self.group_ids(conn)) == 1


class TestWarning:
    def expiring(self, conn: Connection, within: str = "7 days") -> list[dict[str, Any]]:
        return rows(conn, "select * from bartleby.expiring(%s)", within)

    def test_of_letters_that_will_go_soon(self, conn: Connection, clock: Clock) -> None:
        create(conn, "other")
        ids = die(conn, 3)
        die(conn, 1, "other")
        change(conn, "hold", ids[0])
        clock.advance(22 * DAY)
        assert self.expiring(conn) == []
        die(conn, 5)
        clock.advance(2 * DAY)
        found = self.expiring(conn)
        assert [(each["queue"], each["letters"]) for each in found] == [("q", 2), ("other", 1)]
        assert found[0]["first_at"] == value(
            conn, "select dead_at + interval '30 days' from bartleby.dead_letters where message_id = %s", ids[1]
        )

    def test_letters_that_stay_cost_nothing(self, conn: Connection) -> None:
        die(conn, 3000)
        conn.execute("analyze bartleby.dead_letter")
        assert pages_read(conn, "select * from bartleby.expiring('7 days')") < 50

    def test_only_of_the_unresolved(self, conn: Connection, clock: Clock) -> None:
        ids = die(conn, 3)
        change(conn, "discard", ids[0])
        change(conn, "replay", *ids[1:])
        ack(conn, claim(conn).lease)
        clock.advance(28 * DAY)
        assert self.expiring(conn) == []


def test_the_cost_does_not_grow_with_what_is_kept(conn: Connection, clock: Clock) -> None:
    create(conn, "q", payload_retention="20 days")
    clock.advance(0)
    insert = (
        "insert into bartleby.dead_letter (message_id, queue, status, status_at, reason, created_at, first_failed_at,"
        " dead_at, attempts, crashes, cycle, worker, payload, fingerprint, group_id)"
        " select 100000 + n, 1, (array['dead', 'resolved', 'discarded', 'replayed'])[n %% 4 + 1], now(), 'terminal',"
        " now(), now(), now(), 1, 0, 1, 'w', '1', 'f', 1 from generate_series(%s::int, %s::int) n"
    )
    prune(conn)
    die(conn, fingerprint="f")
    conn.execute(insert, [1, 100])
    conn.execute("analyze")
    few = pages_read(conn, "select bartleby.prune()")
    conn.execute(insert, [101, 20_000])
    conn.execute("analyze")
    assert pages_read(conn, "select bartleby.prune()") <= few + 60
    assert row(conn, "select count(*) as letters from bartleby.dead_letter")["letters"] == 20_001
