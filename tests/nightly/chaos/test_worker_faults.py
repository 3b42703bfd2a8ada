"""Workers under one kind of fault at a time: nothing is lost, nobody else settles, nobody innocent is charged."""

import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import psycopg
import pytest

from bartleby import dev
from tests.kit.database import install
from tests.nightly.chaos import worker_profiles
from tests.nightly.chaos.worker_ledger import Book, Report
from tests.nightly.chaos.worker_profiles import NOISE, between, innocent, under_load
from tests.nightly.chaos.worker_proxy import Proxy, proxy
from tests.nightly.chaos.worker_stage import LEASE, REAP, Connection, Stage, log, send, stage, until
from tests.nightly.chaos.worker_words import SLOW, SWIFT

LONG = pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(400)], id="long")
BACK = 3.0
"""Within so many seconds after the server is back something is done."""

DEAF = 5.0
"""How long a worker may believe that it would hear of a message."""


@pytest.mark.parametrize("seconds", [6, LONG])
def test_workers_that_are_killed(dsn: str, tmp_path: Path, seconds: float) -> None:
    with stage(dsn, tmp_path) as on:
        worker_profiles.killed(on, seconds)


@pytest.mark.parametrize("seconds", [7, LONG])
def test_workers_that_sleep_longer_than_their_leases(dsn: str, tmp_path: Path, seconds: float) -> None:
    with stage(dsn, tmp_path) as on:
        worker_profiles.frozen(on, seconds)


@pytest.mark.parametrize("alone", [False, True])
def test_a_worker_that_falls_asleep_directly_before_a_handler(dsn: str, tmp_path: Path, alone: bool) -> None:
    with stage(dsn, tmp_path) as on, on.admin() as conn:
        send(on, SWIFT, [{"v": "late", "ms": 10, "stop": True}])
        if alone:
            conn.execute("select bartleby.claim(%s, 'nobody', 1, '100 milliseconds')", [SWIFT])
        since, pid = time.monotonic(), on.start()
        until(lambda: asleep(pid), on.logs)
        (lease,) = on.column("select id from bartleby.lease where not isempty(pending) and unconfirmed is null")
        until(lambda: lease in on.column("select lease_id from bartleby.reap()"), on.logs)
        on.fault("stopped", since, pid)
        os.kill(pid, signal.SIGCONT)
        report = innocent(on)
        assert report.explained == {"stopped": 1}
        first, second = Book(on.folder).runs
        assert first.begun > on.faults[0].until
        assert (first.lease, first.solo, first.settled()) == (lease, alone, None)
        assert (second.attempt, second.solo) == (2 if alone else 1, True)


def asleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("seconds", [5, LONG])
def test_workers_that_are_told_to_stop(dsn: str, tmp_path: Path, seconds: float) -> None:
    with stage(dsn, tmp_path) as on:
        worker_profiles.told_to_stop(on, seconds)


@pytest.mark.parametrize("seconds", [5, LONG])
def test_connections_that_are_cut_by_the_server(dsn: str, tmp_path: Path, seconds: float) -> None:
    with stage(dsn, tmp_path) as on:
        worker_profiles.connections_cut(on, seconds)


def stop_at_once(server: dev.Server) -> None:
    server.stop("immediate")


def kill_a_backend(server: dev.Server) -> None:
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        query = "select pid from pg_stat_activity where application_name = 'bartleby settles' order by random() limit 1"
        for (pid,) in conn.execute(query).fetchall() or [(conn.info.backend_pid,)]:
            os.kill(pid, signal.SIGKILL)
        until(lambda: broken(conn), "a killed backend harms nobody")


def broken(conn: Connection) -> bool:
    try:
        conn.execute("select")
    except psycopg.OperationalError:
        return True
    return False


@pytest.mark.parametrize("seconds", [8, LONG])
def test_a_server_that_crashes(scratch: Path, tmp_path: Path, seconds: float) -> None:
    with CrashingServer(scratch) as server, stage(server.running.dsn, tmp_path) as on:
        with under_load(on, 2):
            for number, _ in enumerate(between(seconds, on, 1, 3)):
                server.crash(on, [stop_at_once, kill_a_backend][number % 2])
                time.sleep(BACK)
        first_completions(on, innocent(on), NOISE if seconds == 8 else 0)


class CrashingServer:
    """A server of one test, that is started again whenever it was brought down."""

    def __init__(self, scratch: Path) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="bartleby-worker-", dir=scratch))

    def __enter__(self) -> Self:
        self.running = dev.start(self._home)
        install(self.running.dsn)
        return self

    def __exit__(self, *_: object) -> None:
        self.running.stop("immediate")
        shutil.rmtree(self._home, ignore_errors=True)

    def crash(self, on: Stage, how: Callable[[dev.Server], None]) -> None:
        since = time.monotonic()
        how(self.running)
        time.sleep(on.rng.choice([0, 0.5, LEASE]))
        again = dev.start(self._home)
        if again.started:
            self.running = again
        until(lambda: can_connect(again.dsn), "the server does not come back")
        on.fault("server", since)


