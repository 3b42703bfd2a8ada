"""Replay: the same message lives again, once, and its story goes on in the same dead letter."""

import pytest

from tests.kit.clock import Clock
from tests.kit.sql import (
    Connect,
    Connection,
    ack,
    claim,
    column,
    create,
    drain,
    fail,
    fail_all,
    reap,
    refused,
    release,
    row,
    rows,
    send,
    send_count,
    stats,
    value,
    waiting,
)


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, max_attempts=2, backoff="none")
    return conn


def replay(conn: Connection, *ids: int, actor: str | None = "ann", reason: str | None = "fixed") -> list[int]:
    return column(conn, "select bartleby.replay(%s, %s, %s)", list(ids), actor, reason)


def letter(conn: Connection) -> dict[str, object]:
    return row(conn, "select * from bartleby.dead_letters")


def die(conn: Connection, **failure: object) -> int:
    """Claim one message and let it die."""
    claimed = claim(conn)
    fail_all(conn, claimed, verdict="dead", **failure)
    return claimed.ids[0]


def test_the_same_message_comes_again_with_new_attempts(conn: Connection, clock: Clock) -> None:
    sent = send(conn, {"a": 1}, headers={"h": 1}, key="k", generation=4, max_attempts=2)
    first = claim(conn).one
    conn.execute("select bartleby.fail(%s, '[{\"position\": 1}]')", [first["lease_id"]])
    clock.advance(1)
    assert die(conn) == sent
    clock.advance(60)
    assert replay(conn, sent) == [sent]
    again = claim(conn).one
    same = ("message_id", "payload", "headers", "key", "generation", "created_at", "solo", "attempt")
    assert {name: again[name] for name in same} == {name: first[name] for name in same}
    assert row(conn, "select cycle, attempts, max_attempts from bartleby.messages") == {
        "cycle": 2,
        "attempts": 0,
        "max_attempts": 2,
    }


def test_the_letter_says_who_and_why(conn: Connection) -> None:
    send(conn, 1)
    replay(conn, die(conn), actor="ann", reason="deployed 1.2")
    found = letter(conn)
    assert (found["status"], found["replayed_by"], found["replay_reason"]) == ("replayed", "ann", "deployed 1.2")
    assert found["replayed_at"] is not None
    assert stats(conn)["dead"] == 0
    assert stats(conn)["ready"] == 1


def test_twice_is_once(conn: Connection) -> None:
    send(conn, 1)
    dead = die(conn)
    assert replay(conn, dead, dead, dead) == [dead]
    assert replay(conn, dead, actor="bob") == []
    assert letter(conn)["replayed_by"] == "ann"
    assert drain(conn) == [1]
    assert replay(conn, dead) == []
    assert claim(conn).messages == []


def test_two_at_once_are_one(connect: Connect, conn: Connection) -> None:
    send_count(conn, 2)
    ids = [die(conn), die(conn)]
    one, two = connect(autocommit=False), connect()
    assert replay(one, *ids) == ids
    with waiting(conn, two, lambda conn: replay(conn, *reversed(ids)), for_whom=one) as second:
        one.commit()
        assert second.result() == []
    assert sorted(drain(conn)) == [1, 2]


@pytest.mark.parametrize("four_eyes", [False, True])
def test_letters_are_locked_in_the_order_of_their_ids(connect: Connect, conn: Connection, four_eyes: bool) -> None:
    """However they are named, and few or many: everybody else goes in that order too."""
    if four_eyes:
        conn.execute("select bartleby.configure_queue('q', '{\"approve_above\": 400}')")
    ids = send_count(conn, 400)
    claimed = claim(conn, 400)
    for position in reversed(claimed.positions):
        fail(conn, claimed.lease, {"position": position, "verdict": "dead"})
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


