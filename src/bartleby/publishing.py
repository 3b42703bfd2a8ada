"""What the relay does for one sink: references become events, events are published in their order, none is passed over.

    messages → a few references at a time → events → chunks without the same subject twice → the publisher

What the sink refuses for good is put aside as a dead letter of its queue. What it does not take now is tried again
here, before anything later, as often as it takes: the lease is renewed meanwhile. When the attempts are used up that is
reported, once for an event, and from then on single events are tried, at growing intervals, until one gets through.

A message is done when all its events are published or put aside; whoever is killed before leaves it to the next relay,
which sends the same events, with the same ids, once more.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

import psycopg

from bartleby import calls, emitting, telemetry
from bartleby.calls import Call
from bartleby.dressing import Document, Item, Reference, Refusal, chunk, event_number, reference_of, told
from bartleby.events import SinkSettings
from bartleby.link import Link, passing
from bartleby.message import Message, MessageId
from bartleby.outcomes import Done, Snooze
from bartleby.reporting import Reports
from bartleby.sinks.publisher import Event, Failed, Outcome, Published, Publisher, Refused

T = TypeVar("T")

BATCH = 100
"""Messages at once; each may stand for a hundred events, so they are expanded a few at a time."""
_EVENTS, _BYTES = 500, 8_000_000
_TURN = 0.02
_ASK_EVERY = 1.0
_LONGEST_PAUSE = 30.0
_LONGEST_ASKED = 300.0
_DATABASE_PAUSE = 1.0
_SLOWEST = 30.0


class Stopping(Exception):
    """The relay stops, or the sink is paused: what is not done goes back."""


class Outlet:
    """Publishes what one sink is to hear of. `handle` is the handler of its queue."""

    def __init__(
        self,
        sink: SinkSettings,
        publisher: Publisher,
        *,
        worker: str,
        link: Link,
        stopping: asyncio.Event,
        reports: Reports,
    ) -> None:
        self._sink = sink
        self._publisher = publisher
        self._worker = worker
        self._link = link
        self._stopping = stopping
        self._reports = reports
        self._stride = 5
        self._window = _EVENTS
        self._asked_at = float("-inf")

    async def handle(self, messages: list[Message]) -> Mapping[MessageId, object]:
        """Publish what these messages stand for; return what became of each."""
        outcomes: dict[MessageId, object] = {}
        waiting = [(message, asked) for message in messages if (asked := _asked(message, outcomes)) is not None]
        with contextlib.suppress(Stopping):
            await self._serve(waiting, outcomes)
        later = Snooze(0, "the relay stops, or the sink is paused")
        return {message.id: outcomes.get(message.id, later) for message in messages}

    async def _serve(self, waiting: "list[_Asked]", outcomes: dict[MessageId, object]) -> None:
        # while some are published the next are read
        step, ahead = self._begun(waiting)
        try:
            while step:
                if self._stopping.is_set():
                    raise Stopping
                now, reading, waiting = step, ahead, waiting[len(step) :]
                try:
                    items = await reading
                    step, ahead = self._begun(waiting)
                    await self._deliver_all(now, items, outcomes)
                except Stopping:
                    raise
                except Exception:  # noqa: BLE001 - one that cannot be read, or put aside, must not hold up the others
                    await self._serve_singly(now, outcomes)
                    if ahead is reading:
                        step, ahead = self._begun(waiting)
                for message, _ in now:
                    outcomes.setdefault(message.id, Done())
        finally:
            ahead.cancel()
            await asyncio.wait([ahead])
            if not ahead.cancelled():
                ahead.exception()  # it was asked for nobody

    def _begun(self, waiting: "list[_Asked]") -> "tuple[list[_Asked], asyncio.Task[list[Item]]]":
        step = waiting[: self._stride]
        return step, asyncio.create_task(self._expanded(step))

    async def _serve_singly(self, step: "list[_Asked]", outcomes: dict[MessageId, object]) -> None:
        for each in step:
            try:
                await self._deliver_all([each], await self._expanded([each]), outcomes)
            except Stopping:
                raise
            except Exception as error:  # noqa: BLE001 - it is evidence
                outcomes[each[0].id] = error

    async def _deliver_all(self, step: "list[_Asked]", items: list[Item], outcomes: dict[MessageId, object]) -> None:
        rest = items
        try:
            while rest:
                part = chunk(rest, self._window, _BYTES)
                rest = rest[len(part) :]
                await self._deliver(part, outcomes)
        except Stopping:
            left = {event_number(item.document) for item in items if not item.settled}
            for message, reference in step:
                if reference["event"] not in left:
                    outcomes.setdefault(message.id, Done())
            raise

    async def _expanded(self, step: "list[_Asked]") -> list[Item]:
        references = [reference for _, reference in step]
        if not references:
            return []
        documents = await self._read(references)
        found = {document["id"]: document for document in documents}  # a second reference to an event adds nothing
        for event in {each["event"] for each in references} - {event_number(each) for each in documents}:
            text = f"event {event} is gone: sink {self._sink.name} is not told of it"
            telemetry.warning("event.gone", text, sink=self._sink.name, event_id=event)
        letters = {message.key: message for message, _ in step if message.key is not None}
        items = [Item(document, letters.get(name)) for name, document in found.items()]
        await self._dress(items)
        if items:
            most = min(_EVENTS, _BYTES * len(items) / sum(item.size for item in items)) * len(step) / len(items)
            self._stride = max(1, min(BATCH, int(most)))
        return items

    async def _read(self, references: Sequence[Reference]) -> list[Document]:
        call = emitting.cloud_events(self._sink.name, references)
        if len(references) == 1:
            return await self._insist(call)
        try:
            return await self._link.run(call)
        except (psycopg.Error, OSError) as error:
            if not passing(error):
                raise
        half = len(references) // 2  # with their payloads they may be more than can be read in time
        return [*await self._read(references[:half]), *await self._read(references[half:])]

    async def _dress(self, items: Sequence[Item]) -> None:
        # large payloads take their time, which other sinks need not wait for
        begun = time.monotonic()
        for item in items:
            item.dress(self._sink.link)
            if time.monotonic() - begun > _TURN:
                await asyncio.sleep(0)
                begun = time.monotonic()

    async def _deliver(self, items: list[Item], outcomes: dict[MessageId, object]) -> None:
        pending, probing, turn, width = items, False, 0, 1
        pause = shortest = min(_LONGEST_PAUSE, max(self._sink.delay, 0.05))
        while pending:
            await self._unless_paused()
            tried = _turned(pending, turn)[:width] if probing else pending
            failures = await self._try(tried, outcomes)
            pending = [item for item in pending if not item.settled]
            if len(failures) < len(tried):
                pause = shortest
            if not failures:
                width *= 2
                continue
            asked = min(max((each.retry_after or 0.0 for each in failures), default=0.0), _LONGEST_ASKED)
            if await self._used_up(tried, failures[0], asked):
                probing = True
            turn, width = turn + 1, 1
            if not probing:
                await self._rest(asked or self._sink.delay)
                continue
            await self._rest(max(asked, pause * random.uniform(0.5, 1)))  # noqa: S311 - spreads load, no secret
            pause = min(_LONGEST_PAUSE, pause * 2)
        await self._reports.recovered()
        if not probing and turn == 0:
            self._window = min(_EVENTS, self._window * 2)
        elif probing:
            self._window = max(1, len(items) // 2)  # perhaps it was too much at once

    async def _try(self, items: Sequence[Item], outcomes: dict[MessageId, object]) -> list[Failed]:
        answers = await self._published([item.document for item in items])
        refused = [(item, answer) for item, answer in zip(items, answers, strict=True) if isinstance(answer, Refused)]
        await self._put_aside(refused, outcomes)
        taken = 0
        for item, answer in zip(items, answers, strict=True):
            item.tries += 1
            item.settled = not isinstance(answer, Failed)
            taken += isinstance(answer, Published)
        self._reports.published(taken)
        return [answer for answer in answers if isinstance(answer, Failed)]

    async def _published(self, events: Sequence[Event]) -> list[Outcome]:
        # a publisher bounds itself and never raises; one that does not is mended, and costs no event
        trouble = "it gave no outcome for each event"
        try:
            async with asyncio.timeout(_SLOWEST + 10 * self._sink.timeout):
                # a task of its own: libraries cancel whoever waits for a connection that they close
                answers = await asyncio.create_task(self._called(events))
            if len(answers) == len(events) and all(isinstance(each, Outcome) for each in answers):
                return answers
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            trouble = "it was cancelled, and not by us"
        except Exception as error:  # noqa: BLE001 - see above
            trouble = f"{type(error).__name__}: {error}"
        telemetry.error("sink.broken", f"sink {self._sink.name}: {told(trouble)}", sink=self._sink.name)
        return [Failed(trouble) for _ in events]

    async def _called(self, events: Sequence[Event]) -> list[Outcome]:
        return await self._publisher.publish(events)

    async def _put_aside(self, refused: Sequence[tuple[Item, Refused]], outcomes: dict[MessageId, object]) -> None:
        new = []
        for item, answer in refused:
            why = told(answer.why)
            telemetry.warning("event.refused", why, sink=self._sink.name, event_id=item.document["id"])
            if item.letter is not None:  # the same letter, once more
                outcomes[item.letter.id] = Refusal(why)
            else:
                name = item.document["id"]
                new.append({"id": name, "error_type": "Refused", "error": why, "worker": self._worker})
        if new:
            await self._insist(emitting.refuse_events(self._sink.name, new))

    async def _used_up(self, tried: Sequence[Item], failure: Failed, asked: float) -> bool:
        """Report events whose attempts are used up, each once; return whether there are any, new or not."""
        attempts = 1 if asked > _LONGEST_PAUSE else self._sink.attempts
        exhausted = [item for item in tried if not item.settled and item.tries >= attempts]
        new = [item for item in exhausted if not item.counted]
        for item in new:
            item.counted = True
        if exhausted:
            await self._reports.failed(len(new), told(failure.why))
        return bool(exhausted)

    async def _unless_paused(self) -> None:
        if time.monotonic() < self._asked_at + _ASK_EVERY:
            return
        self._asked_at = time.monotonic()
        if (await self._insist(calls.outlook(self._sink.queue))).paused:
            raise Stopping

    async def _insist(self, call: Call[T]) -> T:
        pause = 0.05
        while True:
            try:
                return await self._link.run(call)
            except (psycopg.Error, OSError) as error:
                if not passing(error):
                    raise
                await self._rest(pause * random.uniform(0.5, 1))  # noqa: S311 - spreads load, no secret
                pause = min(_DATABASE_PAUSE, pause * 2)

    async def _rest(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        if self._stopping.is_set():
            raise Stopping


_Asked = tuple[Message, Reference]


def _asked(message: Message, outcomes: dict[MessageId, object]) -> Reference | None:
    try:
        return reference_of(message.payload)
    except Exception as error:  # noqa: BLE001 - what cannot be read spoils no other message
        outcomes[message.id] = error
        return None


def _turned(items: list[Item], turn: int) -> list[Item]:
    # the first if it can be, but one that never gets through must not be the only one that is tried
    start = (turn // 2) % len(items) if turn % 2 else 0
    return items[start:] + items[:start]
