"""What a sink is to the relay: something that takes events and says of each whether it has it.

Published means that the other side has confirmed it. Whatever is not confirmed is not published, however likely it is.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, Self, TypeAlias, runtime_checkable

from bartleby.sinks.options import Options

Event: TypeAlias = Mapping[str, Any]
"""A CloudEvent 1.0 as its JSON says it."""


@dataclass(frozen=True, slots=True)
class Published:
    """The sink has confirmed it; `note` is what it said, such as the stream and the number there."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """The sink will never take this event, whatever the time: it is put aside for somebody to look at."""

    why: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Not now. `retry_after` is how many seconds the sink asks us to wait."""

    why: str
    retry_after: float | None = None


Outcome: TypeAlias = Published | Refused | Failed


class Publisher(Protocol):
    """One transport. It connects when it has to, and again when it was cut off."""

    @classmethod
    def open(cls, options: Options, timeout: float) -> Self:
        """Return one for these options, or raise InvalidSettings; nothing is connected yet."""
        ...

    async def publish(self, events: Sequence[Event]) -> list[Outcome]:
        """Publish events, and return what became of each, in their order.

        No two of them have the same subject. Trouble of the sink is an outcome, never an exception, and is known after
        about `timeout` seconds at the latest.
        """
        ...

    async def close(self) -> None:
        """Let go of the connection; publish() would make a new one."""
        ...


@runtime_checkable
class Readable(Protocol):
    """A sink that can be asked what it has."""

    def ids(self, since: datetime, until: datetime) -> AsyncIterator[str]:
        """Return the ids of the events that it holds from this time; more than asked for does no harm."""
        ...
