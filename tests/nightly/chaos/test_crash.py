"""A server that crashes: no message is lost, none is charged, and a worker follows the standby that takes over."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from psycopg.types.json import Jsonb

from bartleby import Bartleby, binaries, dev, schema
from tests.kit.clock import Clock, move_clock
from tests.kit.sql import Connection, ack, claim, create, reap, send
from tests.kit.worker import Program, state, until
from tests.nightly.chaos import actors
from tests.nightly.chaos.actors import QUEUE
from tests.nightly.chaos.ledgers import Sent, read
from tests.nightly.chaos.servers import OwnServer

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


@pytest.mark.parametrize("crash", [OwnServer.stop_at_once, OwnServer.kill, OwnServer.kill_a_backend])
def test_server_crash_loses_no_message_and_charges_none(
    scratch: Path, tmp_path: Path, crash: Callable[[OwnServer], None]
) -> None:
    with OwnServer(scratch, {"max_prepared_transactions": "5"}) as server:
        with server.connect() as conn:
            leave_work_open(conn)
        with psycopg.connect(server.dsn) as prepared:
            send(prepared, "prepared", QUEUE)
            prepared.execute("prepare transaction 'survivor'")
        open_sender = psycopg.connect(server.dsn)
        send(open_sender, "never", QUEUE)
        producer = actors.start(actors.produce, server.dsn, tmp_path, "produced", 100_000)
        until(lambda: sum(entry[0] == "C" for entry in read(tmp_path / "produced.sent")) >= 20)
        crash(server)
        producer.join(60)
        assert producer.exitcode == 1, "the producer did not notice"
        open_sender.close()
        server.start_again()
        with server.connect() as conn:
            assert conn.execute("select from pg_prepared_xacts").rowcount == 1
            conn.execute("commit prepared 'survivor'")
            Clock(conn).advance(300)
            assert {each["outcome"] for each in reap(conn)} == {"released"}
            got: Counter[str] = Counter()
            while (claimed := claim(conn, 100, QUEUE)).messages:
                assert {each["attempt"] for each in claimed.messages} == {1}
                got.update(claimed.payloads)
                ack(conn, claimed.lease)
            assert conn.execute("select from bartleby.attempts where outcome <> 'lost'").rowcount == 0
    sent = Sent.read(tmp_path)
    expected = sent.committed | {f"batch{k}" for k in range(10)} | {"suspect", "prepared"}
    assert expected <= got.keys() <= expected | sent.maybe
    assert set(got.values()) == {1}


def leave_work_open(conn: Connection) -> None:
    """Leave a batch and a suspect under lease."""
    move_clock(conn)
    create(conn, QUEUE, backoff="none", crash_budget=1)
    send(conn, "suspect", QUEUE)
    claim(conn, queue=QUEUE)
    # not the clock: it must still be before the restart
    conn.execute("update bartleby.lease set until = until - interval '2 minutes'")
    reap(conn)
    assert claim(conn, queue=QUEUE).one["attempt"] == 1
    conn.execute("select bartleby.send_many(%s, %s)", [QUEUE, Jsonb([{"payload": f"batch{k}"} for k in range(10)])])
    assert len(claim(conn, 5, QUEUE).messages) == 5


def test_lease_id_is_never_given_twice_although_claims_do_not_wait_for_the_disk(scratch: Path) -> None:
    given: list[int] = []
    with OwnServer(scratch) as server:
        for _ in range(4):
            with server.connect() as conn:
                create(conn, QUEUE)
                conn.execute("select bartleby.send_many(%s, %s)", [QUEUE, Jsonb([{"payload": 1}] * 50)])
                conn.execute("set synchronous_commit = off")
                given += [claim(conn, queue=QUEUE).lease for _ in range(50)]
                server.stop_at_once()
            server.start_again()
    assert len(set(given)) == len(given) == 200


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
    shutil.copy(primary.directory / "password", home / "password")
    for name in ("run", "data"):
        (home / name).mkdir(mode=0o700)
        account.own(home / name)
    done, output = account.run([programs / "pg_basebackup", "-d", primary.dsn, "-D", home / "data", "-R", "-c", "fast"])
    assert done, output
    return home


def test_worker_follows_the_primary(pair: tuple[dev.Server, dev.Server], tmp_path: Path) -> None:
    primary, standby = pair
    (tmp_path / "shop.py").write_text(APP)
    ledger = tmp_path / "ledger"
    both = f"postgresql://postgres:{primary.password}@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres"
    with Bartleby(f"{both}?target_session_attrs=read-write").client as client:
        client.create_queue("orders", {"lease": 2})
        client.send_many("orders", [{"payload": number} for number in range(COUNT)])
    with Program(both, "shop:app", "--log", "json", cwd=tmp_path) as worker:
        until(lambda: ledger.exists() and ledger.read_bytes().count(b"\n") > 200, what="work on the primary")
        primary.stop("immediate")
        seen = ledger.read_bytes().count(b"\n")
        with psycopg.connect(standby.dsn, autocommit=True) as conn:
            conn.execute("alter system reset synchronous_standby_names")
            conn.execute("select pg_reload_conf(), pg_promote()")
            send(conn, -1, "orders")
            until(lambda: b"-1\n" in ledger.read_bytes(), what="a message that only the new primary knows")
            until(lambda: state(conn) == (0, 0, 0, 0), what="an empty queue")
        worker.term()
        assert worker.end() == 0
    done = [int(line) for line in ledger.read_text().split()]
    assert set(done) == set(range(-1, COUNT)), "lost"
    # at most what the worker held when the primary died is delivered again
    assert len(done) - len(set(done)) <= seen + 1000, f"{len(done) - len(set(done))} duplicates"
