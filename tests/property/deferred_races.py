"""Races with what waits for a time: whoever defers a message may commit after the reader has passed its place."""

from collections.abc import Callable

from tests.property.sessions import (
    Background,
    Sessions,
    claim,
    drain,
    gate_clock,
    gated,
    open_gate,
    payloads,
    send,
)


def a_release_that_commits_behind_the_mark_is_found(s: Sessions) -> None:
    send(s.main, 1, 2)
    ((first, *_),) = claim(s.main, 1)
    ((second, *_),) = claim(s.main, 1)
    slow = s.begin()
    slow.execute("select bartleby.release(%s)", [first])
    s.main.execute("select bartleby.release(%s)", [second])
    assert payloads(s.main) == [2]
    slow.commit()
    assert drain(s.main) == [1]


def a_delayed_send_that_commits_behind_the_mark_is_found(s: Sessions) -> None:
    slow = s.begin()
    slow.execute("select bartleby.send('q', '1', p_delay => '1 second')")
    s.main.execute("select bartleby.send('q', '2', p_delay => '2 seconds')")
    s.clock.advance(3)
    assert payloads(s.main) == [2]
    slow.execute("prepare transaction 'late'")
    assert payloads(s.main) == []
    s.main.execute("commit prepared 'late'")
    assert drain(s.main) == [1]


def a_reaper_slower_than_a_claim_hides_nothing(s: Sessions) -> None:
    send(s.main, 1, 2)
    claim(s.main, 1)
    s.clock.advance(61)
    ((second, *_),) = claim(s.main, 1)
    keeper, reaper = gate_clock(s), gated(s)
    with Background(lambda: reaper.execute("select bartleby.reap()")) as reaping:
        s.wait_until_it_waits(reaper)
        s.main.execute("select bartleby.release(%s)", [second])
        assert payloads(s.main) == [2]
        open_gate(keeper)
        reaping.join()
    assert drain(s.main) == [1]


def a_delayed_send_slower_than_a_claim_is_found(s: Sessions) -> None:
    s.main.execute("select bartleby.send('q', '2', p_delay => '2 seconds')")
    keeper, sender = gate_clock(s), gated(s)
    with Background(lambda: sender.execute("select bartleby.send('q', '1', p_delay => '1 second')")) as sending:
        s.wait_until_it_waits(sender)
        s.clock.advance(3)
        assert payloads(s.main) == [2]
        open_gate(keeper)
        sending.join()
    assert drain(s.main) == [1]


def an_open_sender_of_a_key_does_not_stop_the_reaper(s: Sessions) -> None:
    query = "select bartleby.send('q', '1', p_key => 'k', p_unique_for => '10 seconds')"
    s.main.execute(query)
    slow = s.begin()
    slow.execute(query)
    assert len(claim(s.main)) == 1
    s.clock.advance(61)
    s.main.execute("set lock_timeout = '1s'")
    assert s.main.execute("select outcome from bartleby.reap()").fetchall() == [("released",)]


def a_late_commit_of_many_is_found_whole(s: Sessions) -> None:
    send(s.main, *range(30))
    ((late, *_), *_) = claim(s.main, 29)
    ((early, *_),) = claim(s.main, 1)
    slow = s.begin()
    slow.execute("select bartleby.release(%s)", [late])
    s.main.execute("select bartleby.release(%s)", [early])
    assert payloads(s.main) == [29]
    slow.commit()
    assert sorted(drain(s.main)) == list(range(29))


def a_clock_set_back_hides_nothing(s: Sessions) -> None:
    send(s.main, 1, 2)
    ((first, *_),) = claim(s.main, 1)
    ((second, *_),) = claim(s.main, 1)
    s.main.execute("select bartleby.release(%s)", [first])
    assert payloads(s.main) == [1]
    s.clock.advance(-3600)
    s.main.execute("select bartleby.release(%s)", [second])
    assert drain(s.main) == [2]


def a_clock_set_back_and_forward_hides_nothing_for_long(s: Sessions) -> None:
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


def a_sender_that_does_not_notify_can_prepare_while_a_worker_sleeps(s: Sessions) -> None:
    s.main.execute("select bartleby.idle('q')")
    sender = s.begin()
    sender.execute("set local bartleby.notify = off")
    send(sender, 1)
    sender.execute("prepare transaction 'sleepy'")
    s.main.execute("commit prepared 'sleepy'")
    assert drain(s.main) == [1]


DEFERRED_RACES: list[Callable[[Sessions], None]] = [
    a_release_that_commits_behind_the_mark_is_found,
    a_delayed_send_that_commits_behind_the_mark_is_found,
    a_reaper_slower_than_a_claim_hides_nothing,
    a_delayed_send_slower_than_a_claim_is_found,
    an_open_sender_of_a_key_does_not_stop_the_reaper,
    a_late_commit_of_many_is_found_whole,
    a_clock_set_back_hides_nothing,
    a_clock_set_back_and_forward_hides_nothing_for_long,
    a_sender_that_does_not_notify_can_prepare_while_a_worker_sleeps,
]
