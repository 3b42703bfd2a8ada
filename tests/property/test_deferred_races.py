"""Races with delayed messages and with workers that sleep: a late commit is not missed."""

from datetime import timedelta

import pytest

from tests.property.sessions import (
    Background,
    Connection,
    Sessions,
    claim,
    drain,
    gate_clock,
    gated,
    open_gate,
    payloads,
    send,
)  # fmt: skip

MOMENT = timedelta(seconds=2)


def test_release_that_commits_behind_the_mark_is_found(s: Sessions) -> None:
    send(s.main, 1, 2)
    ((first, *_),) = claim(s.main, 1)
    ((second, *_),) = claim(s.main, 1)
    slow = s.begin()
    slow.execute("select bartleby.release(%s)", [first])
    s.main.execute("select bartleby.release(%s)", [second])
    assert payloads(s.main) == [2]
    slow.commit()
    assert drain(s.main) == [1]


def test_delayed_send_that_commits_behind_the_mark_is_found(s: Sessions) -> None:
    slow = s.begin()
    slow.execute("select bartleby.send('q', '1', p_delay => '1 second')")
    s.main.execute("select bartleby.send('q', '2', p_delay => '2 seconds')")
    s.clock.advance(3)
    assert payloads(s.main) == [2]
    slow.execute("prepare transaction 'late'")
    assert payloads(s.main) == []
    s.main.execute("commit prepared 'late'")
    assert drain(s.main) == [1]


@pytest.mark.own_database
def test_reaper_slower_than_a_claim_hides_no_message(s: Sessions) -> None:
    send(s.main, 1, 2)
    claim(s.main, 1)
    s.clock.advance(61)
    ((second, *_),) = claim(s.main, 1)
    keeper, reaper = gate_clock(s), gated(s)
    with Background(lambda: reaper.execute("select bartleby.reap()")) as reaping:
        s.wait_until_blocked(reaper)
        s.main.execute("select bartleby.release(%s)", [second])
        assert payloads(s.main) == [2]
        open_gate(keeper)
        reaping.join()
    assert drain(s.main) == [1]


@pytest.mark.own_database
def test_delayed_send_slower_than_a_claim_is_found(s: Sessions) -> None:
    s.main.execute("select bartleby.send('q', '2', p_delay => '2 seconds')")
    keeper, sender = gate_clock(s), gated(s)
    with Background(lambda: sender.execute("select bartleby.send('q', '1', p_delay => '1 second')")) as sending:
        s.wait_until_blocked(sender)
        s.clock.advance(3)
        assert payloads(s.main) == [2]
        open_gate(keeper)
        sending.join()
    assert drain(s.main) == [1]


def test_open_sender_of_a_key_does_not_stop_the_reaper(s: Sessions) -> None:
    query = "select bartleby.send('q', '1', p_key => 'k', p_unique_for => '10 seconds')"
    s.main.execute(query)
    slow = s.begin()
    slow.execute(query)
    assert len(claim(s.main)) == 1
    s.clock.advance(61)
    s.main.execute("set lock_timeout = '1s'")
    assert s.main.execute("select outcome from bartleby.reap()").fetchall() == [("released",)]


def test_late_commit_of_many_is_found_whole(s: Sessions) -> None:
    send(s.main, *range(30))
    ((late, *_), *_) = claim(s.main, 29)
    ((early, *_),) = claim(s.main, 1)
    slow = s.begin()
    slow.execute("select bartleby.release(%s)", [late])
    s.main.execute("select bartleby.release(%s)", [early])
    assert payloads(s.main) == [29]
    slow.commit()
    assert sorted(drain(s.main)) == list(range(29))


def test_clock_set_back_hides_no_message(s: Sessions) -> None:
    send(s.main, 1, 2)
    ((first, *_),) = claim(s.main, 1)
    ((second, *_),) = claim(s.main, 1)
    s.main.execute("select bartleby.release(%s)", [first])
    assert payloads(s.main) == [1]
    s.clock.advance(-3600)
    s.main.execute("select bartleby.release(%s)", [second])
    assert drain(s.main) == [2]


