"""A stage for buses: letters that die at a rate, the relay as a process, a bus to break, and the verdict.

Burial    lets messages die from a thread, a hundred at once, and records which
Stage     the relay, the sinks and the bus; verdict() compares what arrived with what happened
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, LiteralString, Self

import psycopg
import pytest

from bartleby import Client, events
from bartleby.errors import BartlebyError
from tests.kit.relay import die_together
from tests.kit.sinks.conformance import Sink
from tests.kit.sql import column, value
from tests.kit.worker import ENVIRONMENT
from tests.nightly.buses.bus_servers import run

QUEUE = "orders"
LETTERS = ["dead_letter.*"]
ANA: dict[str, Any] = {"actor": "ana", "reason": "a drill"}
ROOT = Path(__file__).parents[3]
BATCH = 100

Heard = tuple[str, int, str]
"""An event that arrived: its subject, its sequence, its id."""


class Burial:
    """Lets messages die until the end of the block; every fifth batch is discarded, which is an event too."""

    def __init__(self, dsn: str, rate: float) -> None:
        self.died: list[int] = []
        self._dsn = dsn
        self._pause = BATCH / rate
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._due = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._ending.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def calm_down(self) -> None:
        """Continue with a tenth of the rate, without what is overdue."""
        self._pause *= 10
        self._due = time.monotonic()

    def goes_on(self) -> None:
        """Wait until more have died."""
        before = len(self.died)
        until(lambda: len(self.died) > before, "nothing dies")

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
        ids = die_together(client, range(BATCH))
        self.died += ids
        if len(self.died) // BATCH % 5 == 0:
            client.discard(ids, **ANA)


class Relay:
    """`bartleby relay` as a process; its log is in a file."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self._file = folder / f"relay{len(list(folder.glob('relay*')))}"
        command = [sys.executable, "-m", "bartleby", "--dsn", dsn, "relay", "--look", "0.2", "--log", "json"]
        with self._file.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=output)

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(10) == -signal.SIGKILL, self.said()

    def worked(self) -> float:
        """Return how many seconds of a processor it has had."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def said(self) -> str:
        return self._file.read_text(errors="replace")[-3000:]


@dataclass(slots=True, eq=False)
class Stage:
    """One database, one bus, and relays."""

    dsn: str
    folder: Path
    bus: Sink
    client: Client
    conn: psycopg.Connection[tuple[Any, ...]]
    name: str = "bus"
    relays: list[Relay] = field(default_factory=list)

    def add(self, **settings: Any) -> None:
        """Add a sink for events of letters."""
        chosen = {"options": self.bus.options(), "types": LETTERS, **settings}
        self.client.put_sink(self.name, self.bus.kind, chosen, **ANA)

    def relay(self) -> Relay:
        self.relays.append(Relay(self.dsn, self.folder))
        return self.relays[-1]

    def sink(self) -> events.Sink:
        [found] = [each for each in self.client.sinks() if each.name == self.name]
        return found

    def count(self) -> int:
        return run(self.bus.count())

    def goes_on(self, more: int = 1) -> None:
        """Wait until the bus has so many more events."""
        wanted = self.count() + more
        until(lambda: self.count() >= wanted, lambda: f"{self.count()} of {wanted}: {self.said()}")

    def becomes(self, state: str) -> None:
        """Wait until the sink is working, or degraded."""
        until(lambda: self.sink().state == state, lambda: f"{self.sink()}: {self.said()}")

    def drained(self, seconds: float = 90) -> None:
        """Wait until nothing waits for the sink."""
        until(lambda: self.sink().waiting == 0, lambda: f"{self.sink()}: {self.said()}", seconds)

    def troubles(self) -> int:
        """Return how often the sink was degraded; each time and its end were reported once."""
        query: LiteralString = "select type from bartleby.event where type like %s and data ->> 'sink' = %s order by id"
        changes = [each.rpartition(".")[2] for each in column(self.conn, query, "io.bartleby.sink.%", self.name)]
        times = len(changes) // 2
        assert changes == ["degraded", "recovered"] * times, self.name
        return times

    def audited(self) -> int:
        """Return for how many events the audit log has a failure."""
        query: LiteralString = """
            select coalesce(sum((after ->> 'events')::bigint), 0)::bigint from bartleby.audit
            where action = 'sink.failure' and subject ->> 'sink' = %s"""
        return int(value(self.conn, query, self.name))

    def verdict(self, burial: Burial | None = None, *, ordered: bool = True) -> int:
        """Compare the bus with what happened: all of it is there, nothing else, and twins are the same event.

        Return how many events there are.
        """
        heard, expected = run(self._heard()), self._expected()
        if burial is not None:
            assert {(f"message/{message}", 1) for message in burial.died} <= expected, "letters were lost"
        found = {(subject, sequence) for subject, sequence, _ in heard}
        assert not expected - found, f"lost: {sorted(expected - found)[:5]}"
        assert found <= expected, f"invented: {sorted(found - expected)[:5]}"
        names: dict[str, tuple[str, int]] = {}
        last: Counter[str] = Counter()
        for subject, sequence, name in heard:
            assert not ordered or name in names or sequence > last[subject], f"out of order: {name}"
            assert names.setdefault(name, (subject, sequence)) == (subject, sequence), f"two events are {name}"
            last[subject] = max(last[subject], sequence)
        assert len(names) == len(found), "an event has two ids"
        return len(found)

    def said(self) -> str:
        return "\n".join(each.said() for each in self.relays)

    async def _heard(self) -> list[Heard]:
        documents = [json.loads(body) async for _, body in self.bus.records()]
        return [(event["subject"], int(event["sequence"]), event["id"]) for event in documents]

    def _expected(self) -> set[tuple[str, int]]:
        """Return what happened to letters, by the letters themselves."""
        query: LiteralString = "select message_id, status from bartleby.dead_letters where queue = %s"
        found = self.conn.execute(query, [QUEUE]).fetchall()
        once = {(f"message/{message}", 1) for message, _ in found}
        return once | {(f"message/{message}", 2) for message, status in found if status == "discarded"}


@contextlib.contextmanager
def stage(kind: type[Sink], dsn: str, folder: Path, name: str = "bus") -> Iterator[Stage]:
    """A stage with a bus that runs."""
    if why := kind.missing():
        pytest.skip(why)
    bus = kind(folder)
    try:
        run(bus.start())
        with Client(dsn) as client, psycopg.connect(dsn, autocommit=True) as conn:
            client.create_queue(QUEUE, {"breaker": "off"})
            opened = Stage(dsn, folder, bus, client, conn, name)
            try:
                yield opened
            finally:
                for each in opened.relays:
                    each.process.kill()
                    each.process.wait()
    finally:
        run(bus.stop())


def until(condition: Callable[[], object], problem: str | Callable[[], str], seconds: float = 60) -> None:
    """Wait for a condition that is expensive to check."""
    began, pause = time.monotonic(), 0.02
    while not condition():
        waited = time.monotonic() - began
        assert waited < seconds, problem if isinstance(problem, str) else problem()
        time.sleep(pause)
        pause = min(0.15, pause * 1.5)
