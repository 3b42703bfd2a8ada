"""Races with delayed messages and with workers that sleep: a late commit is not missed."""

from datetime import timedelta
from typing import LiteralString

import pytest

from tests.kit.sql import Connection, claim, column, release, value
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
    assert column(s.hasty(), "select outcome from bartleby.reap()") == ["released"]


def test_late_commit_of_many_is_found_whole(s: Sessions) -> None:
    send(s.main, *range(30))
    late, early = claim(s.main, 29).lease, claim(s.main).lease
    slow = s.begin()
    release(slow, late)
    release(s.main, early)
    assert payloads(s.main) == [29]
    slow.commit()
    assert sorted(drain(s.main)) == list(range(29))


def test_clock_set_back_hides_no_message(s: Sessions) -> None:
    first, second = leased(s.main, 1, 2)
    release(s.main, first)
    assert payloads(s.main) == [1]
    s.clock.advance(-3600)
    release(s.main, second)
    assert drain(s.main) == [2]


def test_clock_set_back_and_forward_hides_no_message_for_long(s: Sessions) -> None:
    first, second = leased(s.main, 1, 2)
    release(s.main, first)
    assert payloads(s.main) == [1]
    s.main.execute("select bartleby.reap()")
    s.clock.advance(-3600)
    release(s.main, second)
    s.clock.advance(3600 + 61)
    s.main.execute("select bartleby.reap()")
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


def listen(s: Sessions) -> Connection:
    """Open a session that listens as a sleeping worker does."""
    worker = s.open()
    number = value(worker, "select id from bartleby.queue where name = 'q'")
    worker.execute(f"listen bartleby_{number}".encode())
    return worker


def sleep(worker: Connection) -> timedelta:
    """Announce that a worker goes to sleep; return for how long it may."""
    allowed = value(worker, "select bartleby.idle('q', '30 seconds')")
    assert isinstance(allowed, timedelta)
    return allowed


def is_woken(worker: Connection, within: float = 8) -> bool:
    # Notifications arrive with the commit of the sender.
    return bool(list(worker.notifies(timeout=within, stop_after=1)))


def test_sleeping_worker_is_woken_by_a_send_or_a_release(s: Sessions) -> None:
    worker = listen(s)
    send(s.main, 1)
    assert not is_woken(worker, within=0.3), "it does not sleep"
    lease = claim(s.main).lease
    assert sleep(worker) > MOMENT
    release(s.main, lease)
    assert is_woken(worker)
    assert drain(s.main) == [1]
    assert sleep(worker) > MOMENT
    send(s.main, 2)
    assert is_woken(worker)


def test_second_sleep_extends_the_time_in_which_sends_notify(s: Sessions) -> None:
    worker = listen(s)
    sleep(worker)
    s.clock.advance(10)
    s.clock.advance(sleep(worker).total_seconds() - 1)
    send(s.main, 1)
    assert is_woken(worker)


def test_worker_beside_an_open_sender_sleeps_briefly(s: Sessions) -> None:
    worker, sender = listen(s), s.begin()
    send(sender, 1)
    assert sleep(worker) < MOMENT


def test_worker_beside_an_open_delayed_send_sleeps_briefly_or_is_woken(s: Sessions) -> None:
    worker, sender = listen(s), s.begin()
    sender.execute(LATE)
    if sleep(worker) > MOMENT:
        sender.commit()
        assert is_woken(worker)


def test_hole_or_release_committed_after_the_last_claim_shortens_the_sleep(s: Sessions) -> None:
    worker = listen(s)
    for late in (late_release, lambda s: hole(s, 1, parked=True)):
        slow = late(s)
        assert payloads(s.main) == []
        slow.commit()
        assert sleep(worker) < MOMENT
        assert drain(s.main) == [1]
