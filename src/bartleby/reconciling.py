"""The reconciler: a bus can lose what it has acknowledged.

What was emitted is compared with what the sink has, and what is missing is published again, under the same ids.

    found = await Reconciler(client, "bus").missing(publisher, since, until)    # looks, and changes nothing
    await reconciler.send_again(found, actor="ana", reason="the stream was deleted")

First it is seen what waits for the sink, then what was emitted, then what the sink has: so whatever is not there in the
end, and did not wait in the beginning, is missing. What still waits needs nobody's help, and what the sink has refused
is a dead letter of its queue, to be replayed: both are left out. While something waits that was sent again, which may
be of any time, nothing is looked at.

A sink that drops duplicates may take what is sent again for one, as NATS does within the duplicate window of a stream:
looking a second time, when the relay has published, tells.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from bartleby.client import AsyncRunner
from bartleby.errors import UnknownSink
from bartleby.events import Sink
from bartleby.evidence import term
from bartleby.sinks.publisher import Readable

_PAGE = 1000
_LETTERS = 500
_LINES = 500
_CHUNK = 1000
# An event is a moment older than the message that refers to it; and clocks differ.
_MARGIN = timedelta(minutes=1)
_SKEW = timedelta(minutes=10)

Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Found:
    """What a sink should have: how many events were looked at, and of those to send again the ordinals, as bits."""

    looked: int
    """events"""
    until: datetime
    """what is younger still waits, or was not asked for"""
    rows: Mapping[int, int]
    whole: frozenset[int]
    """rows of which all events are meant"""

    @property
    def events(self) -> int:
        """How many events are to be sent again."""
        return sum(mask.bit_count() for mask in self.rows.values())

    def references(self) -> Iterator[dict[str, Any]]:
        """Return what the relay is to send again."""
        for row, mask in sorted(self.rows.items()):
            if row in self.whole:
                yield {"event": row}
            else:
                yield {"event": row, "ordinals": [n for n in range(mask.bit_length()) if mask >> n & 1]}


class Reconciler:
    """Compares one sink with what it should have."""

    def __init__(self, client: AsyncRunner, sink: str) -> None:
        self._client = client
        self._sink = sink

    async def everything(self, since: datetime, until: datetime, on_progress: Progress = bool) -> Found:
        """Return all events of a time that the sink should have by now."""
        until = await self._settled_before(since, until)
        rows: dict[int, int] = {}
        after, looked = 0, 0
        while True:
            page = await self._client.emitted(self._sink, since, until, after=after, limit=_PAGE)
            for each in page:
                rows[each.event_id] = rows.get(each.event_id, 0) | 1 << each.ordinal
            looked += len(page)
            on_progress(looked)
            if len({each.event_id for each in page}) < _PAGE:
                return _without(Found(looked, until, rows, frozenset(rows)), await self._refused())
            after = page[-1].event_id

    async def missing(
        self, readable: Readable, since: datetime, until: datetime, on_progress: Progress = bool
    ) -> Found:
        """Return those that the sink does not have."""
        found = await self.everything(since, until, on_progress)
        has: dict[int, int] = {}
        # when it was published has little to do with when it happened
        async for event in readable.ids(since - _SKEW, datetime.now(UTC) + _SKEW):
            row, bit = _parsed(event)
            if found.rows.get(row, 0) & bit:
                has[row] = has.get(row, 0) | bit
        return _without(found, has)

    async def send_again(self, found: Found, *, on_progress: Progress = bool, **signed: Any) -> int:  # noqa: ANN401
        """Have the relay publish these once more, by `actor` and for `reason`; return how many events."""
        chunk: list[dict[str, Any]] = []
        sent = 0
        for reference in found.references():
            chunk.append(reference)
            if len(chunk) == _CHUNK:
                sent += await self._emit(found, chunk, signed)
                on_progress(sent)
                chunk = []
        if chunk:
            sent += await self._emit(found, chunk, signed)
            on_progress(sent)
        return sent

    async def _emit(self, found: Found, chunk: list[dict[str, Any]], signed: Mapping[str, Any]) -> int:
        await self._client.emit_again(self._sink, chunk, **signed)
        return sum(found.rows[each["event"]].bit_count() for each in chunk)

    async def _refused(self) -> dict[int, int]:
        refused: dict[int, int] = {}
        after = None
        while True:
            page = await self._client.dead_letters(term("queue", f"sink.{self._sink}"), limit=_LETTERS, after=after)
            for letter in page:
                row, bit = _parsed(letter.key or "")
                refused[row] = refused.get(row, 0) | bit
            if page.complete:
                return refused
            after = page.next

    async def _settled_before(self, since: datetime, until: datetime) -> datetime:
        now = datetime.now(UTC)  # what happens from now on was not waiting yet
        sink = await self.sink()
        if not sink.waiting:
            return min(until, now)
        oldest = sink.oldest_waiting_at or now
        return since if await self._sent_again_since(oldest) else min(until, oldest - _MARGIN)

    async def _sent_again_since(self, moment: datetime) -> bool:
        before = None
        while True:
            page = await self._client.audit_log(action="sink.emit_again", limit=_LINES, before_id=before)
            for line in page:
                if line.at < moment:
                    return False
                if line.subject["sink"] == self._sink:
                    return True
            if len(page) < _LINES:
                return False
            before = page[-1].id

    async def sink(self) -> Sink:
        """Return the sink as it does now."""
        for sink in await self._client.sinks():
            if sink.name == self._sink:
                return sink
        raise UnknownSink(f"unknown sink: {self._sink!r}", hint="bartleby sinks lists them")


def _without(found: Found, has: Mapping[int, int]) -> Found:
    rows = {row: left for row, mask in found.rows.items() if (left := mask & ~has.get(row, 0))}
    whole = frozenset(row for row in rows if row in found.whole and rows[row] == found.rows[row])
    return Found(found.looked, found.until, rows, whole)


def _parsed(event: str) -> tuple[int, int]:
    # of anything that others have put there nothing is known
    parts = event.split(".")[1:]
    if not parts or not all(each.isascii() and each.isdigit() for each in parts):
        return 0, 0
    row, *ordinal = map(int, parts)
    return row, 1 << min(ordinal[0], 10_000) if ordinal else 1
