"""Starts that are recorded before a handler runs, for messages whose attempts must never exceed their limit."""

from collections.abc import Awaitable, Callable, Sequence

from bartleby.execute import Released, Settlement
from bartleby.held import Held
from bartleby.message import Message

Items = Sequence[tuple[Held, Message]]
Begin = Callable[[Held, Sequence[int]], Awaitable[bool]]
"""Records the start of these positions of a lease; returns whether they may run."""

_NOT_BEGUN = Released(1.0, "its start could not be recorded")


def starts_first(items: Items) -> bool:
    """Return whether a start has to be recorded before these messages run."""
    return items[0][1].start_first or (len(items) > 1 and any(message.start_first for _, message in items))


async def begin_all(items: Items, begin: Begin) -> Items:
    """Record the starts that have to be, and return the messages that may run."""
    wanted: dict[Held, list[int]] = {}
    for held, message in items:
        if message.start_first:
            wanted.setdefault(held, []).append(message.position)
    refused = {held for held, positions in wanted.items() if not await begin(held, positions)}
    return [(held, message) for held, message in items if not (message.start_first and held in refused)]


def with_others(items: Items, begun: Items, settlements: Sequence[Settlement]) -> list[Settlement]:
    """Return what became of all these messages, of which only some have begun."""
    known = {message.id: settlement for (_, message), settlement in zip(begun, settlements, strict=True)}
    return [known.get(message.id, _NOT_BEGUN) for _, message in items]
