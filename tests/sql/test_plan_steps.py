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
from tests.kit.sql import (
    Connect,
    Connection,
    ack,
    claim,
    column,
    create,
    drain,
    fail_all,
    pages_read,
    refused,
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
    def test_each_letter_lives_again_in_the_order_of_its_id(self, conn: Connection) -> None:
        ids = die(conn, 7)
        number = started(conn, list(reversed(ids)))
        assert [step(conn, 3)["moved"] for _ in range(3)] == [3, 3, 1]
        assert step(conn)["moved"] == 0
        assert column(conn, "select message_id from bartleby.messages order by position") == ids
        assert set(states(conn, number).values()) == {"replayed"}
        assert work_all(conn) == ids
        assert step(conn)["status"] == "finished"
        assert replay_of(conn, number)["done"] == 7
        adds_up(conn)

    def test_the_same_message_with_new_attempts(self, conn: Connection, clock: Clock) -> None:
        sent = send(conn, {"a": 1}, headers={"h": 1}, key="k", generation=4, max_attempts=2)
        first = claim(conn).one
        conn.execute('select bartleby.fail(%s, \'[{"position": 1, "verdict": "dead"}]\')', [first["lease_id"]])
        clock.advance(60)
        started(conn, [sent])
        step(conn)
        again = claim(conn).one
        same = ("message_id", "payload", "headers", "key", "generation", "created_at", "attempt")
        assert {name: again[name] for name in same} == {name: first[name] for name in same}
        assert row(conn, "select cycle, attempts, max_attempts from bartleby.messages") == {
            "cycle": 2, "attempts": 0, "max_attempts": 2,
        }  # fmt: skip

    def test_the_letter_says_by_which_plan(self, conn: Connection) -> None:
        (sent,) = die(conn)
        number = started(conn, [sent])
        step(conn)
        found = letter_of(conn, sent)
        assert (found["replay_id"], found["replayed_by"], found["replay_reason"]) == (number, "ann", "fixed")

    def test_a_step_that_is_rolled_back_never_was(self, conn: Connection, connect: Connect) -> None:
        ids = die(conn, 3)
        number = started(conn, ids)
        before = replay_of(conn, number)
        failing = connect(autocommit=False)
        step(failing, 2)
        failing.rollback()
        assert replay_of(conn, number) == before
        assert statuses(conn) == dict.fromkeys(ids, "dead")
        step(conn)
        assert work_all(conn) == ids
        adds_up(conn)

    def test_two_at_once_do_not_wait_and_do_not_meet(self, conn: Connection, connect: Connect) -> None:
        ids = die(conn, 4)
        number = started(conn, ids)
        one, two = connect(autocommit=False), connect()
        two.execute("set statement_timeout = '20s'")
        step(one, 2)
        assert steps(two) == []
        one.commit()
        step(two)
        assert work_all(conn) == ids
        assert set(states(conn, number).values()) == {"done"}
        adds_up(conn)

    def test_two_plans_at_once_share_nothing(self, conn: Connection, connect: Connect) -> None:
        """One is under way in a transaction that stays open; the other goes on with what it can get."""
        ids = die(conn, 4)
        first, second = plan(conn, ids[:3]), plan(conn, ids[1:])
        start(conn, first)
        start(conn, second)
        one, two = connect(autocommit=False), connect()
        two.execute("set statement_timeout = '20s'")
        step(one, replay=first)
        assert step(two, replay=second)["moved"] == 1
        assert states(conn, second) == {ids[1]: "waiting", ids[2]: "waiting", ids[3]: "replayed"}
        one.commit()
        assert step(two, replay=second)["moved"] == 2
        assert [item["problem"] for item in items(conn, second)] == ["replayed: by ann: fixed"] * 2 + [None]
        assert sorted(work_all(conn)) == ids
        steps(conn)
        adds_up(conn)

    def test_of_two_plans_with_the_same_letters_one_gets_each(self, conn: Connection) -> None:
        ids = die(conn, 5)
        numbers = [plan(conn, ids) for _ in range(2)]
        for number in numbers:
            start(conn, number)
        steps(conn, 2)
        steps(conn)
        assert sorted(work_all(conn)) == ids
        steps(conn)
        found = [replay_of(conn, number) for number in numbers]
        assert [(one["status"], one["done"] + one["skipped"]) for one in found] == [("finished", 5)] * 2
        assert sum(one["done"] for one in found) == 5
        adds_up(conn)

    @pytest.mark.parametrize("limit", [None, 0, -1, 100_001])
    def test_a_bad_limit_is_refused(self, conn: Connection, limit: int | None) -> None:
        with refused("ZB008", "limit"):
            conn.execute("select bartleby.advance_replays(%s)", [limit])

    def test_an_idle_worker_is_woken(self, conn: Connection, connect: Connect) -> None:
        started(conn, die(conn))
        worker = connect()
        worker.execute(f'listen "{value(worker, "select bartleby.channel(%s)", "q")}"')
        worker.execute("select bartleby.idle('q')")
        step(conn)
        assert len(list(worker.notifies(timeout=10, stop_after=1))) == 1

    def test_a_thousand_steps_are_one(self, conn: Connection) -> None:
        ids = die(conn, 300)
        number = started(conn, ids)
        while replay_of(conn, number)["waiting"]:
            step(conn, 7)
        assert work_all(conn) == ids
        assert step(conn)["status"] == "finished"
        adds_up(conn)


class TestBetweenPlanAndStep:
    """What somebody else did to a letter after the plan was started is respected, and said."""

    @pytest.mark.parametrize(
        ("deed", "problem", "status"),
        [
            ("hold", "held: by ben: by hand", "dead"),
            ("discard", "discarded: by ben: by hand", "discarded"),
            ("replay", "replayed: by ben: by hand", "replayed"),
        ],
    )
    def test_by_hand(self, conn: Connection, deed: str, problem: str, status: str) -> None:
        ids = die(conn, 3)
        number = started(conn, ids)
        change(conn, deed, ids[1])
        step(conn)
        assert states(conn, number) == {ids[0]: "replayed", ids[1]: "skipped", ids[2]: "replayed"}
        assert items(conn, number)[1]["problem"] == problem
        assert letter_of(conn, ids[1])["status"] == status
        assert sorted(work_all(conn)) == (ids if deed == "replay" else [ids[0], ids[2]])
        step(conn)
        adds_up(conn)

    def test_resolved(self, conn: Connection) -> None:
        (sent,) = die(conn)
        number = started(conn, [sent])
        change(conn, "replay", sent)
        work_all(conn)
        assert step(conn)["status"] == "finished"
        assert items(conn, number)[0]["problem"] == "resolved: was replayed by ben"
        assert drain(conn) == []

    def test_dying_again(self, conn: Connection) -> None:
        (sent,) = die(conn)
        number = started(conn, [sent])
        change(conn, "replay", sent)
        kill_all(conn)
        assert step(conn)["status"] == "finished"
        assert items(conn, number)[0]["problem"].startswith("newer: ")
        assert letter_of(conn, sent)["status"] == "dead"

    def test_discarded_and_restored_lives_again(self, conn: Connection) -> None:
        (sent,) = die(conn)
        number = started(conn, [sent])
        change(conn, "discard", sent)
        change(conn, "restore", sent)
        step(conn)
        assert states(conn, number) == {sent: "replayed"}

    def test_erased(self, conn: Connection) -> None:
        sent = die_of(conn, 1, key="k")
        number = started(conn, [sent])
        conn.execute("select bartleby.erase_key('k', 'ben', 'asked')")
        step(conn)
        assert items(conn, number)[0]["problem"] == "erased: its payload is gone"

    def test_taken_by_retention(self, conn: Connection, clock: Clock) -> None:
        (sent,) = die(conn)
        number = started(conn, [sent])
        clock.advance(31 * DAY)
        conn.execute("select bartleby.prune()")
        step(conn)
        assert items(conn, number)[0]["problem"].startswith("unknown: ")

    def test_held_open_by_somebody_it_is_left_for_another_step(self, conn: Connection, connect: Connect) -> None:
        ids = die(conn, 4)
        number = started(conn, ids)
        somebody, stepping = connect(autocommit=False), connect()
        stepping.execute("set statement_timeout = '20s'")
        change(somebody, "discard", ids[0], ids[2])
        assert step(stepping)["moved"] == 2
        assert step(stepping)["moved"] == 0
        assert states(conn, number) == {
            ids[0]: "waiting", ids[1]: "replayed", ids[2]: "waiting", ids[3]: "replayed",
        }  # fmt: skip
        somebody.rollback()
        assert step(stepping)["moved"] == 2
        assert sorted(work_all(conn)) == ids
        adds_up(conn)

    def test_many_held_open_do_not_stop_the_rest(self, conn: Connection, connect: Connect) -> None:
        ids = die(conn, 9)
        number = started(conn, ids)
        somebody = connect(autocommit=False)
        change(somebody, "hold", *ids[:4])
        for _ in range(6):
            step(conn, 2)
        assert list(states(conn, number).values()) == ["waiting"] * 4 + ["replayed"] * 5
        somebody.commit()
        for _ in range(3):
            step(conn, 2)
        assert list(states(conn, number).values()) == ["skipped"] * 4 + ["replayed"] * 5

    def test_an_operator_waits_for_a_step_and_is_told(self, conn: Connection, connect: Connect) -> None:
        ids = die(conn, 2)
        started(conn, ids)
        stepping, operator = connect(autocommit=False), connect()
        step(stepping)
        with waiting(conn, operator, lambda conn: change(conn, "discard", *ids), for_whom=stepping) as discarding:
            stepping.commit()
            assert discarding.result() == ["refused", "refused"]
        assert sorted(work_all(conn)) == ids
        adds_up(conn)

    def test_the_one_liner_and_a_step(self, conn: Connection, connect: Connect) -> None:
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
    def test_dead_again_into_the_same_letter(self, conn: Connection) -> None:
        (sent,) = die(conn, error_type="First", fingerprint="f1", worker_version="1")
        number = started(conn, [sent])
        step(conn)
        assert kill_all(conn, error_type="Second", fingerprint="f2", worker_version="2") == [sent]
        step(conn)
        assert states(conn, number) == {sent: "died_again"}
        found = letter_of(conn, sent)
        assert (found["status"], found["cycle"], found["error_type"], found["replay_id"]) == (
            "dead",
            2,
            "Second",
            number,
        )
        assert (found["replayed_by"], found["replayed_at"]) == (None, None)
        (entry,) = found["failure_history"]
        expected = {"cycle": 1, "error_type": "First", "replay_id": number, "replayed_by": "ann", "worker_version": "1"}
        assert {name: entry[name] for name in expected} == expected
        assert replay_of(conn, number)["status"] == "finished"
        adds_up(conn)

    def test_again_and_again(self, conn: Connection) -> None:
        (sent,) = die(conn)
        for cycle in range(2, 6):
            number = started(conn, [sent])
            assert items(conn, number)[0]["prediction"] == ("run" if cycle == 2 else "again")
            step(conn)
            kill_all(conn)
            assert step(conn)["status"] == "finished"
            found = letter_of(conn, sent)
            assert (found["cycle"], len(found["failure_history"])) == (cycle, cycle - 1)
            assert [entry["replay_id"] for entry in found["failure_history"]][-1] == number
        assert len(rows(conn, "select from bartleby.replays where died_again = 1")) == 4
        adds_up(conn)

    def test_retries_are_no_outcome(self, conn: Connection, clock: Clock) -> None:
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

    def test_a_message_that_takes_its_workers_along(self, conn: Connection, clock: Clock) -> None:
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

    def test_an_outcome_that_is_rolled_back_is_none(self, conn: Connection, connect: Connect) -> None:
        (sent,) = die(conn)
        number = started(conn, [sent])
        step(conn)
        worker = connect(autocommit=False)
        claimed = claim(conn)
        ack(worker, claimed.lease)
        worker.rollback()
        assert step(conn)["status"] == "settling"
        ack(conn, claimed.lease)
        assert step(conn)["status"] == "finished"
        assert replay_of(conn, number)["done"] == 1

    def test_half_of_a_lease(self, conn: Connection) -> None:
        ids = die(conn, 4)
        number = started(conn, ids)
        step(conn)
        claimed = claim(conn, 4)
        ack(conn, claimed.lease, claimed.positions[:2])
        step(conn)
        found = replay_of(conn, number)
        assert (found["done"], found["replayed"], found["status"]) == (2, 2, "settling")
        bury(conn, type(claimed)(claimed.messages[2:]))
        step(conn)
        found = replay_of(conn, number)
        assert (found["done"], found["died_again"], found["status"]) == (2, 2, "finished")
        adds_up(conn)

    def test_the_end_is_told_once(self, conn: Connection) -> None:
        number = started(conn, die(conn, 2))
        step(conn)
        work_all(conn)
        for _ in range(3):
            steps(conn)
        (told,) = events(conn, "replay.finished")
        assert {name: told[name] for name in ("replay_id", "items", "done", "died_again", "actor")} == {
            "replay_id": number, "items": 2, "done": 2, "died_again": 0, "actor": "ann",
        }  # fmt: skip
        assert column(conn, "select queue from bartleby.events where type = 'io.bartleby.replay.finished'") == ["q"]

    def test_workers_and_a_step_do_not_wait_for_each_other(self, conn: Connection, connect: Connect) -> None:
        ids = die(conn, 6)
        number = started(conn, ids)
        step(conn, 4)
        claimed = claim(conn, 4)
        worker, stepping = connect(autocommit=False), connect(autocommit=False)
        for session in (worker, stepping):
            session.execute("set statement_timeout = '20s'")
        ack(worker, claimed.lease, claimed.positions[:2])
        step(stepping)
        ack(worker, claimed.lease, claimed.positions[2:])
        worker.commit()
        stepping.commit()
        step(conn)
        assert replay_of(conn, number)["done"] == 4
        adds_up(conn)


class TestElsewhere:
    def test_another_queue(self, conn: Connection) -> None:
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
        adds_up(conn)

    def test_and_back(self, conn: Connection) -> None:
        create(conn, "other")
        (sent,) = die(conn)
        started(conn, [sent], to="other")
        step(conn)
        kill_all(conn, "other")
        number = started(conn, [sent], to="q")
        steps(conn)
        assert work_all(conn) == [sent]
        steps(conn)
        assert states(conn, number) == {sent: "done"}
        found = letter_of(conn, sent)
        assert (found["queue"], found["status"]) == ("other", "resolved")
        adds_up(conn)

    def test_handled_there_is_what_counts(self, conn: Connection, clock: Clock) -> None:
        create(conn, "other")
        (sent,) = die(conn)
        conn.execute("select bartleby.mark_handled('other', 'other', %s)", [f"id:{sent}"])
        clock.advance(1)
        number = started(conn, [sent], to="other")
        step(conn)
        work_all(conn, "other")
        step(conn)
        assert (items(conn, number)[0]["prediction"], states(conn, number)) == (
            "already_handled",
            {sent: "already_handled"},
        )

    def test_a_generation(self, conn: Connection) -> None:
        sent = die_of(conn, 1, generation=3)
        started(conn, [sent], generation=8)
        step(conn)
        assert claim(conn).one["generation"] == 8
        assert letter_of(conn, sent)["generation"] == 3

    def test_without_one_it_is_kept(self, conn: Connection) -> None:
        sent = die_of(conn, 1, generation=3)
        started(conn, [sent])
        step(conn)
        assert claim(conn).one["generation"] == 3


PATCH = [{"op": "add", "path": "/b", "value": 2}]


class TestPatched:
    def test_the_original_is_kept(self, conn: Connection) -> None:
        sent = die_of(conn, {"a": 1})
        started(conn, [sent], patch=PATCH)
        step(conn)
        assert claim(conn).one["payload"] == {"a": 1, "b": 2}
        found = letter_of(conn, sent)
        assert (found["payload"], found["edited"]) == ({"a": 1}, {"a": 1, "b": 2})

    def test_what_dies_again_dies_as_it_was_edited(self, conn: Connection) -> None:
        sent = die_of(conn, {"a": 1})
        started(conn, [sent], patch=PATCH)
        step(conn)
        kill_all(conn)
        found = letter_of(conn, sent)
        assert (found["payload"], found["edited"], found["status"]) == ({"a": 1}, {"a": 1, "b": 2}, "dead")
        assert found["failure_history"][0]["edited"] == {"a": 1, "b": 2}

    def test_the_next_replay_is_of_the_edited_one(self, conn: Connection) -> None:
        sent = die_of(conn, {"a": 1})
        started(conn, [sent], patch=PATCH)
        step(conn)
        kill_all(conn)
        change(conn, "replay", sent)
        assert claim(conn).one["payload"] == {"a": 1, "b": 2}

    def test_patches_add_up_and_can_be_undone(self, conn: Connection) -> None:
        sent = die_of(conn, {"a": 1})
        for patch, edited in ((PATCH, {"a": 1, "b": 2}), ([{"op": "remove", "path": "/b"}], None)):
            number = plan(conn, [sent], patch=patch)
            after = edited or {"a": 1}
            assert row(conn, "select after from bartleby.replay_change(%s, %s)", number, sent)["after"] == after
            start(conn, number)
            steps(conn)
            claimed = claim(conn)
            assert claimed.payloads == [after]
            bury(conn, claimed)
            assert (letter_of(conn, sent)["payload"], letter_of(conn, sent)["edited"]) == ({"a": 1}, edited)
        adds_up(conn)

    def test_some_fail(self, conn: Connection) -> None:
        ids = [die_of(conn, payload) for payload in ({"a": 1}, [1], {"a": 2}, 5)]
        number = started(conn, ids, patch=[{"op": "replace", "path": "/a", "value": 0}])
        step(conn)
        assert list(states(conn, number).values()) == ["replayed", "skipped", "replayed", "skipped"]
        assert [letter_of(conn, ident)["edited"] for ident in ids] == [{"a": 0}, None, {"a": 0}, None]
        assert drain(conn) == [{"a": 0}, {"a": 0}]
        step(conn)
        adds_up(conn)

    @pytest.mark.parametrize("erased", [False, True])
    def test_what_dies_again_is_routed_as_it_ran(self, conn: Connection, erased: bool) -> None:
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

    def test_a_large_one_counts_as_large(self, conn: Connection) -> None:
        sent = die_of(conn, {"a": 1})
        started(conn, [sent], patch=[{"op": "add", "path": "/b", "value": "x" * 200_000}])
        step(conn)
        assert value(conn, "select big from bartleby.log where cycle = 2") > 200_000


class TestCanary:
    def run(self, conn: Connection, die_again: Callable[[int], bool]) -> list[int]:
        """Steps and a worker by turns; returns how many were in flight at each turn."""
        flights: list[int] = []
        while True:
            moved = sum(told["moved"] for told in steps(conn))
            if not (claimed := claim(conn, 10_000)).messages:
                if not moved:
                    break
                continue
            flights.append(len(claimed.messages))
            dying = [message for message in claimed.messages if die_again(message["message_id"])]
            if dying:
                bury(conn, type(claimed)(dying))
            if len(dying) < len(claimed.messages):
                ack(conn, claimed.lease)
        return flights

    def test_it_ramps_up(self, conn: Connection) -> None:
        ids = die(conn, 100)
        number = started(conn, ids, canary=5)
        assert self.run(conn, lambda _: False) == [5, 10, 20, 40, 25]
        found = replay_of(conn, number)
        assert (found["status"], found["done"]) == ("finished", 100)
        adds_up(conn)

    def test_it_aborts_and_leaves_the_rest_as_it_was(self, conn: Connection) -> None:
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
        adds_up(conn)

    def test_it_waits_for_the_real_outcomes(self, conn: Connection, clock: Clock) -> None:
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

    def test_the_first_stage_has_one_attempt_and_later_ones_their_own(self, conn: Connection) -> None:
        """Evidence is wanted soon; what died of it gets its own number back."""
        ids = [die_of(conn, 1, max_attempts=7 if number % 2 else None) for number in range(12)]
        started(conn, ids, canary=4, tolerance=0.5)
        step(conn)
        assert column(conn, "select max_attempts from bartleby.messages") == [1] * 4
        claimed = claim(conn, 4)
        fail_all(conn, type(claimed)(claimed.messages[:2]))
        assert statuses(conn)[ids[0]] == "dead"
        assert letter_of(conn, ids[0])["reason"] == "exhausted"
        ack(conn, claimed.lease)
        step(conn)
        later = rows(conn, "select message_id, max_attempts from bartleby.messages order by message_id")
        assert [found["max_attempts"] for found in later] == [None, 7] * 4
        change(conn, "replay", *ids[:2])
        again = rows(
            conn, "select max_attempts from bartleby.messages where message_id = any(%s) order by message_id", ids[:2]
        )
        assert [found["max_attempts"] for found in again] == [None, 7]

    @pytest.mark.parametrize(
        ("tolerance", "size", "tolerated"),
        [
            (0, 10, 0),
            (0.1, 10, 1),
            (0.1, 9, 0),
            (0.7, 10, 7),
            (0.29, 100, 29),
            (0.57, 100, 57),
            (0.999, 10, 9),
            (1, 5, 5),
        ],
    )
    def test_the_edge_of_tolerance(self, conn: Connection, tolerance: float, size: int, tolerated: int) -> None:
        """So many may die, and the plan goes on; one more, and it does not."""
        for deaths in (tolerated, tolerated + 1):
            if deaths > size:
                continue
            ids = die(conn, size + 1)
            number = started(conn, ids, canary=size, tolerance=tolerance)
            doomed = set(ids[:deaths])
            self.run(conn, doomed.__contains__)
            found = replay_of(conn, number)
            expected = ("finished", size + 1) if deaths == tolerated else ("aborted", size)
            assert (found["status"], found["done"] + found["died_again"]) == expected
        adds_up(conn)

    def test_everything_tolerated_while_the_queue_is_paused_for_long(self, conn: Connection) -> None:
        number = started(conn, die(conn, 3), canary=1, tolerance=1)
        conn.execute("select bartleby.pause_queue('q')")
        for _ in range(70):
            assert step(conn)["moved"] == 0
        conn.execute("select bartleby.resume_queue('q')")
        for _ in range(3):
            step(conn)
        assert replay_of(conn, number)["waiting"] == 0

    def test_it_stops_in_a_later_stage_too(self, conn: Connection) -> None:
        ids = die(conn, 100)
        number = started(conn, ids, canary=5, tolerance=0.2)
        assert self.run(conn, set(ids[15:]).__contains__) == [5, 10, 20]
        found = replay_of(conn, number)
        assert (found["status"], found["waiting"], found["died_again"]) == ("aborted", 65, 20)

    def test_skipped_ones_are_no_evidence(self, conn: Connection) -> None:
        ids = die(conn, 10)
        change(conn, "hold", *ids[:6])
        number = started(conn, ids, canary=2)
        assert self.run(conn, lambda _: True) == [2]
        assert replay_of(conn, number)["status"] == "aborted"

    def test_a_plan_smaller_than_its_canary(self, conn: Connection) -> None:
        number = started(conn, die(conn, 3), canary=10)
        assert self.run(conn, lambda _: True) == [3]
        found = replay_of(conn, number)
        assert (found["status"], found["died_again"]) == ("finished", 3)

    def test_what_went_with_its_queue_is_no_success(self, conn: Connection) -> None:
        create(conn, "other")
        number = started(conn, die(conn, 5), canary=2, to="other")
        step(conn)
        conn.execute("select bartleby.drop_queue('other', true)")
        steps(conn)
        assert replay_of(conn, number)["status"] == "aborted"
        adds_up(conn)


class TestPace:
    def walk(self, conn: Connection, clock: Clock, seconds: float, every: float = 0.1) -> tuple[int, float]:
        """Step after step for so long; returns how many were moved, and how long it was by the clock, which goes on."""
        begun = value(conn, "select credit_at from bartleby.replay")
        moved = 0
        for _ in range(round(seconds / every)):
            clock.advance(every)
            moved += sum(told["moved"] for told in steps(conn))
        return moved, (value(conn, "select bartleby.clock()") - begun).total_seconds()

    @pytest.mark.parametrize(("rate", "every"), [(0.5, 0.1), (3, 0.1), (20, 0.1), (33.3, 0.025), (100, 0.7)])
    def test_a_rate_is_kept_however_often_somebody_steps(
        self, conn: Connection, clock: Clock, rate: float, every: float
    ) -> None:
        started(conn, die(conn, 2500), rate=rate)
        moved, seconds = self.walk(conn, clock, 10, every)
        assert abs(moved - rate * seconds) <= max(1, 0.05 * rate * seconds) + rate * every

    def test_time_that_nobody_used_is_not_saved_up(self, conn: Connection, clock: Clock) -> None:
        started(conn, die(conn, 400), rate=20)
        clock.advance(3600)
        assert step(conn)["moved"] in range(20, 23)

    def test_nor_is_a_pause(self, conn: Connection, clock: Clock) -> None:
        clock.stop()
        number = started(conn, die(conn, 100), rate=10)
        command(conn, "pause", number)
        clock.advance(3600)
        command(conn, "resume", number)
        assert step(conn)["moved"] == 0
        clock.advance(1)
        assert step(conn)["moved"] == 10

    def test_what_is_skipped_costs_nothing(self, conn: Connection, clock: Clock) -> None:
        ids = die(conn, 60)
        change(conn, "hold", *ids[:50])
        started(conn, ids, rate=10)
        assert self.walk(conn, clock, 10)[0] == 60

    def test_a_slow_one_is_told_to_wait(self, conn: Connection) -> None:
        started(conn, die(conn, 10), rate=0.5)
        assert step(conn)["wait"] == timedelta(seconds=1)

    def test_a_window(self, conn: Connection) -> None:
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

    def test_without_either_it_is_as_fast_as_it_can(self, conn: Connection) -> None:
        started(conn, die(conn, 10))
        told = step(conn, 4)
        assert (told["moved"], told["wait"], told["note"]) == (4, timedelta(0), None)


class TestBlocked:
    @pytest.mark.parametrize("how", ["paused", "open", "forced"])
    def test_a_queue_that_hands_out_nothing_gets_nothing(self, conn: Connection, how: str) -> None:
        deeds = {
            "paused": ("pause_queue('q')", "resume_queue('q')"),
            "open": ("open_breaker('q', 'storm', '0')", "close_breaker('q', 'ann', 'over')"),
            "forced": ("force_breaker('q', 'ann', 'storm')", "close_breaker('q', 'ann', 'over')"),
        }
        create(conn, "other")
        ids, others = die(conn, 2), die(conn, 2, "other")
        number = started(conn, [*ids, *others])
        conn.execute(f"select bartleby.{deeds[how][0]}".encode())
        assert step(conn)["moved"] == 2
        told = step(conn)
        assert (told["moved"], told["note"]) == (0, "waiting: queue q is paused or its breaker is open")
        assert {ident: states(conn, number)[ident] for ident in ids} == dict.fromkeys(ids, "waiting")
        conn.execute(f"select bartleby.{deeds[how][1]}".encode())
        assert step(conn)["moved"] == 2
        assert (work_all(conn), work_all(conn, "other")) == (ids, others)

    def test_it_is_the_queue_they_go_to(self, conn: Connection) -> None:
        create(conn, "other")
        conn.execute("select bartleby.pause_queue('q')")
        conn.execute("select bartleby.resume_queue('q')")
        started(conn, die(conn, 2), to="other")
        conn.execute("select bartleby.pause_queue('q')")
        assert step(conn)["moved"] == 2


def test_a_plan_that_cannot_go_on_is_paused_and_stops_no_other(conn: Connection) -> None:
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


def test_a_plan_that_is_asked_for_by_number(conn: Connection) -> None:
    one, two = started(conn, die(conn, 2)), started(conn, die(conn, 2))
    assert step(conn, replay=two)["replay_id"] == two
    assert (replay_of(conn, one)["waiting"], replay_of(conn, two)["waiting"]) == (2, 0)
    assert rows(conn, "select * from bartleby.advance_replays(10, 99)") == []


def test_the_cost_of_a_step_does_not_grow_with_what_is_not_in_it(conn: Connection) -> None:
    ids = die(conn, 40)
    conn.execute(
        "insert into bartleby.dead_letter (message_id, queue, status, status_at, reason, created_at, first_failed_at,"
        " dead_at, attempts, crashes, cycle, worker, payload, fingerprint)"
        " select 1000 + n, 1, 'dead', now(), 'terminal', now(), now(), now(), 1, 0, 1, 'w', '1', 'f'"
        " from generate_series(1, 20000) n"
    )
    command(conn, "cancel", plan(conn, [*range(1001, 15001)]))
    conn.execute("analyze")
    started(conn, ids)
    for _ in range(7):
        assert pages_read(conn, "select * from bartleby.advance_replays(5)") < 500
        steps(conn, 5)
    assert column(conn, "select count(*) from bartleby.dead_letter where status = 'replayed'") == [35]


def test_sessions_that_break_at_every_statement_lose_nothing(conn: Connection, connect: Connect) -> None:
    """The session of a step ends before its commit, again and again; every letter still lives once."""
    ids = die(conn, 12)
    number = started(conn, ids)
    for _ in range(12):
        victim = connect(autocommit=False)
        step(victim, 1)
        conn.execute("select pg_terminate_backend(%s)", [victim.info.backend_pid])
        with pytest.raises(psycopg.OperationalError):
            victim.execute("select 1")
        while not steps(conn, 1):
            pass
    assert work_all(conn) == ids
    assert step(conn)["status"] == "finished"
    assert replay_of(conn, number)["done"] == 12
    adds_up(conn)
