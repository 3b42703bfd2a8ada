"""Workers under one kind of fault at a time: no message is lost, settled by another worker, or charged unjustly."""

import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from bartleby import dev
from tests.nightly.chaos import worker_profiles
from tests.nightly.chaos.network import Proxy, opened
from tests.nightly.chaos.servers import OwnServer
from tests.nightly.chaos.worker_ledger import SLOW, SWIFT, Book, Report
from tests.nightly.chaos.worker_profiles import NOISE_SECONDS, between, innocent, under_load
from tests.nightly.chaos.worker_stage import LEASE, REAP, Connection, Stage, log, send, stage, until

SECONDS = 25.0
BACK_SECONDS = 3.0
"""Within this time after the server is back something is done."""

DEAF_SECONDS = 5.0
"""How long a worker may believe that it would hear of a message."""
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    "profile",
    [
        worker_profiles.killed, worker_profiles.frozen, worker_profiles.terminated, worker_profiles.connections_cut,
    ],
)  # fmt: skip
def test_promises_hold_when_workers_are(dsn: str, tmp_path: Path, profile: Callable[[Stage, float], None]) -> None:
    with stage(dsn, tmp_path) as on:
        profile(on, SECONDS)


@pytest.mark.parametrize("alone", [False, True])
def test_worker_stopped_directly_before_a_handler_loses_its_lease(dsn: str, tmp_path: Path, alone: bool) -> None:
    with stage(dsn, tmp_path) as on, on.admin() as conn:
        send(on, SWIFT, [{"v": "late", "ms": 10, "stop": True}])
        if alone:
            conn.execute("select bartleby.claim(%s, 'lost', 1, '100 milliseconds')", [SWIFT])
        since, pid = time.monotonic(), on.start()
        until(lambda: is_stopped(pid), on.logs)
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


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_promises_hold_when_the_server_crashes(scratch: Path, tmp_path: Path) -> None:
    with OwnServer(scratch) as server, stage(server.dsn, tmp_path) as on:
        with under_load(on, 2):
            for number, _ in enumerate(between(SECONDS, on, 1, 3)):
                since = time.monotonic()
                (server.stop_at_once, lambda: kill_a_backend(server))[number % 2]()
                time.sleep(on.rng.choice([0, 0.5, LEASE]))
                server.start_again()
                until(lambda: can_connect(server.dsn), "the server does not come back")
                on.fault("server", since)
                time.sleep(BACK_SECONDS)
        first_completions(on, innocent(on))


def kill_a_backend(server: OwnServer) -> None:
    with server.connect() as conn:
        query = "select pid from pg_stat_activity where application_name = 'bartleby settles' order by random() limit 1"
        for (pid,) in conn.execute(query).fetchall() or [(conn.info.backend_pid,)]:
            os.kill(pid, signal.SIGKILL)
        until(lambda: is_broken(conn), "the server survives a killed backend")


def is_broken(conn: Connection) -> bool:
    try:
        conn.execute("select")
    except psycopg.OperationalError:
        return True
    return False


def can_connect(dsn: str) -> bool:
    try:
        psycopg.connect(dsn).close()
    except psycopg.OperationalError:
        return False
    return True


def first_completions(on: Stage, report: Report) -> None:
    """Check that something that began after the server came back is settled soon, in most cases."""
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
    assert statistics.median(waits) < BACK_SECONDS, waits
    assert max(waits) < BACK_SECONDS + NOISE_SECONDS, waits


def ports(conn: Connection, name: str) -> set[int]:
    query = "select client_port from pg_stat_activity where datname = current_database() and application_name = %s"
    return {row[0] for row in conn.execute(query, [f"bartleby {name}"]).fetchall()}


def test_promises_hold_when_a_network_swallows_everything_or_all_answers(
    dsn: str, server: dev.Server, tmp_path: Path
) -> None:
    with opened(Proxy(server.port)) as one, opened(Proxy(server.port)) as other, stage(dsn, tmp_path) as on:
        networks = [one, other]
        with under_load(on, [each.dsn(dsn) for each in networks], ms=50) as pids:
            for _ in between(SECONDS, on, 0.2, 1):
                since, number = time.monotonic(), on.rng.randrange(2)
                networks[number].hang(mute=on.rng.random() < 0.5)
                time.sleep(on.rng.choice([0.1, LEASE / 2, LEASE + REAP]))
                networks[number].heal()
                on.fault("network", since, pids[number])
        innocent(on, 70 + 2 * SECONDS)


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "hanging"])
def test_worker_whose_listener_hears_nothing_still_delivers(
    dsn: str, server: dev.Server, tmp_path: Path, cut: bool
) -> None:
    with opened(Proxy(server.port)) as network, stage(dsn, tmp_path) as on, on.admin() as conn:
        send(on, SWIFT, [{"v": "first"}])
        on.begun(on.start(through=network.dsn(dsn)))
        until(lambda: ports(conn, "listener"), "the worker does not listen")
        time.sleep(1)
        assert (network.cut if cut else network.hang)(ports(conn, "listener")) == 1
        for number in range(3):
            sent = time.monotonic()
            send(on, SWIFT, [{"v": f"later{number}"}])
            until(lambda value=f"later{number}": Book(on.folder).done(value), "not delivered", 40)  # type: ignore[misc]
            log.info("delivered after %.2f s", time.monotonic() - sent)
            assert time.monotonic() - sent < DEAF_SECONDS + NOISE_SECONDS
        innocent(on)


def test_connections_that_hang_for_ever_are_given_up(dsn: str, server: dev.Server, tmp_path: Path) -> None:
    with opened(Proxy(server.port)) as network, stage(dsn, tmp_path) as on:
        with under_load(on, [network.dsn(dsn)] * 2, ms=300, rate=40) as (victim, _):
            since = time.monotonic()
            network.hang()
            network.let_through()
            on.fault("network", since)
            on.kill(victim)
            until(lambda: on.logged("lease.reaped"), on.logs, 60)
            log.info("a lease was taken back %.2f s after the network had died", time.monotonic() - since)
            assert time.monotonic() - since < 15 + NOISE_SECONDS
            time.sleep(10)
        report = on.settle()
        assert not report.violations(), report
        answers = [each.answered for each in Book(on.folder).tries if each.how == "K" and each.answered]
        first = min(answered for answered in answers if answered > since + 1) - since
        log.info("first settlement %.2f s after the network had died", first)
        assert first < 15 + NOISE_SECONDS


def test_message_that_must_run_alone_gets_its_turn_among_slow_ones(dsn: str, tmp_path: Path) -> None:
    with stage(dsn, tmp_path) as on:
        send(on, SLOW, [{"v": f"slow{k}", "ms": on.rng.uniform(1100, 1600) * LEASE} for k in range(100)])
        send(on, SWIFT, [{"v": "suspect", "ms": 300}])
        victim = on.start(queues=[SWIFT])
        on.begun(victim)
        on.kill(victim)
        on.start()
        seconds = until(lambda: Book(on.folder).done("suspect"), on.logs, 60)
        log.info("it ran alone after %.2f s", seconds)
