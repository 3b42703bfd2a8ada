"""Relays for tests: in a thread of the test's own process, with sinks that do as the test says."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast
from unittest import mock

from bartleby import Client, Failure, relay
from bartleby.config import Settings
from bartleby.events import Sink
from bartleby.relay import Relay
from bartleby.sinks import open_publisher
from bartleby.sinks.publisher import Event, Failed, Outcome, Published
from bartleby.worker import Worker
from tests.kit.worker import Running, present

ANA: dict[str, Any] = {"actor": "ana", "reason": "so it is"}


class Bus:
    """A sink. `answer` gives the outcome of an event; `down` is the reason why it takes none."""

    def __init__(self, answer: Callable[[Event], Outcome] | None = None, down: str | None = None) -> None:
        self.down = down
        self.answer = answer
        self.tried: list[list[str]] = []
        self.events: list[dict[str, Any]] = []
        self.closed = 0

    @property
    def known(self) -> list[str]:
        return [each["id"] for each in self.events]

    def of(self, type_: str) -> list[dict[str, Any]]:
        return [each for each in self.events if each["type"] == f"io.bartleby.{type_}"]

    async def publish(self, events: Sequence[Event]) -> list[Outcome]:
        self.tried.append([each["id"] for each in events])
        assert len({each["subject"] for each in events}) == len(events)
        outcomes = [self._one(each) for each in events]
        self.events += [dict(e) for e, outcome in zip(events, outcomes, strict=True) if isinstance(outcome, Published)]
        return outcomes

    def _one(self, event: Event) -> Outcome:
        if self.down is not None:
            return Failed(self.down)
        return Published() if self.answer is None else self.answer(event)

    async def close(self) -> None:
        self.closed += 1


@contextlib.contextmanager
def relaying(dsn: str, buses: Mapping[str, Any] | None = None, **options: Any) -> Iterator[Running]:
    """Run a relay, with its own sinks or with these buses, by their option `name`."""

    def open_one(kind: str, given: Mapping[str, Any], timeout: float) -> Any:
        if buses is None:
            return open_publisher(kind, given, timeout)
        found = buses[given["name"]]
        if isinstance(found, BaseException):
            raise found
        return found

    made = Relay(Settings(dsn=dsn), **{"look": 0.1, "poll": 0.05, **options})
    with mock.patch.object(relay, "open_publisher", open_one), Running(made) as running:
        yield running


def worker_of(running: Running, name: str = "bus") -> Worker:
    """Return the worker of a relay that serves this sink."""
    return present(cast("Relay", running.worker)._stands[name]._worker)


def leases_of(running: Running) -> set[int]:
    """Return the leases that a relay knows of."""
    stands = list(cast("Relay", running.worker)._stands.values())
    workers = [stand._worker for stand in stands if stand._worker is not None]
    return {lease for each in workers for lease in list(each._shared.holding.leases)}


def add(client: Client, name: str = "bus", **settings: Any) -> None:
    client.put_sink(name, "log", {"options": {"name": name}, "delay": 0.05, **settings}, **ANA)


def die(client: Client, count: int = 1, queue: str = "orders", **failure: Any) -> list[int]:
    """Let messages die, each in a transaction of its own."""
    client.send_many(queue, [{"payload": {"n": n}} for n in range(count)])
    died: list[int] = []
    while lease := client.claim(queue, "web-1", limit=1):
        message = lease.messages[0]
        client.fail(lease.id, [Failure(message.position, "KeyError", "'x'", verdict="dead", **failure)])
        died.append(message.id)
    return died


def sink(client: Client, name: str = "bus") -> Sink:
    [found] = [each for each in client.sinks() if each.name == name]
    return found
