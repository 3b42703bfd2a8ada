"""A stage for workers: real processes, producers with ledgers, recorded faults, and the verdict."""

import contextlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from tests.kit import sql
from tests.kit.worker import children_of, until
from tests.nightly.chaos.ledgers import Book, Fault, Ledger, Report, judge

ROOT = Path(__file__).parents[3]
SWIFT, SLOW = "swift", "slow"
"""Queues whose handlers are coroutines, and functions in threads."""
LEASE = 2.0
REAP = 1.0
POLICY = {"lease": LEASE, "max_attempts": 50, "crash_budget": 50, "backoff": "fixed", "base": 0.05, "jitter": "none"}
SEED = int(os.environ.get("BARTLEBY_SEED", "0"))
log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Stage:
    """The processes of one run, and what was done to them."""

    dsn: str
    folder: Path
    plant: str = ""
    rng: random.Random = field(default_factory=lambda: random.Random(SEED))
    workers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    may_lose_leases: bool = False

    def admin(self) -> sql.Connection:
        return psycopg.connect(self.dsn, autocommit=True)

    def column(self, query: str) -> list[Any]:
        """Return the first column of what a query finds."""
        with self.admin() as conn:
            return [row[0] for row in conn.execute(query.encode()).fetchall()]

    def create(self, queue: str, **policy: Any) -> None:
        with self.admin() as conn:
            sql.create(conn, queue, **policy)

    def send(self, queue: str, plans: Sequence[Mapping[str, Any]]) -> None:
        """Send and record it; each plan has its value `v`."""
        with self.admin() as conn:
            conn.execute("select bartleby.send_many(%s, %s)", [queue, Jsonb([{"payload": plan} for plan in plans])])
        self.new_ledger().write(("T", 1, *(plan["v"] for plan in plans)), ("C", 1))

    def new_ledger(self) -> Ledger:
        return Ledger(self.folder / f"{len(list(self.folder.glob('*.sent')))}.sent")

    def start(self, *options: str, queues: Sequence[str] = (SWIFT, SLOW), through: str | None = None) -> int:
        """Start a worker, if wanted through another address; return its pid."""
        words = [word for queue in queues for word in ("--queue", queue)] + list(options)
        command = [sys.executable, "-m", "bartleby", "work", "tests.nightly.chaos.app:app", "--log", "json", *words]
        environment = {
            "BARTLEBY_DSN": through or self.dsn,
            "CHAOS_EFFECTS": self.dsn,
            "CHAOS_FOLDER": str(self.folder),
            "CHAOS_PLANT": self.plant,
        }
        with (self.folder / "log").open("wb") as output:
            process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stderr=output)
        (self.folder / "log").rename(self.folder / f"{process.pid}.log")
        self.workers[process.pid] = process
        return process.pid

    def until(self, condition: Callable[[], object], seconds: float = 60) -> None:
        try:
            until(condition, seconds)
        except AssertionError as error:
            living = self.column(
                "select row(queue, state, count(*))::text from bartleby.messages group by queue, state"
            )
            raise AssertionError(f"{error}; left: {living}; logged: {self.logged()[-20:]}") from None

    def began(self, *pids: int) -> None:
        """Wait until each of these workers has run something."""
        ledgers = [self.folder / f"{pid}.ran" for pid in pids]
        self.until(lambda: all(path.exists() and '["B"' in path.read_text() for path in ledgers))

    def any_worker(self) -> int:
        return self.rng.choice(sorted(self.workers))

    def fault(self, kind: str, since: float, worker: int | None = None) -> None:
        self.faults.append(Fault(kind, since, time.monotonic(), worker))

    def kill(self, pid: int) -> None:
        process, since = self.workers.pop(pid), time.monotonic()
        process.kill()
        assert process.wait() == -signal.SIGKILL
        self.fault("killed", since, pid)

    def freeze(self, pid: int, seconds: float) -> None:
        since = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        self.fault("stopped", since, pid)

    def freeze_two(self, first: int | None = None) -> None:
        """Stop two workers, `first` and another or any two, for longer than their leases."""
        pids = self.rng.sample(sorted(self.workers), 2)
        if first is not None and first not in pids:
            pids[0] = first
        seconds = LEASE + REAP + self.rng.random()
        sleepers = [threading.Thread(target=self.freeze, args=(pid, seconds)) for pid in pids]
        for sleeper in sleepers:
            sleeper.start()
            time.sleep(self.rng.random() / 2)
        for sleeper in sleepers:
            sleeper.join()

    def end(self, *pids: int) -> None:
        """Terminate workers, and check that they stop in good order."""
        for pid in pids:
            process = self.workers.pop(pid)
            self.until(lambda log=self.folder / f"{pid}.log": "worker.started" in log.read_text())  # type: ignore[misc]
            process.terminate()
            assert process.wait(60) == 0, self.logged()[-5:]

    def drain(self, seconds: float = 120) -> None:
        """Wait until no message is left."""
        with self.admin() as conn:
            self.until(lambda: not conn.execute("select from bartleby.messages limit 1").rowcount, seconds)

    def report(self) -> Report:
        """Compare the ledgers."""
        book = Book(self.folder)
        lapsed = {lease for each in self.logged("lease.reaped") if book.starved_with(lease := each["lease_id"])}
        if self.may_lose_leases:
            lapsed |= {each["lease_id"] for each in self.logged("lease.lost")}
        dead = self.column("select payload ->> 'v' from bartleby.dead_letters")
        report = judge(self.folder, self.faults, dead=dead, lapsed=lapsed)
        log.info("seed %s: %s", SEED, report)
        return report

    def innocent(self, seconds: float = 120) -> Report:
        """End the run and check the promises. What a lost worker held runs alone now, which takes time."""
        self.drain(seconds)
        self.end(*self.workers)
        report = self.report()
        assert not report.broken, str(report)  # whole: pytest cuts what it renders itself
        return report

    def logged(self, *events: str) -> list[dict[str, Any]]:
        """Return what the workers logged under these names, or everything."""
        found = []
        for line in "".join(path.read_text(errors="replace") for path in self.folder.glob("*.log")).splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if not events or entry["event"] in events:
                    found.append(entry)
        return found

    def close(self) -> None:
        for process in self.workers.values():
            for pid in [*(children_of(process.pid) if process.poll() is None else ()), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def staged(dsn: str, folder: Path, plant: str = "") -> Iterator[Stage]:
    """Prepare a database with the two queues of every profile."""
    on = Stage(dsn, folder, plant)
    for queue in (SWIFT, SLOW):
        on.create(queue, **POLICY)
    try:
        yield on
    finally:
        on.close()


@contextlib.contextmanager
def producing(
    on: Stage, *, rate: float = 150, failing: float = 0.03, outliving: float = 0.004, ms: float = 20
) -> Iterator[None]:
    """Send to both queues from a thread, through every error, and record it."""
    rng, over, ledger = random.Random(on.rng.random()), threading.Event(), on.new_ledger()

    def produce() -> None:
        conn: sql.Connection | None = None
        number = 0
        while not over.wait(rng.random() * 20 / rate):
            number += 1
            plans = [plan_of(rng, f"{number}.{k}", failing, outliving, ms) for k in range(rng.choice([1, 5, 20]))]
            ledger.write(("T", number, *(each["v"] for each in plans)))
            try:
                conn = conn or psycopg.connect(on.dsn, autocommit=True)
                messages = Jsonb([{"payload": each} for each in plans])
                conn.execute("select bartleby.send_many(%s, %s)", [rng.choice([SWIFT, SLOW]), messages])
                ledger.write(("C", number))
            except psycopg.Error:
                conn = None
        if conn is not None:
            conn.close()

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)
    assert not thread.is_alive()


def plan_of(rng: random.Random, value: str, failing: float, outliving: float, ms: float) -> dict[str, Any]:
    plan: dict[str, Any] = {"v": value, "ms": rng.random() * 2 * ms}
    if rng.random() < outliving:
        plan["ms"] = 1000 * LEASE * (1.1 + rng.random())
    if rng.random() < failing:
        plan["fail"] = rng.choice([1, 1, 2])
    return plan
