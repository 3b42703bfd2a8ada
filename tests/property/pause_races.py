"""Races around pauses that end by themselves."""

from collections.abc import Callable

import psycopg

from tests.property.letter_races import one, waits_or_is_over
from tests.property.sessions import Background, Sessions

PAUSE = "select bartleby.pause_queue('q', p_until => bartleby.clock() + interval '1 minute')"


def the_end_of_a_pause_and_a_deed_do_not_wait_for_each_other_in_a_ring(s: Sessions) -> None:
    s.main.execute("select bartleby.create_queue('other')")
    s.main.execute(PAUSE)
    s.clock.advance(61)
    operator, janitor = s.begin(), s.open()
    operator.execute("select bartleby.pause_queue('other')")
    with Background(lambda: janitor.execute("select bartleby.reap()")) as reaping:
        waits_or_is_over(s, janitor, reaping)
        try:
            operator.execute(PAUSE)
            operator.execute("commit")
            reaping.join()
        except psycopg.errors.DeadlockDetected as error:
            raise AssertionError("a ring") from error
    assert one(s.main, "select paused_until > bartleby.clock() from bartleby.queue where name = 'q'")


PAUSE_RACES: list[Callable[[Sessions], None]] = [the_end_of_a_pause_and_a_deed_do_not_wait_for_each_other_in_a_ring]
