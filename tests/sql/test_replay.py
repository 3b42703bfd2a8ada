"""Replay: the same message lives again, once, and its history continues in the same dead letter."""

from collections.abc import Callable
from datetime import datetime

import pytest

from tests.kit import plans, sql
from tests.kit.clock import Clock
from tests.kit.plans import kill_all, letter_of
from tests.kit.sql import Connect, Connection, claim, column, create, fail_all, row, send, waiting

pytestmark = pytest.mark.usefixtures("quick")


def replay(
    conn: Connection, *ids: int, actor: str | None = "ann", reason: str | None = "fixed", generation: int | None = None
) -> list[int]:
    return column(conn, "select bartleby.replay(%s, %s, %s, %s)", list(ids), actor, reason, generation)


def replay_by_plan(conn: Connection, *ids: int, generation: int | None = None) -> list[int]:
    plans.started(conn, list(ids), **({} if generation is None else {"generation": generation}))
    plans.steps(conn)
    return list(ids)


@pytest.mark.seed("outbox-25", "outbox-29", "outbox-33", "outbox-35", "outbox-52", "outbox-58", "pulse-44")
@pytest.mark.parametrize("again", [replay, replay_by_plan], ids=["by_hand", "by_plan"])
def test_same_message_comes_again_with_new_attempts(
    conn: Connection, connect: Connect, clock: Clock, again: Callable[..., list[int]]
) -> None:
    sent = send(conn, {"a": 1}, headers={"h": 1}, key="k", generation=4, max_attempts=2)
    first = claim(conn).one
    conn.execute("select bartleby.fail(%s, '[{\"position\": 1}]')", [first["lease_id"]])
    clock.advance(1)
    assert kill_all(conn) == [sent]
    clock.advance(60)
    worker = connect()
    worker.execute(f'listen "{sql.value(worker, "select bartleby.channel(%s)", "q")}"')
    worker.execute("select bartleby.idle('q')")
    assert again(conn, sent) == [sent]
    assert list(worker.notifies(timeout=60, stop_after=1)), "an idle worker is woken"
    found = letter_of(conn, sent)
    assert (found["status"], found["replayed_by"], found["replay_reason"]) == ("replayed", "ann", "fixed")
    claimed = claim(conn).one
    same = ("message_id", "payload", "headers", "key", "generation", "created_at", "solo", "attempt")
    assert {name: claimed[name] for name in same} == {name: first[name] for name in same}
    state = row(conn, "select cycle, attempts, max_attempts from bartleby.messages")
    assert state == {"cycle": 2, "attempts": 0, "max_attempts": 2}


@pytest.mark.seed("outbox-6", "outbox-34")
def test_replay_happens_once_and_only_for_dead_letters(conn: Connection) -> None:
    create(conn, "other")
    (dead,), (elsewhere,) = plans.die(conn), plans.die(conn, 1, "other")
    living = sql.send_count(conn, 2)
    claim(conn)
    assert replay(conn) == column(conn, "select bartleby.replay(null, 'a', 'b')") == []
    assert replay(conn, *living, dead, elsewhere, dead, 999, -1) == [dead, elsewhere]
    assert replay(conn, dead, actor="bob") == []
    assert set(column(conn, "select replayed_by from bartleby.dead_letters")) == {"ann"}
    assert (sorted(plans.work_all(conn)), plans.work_all(conn, "other")) == ([dead, living[1]], [elsewhere])
    assert replay(conn, dead) == []
    held, discarded = plans.die(conn, 2)
    plans.change(conn, "hold", held)
    plans.change(conn, "discard", discarded)
    assert replay(conn, held, discarded) == []


def test_crashes_count_anew_in_each_cycle(conn: Connection, clock: Clock) -> None:
    create(conn, "q", crash_budget=1, max_attempts=5)
    sent = send(conn, 1)
    for cycle in (1, 2):
        for _ in range(2):
            claim(conn)
            clock.advance(61)
            sql.reap(conn)
            clock.advance(1)
        found = letter_of(conn, sent)
        assert (found["status"], found["reason"], found["crashes"], found["cycle"]) == ("dead", "crashed", 1, cycle)
        replay(conn, sent)


