"""Workers under one kind of fault at a time: no message is lost, settled by another worker, or charged unjustly.

One kind at a time, because faults hide each other: a killed connection keeps a worker that woke up too late from doing
the harm that would reveal it. Mutants of tests/nightly/mutation show that each profile can fail.
"""

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bartleby import dev
from tests.kit.sql import Connect, Connection, send
from tests.kit.worker import children_of
from tests.nightly.chaos.actors import LEASE, SWIFT
from tests.nightly.chaos.ledgers import Book, Ledger, Sent
from tests.nightly.chaos.network import Network
from tests.nightly.chaos.stage import REAP, Stage, between, staged, turning, under_load

SECONDS = 25.0
CRASH_BUDGET = 2
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def on(dsn: str, tmp_path: Path) -> Iterator[Stage]:
    with staged(dsn, tmp_path) as opened_stage:
        yield opened_stage


def frozen(on: Stage) -> None:
    with under_load(on, 3, failing=0.3, ms=50):
        for _ in between(SECONDS, on, 0.1, 0.5):
            on.freeze_two()
    assert on.innocent(120 + 2 * SECONDS).explained["stopped"]
    assert on.logged("lease.lost", "settlement.refused")


def connections_cut(on: Stage) -> None:
    on.may_lose_leases = True  # if heartbeats are cut again and again
    with under_load(on, 2), on.admin() as conn:
        for _ in between(SECONDS, on, 0.05, 0.3):
            conn.execute(
                "select pg_terminate_backend(pid) from (select pid from pg_stat_activity where datname ="
                " current_database() and application_name like 'bartleby %%' order by random() limit %s) p",
                [on.rng.choice([1, 3, 20])],
            )
    report = on.innocent()
    assert set(report.explained) <= {"failed", "released", "unknown outcome", "lease lost"}, report


def restarted(on: Stage) -> None:
    with under_load(on, 2, failing=0, outliving=0.01, ms=40):
        for _ in range(12):
            old = sorted(on.workers)
            new = [on.start("--grace", on.rng.choice(["0.05", "0.5"])) for _ in old]
            on.end(*old)
            on.began(*new)
    report = on.innocent()
    assert set(report.explained) <= {"released", "lease lost"}, report
    assert {run.attempt for run in Book(on.folder).runs} == {1}
    assert on.column("select 1 from bartleby.attempts") == []


def aborting(on: Stage) -> None:
    """Run messages that abort their process, among siblings, in several processes."""
    killers, processes = 3, 4
    # a lease that lapses while a sibling runs alone because its worker gets no processor is charged
    on.create("abort", lease=LEASE, crash_budget=CRASH_BUDGET, backoff="none")
    siblings = [f"sibling{k}" for k in range(150 * killers)]
    plans: list[dict[str, Any]] = [{"v": value, "ms": on.rng.choice([5, 30, 300, 500])} for value in siblings]
    plans += [{"v": f"killer{k}", "ms": 300, "abort": True} for k in range(killers)]
    on.rng.shuffle(plans)
    on.send("abort", plans)
    boss = on.start("--processes", str(processes), queues=["abort"])
    on.drain(60 * killers)
    on.until(lambda: len(on.logged("worker.started")) == processes + len(on.logged("worker.died")))
    assert len(children_of(boss)) == processes
    on.end(boss)
    assert len(on.logged("worker.died")) <= killers * (1 + CRASH_BUDGET)
    book = Book(on.folder)
    assert {run.attempt for value in siblings for run in book.by_value[value]} == {1}, "siblings were charged"
    assert not [value for value in siblings if not book.done(value)]
    query = "select payload ->> 'v' || ' ' || reason || ' ' || crashes from bartleby.dead_letters order by 1"
    assert on.column(query) == [f"killer{k} crashed {CRASH_BUDGET}" for k in range(killers)]
    blamed = on.column("select distinct message_id from bartleby.attempts where outcome <> 'lost'")
    assert len(blamed) == killers, "siblings were charged"


@pytest.mark.parametrize("profile", [frozen, connections_cut, restarted, aborting])
def test_promises_hold_under_each_worker_fault(on: Stage, profile: Callable[[Stage], None]) -> None:
    profile(on)


def test_promises_hold_when_a_network_swallows_everything_or_all_answers(on: Stage, server: dev.Server) -> None:
    """Or when connections hang for ever: both ends believe that they live, and only new ones work."""
    with closing(Network(server.port)) as one, closing(Network(server.port)) as other:
        networks = [one, other]
        with under_load(on, [each.dsn(on.dsn) for each in networks], ms=50) as pids:
            for _ in between(SECONDS, on, 0.2, 1):
                since, number = time.monotonic(), on.rng.randrange(2)
                fault = on.rng.choice(["blackhole", "deaf", "strand"])
                if fault == "strand":
                    networks[number].strand()
                    wait_for_settlement(on, pids[number])
                else:
                    networks[number].mode = fault
                    time.sleep(on.rng.choice([0.1, LEASE / 2, LEASE + REAP]))
                    networks[number].heal()
                on.fault("network", since, pids[number])
        on.innocent(120 + 2 * SECONDS)


