"""Steps of a plan: each letter once, at its pace, whatever happens to letters, queues and steps meanwhile."""

from collections.abc import Callable
from datetime import timedelta

import psycopg
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
    items,
    kill_all,
    letter_of,
    plan,
    replay_of,
    start,
    started,
    states,
    statuses,
    step,
    steps,
    work_all,
)
from tests.kit.refusals import check_refused_queries
from tests.kit.sql import (
    Connect,
    Connection,
    ack,
    claim,
    column,
    create,
    drain,
    fail_all,
    row,
    rows,
    send,
    stats,
    value,
    waiting,
)

DAY = 86400


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, max_attempts=3, backoff="none")
    return conn


class TestOnce:
    def test_each_letter_lives_again_in_the_order_of_its_id(self, conn: Connection, connect: Connect) -> None:
        ids = die(conn, 7)
        number = started(conn, list(reversed(ids)))
        worker = connect()
        worker.execute(f'listen "{value(worker, "select bartleby.channel(%s)", "q")}"')
        worker.execute("select bartleby.idle('q')")
        assert [step(conn, 3)["moved"] for _ in range(4)] == [3, 3, 1, 0]
        assert list(worker.notifies(timeout=30, stop_after=1)), "an idle worker is woken"
        assert column(conn, "select message_id from bartleby.messages order by position") == ids
        assert set(states(conn, number).values()) == {"replayed"}
        assert work_all(conn) == ids
        assert step(conn)["status"] == "finished"
        assert replay_of(conn, number)["done"] == 7
        for _ in range(2):
            assert steps(conn) == []
        (told,) = events(conn, "replay.finished")
        expected = {"replay_id": number, "items": 7, "done": 7, "died_again": 0, "actor": "ann"}
        assert {name: told[name] for name in expected} == expected
        assert column(conn, "select queue from bartleby.events where type = 'io.bartleby.replay.finished'") == ["q"]
        adds_up(conn)

    def test_same_message_lives_again_with_new_attempts(self, conn: Connection, clock: Clock) -> None:
        sent = send(conn, {"a": 1}, headers={"h": 1}, key="k", generation=4, max_attempts=2)
        claimed = claim(conn)
        bury(conn, claimed)
        clock.advance(60)
        number = started(conn, [sent])
        step(conn)
        found = letter_of(conn, sent)
        assert (found["replay_id"], found["replayed_by"], found["replay_reason"]) == (number, "ann", "fixed")
        first, again = claimed.one, claim(conn).one
        same = ("message_id", "payload", "headers", "key", "generation", "created_at", "attempt")
        assert {name: again[name] for name in same} == {name: first[name] for name in same}
        state = row(conn, "select cycle, attempts, max_attempts from bartleby.messages")
        assert state == {"cycle": 2, "attempts": 0, "max_attempts": 2}

    def test_rolled_back_step_changes_nothing(self, conn: Connection, connect: Connect) -> None:
        ids = die(conn, 3)
        number = started(conn, ids)
        before = replay_of(conn, number)
        failing = connect(autocommit=False)
        step(failing, 2)
        failing.rollback()
        assert replay_of(conn, number) == before
        assert statuses(conn) == dict.fromkeys(ids, "dead")

    def test_sessions_that_end_before_each_commit_lose_nothing(self, conn: Connection, connect: Connect) -> None:
        ids = die(conn, 6)
        number = started(conn, ids)
        for _ in ids:
            victim = connect(autocommit=False)
            step(victim, 1)
            conn.execute("select pg_terminate_backend(%s)", [victim.info.backend_pid])
            with pytest.raises(psycopg.OperationalError):
                victim.execute("select 1")
            while not steps(conn, 1):
                pass
        assert work_all(conn) == ids
        assert step(conn)["status"] == "finished"
        assert replay_of(conn, number)["done"] == 6
        adds_up(conn)

    def test_two_steps_at_once_neither_wait_nor_overlap(self, conn: Connection, connect: Connect) -> None:
        ids = die(conn, 4)
        number = started(conn, ids)
        one, two = connect(autocommit=False), connect()
        two.execute("set statement_timeout = '60s'")
        step(one, 2)
        assert steps(two) == []
        one.commit()
        step(two)
        assert work_all(conn) == ids
        assert set(states(conn, number).values()) == {"done"}
        adds_up(conn)

    def test_two_plans_with_the_same_letters_replay_each_once(self, conn: Connection, connect: Connect) -> None:
        """One is under way in a transaction that stays open; the other continues with the letters that are free."""
        ids = die(conn, 4)
        first, second = plan(conn, ids[:3]), plan(conn, ids[1:])
        start(conn, first)
        start(conn, second)
        one, two = connect(autocommit=False), connect()
        two.execute("set statement_timeout = '60s'")
        step(one, replay=first)
        assert step(two, replay=second)["moved"] == 1
        assert states(conn, second) == {ids[1]: "waiting", ids[2]: "waiting", ids[3]: "replayed"}
        one.commit()
        assert step(two, replay=second)["moved"] == 2
        assert [item["problem"] for item in items(conn, second)] == ["replayed: by ann: fixed"] * 2 + [None]
        assert sorted(work_all(conn)) == ids
        steps(conn)
        assert [replay_of(conn, number)["done"] for number in (first, second)] == [3, 1]
        adds_up(conn)

    def test_step_of_one_plan_leaves_others_alone(self, conn: Connection) -> None:
        one, two = started(conn, die(conn, 2)), started(conn, die(conn, 2))
        assert step(conn, replay=two)["replay_id"] == two
        assert (replay_of(conn, one)["waiting"], replay_of(conn, two)["waiting"]) == (2, 0)
        assert rows(conn, "select * from bartleby.advance_replays(10, 99)") == []
        bad_limits = [f"select bartleby.advance_replays({limit})" for limit in ("null", 0, -1, 100_001)]
        check_refused_queries(conn, "ZB008", "limit", *bad_limits)