def can_connect(dsn: str) -> bool:
    try:
        psycopg.connect(dsn).close()
    except psycopg.OperationalError:
        return False
    return True


def first_completions(on: Stage, report: Report, noise: float) -> None:
    """Something that began after the server came back is settled soon; a busy machine may add to it, not each time."""
    book = Book(on.folder)
    waits = []
    for fault in on.faults:
        fresh = [
            settling.answered
            for run in book.runs
            if run.begun > fault.until and (settling := run.settled()) and settling.answered
        ]
        assert fresh, report
        waits.append(min(fresh) - fault.until)
        log.info("first completion %.2f s after the server was back", waits[-1])
    assert statistics.median(waits) < BACK, waits
    assert max(waits) < BACK + noise, waits


def ports(conn: Connection, name: str) -> set[int]:
    query = "select client_port from pg_stat_activity where datname = current_database() and application_name = %s"
    return {row[0] for row in conn.execute(query, [f"bartleby {name}"]).fetchall()}


def through(dsn: str, server: dev.Server, network: Proxy) -> str:
    return dsn.replace(f":{server.port}/", f":{network.port}/")


@pytest.mark.parametrize("seconds", [8, LONG])
def test_networks_that_swallow_everything_or_all_answers(
    dsn: str, server: dev.Server, tmp_path: Path, seconds: float
) -> None:
    with proxy(server.port) as first, proxy(server.port) as second, stage(dsn, tmp_path) as on:
        networks = [first, second]
        with under_load(on, [through(dsn, server, each) for each in networks], ms=50) as pids:
            for _ in between(seconds, on, 0.2, 1):
                since, number = time.monotonic(), on.rng.randrange(2)
                networks[number].hang(mute=on.rng.random() < 0.5)
                time.sleep(on.rng.choice([0.1, LEASE / 2, LEASE + REAP]))
                networks[number].heal()
                on.fault("network", since, pids[number])
        innocent(on, 70 + 2 * seconds)


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "hanging"])
def test_a_listener_that_hears_nothing(dsn: str, server: dev.Server, tmp_path: Path, cut: bool) -> None:
    with proxy(server.port) as network, stage(dsn, tmp_path) as on, on.admin() as conn:
        send(on, SWIFT, [{"v": "first"}])
        on.begun(on.start(through=through(dsn, server, network)))
        until(lambda: ports(conn, "listener"), "nobody listens")
        time.sleep(1)
        assert (network.cut if cut else network.hang)(ports(conn, "listener")) == 1
        for number in range(3):
            sent = time.monotonic()
            send(on, SWIFT, [{"v": f"later{number}"}])
            until(lambda value=f"later{number}": Book(on.folder).done(value), "not delivered", 40)  # type: ignore[misc]
            log.info("delivered after %.2f s", time.monotonic() - sent)
            assert time.monotonic() - sent < DEAF + NOISE
        innocent(on)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_connections_that_hang_for_ever_are_given_up(dsn: str, server: dev.Server, tmp_path: Path) -> None:
    with proxy(server.port) as network, stage(dsn, tmp_path) as on:
        with under_load(on, [through(dsn, server, network)] * 2, ms=300, rate=40) as (victim, _):
            since = time.monotonic()
            network.hang()
            network.let_through()
            on.fault("network", since)
            on.kill(victim)
            until(lambda: on.told("lease.reaped"), on.logs, 60)
            log.info("a lease was taken back %.2f s after the network had died", time.monotonic() - since)
            assert time.monotonic() - since < 15 + NOISE
            time.sleep(10)
        report = on.settle()
        assert not report.violations(), report
        fresh = [
            each.answered for each in Book(on.folder).tries if each.how == "K" and (each.answered or 0) > since + 1
        ]
        log.info("first settlement %.2f s after the network had died", min(filter(None, fresh)) - since)
        assert min(filter(None, fresh)) - since < 15 + NOISE


def test_a_message_that_has_to_run_alone_gets_its_turn_among_slow_ones(dsn: str, tmp_path: Path) -> None:
    with stage(dsn, tmp_path) as on:
        send(on, SLOW, [{"v": f"slow{k}", "ms": on.rng.uniform(1100, 1600) * LEASE} for k in range(100)])
        send(on, SWIFT, [{"v": "suspect", "ms": 300}])
        victim = on.start(queues=[SWIFT])
        on.begun(victim)
        on.kill(victim)
        on.start()
        seconds = until(lambda: Book(on.folder).done("suspect"), on.logs, 60)
        log.info("it ran alone after %.2f s", seconds)
