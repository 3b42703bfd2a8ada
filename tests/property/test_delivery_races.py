"""Races around sending, claiming and settling, in real sessions that first show that they wait.

Each fails if its safeguard is missing: tests/nightly/mutation removes the safeguards and expects these tests to fail.
"""

from collections.abc import Callable
from typing import LiteralString

import pytest

from tests.kit.plans import change, die
from tests.kit.sql import Connection, claim, reap, value
from tests.property.sessions import BIG, CLOCK, RANGES, Sessions, drain, execute, hole, payloads, send

# Holes


def test_hole_is_delivered_when_its_sender_commits(s: Sessions) -> None:
    for prepared in (False, True):
        slow = hole(s, 1)
        if prepared:
            slow.execute("prepare transaction 'slow'")
        for number in range(2, 8):
            send(s.main, number)
            assert payloads(s.main) == [number]
            s.clock.advance(2 * prepared)
        if prepared:
            s.main.execute("commit prepared 'slow'")
        slow.commit()
        assert drain(s.main) == [1]


def test_owner_above_the_snapshots_xmax_is_waited_for(s: Sessions) -> None:
    claimer, slow = s.begin(), s.begin()
    claimer.execute("select pg_current_xact_id()")
    send(slow, 1)
    send(claimer, 2)
    assert payloads(claimer) == [2]
    claimer.commit()
    assert [payloads(s.main), payloads(s.main)] == [[], []]
    slow.commit()
    assert drain(s.main) == [1]


def test_probe_cut_by_its_limit_buries_no_hole(s: Sessions) -> None:
    hole(s, 1, 2, 3, 4, 5).commit()
    assert [payloads(s.main, 2), payloads(s.main, 2)] == [[1, 2], [3, 4]]
    assert drain(s.main) == [5]


def test_probe_cut_by_bytes_buries_no_hole(s: Sessions) -> None:
    slow = hole(s, 1, 2, 3)
    # as if they were of 20 MB each
    slow.execute("update bartleby.log set big = 20000000")
    slow.commit()
    assert [payloads(s.main) for _ in range(4)] == [[1], [2], [3], []]


@pytest.mark.own_database
def test_commit_between_probe_and_burial_is_not_missed(s: Sessions) -> None:
    slow = hole(s, 1)
    with s.held(RANGES, payloads) as claiming:
        slow.commit()
    assert claiming.result() + drain(s.main) == [1]


def send_many(conn: Connection, payload: int) -> None:
    conn.execute("select bartleby.send_many('q', %s)", [f'[{{"payload": {payload}, "key": "k"}}]'])


@pytest.mark.own_database
@pytest.mark.parametrize("sender", [send, send_many])
def test_sender_has_its_xid_before_its_position(s: Sessions, sender: Callable[[Connection, int], None]) -> None:
    # Sequences write ahead 32 values, and take an xid when they do: let them have done so.
    send(s.main, 0, 0, 0)
    drain(s.main)
    with s.held(BIG, sender, 1):
        send(s.main, 2)
        assert [payloads(s.main) for _ in range(3)] == [[2], [], []]
    assert drain(s.main) == [1]


def test_rollback_at_the_tail_is_passed_and_the_next_message_is_not(s: Sessions) -> None:
    rolled_back, slow = s.begin(), s.begin()
    send(rolled_back, 1)
    send(slow, 2)
    rolled_back.rollback()
    for _ in range(4):
        s.clock.advance(2)
        assert payloads(s.main) == []
    assert value(s.main, "select ready from bartleby.queues") == 0
    send(s.main, 3)
    assert payloads(s.main) == [3]
    slow.commit()
    assert drain(s.main) == [2]


def test_reaper_passes_no_message(s: Sessions) -> None:
    slow = s.begin()
    for _ in range(60):
        send(slow, 1)
        send(s.main, 2)
    assert payloads(s.main, 1000) == [2] * 60
    send(s.main, *range(3, 23))
    s.clock.advance(5)
    reap(s.main)
    assert value(s.main, "select (bartleby.reader(id)).upper from bartleby.queue") == 120
    assert value(s.main, "select ready from bartleby.queues") == 20
    slow.rollback()
    assert drain(s.main) == list(range(3, 23))


