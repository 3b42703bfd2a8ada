"""Processes that run a plan or take an action are killed at every boundary of every statement; servers too.

Nothing is lost or done twice.
"""

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from bartleby import Client, dev
from bartleby.errors import BartlebyError
from bartleby.operations import Operator
from tests.kit import plans
from tests.kit.own_server import OwnServer
from tests.kit.sql import Connection, value
from tests.kit.worker import until
from tests.nightly.chaos import actors
from tests.nightly.chaos.actors import Killer
from tests.nightly.chaos.replay_stage import consuming, counts, die_in_orders, finish, open_queue, sound
from tests.nightly.chaos.stage import SEED

SIZE, MOST = 5, 150
pytestmark = [pytest.mark.timeout(600), pytest.mark.own_database]


@pytest.fixture
def killer(conn: Connection, server: dev.Server, dsn: str) -> Killer:
    open_queue(conn)
    return Killer(server.port, dsn)


@pytest.fixture(params=["one statement", "begin, statement, commit"])
def in_either_way(request: pytest.FixtureRequest, conn: Connection) -> None:
    """Repeat the test where a call is a transaction of three statements, each with its boundaries."""
    if request.param != "one statement":
        # with a default isolation that claims cannot use, clients make a transaction of every call
        name = conn.info.dbname
        conn.execute(f"alter database {name} set default_transaction_isolation = 'repeatable read'".encode())


def boundaries(conn: Connection) -> Iterator[tuple[int, list[int]]]:
    """Yield each boundary with letters of its own, all buried first: later claims would take what was replayed."""
    buried = die_in_orders(conn, SIZE * MOST)
    for boundary in range(1, MOST):
        yield boundary, buried[SIZE * (boundary - 1) : SIZE * boundary]
    raise AssertionError("an actor does not come to its end")


def replayed_once(conn: Connection, dsn: str, ids: list[int]) -> None:
    """Handle what is alive, and check that each ran once and is where it belongs: half of it dies again."""
    with consuming(dsn, dies=lambda message: "again" if message % 2 else None) as consumer:
        pass
    assert consumer.runs == dict.fromkeys(ids, 1)
    finish(conn)
    found = conn.execute(
        "select message_id, status, cycle, jsonb_array_length(failure_history) from bartleby.dead_letter"
        " where message_id = any (%s) order by 1",
        [ids],
    ).fetchall()
    assert found == [(each, "dead", 2, 1) if each % 2 else (each, "resolved", 1, 0) for each in sorted(ids)]
    sound(conn)


@pytest.mark.parametrize("runner", [actors.drive, actors.run_as_a_worker])
def test_plan_whose_runner_is_killed_replays_each_letter_once(
    conn: Connection, dsn: str, killer: Killer, in_either_way: None, runner: Callable[..., None]
) -> None:
    planned: dict[int, list[int]] = {}
    for boundary, ids in boundaries(conn):
        replay_id = plans.started(conn, ids)
        planned[replay_id] = ids
        conn.execute("delete from bartleby.duty")  # as if it had lapsed
        if not killer.killed(boundary, runner, replay_id, *([dsn] if runner is actors.run_as_a_worker else [])):
            break
        killer.run(actors.drive, replay_id)
        assert counts(conn, replay_id)["status"] == "settling"
    replayed_once(conn, dsn, list(itertools.chain(*planned.values())))
    for replay_id, ids in planned.items():
        dead = sum(each % 2 for each in ids)
        expected = {"status": "finished", "items": SIZE, "done": SIZE - dead, "died_again": dead}
        assert counts(conn, replay_id) == expected


@pytest.mark.parametrize("actor", [actors.plan_and_start, actors.replay_at_once])
def test_replay_that_is_killed_can_be_repeated(
    conn: Connection, dsn: str, killer: Killer, in_either_way: None, actor: Callable[..., None]
) -> None:
    used = list[int]()
    for boundary, ids in boundaries(conn):
        used += ids
        if not killer.killed(boundary, actor, ids):
            break
        sound(conn)
        killer.run(actor, ids)
    partial = "select from bartleby.replay where hash is null or items <> %s"
    assert conn.execute(partial, [SIZE]).rowcount == 0
    conn.execute("select bartleby.cancel_replay(id, 'ana', 'left') from bartleby.replays where status = 'draft'")
    replayed_once(conn, dsn, used)


