"""Backends that are terminated in the middle of a step, and a server that crashes: the plan goes on where it was."""

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from bartleby import Client, dev
from bartleby.errors import BartlebyError
from bartleby.operations import Operator
from tests.kit.database import install
from tests.nightly.chaos.replay_stage import (
    Connection,
    bury,
    consuming,
    counts,
    create,
    dice,
    finish,
    sound,
    started,
    until,
)

LETTERS = 120
LONG = pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(300)], id="long")

# Steps are so quick that hardly one would be hit.
SLOW = """
create function slowly() returns trigger language plpgsql as $$ begin perform pg_sleep(0.01); return null; end $$;
create trigger a_slowly before update on bartleby.dead_letter for each statement execute function slowly();
create trigger z_slowly after update on bartleby.replay for each statement execute function slowly();
create trigger zz_slowly after insert on bartleby.log for each statement execute function slowly();"""


@contextlib.contextmanager
def persistent(dsn: str, replay_id: int) -> Iterator[threading.Thread]:
    """Somebody who runs a plan through every trouble, to its end."""
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
    query = """
        select count(pg_terminate_backend(pid)) from pg_stat_activity
        where datname = current_database() and state = 'active' and query like '%bartleby.advance_replays%'
          and pid <> pg_backend_pid()"""
    ((killed,),) = conn.execute(query).fetchall()
    return int(killed)


@pytest.mark.parametrize("rounds", [1, LONG])
def test_backends_that_are_terminated(conn: Connection, dsn: str, rounds: int) -> None:
    create(conn)
    conn.execute(SLOW)
    rng, killed, wanted = dice("backends"), 0, 3 * rounds
    while killed < wanted:  # in one round it may be none: that depends on who gets the processor when
        ids = bury(conn, LETTERS)
        replay_id = started(conn, ids)
        with persistent(dsn, replay_id) as running:
            while running.is_alive() and counts(conn, replay_id)["status"] == "running":
                time.sleep(rng.random() * 0.2)
                killed += terminate(conn)
        with consuming(dsn) as consumer:
            pass
        finish(conn)
        assert consumer.runs == dict.fromkeys(ids, 1)
        assert counts(conn, replay_id) == {"status": "finished", "items": LETTERS, "done": LETTERS}
    sound(conn)


@contextlib.contextmanager
def private_server(scratch: Path) -> Iterator[Callable[[], dev.Server]]:
    folder = Path(tempfile.mkdtemp(prefix="bartleby-replay-", dir=scratch))
    running: list[dev.Server] = []

    def start() -> dev.Server:
        running.append(dev.start(folder))
        return running[-1]

    try:
        yield start
    finally:
        if running:
            running[-1].stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("crashes", [2, LONG])
def test_a_server_that_crashes_in_the_middle_of_a_plan(scratch: Path, crashes: int) -> None:
    rng = dice("crashes")
    with private_server(scratch) as start:
        server = start()
        install(server.dsn)
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            create(conn)
            conn.execute(SLOW)
            ids = bury(conn, LETTERS)
            replay_id = started(conn, ids, rate=LETTERS / (1.5 * crashes))
        with persistent(server.dsn, replay_id) as running:
            for _ in range(crashes):
                time.sleep(0.3 + rng.random())
                server.stop("immediate")
                server = start()
            until(lambda: not running.is_alive(), "the plan does not go on", 30)
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            with consuming(server.dsn) as consumer:
                pass
            finish(conn)
            assert consumer.runs == dict.fromkeys(ids, 1)
            assert counts(conn, replay_id) == {"status": "finished", "items": LETTERS, "done": LETTERS}
            sound(conn)