def test_clock_set_back_and_forward_hides_no_message_for_long(s: Sessions) -> None:
    send(s.main, 1, 2)
    ((first, *_),) = claim(s.main, 1)
    ((second, *_),) = claim(s.main, 1)
    s.main.execute("select bartleby.release(%s)", [first])
    assert payloads(s.main) == [1]
    s.main.execute("select bartleby.reap()")
    s.clock.advance(-3600)
    s.main.execute("select bartleby.release(%s)", [second])
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
    ((number,),) = worker.execute("select id from bartleby.queue where name = 'q'").fetchall()
    worker.execute(f"listen bartleby_{number}".encode())
    return worker


def sleep(worker: Connection) -> timedelta:
    """Announce that a worker goes to sleep; return for how long it may."""
    ((allowed,),) = worker.execute("select bartleby.idle('q', '30 seconds')").fetchall()
    assert isinstance(allowed, timedelta)
    return allowed


def is_woken(worker: Connection, within: float = 8) -> bool:
    # Notifications arrive with the commit of the sender.
    return bool(list(worker.notifies(timeout=within, stop_after=1)))


def test_sleeping_worker_is_woken_by_a_send(s: Sessions) -> None:
    worker = listen(s)
    assert sleep(worker) > MOMENT
    send(s.main, 1)
    assert is_woken(worker)


def test_send_without_sleeping_worker_does_not_notify(s: Sessions) -> None:
    worker = listen(s)
    send(s.main, 1)
    assert not is_woken(worker, within=0.3)


def test_second_sleep_extends_the_time_in_which_sends_notify(s: Sessions) -> None:
    worker = listen(s)
    sleep(worker)
    s.clock.advance(10)
    allowed = sleep(worker)
    s.clock.advance(allowed.total_seconds() - 1)
    send(s.main, 1)
    assert is_woken(worker)


def test_worker_beside_an_open_sender_sleeps_briefly(s: Sessions) -> None:
    worker, sender = listen(s), s.begin()
    send(sender, 1)
    assert sleep(worker) < MOMENT


def test_worker_beside_an_open_delayed_send_sleeps_briefly_or_is_woken(s: Sessions) -> None:
    worker, sender = listen(s), s.begin()
    sender.execute("select bartleby.send('q', '1', p_delay => '1 second')")
    if sleep(worker) > MOMENT:
        sender.commit()
        assert is_woken(worker), "it is not notified of the deferred message"


def test_sleeping_worker_is_woken_by_a_release(s: Sessions) -> None:
    worker = listen(s)
    send(s.main, 1)
    ((lease,),) = s.main.execute("select lease_id from bartleby.claim('q', 'w')").fetchall()
    assert sleep(worker) > MOMENT
    s.main.execute("select bartleby.release(%s)", [lease])
    assert is_woken(worker)


def test_parked_hole_filled_after_the_last_claim_shortens_the_sleep(s: Sessions) -> None:
    worker, slow = listen(s), s.begin()
    send(slow, 1)
    send(s.main, 2)
    assert payloads(s.main) == [2]
    assert payloads(s.main) == []
    s.clock.advance(5)
    assert payloads(s.main) == []
    assert s.main.execute("select from bartleby.hole").rowcount == 1, "the hole was not parked"
    slow.commit()
    assert sleep(worker) < MOMENT


def test_late_release_committed_after_the_last_claim_shortens_the_sleep(s: Sessions) -> None:
    worker = listen(s)
    send(s.main, 1, 2)
    ((first, *_),) = claim(s.main, 1)
    ((second, *_),) = claim(s.main, 1)
    slow = s.begin()
    slow.execute("select bartleby.release(%s)", [first])
    s.main.execute("select bartleby.release(%s)", [second])
    assert payloads(s.main) == [2]
    assert payloads(s.main) == []
    slow.commit()
    assert sleep(worker) < MOMENT