def test_parked_holes_are_delivered_when_their_sender_commits(s: Sessions) -> None:
    slow = hole(s, 1, 2, parked=True)
    send(s.main, 4)
    assert payloads(s.main) == [4]
    slow.commit()
    assert drain(s.main) == [1, 2]


def test_many_parked_holes_are_all_delivered(s: Sessions) -> None:
    for sender in [hole(s, number, parked=True) for number in range(25)]:
        sender.commit()
    assert sorted(drain(s.main)) == list(range(25))


def test_owners_from_another_cluster_count_as_ended(s: Sessions) -> None:
    put_aside, rolled_back = hole(s, 1, parked=True), hole(s, 3)
    rolled_back.rollback()
    put_aside.commit()
    # as a restored dump has it: transactions that this cluster has never seen
    s.main.execute("update bartleby.hole set owners = '{[4000000000,4000000001)}'")
    for name in ("owners", "parked"):
        s.main.execute(f"update bartleby.lease set {name} = '{{[4000000000,4000000001)}}' where {name} is not null")
    assert drain(s.main) == [1]
    assert value(s.main, "select count(*) from bartleby.hole") == 0
    state: LiteralString = "select num_nonnulls(holes, young, parked) from bartleby.lease order by id desc limit 1"
    assert value(s.main, state) == 0


# Leases


def test_claim_reads_the_state_under_its_lock(s: Sessions) -> None:
    send(s.main, 1, 2)
    first, second = s.begin(), s.open()
    assert claim(first).payloads == [1]
    assert s.blocked(second, first.commit, claim).payloads == [2]


def test_server_crash_charges_only_what_had_to_run_alone(s: Sessions) -> None:
    """So a statement that crashes PostgreSQL ends after a free start and as many as its crash budget."""
    send(s.main, 1)
    for number, outcome in enumerate(("released", "retry", "retry", "dead")):
        work = claim(s.main).one
        assert (work["attempt"], work["solo"]) == (max(1, number), number > 0)
        s.main.execute("update bartleby.lease set granted_at = '2000-01-01' where id = %s", [work["lease_id"]])
        s.clock.advance(61)
        assert [each["outcome"] for each in reap(s.main)] == [outcome]
        s.clock.advance(400)
    ledger = "select error_type, outcome, rule from bartleby.attempts order by failed_at"
    assert s.main.execute(ledger).fetchall() == [
        ("WorkerLost", "lost", "the server was restarted"),
        *[("ServerLost", "crashed", f"crash {number} of 3") for number in (1, 2, 3)],
    ]


# Once


def test_second_of_two_replays_finds_nothing(s: Sessions) -> None:
    """Unless the first one rolls back."""
    ids = die(s.main, 2)
    for end, found in (("rollback", 2), ("commit", 0)):
        first, second = s.begin(), s.begin()
        assert len(change(first, "replay", *ids)) == 2
        assert len(s.blocked(second, getattr(first, end), change, "replay", *reversed(ids))) == found
        second.rollback()
    assert sorted(drain(s.main)) == [1, 2]


def test_second_of_two_sends_of_a_key_returns_the_first(s: Sessions) -> None:
    first, second = s.begin(), s.open()
    query: LiteralString = "select bartleby.send('q', '1', p_key => 'k', p_unique_for => '1 hour')"
    sent = execute(first, query)
    assert s.blocked(second, first.commit, execute, query) == sent
    assert drain(s.main) == [1]


@pytest.mark.own_database
@pytest.mark.parametrize("before", ["free", "lapsed", "held"])
def test_slow_session_does_not_take_a_duty_from_a_new_holder(s: Sessions, before: str) -> None:
    """The time that the slow session read is older than the duty: that is not a clock set back."""
    take: LiteralString = "select bartleby.take_duty('upkeep', %s, '1 hour')"
    if before != "free":
        value(s.main, take, "a")
    s.clock.advance(7200 if before == "lapsed" else 0)
    with s.held(CLOCK, value, take, "b") as slow:
        assert value(s.main, take, "a")
    assert (slow.result(), value(s.main, "select bartleby.on_duty('upkeep')")) == (False, "a")