def test_if_the_first_rolls_back_the_second_replays(connect: Connect, conn: Connection) -> None:
    send(conn, 1)
    dead = die(conn)
    one, two = connect(autocommit=False), connect()
    replay(one, dead)
    with waiting(conn, two, lambda conn: replay(conn, dead, actor="bob"), for_whom=one) as second:
        one.rollback()
        assert second.result() == [dead]
    assert letter(conn)["replayed_by"] == "bob"
    assert drain(conn) == [1]


def test_an_ack_resolves_the_letter(conn: Connection) -> None:
    send_count(conn, 3)
    ids = [die(conn), die(conn)]
    replay(conn, *ids)
    claimed = claim(conn, 10)
    replayed = claimed.messages[1]
    assert ack(conn, replayed["lease_id"], [replayed["position"]]) == 1
    statuses = rows(conn, "select message_id, status, resolved_at is not null as at from bartleby.dead_letters")
    assert {(found["message_id"], found["status"], found["at"]) for found in statuses} == {
        (replayed["message_id"], "resolved", True),
        (({*ids} - {replayed["message_id"]}).pop(), "replayed", False),
    }
    ack(conn, claimed.lease)
    assert set(column(conn, "select status from bartleby.dead_letters")) == {"resolved"}


def test_an_ack_in_a_later_attempt_resolves_it_too(conn: Connection, clock: Clock) -> None:
    send(conn, 1)
    replay(conn, die(conn))
    release(conn, claim(conn).lease)
    clock.advance(1)
    fail_all(conn, claim(conn))
    clock.advance(1)
    assert drain(conn) == [1]
    assert letter(conn)["status"] == "resolved"


def test_dying_again_keeps_one_letter_with_the_earlier_cycle(conn: Connection, clock: Clock) -> None:
    sent = send(conn, 1)
    die(conn, error_type="First", error="one", fingerprint="f1")
    before = letter(conn)
    clock.advance(60)
    replay(conn, sent)
    for _ in range(2):
        clock.advance(1)
        fail_all(conn, claim(conn, worker="late"), error_type="Second")
    after = letter(conn)
    assert (after["status"], after["reason"], after["cycle"], after["attempts"]) == ("dead", "exhausted", 2, 2)
    assert (after["error_type"], after["worker"]) == ("Second", "late")
    assert (after["replayed_at"], after["replayed_by"], after["resolved_at"]) == (None, None, None)
    history = after["failure_history"]
    assert isinstance(history, list)
    (entry,) = history
    assert (entry["cycle"], entry["reason"], entry["attempts"], entry["error_type"]) == (1, "terminal", 1, "First")
    assert (entry["replayed_by"], entry["replay_reason"], entry["fingerprint"]) == ("ann", "fixed", "f1")
    assert before["dead_at"] < after["dead_at"]  # type: ignore[operator]
    ledger = rows(conn, "select cycle, attempt from bartleby.attempts order by failed_at")
    assert [(found["cycle"], found["attempt"]) for found in ledger] == [(1, 1), (2, 1), (2, 2)]


def test_every_cycle_adds_one_entry(conn: Connection) -> None:
    sent = send(conn, 1)
    for cycle in range(1, 6):
        die(conn, error=str(cycle))
        found = letter(conn)
        assert found["cycle"] == cycle
        history = found["failure_history"]
        assert isinstance(history, list)
        assert [(entry["cycle"], entry["error"]) for entry in history] == [(n, str(n)) for n in range(1, cycle)]
        assert replay(conn, sent) == [sent]
    assert drain(conn) == [1]


def test_crashes_count_anew(conn: Connection, clock: Clock) -> None:
    create(conn, "q", crash_budget=1, max_attempts=5)
    sent = send(conn, 1)
    for cycle in (1, 2):
        for _ in range(2):
            claim(conn)
            clock.advance(61)
            reap(conn)
            clock.advance(1)
        found = letter(conn)
        assert (found["status"], found["reason"], found["crashes"], found["cycle"]) == ("dead", "crashed", 1, cycle)
        replay(conn, sent)


