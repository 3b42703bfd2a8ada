"""The worker: claims messages of many queues, runs their handlers, and settles what became of them.

    fetch (one task a queue) → lane (coroutines or threads) → settler
    heartbeat (a thread) renews the leases; the listener wakes idle fetchers; the janitor tidies up for everybody

It has few connections and loses none of its work with them: claims begin anew, settlements are repeated, and a lease
that could not be renewed is given up here before it lapses there.
"""

import asyncio
import contextlib
import os
import random
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterable

import psycopg

from bartleby import calls, telemetry
from bartleby.app import Bartleby, once_key
from bartleby.errors import BartlebyError
from bartleby.execute import Executor, Released, Settlement
from bartleby.handlers import Handler
from bartleby.heartbeat import Heartbeat
from bartleby.held import Held
from bartleby.janitor import Janitor
from bartleby.lanes import CoroutineLane, Lane
from bartleby.link import Link, passing
from bartleby.message import Lease, Message
from bartleby.settling import Settler
from bartleby.terms import Terms
from bartleby.threads import ThreadLane
from bartleby.waking import Listener

_COROUTINES = 100
_THREADS = 10
_TOO_NEW = 10.0
_LONGEST_PAUSE = 1.0
_LOOK_EVERY = 0.25
_SOON = 60.0


