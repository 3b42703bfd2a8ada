"""A plan keeps its rate whatever happens to who runs it, is cancelled at once, and takes nothing that came later."""

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

from bartleby import Client
from bartleby.operations import Operator
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
)
from tests.nightly.chaos.worker_profiles import NOISE

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
    """The most that happened within so many seconds."""
    return max(bisect(times, moment + seconds) - first for first, moment in enumerate(times))


def drive(dsn: str, replay_id: int) -> threading.Thread:
    def run() -> None:
        with Client(dsn) as client:
            Operator(client, "ana").drive(replay_id, outcomes=False)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def keeps_the_rate(conn: Connection, replay_id: int, resting: float = 0) -> None:
    """Counted from its start: who runs it may come late, and makes up for it, but not for more than a second.

    Looked at where it has caught up best in its last fifth: nothing makes up for a last step that is late.
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


def test_the_rate_is_kept(conn: Connection, dsn: str, cast: Actors) -> None:
    """Three plans at once: one that nobody disturbs, one whose runner is killed, and one that is paused for a while."""
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
def test_cancelled_at_once(conn: Connection, dsn: str, cast: Actors, runner: str) -> None:
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
    assert seconds < 2 + NOISE
    assert 2000 < replayed < count
    assert replayed + len(rest) == count
    assert cast.wait() == 0
    time.sleep(0.3)
    assert counts(conn, replay_id)["status"] == "cancelled"
    assert value(conn, "select count(*) from bartleby.replay_item where replayed_at is not null") == replayed
    assert value(conn, "select count(*) from bartleby.messages") == replayed
    assert letters(conn, rest) == before


def test_another_worker_takes_over(conn: Connection, dsn: str, cast: Actors) -> None:
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
    log.info("nobody ran it for %.2f s", gap)
    assert gap < 10  # the duty lapses after three seconds, and who takes over has to be started
    assert len(times) == len(ids) == value(conn, "select count(*) from bartleby.messages")
    sound(conn)


@contextlib.contextmanager
def producing(dsn: str) -> Iterator[list[int]]:
    """Somebody who sends all the time; the ids."""
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


def test_what_dies_meanwhile_never_joins(conn: Connection, dsn: str) -> None:
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
    told = conn.execute(
        "select status, cycle, group_id, count(*) from bartleby.dead_letter group by 1, 2, 3 order by 1"
    )
    assert told.fetchall() == [("dead", 1, group, len(fresh)), ("resolved", 1, group, 60)]
    sound(conn)
