"""Servers that crash: no message is lost, no lease is given twice, and workers follow the standby that takes over."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from psycopg.types.json import Jsonb

from bartleby import binaries, dev, schema
from tests.kit.own_server import OwnServer
from tests.kit.sql import claim, create
from tests.nightly.chaos.actors import LEASE
from tests.nightly.chaos.ledgers import Book
from tests.nightly.chaos.stage import Stage, between, staged, under_load

SECONDS = 25.0
pytestmark = pytest.mark.timeout(900)


def wait_for_work(on: Stage) -> None:
    """Wait until something that began after now is settled."""
    back = time.monotonic()
    on.until(lambda: any(run.begun > back and run.settled() for run in Book(on.folder).runs))


def test_promises_hold_when_the_server_crashes(scratch: Path, tmp_path: Path) -> None:
    with OwnServer(scratch) as server, staged(server.dsn, tmp_path) as on:
        with under_load(on, 2):
            for number, _ in enumerate(between(SECONDS, on, 1, 3)):
                since = time.monotonic()
                (server.stop_alone, server.kill_a_backend, server.kill)[number % 3]()
                time.sleep(on.rng.choice([0, 0.5, LEASE]))
                server.start_again()
                on.fault("server", since)
                wait_for_work(on)
        on.innocent()


def test_lease_id_is_never_given_twice_although_claims_do_not_wait_for_the_disk(scratch: Path) -> None:
    given: list[int] = []
    with OwnServer(scratch) as server:
        for _ in range(4):
            with server.connect() as conn:
                create(conn)
                conn.execute("select bartleby.send_many('q', %s)", [Jsonb([{"payload": 1}] * 50)])
                conn.execute("set synchronous_commit = off")
                given += [claim(conn).lease for _ in range(50)]
                server.stop_alone()
            server.start_again()
    assert len(set(given)) == len(given) == 200


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


def test_workers_follow_the_primary(pair: tuple[dev.Server, dev.Server], tmp_path: Path) -> None:
    primary, standby = pair
    both = f"postgresql://postgres:{primary.password}@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres"
    with staged(f"{both}?target_session_attrs=read-write", tmp_path) as on:
        with under_load(on, [both, both]):
            since = time.monotonic()
            primary.stop("immediate")
            with psycopg.connect(standby.dsn, autocommit=True) as conn:
                conn.execute("alter system reset synchronous_standby_names")
                conn.execute("select pg_reload_conf(), pg_promote()")
            on.fault("server", since)
            wait_for_work(on)
        on.innocent()
