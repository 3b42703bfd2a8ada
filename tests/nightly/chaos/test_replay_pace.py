"""A plan keeps its rate, is cancelled at once, ignores letters that came later, and its canary stops it in time."""

import contextlib
import itertools
import logging
import os
import signal
import threading
import time
from bisect import bisect
from collections.abc import Iterator
from typing import LiteralString

import psycopg
import pytest
from psycopg.types.json import Jsonb

from bartleby import Bartleby, Client, Message
from bartleby.operations import Operator
from tests.kit.worker import working
from tests.nightly.chaos.replay_actors import Actors, actors
from tests.nightly.chaos.replay_stage import (
    BY,
    QUEUE,
    Connection,
    bury,
    column,
    consuming,
    counts,
    create,
    finish,
    heap,
    letters,
    plan,
    sound,
    start,
    started,
    until,
    value,
)  # fmt: skip
from tests.nightly.chaos.worker_profiles import NOISE_SECONDS

RATE = 200
NEAR = 0.05
log = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def cast() -> Iterator[Actors]:
    with actors() as found:
        yield found


def moments(conn: Connection, replay_id: int) -> list[float]:
    query: LiteralString = """
        select extract(epoch from replayed_at)::float8 from bartleby.replay_item
        where replay_id = %s and replayed_at is not null order by 1"""
    return column(conn, query, replay_id)


def busiest(times: list[float], seconds: float) -> int:
    """Return the most that happened within a time."""
    return max(bisect(times, moment + seconds) - first for first, moment in enumerate(times))


