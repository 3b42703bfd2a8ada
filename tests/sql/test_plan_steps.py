"""Steps of a plan: each letter once, at its pace, whatever happens to letters, queues and steps meanwhile."""

from collections.abc import Container
from datetime import timedelta
from typing import Any

import pytest

from tests.kit import plans, sql
from tests.kit.clock import Clock
from tests.kit.plans import adds_up, change, command, die, die_of, items, letter_of, plan, started, states, step, steps
from tests.kit.refusals import assert_refused
from tests.kit.sql import Claim, Connection, ack, claim, column, create, value


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, max_attempts=3, backoff="none")
    create(conn, "other", max_attempts=1)
    return conn


def shown(conn: Connection, number: int, *names: str) -> list[Any]:
    found = plans.replay_of(conn, number)
    return [found[name] for name in names]


def test_letters_of_one_plan_live_again_in_the_order_of_their_ids(conn: Connection) -> None:
    ids = die(conn, 7)
    number, other = started(conn, ids[::-1]), started(conn, die(conn))
    assert [step(conn, 3, number)["moved"] for _ in range(4)] == [3, 3, 1, 0]
    assert (shown(conn, other, "waiting"), steps(conn, 1)[-1]["replay_id"]) == ([1], other)
    assert sql.rows(conn, "select * from bartleby.advance_replays(10, 99)") == []
    assert plans.work_all(conn)[:7] == ids
    assert {each["status"] for each in steps(conn)} == {"finished"}
    for limit in (None, 0, -1, 100_001):
        assert_refused(conn, "ZB008", "limit", "select bartleby.advance_replays(%s)", limit)


def test_letter_that_changed_since_the_start_is_skipped(conn: Connection, clock: Clock) -> None:
    again, erased, expired = die_of(conn, 1), die_of(conn, 2, key="k"), die_of(conn, 3, "other")
    create(conn, "other", retention="1 day")
    number = started(conn, [again, erased, expired])
    change(conn, "replay", again)
    plans.kill_all(conn)
    conn.execute("select bartleby.erase_key('k', 'ben', 'asked')")
    clock.advance(2 * 86400)
    conn.execute("select bartleby.prune()")
    assert step(conn)["status"] == "finished"
    problems = ("newer: it was replayed and died again", "erased: its payload is gone", "unknown: ")
    for item, problem in zip(items(conn, number), problems, strict=True):
        assert (item["state"], item["problem"].startswith(problem)) == ("skipped", True), item
    adds_up(conn)


def test_message_dies_again_into_the_same_letter_in_the_queue_of_the_plan(conn: Connection) -> None:
    ids = die(conn, 2, error_type="First", fingerprint="f1")
    group = letter_of(conn, ids[1])["group_id"]
    number = started(conn, ids, to="other")
    step(conn)
    assert {item["queue"] for item in items(conn, number)} == {"other"}
    claimed = claim(conn, 2, "other")
    ack(conn, claimed.lease, claimed.positions[:1])
    plans.kill(conn, Claim(claimed.messages[1:]), error_type="Second", fingerprint="f2")
    step(conn)
    assert states(conn, number) == {ids[0]: "done", ids[1]: "died_again"}
    assert [letter_of(conn, ids[0])[name] for name in ("queue", "status")] == ["q", "resolved"]
    found = letter_of(conn, ids[1])
    expected = {"queue": "other", "cycle": 2, "error_type": "Second", "replay_id": number, "replayed_by": None}
    assert {name: found[name] for name in expected} == expected
    expected = {"queue": "q", "cycle": 1, "error_type": "First", "replay_id": number, "group_id": group}
    assert {name: found["failure_history"][0][name] for name in expected} == expected
    assert value(conn, "select queue from bartleby.groups where id = %s", found["group_id"]) == "other"
    adds_up(conn)


PATCH = [{"op": "add", "path": "/b", "value": 2}]