class Worker:
    """One process of work. `run` returns when `stop` was called, or with `until_idle` when there is nothing to do."""

    def __init__(
        self,
        app: Bartleby,
        *,
        queues: Iterable[str] | None = None,
        concurrency: int | None = None,
        claim_limit: int = 500,
        grace: float = 30.0,
        poll: float = 1.0,
        until_idle: bool = False,
    ) -> None:
        self.app = app
        self.name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.counts: Counter[str] = Counter()
        self._handlers = app.handlers_for(queues)
        self._concurrency = concurrency
        self._claim_limit = claim_limit
        self._grace = grace
        self._poll = poll
        self._until_idle = until_idle
        self._idle: set[str] = set()
        self._lanes: dict[str, Lane] = {}
        self._held: dict[int, Held] = {}
        self._stopping = asyncio.Event()
        self._now = asyncio.Event()
        self._solo_over = asyncio.Event()
        self._claiming = asyncio.Lock()
        self._claims = Link(app.settings, "claims")
        self._settles = Link(app.settings, "settles")
        self._terms = Terms(self._claims)
        self._settler = Settler(self._settles, self._settled, self._count)
        self._listener = Listener(app.settings, [handler.queue for handler in self._handlers])
        self._heartbeat = Heartbeat(app.settings, self._lost_elsewhere)

    async def run(self) -> Counter[str]:
        """Work. Return how many messages were done, retried, dead, released and refused."""
        self._loop = asyncio.get_running_loop()
        await self._prepare()
        self._heartbeat.start()
        telemetry.event("worker.started", f"{self.name} works on {', '.join(sorted(self._lanes))}", worker=self.name)
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [
                    tasks.create_task(self._settler.run()),
                    tasks.create_task(self._listener.run()),
                    tasks.create_task(Janitor(self.app.settings, self.name).run()),
                ]
                async with asyncio.TaskGroup() as fetchers:
                    for lane in self._lanes.values():
                        fetchers.create_task(self._fetch(lane))
                await self._drain()
                for helper in helpers:
                    helper.cancel()
        finally:
            self._heartbeat.stop()
            await self._claims.close()
            await self._settles.close()
        telemetry.event("worker.stopped", f"{self.name} has stopped", **self.counts)
        return self.counts

    def stop(self) -> None:
        """Claim nothing more and finish what runs; said again, stop now. What is not finished is released."""
        if self._stopping.is_set():
            self._now.set()
        self._stopping.set()
        self._solo_over.set()
        self._listener.wake_all()
        for lane in self._lanes.values():
            lane.wanted.set()

    async def _prepare(self) -> None:
        recorder = self.app.recorder()
        for handler in self._handlers:
            await self._terms.prepare(handler.queue)
            limit = self._concurrency if handler.concurrency is None else handler.concurrency
            executor = Executor(handler, recorder, self.app.version)
            kind = CoroutineLane if handler.awaited else ThreadLane
            usual = _COROUTINES if handler.awaited else _THREADS
            self._lanes[handler.queue] = kind(executor, limit or usual, self._claim_limit, self._finished)

    async def _fetch(self, lane: Lane) -> None:
        pause = 0.05
        while not self._stopping.is_set():
            limit = lane.room()
            if not limit:
                await lane.wanted.wait()
                continue
            try:
                if not await self._claim(lane, limit):
                    await self._sleep(lane)
                pause = 0.05
            except (psycopg.Error, BartlebyError, OSError) as error:
                if not passing(error):
                    telemetry.warning("claim.failed", f"nothing could be claimed: {error}", queue=lane.handler.queue)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause * random.uniform(0.5, 1)):  # noqa: S311 - spreads load
                        await self._stopping.wait()
                pause = min(_LONGEST_PAUSE, pause * 2)

    async def _claim(self, lane: Lane, limit: int) -> bool:
        queue = lane.handler.queue
        async with self._claiming:
            if self._stopping.is_set():
                return True
            length = lane.handler.lease or await self._terms.lease(queue)
            asked = time.monotonic()
            lease = await self._claims.run(calls.claim(queue, self.name, limit=limit, lease=length))
        if lease is None:
            return False
        self._idle.clear()
        held = Held(lease.id, queue, len(lease), length, asked, solo=lease.messages[0].solo)
        self._held[held.id] = held
        self._heartbeat.hold(held)
        messages = await self._runnable(lane.handler, held, lease)
        if held.solo and messages:
            await self._alone(lane, held, messages)
        else:
            lane.put(held, messages)
        return True

    async def _runnable(self, handler: Handler, held: Held, lease: Lease) -> list[Message]:
        runnable, generation = list(lease), self.app.generation or 0
        if any(message.generation is not None and message.generation > generation for message in runnable):
            for message in runnable:
                if (message.generation or 0) > generation:
                    why = f"generation {message.generation} is newer than this worker's {generation}"
                    self._finished(held, message, Released(_TOO_NEW, why))
            runnable = [message for message in runnable if (message.generation or 0) <= generation]
        if handler.once is not None and runnable:
            by = handler.once
            asked = calls.handled_keys(handler.queue, [once_key(message, by) for message in runnable])
            handled = await self._claims.run(asked)
            for message in runnable:
                if once_key(message, by) in handled:
                    self._finished(held, message, None)
            runnable = [message for message in runnable if once_key(message, by) not in handled]
        return runnable

    async def _sleep(self, lane: Lane) -> None:
        queue = lane.handler.queue
        heard = self._listener.event(queue)
        heard.clear()
        pause = (await self._claims.run(calls.idle(queue, 30))).total_seconds()
        if self._until_idle:
            pause = min(pause, _LOOK_EVERY)
            await self._look_for_the_end(queue)
        if not self._listener.listening:
            pause = min(pause, self._poll)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await heard.wait()

    async def _look_for_the_end(self, queue: str) -> None:
        # A handler that runs may yet send to any queue, so a queue counts as idle only while nothing is held.
        if self._held:
            return
        outlook = await self._claims.run(calls.outlook(queue))
        if outlook.breaker == "open":
            telemetry.warning(
                "worker.gave_up", f"the breaker of queue {queue} is open: not waiting for it", queue=queue
            )
        elif outlook.due_in is not None and outlook.due_in.total_seconds() < _SOON and not outlook.paused:
            return
        self._idle.add(queue)
        if len(self._idle) == len(self._lanes) and not self._held:
            self.stop()

    async def _alone(self, lane: Lane, held: Held, messages: list[Message]) -> None:
        """Run a message that may have killed a worker when nothing else is in this process for it to harm."""
        async with self._claiming:
            self._give_back("made room for a message that has to run alone")
            await self._quiet(self._stopping)
            await self._settler.flush()
            self._solo_over.clear()
            if self._stopping.is_set():
                self._finished(held, messages[0], Released(0.0, "the worker is stopping"))
            elif not held.lost:
                lane.resume()
                lane.put(held, messages)
                await self._solo_over.wait()
            for each in self._lanes.values():
                each.resume()

    async def _quiet(self, enough: asyncio.Event) -> None:
        # looked at, not waited for: a lane that told of every pause would tell it a million times for nobody
        while any(lane.running for lane in self._lanes.values()) and not enough.is_set():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.005)

    def _give_back(self, why: str) -> None:
        for lane in self._lanes.values():
            lane.pause()
            for held, message in lane.unstarted():
                self._finished(held, message, Released(0.0, why))

    def _finished(self, held: Held, message: Message, settlement: Settlement) -> None:
        if not held.lost:
            first = not held.done
            held.finish(message, settlement)
            if first or settlement is not None or held.left <= 0:
                self._settler.finished(held)

    def _settled(self, held: Held) -> None:
        self._heartbeat.forget(held)
        self._forget(held)

    def _forget(self, held: Held) -> None:
        self._held.pop(held.id, None)
        if held.solo:
            self._solo_over.set()

    def _count(self, what: str, count: int) -> None:
        self.counts[what] += count

    def _lost_elsewhere(self, held: Held) -> None:
        self._loop.call_soon_threadsafe(self._lost, held)

    def _lost(self, held: Held) -> None:
        if held.left <= 0:
            return  # it was just settled
        held.lost = True
        self._forget(held)
        self._lanes[held.queue].cancel(held)
        telemetry.warning(
            "lease.lost", "the lease lapsed; its handlers are cancelled", queue=held.queue, lease_id=held.id
        )

    async def _drain(self) -> None:
        self._give_back("the worker is stopping")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace):
                await self._quiet(self._now)
        for lane in self._lanes.values():
            lane.cancel(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.sleep(0.05 if any(lane.running for lane in self._lanes.values()) else 0)
                await self._settler.flush()
        for held in list(self._held.values()):
            # a handler that cannot be stopped still has it; it ends with this process
            with contextlib.suppress(psycopg.Error, BartlebyError, OSError):
                await self._settles.run(calls.release(held.id))
