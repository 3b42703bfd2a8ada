"""Races around dead letters, groups, plans, events, sinks and pauses."""

from contextlib import ExitStack
from typing import LiteralString

import pytest

from tests.kit.events import NOT_RECORDED, put_sink
from tests.kit.plans import adds_up, change, die, events, kill, started, states, status_by_id, step, steps, work_all
from tests.kit.sql import Claim, Connection, claim, column, create, fail, rows, send, value
from tests.property.sessions import WANTS, Sessions, execute

PUT: LiteralString = "select bartleby.put_sink('bus', 'log', '{}', 'me', 'x')"
REMOVE: LiteralString = "select bartleby.remove_sink('bus', 'me', 'x', true)"
PAUSE: LiteralString = "select bartleby.pause_queue('q', p_until => bartleby.clock() + interval '1 minute')"
TALLY: LiteralString = "select bartleby.tally()"
MERGE: LiteralString = "select bartleby.merge_groups(%s, %s, 'me', 'x')"


def groups(s: Sessions) -> list[int]:
    return column(s.main, "select id from bartleby.failure_group order by id")


def leased(s: Sessions) -> Claim:
    send(s.main, 1)
    return claim(s.main)


def come_to_rest(s: Sessions) -> None:
    for _ in range(5):
        s.main.execute("select bartleby.regroup()")


def test_letter_buried_by_outdated_rules_is_moved(s: Sessions) -> None:
    """The worker's transaction may be older than the rule, or younger but begun before its commit."""
    for number, rule in enumerate(("merged during the death", "merged before the death", "removed")):
        here, there = f"a{number}", f"b{number}"
        die(s.main, fingerprint=here)
        die(s.main, fingerprint=there)
        a, b = groups(s)[-2:]
        claimed = leased(s)
        worker, operator = s.begin(), s.begin()
        if rule == "removed":
            s.main.execute(MERGE, [[b], a])
            come_to_rest(s)
        if rule == "merged before the death":
            operator.execute(MERGE, [[b], a])
        kill(worker, claimed, fingerprint=there)
        if rule == "merged during the death":
            operator.execute(MERGE, [[b], a])
        if rule == "removed":
            removing: LiteralString = "select bartleby.remove_rule(id, 'me', 'x') from bartleby.group_rules"
            operator.execute(f"{removing} where from_group = %s", [b])
        operator.commit()
        come_to_rest(s)
        worker.commit()
        come_to_rest(s)
        dead = column(s.main, "select dead from bartleby.groups where id = any(%s) order by id", [a, b])
        assert dead == ([1, 2] if rule == "removed" else [3, 0]), rule
        adds_up(s.main)


def test_workers_and_operators_lock_letters_in_one_order(s: Sessions) -> None:
    """A worker whose messages live again buries them in the order of their ids, however it names them."""
    ids = die(s.main, 2)
    change(s.main, "replay", *ids)
    claimed = claim(s.main, 2)
    failures = [{"position": position, "verdict": "dead"} for position in reversed(claimed.positions)]
    blocker, worker, operator = s.begin(), s.open(), s.open()
    blocker.execute("select from bartleby.dead_letter where message_id = %s for update", ids[:1])
    with (
        s.waiting(operator, change, "hold", *ids) as holding,
        s.waiting(worker, fail, claimed.lease, *failures) as burying,
    ):
        blocker.rollback()
        assert holding.result() == ["held", "held"]
        burying.result()
    assert status_by_id(s.main) == dict.fromkeys(ids, "dead")


def test_queue_is_not_dropped_during_a_replay_step_into_it(s: Sessions) -> None:
    create(s.main, "other")
    plan = started(s.main, die(s.main), to="other")
    holder, stepping, dropping = s.begin(), s.open(), s.open()
    holder.execute("select from bartleby.replay_item where replay_id = %s for update", [plan])
    with (
        s.waiting(stepping, steps) as under_way,
        s.waiting(dropping, execute, "select bartleby.drop_queue('other')", may_end=True),
    ):
        holder.rollback()
        under_way.result()
    adds_up(s.main)
    assert len(work_all(s.main, "other")) == 1


def test_replay_step_does_not_wait_for_a_locked_letter(s: Sessions) -> None:
    ids = die(s.main, 9)
    plan = started(s.main, ids)
    operator, stepping = s.begin(), s.hasty()
    change(operator, "hold", *ids[:4])
    assert sum(step(stepping, 2)["moved"] for _ in range(6)) == 5
    assert list(states(s.main, plan).values()) == ["waiting"] * 4 + ["replayed"] * 5
    operator.rollback()
    change(s.main, "hold", ids[3])
    assert sum(step(stepping, 2)["moved"] for _ in range(3)) == 4
    assert list(states(s.main, plan).values()) == ["replayed"] * 3 + ["skipped"] + ["replayed"] * 5
    assert sorted(work_all(s.main)) == [*ids[:3], *ids[4:]]
    adds_up(s.main)


def test_letter_is_moved_by_one_of_two_concurrent_steps(s: Sessions) -> None:
    ids = die(s.main, 4)
    started(s.main, ids)
    first, second = s.begin(), s.hasty()
    assert step(first, 2)["moved"] == 2
    assert steps(second) == []
    first.commit()
    assert step(second)["moved"] == 2
    assert work_all(s.main) == ids
    adds_up(s.main)


def resolve(conn: Connection, group: int, version: str) -> None:
    conn.execute("select bartleby.resolve_group(%s, 'me', 'x', %s)", [group, version])


