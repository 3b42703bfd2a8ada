"""Replay: the same message lives again, once, and its history continues in the same dead letter."""

from collections.abc import Callable
from functools import partial

import pytest

from tests.kit import plans, sql
from tests.kit.clock import Clock
from tests.kit.refusals import check_refusals
from tests.kit.sql import Connect, Connection, Row, claim, column, create, fail_all, row, send, waiting


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, max_attempts=2, backoff="none")
    return conn


def replay(
    conn: Connection, *ids: int, actor: str | None = "ann", reason: str | None = "fixed", generation: int | None = None
) -> list[int]:
    return column(conn, "select bartleby.replay(%s, %s, %s, %s)", list(ids), actor, reason, generation)


def replay_by_plan(conn: Connection, *ids: int, generation: int | None = None) -> list[int]:
    plans.started(conn, list(ids), **({} if generation is None else {"generation": generation}))
    plans.steps(conn)
    return list(ids)


def letter(conn: Connection) -> Row:
    return row(conn, "select * from bartleby.dead_letters")


def die(conn: Connection, **failure: object) -> int:
    """Claim one message and let it die."""
    claimed = claim(conn)
    fail_all(conn, claimed, verdict="dead", **failure)
    return claimed.ids[0]


@pytest.mark.seed("outbox-25", "outbox-29", "outbox-33", "outbox-35", "outbox-52", "outbox-58", "pulse-44")
@pytest.mark.parametrize("again", [replay, replay_by_plan], ids=["by_hand", "by_plan"])
def test_same_message_comes_again_with_new_attempts(
    conn: Connection, connect: Connect, clock: Clock, again: Callable[..., list[int]]
) -> None:
    sent = send(conn, {"a": 1}, headers={"h": 1}, key="k", generation=4, max_attempts=2)
    first = claim(conn).one
    conn.execute("select bartleby.fail(%s, '[{\"position\": 1}]')", [first["lease_id"]])
    clock.advance(1)
    assert die(conn) == sent
    clock.advance(60)
    worker = connect()
    worker.execute(f'listen "{sql.value(worker, "select bartleby.channel(%s)", "q")}"')
    worker.execute("select bartleby.idle('q')")
    assert again(conn, sent) == [sent]
    assert list(worker.notifies(timeout=30, stop_after=1)), "an idle worker is woken"
    found = letter(conn)
    assert (found["status"], found["replayed_by"], found["replay_reason"]) == ("replayed", "ann", "fixed")
    assert found["replayed_at"] is not None
    assert (sql.stats(conn)["dead"], sql.stats(conn)["ready"]) == (0, 1)
    claimed = claim(conn).one
    same = ("message_id", "payload", "headers", "key", "generation", "created_at", "solo", "attempt")
    assert {name: claimed[name] for name in same} == {name: first[name] for name in same}
    state = row(conn, "select cycle, attempts, max_attempts from bartleby.messages")
    assert state == {"cycle": 2, "attempts": 0, "max_attempts": 2}


@pytest.mark.seed("outbox-6", "outbox-34")
def test_replay_happens_once_and_only_for_dead_letters(conn: Connection) -> None:
    create(conn, "other")
    ids = [*sql.send_count(conn, 3), send(conn, "there", "other")]
    dead, elsewhere = die(conn), claim(conn, queue="other")
    fail_all(conn, elsewhere, verdict="dead")
    claim(conn)
    assert replay(conn) == column(conn, "select bartleby.replay(null, 'a', 'b')") == []
    assert replay(conn, *ids, dead, 999, -1) == [dead, *elsewhere.ids]
    assert replay(conn, dead, actor="bob") == []
    assert set(column(conn, "select replayed_by from bartleby.dead_letters")) == {"ann"}
    assert (sorted(sql.drain(conn)), sql.drain(conn, "other")) == ([1, 3], ["there"]), "where they died"
    assert (replay(conn, dead), claim(conn).messages) == ([], [])


@pytest.mark.parametrize("four_eyes", [False, True])
def test_letters_are_locked_in_the_order_of_their_ids(connect: Connect, conn: Connection, four_eyes: bool) -> None:
    """In whatever order they are named, few or many: every other caller locks in that order too."""
    if four_eyes:
        conn.execute("select bartleby.configure_queue('q', '{\"approve_above\": 400}')")
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


