"""Fault profiles: each does one kind of harm to workers under load, and checks the promises.

One kind at a time, because faults hide each other: a killed connection keeps a worker that woke up too late from doing
the harm that would reveal it.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from psycopg.types.json import Jsonb

from tests.nightly.chaos.worker_ledger import ABORT, SLOW, SWIFT, Book, Report
from tests.nightly.chaos.worker_stage import LEASE, REAP, Producer, Stage, children, drained, log, send, until

NOISE_SECONDS = 4.0
"""What a busy machine may add to a time, in seconds."""
CRASH_BUDGET = 2


def innocent(on: Stage, patience: float = 70) -> Report:
    """End the run and check the promises. What a lost worker held runs alone now, which takes time."""
    report = on.settle(patience)
    assert not report.violations(), str(report)  # whole: pytest cuts what it renders itself
    assert all(seconds < LEASE + REAP + NOISE_SECONDS for seconds in report.recoveries), report
    return report


@contextmanager
def under_load(on: Stage, workers: int | Sequence[str], **load: float) -> Iterator[list[int]]:
    """Start a producer and workers: a number of them, or one through each of these addresses."""
    addresses = [on.dsn] * workers if isinstance(workers, int) else workers
    with Producer(on, **load):
        pids = [on.start(through=address) for address in addresses]
        on.begun(*pids)
        yield pids


def between(seconds: float, on: Stage, least: float, most: float) -> Iterator[None]:
    """Yield after pauses of these lengths until the time is up."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(on.rng.uniform(least, most))
        yield


def undisturbed(on: Stage, seconds: float) -> None:
    """Do no harm; some handlers take longer than their leases."""
    for queue in (SWIFT, SLOW):
        send(
            on, queue, [{"v": f"{queue}{k}", "ms": 1000 * (LEASE + 2 * REAP) if k % 50 == 0 else 5} for k in range(200)]
        )
    for _ in range(2):
        on.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(1)
        again = on.report(set())
        assert not again.unexplained, f"unexplained: {again}"
    assert not innocent(on).explained


def killed(on: Stage, seconds: float) -> None:
    with under_load(on, 3, ms=40, rate=250):
        for _ in between(seconds, on, 0.5, 1.5):
            victim = on.any_worker()
            on.begun(victim)
            on.kill(victim)
            on.start()
    assert innocent(on, 70 + 2 * seconds).explained["killed"]


def frozen(on: Stage, seconds: float) -> None:
    with under_load(on, 3, failing=0.3, ms=50):
        for _ in between(seconds, on, 0.1, 0.5):
            freeze_two(on)
    assert innocent(on, 70 + 2 * seconds).explained["stopped"]
    assert on.logged("lease.lost", "settlement.refused")


def freeze_two(on: Stage, first: int | None = None) -> None:
    """Stop two workers, `first` and another or any two, for longer than their leases."""
    pids = on.rng.sample(sorted(on.workers), 2)
    if first is not None and first not in pids:
        pids[0] = first
    sleepers = [threading.Thread(target=on.freeze, args=(pid, LEASE + REAP + on.rng.random())) for pid in pids]
    for sleeper in sleepers:
        sleeper.start()
        time.sleep(on.rng.random() / 2)
    for sleeper in sleepers:
        sleeper.join()


def terminated(on: Stage, seconds: float) -> None:
    with under_load(on, 3, outliving=0.02):
        for _ in between(seconds, on, 0.2, 0.6):
            on.end(on.any_worker())
            on.begun(on.start("--grace", on.rng.choice(["0.1", "1"])))
    report = innocent(on)
    assert set(report.explained) <= {"failed", "released", "lease lost"}, report


def connections_cut(on: Stage, seconds: float) -> None:
    on.may_lose_leases = True  # if heartbeats are cut again and again
    with under_load(on, 2), on.admin() as conn:
        for _ in between(seconds, on, 0.05, 0.3):
            conn.execute(
                "select pg_terminate_backend(pid) from (select pid from pg_stat_activity where datname ="
                " current_database() and application_name like 'bartleby %%' order by random() limit %s) p",
                [on.rng.choice([1, 3, 20])],
            )
    report = innocent(on)
    assert set(report.explained) <= {"failed", "released", "unknown outcome", "lease lost"}, report


def restarted(on: Stage, restarts: int) -> None:
    with Producer(on, failing=0, outliving=0.01, ms=40):
        on.begun(*[on.start() for _ in range(2)])
        for _ in range(restarts // 2):
            old = sorted(on.workers)
            new = [on.start("--grace", on.rng.choice(["0.05", "0.5"])) for _ in old]
            for pid in old:
                on.end(pid)
            on.begun(*new)
    report = innocent(on)
    assert set(report.explained) <= {"released", "lease lost"}, report
    assert {run.attempt for run in Book(on.folder).runs} == {1}
    assert on.column("select 1 from bartleby.attempts") == []


def aborting(on: Stage, killers: int, processes: int = 4) -> None:
    """Run messages that abort their process, among siblings, in several processes."""
    # a lease that lapses while a sibling runs alone because its worker gets no processor is charged
    prepare(on, ABORT, lease=LEASE, crash_budget=CRASH_BUDGET, backoff="none")
    siblings = [f"sibling{k}" for k in range(150 * killers)]
    plans: list[dict[str, Any]] = [{"v": value, "ms": on.rng.choice([5, 30, 300, 500])} for value in siblings]
    plans += [{"v": f"killer{k}", "ms": 300, "abort": True} for k in range(killers)]
    on.rng.shuffle(plans)
    send(on, ABORT, plans)
    boss = on.start("--processes", str(processes), queues=[ABORT])
    drained(on, 40 * killers)
    until(lambda: len(on.logged("worker.started")) == processes + len(on.logged("worker.died")), on.logs)
    assert len(children(boss)) == processes
    on.end(boss)
    deaths = len(on.logged("worker.died"))
    log.info("%s deaths for %s killers", deaths, killers)
    assert deaths <= killers * (1 + CRASH_BUDGET)
    book = Book(on.folder)
    charged = {run.attempt for value in siblings for run in book.by_value[value]} - {1}
    assert not charged, "siblings were charged"
    assert not [value for value in siblings if not book.done(value)]
    query = "select payload ->> 'v' || ' ' || reason || ' ' || crashes from bartleby.dead_letters order by 1"
    assert on.column(query) == [f"killer{k} crashed {CRASH_BUDGET}" for k in range(killers)]
    blamed = on.column("select distinct message_id from bartleby.attempts where outcome <> 'lost'")
    assert len(blamed) == killers, "siblings were charged"


def prepare(on: Stage, queue: str, **policy: Any) -> None:
    with on.admin() as conn:
        conn.execute("select bartleby.create_queue(%s, %s)", [queue, Jsonb(policy)])
