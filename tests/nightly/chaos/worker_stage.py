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
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import psycopg
from psycopg.types.json import Jsonb

from tests.nightly.chaos.worker_ledger import SLOW, SWIFT, Book, Fault, Report, Sent, judge

Connection = psycopg.Connection[tuple[Any, ...]]
ROOT = Path(__file__).parents[3]
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
    admin: Callable[[], Connection]
    rng: random.Random
    environment: dict[str, str] = field(default_factory=dict)
    workers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    files: dict[int, Path] = field(default_factory=dict)
    may_lose_leases: bool = False

    def start(self, *options: str, queues: Sequence[str] = (SWIFT, SLOW), through: str | None = None) -> int:
        """Start a worker, if wanted through another address; return its pid."""
        words = [word for queue in queues for word in ("--queue", queue)] + list(options)
        app = ["work", "tests.nightly.chaos.worker_app:app", "--log", "json"]
        command = [sys.executable, "-m", "bartleby", *app, *words]
        environment = {
            **os.environ,
            "BARTLEBY_DSN": through or self.dsn,
            "CHAOS_EFFECTS": self.dsn,
            "CHAOS_FOLDER": str(self.folder),
            **self.environment,
        }
        path = self.folder / f"log{len(list(self.folder.glob('log*')))}"
        with path.open("wb") as output:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=output)
        self.workers[process.pid] = process
        self.files[process.pid] = path
        return process.pid

    def begun(self, *pids: int) -> None:
        """Wait until each of these workers has run something."""
        ledgers = [self.folder / f"{pid}.ran" for pid in pids]
        until(lambda: all(path.exists() and '["B"' in path.read_text() for path in ledgers), self.logs)

    def any_worker(self) -> int:
        return self.rng.choice(sorted(self.workers))

    def fault(self, kind: str, since: float, worker: int | None = None) -> None:
        self.faults.append(Fault(kind, since, time.monotonic(), worker))

    def kill(self, pid: int) -> None:
        process = self.workers.pop(pid)
        since = time.monotonic()
        process.kill()
        assert process.wait() == -signal.SIGKILL, self.logs()
        self.fault("killed", since, pid)

    def freeze(self, pid: int, seconds: float) -> None:
        since = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        self.fault("stopped", since, pid)

    def end(self, pid: int, seconds: float = 30) -> None:
        """Terminate a worker, and check that it stops in good order."""
        process = self.workers.pop(pid)
        until(lambda: "worker.started" in self.files[pid].read_text(errors="replace"), self.logs)
        process.terminate()
        assert process.wait(seconds) == 0, self.logs()

    def settle(self, seconds: float = 70) -> Report:
        """Wait until the queues are empty, end the workers, and compare the ledgers."""
        drained(self, seconds)
        dead = set(self.column("select payload ->> 'v' from bartleby.dead_letters"))
        for pid in list(self.workers):
            self.end(pid)
        return self.report(dead)

    def report(self, dead: set[str]) -> Report:
        book = Book(self.folder)
        lapsed = {entry["lease_id"] for entry in self.logged("lease.lost")} if self.may_lose_leases else set()
        lapsed |= {lease for entry in self.logged("lease.reaped") if book.starved_with(lease := entry["lease_id"])}
        report = judge(book, Sent.read(self.folder), self.faults, dead=dead, lapsed=lapsed)
        report.recoveries = list(self._recoveries(book))
        log.info("%s", report)
        return report

    def _recoveries(self, book: Book) -> Iterator[float]:
        """Yield how long after a fault each lease of the worker was taken back, by the logs of the janitors."""
        passed = time.time() - time.monotonic()
        for entry in self.logged("lease.reaped"):
            reaped = datetime.fromisoformat(entry["time"]).timestamp() - passed
            owners = {run.worker for run in book.by_lease.get(entry["lease_id"], ())}
            hit = [fault.since for fault in self.faults if fault.worker in owners and fault.since < reaped]
            if hit:
                yield reaped - max(hit)

    def logged(self, *events: str) -> list[dict[str, Any]]:
        """Return what the workers logged under these names, or everything."""
        found = []
        for path in self.folder.glob("log*"):
            for line in path.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    entry = json.loads(line)
                    if not events or entry["event"] in events:
                        found.append(entry)
        return found

    def logs(self) -> str:
        """Return the end of the log of each worker."""
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in self.folder.glob("log*")
        )

    def column(self, query: str) -> list[Any]:
        """Return the first column of what a query finds."""
        with self.admin() as conn:
            return [row[0] for row in conn.execute(query.encode()).fetchall()]

    def close(self) -> None:
        for process in self.workers.values():
            for pid in [*children(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def stage(dsn: str, folder: Path, *, seed: int = SEED, plant: str = "", **policy: Any) -> Iterator[Stage]:
    """Prepare a database with the two queues of every profile."""

    def admin() -> Connection:
        return psycopg.connect(dsn, autocommit=True)

    opened = Stage(dsn, folder, admin, random.Random(seed), {"CHAOS_PLANT": plant})
    log.info("seed %s", seed)
    with admin() as conn:
        for queue in (SWIFT, SLOW):
            conn.execute("select bartleby.create_queue(%s, %s)", [queue, Jsonb(POLICY | policy)])
    try:
        yield opened
    finally:
        opened.close()


class Producer:
    """Sends to both queues from a thread, through every error, and records what it does."""

    def __init__(
        self, on: Stage, *, rate: float = 150, failing: float = 0.03, outliving: float = 0.004, ms: float = 20
    ) -> None:
        self._dsn = on.dsn
        self._rng = random.Random(on.rng.random())
        self._pause = 10 / rate
        self._failing, self._outliving, self._ms = failing, outliving, ms
        self._path = on.folder / f"{len(list(on.folder.glob('*.sent')))}.sent"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._produce, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _produce(self) -> None:
        conn: Connection | None = None
        number = sent = 0
        with self._path.open("a", buffering=1) as ledger:
            while not self._stop.is_set():
                number += 1
                messages = [self._message(f"{self._path.stem}.{sent + k}") for k in range(self._rng.choice([1, 5, 20]))]
                sent += len(messages)
                ledger.write(json.dumps(["T", number, *[each["payload"]["v"] for each in messages]]) + "\n")
                try:
                    conn = conn or psycopg.connect(self._dsn, autocommit=True, application_name="producer")
                    queue = self._rng.choice([SWIFT, SLOW])
                    conn.execute("select bartleby.send_many(%s, %s)", [queue, Jsonb(messages)])
                except psycopg.Error:
                    conn = None
                    time.sleep(0.05)
                else:
                    ledger.write(json.dumps(["C", number]) + "\n")
                self._stop.wait(self._rng.random() * 2 * self._pause)
        if conn is not None:
            conn.close()

    def _message(self, value: str) -> dict[str, Any]:
        plan: dict[str, Any] = {"v": value, "ms": self._rng.random() * 2 * self._ms}
        if self._rng.random() < self._outliving:
            plan["ms"] = 1000 * LEASE * (1.1 + self._rng.random())
        if self._rng.random() < self._failing:
            plan["fail"] = self._rng.choice([1, 1, 2])
        return {"payload": plan}


def send(on: Stage, queue: str, plans: Sequence[Mapping[str, Any]]) -> list[int]:
    """Send and record it; each plan has its value `v`."""
    path = on.folder / f"{len(list(on.folder.glob('*.sent')))}.sent"
    with on.admin() as conn, path.open("w") as ledger:
        query = "select bartleby.send_many(%s, %s)"
        ids = [row[0] for row in conn.execute(query, [queue, Jsonb([{"payload": plan} for plan in plans])]).fetchall()]
        ledger.write(json.dumps(["T", 1, *[plan["v"] for plan in plans]]) + "\n" + json.dumps(["C", 1]) + "\n")
    return ids


def drained(on: Stage, seconds: float) -> None:
    """Wait until no message is left."""
    with on.admin() as conn:
        until(lambda: not living(conn), lambda: f"not empty: {living(conn)}; {on.logs()}", seconds)


def living(conn: Connection) -> list[tuple[Any, ...]]:
    return conn.execute("select queue, state, count(*) from bartleby.messages group by 1, 2").fetchall()


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def until(condition: Callable[[], object], problem: str | Callable[[], str], seconds: float = 60) -> float:
    """Wait for a condition; return how long it took."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < seconds, problem if isinstance(problem, str) else problem()
        time.sleep(0.02)
    return time.monotonic() - began
