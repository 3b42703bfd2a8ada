"""Races around sending, claiming and settling, in real sessions that first show that they wait.

Each fails if its safeguard is missing: tests/nightly/mutation removes the safeguards and expects these tests to fail.
"""

import pytest
from psycopg.types.json import Jsonb

from tests.property.sessions import (
    Background,
    Sessions,
    claim,
    drain,
    gate_big,
    gate_ranges,
    gated,
    open_gate,
    payloads,
    send,
    sqlstate,
)  # fmt: skip

# Holes


def test_hole_is_delivered_when_its_sender_commits(s: Sessions) -> None:
    slow = s.begin()
    send(slow, 1)
    send(s.main, 2)
    assert payloads(s.main) == [2]
    slow.commit()
    assert drain(s.main) == [1]


def test_hole_survives_many_claims_while_its_sender_is_open(s: Sessions) -> None:
    slow = s.begin()
    send(slow, 1)
    for number in range(2, 8):
        send(s.main, number)
        assert payloads(s.main) == [number]
    slow.commit()
    assert drain(s.main) == [1]


def test_owner_above_the_snapshots_xmax_is_waited_for(s: Sessions) -> None:
    claimer, slow = s.begin(), s.begin()
    claimer.execute("select pg_current_xact_id()")
    send(slow, 1)
    send(claimer, 2)
    assert payloads(claimer) == [2]
    claimer.commit()
    assert payloads(s.main) == []
    assert payloads(s.main) == []
    slow.commit()
    assert drain(s.main) == [1]


def test_probe_cut_by_its_limit_buries_no_hole(s: Sessions) -> None:
    slow = s.begin()
    send(slow, 1, 2, 3, 4, 5)
    send(s.main, 6)
    assert payloads(s.main) == [6]
    assert payloads(s.main) == []
    slow.commit()
    assert payloads(s.main, 2) == [1, 2]
    assert payloads(s.main, 2) == [3, 4]
    assert drain(s.main) == [5]


@pytest.mark.own_database
def test_commit_between_probe_and_burial_is_not_missed(s: Sessions) -> None:
    slow = s.begin()
    send(slow, 1)
    send(s.main, 2)
    assert payloads(s.main) == [2]
    assert payloads(s.main) == []
    keeper, reader = gate_ranges(s), gated(s)
    with Background(lambda: payloads(reader)) as claiming:
        s.wait_until_blocked(reader)
        slow.commit()
        open_gate(keeper)
        got = claiming.join()
    assert got + drain(s.main) == [1]


@pytest.mark.own_database
def test_sender_has_its_xid_before_its_position(s: Sessions) -> None:
    # Sequences write ahead 32 values, and take an xid when they do: let them have done so.
    send(s.main, 0, 0, 0)
    drain(s.main)
    keeper, sender = gate_big(s), gated(s)
    with Background(lambda: send(sender, 1)) as sending:
        s.wait_until_blocked(sender)
        send(s.main, 2)
        assert payloads(s.main) == [2]
        assert payloads(s.main) == []
        assert payloads(s.main) == []
        open_gate(keeper)
        sending.join()
    assert drain(s.main) == [1]


def test_rollback_at_the_tail_is_passed_and_the_next_message_is_not(s: Sessions) -> None:
    rolled_back, slow = s.begin(), s.begin()
    send(rolled_back, 1)
    send(slow, 2)
    rolled_back.rollback()
    for _ in range(4):
        s.clock.advance(2)
        assert payloads(s.main) == []
    assert s.main.execute("select ready from bartleby.queues").fetchall() == [(0,)]
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
    s.main.execute("select bartleby.reap()")
    assert s.main.execute("select (bartleby.reader(id)).upper from bartleby.queue").fetchall() == [(120,)]
    assert s.main.execute("select ready from bartleby.queues").fetchall() == [(20,)]
    slow.rollback()
    assert drain(s.main) == list(range(3, 23))


