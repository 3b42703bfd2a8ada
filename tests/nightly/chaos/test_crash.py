"""A worker that dies of one message, and a server that dies of none: who is charged, and that nothing is lost."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from bartleby import dev
from tests.kit.clock import move_clock
from tests.kit.database import install
from tests.nightly.chaos.actors import KILLER, QUEUE
from tests.nightly.chaos.ledgers import read

Connection = psycopg.Connection[tuple[Any, ...]]
ROOT = Path(__file__).parents[3]
DEATH = 9


def start(actor: str, dsn: str, ledger: Path, quota: int = 0) -> subprocess.Popen[bytes]:
    words = [actor, dsn, str(ledger), "0", str(ledger.with_suffix(".stop")), str(quota)]
    return subprocess.Popen([sys.executable, "-m", "tests.nightly.chaos.actors", *words], cwd=ROOT)


@pytest.mark.parametrize("crash_budget", [1, 3])
def test_a_message_that_kills_its_worker_dies_alone(
    conn: Connection, dsn: str, tmp_path: Path, crash_budget: int
) -> None:
    clock = move_clock(conn)
    policy = {"crash_budget": crash_budget, "backoff": "none", "lease": 60}
    conn.execute("select bartleby.create_queue(%s, %s)", [QUEUE, Jsonb(policy)])
    values = [KILLER if k == 42 else f"innocent{k}" for k in range(100)]
    conn.execute("select bartleby.send_many(%s, %s)", [QUEUE, Jsonb([{"payload": value} for value in values])])
    deaths, ledger = 0, tmp_path / "work.ledger"
    while start("work", dsn, ledger).wait(60) == DEATH:
        deaths += 1
        clock.advance(61)
        conn.execute("select bartleby.reap()")
    assert deaths == 1 + crash_budget
    seen = Counter((value, attempt) for word, attempt, (value,) in read(ledger) if word == "A")
    assert seen == {(f"innocent{k}", 1): 1 for k in range(100) if k != 42}
    tried = [attempt for word, attempt, (value,) in read(ledger) if value == KILLER]
    assert tried == [1, *range(1, crash_budget + 1)]
    dead = conn.execute("select payload, reason, attempts, crashes from bartleby.dead_letters").fetchall()
    assert dead == [(KILLER, "crashed", crash_budget, crash_budget)]
    assert conn.execute("select from bartleby.messages").rowcount == 0
    charged = conn.execute("select payload from bartleby.attempts join bartleby.dead_letters using (message_id)"
                           " where outcome = 'crashed'").fetchall()  # fmt: skip
    assert charged == [(KILLER,)] * crash_budget
    lost = conn.execute("select from bartleby.attempts where outcome = 'lost'").rowcount
    assert lost == 100 - 42  # the killer and what stood behind it


@contextmanager
def private_server(scratch: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="bartleby-crash-", dir=scratch))
    try:
        yield folder
    finally:
        if (left := dev.running(folder)) is not None:
            left.stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)


def stop_at_once(server: dev.Server) -> None:
    server.stop("immediate")


def kill_postmaster(server: dev.Server) -> None:
    os.kill(server.pid, signal.SIGKILL)
    if server._process is not None:
        server._process.wait()


@pytest.mark.parametrize("crash", [stop_at_once, kill_postmaster], ids=lambda crash: crash.__name__)
def test_a_crash_of_the_server_loses_nothing_and_charges_nobody(
    scratch: Path, tmp_path: Path, crash: Callable[[dev.Server], None]
) -> None:
    settings = {"max_prepared_transactions": "5"}
    ledger = tmp_path / "produce.ledger"
    with private_server(scratch) as folder:
        server = dev.start(folder, settings=settings)
        install(server.dsn)
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            suspect = leave_things_open(conn, server.dsn)
        open_sender = psycopg.connect(server.dsn)
        open_sender.execute("select bartleby.send(%s, %s)", [QUEUE, Jsonb("never")])
        producer = start("produce", server.dsn, ledger, 100_000)
        wait_for_commits(ledger, 20)
        crash(server)
        assert producer.wait(60) != 0, "the producer did not notice"
        open_sender.close()
        with (
            dev.start(folder, settings=settings) as again,
            psycopg.connect(again.dsn, autocommit=True) as conn,
        ):
            assert conn.execute("select from pg_prepared_xacts").rowcount == 1
            conn.execute("commit prepared 'survivor'")
            after_the_crash(conn, suspect, ledger)


def leave_things_open(conn: Connection, dsn: str, *, prepare: bool = True) -> int:
    """A batch and a suspect under lease, and a prepared sender; return the suspect's id."""
    move_clock(conn)
    conn.execute("select bartleby.create_queue(%s, %s)", [QUEUE, Jsonb({"backoff": "none", "crash_budget": 1})])
    conn.execute("select bartleby.send(%s, %s)", [QUEUE, Jsonb("suspect")])
    query = "select message_id, attempt from bartleby.claim(%s, 'w', 1)"
    ((suspect, _),) = conn.execute(query, [QUEUE]).fetchall()
    # not the clock: it must still say a time before the restart
    conn.execute("update bartleby.lease set until = until - interval '2 minutes'")
    conn.execute("select bartleby.reap()")
    assert conn.execute(query, [QUEUE]).fetchall() == [(suspect, 1)]
    conn.execute("select bartleby.send_many(%s, %s)", [QUEUE, Jsonb([{"payload": f"batch{k}"} for k in range(10)])])
    assert conn.execute("select from bartleby.claim(%s, 'w', 5)", [QUEUE]).rowcount == 5
    if prepare:
        with psycopg.connect(dsn) as prepared:
            prepared.execute("select bartleby.send(%s, %s)", [QUEUE, Jsonb("prepared")])
            prepared.execute("prepare transaction 'survivor'")
    return int(suspect)