def test_regression_is_reported_once(s: Sessions) -> None:
    for number, end in enumerate(("commit", "rollback"), 1):
        failure = {"fingerprint": end, "worker_version": "2"}
        die(s.main, fingerprint=end, worker_version="1")
        resolve(s.main, groups(s)[-1], "2")
        one, two = leased(s), leased(s)
        first = s.begin()
        kill(first, one, **failure)
        kill(s.hasty(), two, **failure)
        getattr(first, end)()
        s.main.execute(TALLY)
        assert len(events(s.main, "group.regressed")) == number
    assert column(s.main, "select dead from bartleby.groups order by id") == [3, 2]


def test_death_while_a_group_is_being_resolved_is_a_regression(s: Sessions) -> None:
    """The version was never seen and has no order; if it counted as old, the regression would never be reported."""
    die(s.main, fingerprint="a", worker_version="c0ffee")
    claimed, operator = leased(s), s.begin()
    resolve(operator, groups(s)[0], "decade")
    kill(s.hasty(), claimed, fingerprint="a", worker_version="facade")
    operator.commit()
    s.main.execute(TALLY)
    assert value(s.main, "select state from bartleby.groups") == "regressed"


def test_death_before_a_group_was_resolved_is_not_a_regression(s: Sessions) -> None:
    """Its group learns of the death late, because an operator held the group."""
    die(s.main, fingerprint="a", worker_version="1")
    claimed, operator = leased(s), s.begin()
    operator.execute("select bartleby.acknowledge_group(%s, 'me', 'x')", groups(s))
    kill(s.hasty(), claimed, fingerprint="a", worker_version="3")
    operator.commit()
    s.clock.advance(1)
    resolve(s.main, groups(s)[0], "2")
    s.main.execute(TALLY)
    state: LiteralString = (
        "select g.state, f.seen_versions from bartleby.groups g join bartleby.failure_group f using (id)"
    )
    assert execute(s.main, state) == [("resolved", ["1", "3"])]


def test_retention_does_not_wait_for_a_locked_letter(s: Sessions) -> None:
    create(s.main, "q", payload_retention="1 day")
    ids = die(s.main, 2)
    s.clock.advance(2 * 86400)
    operator = s.begin()
    change(operator, "hold", ids[0])
    s.hasty().execute("select bartleby.prune()")
    operator.commit()
    assert column(s.main, "select payload from bartleby.dead_letters order by message_id") == [1, None]


def test_count_under_way_does_not_outlive_its_group(s: Sessions) -> None:
    create(s.main, "q", retention=0)
    die(s.main, 2, fingerprint="a")
    s.clock.advance(10)
    s.main.execute("delete from bartleby.dead_letter")
    tallying = s.begin()
    assert value(tallying, "select bartleby.tally(1)") == 1
    s.main.execute("select bartleby.prune()")
    tallying.commit()
    while value(s.main, TALLY):
        pass
    s.main.execute("select bartleby.prune()")
    assert execute(s.main, "select from bartleby.letter_counts union all select from bartleby.failure_group") == []


# Events and sinks


@pytest.mark.own_database
def test_removing_a_sink_does_not_break_a_burial_that_emits_to_it(s: Sessions) -> None:
    put_sink(s.main)
    claimed = leased(s)
    with ExitStack() as removal, s.held(WANTS, kill, claimed):
        removal.enter_context(s.waiting(s.open(), execute, REMOVE, may_end=True))
    assert value(s.main, "select count(*) from bartleby.dead_letters") == 1
    assert value(s.main, "select count(*) from bartleby.log where queue not in (select id from bartleby.queue)") == 0


def test_second_of_two_reports_that_a_sink_is_down_is_ignored(s: Sessions) -> None:
    put_sink(s.main)
    first, second = s.begin(), s.open()
    report: LiteralString = "select bartleby.report_sink('bus', 0, 0, 'down')"
    assert value(first, report) == "degraded"
    assert s.blocked(second, first.commit, value, report) is None
    assert len(events(s.main, "sink.degraded")) == 1


def test_report_and_change_of_a_sink_do_not_deadlock(s: Sessions) -> None:
    put_sink(s.main)
    operator, relay = s.begin(), s.open()
    change(operator, "discard", *die(s.main))
    with s.waiting(relay, value, "select bartleby.report_sink('bus', 0, 1, 'down')") as reporting:
        operator.execute(PUT)
        operator.commit()
        assert reporting.result() == "degraded"
    assert len(events(s.main, "sink.degraded")) == 1


def test_two_concurrent_tallies_raise_one_alarm(s: Sessions) -> None:
    """The second has counted its letters before it waits, and sees the alarm of the first only afterwards."""
    die(s.main, 10, fingerprint="a")
    first, second = s.begin(), s.open()
    first.execute(TALLY)
    die(s.main, fingerprint="a")
    s.blocked(second, first.commit, value, TALLY)
    assert len(events(s.main, "group.escalated")) == 1


def test_concurrent_changes_of_a_letter_have_numbers_of_their_own(s: Sessions) -> None:
    ids = die(s.main)
    first, second = s.begin(), s.open()
    change(first, "discard", *ids)
    assert s.blocked(second, first.commit, change, "restore", *ids) == ["restored"]
    assert len(column(s.main, "select id from bartleby.events where type ~ 'restored|discarded'")) == 2
    assert rows(s.main, NOT_RECORDED) == []


# Pauses


def test_end_of_a_pause_and_an_operators_action_do_not_deadlock(s: Sessions) -> None:
    create(s.main, "other")
    s.main.execute(PAUSE)
    s.clock.advance(61)
    operator, janitor = s.begin(), s.open()
    operator.execute("select bartleby.pause_queue('other')")
    with s.waiting(janitor, execute, "select bartleby.reap()", may_end=True) as reaping:
        operator.execute(PAUSE)
        operator.commit()
        reaping.result()
    assert value(s.main, "select paused_until > bartleby.clock() from bartleby.queue where name = 'q'")
