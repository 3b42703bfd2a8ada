"""A primary dies under load, its standby is promoted, and a worker that knows both goes on with it."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from bartleby import Bartleby, binaries, dev, schema
from tests.kit.worker import Program, until

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


@pytest.fixture
def pair(scratch: Path) -> Iterator[tuple[dev.Server, dev.Server]]:
    """A primary, and a standby without whose word nothing is committed."""
    with contextlib.ExitStack() as held:
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
    done, said = account.run([programs / "pg_basebackup", "-d", primary.dsn, "-D", home / "data", "-R", "-c", "fast"])
    assert done, said
    return home


def test_a_worker_follows_the_primary(pair: tuple[dev.Server, dev.Server], tmp_path: Path) -> None:
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
    # what was in its hands when the primary died is delivered again, and no more
    assert len(done) - len(set(done)) <= seen + 1000, f"{len(done) - len(set(done))} duplicates"
    assert first < 60


def in_hand(connection: psycopg.Connection[tuple[object, ...]]) -> int:
    row = connection.execute("select ready + leased + deferred + dead from bartleby.queues").fetchone()
    assert row is not None
    assert isinstance(row[0], int)
    return row[0]
