"""Relays for tests: in a thread of the test's own process, with sinks that do as the test says.

Bus               a sink in this process: what it got, and what it answers
relaying(…)       a Relay in a thread, whose sinks are buses by their names
die(client, …)    dead letters, which are what events are made of
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

from bartleby import Client, Failure, relay
from bartleby.config import Settings
from bartleby.events import Sink
from bartleby.relay import Relay
from bartleby.sinks.publisher import Event, Failed, Outcome, Published
from tests.kit.worker import Running

if TYPE_CHECKING:
    from bartleby.worker import Worker

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
        outcomes: list[Outcome] = []
        for each in events:
            outcome = self._one(each)
            if isinstance(outcome, Published):
                self.events.append(dict(each))
            outcomes.append(outcome)
        return outcomes

    def _one(self, event: Event) -> Outcome:
        if self.down is not None:
            return Failed(self.down)
        return Published() if self.answer is None else self.answer(event)

    async def close(self) -> None:
        self.closed += 1


def opening(buses: Mapping[str, Any]) -> Callable[[str, Mapping[str, Any], float], Any]:
    """Return what opens them, by their option `name`."""

    def open_one(_kind: str, options: Mapping[str, Any], _timeout: float) -> Any:
        found = buses[options["name"]]
        if isinstance(found, BaseException):
            raise found
        return found

    return open_one


@contextlib.contextmanager
def relaying(dsn: str, buses: Mapping[str, Any], **options: Any) -> Iterator[Running]:
    """Run a relay; at the end it is stopped like by two SIGTERM."""
    settings = Settings(dsn=dsn, spool="off")
    with mock.patch.object(relay, "open_publisher", opening(buses)):
        made = Relay(settings, **{"look": 0.1, "poll": 0.05, **options})
        running = Running(cast("Worker", made))
        try:
            yield running
        finally:
            if running.thread.is_alive():
                running.stop()
                running.stop()
            running.thread.join(30)
    assert not running.thread.is_alive(), "the relay does not end"
    if running.error is not None:
        raise running.error


def add(client: Client, name: str = "bus", **settings: Any) -> None:
    """Add a sink that is a bus of this process."""
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


def die_together(client: Client, payloads: Sequence[object]) -> list[int]:
    """Let messages die in one transaction: one event row stands for all of them."""
    sent = client.send_many("orders", [{"payload": payload} for payload in payloads])
    lease = client.claim("orders", "web-1", limit=len(payloads))
    assert lease is not None
    client.fail(lease.id, [Failure(each.position, "KeyError", "'x'", verdict="dead") for each in lease.messages])
    return list(sent)


def sink(client: Client, name: str = "bus") -> Sink:
    """Return the current state of a sink."""
    [found] = [each for each in client.sinks() if each.name == name]
    return found