@pytest.mark.own_database
def test_bulk_sender_has_its_xid_before_its_positions(s: Sessions) -> None:
    send(s.main, 0, 0, 0)
    drain(s.main)
    keeper, sender = gate_big(s), gated(s)
    query = """select bartleby.send_many('q', '[{"payload": 1, "key": "k"}]')"""
    with Background(lambda: sender.execute(query)) as sending:
        s.wait_until_blocked(sender)
        send(s.main, 2)
        assert payloads(s.main) == [2]
        assert payloads(s.main) == []
        assert payloads(s.main) == []
        open_gate(keeper)
        sending.join()
    assert drain(s.main) == [1]


def test_parked_holes_are_delivered_when_their_sender_commits(s: Sessions) -> None:
    slow = s.begin()
    send(slow, 1, 2)
    send(s.main, 3)
    assert payloads(s.main) == [3]
    assert payloads(s.main) == []
    s.clock.advance(5)
    assert payloads(s.main) == []
    assert s.main.execute("select from bartleby.hole").rowcount == 1, "the holes were not parked"
    send(s.main, 4)
    assert payloads(s.main) == [4]
    slow.commit()
    assert drain(s.main) == [1, 2]


def test_many_parked_holes_are_all_delivered(s: Sessions) -> None:
    senders = []
    for number in range(25):
        senders.append(s.begin())
        send(senders[-1], number)
        send(s.main, 100 + number)
        assert payloads(s.main) == [100 + number]
        assert payloads(s.main) == []
        s.clock.advance(5)
        assert payloads(s.main) == []
    assert s.main.execute("select from bartleby.hole").rowcount == 25, "the holes were not parked one by one"
    for sender in senders:
        sender.commit()
    assert sorted(drain(s.main)) == list(range(25))


def test_probe_cut_by_bytes_buries_no_hole(s: Sessions) -> None:
    slow = s.begin()
    send(slow, 1, 2, 3)
    # as if they were of 20 MB each
    slow.execute("update bartleby.log set big = 20000000")
    send(s.main, 4)
    assert payloads(s.main) == [4]
    assert payloads(s.main) == []
    slow.commit()
    assert [payloads(s.main) for _ in range(4)] == [[1], [2], [3], []]


def test_owners_from_another_cluster_count_as_ended(s: Sessions) -> None:
    rolled_back, put_aside = s.begin(), s.begin()
    send(put_aside, 1)
    send(s.main, 2)
    assert payloads(s.main) == [2]
    assert payloads(s.main) == []
    s.clock.advance(5)
    assert payloads(s.main) == []
    send(rolled_back, 3)
    send(s.main, 4)
    assert payloads(s.main) == [4]
    assert payloads(s.main) == []
    rolled_back.rollback()
    put_aside.commit()
    # as a restored dump has it: transactions that this cluster has never seen
    s.main.execute("update bartleby.hole set owners = '{[4000000000,4000000001)}'")
    s.main.execute("update bartleby.lease set owners = '{[4000000000,4000000001)}' where owners is not null")
    s.main.execute("update bartleby.lease set parked = '{[4000000000,4000000001)}' where parked is not null")
    assert drain(s.main) == [1]
    assert s.main.execute("select from bartleby.hole").rowcount == 0
    state = "select holes is null, young is null, parked is null from bartleby.lease order by id desc limit 1"
    assert s.main.execute(state).fetchall() == [(True, True, True)]


def test_prepared_sender_holds_back_only_its_own_message(s: Sessions) -> None:
    slow = s.begin()
    send(slow, 1)
    slow.execute("prepare transaction 'slow'")
    for number in (2, 3, 4):
        send(s.main, number)
        assert payloads(s.main) == [number]
        s.clock.advance(2)
    s.main.execute("commit prepared 'slow'")
    assert drain(s.main) == [1]


# Leases


def test_settlement_of_a_lost_lease_is_refused(s: Sessions) -> None:
    send(s.main, 1)
    ((old, position, *_),) = claim(s.main)
    s.clock.advance(61)
    s.main.execute("select bartleby.reap()")
    ((new, *_),) = claim(s.main)
    for verb in ("ack(%s, %s)", "release(%s, %s)"):
        query = f"select bartleby.{verb}".encode()
        assert sqlstate(lambda query=query: s.main.execute(query, [old, [position]])) == "ZB006"  # type: ignore[misc]
    failure = Jsonb([{"position": position}])
    assert sqlstate(lambda: s.main.execute("select bartleby.fail(%s, %s)", [old, failure])) == "ZB006"
    assert s.main.execute("select state from bartleby.messages").fetchall() == [("leased",)]
    assert s.main.execute("select bartleby.ack(%s)", [new]).fetchone() == (1,)


