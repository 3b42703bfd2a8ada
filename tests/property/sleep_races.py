"""Races with sleep: a worker that goes to sleep is woken, or sleeps no longer than what is under way may need."""

from collections.abc import Callable
from datetime import timedelta

from tests.property.sessions import Connection, Sessions, claim, payloads, send

MOMENT = timedelta(seconds=2)


def listen(s: Sessions) -> Connection:
    """A session that listens as a sleeping worker does."""
    worker = s.open()
    ((number,),) = worker.execute("select id from bartleby.queue where name = 'q'").fetchall()
    worker.execute(f"listen bartleby_{number}".encode())
    return worker


def sleep(worker: Connection) -> timedelta:
    """Say that the worker goes to sleep; return for how long it may."""
    ((allowed,),) = worker.execute("select bartleby.idle('q', '30 seconds')").fetchall()
    assert isinstance(allowed, timedelta)
    return allowed


def is_woken(worker: Connection, within: float = 8) -> bool:
    # Notifications come with the commit of the sender, so what is to come is on its way.
    return bool(list(worker.notifies(timeout=within, stop_after=1)))


def a_sleeping_worker_is_woken_by_a_send(s: Sessions) -> None:
    worker = listen(s)
    assert sleep(worker) > MOMENT
    send(s.main, 1)
    assert is_woken(worker)


def a_busy_queue_notifies_nobody(s: Sessions) -> None:
    worker = listen(s)
    send(s.main, 1)
    assert not is_woken(worker, within=0.3)


def a_worker_that_falls_asleep_again_is_woken_until_it_wakes(s: Sessions) -> None:
    worker = listen(s)
    sleep(worker)
    s.clock.advance(10)
    allowed = sleep(worker)
    s.clock.advance(allowed.total_seconds() - 1)
    send(s.main, 1)
    assert is_woken(worker)


def a_worker_beside_an_open_sender_sleeps_for_a_moment(s: Sessions) -> None:
    worker, sender = listen(s), s.begin()
    send(sender, 1)
    assert sleep(worker) < MOMENT


def a_worker_beside_an_open_delayed_send_sleeps_for_a_moment(s: Sessions) -> None:
    worker, sender = listen(s), s.begin()
    sender.execute("select bartleby.send('q', '1', p_delay => '1 second')")
    if sleep(worker) > MOMENT:
        sender.commit()
        assert is_woken(worker), "nobody tells it what has been deferred meanwhile"


def a_sleeping_worker_is_woken_by_what_is_deferred(s: Sessions) -> None:
    worker = listen(s)
    send(s.main, 1)
    ((lease,),) = s.main.execute("select lease_id from bartleby.claim('q', 'w')").fetchall()
    assert sleep(worker) > MOMENT
    s.main.execute("select bartleby.release(%s)", [lease])
    assert is_woken(worker)


def a_hole_put_aside_that_is_filled_after_the_last_claim_is_not_slept_over(s: Sessions) -> None:
    worker, slow = listen(s), s.begin()
    send(slow, 1)
    send(s.main, 2)
    assert payloads(s.main) == [2]
    assert payloads(s.main) == []
    s.clock.advance(5)
    assert payloads(s.main) == []
    assert s.main.execute("select from bartleby.hole").rowcount == 1, "it was not put aside"
    slow.commit()
    assert sleep(worker) < MOMENT


def a_late_release_that_commits_after_the_last_claim_is_not_slept_over(s: Sessions) -> None:
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


SLEEP_RACES: list[Callable[[Sessions], None]] = [
    a_sleeping_worker_is_woken_by_a_send,
    a_busy_queue_notifies_nobody,
    a_worker_that_falls_asleep_again_is_woken_until_it_wakes,
    a_worker_beside_an_open_sender_sleeps_for_a_moment,
    a_worker_beside_an_open_delayed_send_sleeps_for_a_moment,
    a_sleeping_worker_is_woken_by_what_is_deferred,
    a_hole_put_aside_that_is_filled_after_the_last_claim_is_not_slept_over,
    a_late_release_that_commits_after_the_last_claim_is_not_slept_over,
]