@pytest.mark.parametrize("fixed", [True, False])
def test_plan_survives_repeated_kills_while_consumers_work(
    conn: Connection, dsn: str, killer: Killer, fixed: bool
) -> None:
    rng, ids, kills = random.Random(SEED), die_in_orders(conn, 120), 0
    replay_id = plans.started(conn, ids, window=20, canary=5)
    with consuming(dsn, dies=lambda _: None if fixed else "still") as consumer:
        while counts(conn, replay_id)["status"] in {"running", "settling"}:
            kills += killer.killed(rng.randrange(8, 40), actors.drive, replay_id, True)
    assert kills
    if fixed:
        assert consumer.runs == dict.fromkeys(ids, 1)
        assert counts(conn, replay_id) == {"status": "finished", "items": 120, "done": 120}
    else:
        assert consumer.runs == dict.fromkeys(ids[: len(consumer.runs)], 1)
        assert len(consumer.runs) <= 5
        assert counts(conn, replay_id)["status"] == "aborted"
    sound(conn)


def test_killed_bulk_change_can_be_repeated(conn: Connection, killer: Killer) -> None:
    used = 0
    for verb, before, status, held in (
        ("discard", None, "discarded", False),
        ("restore", "discard", "dead", False),
        ("hold", None, "dead", True),
        ("release", "hold", "dead", False),
    ):
        for boundary in itertools.count(1):
            ids = die_in_orders(conn, SIZE)
            used += SIZE
            if before:
                plans.change(conn, before, *ids)
            killed = killer.killed(boundary, actors.change, ids, verb)
            if killed:
                killer.run(actors.change, ids, verb)
            state = "select distinct status, held_at is not null from bartleby.dead_letter where message_id = any (%s)"
            assert conn.execute(state, [ids]).fetchall() == [(status, held)]
            if not killed:
                break
        assert boundary > 10
        audited = "select sum(n.value::integer) from bartleby.audit, jsonb_each_text(after) n where actor = 'ana'"
        assert value(conn, audited) == used
        sound(conn)


# Servers

MANY, CRASHES = 120, 8
# Steps are so quick that hardly one would be hit.
SLOW = """
create function slowly() returns trigger language plpgsql as $$ begin perform pg_sleep(0.01); return null; end $$;
create trigger a_slowly before update on bartleby.dead_letter for each statement execute function slowly();
create trigger z_slowly after update on bartleby.replay for each statement execute function slowly();
create trigger zz_slowly after insert on bartleby.log for each statement execute function slowly();"""


def test_plan_survives_a_server_that_crashes(scratch: Path) -> None:
    rng = random.Random(SEED)
    with OwnServer(scratch) as server:
        with server.connect() as conn:
            open_queue(conn)
            conn.execute(SLOW)
            ids = die_in_orders(conn, MANY)
            replay_id = plans.started(conn, ids, rate=MANY / (1.5 * CRASHES))
        with persistent(server.dsn, replay_id) as running:
            for _ in range(CRASHES):
                time.sleep(0.3 + rng.random())
                server.stop_alone()
                server.start_again()
            until(lambda: not running.is_alive(), what="the end of the plan")
        with server.connect() as conn:
            with consuming(server.dsn) as consumer:
                pass
            finish(conn)
            assert consumer.runs == dict.fromkeys(ids, 1)
            assert counts(conn, replay_id) == {"status": "finished", "items": MANY, "done": MANY}
            sound(conn)


@contextlib.contextmanager
def persistent(dsn: str, replay_id: int) -> Iterator[threading.Thread]:
    """Run a plan to its end, through every error."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.02):
            with contextlib.suppress(psycopg.Error, BartlebyError), Client(dsn) as client:
                while Operator(client, "ana").plan(replay_id).status == "running" and not stop.is_set():
                    client.advance_replays(10, replay_id=replay_id)
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join(30)