class TestBetweenPlanAndStep:
    """What was done to a letter after the plan was started is respected and recorded."""

    @pytest.mark.parametrize(
        ("action", "state", "problem", "status"),
        [
            ("hold", "skipped", "held: by ben: by hand", "dead"),
            ("discard", "skipped", "discarded: by ben: by hand", "discarded"),
            ("replay", "skipped", "replayed: by ben: by hand", "replayed"),
            ("resolve", "skipped", "resolved: was replayed by ben", "resolved"),
            ("die again", "skipped", "newer: ", "dead"),
            ("discard and restore", "replayed", "", "replayed"),
            ("erase", "skipped", "erased: its payload is gone", "dead"),
        ],
    )
    def test_changed_letter_is_skipped_with_its_reason(
        self, conn: Connection, action: str, state: str, problem: str, status: str
    ) -> None:
        changed, other = die_of(conn, 1, key="k"), die_of(conn, 2)
        number = started(conn, [changed, other])
        if action in ("resolve", "die again"):
            change(conn, "replay", changed)
            (work_all if action == "resolve" else kill_all)(conn)
        elif action == "erase":
            conn.execute("select bartleby.erase_key('k', 'ben', 'asked')")
        else:
            for verb in action.split(" and "):
                change(conn, verb, changed)
        step(conn)
        assert states(conn, number) == {changed: state, other: "replayed"}
        assert (items(conn, number)[0]["problem"] or "").startswith(problem)
        assert letter_of(conn, changed)["status"] == status
        assert sorted(work_all(conn)) == ([changed, other] if status == "replayed" else [other])
        step(conn)
        adds_up(conn)

    def test_letter_removed_by_retention_is_unknown(self, conn: Connection, clock: Clock) -> None:
        (sent,) = die(conn)
        number = started(conn, [sent])
        clock.advance(31 * DAY)
        conn.execute("select bartleby.prune()")
        step(conn)
        assert items(conn, number)[0]["problem"].startswith("unknown: ")

    def test_locked_letters_are_left_for_a_later_step(self, conn: Connection, connect: Connect) -> None:
        ids = die(conn, 9)
        number = started(conn, ids)
        operator, stepping = connect(autocommit=False), connect()
        stepping.execute("set statement_timeout = '60s'")
        change(operator, "hold", *ids[:4])
        for _ in range(6):
            step(stepping, 2)
        assert list(states(conn, number).values()) == ["waiting"] * 4 + ["replayed"] * 5
        operator.rollback()
        change(conn, "hold", ids[3])
        for _ in range(3):
            step(stepping, 2)
        assert list(states(conn, number).values()) == ["replayed"] * 3 + ["skipped"] + ["replayed"] * 5
        assert sorted(work_all(conn)) == [*ids[:3], *ids[4:]]
        adds_up(conn)

    def test_operator_waits_for_a_step_and_is_refused(self, conn: Connection, connect: Connect) -> None:
        ids = die(conn, 2)
        started(conn, ids)
        stepping, operator = connect(autocommit=False), connect()
        step(stepping)
        with waiting(conn, operator, lambda conn: change(conn, "discard", *ids), for_whom=stepping) as discarding:
            stepping.commit()
            assert discarding.result() == ["refused", "refused"]
        assert sorted(work_all(conn)) == ids
        adds_up(conn)

    def test_replay_without_a_plan_waits_for_a_step(self, conn: Connection, connect: Connect) -> None:
        ids = die(conn, 2)
        number = started(conn, ids)
        stepping, operator = connect(autocommit=False), connect()
        step(stepping, 1)
        with waiting(conn, operator, lambda conn: change(conn, "replay", *ids), for_whom=stepping) as replaying:
            stepping.commit()
            assert replaying.result() == ["replayed"]
        step(conn)
        assert states(conn, number) == {ids[0]: "replayed", ids[1]: "skipped"}
        assert sorted(work_all(conn)) == ids
        adds_up(conn)


