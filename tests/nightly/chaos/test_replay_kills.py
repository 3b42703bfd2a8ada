"""Processes that run a plan or take an action are killed at every boundary of every statement; servers too.

Nothing is lost or done twice.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest

from bartleby import Client, dev
from bartleby.errors import BartlebyError
from bartleby.operations import Operator
from tests.kit.commands import PROGRAM
from tests.nightly.chaos.network import Trap, opened
from tests.nightly.chaos.replay_actors import Actors, Killer, actors
from tests.nightly.chaos.replay_stage import (
    BY,
    QUEUE,
    Connection,
    bury,
    column,
    consuming,
    counts,
    create,
    dice,
    finish,
    letters,
    plan,
    sound,
    started,
    until,
    value,
)  # fmt: skip
from tests.nightly.chaos.servers import OwnServer

SIZE = 5
MOST = 150
pytestmark = [pytest.mark.timeout(600), pytest.mark.own_database]


@pytest.fixture(scope="module")
def cast() -> Iterator[Actors]:
    with actors() as found:
        yield found


@pytest.fixture
def killer(cast: Actors, server: dev.Server, dsn: str) -> Killer:
    return Killer(cast, server, dsn)


@pytest.fixture
def boundaries(conn: Connection) -> Iterator[int]:
    create(conn)
    return itertools.count(1)


@pytest.fixture(params=["one statement", "begin, statement, commit"])
def in_either_way(request: pytest.FixtureRequest, conn: Connection) -> Iterator[int]:
    """Return every boundary, also where a call is a transaction of three statements."""
    if request.param != "one statement":
        # with a default isolation that claims cannot use, clients make a transaction of every call
        name = value(conn, "select current_database()")
        conn.execute(f"alter database {name} set default_transaction_isolation = 'repeatable read'".encode())
    create(conn)
    return itertools.count(1)


def slices(ids: Sequence[int], size: int = SIZE) -> Iterator[list[int]]:
    return (list(ids[start : start + size]) for start in range(0, len(ids), size))


def replayed_once(conn: Connection, dsn: str, ids: Sequence[int]) -> None:
    """Handle what is alive, let half of it die again, and check that each ran once and is where it belongs."""
    with consuming(dsn, dies=lambda message: "again" if message % 2 else None) as consumer:
        pass
    assert consumer.runs == dict.fromkeys(ids, 1)
    finish(conn)
    found = conn.execute(
        "select message_id, status, cycle, jsonb_array_length(failure_history) from bartleby.dead_letter"
        " where message_id = any (%s) order by 1",
        [list(ids)],
    ).fetchall()
    assert found == [(each, "dead", 2, 1) if each % 2 else (each, "resolved", 1, 0) for each in sorted(ids)]
    sound(conn)


def nothing_more(conn: Connection, dsn: str, ids: Sequence[int]) -> None:
    """Check that letters that are done are not replayed again."""
    done = [each for each in ids if not each % 2]
    before = letters(conn, done)
    assert not column(conn, "select bartleby.replay(%s, %s, %s)", done, *BY)
    again = started(conn, done)
    finish(conn)
    assert counts(conn, again) == {"status": "finished", "items": len(done), "skipped": len(done)}
    with consuming(dsn) as consumer:
        pass
    assert not consumer.runs
    assert letters(conn, done) == before


@pytest.mark.parametrize("runner", ["drive", "run_as_a_worker"])
def test_plan_whose_runner_is_killed_replays_each_letter_once(
    conn: Connection, dsn: str, killer: Killer, in_either_way: Iterator[int], runner: str
) -> None:
    buried = slices(bury(conn, SIZE * MOST))
    plans: dict[int, list[int]] = {}
    watch = {"watch": dsn} if runner == "run_as_a_worker" else {}
    for boundary in in_either_way:
        ids = next(buried)
        replay_id = started(conn, ids)
        plans[replay_id] = ids
        conn.execute("delete from bartleby.duty")  # as if it had lapsed
        killed = killer.killed(boundary, runner, replay_id=replay_id, **watch)
        if not killed:
            break
        killer.run("drive", replay_id=replay_id)
        assert counts(conn, replay_id)["status"] == "settling"
    replayed_once(conn, dsn, sorted(itertools.chain(*plans.values())))
    for replay_id, ids in plans.items():
        dead = sum(each % 2 for each in ids)
        expected = {"status": "finished", "items": SIZE, "done": SIZE - dead, "died_again": dead}
        assert counts(conn, replay_id) == expected
    nothing_more(conn, dsn, list(itertools.chain(*plans.values())))


@pytest.mark.parametrize("actor", ["plan_and_start", "one_liner"])
def test_replay_that_is_killed_can_be_repeated(
    conn: Connection, dsn: str, killer: Killer, in_either_way: Iterator[int], actor: str
) -> None:
    buried, used = slices(bury(conn, SIZE * MOST)), list[int]()
    for boundary in in_either_way:
        ids = next(buried)
        used += ids
        if not killer.killed(boundary, actor, ids=ids):
            break
        sound(conn)
        killer.run(actor, ids=ids)
    assert value(conn, "select count(*) from bartleby.replay where hash is null or items <> %s", SIZE) == 0
    conn.execute("select bartleby.cancel_replay(id, 'ana', 'left') from bartleby.replays where status = 'draft'")
    replayed_once(conn, dsn, used)
    nothing_more(conn, dsn, used)


@pytest.mark.parametrize("fixed", [True, False])
def test_plan_survives_repeated_kills_while_consumers_work(
    conn: Connection, dsn: str, killer: Killer, fixed: bool
) -> None:
    create(conn)
    rng, ids = dice(f"again and again {fixed}"), bury(conn, 120)
    replay_id = started(conn, ids, window=20, canary=5)
    kills = 0
    with consuming(dsn, dies=lambda _: None if fixed else "still") as consumer:
        while counts(conn, replay_id)["status"] in {"running", "settling"}:
            kills += killer.killed(rng.randrange(8, 40), "drive", replay_id=replay_id, outcomes=True)
    assert kills
    if fixed:
        assert consumer.runs == dict.fromkeys(ids, 1)
        assert counts(conn, replay_id) == {"status": "finished", "items": 120, "done": 120}
    else:
        assert consumer.runs == dict.fromkeys(ids[: len(consumer.runs)], 1)
        assert len(consumer.runs) <= 5
        assert counts(conn, replay_id)["status"] == "aborted"
    sound(conn)


CHANGES = {
    "discard": ("dead", False, "discarded", False),
    "restore": ("discarded", False, "dead", False),
    "hold": ("dead", False, "dead", True),
    "release": ("dead", True, "dead", False),
}


@pytest.mark.parametrize("verb", CHANGES)
def test_killed_bulk_change_can_be_repeated(
    conn: Connection, killer: Killer, boundaries: Iterator[int], verb: str
) -> None:
    status, held, status_after, held_after = CHANGES[verb]
    everything = bury(conn, SIZE * MOST)
    if status == "discarded":
        conn.execute("select bartleby.discard(%s, 'ben', 'first')", [everything])
    if held:
        conn.execute("select bartleby.hold(%s, 'ben', 'first')", [everything])
    buried, used = slices(everything), list[int]()
    for boundary in boundaries:
        ids = next(buried)
        used += ids
        if not killer.killed(boundary, "change", verb=verb, ids=ids):
            break
        killer.run("change", verb=verb, ids=ids)
    assert boundary > 10
    state = """
        select status, held_at is not null, count(*) from bartleby.dead_letter where message_id = any (%s)
        group by 1, 2"""
    assert conn.execute(state, [used]).fetchall() == [(status_after, held_after, len(used))]
    audited: LiteralString = """
        select sum(n.value::integer) from bartleby.audit, jsonb_each_text(after) n where actor = 'ana'"""
    assert value(conn, audited) == len(used)
    sound(conn)


def alone(conn: Connection) -> bool:
    query: LiteralString = """
        select count(*) from pg_stat_activity
        where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()"""
    return bool(value(conn, query) == 0)


def test_killed_planning_leaves_no_partial_plan(conn: Connection, killer: Killer, in_either_way: Iterator[int]) -> None:
    ids = bury(conn, SIZE)
    for boundary in in_either_way:
        before = value(conn, "select count(*) from bartleby.replay")
        killed = killer.killed(boundary, "plan_and_start", ids=ids)
        until(lambda: alone(conn), "its last statement does not end")
        made = value(conn, "select count(*) from bartleby.replay") - before
        assert made in {0, 1}
        items: LiteralString = """
            select count(*) from bartleby.replay_item where replay_id = (select max(id) from bartleby.replay)"""
        assert not made or value(conn, items) == SIZE
        sound(conn)
        if not killed:
            break
    assert plan(conn, ids)


def test_killed_erasure_can_be_repeated(conn: Connection, killer: Killer, boundaries: Iterator[int]) -> None:
    for boundary in boundaries:
        ids, key = bury(conn, SIZE), f"customer-{boundary}"
        conn.execute("update bartleby.dead_letter set key = %s where message_id = any (%s)", [key, ids])
        killed = killer.killed(boundary, "erase", key=key)
        sound(conn)
        killer.run("erase", key=key)
        if not killed:
            break
    left: LiteralString = "select count(*) from bartleby.dead_letter where num_nonnulls(payload, key, error) > 0"
    assert value(conn, left) == 0
    erased: LiteralString = "select count(*) from bartleby.audit where action = 'letter.erase'"
    assert value(conn, erased) == value(conn, "select count(*) / %s from bartleby.dead_letter", SIZE)


def test_killed_steering_leaves_letters_alone(conn: Connection, killer: Killer, boundaries: Iterator[int]) -> None:
    ids = bury(conn, SIZE)
    before = letters(conn)
    for boundary in boundaries:
        replay_id = plan(conn, ids)
        killed = killer.killed(boundary, "steer", replay_id=replay_id)
        killer.run("steer", replay_id=replay_id)
        assert counts(conn, replay_id) == {"status": "cancelled", "items": SIZE, "waiting": SIZE}
        if not killed:
            break
    assert letters(conn) == before
    sound(conn)


def test_killed_regrouping_can_be_repeated(conn: Connection, killer: Killer, boundaries: Iterator[int]) -> None:
    kinds = ["a", "b", "c"]
    for kind in kinds * 2:
        bury(conn, SIZE, kind=kind)
    groups = column(conn, "select id from bartleby.failure_group order by id")
    assert len(groups) == 3
    for boundary in boundaries:
        killer.killed(boundary, "merge", groups=groups[:2], into=groups[2])
        more = killer.killed(boundary, "regroup")
        sound(conn)
        if not more:
            break
        killer.run("merge", groups=groups[:2], into=groups[2])
        killer.run("regroup")
        assert column(conn, "select distinct group_id from bartleby.dead_letter") == [groups[2]]
        conn.execute("select bartleby.remove_rule(id, 'ana', 'again') from bartleby.group_rule")
        killer.run("regroup")
        shared = conn.execute("select group_id, count(*) from bartleby.dead_letter group by 1 order by 1").fetchall()
        assert shared == [(each, 2 * SIZE) for each in groups]
        sound(conn)
    assert boundary > 10


def test_killed_pruning_takes_only_old_letters(conn: Connection, killer: Killer, boundaries: Iterator[int]) -> None:
    for rounds, boundary in enumerate(boundaries, 1):  # noqa: B007 - both are used afterwards
        ids = bury(conn, 3 * SIZE)
        old, kept = ids[: 2 * SIZE], ids[2 * SIZE :]
        aged = "update bartleby.dead_letter set status_at = status_at - interval '5 years' where message_id = any (%s)"
        conn.execute(aged.encode(), [old])
        before = letters(conn, kept)
        killed = killer.killed(boundary, "prune")
        sound(conn)
        killer.run("prune")
        assert not column(conn, "select message_id from bartleby.dead_letter where message_id = any (%s)", old)
        assert not column(conn, "select message_id from bartleby.attempt where message_id = any (%s)", old)
        assert letters(conn, kept) == before
        if not killed:
            break
    assert boundary > 10
    expired: LiteralString = """
        select sum((data ->> 'unresolved')::integer) from bartleby.event
        where type = 'io.bartleby.dead_letter.expired'"""
    assert value(conn, expired) == rounds * 2 * SIZE


# `bartleby replay`

LETTERS = 6
PLACES = 8
COMMAND = [*PROGRAM, "replay", f"queue:{QUEUE}", "--reason", "fixed", "--yes", "--json"]
DONE, NOTHING_LEFT, IN_PART = 0, 1, 3


def test_replay_command_can_be_killed_and_repeated(conn: Connection, server: dev.Server, dsn: str) -> None:
    create(conn)
    ids = bury(conn, LETTERS)
    with consuming(dsn) as consumer:
        code, boundaries = run_replay(server, dsn, None)
    assert (code, consumer.runs) == (DONE, dict.fromkeys(ids, 1))
    for boundary in dice("replay").sample(range(1, boundaries), min(PLACES, boundaries - 1)):
        ids = bury(conn, LETTERS)
        with consuming(dsn) as consumer:
            code, _ = run_replay(server, dsn, boundary)
            if code == -signal.SIGKILL:  # the results may come in fewer pieces this time
                code, _ = run_replay(server, dsn, None)
            finish(conn)  # what was left behind, as any worker would
        assert code in {DONE, NOTHING_LEFT, IN_PART}
        assert consumer.runs == dict.fromkeys(ids, 1)
        assert column(conn, "select distinct status from bartleby.dead_letter") == ["resolved"]
        sound(conn)


def run_replay(server: dev.Server, dsn: str, boundary: int | None) -> tuple[int, int]:
    """Run the command; return its exit code and how many boundaries there were."""
    with opened(Trap(server.port, boundary)) as wire:
        environment = {**os.environ, "BARTLEBY_DSN": wire.dsn(dsn), "BARTLEBY_ACTOR": "ana"}
        with subprocess.Popen(COMMAND, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            wire.victim.set_result(process.pid)
            output = process.communicate(timeout=60)
        assert process.returncode in {-signal.SIGKILL, DONE, NOTHING_LEFT, IN_PART}, output
        assert b"Traceback" not in output[1], output
        return process.returncode, wire.boundaries


# Backends and servers

MANY = 120
KILLS, CRASHES = 20, 8
# Steps are so quick that hardly one would be hit.
SLOW = """
create function slowly() returns trigger language plpgsql as $$ begin perform pg_sleep(0.01); return null; end $$;
create trigger a_slowly before update on bartleby.dead_letter for each statement execute function slowly();
create trigger z_slowly after update on bartleby.replay for each statement execute function slowly();
create trigger zz_slowly after insert on bartleby.log for each statement execute function slowly();"""


def test_plan_survives_backends_that_are_terminated(conn: Connection, dsn: str) -> None:
    create(conn)
    conn.execute(SLOW)
    rng, killed = dice("backends"), 0
    while killed < KILLS:
        ids = bury(conn, MANY)
        replay_id = started(conn, ids)
        with persistent(dsn, replay_id) as running:
            while running.is_alive() and counts(conn, replay_id)["status"] == "running":
                time.sleep(rng.random() * 0.2)
                killed += terminate(conn)
        all_done(conn, dsn, replay_id, ids)


def test_plan_survives_a_server_that_crashes(scratch: Path) -> None:
    rng = dice("crashes")
    with OwnServer(scratch) as server:
        with server.connect() as conn:
            create(conn)
            conn.execute(SLOW)
            ids = bury(conn, MANY)
            replay_id = started(conn, ids, rate=MANY / (1.5 * CRASHES))
        with persistent(server.dsn, replay_id) as running:
            for _ in range(CRASHES):
                time.sleep(0.3 + rng.random())
                server.stop_at_once()
                server.start_again()
            until(lambda: not running.is_alive(), "the plan does not go on", 60)
        with server.connect() as conn:
            all_done(conn, server.dsn, replay_id, ids)


@contextlib.contextmanager
def persistent(dsn: str, replay_id: int) -> Iterator[threading.Thread]:
    """Run a plan to its end, through every error."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            with contextlib.suppress(psycopg.Error, BartlebyError), Client(dsn) as client:
                operator = Operator(client, "ana")
                while operator.plan(replay_id).status == "running" and not stop.is_set():
                    client.advance_replays(10, replay_id=replay_id)
                return
            time.sleep(0.02)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join(30)


def terminate(conn: Connection) -> int:
    """Terminate the backends that make a step; return how many."""
    query: LiteralString = """
        select count(pg_terminate_backend(pid)) from pg_stat_activity
        where datname = current_database() and state = 'active' and query like '%%bartleby.advance_replays%%'
          and pid <> pg_backend_pid()"""
    return int(value(conn, query))


def all_done(conn: Connection, dsn: str, replay_id: int, ids: list[int]) -> None:
    with consuming(dsn) as consumer:
        pass
    finish(conn)
    assert consumer.runs == dict.fromkeys(ids, 1)
    assert counts(conn, replay_id) == {"status": "finished", "items": MANY, "done": MANY}
    sound(conn)
