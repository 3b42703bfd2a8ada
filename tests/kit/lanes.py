"""Lanes of a worker without a database: leases and messages for them, and the settlements that they hand over."""

import inspect
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from bartleby import Message
from bartleby.execute import Executor, Settlement
from bartleby.failure import Recorder
from bartleby.handlers import handler
from bartleby.held import Backlog, Held
from bartleby.lanes import CoroutineLane, Lane
from bartleby.message import LeaseId, MessageId, Position
from bartleby.threads import ThreadLane
from tests.kit.sinks.servers import eventually

AT = datetime(2024, 1, 1, tzinfo=UTC)


def messages(count: int, first: int = 1) -> list[Message]:
    return [
        Message(MessageId(n), "orders", LeaseId(7), Position(n), 1, str(n), None, None, None, AT, solo=False)
        for n in range(first, first + count)
    ]


class Collected:
    """The settlements that a lane hands over."""

    def __init__(self) -> None:
        self.settled: list[tuple[int, Settlement]] = []

    def __call__(self, _: Held, message: Message, settlement: Settlement) -> None:
        self.settled.append((message.id, settlement))

    @property
    def ids(self) -> list[int]:
        return [message_id for message_id, _ in self.settled]

    async def reach(self, count: int) -> None:
        await eventually(lambda: len(self.settled) >= count)


MakeLane = Callable[..., tuple[Any, Collected]]


def lease(size: int, number: int = 7) -> Held:
    return Held(LeaseId(number), "orders", size, 3600, time.monotonic(), solo=False, backlog=Backlog())


async def begin(_: Held, __: object) -> bool:
    return True


@pytest.fixture
def lane_of() -> Iterator[MakeLane]:
    """Make a lane, of coroutines if its handler is awaited, otherwise of threads."""
    opened: list[ThreadLane] = []

    def make(function: Callable[..., Any], concurrency: int = 4, **options: Any) -> tuple[Lane, Collected]:
        collected = Collected()
        executor = Executor(handler("orders", function, **options), Recorder(), None)
        if inspect.iscoroutinefunction(function):
            return CoroutineLane(executor, concurrency, 500, collected, begin), collected
        opened.append(ThreadLane(executor, concurrency, 500, collected, begin))
        return opened[-1], collected

    yield make
    for lane in opened:
        lane.close()