def wait_for_settlement(on: Stage, pid: int) -> None:
    now = time.monotonic()
    on.until(lambda: any((each.worker, each.how) == (pid, "K") and each.left > now for each in Book(on.folder).tries))


# Producers and workers that are killed

DUMPS, TURNS = 5, 3
# Sessions pause where a race has its window: after the clock, a position, a snapshot, a probe.
SLOWED = [
    ("clock", "", "timestamptz", "clock_timestamp()"),
    ("big", "p_payload jsonb, p_headers jsonb", "integer", "null"),
    (
        "ranges",
        "p_positions bigint[]",
        "int8multirange",
        "(select coalesce(range_agg(int8range(p, p + 1)), '{}') from unnest(p_positions) p)",
    ),
    (
        "running",
        "p_snapshot pg_snapshot, p_beyond boolean",
        "int8multirange",
        """(select coalesce(range_agg(int8range(x.xid, x.xid, '[]')), '{}') + case when p_beyond
          then int8multirange(int8range(pg_snapshot_xmax(p_snapshot)::text::bigint, null)) else '{}' end
          from (select s::text::bigint as xid from pg_snapshot_xip(p_snapshot) s) x)""",
    ),
]


@pytest.mark.own_database
@pytest.mark.parametrize("windows", ["narrow", "wide"])
def test_promises_hold_when_producers_and_workers_are_killed(
    on: Stage, conn: Connection, connect: Connect, windows: str
) -> None:
    """While the ring turns and dumps are taken, and with senders that stay open all the time."""
    pg_dump = shutil.which("pg_dump", path=dev.find_binaries())
    if pg_dump is None:
        pytest.skip("there is no pg_dump beside this PostgreSQL")
    for name, arguments, result, slowed in SLOWED if windows == "wide" else ():
        conn.execute(
            f"create or replace function bartleby.{name}({arguments}) returns {result} language plpgsql as $$"
            f" declare v_value {result} := {slowed};"
            f" begin if random() < 0.05 then perform pg_sleep(random() * 0.03); end if; return v_value; end $$".encode()
        )
    with (
        under_load(on, 3, producers=4, rate=400, ms=1),
        slow_senders(connect, on.folder),
        turning(connect, 0.3) as answers,
    ):
        for _ in range(DUMPS):
            dump = subprocess.Popen([pg_dump, "-d", on.dsn, "-f", str(on.folder / "dump.sql")])
            kill_one_or_two(on)
            assert dump.wait() == 0
            for _ in range(3):  # between two dumps the ring may turn
                kill_one_or_two(on)
    assert on.innocent(120 + 2 * SECONDS).explained["killed"]
    assert Sent.read(on.folder).undone
    assert sum("emptied" in answer for answer in answers) >= TURNS


def kill_one_or_two(on: Stage) -> None:
    """Kill a worker, and in half of all cases a producer, with signal 9; start others in their place."""
    time.sleep(on.rng.uniform(0.5, 1.5))
    victim = on.rng.choice(sorted(on.workers))
    on.began(victim)
    on.kill(victim)
    on.start()
    if on.rng.random() < 0.5:
        producer = on.producers.pop(0)
        producer.kill()
        producer.join()
        assert producer.exitcode == -signal.SIGKILL
        on.produce(rate=400, ms=1)


@contextmanager
def slow_senders(connect: Connect, folder: Path) -> Iterator[None]:
    """Keep one transaction open and one prepared until the block ends; then commit both."""
    idle, prepared = connect(autocommit=False), connect(autocommit=False)
    for name, conn, count in (("idle", idle, 700), ("prepared", prepared, 300)):
        values = [f"{name}.{k}" for k in range(count)]
        conn.execute("set local bartleby.notify = off")  # a transaction that notifies cannot be prepared
        for value in values:
            send(conn, {"v": value}, SWIFT)
        Ledger(folder / f"{name}.sent").write(("T", 1, *values), ("C", 1))
    prepared.execute("prepare transaction 'slow'")
    prepared.rollback()
    idle.execute("select")  # the driver keeps the last portal of a statement with parameters, and so its snapshot
    yield
    idle.commit()
    prepared.autocommit = True
    prepared.execute("commit prepared 'slow'")
