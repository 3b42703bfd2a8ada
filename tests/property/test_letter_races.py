"""Races around dead letters, groups, plans, events, sinks and pauses."""

from typing import Any

import psycopg
import pytest
from psycopg import errors
from psycopg.types.json import Jsonb

from tests.kit.events import NOT_TOLD
from tests.property.sessions import (
    Background,
    Connection,
    Sessions,
    at_once,
    claim,
    gate,
    gated,
    one,
    open_gate,
    send,
    without_waiting,
)  # fmt: skip

WANTS = "wants(p_sink bartleby.sink, p_type text, p_queue text)"
ADD = "select bartleby.put_sink('bus', 'log', '{}', 'me', 'x')"
REMOVE = "select bartleby.remove_sink('bus', 'me', 'x', true)"
DOWN = "select bartleby.report_sink('bus', 0, 1, 'down')"
PAUSE = "select bartleby.pause_queue('q', p_until => bartleby.clock() + interval '1 minute')"


def die(s: Sessions, *payloads: int, **failure: str) -> list[int]:
    """Send these payloads and let them die; return their ids."""
    send(s.main, *payloads)
    bury(s.main, claim(s.main), **failure)
    found = s.main.execute("select message_id from bartleby.dead_letters order by 1").fetchall()
    return [number for (number,) in found][-len(payloads) :]


def bury(conn: Connection, rows: list[Any], **failure: str) -> None:
    failures = [{"position": row[1], "verdict": "dead", **failure} for row in rows]
    conn.execute("select bartleby.fail(%s, %s)", [rows[0][0], Jsonb(failures)])


def started(s: Sessions, ids: list[int], **options: object) -> int:
    plan = one(
        s.main, "select bartleby.plan_replay(null, 'me', 'x', p_ids => %s, p_options => %s)", ids, Jsonb(options)
    )
    s.main.execute("select bartleby.start_replay(%s, 'me', 'x')", [plan])
    return int(plan)


def groups(s: Sessions) -> list[int]:
    return [number for (number,) in s.main.execute("select id from bartleby.failure_group order by id")]


def test_letter_buried_by_outdated_rules_is_moved(s: Sessions) -> None:
    die(s, 1, fingerprint="a")
    die(s, 2, fingerprint="b")
    a, b = groups(s)
    send(s.main, 3)
    rows = claim(s.main)
    worker = s.begin()
    bury(worker, rows, fingerprint="b")
    s.main.execute("select bartleby.merge_groups(%s, %s, 'me', 'x')", [[b], a])
    for _ in range(5):
        s.main.execute("select bartleby.regroup()")
    worker.execute("commit")
    for _ in range(5):
        s.main.execute("select bartleby.regroup()")
    assert one(s.main, "select dead from bartleby.groups where id = %s", a) == 3


def test_workers_and_operators_lock_letters_in_one_order(s: Sessions) -> None:
    ids = die(s, 1, 2)
    s.main.execute("select bartleby.replay(%s, 'me', 'x')", [ids])
    rows = claim(s.main)
    blocker, worker, operator = s.begin(), s.open(), s.open()
    blocker.execute("select from bartleby.dead_letter where message_id = %s for update", ids[:1])
    with Background(lambda: operator.execute("select bartleby.hold(%s, 'me', 'x')", [ids])) as holding:
        s.wait_until_blocked(operator)
        with Background(lambda: bury(worker, rows[::-1])) as burying:
            s.wait_until_blocked(worker)
            blocker.execute("rollback")
            try:
                holding.join()
                burying.join()
            except errors.DeadlockDetected:
                raise AssertionError("deadlock") from None


def test_queue_is_not_dropped_during_a_replay_step_into_it(s: Sessions) -> None:
    s.main.execute("select bartleby.create_queue('other')")
    ids = die(s, 1)
    plan = started(s, ids, to="other")
    holder, stepping, dropping = s.begin(), s.open(), s.open()
    holder.execute("select from bartleby.replay_item where replay_id = %s for update", [plan])
    with Background(lambda: stepping.execute("select bartleby.advance_replays()")) as step:
        s.wait_until_blocked(stepping)
        with Background(lambda: dropping.execute("select bartleby.drop_queue('other')")) as drop:
            s.wait_until_blocked_or_done(dropping, drop)
            holder.execute("rollback")
            step.join()
    alive = one(s.main, "select count(*) from bartleby.messages")
    assert (one(s.main, "select status from bartleby.dead_letter") == "replayed") == (alive == 1), "it is lost"