class TestPatched:
    def test_original_is_kept_beside_the_edited_payload(self, conn: Connection) -> None:
        """Patches add up, and can be undone."""
        sent = die_of(conn, {"a": 1})
        both = {"a": 1, "b": 2}
        for patch, after in ((PATCH, both), ([{"op": "remove", "path": "/b"}], {"a": 1}), (PATCH, both)):
            number = plan(conn, [sent], patch=patch)
            assert value(conn, "select after from bartleby.replay_change(%s, %s)", number, sent) == after
            plans.start(conn, number)
            steps(conn)
            claimed = claim(conn)
            assert claimed.payloads == [after]
            assert (letter_of(conn, sent)["payload"], letter_of(conn, sent)["edited"]) == ({"a": 1}, after)
            plans.kill(conn, claimed)
            edited = None if after == {"a": 1} else after
            assert (letter_of(conn, sent)["payload"], letter_of(conn, sent)["edited"]) == ({"a": 1}, edited)
        assert letter_of(conn, sent)["failure_history"][0]["edited"] == both
        change(conn, "replay", sent)
        assert claim(conn).payloads == [both]
        adds_up(conn)

    def test_size_of_the_edited_payload_is_counted(self, conn: Connection) -> None:
        started(conn, [die_of(conn, 1)], patch=[{"op": "replace", "path": "", "value": "x" * 200_000}])
        step(conn)
        assert column(conn, "select big > 200000 from bartleby.log where cycle = 2") == [True]

    def test_edited_payload_is_routed_when_it_dies_again(self, conn: Connection) -> None:
        for erased in (False, True):
            create(conn, "q", dead_letter_to=None)
            sent = die_of(conn, {"a": 1}, key="k", headers={"type": "t"})
            started(conn, [sent], patch=PATCH)
            steps(conn)
            create(conn, "q", dead_letter_to="other")
            if erased:
                conn.execute("select bartleby.erase_key('k', 'ann', 'asked')")
            plans.kill_all(conn)
            routed = claim(conn, 1, "other").one
            assert (routed["payload"], routed["headers"]["original_type"]) == ({"a": 1, "b": 2}, "t")
            adds_up(conn)


class TestCanary:
    def run(self, conn: Connection, dies_again: Container[int]) -> list[int]:
        """Steps and a worker by turns; returns how many were in flight at each turn."""
        flights: list[int] = []
        while sum(each["moved"] for each in steps(conn)):
            if (claimed := claim(conn, 10_000)).messages:
                flights.append(len(claimed.messages))
                dying = [message for message in claimed.messages if message["message_id"] in dies_again]
                if dying:
                    plans.kill(conn, Claim(dying))
                if len(dying) < len(claimed.messages):
                    ack(conn, claimed.lease)
        return flights

    def test_stages_grow_and_only_outcomes_are_evidence(self, conn: Connection) -> None:
        for letters, held, canary, dies, flights, status, settled in (
            (100, 0, 5, False, [5, 10, 20, 40, 25], "finished", [100, 0]),
            (10, 6, 2, True, [2], "aborted", [0, 2]),
            (3, 0, 10, True, [3], "finished", [0, 3]),
        ):
            ids = die(conn, letters)
            change(conn, "hold", *ids[:held])
            number = started(conn, ids, canary=canary)
            assert self.run(conn, ids if dies else ()) == flights
            assert shown(conn, number, "status", "done", "died_again") == [status, *settled]

    def test_deaths_abort_the_plan_and_leave_the_rest(self, conn: Connection) -> None:
        ids = die(conn, 100)
        untouched = "select l::text from bartleby.dead_letter l where message_id > %s order by message_id"
        before = column(conn, untouched, ids[34])
        number = started(conn, ids, canary=5, tolerance=0.2)
        assert self.run(conn, ids[15:]) == [5, 10, 20]
        assert column(conn, untouched, ids[34]) == before
        found = plans.replay_of(conn, number)
        assert (found["status"], found["died_again"], found["waiting"]) == ("aborted", 20, 65)
        assert found["cause"].startswith("20 of the last 20 replayed died again")
        assert found["finished_at"] is not None
        assert [event["cause"] for event in plans.events(conn, "replay.aborted")] == [found["cause"]]
        adds_up(conn)

    def test_next_stage_waits_for_outcomes(self, conn: Connection, clock: Clock) -> None:
        started(conn, die(conn, 10), canary=2)
        assert step(conn)["moved"] == 2
        clock.advance(3600)
        result = step(conn)
        assert (result["moved"], result["note"]) == (0, "waiting for the outcomes of the canary")
        for moved in (0, 4):
            ack(conn, claim(conn).lease)
            assert step(conn)["moved"] == moved

    def test_first_stage_has_one_attempt_and_later_ones_their_own(self, conn: Connection) -> None:
        """The first stage gives evidence soon; a letter that died of it gets its own number back."""
        ids = [die_of(conn, 1, max_attempts=7 if number % 2 else None) for number in range(12)]
        started(conn, ids, canary=4, tolerance=0.5)
        step(conn)
        assert column(conn, "select max_attempts from bartleby.messages") == [1] * 4
        claimed = claim(conn, 4)
        sql.fail_all(conn, Claim(claimed.messages[:2]))
        assert (letter_of(conn, ids[0])["status"], letter_of(conn, ids[0])["reason"]) == ("dead", "exhausted")
        ack(conn, claimed.lease)
        step(conn)
        allowed = "select max_attempts from bartleby.messages where message_id = any(%s) order by message_id"
        assert column(conn, allowed, ids) == [None, 7] * 4
        change(conn, "replay", *ids[:2])
        assert column(conn, allowed, ids[:2]) == [None, 7]

    def test_tolerated_share_is_exact(self, conn: Connection) -> None:
        """That many may die and the plan continues; with one more it is aborted."""
        table = ((0, 10, 0), (0.1, 10, 1), (0.1, 9, 0), (0.7, 10, 7), (0.29, 100, 29), (0.57, 100, 57), (1, 5, 5))
        for tolerance, size, tolerated in table:
            for deaths in {tolerated, min(size, tolerated + 1)}:
                ids = die(conn, size + 1)
                number = started(conn, ids, canary=size, tolerance=tolerance)
                self.run(conn, ids[:deaths])
                found = plans.replay_of(conn, number)
                expected = ("finished", size + 1) if deaths == tolerated else ("aborted", size)
                assert (found["status"], found["done"] + found["died_again"]) == expected, (tolerance, size, deaths)

    def test_message_lost_with_its_queue_is_no_success(self, conn: Connection) -> None:
        number = started(conn, die(conn, 5), canary=2, to="other")
        step(conn)
        conn.execute("select bartleby.drop_queue('other', true)")
        steps(conn)
        assert shown(conn, number, "status") == ["aborted"]