class TestOutcomes:
    def test_message_dies_again_into_the_same_letter(self, conn: Connection) -> None:
        (sent,) = die(conn, error_type="First", fingerprint="f1", worker_version="1")
        number = started(conn, [sent])
        assert items(conn, number)[0]["prediction"] == "run"
        step(conn)
        assert kill_all(conn, error_type="Second", fingerprint="f2", worker_version="2") == [sent]
        step(conn)
        assert (states(conn, number), replay_of(conn, number)["status"]) == ({sent: "died_again"}, "finished")
        found = letter_of(conn, sent)
        expected = {"status": "dead", "cycle": 2, "error_type": "Second", "replay_id": number, "replayed_by": None}
        assert {name: found[name] for name in expected} == expected
        assert found["replayed_at"] is None
        (entry,) = found["failure_history"]
        expected = {"cycle": 1, "error_type": "First", "replay_id": number, "replayed_by": "ann", "worker_version": "1"}
        assert {name: entry[name] for name in expected} == expected
        again = started(conn, [sent])
        assert items(conn, again)[0]["prediction"] == "again"
        step(conn)
        kill_all(conn)
        assert step(conn)["status"] == "finished"
        found = letter_of(conn, sent)
        assert (found["cycle"], [each["replay_id"] for each in found["failure_history"]]) == (3, [number, again])
        adds_up(conn)

    def test_retry_is_no_outcome(self, conn: Connection, clock: Clock) -> None:
        (sent,) = die(conn)
        number = started(conn, [sent])
        step(conn)
        for _ in range(2):
            fail_all(conn, claim(conn))
            clock.advance(1)
            assert step(conn)["status"] == "settling"
            assert replay_of(conn, number)["replayed"] == 1
        work_all(conn)
        assert step(conn)["status"] == "finished"

    def test_message_that_crashes_its_workers_died_again(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", crash_budget=1)
        (sent,) = die(conn)
        number = started(conn, [sent])
        step(conn)
        for _ in range(2):
            claim(conn)
            clock.advance(61)
            conn.execute("select bartleby.reap()")
            clock.advance(1)
        step(conn)
        assert states(conn, number) == {sent: "died_again"}
        assert letter_of(conn, sent)["reason"] == "crashed"
        adds_up(conn)

    def test_outcomes_of_parts_of_a_lease_count_when_committed(self, conn: Connection, connect: Connect) -> None:
        """Workers and a step do not wait for each other."""
        ids = die(conn, 6)
        number = started(conn, ids)
        step(conn, 4)
        claimed = claim(conn, 4)
        worker, stepping = connect(autocommit=False), connect(autocommit=False)
        ack(worker, claimed.lease)
        worker.rollback()
        for session in (worker, stepping):
            session.execute("set statement_timeout = '60s'")
        ack(worker, claimed.lease, claimed.positions[:1])
        step(stepping)
        ack(worker, claimed.lease, claimed.positions[1:2])
        worker.commit()
        stepping.commit()
        step(conn)
        found = replay_of(conn, number)
        assert (found["done"], found["replayed"], found["status"]) == (2, 4, "settling")
        bury(conn, type(claimed)(claimed.messages[2:]))
        assert work_all(conn) == ids[4:]
        step(conn)
        found = replay_of(conn, number)
        assert (found["done"], found["died_again"], found["status"]) == (4, 2, "finished")
        adds_up(conn)


class TestElsewhere:
    def test_letter_moves_to_the_queue_it_dies_in_and_back(self, conn: Connection) -> None:
        create(conn, "other", max_attempts=1)
        ids = die(conn, 2)
        number = started(conn, ids, to="other")
        step(conn)
        assert (stats(conn)["ready"], stats(conn, "other")["ready"]) == (0, 2)
        assert {item["queue"] for item in items(conn, number)} == {"other"}
        assert {letter_of(conn, ident)["queue"] for ident in ids} == {"q"}
        claimed = claim(conn, 2, "other")
        assert claimed.ids == ids
        ack(conn, claimed.lease, claimed.positions[:1])
        fail_all(conn, type(claimed)(claimed.messages[1:]), error_type="E", fingerprint="f")
        step(conn)
        assert states(conn, number) == {ids[0]: "done", ids[1]: "died_again"}
        resolved, dead = letter_of(conn, ids[0]), letter_of(conn, ids[1])
        assert (resolved["queue"], resolved["status"]) == ("q", "resolved")
        assert (dead["queue"], dead["status"], dead["cycle"]) == ("other", "dead", 2)
        assert dead["failure_history"][0]["queue"] == "q"
        assert value(conn, "select queue from bartleby.groups where id = %s", dead["group_id"]) == "other"
        assert (stats(conn)["dead"], stats(conn, "other")["dead"]) == (0, 1)
        back = started(conn, [ids[1]], to="q")
        steps(conn)
        assert work_all(conn) == [ids[1]]
        steps(conn)
        assert states(conn, back) == {ids[1]: "done"}
        found = letter_of(conn, ids[1])
        assert (found["queue"], found["status"]) == ("other", "resolved")
        adds_up(conn)

    def test_handled_marks_of_the_target_count(self, conn: Connection, clock: Clock) -> None:
        create(conn, "other")
        (sent,) = die(conn)
        conn.execute("select bartleby.mark_handled('other', 'other', %s)", [f"id:{sent}"])
        clock.advance(1)
        number = started(conn, [sent], to="other")
        step(conn)
        work_all(conn, "other")
        step(conn)
        (item,) = items(conn, number)
        assert (item["prediction"], item["state"]) == ("already_handled", "already_handled")

    def test_generation_is_replaced_only_when_given(self, conn: Connection) -> None:
        kept, replaced = die_of(conn, 1, generation=3), die_of(conn, 2, generation=3)
        started(conn, [kept])
        started(conn, [replaced], generation=8)
        steps(conn)
        assert {each["message_id"]: each["generation"] for each in claim(conn, 2).messages} == {kept: 3, replaced: 8}
        assert letter_of(conn, replaced)["generation"] == 3


PATCH = [{"op": "add", "path": "/b", "value": 2}]


class TestPatched:
    def test_original_is_kept_beside_the_edited_payload(self, conn: Connection) -> None:
        """Patches add up, and can be undone."""
        sent = die_of(conn, {"a": 1})
        both = {"a": 1, "b": 2}
        for patch, after in ((PATCH, both), ([{"op": "remove", "path": "/b"}], {"a": 1}), (PATCH, both)):
            number = plan(conn, [sent], patch=patch)
            assert row(conn, "select after from bartleby.replay_change(%s, %s)", number, sent)["after"] == after
            start(conn, number)
            steps(conn)
            claimed = claim(conn)
            assert claimed.payloads == [after]
            assert (letter_of(conn, sent)["payload"], letter_of(conn, sent)["edited"]) == ({"a": 1}, after)
            bury(conn, claimed)
            edited = None if after == {"a": 1} else after
            assert (letter_of(conn, sent)["payload"], letter_of(conn, sent)["edited"]) == ({"a": 1}, edited)
        assert letter_of(conn, sent)["failure_history"][0]["edited"] == both
        change(conn, "replay", sent)
        assert claim(conn).payloads == [both]
        adds_up(conn)

    def test_letters_that_a_patch_does_not_fit_are_skipped(self, conn: Connection) -> None:
        ids = [die_of(conn, payload) for payload in ({"a": 1}, [1], {"a": 2}, 5)]
        number = started(conn, ids, patch=[{"op": "replace", "path": "/a", "value": "x" * 200_000}])
        step(conn)
        assert list(states(conn, number).values()) == ["replayed", "skipped", "replayed", "skipped"]
        assert [letter_of(conn, ident)["edited"] is None for ident in ids] == [False, True, False, True]
        assert column(conn, "select big > 200000 from bartleby.log where cycle = 2") == [True, True]
        assert drain(conn) == [{"a": "x" * 200_000}] * 2
        step(conn)
        adds_up(conn)

    @pytest.mark.parametrize("erased", [False, True])
    def test_edited_payload_is_routed_when_it_dies_again(self, conn: Connection, erased: bool) -> None:
        create(conn, "beyond")
        sent = die_of(conn, {"a": 1}, key="k", headers={"type": "t"})
        started(conn, [sent], patch=PATCH)
        step(conn)
        create(conn, "q", dead_letter_to="beyond")
        if erased:
            conn.execute("select bartleby.erase_key('k', 'ann', 'asked')")
        kill_all(conn)
        routed = claim(conn, 1, "beyond").one
        assert (routed["payload"], routed["headers"]["original_type"]) == ({"a": 1, "b": 2}, "t")
        adds_up(conn)


class TestCanary:
    def run(self, conn: Connection, dies_again: Callable[[int], bool]) -> list[int]:
        """Steps and a worker by turns; returns how many were in flight at each turn."""
        flights: list[int] = []
        while True:
            moved = sum(each["moved"] for each in steps(conn))
            if not (claimed := claim(conn, 10_000)).messages:
                if not moved:
                    break
                continue
            flights.append(len(claimed.messages))
            dying = [message for message in claimed.messages if dies_again(message["message_id"])]
            if dying:
                bury(conn, type(claimed)(dying))
            if len(dying) < len(claimed.messages):
                ack(conn, claimed.lease)
        return flights

    def test_stages_grow_until_the_end(self, conn: Connection) -> None:
        number = started(conn, die(conn, 100), canary=5)
        assert self.run(conn, lambda _: False) == [5, 10, 20, 40, 25]
        found = replay_of(conn, number)
        assert (found["status"], found["done"]) == ("finished", 100)
        adds_up(conn)

    def test_deaths_abort_the_plan_and_leave_the_rest(self, conn: Connection) -> None:
        ids = die(conn, 100)
        number = started(conn, ids, canary=5)
        untouched = "select l::text from bartleby.dead_letter l where message_id > %s order by message_id"
        before = column(conn, untouched, ids[4])
        assert self.run(conn, lambda _: True) == [5]
        assert column(conn, untouched, ids[4]) == before
        found = replay_of(conn, number)
        assert (found["status"], found["died_again"], found["waiting"]) == ("aborted", 5, 95)
        assert found["cause"].startswith("5 of the last 5 replayed died again")
        assert found["finished_at"] is not None
        (told,) = events(conn, "replay.aborted")
        assert told["cause"] == found["cause"]
        later = started(conn, ids[5:], canary=5, tolerance=0.2)
        assert self.run(conn, set(ids[20:]).__contains__) == [5, 10, 20]
        found = replay_of(conn, later)
        assert (found["status"], found["waiting"], found["died_again"]) == ("aborted", 60, 20)
        adds_up(conn)

    def test_next_stage_waits_for_outcomes(self, conn: Connection, clock: Clock) -> None:
        number = started(conn, die(conn, 10), canary=2)
        assert step(conn)["moved"] == 2
        for _ in range(3):
            clock.advance(3600)
            told = step(conn)
            assert (told["moved"], told["note"]) == (0, "waiting for the outcomes of the canary")
        ack(conn, claim(conn).lease)
        assert step(conn)["moved"] == 0
        ack(conn, claim(conn).lease)
        assert step(conn)["moved"] == 4
        assert replay_of(conn, number)["replayed"] == 4

    def test_first_stage_has_one_attempt_and_later_ones_their_own(self, conn: Connection) -> None:
        """The first stage gives evidence soon; a letter that died of it gets its own number back."""
        ids = [die_of(conn, 1, max_attempts=7 if number % 2 else None) for number in range(12)]
        started(conn, ids, canary=4, tolerance=0.5)
        step(conn)
        assert column(conn, "select max_attempts from bartleby.messages") == [1] * 4
        claimed = claim(conn, 4)
        fail_all(conn, type(claimed)(claimed.messages[:2]))
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
            for deaths in (tolerated, tolerated + 1):
                if deaths > size:
                    continue
                ids = die(conn, size + 1)
                number = started(conn, ids, canary=size, tolerance=tolerance)
                self.run(conn, set(ids[:deaths]).__contains__)
                found = replay_of(conn, number)
                expected = ("finished", size + 1) if deaths == tolerated else ("aborted", size)
                assert (found["status"], found["done"] + found["died_again"]) == expected, (tolerance, size, deaths)
        adds_up(conn)

    def test_paused_queue_does_not_use_up_the_stages(self, conn: Connection) -> None:
        number = started(conn, die(conn, 3), canary=1, tolerance=1)
        conn.execute("select bartleby.pause_queue('q')")
        for _ in range(70):
            assert step(conn)["moved"] == 0
        conn.execute("select bartleby.resume_queue('q')")
        for _ in range(3):
            step(conn)
        assert replay_of(conn, number)["waiting"] == 0

    def test_skipped_letters_are_no_evidence(self, conn: Connection) -> None:
        ids = die(conn, 10)
        change(conn, "hold", *ids[:6])
        number = started(conn, ids, canary=2)
        assert self.run(conn, lambda _: True) == [2]
        assert replay_of(conn, number)["status"] == "aborted"

    def test_plan_smaller_than_its_canary_finishes(self, conn: Connection) -> None:
        number = started(conn, die(conn, 3), canary=10)
        assert self.run(conn, lambda _: True) == [3]
        found = replay_of(conn, number)
        assert (found["status"], found["died_again"]) == ("finished", 3)

    def test_message_lost_with_its_queue_is_no_success(self, conn: Connection) -> None:
        create(conn, "other")
        number = started(conn, die(conn, 5), canary=2, to="other")
        step(conn)
        conn.execute("select bartleby.drop_queue('other', true)")
        steps(conn)
        assert replay_of(conn, number)["status"] == "aborted"
        adds_up(conn)


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
            work_all(conn)

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

    def test_slow_plan_says_how_long_to_wait_and_a_fast_one_does_not(self, conn: Connection) -> None:
        slow = started(conn, die(conn, 10), rate=0.5)
        assert step(conn)["wait"] == timedelta(seconds=1)
        command(conn, "cancel", slow)
        started(conn, die(conn, 10))
        told = step(conn, 4)
        assert (told["moved"], told["wait"], told["note"]) == (4, timedelta(0), None)

    def test_window_limits_what_is_in_flight(self, conn: Connection) -> None:
        number = started(conn, die(conn, 10), window=3)
        assert [step(conn)["moved"], step(conn)["moved"]] == [3, 0]
        assert step(conn)["note"] == "waiting for outcomes: the window is full"
        claimed = claim(conn, 3)
        ack(conn, claimed.lease, claimed.positions[:1])
        bury(conn, type(claimed)(claimed.messages[1:2]))
        assert step(conn)["moved"] == 2
        assert replay_of(conn, number)["replayed"] == 3
        ack(conn, claimed.lease)
        while replay_of(conn, number)["status"] != "finished":
            step(conn)
            assert replay_of(conn, number)["replayed"] <= 3
            work_all(conn)
        adds_up(conn)


class TestBlocked:
    def test_paused_or_broken_target_queue_gets_nothing(self, conn: Connection) -> None:
        create(conn, "other")
        for block, unblock in (
            ("pause_queue('q')", "resume_queue('q')"),
            ("open_breaker('q', 'storm', '0')", "close_breaker('q', 'ann', 'over')"),
            ("force_breaker('q', 'ann', 'storm')", "close_breaker('q', 'ann', 'over')"),
        ):
            ids, others = die(conn, 2), die(conn, 2, "other")
            number = started(conn, [*ids, *others])
            conn.execute(f"select bartleby.{block}".encode())
            assert step(conn)["moved"] == 2
            told = step(conn)
            assert (told["moved"], told["note"]) == (0, "waiting: queue q is paused or its breaker is open"), block
            assert {states(conn, number)[ident] for ident in ids} == {"waiting"}
            conn.execute(f"select bartleby.{unblock}".encode())
            assert step(conn)["moved"] == 2
            assert (work_all(conn), work_all(conn, "other")) == (ids, others)
            steps(conn)
        elsewhere = started(conn, die(conn, 2), to="other")
        conn.execute("select bartleby.pause_queue('q')")
        assert step(conn, replay=elsewhere)["moved"] == 2

    @pytest.mark.own_database
    def test_plan_that_cannot_continue_is_paused_and_stops_no_other(self, conn: Connection) -> None:
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
        told = {each["replay_id"]: each for each in steps(conn)}
        assert (told[broken]["status"], told[sound]["moved"]) == ("paused", 2)
        assert replay_of(conn, broken)["cause"] == "it could not go on: it fell"
        assert [statuses(conn)[number] for number in ids] == ["dead", "dead", "replayed", "replayed"]
        conn.execute("drop trigger fall on bartleby.replay_item")
        command(conn, "resume", broken)
        steps(conn)
        assert sorted(work_all(conn)) == ids
        adds_up(conn)