def test_replay_step_does_not_wait_for_a_locked_letter(s: Sessions) -> None:
    ids = die(s, 1, 2, 3)
    started(s, ids)
    operator, stepping = s.begin(), s.open()
    operator.execute("select bartleby.discard(%s, 'ben', 'x')", [ids[1:2]])
    ((moved,),) = at_once(stepping, "select moved from bartleby.advance_replays()")
    assert moved == 2
    operator.execute("commit")
    at_once(stepping, "select bartleby.advance_replays()")
    assert one(s.main, "select count(*) from bartleby.messages") == 2


def test_letter_is_moved_by_one_of_two_concurrent_steps(s: Sessions) -> None:
    ids = die(s, 1, 2)
    started(s, ids)
    first, second = s.begin(), s.open()
    assert first.execute("select moved from bartleby.advance_replays(1)").fetchall() == [(1,)]
    assert at_once(second, "select moved from bartleby.advance_replays(1)") == []
    first.execute("commit")
    s.main.execute("select bartleby.advance_replays()")
    assert one(s.main, "select count(*) from bartleby.messages") == 2


def test_regression_is_reported_once(s: Sessions) -> None:
    die(s, 1, fingerprint="a", worker_version="1")
    s.main.execute("select bartleby.resolve_group(%s, 'me', 'x', '2')", groups(s))
    send(s.main, 2)
    rows = claim(s.main)
    send(s.main, 3)
    others = claim(s.main)
    first = s.begin()
    bury(first, rows, fingerprint="a", worker_version="2")
    with without_waiting(s.main):
        bury(s.main, others, fingerprint="a", worker_version="2")
    first.execute("commit")
    s.main.execute("select bartleby.tally()")
    assert one(s.main, "select count(*) from bartleby.events where type = 'io.bartleby.group.regressed'") == 1


def test_death_while_a_group_is_being_resolved_is_a_regression(s: Sessions) -> None:
    """The version was never seen and has no order; if it counted as old, the regression would never be reported."""
    die(s, 1, fingerprint="a", worker_version="c0ffee")
    send(s.main, 2)
    rows = claim(s.main)
    operator = s.begin()
    operator.execute("select bartleby.resolve_group(%s, 'me', 'x', 'decade')", groups(s))
    with without_waiting(s.main):
        bury(s.main, rows, fingerprint="a", worker_version="facade")
    operator.execute("commit")
    s.main.execute("select bartleby.tally()")
    assert one(s.main, "select state from bartleby.groups") == "regressed"


def test_death_before_a_group_was_resolved_is_not_a_regression(s: Sessions) -> None:
    """Its group learns of the death late, because an operator held the group."""
    die(s, 1, fingerprint="a", worker_version="1")
    send(s.main, 2)
    rows = claim(s.main)
    operator = s.begin()
    operator.execute("select bartleby.acknowledge_group(%s, 'me', 'x')", groups(s))
    with without_waiting(s.main):
        bury(s.main, rows, fingerprint="a", worker_version="3")
    operator.execute("commit")
    s.clock.advance(1)
    s.main.execute("select bartleby.resolve_group(%s, 'me', 'x', '2')", groups(s))
    s.main.execute("select bartleby.tally()")
    state = "select g.state, f.seen_versions from bartleby.groups g join bartleby.failure_group f using (id)"
    assert s.main.execute(state).fetchall() == [("resolved", ["1", "3"])]


def test_retention_does_not_wait_for_a_locked_letter(s: Sessions) -> None:
    s.main.execute("select bartleby.create_queue('q', '{\"payload_retention\": \"1 day\"}')")
    ids = die(s, 1, 2)
    s.clock.advance(2 * 86400)
    operator, janitor = s.begin(), s.open()
    operator.execute("select bartleby.hold(%s, 'me', 'x')", [ids[:1]])
    at_once(janitor, "select bartleby.prune()")
    operator.execute("commit")
    assert s.main.execute("select payload from bartleby.dead_letters order by message_id").fetchall() == [(1,), (None,)]


