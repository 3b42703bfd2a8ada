"""A stage for buses: letters that die at a rate, the relay as a process, a bus to break, and the verdict.

Burial    lets messages die from a thread, a hundred at once, and records which and when
Stage     the relay, the sinks and the bus; verdict() compares what arrived with what happened
Tail      reads the file of a log sink while it is written: how late the other sink is
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, LiteralString, Self

import psycopg
import pytest

from bartleby import Client, Failure
from bartleby.errors import BartlebyError
from bartleby.events import Sink
from tests.kit.worker import ENVIRONMENT, lapse
from tests.nightly.buses.bus_servers import Bus, Loop
from tests.nightly.chaos.replay_stage import column, value

QUEUE = "orders"
LETTERS = ["dead_letter.*"]
ANA: dict[str, Any] = {"actor": "ana", "reason": "a drill"}
ROOT = Path(__file__).parents[3]
BATCH = 100
RATE = 1000
log = logging.getLogger(__name__)

Heard = tuple[str, int, str]
"""An event that arrived: its subject, its sequence, its id."""


class Burial:
    """Lets messages die until the end of the block; every fifth batch is discarded, which is an event too."""

    def __init__(self, dsn: str, rate: float = RATE) -> None:
        self.died: dict[int, float] = {}
        self._lock = threading.Lock()
        self.discarded: set[int] = set()
        self._dsn = dsn
        self._pause = BATCH / rate
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._began = self._due = time.monotonic()

    def __enter__(self) -> Self:
        self._began = self._due = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> float:
        """Stop; return how many died per second."""
        if not self._ending.is_set():
            self._ending.set()
            self._thread.join(30)
            assert not self._thread.is_alive()
            self.rate = len(self.died) / (time.monotonic() - self._began)
        return self.rate

    def calm_down(self) -> None:
        """Continue with a tenth of the rate, without what is overdue."""
        self._pause *= 10
        self._due = time.monotonic()

    def so_far(self) -> dict[int, float]:
        """Return which messages have died, and when."""
        with self._lock:
            return dict(self.died)

    def _run(self) -> None:
        opened: Client | None = None
        while not self._ending.is_set():
            try:
                opened = opened or Client(self._dsn)
                self._bury(opened)
            except (psycopg.Error, BartlebyError, OSError):
                if opened is not None:
                    opened.close()
                opened = None
                self._ending.wait(0.1)
            self._due += self._pause
            self._ending.wait(max(0.0, self._due - time.monotonic()))
        if opened is not None:
            opened.close()

    def _bury(self, client: Client) -> None:
        ids = bury(client)
        now = time.monotonic()
        with self._lock:
            self.died.update(dict.fromkeys(ids, now))
        if len(self.died) // BATCH % 5 == 0:
            client.discard(ids, **ANA)
            self.discarded.update(ids)


def bury(client: Client, count: int = BATCH) -> list[int]:
    """Let messages die in one transaction; return their ids."""
    client.send_many(QUEUE, [{"payload": {"n": n}} for n in range(count)])
    lease = client.claim(QUEUE, "web-1", limit=count)
    assert lease is not None
    failures = [Failure(each.position, "KeyError", "'price'", verdict="dead") for each in lease.messages]
    client.fail(lease.id, failures)
    return [each.id for each in lease.messages]


class Tail:
    """Reads a file as it is written: which letter was reported there, and when."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told: dict[int, float] = {}
        self.others: list[dict[str, Any]] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(30)

    def lag(self, died: dict[int, float]) -> float:
        """Return how long the latest of these letters took; missing ones count until now."""
        now = time.monotonic()
        return max(self.told.get(message, now) - since for message, since in died.items())

    def of(self, type_: str) -> list[dict[str, Any]]:
        return [each for each in self.others if each["type"] == f"io.bartleby.{type_}"]

    def _run(self) -> None:
        while not self.path.exists():
            if self._ending.wait(0.02):
                return
        rest = b""
        with self.path.open("rb") as file:
            while not self._ending.is_set():
                *lines, rest = (rest + file.read()).split(b"\n")
                now = time.monotonic()
                for event in map(json.loads, lines):
                    if event["type"] == "io.bartleby.dead_letter.created":
                        self.told.setdefault(event["data"]["message_id"], now)
                    elif not event["type"].startswith("io.bartleby.dead_letter."):
                        self.others.append(event)
                self._ending.wait(0.05)