@pytest.mark.parametrize(("actor", "reason"), [(None, "r"), ("", "r"), (" ", "r"), ("a", None), ("a", ""), ("a", " ")])
def test_an_actor_and_a_reason_are_required(conn: Connection, actor: str | None, reason: str | None) -> None:
    send(conn, 1)
    dead = die(conn)
    with refused("ZB008", "actor"):
        replay(conn, dead, actor=actor, reason=reason)
    assert stats(conn)["dead"] == 1


def test_only_the_dead_are_replayed(conn: Connection) -> None:
    ids = send_count(conn, 3)
    dead = die(conn)
    claim(conn)
    assert replay(conn, *ids, 999, -1) == [dead]
    assert replay(conn) == []
    assert column(conn, "select bartleby.replay(null, 'a', 'b')") == []
    assert value(conn, "select count(*) from bartleby.messages") == 3


def test_it_belongs_to_the_callers_transaction(conn: Connection) -> None:
    send(conn, 1)
    dead = die(conn)
    with conn.transaction(force_rollback=True):
        assert replay(conn, dead) == [dead]
    assert stats(conn)["dead"] == 1
    assert claim(conn).messages == []


def test_messages_of_several_queues_go_home(conn: Connection) -> None:
    create(conn, "other")
    send(conn, "here")
    send(conn, "there", "other")
    there = claim(conn, queue="other")
    fail_all(conn, there, verdict="dead")
    replay(conn, die(conn), *there.ids)
    assert (drain(conn), drain(conn, "other")) == (["here"], ["there"])


def test_a_thousand_come_in_their_old_order(conn: Connection) -> None:
    ids = send_count(conn, 1000)
    fail_all(conn, claim(conn, 1000), verdict="dead")
    assert sorted(replay(conn, *ids)) == ids
    assert sorted(claim(conn, 1000).ids) == ids


def test_it_wakes_an_idle_worker(connect: Connect, conn: Connection) -> None:
    send(conn, 1)
    dead = die(conn)
    worker = connect()
    worker.execute(f'listen "{value(worker, "select bartleby.channel(%s)", "q")}"')
    worker.execute("select bartleby.idle('q')")
    replay(conn, dead)
    assert len(list(worker.notifies(timeout=10, stop_after=1))) == 1


class TestGeneration:
    def replay_with(self, conn: Connection, number: int, generation: int | None) -> list[int]:
        return column(conn, "select bartleby.replay(%s, 'ann', 'new code', %s)", [number], generation)

    @pytest.mark.parametrize("before", [None, 4])
    def test_it_is_set_when_given(self, conn: Connection, before: int | None) -> None:
        sent = send(conn, 1, generation=before)
        assert die(conn) == sent
        assert self.replay_with(conn, sent, 7) == [sent]
        assert claim(conn).one["generation"] == 7

    def test_else_it_is_kept(self, conn: Connection) -> None:
        sent = send(conn, 1, generation=4)
        die(conn)
        assert self.replay_with(conn, sent, None) == [sent]
        assert claim(conn).one["generation"] == 4

    def test_it_may_go_back_to_the_first(self, conn: Connection) -> None:
        sent = send(conn, 1, generation=4)
        die(conn)
        self.replay_with(conn, sent, 0)
        assert claim(conn).one["generation"] == 0

    def test_the_letter_remembers_each(self, conn: Connection) -> None:
        sent = send(conn, 1, generation=4)
        die(conn)
        self.replay_with(conn, sent, 5)
        assert letter(conn)["generation"] == 4
        die(conn)
        found = row(conn, "select generation, failure_history from bartleby.dead_letters")
        assert (found["generation"], found["failure_history"][0]["generation"]) == (5, 4)

    def test_a_negative_one_is_refused(self, conn: Connection) -> None:
        sent = send(conn, 1)
        die(conn)
        with refused("ZB008", "generation"):
            self.replay_with(conn, sent, -1)
        assert letter(conn)["status"] == "dead"