def test_second_of_two_settlements_is_refused(s: Sessions) -> None:
    send(s.main, 1)
    ((lease, position, *_),) = claim(s.main)
    first, second = s.begin(), s.open()
    first.execute("select bartleby.ack(%s, %s)", [lease, [position]])
    query = "select bartleby.release(%s, %s)"
    assert (
        s.blocked(second, lambda: sqlstate(lambda: second.execute(query, [lease, [position]])), first.commit) == "ZB006"
    )
    assert s.main.execute("select from bartleby.messages").rowcount == 0


def test_claim_reads_the_state_under_its_lock(s: Sessions) -> None:
    send(s.main, 1, 2)
    first, second = s.begin(), s.open()
    assert [row[2] for row in claim(first, 1)] == [1]
    assert [row[2] for row in s.blocked(second, lambda: claim(second, 1), first.commit)] == [2]


def test_claim_under_repeatable_read_is_refused(s: Sessions) -> None:
    other = s.begin("isolation level repeatable read")
    assert sqlstate(lambda: claim(other)) == "ZB007"


def test_lapsed_batch_is_not_charged_and_returns_one_by_one(s: Sessions) -> None:
    send(s.main, 1, 2, 3)
    assert len(claim(s.main)) == 3
    s.clock.advance(61)
    assert s.main.execute("select outcome, messages from bartleby.reap()").fetchall() == [("released", 3)]
    leases = [[row[2:] for row in claim(s.main)] for _ in range(4)]
    assert leases == [[(1, 1, True)], [(2, 1, True)], [(3, 1, True)], []]


def test_suspect_that_lapses_alone_is_charged(s: Sessions) -> None:
    s.main.execute("select bartleby.configure_queue('q', '{\"crash_budget\": 2}')")
    send(s.main, 1)
    attempts = []
    for _ in range(3):
        ((_, _, _, attempt, _),) = claim(s.main)
        attempts.append(attempt)
        s.clock.advance(61)
        s.main.execute("select bartleby.reap()")
    assert attempts == [1, 1, 2]
    assert s.main.execute("select reason, attempts from bartleby.dead_letters").fetchall() == [("crashed", 2)]


def test_server_crash_charges_no_message(s: Sessions) -> None:
    send(s.main, 1)
    assert len(claim(s.main)) == 1
    s.clock.advance(61)
    s.main.execute("select bartleby.reap()")
    for _ in range(2):
        ((lease, _, _, attempt, solo),) = claim(s.main)
        assert (attempt, solo) == (1, True)
        s.main.execute("update bartleby.lease set granted_at = '2000-01-01' where id = %s", [lease])
        s.clock.advance(61)
        assert s.main.execute("select outcome from bartleby.reap()").fetchall() == [("released",)]
    assert s.main.execute("select from bartleby.attempts where outcome <> 'lost'").rowcount == 0


# Dead letters


def test_second_of_two_replays_finds_nothing(s: Sessions) -> None:
    send(s.main, 1)
    ((lease, position, *_),) = claim(s.main)
    s.main.execute("select bartleby.reject(%s, %s, 'unacceptable')", [lease, position])
    ((dead,),) = s.main.execute("select message_id from bartleby.dead_letters").fetchall()
    first, second = s.begin(), s.open()
    query = "select bartleby.replay(%s, 'me', 'fixed')"
    assert first.execute(query, [[dead]]).fetchall() == [(dead,)]
    assert s.blocked(second, lambda: second.execute(query, [[dead]]).fetchall(), first.commit) == []
    assert drain(s.main) == [1]


def test_second_of_two_sends_of_a_key_returns_the_first(s: Sessions) -> None:
    first, second = s.begin(), s.open()
    query = "select bartleby.send('q', '1', p_key => 'k', p_unique_for => '10 seconds')"
    ((sent,),) = first.execute(query).fetchall()
    assert s.blocked(second, lambda: second.execute(query).fetchall(), first.commit) == [(sent,)]
    assert drain(s.main) == [1]