def drive(dsn: str, replay_id: int) -> threading.Thread:
    def run() -> None:
        with Client(dsn) as client:
            Operator(client, "ana").drive(replay_id, outcomes=False)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def keeps_the_rate(conn: Connection, replay_id: int, resting: float = 0) -> None:
    """Check the rate from the start on: a runner may be late and catch up, but not for more than a second.

    It is measured where the plan has caught up best in its last fifth, since a late last step is not caught up.
    """
    times = moments(conn, replay_id)
    since = value(conn, "select extract(epoch from started_at)::float8 from bartleby.replay where id = %s", replay_id)
    gaps = [after - before for before, after in itertools.pairwise([since, *times])]
    if resting:
        gaps[gaps.index(max(gaps))] -= resting
    spent = list(itertools.accumulate(min(gap, 1) for gap in gaps))
    rate = max(number / seconds for number, seconds in list(enumerate(spent, 1))[len(spent) * 4 // 5 :])
    most = busiest(times, 1)
    log.info("replay %s: %.1f a second instead of %s, at most %s within a second", replay_id, rate, RATE, most)
    assert abs(rate / RATE - 1) < NEAR
    assert most <= 2 * RATE * (1 + NEAR)


def test_rate_is_kept(conn: Connection, dsn: str, cast: Actors) -> None:
    """Three plans at once: one undisturbed, one whose runner is killed, and one that is paused for a while."""
    create(conn)
    ids = heap(conn, 3 * 5 * RATE)
    calm, killed, paused = (plan(conn, ids[k::3], rate=RATE) for k in range(3))
    for each in (calm, killed, paused):
        start(conn, each)
    threads = [drive(dsn, calm), drive(dsn, paused)]
    pid = cast.start("drive_fast", dsn=dsn, replay_id=killed)
    time.sleep(1.5)
    conn.execute("select bartleby.pause_replay(%s, %s, %s)", [paused, *BY])
    os.kill(pid, signal.SIGKILL)
    assert cast.wait() == -signal.SIGKILL
    before = len(moments(conn, paused))
    cast.start("drive_fast", dsn=dsn, replay_id=killed)
    time.sleep(1)
    assert len(moments(conn, paused)) == before
    conn.execute("select bartleby.resume_replay(%s, %s, %s)", [paused, *BY])
    threads.append(drive(dsn, paused))
    for thread in threads:
        thread.join(30)
    assert cast.wait() == 0
    query: LiteralString = """
        select extract(epoch from max(at) filter (where action = 'replay.resume')
          - max(at) filter (where action = 'replay.pause'))::float8 from bartleby.audit"""
    keeps_the_rate(conn, calm)
    keeps_the_rate(conn, killed)
    keeps_the_rate(conn, paused, value(conn, query))
    assert sum(len(moments(conn, each)) for each in (calm, killed, paused)) == len(ids)
    assert value(conn, "select count(*) from bartleby.messages") == len(ids)
    sound(conn)


@pytest.mark.parametrize("runner", ["drive_fast", "run_as_a_worker"])
def test_cancelled_plan_ends_at_once(conn: Connection, dsn: str, cast: Actors, runner: str) -> None:
    count = 50_000
    create(conn)
    heap(conn, count)
    replay_id = started(conn, filter=f"queue:{QUEUE}")
    watch = {"watch": dsn} if runner == "run_as_a_worker" else {}
    cast.start(runner, dsn=dsn, replay_id=replay_id, **watch)
    until(lambda: counts(conn, replay_id).get("replayed", 0) > 2000, "it does not begin")
    asked = time.monotonic()
    conn.execute("select bartleby.cancel_replay(%s, %s, %s)", [replay_id, *BY])
    seconds = time.monotonic() - asked
    replayed = value(conn, "select count(*) from bartleby.replay_item where replayed_at is not null")
    rest = column(conn, "select message_id from bartleby.replay_item where state = 'waiting'")
    before = letters(conn, rest)
    log.info("cancelled within %.0f ms, after %s of %s", seconds * 1000, replayed, count)
    assert seconds < 2 + NOISE_SECONDS
    assert 2000 < replayed < count
    assert replayed + len(rest) == count
    assert cast.wait() == 0
    time.sleep(0.3)
    assert counts(conn, replay_id)["status"] == "cancelled"
    assert value(conn, "select count(*) from bartleby.replay_item where replayed_at is not null") == replayed
    assert value(conn, "select count(*) from bartleby.messages") == replayed
    assert letters(conn, rest) == before


def test_plan_of_a_killed_worker_is_taken_over(conn: Connection, dsn: str, cast: Actors) -> None:
    create(conn)
    ids = heap(conn, 100)
    replay_id = started(conn, ids, rate=50)
    pid = cast.start("run_as_a_worker", dsn=dsn, watch=dsn, replay_id=replay_id)
    until(lambda: len(moments(conn, replay_id)) > 20, "it does not begin")
    os.kill(pid, signal.SIGKILL)
    assert cast.wait() == -signal.SIGKILL
    cast.run("run_as_a_worker", dsn=dsn, watch=dsn, replay_id=replay_id)
    times = moments(conn, replay_id)
    gap = max(after - before for before, after in itertools.pairwise(times))
    log.info("it did not run for %.2f s", gap)
    assert gap < 10  # the duty lapses after three seconds, and the next worker has to start
    assert len(times) == len(ids) == value(conn, "select count(*) from bartleby.messages")
    sound(conn)


@contextlib.contextmanager
def producing(dsn: str) -> Iterator[list[int]]:
    """Send all the time; yields the ids."""
    over, sent = threading.Event(), list[int]()

    def produce() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            while not over.wait(0.01):
                sent.extend(
                    column(conn, "select bartleby.send_many(%s, %s)", QUEUE, Jsonb([{"payload": {"n": 0}}] * 3))
                )

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield sent
    finally:
        over.set()
        thread.join(10)


def test_letters_that_die_meanwhile_do_not_join_the_plan(conn: Connection, dsn: str) -> None:
    create(conn)
    ids = bury(conn, 60)
    group = value(conn, "select distinct group_id from bartleby.dead_letter")
    replay_id = plan(conn, filter=f"queue:{QUEUE} group:{group}", rate=40, window=30)
    with (
        consuming(dsn, dies=lambda message: "a" if message > ids[-1] else None) as consumer,
        producing(dsn) as fresh,
    ):
        until(lambda: value(conn, "select count(*) from bartleby.dead_letter") > 80, "nothing dies")
        start(conn, replay_id)
        drive(dsn, replay_id).join(30)
    finish(conn)
    assert len(fresh) > 50
    assert counts(conn, replay_id) == {"status": "finished", "items": 60, "done": 60}
    assert column(conn, "select message_id from bartleby.replay_item order by 1") == ids
    assert consumer.runs == dict.fromkeys([*ids, *fresh], 1)
    found = conn.execute(
        "select status, cycle, group_id, count(*) from bartleby.dead_letter group by 1, 2, 3 order by 1"
    )
    assert found.fetchall() == [("dead", 1, group, len(fresh)), ("resolved", 1, group, 60)]
    sound(conn)


# A canary with real workers

DEAD = 5000
CANARY = 10


def test_canary_spends_only_itself_until_the_bug_is_fixed(conn: Connection, dsn: str) -> None:
    create(conn, max_attempts=1)
    fixed, ran, app = threading.Event(), list[int](), Bartleby(dsn)

    @app.handler(QUEUE)
    async def ship(message: Message) -> None:
        ran.append(message.id)
        if not fixed.is_set():
            raise KeyError("customer")

    with working(app):
        messages = Jsonb([{"payload": {"n": n}} for n in range(DEAD)])
        ids = column(conn, "select bartleby.send_many(%s, %s)", QUEUE, messages)
        until(lambda: len(hashes(conn)) == DEAD, "not all die")
        conn.execute("select bartleby.configure_queue(%s, '{\"max_attempts\": 5}')", [QUEUE])
        before, spent = hashes(conn), len(ran)
        assert run_canary(conn, 4)["status"] == "aborted"
        after = hashes(conn)
        hit = [each for each in ids if before[each] != after[each]]
        assert len(hit) <= CANARY
        assert sorted(ran[spent:]) == hit  # one attempt each
        assert value(conn, "select count(*) from bartleby.attempt") == DEAD + len(hit)
        again: LiteralString = """
            select status, cycle, attempts, jsonb_array_length(failure_history), count(distinct group_id)
            from bartleby.dead_letter where message_id = any (%s) group by 1, 2, 3, 4"""
        assert conn.execute(again, [hit]).fetchall() == [("dead", 2, 1, 1, 1)]
        rest = [each for each in ids if each not in set(hit)]
        assert conn.execute(again, [rest]).fetchall() == [("dead", 1, 1, 0, 1)]
        fixed.set()
        assert run_canary(conn, 2000) == {"status": "finished", "items": DEAD, "done": DEAD}
    assert sorted(ran[spent:]) == sorted(ids + hit)
    groups = conn.execute("select status, count(distinct group_id) from bartleby.dead_letter group by 1").fetchall()
    assert groups == [("resolved", 1)]
    sound(conn)


def run_canary(conn: Connection, window: int) -> dict[str, object]:
    replay_id = plan(conn, filter=f"queue:{QUEUE} type:KeyError", canary=CANARY, window=window)
    start(conn, replay_id)
    until(lambda: counts(conn, replay_id)["status"] in {"aborted", "finished"}, "it does not end")
    return counts(conn, replay_id)


def hashes(conn: Connection) -> dict[int, str]:
    """Return a hash of every column of every letter."""
    return dict(conn.execute("select message_id, md5(d::text) from bartleby.dead_letter d").fetchall())
