"""The fetcher of a queue: claims as much as its lane has room for, and sleeps when there is nothing."""

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, field

import psycopg

from bartleby import attendance, calls, telemetry
from bartleby.app import Bartleby, once_key
from bartleby.errors import BartlebyError
from bartleby.handlers import Handler
from bartleby.held import Held
from bartleby.holding import Holding
from bartleby.lanes import Lane
from bartleby.link import Link, passing
from bartleby.message import Lease, Message
from bartleby.terms import Terms
from bartleby.waking import Listener

_TOO_NEW = 10.0
_LONGEST_PAUSE = 1.0
_LONGEST_SLEEP = 5.0
_LOOK_EVERY = 0.25
_SOON = 60.0


@dataclass(slots=True, kw_only=True)
class Shared:
    """What the fetchers of a worker have in common."""

    app: Bartleby
    worker: str
    link: Link
    terms: Terms
    listener: Listener
    holding: Holding
    poll: float
    until_idle: bool
    stopping: asyncio.Event
    claiming: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by who claims, and by a message that runs alone: nothing is claimed meanwhile."""
    idle: set[str] = field(default_factory=set)
    unsure: set[str] = field(default_factory=set)
    """Queues that were asked for messages and did not answer: they may have leased some to us."""
    granted: int = 0
    """How many leases there were so far."""


class Fetcher:
    """Claims for one lane."""

    def __init__(self, lane: Lane, shared: Shared) -> None:
        self._lane = lane
        self._queue = lane.handler.queue
        self._shared = shared
        self._seen: int | None = None

    async def run(self) -> None:
        """Fetch until the worker stops."""
        stopping, pause = self._shared.stopping, 0.05
        while not stopping.is_set():
            limit = self._lane.room()
            if not limit:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LONGEST_PAUSE):  # messages of lost leases leave without a word
                        await self._lane.wanted.wait()
                continue
            try:
                if self._queue in self._shared.unsure:
                    await self._give_back()
                if not await self._claim(limit):
                    await self._sleep()
                pause = 0.05
            except (psycopg.Error, BartlebyError, OSError) as error:
                if not passing(error):
                    telemetry.warning("claim.failed", f"nothing could be claimed: {error}", queue=self._queue)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause * random.uniform(0.5, 1)):  # noqa: S311 - spreads load
                        await stopping.wait()
                pause = min(_LONGEST_PAUSE, pause * 2)

    async def _give_back(self) -> None:
        async with self._shared.claiming:
            known = self._shared.holding.known()
            await self._shared.link.run(attendance.give_back(self._queue, self._shared.worker, known))
            self._shared.unsure.discard(self._queue)

    async def _claim(self, limit: int) -> bool:
        shared = self._shared
        async with shared.claiming:
            if shared.stopping.is_set():
                return True
            self._seen = None if shared.holding.leases else shared.granted
            claimed = await self._take(limit)
            if claimed is None:
                return False
            held, messages = claimed
            if held.solo and messages:
                await shared.holding.run_alone(self._lane, held, messages, lambda: self._take(1))
            else:
                self._lane.put(held, messages)
        return True

    async def _take(self, limit: int) -> tuple[Held, list[Message]] | None:
        shared = self._shared
        handler = self._lane.handler
        length = handler.lease or await shared.terms.lease(self._queue)
        alone = not shared.holding.busy() and self._lane.runs_at_once()
        asked = time.monotonic()
        shared.unsure.add(self._queue)
        lease = await shared.link.run(
            calls.claim(
                self._queue,
                shared.worker,
                limit=limit,
                lease=length,
                confirm=True,
                max_attempts=handler.retry.max_attempts,
                alone=alone,
                beside=[held.id for held in shared.holding.leases.values() if held.alone],
            )
        )
        shared.unsure.discard(self._queue)
        if lease is None:
            return None
        shared.granted += 1
        shared.idle.clear()
        for other in shared.holding.leases.values():
            other.alone = False
        held = shared.holding.hold(lease, self._queue, length, asked)
        held.alone = alone and len(lease) == 1
        self._calm(lease)
        return held, await self._runnable(handler, held, lease)

    def _calm(self, lease: Lease) -> None:
        storms = self._shared.holding.settler.storms
        if self._queue in storms and len(lease) > 1:  # while the breaker is open, messages come one at a time
            storms.discard(self._queue)
            telemetry.event("breaker.closed", f"the breaker of queue {self._queue} is closed again", queue=self._queue)

    async def _runnable(self, handler: Handler, held: Held, lease: Lease) -> list[Message]:
        runnable, generation = list(lease), self._shared.app.generation or 0
        if any(message.generation is not None and message.generation > generation for message in runnable):
            newer = [(held, message) for message in runnable if (message.generation or 0) > generation]
            # --until-idle waits less long than this: in queues of pgmq the look cannot leave newer messages out.
            delay = _SOON + 1 if self._shared.until_idle else _TOO_NEW
            self._shared.holding.put_back(newer, f"its generation is newer than this worker's {generation}", delay)
            runnable = [message for message in runnable if (message.generation or 0) <= generation]
        if handler.once is None or not runnable:
            return runnable
        try:
            return await self._unhandled(handler.once, held, runnable)
        except (psycopg.Error, BartlebyError, OSError):
            self._shared.holding.put_back([(held, message) for message in runnable], "the database went away", 1.0)
            raise

    async def _unhandled(self, by: str, held: Held, messages: list[Message]) -> list[Message]:
        asked = calls.handled_keys(self._queue, [once_key(message, by) for message in messages])
        handled = await self._shared.link.run(asked)
        for message in messages:
            if once_key(message, by) in handled:
                self._shared.holding.finished(held, message, None)
        return [message for message in messages if once_key(message, by) not in handled]

    async def _sleep(self) -> None:
        shared = self._shared
        heard = shared.listener.event(self._queue)
        heard.clear()
        # longer than is slept: a listener may be deaf for a while and not know it yet
        pause = min(_LONGEST_SLEEP, (await shared.link.run(calls.idle(self._queue, 30))).total_seconds())
        if shared.until_idle:
            pause = min(pause, _LOOK_EVERY)
            await self._look_for_the_end()
        if not shared.listener.listening:
            pause = min(pause, shared.poll)
        if not shared.stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await heard.wait()

    async def _look_for_the_end(self) -> None:
        # A handler that runs may yet send to any queue: what a claim did not find counts only if nothing was held from
        # before that claim until now.
        if self._seen != self._shared.granted:
            return
        outlook = await self._shared.link.run(calls.outlook(self._queue, self._shared.app.generation or 0))
        if outlook.breaker in {"open", "forced"}:
            if self._queue not in self._shared.idle:
                text = f"the breaker of queue {self._queue} is open: not waiting for its messages"
                telemetry.warning("worker.gave_up", text, queue=self._queue)
        elif outlook.due_in is not None and outlook.due_in.total_seconds() < _SOON and not outlook.paused:
            return
        if self._seen == self._shared.granted:
            self._shared.idle.add(self._queue)
