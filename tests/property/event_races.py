"""Races around events and sinks: who emits while a sink goes, who reports first, and who waits for whom."""

from collections.abc import Callable

import psycopg

from tests.kit.events import NOT_TOLD
from tests.property.letter_races import bury, die, one, waits_or_is_over
from tests.property.sessions import Background, Connection, Sessions, claim, gated, open_gate, send, shut_gate

ADD = "select bartleby.put_sink('bus', 'log', '{}', 'me', 'x')"
REMOVE = "select bartleby.remove_sink('bus', 'me', 'x', true)"
DOWN = "select bartleby.report_sink('bus', 0, 1, 'down')"


def gate_wants(s: Sessions) -> Connection:
    """Hold gated sessions when they have read which sinks there are; return who opens the gate."""
    s.main.execute(
        "create or replace function bartleby.wants(p_sink bartleby.sink, p_type text, p_queue text) returns boolean"
        " language plpgsql as $$"
        " begin if current_setting('test.gate', true) = 'on' then perform pg_advisory_xact_lock(4711); end if;"
        " return true; end $$"
    )
    return shut_gate(s)


def told(s: Sessions, kind: str) -> int:
    return int(one(s.main, "select count(*) from bartleby.events where type = 'io.bartleby.' || %s", kind))


def a_sink_does_not_go_under_somebody_who_is_about_to_emit(s: Sessions) -> None:
    s.main.execute(ADD.encode())
    send(s.main, 1)
    rows = claim(s.main)
    keeper, emitter, operator = gate_wants(s), gated(s), s.open()
    with Background(lambda: bury(emitter, rows)) as burying:
        s.wait_until_it_waits(emitter)
        with Background(lambda: operator.execute(REMOVE.encode())) as removing:
            waits_or_is_over(s, operator, removing)
            open_gate(keeper)
            removing.join()
        try:
            burying.join()
        except psycopg.Error as error:
            raise AssertionError(f"the worker could not bury: {error}") from error
    assert one(s.main, "select count(*) from bartleby.dead_letters") == 1
    assert one(s.main, "select count(*) from bartleby.log where queue not in (select id from bartleby.queue)") == 0


def of_two_who_find_a_sink_down_one_tells(s: Sessions) -> None:
    s.main.execute(ADD.encode())
    first, second = s.begin(), s.open()
    report = "select bartleby.report_sink('bus', 0, 0, 'down')"
    assert one(first, report) == "degraded"
    with Background(lambda: one(second, report)) as reporting:
        s.wait_until_it_waits(second)
        first.execute("commit")
        assert reporting.join() is None
    assert told(s, "sink.degraded") == 1


def a_report_and_a_change_of_a_sink_do_not_wait_for_each_other_in_a_ring(s: Sessions) -> None:
    s.main.execute(ADD.encode())
    ids = die(s, 1)
    operator, relay = s.begin(), s.open()
    operator.execute("select bartleby.discard(%s, 'me', 'x')", [ids])
    with Background(lambda: one(relay, DOWN)) as reporting:
        s.wait_until_it_waits(relay)
        try:
            operator.execute(ADD.encode())
            operator.execute("commit")
            assert reporting.join() == "degraded"
        except psycopg.errors.DeadlockDetected as error:
            raise AssertionError("a ring") from error
    assert told(s, "sink.degraded") == 1


def of_two_who_add_up_one_raises_the_alarm(s: Sessions) -> None:
    """The second has counted its own letters before it waits, and knows the alarm only afterwards."""
    die(s, *range(10), fingerprint="a")
    first, second = s.begin(), s.open()
    one(first, "select bartleby.tally()")
    die(s, 1, fingerprint="a")
    with Background(lambda: one(second, "select bartleby.tally()")) as counting:
        s.wait_until_it_waits(second)
        first.execute("commit")
        counting.join()
    assert told(s, "group.escalated") == 1


def of_two_who_change_a_letter_each_is_told_in_its_turn(s: Sessions) -> None:
    ids = die(s, 1)
    first, second = s.begin(), s.open()
    first.execute("select bartleby.discard(%s, 'one', 'x')", [ids])
    with Background(lambda: second.execute("select bartleby.restore(%s, 'two', 'x')", [ids])) as restoring:
        s.wait_until_it_waits(second)
        first.execute("commit")
        restoring.join()
    assert told(s, "dead_letter.restored") == told(s, "dead_letter.discarded") == 1
    assert s.main.execute(NOT_TOLD.encode()).fetchall() == []


EVENT_RACES: list[Callable[[Sessions], None]] = [
    a_sink_does_not_go_under_somebody_who_is_about_to_emit,
    of_two_who_find_a_sink_down_one_tells,
    a_report_and_a_change_of_a_sink_do_not_wait_for_each_other_in_a_ring,
    of_two_who_add_up_one_raises_the_alarm,
    of_two_who_change_a_letter_each_is_told_in_its_turn,
]