@pytest.mark.own_database  # the statistics of `analyze` stay
@pytest.mark.parametrize("above", [None, 400])
def test_letters_are_locked_in_the_order_of_their_ids(connect: Connect, conn: Connection, above: int | None) -> None:
    """In whatever order they are named, few or many: every other caller locks in that order too."""
    create(conn, "q", approve_above=above)
    ids = sql.send_count(conn, 400)
    claimed = claim(conn, 400)
    for position in reversed(claimed.positions):
        sql.fail(conn, claimed.lease, {"position": position, "verdict": "dead"})
    # the planner believes that nothing is dead
    conn.execute("update bartleby.dead_letter set status = 'discarded'")
    conn.execute("analyze bartleby.dead_letter")
    conn.execute("update bartleby.dead_letter set status = 'dead'")
    holder, other = connect(autocommit=False), connect()
    lock = "select message_id from bartleby.dead_letter where message_id = %s for update"
    holder.execute(lock, [ids[200]])
    with waiting(conn, other, lambda conn: len(replay(conn, *reversed(ids), ids[-1] + 1)), for_whom=holder) as second:
        assert [found for found in ids if not column(conn, f"{lock} skip locked", found)] == ids[:201]
        holder.commit()
        assert second.result() == 400
    assert sorted(claim(conn, 400).ids) == ids


@pytest.mark.seed("outbox-23", "outbox-24", "outbox-27", "outbox-28", "outbox-37", "outbox-55", "outbox-56")
@pytest.mark.seed("outbox-61", "outbox-64")
def test_dying_again_keeps_one_letter_with_the_earlier_cycle(conn: Connection, clock: Clock) -> None:
    (sent,) = plans.die(conn, error_type="First", error="one", fingerprint="f1")
    before = letter_of(conn, sent)
    clock.advance(60)
    replay(conn, sent)
    for _ in range(2):
        clock.advance(1)
        fail_all(conn, claim(conn, worker="late"), error_type="Second", error="2")
    after = letter_of(conn, sent)
    assert (after["status"], after["reason"], after["cycle"], after["attempts"]) == ("dead", "exhausted", 2, 2)
    assert (after["error_type"], after["worker"]) == ("Second", "late")
    assert (after["replayed_at"], after["replayed_by"], after["resolved_at"]) == (None, None, None)
    (entry,) = after["failure_history"]
    times = [datetime.fromisoformat(entry.pop(each)) for each in ("first_failed_at", "dead_at", "replayed_at")]
    assert times == sorted([before["first_failed_at"], before["dead_at"], times[2]])
    assert times[2] < after["first_failed_at"] < after["dead_at"]
    assert entry == {
        "error_type": "First", "error": "one", "fingerprint": "f1", "traceback": None, "worker_version": None,
        "cycle": 1, "reason": "terminal", "attempts": 1, "crashes": 0, "queue": "q", "worker": "w", "generation": None,
        "group_id": before["group_id"], "replayed_by": "ann", "replay_reason": "fixed", "edited": None,
        "replay_id": None,
    }  # fmt: skip
    ledger = sql.rows(conn, "select cycle, attempt from bartleby.attempts order by failed_at")
    assert [(found["cycle"], found["attempt"]) for found in ledger] == [(1, 1), (2, 1), (2, 2)]
    assert replay(conn, sent) == [sent]
    kill_all(conn, error="3")
    history = [(each["cycle"], each["error"]) for each in letter_of(conn, sent)["failure_history"]]
    assert history == [(1, "one"), (2, "2")]


@pytest.mark.seed("outbox-30", "outbox-31", "outbox-32")
def test_generation_is_replaced_only_when_given(conn: Connection) -> None:
    for again in (replay, replay_by_plan):
        for before, given, expected in ((None, 7, 7), (4, 7, 7), (4, None, 4), (4, 0, 0)):
            sent = plans.die_of(conn, 1, generation=before)
            assert again(conn, sent, generation=given) == [sent]
            claimed = claim(conn)
            assert claimed.one["generation"] == expected, (before, given)
            fail_all(conn, claimed, verdict="dead")
            found = letter_of(conn, sent)
            assert (found["generation"], found["failure_history"][0]["generation"]) == (expected, before)
