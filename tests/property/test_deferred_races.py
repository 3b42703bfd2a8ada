"""Races with delayed messages and with workers that sleep: a late commit is not missed."""

from datetime import timedelta
from typing import LiteralString

import pytest

from tests.kit.sql import Connection, claim, column, reap, release, value
from tests.property.sessions import CLOCK, Sessions, drain, execute, hole, leased, payloads, send

MOMENT = timedelta(seconds=2)
LATE: LiteralString = "select bartleby.send('q', '1', p_delay => '1 second')"
LATER: LiteralString = "select bartleby.send('q', '2', p_delay => '2 seconds')"


def late_release(s: Sessions) -> Connection:
    """Release a message in a transaction that stays open while one that was released later is delivered."""
    first, second = leased(s.main, 1, 2)
    slow = s.begin()
    release(slow, first)
    release(s.main, second)
    assert payloads(s.main) == [2]
    return slow


def test_release_that_commits_behind_the_mark_is_found(s: Sessions) -> None:
    late_release(s).commit()
    assert drain(s.main) == [1]


def test_delayed_send_that_commits_behind_the_mark_is_found(s: Sessions) -> None:
    slow = s.begin()
    slow.execute(LATE)
    s.main.execute(LATER)
    s.clock.advance(3)
    assert payloads(s.main) == [2]
    slow.execute("prepare transaction 'late'")
    assert payloads(s.main) == []
    s.main.execute("commit prepared 'late'")
    assert drain(s.main) == [1]


@pytest.mark.own_database
def test_reaper_slower_than_a_claim_hides_no_message(s: Sessions) -> None:
    send(s.main, 1, 2)
    claim(s.main)
    s.clock.advance(61)
    second = claim(s.main).lease
    with s.held(CLOCK, execute, "select bartleby.reap()"):
        release(s.main, second)
        assert payloads(s.main) == [2]
    assert drain(s.main) == [1]


@pytest.mark.own_database
def test_delayed_send_slower_than_a_claim_is_found(s: Sessions) -> None:
    s.main.execute(LATER)
    with s.held(CLOCK, execute, LATE):
        s.clock.advance(3)
        assert payloads(s.main) == [2]
    assert drain(s.main) == [1]


def test_open_sender_of_a_key_does_not_stop_the_reaper(s: Sessions) -> None:
    query: LiteralString = "select bartleby.send('q', '1', p_key => 'k', p_unique_for => '10 seconds')"
    s.main.execute(query)
    s.begin().execute(query)
    claim(s.main)
    s.clock.advance(61)
    assert column(s.hasty(), "select outcome from bartleby.reap()") == ["retry"]


def test_late_commit_of_many_is_found_whole(s: Sessions) -> None:
    send(s.main, *range(30))
    late, early = claim(s.main, 29).lease, claim(s.main).lease
    slow = s.begin()
    release(slow, late)
    release(s.main, early)
    assert payloads(s.main) == [29]
    slow.commit()
    assert sorted(drain(s.main)) == list(range(29))


@pytest.mark.parametrize("forward", [False, True])
def test_clock_set_back_hides_no_message_for_long(s: Sessions, forward: bool) -> None:
    first, second = leased(s.main, 1, 2)
    release(s.main, first)
    assert payloads(s.main) == [1]
    reap(s.main)
    s.clock.advance(-3600)
    release(s.main, second)
    if forward:
        s.clock.advance(3600 + 61)
        reap(s.main)
    assert drain(s.main) == [2]


def test_sender_without_notify_can_prepare_while_a_worker_sleeps(s: Sessions) -> None:
    s.main.execute("select bartleby.idle('q')")
    sender = s.begin()
    sender.execute("set local bartleby.notify = off")
    send(sender, 1)
    sender.execute("prepare transaction 'sleepy'")
    s.main.execute("commit prepared 'sleepy'")
    assert drain(s.main) == [1]


# Sleep


def granted_sleep(worker: Connection) -> timedelta:
    """Announce that a worker goes to sleep; return for how long it may."""
    allowed = value(worker, "select bartleby.idle('q', '30 seconds')")
    assert isinstance(allowed, timedelta)
    return allowed


def test_worker_beside_an_open_delayed_send_sleeps_briefly_or_is_woken(s: Sessions) -> None:
    worker, sender = s.open(), s.begin()
    worker.execute(f"listen {value(worker, 'select bartleby.channel(%s)', 'q')}".encode())
    sender.execute(LATE)
    briefly = granted_sleep(worker) <= MOMENT
    sender.commit()
    assert briefly or list(worker.notifies(timeout=60, stop_after=1))


def test_hole_or_release_committed_after_the_last_claim_shortens_the_sleep(s: Sessions) -> None:
    for late in (late_release, lambda s: hole(s, 1, parked=True)):
        slow = late(s)
        assert payloads(s.main) == []
        slow.commit()
        assert granted_sleep(s.main) < MOMENT
        assert drain(s.main) == [1]