def wait_for_commits(ledger: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while not ledger.exists() or sum(word == "C" for word, _, _ in read(ledger)) < count:
        assert time.monotonic() < deadline, "the producer does not get on"
        time.sleep(0.01)


def after_the_crash(conn: Connection, suspect: int, ledger: Path) -> None:
    conn.execute("update public.test_clock set shift = shift + interval '5 minutes'")
    conn.execute("select bartleby.reap()")
    got: Counter[str] = Counter()
    query = "select lease_id, message_id, attempt, payload from bartleby.claim(%s, 'w', 100)"
    while rows := conn.execute(query, [QUEUE]).fetchall():
        assert {attempt for _, _, attempt, _ in rows} == {1}
        assert ("suspect" in [row[3] for row in rows]) == (suspect in [row[1] for row in rows])
        conn.execute("select bartleby.ack(%s)", [rows[0][0]])
        got.update(row[3] for row in rows)
    entries = read(ledger)
    ends = {number: word for word, number, _ in entries if word in {"C", "R"}}
    certain = {value for word, number, values in entries if word == "T" and ends.get(number) == "C" for value in values}
    maybe = {value for word, number, values in entries if word == "T" and number not in ends for value in values}
    expected = certain | {f"batch{k}" for k in range(10)} | {"suspect", "prepared"}
    lost, made_up = expected - set(got), set(got) - expected - maybe
    assert not lost
    assert not made_up
    assert set(got.values()) == {1}
    assert conn.execute("select from bartleby.attempts where outcome <> 'lost'").rowcount == 0


def test_no_lease_id_comes_twice_though_claims_do_not_wait_for_the_disk(scratch: Path) -> None:
    query = "select lease_id from bartleby.claim(%s, 'w')"
    given: set[int] = set()
    with private_server(scratch) as folder:
        for _ in range(4):
            server = dev.start(folder)
            install(server.dsn)
            with psycopg.connect(server.dsn, autocommit=True) as conn:
                conn.execute("select bartleby.create_queue(%s)", [QUEUE])
                conn.execute("select bartleby.send_many(%s, %s)", [QUEUE, Jsonb([{"payload": 1}] * 50)])
                conn.execute("set synchronous_commit = off")
                leases = [conn.execute(query, [QUEUE]).fetchone() for _ in range(50)]
                server.stop("immediate")
            fresh = {lease[0] for lease in leases if lease is not None}
            assert len(fresh) == 50
            assert not fresh & given
            given |= fresh


def test_a_killed_backend_restarts_the_server_and_charges_nobody(scratch: Path) -> None:
    with private_server(scratch) as folder, dev.start(folder) as server:
        install(server.dsn)
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            suspect = leave_things_open(conn, server.dsn, prepare=False)
            with psycopg.connect(server.dsn, autocommit=True) as witness:
                os.kill(conn.info.backend_pid, signal.SIGKILL)
                # the server lets people in until it has noticed, and then cuts everybody off
                with pytest.raises(psycopg.OperationalError):
                    witness.execute("select pg_sleep(60)")
        with connect_again(server.dsn) as conn:
            conn.execute("update bartleby.lease set until = until - interval '2 minutes'")
            outcomes = conn.execute("select outcome from bartleby.reap()").fetchall()
            assert set(outcomes) == {("released",)}
            assert conn.execute("select from bartleby.dead_letters").rowcount == 0
            ((message, attempts),) = conn.execute(
                "select message_id, attempts from bartleby.messages where message_id = %s", [suspect]
            ).fetchall()
            assert (message, attempts) == (suspect, 0)


def connect_again(dsn: str) -> Connection:
    deadline = time.monotonic() + 30
    while True:
        try:
            return psycopg.connect(dsn, autocommit=True)
        except psycopg.OperationalError:
            assert time.monotonic() < deadline, "the server does not come back"
            time.sleep(0.05)