class TestPace:
    def test_rate_is_kept_however_often_steps_are_made(self, conn: Connection, clock: Clock) -> None:
        clock.stop()
        for rate, every in ((0.5, 0.1), (3, 0.1), (20, 0.1), (33.3, 0.025), (100, 0.7)):
            number = started(conn, die(conn, round(rate * 4) + 2), rate=rate)
            moved = 0
            for _ in range(round(4 / every)):
                clock.advance(every)
                moved += step(conn, replay=number)["moved"]
            assert abs(moved - rate * 4) <= max(1, 0.05 * rate * 4) + rate * every, rate
            command(conn, "cancel", number)
            plans.work_all(conn)

    def test_unused_time_is_not_saved_up(self, conn: Connection, clock: Clock) -> None:
        clock.stop()
        ids = die(conn, 100)
        change(conn, "hold", *ids[:20])
        number = started(conn, ids, rate=10)
        clock.advance(3600)
        assert [step(conn)["moved"] for _ in range(4)] == [10, 10, 10, 0], "letters that are skipped cost nothing"
        clock.advance(0.5)
        command(conn, "pause", number)
        clock.advance(3600)
        command(conn, "resume", number)
        assert step(conn)["moved"] == 0
        clock.advance(1)
        assert step(conn)["moved"] == 10
        command(conn, "cancel", number)
        slow = started(conn, die(conn, 10), rate=0.5)
        assert step(conn)["wait"] == timedelta(seconds=1), "it says how long to wait"
        command(conn, "cancel", slow)
        started(conn, die(conn, 10))
        result = step(conn, 4)
        assert (result["moved"], result["wait"], result["note"]) == (4, timedelta(0), None)

    def test_window_limits_what_is_in_flight(self, conn: Connection) -> None:
        started(conn, die(conn, 10), window=3)
        assert [step(conn)["moved"], step(conn)["moved"]] == [3, 0]
        assert step(conn)["note"] == "waiting for outcomes: the window is full"
        claimed = claim(conn, 3)
        ack(conn, claimed.lease, claimed.positions[:1])
        plans.kill(conn, Claim(claimed.messages[1:2]))
        assert step(conn)["moved"] == 2


@pytest.mark.own_database
def test_plan_that_cannot_continue_is_paused_and_stops_no_other(conn: Connection) -> None:
    ids = die(conn, 4)
    broken, sound = started(conn, ids[:2]), started(conn, ids[2:])
    conn.execute(
        "create function public.fall() returns trigger language plpgsql as"
        " $$ begin raise exception 'it fell' using errcode = '22000'; end $$"
    )
    conn.execute(
        "create trigger fall before update on bartleby.replay_item for each row"
        f" when (old.replay_id = {broken}) execute function public.fall()".encode()
    )
    results = {each["replay_id"]: each for each in steps(conn)}
    assert (results[broken]["status"], results[sound]["moved"]) == ("paused", 2)
    assert shown(conn, broken, "cause") == ["it could not go on: it fell"]
    conn.execute("drop trigger fall on bartleby.replay_item")
    command(conn, "resume", broken)
    steps(conn)
    assert sorted(plans.work_all(conn)) == ids
    adds_up(conn)