def test_count_under_way_does_not_outlive_its_group(s: Sessions) -> None:
    s.main.execute("select bartleby.create_queue('q', '{\"retention\": 0}')")
    die(s, 1, 2, fingerprint="a")
    s.clock.advance(10)
    s.main.execute("delete from bartleby.dead_letter")
    tallying = s.begin()
    assert one(tallying, "select bartleby.tally(1)") == 1
    s.main.execute("select bartleby.prune()")
    tallying.execute("commit")
    while one(s.main, "select bartleby.tally()"):
        pass
    assert one(s.main, "select coalesce(sum(abs(letters)), 0)::int from bartleby.letter_counts") == 0


# Events and sinks


def emitted(s: Sessions, kind: str) -> int:
    return int(one(s.main, "select count(*) from bartleby.events where type = 'io.bartleby.' || %s", kind))


@pytest.mark.own_database
def test_removing_a_sink_does_not_break_a_burial_that_emits_to_it(s: Sessions) -> None:
    s.main.execute(ADD.encode())
    send(s.main, 1)
    rows = claim(s.main)
    keeper, emitter, operator = (
        gate(s, WANTS, "boolean", "true"),
        gated(s),
        s.open(),
    )
    with Background(lambda: bury(emitter, rows)) as burying:
        s.wait_until_blocked(emitter)
        with Background(lambda: operator.execute(REMOVE.encode())) as removing:
            s.wait_until_blocked_or_done(operator, removing)
            open_gate(keeper)
            removing.join()
        try:
            burying.join()
        except psycopg.Error as error:
            raise AssertionError(f"the worker could not bury: {error}") from error
    assert one(s.main, "select count(*) from bartleby.dead_letters") == 1
    assert one(s.main, "select count(*) from bartleby.log where queue not in (select id from bartleby.queue)") == 0


def test_second_of_two_reports_that_a_sink_is_down_is_ignored(s: Sessions) -> None:
    s.main.execute(ADD.encode())
    first, second = s.begin(), s.open()
    report = "select bartleby.report_sink('bus', 0, 0, 'down')"
    assert one(first, report) == "degraded"
    assert s.blocked(second, lambda: one(second, report), first.commit) is None
    assert emitted(s, "sink.degraded") == 1


def test_report_and_change_of_a_sink_do_not_deadlock(s: Sessions) -> None:
    s.main.execute(ADD.encode())
    ids = die(s, 1)
    operator, relay = s.begin(), s.open()
    operator.execute("select bartleby.discard(%s, 'me', 'x')", [ids])
    with Background(lambda: one(relay, DOWN)) as reporting:
        s.wait_until_blocked(relay)
        try:
            operator.execute(ADD.encode())
            operator.execute("commit")
            assert reporting.join() == "degraded"
        except psycopg.errors.DeadlockDetected as error:
            raise AssertionError("deadlock") from error
    assert emitted(s, "sink.degraded") == 1


def test_two_concurrent_tallies_raise_one_alarm(s: Sessions) -> None:
    """The second has counted its letters before it waits, and sees the alarm of the first only afterwards."""
    die(s, *range(10), fingerprint="a")
    first, second = s.begin(), s.open()
    one(first, "select bartleby.tally()")
    die(s, 1, fingerprint="a")
    s.blocked(second, lambda: one(second, "select bartleby.tally()"), first.commit)
    assert emitted(s, "group.escalated") == 1


def test_concurrent_changes_of_a_letter_have_numbers_of_their_own(s: Sessions) -> None:
    ids = die(s, 1)
    first, second = s.begin(), s.open()
    first.execute("select bartleby.discard(%s, 'one', 'x')", [ids])
    s.blocked(second, lambda: second.execute("select bartleby.restore(%s, 'two', 'x')", [ids]), first.commit)
    assert emitted(s, "dead_letter.restored") == emitted(s, "dead_letter.discarded") == 1
    assert s.main.execute(NOT_TOLD.encode()).fetchall() == []


# Pauses


def test_end_of_a_pause_and_an_operators_action_do_not_deadlock(s: Sessions) -> None:
    s.main.execute("select bartleby.create_queue('other')")
    s.main.execute(PAUSE)
    s.clock.advance(61)
    operator, janitor = s.begin(), s.open()
    operator.execute("select bartleby.pause_queue('other')")
    with Background(lambda: janitor.execute("select bartleby.reap()")) as reaping:
        s.wait_until_blocked_or_done(janitor, reaping)
        try:
            operator.execute(PAUSE)
            operator.execute("commit")
            reaping.join()
        except psycopg.errors.DeadlockDetected as error:
            raise AssertionError("deadlock") from error
    assert one(s.main, "select paused_until > bartleby.clock() from bartleby.queue where name = 'q'")
