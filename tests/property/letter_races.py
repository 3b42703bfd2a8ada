"""Races around letters: who buries, moves, replays, forgets or counts them first, and who must not wait for whom."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from psycopg import errors
from psycopg.types.json import Jsonb

from tests.property.sessions import Background, Connection, Sessions, claim, send


def one(conn: Connection, query: str, *parameters: object) -> Any:
    ((found,),) = conn.execute(query.encode(), parameters).fetchall()
    return found


def die(s: Sessions, *payloads: int, **failure: str) -> list[int]:
    """Messages of these payloads, dead; their ids."""
    send(s.main, *payloads)
    bury(s.main, claim(s.main), **failure)
    found = s.main.execute("select message_id from bartleby.dead_letters order by 1").fetchall()
    return [number for (number,) in found][-len(payloads) :]


def bury(conn: Connection, rows: list[Any], **failure: str) -> None:
    failures = [{"position": row[1], "verdict": "dead", **failure} for row in rows]
    conn.execute("select bartleby.fail(%s, %s)", [rows[0][0], Jsonb(failures)])


def at_once(conn: Connection, query: str, *parameters: object) -> list[Any]:
    with waiting_for_nobody(conn):
        return conn.execute(query.encode(), parameters).fetchall()


@contextmanager
def waiting_for_nobody(conn: Connection) -> Iterator[None]:
    conn.execute("set statement_timeout = '10s'")
    try:
        yield
    except errors.QueryCanceled:
        raise AssertionError("it waits") from None


def waits_or_is_over(s: Sessions, conn: Connection, under_way: Background) -> None:
    query = "select from pg_locks where pid = %s and not granted"
    deadline = time.monotonic() + 30
    while under_way.thread.is_alive() and not s.main.execute(query, [conn.info.backend_pid]).rowcount:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def started(s: Sessions, ids: list[int], **options: object) -> int:
    plan = one(
        s.main, "select bartleby.plan_replay(null, 'me', 'x', p_ids => %s, p_options => %s)", ids, Jsonb(options)
    )
    s.main.execute("select bartleby.start_replay(%s, 'me', 'x')", [plan])
    return int(plan)


def groups(s: Sessions) -> list[int]:
    return [number for (number,) in s.main.execute("select id from bartleby.failure_group order by id")]


def a_letter_buried_by_rules_of_yesterday_is_moved(s: Sessions) -> None:
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


def workers_and_operators_lock_letters_in_one_order(s: Sessions) -> None:
    ids = die(s, 1, 2)
    s.main.execute("select bartleby.replay(%s, 'me', 'x')", [ids])
    rows = claim(s.main)
    blocker, worker, operator = s.begin(), s.open(), s.open()
    blocker.execute("select from bartleby.dead_letter where message_id = %s for update", ids[:1])
    with Background(lambda: operator.execute("select bartleby.hold(%s, 'me', 'x')", [ids])) as holding:
        s.wait_until_it_waits(operator)
        with Background(lambda: bury(worker, rows[::-1])) as burying:
            s.wait_until_it_waits(worker)
            blocker.execute("rollback")
            try:
                holding.join()
                burying.join()
            except errors.DeadlockDetected:
                raise AssertionError("they wait for each other") from None


def a_queue_is_not_dropped_in_the_middle_of_a_step_into_it(s: Sessions) -> None:
    s.main.execute("select bartleby.create_queue('other')")
    ids = die(s, 1)
    plan = started(s, ids, to="other")
    holder, stepping, dropping = s.begin(), s.open(), s.open()
    holder.execute("select from bartleby.replay_item where replay_id = %s for update", [plan])
    with Background(lambda: stepping.execute("select bartleby.advance_replays()")) as step:
        s.wait_until_it_waits(stepping)
        with Background(lambda: dropping.execute("select bartleby.drop_queue('other')")) as drop:
            waits_or_is_over(s, dropping, drop)
            holder.execute("rollback")
            step.join()
    alive = one(s.main, "select count(*) from bartleby.messages")
    assert (one(s.main, "select status from bartleby.dead_letter") == "replayed") == (alive == 1), "it is lost"


def a_step_waits_for_nobody_who_is_at_a_letter(s: Sessions) -> None:
    ids = die(s, 1, 2, 3)
    started(s, ids)
    operator, stepping = s.begin(), s.open()
    operator.execute("select bartleby.discard(%s, 'ben', 'x')", [ids[1:2]])
    ((moved,),) = at_once(stepping, "select moved from bartleby.advance_replays()")
    assert moved == 2
    operator.execute("commit")
    at_once(stepping, "select bartleby.advance_replays()")
    assert one(s.main, "select count(*) from bartleby.messages") == 2


def of_two_steps_at_once_each_letter_is_in_one(s: Sessions) -> None:
    ids = die(s, 1, 2)
    started(s, ids)
    first, second = s.begin(), s.open()
    assert first.execute("select moved from bartleby.advance_replays(1)").fetchall() == [(1,)]
    assert at_once(second, "select moved from bartleby.advance_replays(1)") == []
    first.execute("commit")
    s.main.execute("select bartleby.advance_replays()")
    assert one(s.main, "select count(*) from bartleby.messages") == 2


def a_regression_is_told_once(s: Sessions) -> None:
    die(s, 1, fingerprint="a", worker_version="1")
    s.main.execute("select bartleby.resolve_group(%s, 'me', 'x', '2')", groups(s))
    send(s.main, 2)
    rows = claim(s.main)
    send(s.main, 3)
    others = claim(s.main)
    first = s.begin()
    bury(first, rows, fingerprint="a", worker_version="2")
    with waiting_for_nobody(s.main):
        bury(s.main, others, fingerprint="a", worker_version="2")
    first.execute("commit")
    s.main.execute("select bartleby.tally()")
    assert one(s.main, "select count(*) from bartleby.events where type = 'io.bartleby.group.regressed'") == 1


def a_death_while_a_group_is_being_resolved_is_a_regression(s: Sessions) -> None:
    """Of a version that was never seen, and has no order: were it taken for an old one, nobody would ever be told."""
    die(s, 1, fingerprint="a", worker_version="c0ffee")
    send(s.main, 2)
    rows = claim(s.main)
    operator = s.begin()
    operator.execute("select bartleby.resolve_group(%s, 'me', 'x', 'decade')", groups(s))
    with waiting_for_nobody(s.main):
        bury(s.main, rows, fingerprint="a", worker_version="facade")
    operator.execute("commit")
    s.main.execute("select bartleby.tally()")
    assert one(s.main, "select state from bartleby.groups") == "regressed"


def what_died_before_a_group_was_resolved_breaks_nothing(s: Sessions) -> None:
    """Its group hears of it late, since an operator was at it."""
    die(s, 1, fingerprint="a", worker_version="1")
    send(s.main, 2)
    rows = claim(s.main)
    operator = s.begin()
    operator.execute("select bartleby.acknowledge_group(%s, 'me', 'x')", groups(s))
    with waiting_for_nobody(s.main):
        bury(s.main, rows, fingerprint="a", worker_version="3")
    operator.execute("commit")
    s.clock.advance(1)
    s.main.execute("select bartleby.resolve_group(%s, 'me', 'x', '2')", groups(s))
    s.main.execute("select bartleby.tally()")
    state = "select g.state, f.seen_versions from bartleby.groups g join bartleby.failure_group f using (id)"
    assert s.main.execute(state).fetchall() == [("resolved", ["1", "3"])]


def retention_waits_for_nobody_who_is_at_a_letter(s: Sessions) -> None:
    s.main.execute("select bartleby.create_queue('q', '{\"payload_retention\": \"1 day\"}')")
    ids = die(s, 1, 2)
    s.clock.advance(2 * 86400)
    operator, janitor = s.begin(), s.open()
    operator.execute("select bartleby.hold(%s, 'me', 'x')", [ids[:1]])
    at_once(janitor, "select bartleby.prune()")
    operator.execute("commit")
    assert s.main.execute("select payload from bartleby.dead_letters order by message_id").fetchall() == [(1,), (None,)]


def a_count_under_way_outlives_no_group(s: Sessions) -> None:
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


LETTER_RACES: list[Callable[[Sessions], None]] = [
    a_letter_buried_by_rules_of_yesterday_is_moved,
    workers_and_operators_lock_letters_in_one_order,
    a_queue_is_not_dropped_in_the_middle_of_a_step_into_it,
    a_step_waits_for_nobody_who_is_at_a_letter,
    of_two_steps_at_once_each_letter_is_in_one,
    a_regression_is_told_once,
    a_death_while_a_group_is_being_resolved_is_a_regression,
    what_died_before_a_group_was_resolved_breaks_nothing,
    retention_waits_for_nobody_who_is_at_a_letter,
    a_count_under_way_outlives_no_group,
]