class Relay:
    """`bartleby relay` as a process; its log is in a file."""

    def __init__(self, dsn: str, folder: Path, *options: str) -> None:
        self.file = folder / f"relay{len(list(folder.glob('relay*')))}"
        command = [sys.executable, "-m", "bartleby", "--dsn", dsn, "relay", "--look", "0.2", "--log", "json", *options]
        with self.file.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=output)

    def begun(self) -> Self:
        """Wait until it serves."""
        until(lambda: self.logged("relay.started"), self.said, 60)
        return self

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(10) == -signal.SIGKILL, self.said()

    def end(self, seconds: float = 30) -> None:
        """Stop it in good order."""
        self.begun().process.terminate()
        assert self.process.wait(seconds) == 0, self.said()

    def worked(self) -> float:
        """Return how many seconds of a processor it has had."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def logged(self, event: str) -> list[dict[str, Any]]:
        lines = self.file.read_text(errors="replace").splitlines()
        return [each for each in map(_entry, lines) if each.get("event") == event]

    def said(self) -> str:
        return self.file.read_text(errors="replace")[-3000:]


def _entry(line: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        return found if isinstance(found, dict) else {}
    return {}


@dataclass(slots=True, eq=False)
class Stage:
    """One database, one bus, and relays."""

    dsn: str
    folder: Path
    bus: Bus
    loop: Loop
    client: Client
    conn: psycopg.Connection[tuple[Any, ...]]
    relays: list[Relay] = field(default_factory=list)

    def add(self, name: str = "bus", **settings: Any) -> None:
        """Add a sink for events of letters."""
        self.client.put_sink(name, self.bus.kind, {"options": self.bus.options(), "types": LETTERS, **settings}, **ANA)

    def add_log(self) -> Path:
        """Add the sink `log` for all events; return its file."""
        path = self.folder / "log.jsonl"
        self.client.put_sink("log", "log", {"options": {"path": str(path)}}, **ANA)
        return path

    def relay(self, *options: str) -> Relay:
        self.relays.append(Relay(self.dsn, self.folder, *options))
        return self.relays[-1]

    def sink(self, name: str = "bus") -> Sink:
        [found] = [each for each in self.client.sinks() if each.name == name]
        return found

    def count(self) -> int:
        return self.loop.run(self.bus.count())

    def has(self, count: int, seconds: float = 60) -> float:
        """Wait until the bus has this many events; return how long that took."""
        return until(lambda: self.count() >= count, lambda: f"{self.count()} of {count}: {self.said()}", seconds)

    def becomes(self, state: str, name: str = "bus", seconds: float = 60) -> None:
        """Wait until a sink is working, or degraded."""
        until(lambda: self.sink(name).state == state, lambda: f"{self.sink(name)}: {self.said()}", seconds)

    def drained(self, seconds: float = 90, name: str = "bus") -> None:
        """Wait until nothing waits for a sink."""
        until(lambda: self.sink(name).waiting == 0, lambda: f"{self.sink(name)}: {self.said()}", seconds)

    def changes(self, name: str = "bus") -> list[str]:
        """Return the changes of a sink that were reported: degraded, recovered."""
        query: LiteralString = "select type from bartleby.event where type like %s and data ->> 'sink' = %s order by id"
        return [each.rpartition(".")[2] for each in column(self.conn, query, "io.bartleby.sink.%", name)]

    def troubles(self, name: str = "bus") -> int:
        """Return how often a sink was degraded; each time and its end were reported once."""
        changes = self.changes(name)
        times = len(changes) // 2
        assert changes == ["degraded", "recovered"] * times, name
        return times

    def audited(self, name: str = "bus") -> int:
        """Return for how many events the audit log has a failure."""
        query: LiteralString = """
            select coalesce(sum((after ->> 'events')::bigint), 0)::bigint from bartleby.audit
            where action = 'sink.failure' and subject ->> 'sink' = %s"""
        return int(value(self.conn, query, name))

    def heard(self) -> list[Heard]:
        """Return what the bus has, in its order."""

        async def read() -> list[Heard]:
            return [heard(body) async for body in self.bus.bodies()]

        return self.loop.run(read())

    def expected(self) -> set[tuple[str, int]]:
        """Return what happened to letters, by the letters themselves."""
        query: LiteralString = "select message_id, status from bartleby.dead_letters where queue = %s"
        found = self.conn.execute(query, [QUEUE]).fetchall()
        once = {(f"message/{message}", 1) for message, _ in found}
        return once | {(f"message/{message}", 2) for message, status in found if status == "discarded"}

    def verdict(self, burial: Burial | None = None, *, ordered: bool = True, dropped: int = 0) -> "Verdict":
        """Compare the bus with what happened: all of it is there, nothing else, and twins are the same event."""
        heard, expected = self.heard(), self.expected()
        if burial is not None:
            ledger = {(f"message/{message}", 1) for message in burial.died}
            assert ledger <= expected, "letters were lost"
        found = {(subject, sequence) for subject, sequence, _ in heard}
        assert len(expected - found) == dropped, f"lost: {sorted(expected - found)[:5]}"
        assert found <= expected, f"invented: {sorted(found - expected)[:5]}"
        names: dict[str, tuple[str, int]] = {}
        for subject, sequence, name in heard:
            assert names.setdefault(name, (subject, sequence)) == (subject, sequence), f"two events are {name}"
        assert len(names) == len(found), "an event has two ids"
        disordered = disorder(heard)
        assert not ordered or not disordered, f"out of order: {disordered[:5]}"
        return Verdict(len(found), len(heard) - len(found), len(disordered))

    def said(self) -> str:
        return "\n".join(each.said() for each in self.relays)

    def lapse(self) -> None:
        """Take back the leases of a killed relay."""
        lapse(self.conn)

    def close(self) -> None:
        for each in self.relays:
            if each.process.poll() is None:
                each.process.kill()
                each.process.wait()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What arrived."""

    events: int
    twice: int
    disordered: int


