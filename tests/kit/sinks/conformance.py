"""What the conformance suite needs to know of a sink.

A sink of the kind `nats` has a module harness_nats.py with a class `Harness`, which is a Sink: it starts the real
server, breaks it and reads what arrived.
"""

import asyncio
import importlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, cast

from bartleby.sinks import open_publisher
from bartleby.sinks.publisher import Failed, Outcome, Published, Publisher, Readable, Refused
from tests.kit.sinks.servers import Process

Open = Callable[..., Publisher]
TIMEOUT, PATIENT = 1.0, 60.0
"""The timeout where no answer comes, and where one does."""
PATIENCE = 60.0
"""How much longer than its timeout a call may take on a busy machine."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One delivery: the id of the event, the value by which consumers recognise duplicates, and the CloudEvent."""

    id: str
    key: str
    body: bytes | None  # None where the sink has a format of its own


class Sink(ABC):
    """A real server and the properties of its sink. One instance a test; `folder` is for its files.

    The server is one process, unless start(), stop(), kill(), hang() and wake() are overridden.
    """

    kind: ClassVar[str]
    process: Process
    too_large: ClassVar[int | None] = None
    """Bytes of data with which the sink refuses an event; None: it takes every size."""
    cannot: ClassVar[Mapping[str, str]] = {}
    """Actions that are impossible (kill, hang), each with the reason."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def missing(cls) -> str | None:
        """Return how to get the server, if it is not on this machine."""
        return None

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Return the options of a publisher for it; it need not be running, its address never changes."""

    @abstractmethod
    def records(self) -> AsyncIterator[tuple[str, bytes]]:
        """Return key and CloudEvent of everything that arrived, in its order. The server runs."""

    async def start(self) -> None:
        """Start it, and return when it answers. Again after stop() and kill(): same address, same data."""
        await self.process.start()

    async def stop(self) -> None:
        """Stop it in good order; nothing to do if it is not running or hangs. The last call of every test."""
        await self.process.stop()

    async def outlast(self) -> None:  # noqa: B027 - most have nothing to do
        """Return when what was made for the events, such as a queue, survives kill(); events are not meant."""

    async def kill(self) -> None:
        """Kill it with -9. Confirmed events survive that."""
        await self.process.kill()

    async def hang(self) -> None:
        """Have it accept connections and bytes, and never answer."""
        self.process.freeze()

    async def wake(self) -> None:
        """End hang(); it goes on with what it has been sent."""
        self.process.thaw()

    async def count(self) -> int:
        """Return how many events arrived."""
        return len(await self.arrived())

    async def arrived(self) -> list[Arrival]:
        return [Arrival(json.loads(body)["id"], key, body) async for key, body in self.records()]

    def publisher(self, timeout: float = TIMEOUT, **changes: object) -> Publisher:
        """Return a publisher for it, with options changed."""
        return open_publisher(self.kind, {**self.options(), **changes}, timeout)


def event(number: int, *, data_bytes: int = 0) -> dict[str, Any]:
    """Return the event for the death of message `number`."""
    data: dict[str, Any] = {
        "message_id": number, "queue": "orders", "status": "dead", "cycle": 1, "reason": "exhausted", "attempts": 5,
        "error_type": "builtins.ValueError", "error": 'no such order: \u00fcn\u00efcode \U0001f4a5 "quoted"',
        "fingerprint": "0123456789abcdef", "group_id": 3, "dead_at": "2026-01-01T00:00:00.000000Z",
    }  # fmt: skip
    if data_bytes:
        data["payload"] = "x" * data_bytes
    return {
        "specversion": "1.0", "id": f"0a1b2c3d.{number}.1", "type": "io.bartleby.dead_letter.created",
        "source": "urn:bartleby:0a1b2c3d-0000-4000-8000-000000000000", "subject": f"message/{number}",
        "time": "2026-01-01T00:00:00.000000Z", "datacontenttype": "application/json",
        "dataschema": "urn:bartleby:event:1", "partitionkey": f"message/{number}", "sequence": "1",
        "sequencetype": "Integer", "data": data,
    }  # fmt: skip


def events(count: int, first: int = 1) -> list[dict[str, Any]]:
    """Return events of this many messages."""
    return [event(number) for number in range(first, first + count)]


def ids_of(batch: Sequence[dict[str, Any]]) -> list[str]:
    return [each["id"] for each in batch]


async def bounded(publisher: Publisher, batch: Sequence[dict[str, Any]]) -> list[Outcome]:
    """Publish, and give up waiting for the outcome long after the timeout."""
    outcomes = await asyncio.wait_for(publisher.publish(batch), PATIENCE)
    assert len(outcomes) == len(batch)
    return outcomes


async def publish_all(publisher: Publisher, batch: Sequence[dict[str, Any]]) -> None:
    """Publish as the relay does: what failed once more, until nothing is left. This may take long, it is answered."""
    deadline = time.monotonic() + 60
    left = list(batch)
    while left:
        outcomes = await publisher.publish(left)
        assert time.monotonic() < deadline, outcomes[0]
        left = [each for each, outcome in zip(left, outcomes, strict=True) if not isinstance(outcome, Published)]


def named(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the outcomes by their names: easy to compare, and to read when they differ."""
    return [type(each).__name__ for each in outcomes]


def why(outcome: Outcome) -> str:
    """Return the reason of an outcome that is not Published."""
    assert isinstance(outcome, Failed | Refused), outcome
    return outcome.why


async def stored_ids(publisher: Publisher, since: datetime = datetime(1970, 1, 1, tzinfo=UTC)) -> list[str]:
    """Return what a sink that can be read says it has, from this time on."""
    assert isinstance(publisher, Readable)
    return [each async for each in publisher.ids(since, datetime.now(UTC))]


def harness(kind: str) -> type[Sink]:
    """Return the harness of a kind of sink."""
    return cast("type[Sink]", importlib.import_module(f"tests.kit.sinks.harness_{kind}").Harness)
