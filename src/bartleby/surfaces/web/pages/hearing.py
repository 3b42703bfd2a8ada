"""Which sinks have heard of a letter: they are told in the order of things, so it is there once nothing older waits."""

from collections.abc import Sequence

from bartleby.events import Sink
from bartleby.evidence import DeadLetter

_TYPES = {"*", "dead_letter.*", "dead_letter.created"}


def heard(sinks: Sequence[Sink], letter: DeadLetter) -> list[tuple[Sink, str]]:
    """Return the sinks that want to hear of this death, each with `told`, `waiting` or `later`: it was added since."""
    if letter.queue.startswith("sink."):
        return []
    return [(each, _state(each, letter)) for each in sinks if _wants(each, letter)]


def _wants(sink: Sink, letter: DeadLetter) -> bool:
    return not _TYPES.isdisjoint(sink.types) and (sink.queues is None or letter.queue in sink.queues)


def _state(sink: Sink, letter: DeadLetter) -> str:
    if sink.created_at > letter.dead_at:
        return "later"
    older = sink.oldest_waiting_at is not None and sink.oldest_waiting_at <= letter.dead_at
    return "waiting" if older else "told"
