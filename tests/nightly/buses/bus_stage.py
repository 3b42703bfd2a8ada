"""A stage for buses: letters that die at a rate, the relay as a process, a bus to break, and the verdict."""

import asyncio
import contextlib
import functools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, LiteralString, Self, TypeVar

import psycopg
import pytest

from bartleby import Client, events
from bartleby.errors import BartlebyError
from tests.kit.dead_letters import bury
from tests.kit.relay import ANA, sink
from tests.kit.sinks import harness_kafka, harness_nats, harness_rabbitmq, harness_redis, harness_webhook
from tests.kit.sinks.conformance import Sink
from tests.kit.sql import column, value
from tests.kit.worker import Program, until

QUEUE = "orders"
ROOT = Path(__file__).parents[3]
BATCH = 100
T = TypeVar("T")
BUSES: dict[str, type[Sink]] = {
    "nats": harness_nats.Harness,
    "nats of three": harness_nats.Cluster,
    "redis": harness_redis.Harness,
    "rabbitmq": harness_rabbitmq.Harness,
    "kafka": harness_kafka.Large,
    "webhook": harness_webhook.Harness,
}


def run(work: Coroutine[Any, Any, T]) -> T:
    """Await something in the event loop of a thread, which lives as long as the servers that are started there."""
    return asyncio.run_coroutine_threadsafe(work, _loop()).result(900)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


class Burial:
    """Lets messages die until the end of the block; every fifth batch is discarded, which is an event too."""

    def __init__(self, dsn: str, rate: float) -> None:
        self.died: list[int] = []
        self._dsn = dsn
        self._pause = BATCH / rate
        self._due = time.monotonic()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def calm_down(self) -> None:
        """Continue with a tenth of the rate, without what is overdue."""
        self._pause *= 10
        self._due = time.monotonic()

    def goes_on(self) -> None:
        before = len(self.died)
        until(lambda: len(self.died) > before)

    def _run(self) -> None:
        while not self._ending.is_set():
            # a server that crashes closes the connection
            with contextlib.suppress(psycopg.Error, BartlebyError, OSError), Client(self._dsn) as client:
                while not self._ending.is_set():
                    self._bury(client)
                    self._due += self._pause
                    self._ending.wait(max(0.0, self._due - time.monotonic()))
            self._ending.wait(0.1)

    def _bury(self, client: Client) -> None:
        ids = bury(client, range(BATCH))
        self.died += ids
        if len(self.died) // BATCH % 5 == 0:
            client.discard(ids, **ANA)


@dataclass(slots=True, eq=False)
class Stage:
    dsn: str
    folder: Path
    bus: Sink
    client: Client
    conn: psycopg.Connection[tuple[Any, ...]]
    name: str = "bus"
    relays: list[Program] = field(default_factory=list)

    def add(self, **settings: Any) -> None:
        chosen = {"options": self.bus.options(), "types": ["dead_letter.*"], **settings}
        self.client.put_sink(self.name, self.bus.kind, chosen, **ANA)

    def relay(self) -> Program:
        self.relays.append(Program(self.dsn, "--look", "0.2", "--log", "json", cwd=ROOT, command="relay"))
        return self.relays[-1]

    def sink(self) -> events.Sink:
        return sink(self.client, self.name)

    def count(self) -> int:
        return run(self.bus.count())

    def goes_on(self, more: int = 1) -> None:
        wanted = self.count() + more
        self._wait(lambda: self.count() >= wanted)

    def becomes(self, state: str) -> None:
        self._wait(lambda: self.sink().state == state)

    def drained(self, seconds: float = 90) -> None:
        self._wait(lambda: self.sink().waiting == 0, seconds)

    def _wait(self, condition: Callable[[], object], seconds: float = 60) -> None:
        """Wait for a condition that is expensive to check."""
        deadline = time.monotonic() + seconds
        while not condition():
            logs = "\n".join(each.text()[-3000:] for each in self.relays)
            assert time.monotonic() < deadline, f"{self.sink()}: {logs}"
            time.sleep(0.1)

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

    def verdict(self, burial: Burial, *, ordered: bool = True) -> None:
        """Compare the bus with what happened: all of it is there, nothing else, and twins are the same event."""
        heard, expected = run(self._heard()), self._expected()
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

    async def _heard(self) -> list[tuple[str, int, str]]:
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
                    each.kill()
    finally:
        run(bus.stop())