def heard(body: bytes) -> Heard:
    event = json.loads(body)
    return event["subject"], int(event["sequence"]), event["id"]


def disorder(heard: Sequence[Heard]) -> list[str]:
    """Return subjects whose events arrived out of order, each counted when it came first."""
    last: Counter[str] = Counter()
    seen: set[str] = set()
    found = []
    for subject, sequence, name in heard:
        if name not in seen:
            seen.add(name)
            if sequence < last[subject]:
                found.append(subject)
            last[subject] = max(last[subject], sequence)
    return found


@contextlib.contextmanager
def stage(kind: type[Bus], dsn: str, folder: Path) -> Iterator[Stage]:
    """A stage with a bus that runs."""
    if why := kind.missing():
        pytest.skip(why)
    loop = Loop()
    bus = kind(folder)
    try:
        loop.run(bus.start())
        with Client(dsn) as client, psycopg.connect(dsn, autocommit=True) as conn:
            client.create_queue(QUEUE, {"breaker": "off"})
            opened = Stage(dsn, folder, bus, loop, client, conn)
            try:
                yield opened
            finally:
                opened.close()
    finally:
        loop.run(bus.close())
        loop.close()


def until(condition: Callable[[], object], problem: str | Callable[[], str], seconds: float = 60) -> float:
    """Wait for a condition that is expensive to check; return how long it took."""
    began, pause = time.monotonic(), 0.02
    while not condition():
        waited = time.monotonic() - began
        assert waited < seconds, problem if isinstance(problem, str) else problem()
        time.sleep(pause)
        pause = min(0.15, pause * 1.5)
    return time.monotonic() - began


def cli(dsn: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `bartleby …`."""
    command = [sys.executable, "-m", "bartleby", "--dsn", dsn, *words]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=90, check=False)


def during(seconds: float, action: Callable[[], object]) -> None:
    """Repeat an action for a time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        action()
        time.sleep(min(max(0.2, seconds / 200), max(0.0, end - time.monotonic())))