def test_ack_resolves_the_letter_of_its_message_only(conn: Connection, clock: Clock) -> None:
    sql.send_count(conn, 3)
    ids = [die(conn), die(conn)]
    replay(conn, *ids)
    claimed = claim(conn, 10)
    acked = claimed.messages[1]
    assert sql.ack(conn, acked["lease_id"], [acked["position"]]) == 1
    found = sql.rows(conn, "select message_id, status, resolved_at is not null as at from bartleby.dead_letters")
    assert {(each["message_id"], each["status"], each["at"]) for each in found} == {
        (acked["message_id"], "resolved", True),
        (({*ids} - {acked["message_id"]}).pop(), "replayed", False),
    }
    sql.release(conn, claimed.lease)
    clock.advance(1)
    fail_all(conn, claim(conn, 10))
    clock.advance(1)
    sql.drain(conn)
    assert set(column(conn, "select status from bartleby.dead_letters")) == {"resolved"}


@pytest.mark.seed("outbox-23", "outbox-24", "outbox-28", "outbox-55", "outbox-56", "outbox-61")
def test_dying_again_keeps_one_letter_with_the_earlier_cycle(conn: Connection, clock: Clock) -> None:
    sent = send(conn, 1)
    die(conn, error_type="First", error="one", fingerprint="f1")
    before = letter(conn)
    clock.advance(60)
    replay(conn, sent)
    for _ in range(2):
        clock.advance(1)
        fail_all(conn, claim(conn, worker="late"), error_type="Second", error="2")
    after = letter(conn)
    assert (after["status"], after["reason"], after["cycle"], after["attempts"]) == ("dead", "exhausted", 2, 2)
    assert (after["error_type"], after["worker"]) == ("Second", "late")
    assert (after["replayed_at"], after["replayed_by"], after["resolved_at"]) == (None, None, None)
    (entry,) = after["failure_history"]
    assert (entry["cycle"], entry["reason"], entry["attempts"], entry["error_type"]) == (1, "terminal", 1, "First")
    assert (entry["replayed_by"], entry["replay_reason"], entry["fingerprint"]) == ("ann", "fixed", "f1")
    assert before["dead_at"] < after["dead_at"]
    ledger = sql.rows(conn, "select cycle, attempt from bartleby.attempts order by failed_at")
    assert [(found["cycle"], found["attempt"]) for found in ledger] == [(1, 1), (2, 1), (2, 2)]
    errors = ["one", "2"]
    for cycle in range(3, 6):
        assert replay(conn, sent) == [sent]
        die(conn, error=str(cycle))
        history = [(each["cycle"], each["error"]) for each in letter(conn)["failure_history"]]
        assert history == list(enumerate(errors, 1))
        errors.append(str(cycle))


def test_crashes_count_anew_in_each_cycle(conn: Connection, clock: Clock) -> None:
    create(conn, "q", crash_budget=1, max_attempts=5)
    sent = send(conn, 1)
    for cycle in (1, 2):
        for _ in range(2):
            claim(conn)
            clock.advance(61)
            sql.reap(conn)
            clock.advance(1)
        found = letter(conn)
        assert (found["status"], found["reason"], found["crashes"], found["cycle"]) == ("dead", "crashed", 1, cycle)
        replay(conn, sent)


@pytest.mark.seed("outbox-32")
@pytest.mark.seed("outbox-30", "outbox-31")
def test_generation_is_replaced_only_when_given(conn: Connection) -> None:
    for again in (replay, replay_by_plan):
        for before, given, expected in ((None, 7, 7), (4, 7, 7), (4, None, 4), (4, 0, 0)):
            sent = send(conn, 1, generation=before)
            die(conn)
            assert again(conn, sent, generation=given) == [sent]
            claimed = claim(conn)
            assert claimed.one["generation"] == expected, (before, given)
            fail_all(conn, claimed, verdict="dead")
            found = plans.letter_of(conn, sent)
            assert (found["generation"], found["failure_history"][0]["generation"]) == (expected, before)


@pytest.mark.seed("outbox-36")
def test_refused_replays(conn: Connection) -> None:
    send(conn, 1)
    dead = die(conn)
    missing = ((None, "r"), ("", "r"), (" ", "r"), ("a", None), ("a", ""), ("a", " "))
    check_refusals(
        [
            *(
                (f"{actor!r} {reason!r}", partial(replay, conn, dead, actor=actor, reason=reason), "ZB008", "actor")
                for actor, reason in missing
            ),
            ("negative", partial(replay, conn, dead, generation=-1), "ZB008", "generation"),
        ]
    )
    assert sql.stats(conn)["dead"] == 1
