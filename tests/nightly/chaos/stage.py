"""A stage for workers: real processes, producers and workers with ledgers, recorded faults, and the verdict."""

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from tests.kit import sql
from tests.kit.worker import children_of, until
from tests.nightly.chaos import actors
from tests.nightly.chaos.actors import LEASE, SLOW, SWIFT
from tests.nightly.chaos.ledgers import Book, Fault, Ledger, Report, judge

ROOT = Path(__file__).parents[3]
REAP = 1.0
POLICY = {"lease": LEASE, "max_attempts": 50, "crash_budget": 50, "backoff": "fixed", "base": 0.05, "jitter": "none"}
SEED = int(os.environ.get("BARTLEBY_SEED", "0"))
log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Stage:
    """The processes of one run, and what was done to them."""

    dsn: str
    folder: Path
    rng: random.Random = field(default_factory=lambda: random.Random(SEED))
    workers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    producers: list[Any] = field(default_factory=list)
    produced: int = 0
    faults: list[Fault] = field(default_factory=list)
    may_lose_leases: bool = False

    def admin(self) -> sql.Connection:
        return psycopg.connect(self.dsn, autocommit=True)

    def column(self, query: str) -> list[Any]:
        with self.admin() as conn:
            return [row[0] for row in conn.execute(query.encode()).fetchall()]

    def create(self, queue: str, **policy: Any) -> None:
        with self.admin() as conn:
            sql.create(conn, queue, **policy)

    def send(self, queue: str, plans: Sequence[Mapping[str, Any]]) -> None:
        """Send and record it; each plan has its value `v`."""
        with self.admin() as conn:
            conn.execute("select bartleby.send_many(%s, %s)", [queue, Jsonb([{"payload": plan} for plan in plans])])
        Ledger(self.folder / f"{queue}.sent").write(("T", 1, *(plan["v"] for plan in plans)), ("C", 1))

    def produce(self, **load: float) -> None:
        """Start a producer; see actors.produce for its options."""
        self.produced += 1
        self.producers.append(actors.start(actors.produce, self.dsn, self.folder, f"{SEED}.{self.produced}", **load))

    def start(self, *options: str, queues: Sequence[str] = (SWIFT, SLOW), through: str | None = None) -> int:
        """Start a worker, if wanted through another address; return its pid."""
        words = [word for queue in queues for word in ("--queue", queue)] + list(options)
        command = [sys.executable, "-m", "bartleby", "work", "tests.nightly.chaos.app:app", "--log", "json", *words]
        environment = {"BARTLEBY_DSN": through or self.dsn, "CHAOS_FOLDER": str(self.folder)}
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
        ledgers = [self.folder / f"{pid}.ran" for pid in pids]
        self.until(lambda: all(path.exists() and '["B"' in path.read_text() for path in ledgers))

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

    def freeze_two(self) -> None:
        """Stop any two workers for longer than their leases."""
        seconds = LEASE + REAP + self.rng.random()
        pids = self.rng.sample(sorted(self.workers), 2)
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
        with self.admin() as conn:
            self.until(lambda: not conn.execute("select from bartleby.messages limit 1").rowcount, seconds)

    def report(self) -> Report:
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
        for producer in self.producers:
            producer.kill()
            producer.join()
        for process in self.workers.values():
            for pid in [*(children_of(process.pid) if process.poll() is None else ()), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def staged(dsn: str, folder: Path) -> Iterator[Stage]:
    """Prepare a database with two queues."""
    on = Stage(dsn, folder)
    for queue in (SWIFT, SLOW):
        on.create(queue, **POLICY)
    try:
        yield on
    finally:
        on.close()


@contextlib.contextmanager
def under_load(on: Stage, workers: int | Sequence[str], producers: int = 1, **load: float) -> Iterator[list[int]]:
    """Start producers and workers: a number of them, or one through each of these addresses."""
    for _ in range(producers):
        on.produce(**load)
    pids = [on.start(through=each) for each in ([on.dsn] * workers if isinstance(workers, int) else workers)]
    on.began(*pids)
    yield pids
    (on.folder / "stop").touch()
    for producer in on.producers:
        producer.join(60)
        assert producer.exitcode == 0


def between(seconds: float, on: Stage, least: float, most: float) -> Iterator[None]:
    """Yield after pauses of these lengths until the time is up."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(on.rng.uniform(least, most))
        yield


@contextlib.contextmanager
def turning(connect: sql.Connect, pause: float = 0) -> Iterator[list[str]]:
    """Turn the ring again and again during the block; yield the answers."""
    conn, stop, answers = connect(), threading.Event(), list[str]()
    with ThreadPoolExecutor(1) as pool:

        def turn() -> None:
            while not stop.wait(pause):
                answers.append(sql.value(conn, "select bartleby.turn(0)"))

        under_way = pool.submit(turn)
        try:
            yield answers
        finally:
            stop.set()
        under_way.result()
