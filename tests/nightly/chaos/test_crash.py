"""A server that crashes: no message is lost, none is charged, and a worker follows the standby that takes over."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from bartleby import Bartleby, binaries, dev, schema
from tests.kit.clock import move_clock
from tests.kit.worker import Program, until
from tests.nightly.chaos.actors import QUEUE
from tests.nightly.chaos.ledgers import read
from tests.nightly.chaos.servers import OwnServer

Connection = psycopg.Connection[tuple[Any, ...]]
ROOT = Path(__file__).parents[3]
APP = """
import os
from bartleby import Bartleby, Message

app = Bartleby()
ledger = os.open("ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


@app.handler("orders", concurrency=5)
async def handle(message: Message) -> None:
    os.write(ledger, f"{message.payload}\\n".encode())
"""
COUNT = 3000


@pytest.mark.parametrize("crash", [OwnServer.stop_at_once, OwnServer.kill], ids=["stopped at once", "killed"])
def test_server_crash_loses_no_message_and_charges_none(
    scratch: Path, tmp_path: Path, crash: Callable[[OwnServer], None]
) -> None:
    ledger = tmp_path / "produce.ledger"
    with OwnServer(scratch, {"max_prepared_transactions": "5"}) as server:
        with server.connect() as conn:
            suspect = leave_work_open(conn)
        with psycopg.connect(server.dsn) as prepared:
            prepared.execute("select bartleby.send(%s, %s)", [QUEUE, Jsonb("prepared")])
            prepared.execute("prepare transaction 'survivor'")
        open_sender = psycopg.connect(server.dsn)
        open_sender.execute("select bartleby.send(%s, %s)", [QUEUE, Jsonb("never")])
        words = ["produce", server.dsn, ledger, "0", ledger.with_suffix(".stop"), "100000"]
        command = [sys.executable, "-m", "tests.nightly.chaos.actors", *map(str, words)]
        producer = subprocess.Popen(command, cwd=ROOT)
        until(lambda: ledger.exists() and sum(word == "C" for word, _, _ in read(ledger)) >= 20)
        crash(server)
        assert producer.wait(60) != 0, "the producer did not notice"
        open_sender.close()
        server.start_again()
        with server.connect() as conn:
            assert conn.execute("select from pg_prepared_xacts").rowcount == 1
            conn.execute("commit prepared 'survivor'")
            after_the_crash(conn, suspect, ledger)


def leave_work_open(conn: Connection) -> int:
    """Leave a batch and a suspect under lease; return the id of the suspect."""
    move_clock(conn)
    conn.execute("select bartleby.create_queue(%s, %s)", [QUEUE, Jsonb({"backoff": "none", "crash_budget": 1})])
    conn.execute("select bartleby.send(%s, %s)", [QUEUE, Jsonb("suspect")])
    query = "select message_id, attempt from bartleby.claim(%s, 'w', 1)"
    ((suspect, _),) = conn.execute(query, [QUEUE]).fetchall()
    # not the clock: it must still be before the restart
    conn.execute("update bartleby.lease set until = until - interval '2 minutes'")
    conn.execute("select bartleby.reap()")
    assert conn.execute(query, [QUEUE]).fetchall() == [(suspect, 1)]
    conn.execute("select bartleby.send_many(%s, %s)", [QUEUE, Jsonb([{"payload": f"batch{k}"} for k in range(10)])])
    assert conn.execute("select from bartleby.claim(%s, 'w', 5)", [QUEUE]).rowcount == 5
    return int(suspect)


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
    lost, invented = expected - set(got), set(got) - expected - maybe
    assert not lost
    assert not invented
    assert set(got.values()) == {1}
    assert conn.execute("select from bartleby.attempts where outcome <> 'lost'").rowcount == 0


def test_lease_id_is_never_given_twice_although_claims_do_not_wait_for_the_disk(scratch: Path) -> None:
    query = "select lease_id from bartleby.claim(%s, 'w')"
    given: set[int] = set()
    with OwnServer(scratch) as server:
        for _ in range(4):
            with server.connect() as conn:
                conn.execute("select bartleby.create_queue(%s)", [QUEUE])
                conn.execute("select bartleby.send_many(%s, %s)", [QUEUE, Jsonb([{"payload": 1}] * 50)])
                conn.execute("set synchronous_commit = off")
                leases = [conn.execute(query, [QUEUE]).fetchone() for _ in range(50)]
                server.stop_at_once()
            server.start_again()
            fresh = {lease[0] for lease in leases if lease is not None}
            assert len(fresh) == 50
            assert not fresh & given
            given |= fresh


def test_killed_backend_restarts_the_server_and_charges_no_message(scratch: Path) -> None:
    with OwnServer(scratch) as server:
        with server.connect() as conn:
            suspect = leave_work_open(conn)
            with server.connect() as witness:
                os.kill(conn.info.backend_pid, signal.SIGKILL)
                # the server accepts sessions until it has noticed, and then cuts all of them
                with pytest.raises(psycopg.OperationalError):
                    witness.execute("select pg_sleep(60)")
        until(lambda: can_connect(server.dsn))
        with server.connect() as conn:
            conn.execute("update bartleby.lease set until = until - interval '2 minutes'")
            outcomes = conn.execute("select outcome from bartleby.reap()").fetchall()
            assert set(outcomes) == {("released",)}
            assert conn.execute("select from bartleby.dead_letters").rowcount == 0
            query = "select attempts from bartleby.messages where message_id = %s"
            assert conn.execute(query, [suspect]).fetchall() == [(0,)]


def can_connect(dsn: str) -> bool:
    try:
        psycopg.connect(dsn).close()
    except psycopg.OperationalError:
        return False
    return True


# Failover


@pytest.fixture
def pair(scratch: Path) -> Iterator[tuple[dev.Server, dev.Server]]:
    """A primary, and a synchronous standby."""
    with ExitStack() as held:
        homes = [Path(tempfile.mkdtemp(prefix=f"bartleby-{name}-", dir=scratch)) for name in ("primary", "standby")]
        for home in homes:
            held.callback(shutil.rmtree, home, ignore_errors=True)
        primary = dev.start(homes[0])
        held.callback(primary.stop, "immediate")
        standby = dev.start(copied(primary, homes[1]))
        held.callback(standby.stop, "immediate")
        with psycopg.connect(primary.dsn, autocommit=True) as connection:
            schema.install(connection)
            connection.execute("alter system set synchronous_standby_names = '*'")
            connection.execute("select pg_reload_conf()")
        yield primary, standby


def copied(primary: dev.Server, home: Path) -> Path:
    found = dev.find_binaries()
    assert found is not None
    home.chmod(0o711)
    account = binaries.account_for(home)
    programs, _ = binaries.runnable(Path(found), primary.directory, account)
    (home / "lock").touch()
    (home / "run").mkdir(mode=0o700)
    account.own(home / "run")
    shutil.copy(primary.directory / "password", home / "password")
    (home / "data").mkdir(mode=0o700)
    account.own(home / "data")
    done, output = account.run([programs / "pg_basebackup", "-d", primary.dsn, "-D", home / "data", "-R", "-c", "fast"])
    assert done, output
    return home


def test_worker_follows_the_primary(pair: tuple[dev.Server, dev.Server], tmp_path: Path) -> None:
    primary, standby = pair
    (tmp_path / "shop.py").write_text(APP)
    ledger = tmp_path / "ledger"
    both = f"postgresql://postgres:{primary.password}@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres"
    app = Bartleby(f"{both}?target_session_attrs=read-write")
    app.client.create_queue("orders", {"lease": 2})
    app.send_many("orders", [{"payload": number} for number in range(COUNT)])
    app.client.close()
    with Program(both, "shop:app", "--log", "json", cwd=tmp_path) as worker:
        until(lambda: ledger.exists() and ledger.read_bytes().count(b"\n") > 200, what="work on the primary")
        primary.stop("immediate")
        seen = ledger.read_bytes().count(b"\n")
        with psycopg.connect(standby.dsn, autocommit=True) as connection:
            connection.execute("alter system reset synchronous_standby_names")
            connection.execute("select pg_reload_conf()")
            connection.execute("select pg_promote()")
            promoted = time.monotonic()
            connection.execute("select bartleby.send('orders', '-1')")
            until(lambda: b"-1\n" in ledger.read_bytes(), what="a message that only the new primary knows")
            until(lambda: in_hand(connection) == 0, seconds=60, what="an empty queue")
        first = time.monotonic() - promoted
        worker.term()
        assert worker.end() == 0
    done = [int(line) for line in ledger.read_text().split()]
    assert set(done) == set(range(-1, COUNT)), "lost"
    # at most what the worker held when the primary died is delivered again
    assert len(done) - len(set(done)) <= seen + 1000, f"{len(done) - len(set(done))} duplicates"
    assert first < 60


def in_hand(connection: psycopg.Connection[tuple[object, ...]]) -> int:
    row = connection.execute("select ready + leased + deferred + dead from bartleby.queues").fetchone()
    assert row is not None
    assert isinstance(row[0], int)
    return row[0]
