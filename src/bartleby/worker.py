"""The worker: claims messages of many queues, runs their handlers, and settles what became of them.

    fetcher (one a queue) → lane (coroutines or threads) → settler
    heartbeat (a thread) renews the leases; the listener wakes idle fetchers; the janitor tidies up for everybody,
    and the replayer runs replay plans

It has few connections and loses none of its work with them: claims begin anew, settlements are repeated, and a lease
that could not be renewed is given up here before it lapses there.
"""

import asyncio
import contextlib
import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterable

import psycopg

from bartleby import attendance, calls, inspection, telemetry
from bartleby.app import Bartleby
from bartleby.errors import BartlebyError
from bartleby.execute import Executor
from bartleby.fetching import Fetcher, Shared
from bartleby.handlers import Handler
from bartleby.holding import Holding
from bartleby.janitor import Janitor
from bartleby.lanes import CoroutineLane, Lane
from bartleby.link import Link
from bartleby.presence import Facts, Presence
from bartleby.replaying import Replayer
from bartleby.terms import Terms
from bartleby.threads import ThreadLane
from bartleby.waking import Listener

_COROUTINES = 100
_THREADS = 10
_BATCHES = 4
_LAST_WORDS = 2.0


class Worker:
    """One process of work. `run` returns when `stop` was called, or with `until_idle` when there is nothing to do.

    `concurrency` is how many messages of a queue run at once where its handler does not say, `claim_limit` how many
    are claimed at once, `grace` how long running handlers may take to finish after `stop`, and `poll` how often to look
    where nothing can be heard (all in seconds). Without `upkeep` it is left to others to take back lapsed leases, to
    tidy up and to run replay plans. `kind` is what it is among the workers that an operator sees; None: it is not seen,
    and cannot be told to drain. `on_drain` is called instead of `drain` when it is told so.
    """

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
        upkeep: bool = True,
        kind: str | None = "worker",
        on_drain: Callable[[], None] | None = None,
    ) -> None:
        self.name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._app = app
        self._handlers = app.handlers_for(queues)
        self._concurrency = concurrency
        self._claim_limit = claim_limit
        self._grace = grace
        self._upkeep = upkeep
        self._now = asyncio.Event()
        self._told = False
        self._on_drain = on_drain or self.drain
        self._settles = Link(app.settings, "settles")
        claims, stopping = Link(app.settings, "claims"), asyncio.Event()
        self._shared = Shared(
            app=app,
            worker=self.name,
            link=claims,
            terms=Terms(claims),
            listener=Listener(app.settings, [handler.queue for handler in self._handlers]),
            holding=Holding(app.settings, self._settles, stopping, None if kind is None else self._presence(kind)),
            stopping=stopping,
            poll=poll,
            until_idle=until_idle,
        )

    @property
    def counts(self) -> Counter[str]:
        """How many messages were done, retried, dead, released and refused so far."""
        return self._shared.holding.settler.counts

    @property
    def running(self) -> int:
        """How many messages are with handlers."""
        return self._shared.holding.running()

    async def run(self) -> Counter[str]:
        """Work; return the counts."""
        shared, holding = self._shared, self._shared.holding
        duties: list[Janitor | Replayer] = []
        if self._upkeep:
            duties = [Janitor(self._app.settings, self.name), Replayer(self._app.settings, self.name)]
        try:
            await self._prepare()
            self._loop = asyncio.get_running_loop()
            holding.start()
            queues = ", ".join(sorted(holding.lanes))
            telemetry.event("worker.started", f"{self.name} works on {queues}", worker=self.name)
            async with asyncio.TaskGroup() as tasks:
                helpers = [
                    tasks.create_task(holding.settler.run()),
                    tasks.create_task(holding.watch_pace()),
                    tasks.create_task(holding.show_life()),
                    tasks.create_task(shared.listener.run()),
                    *(tasks.create_task(duty.run()) for duty in duties),
                ]
                fetchers = [tasks.create_task(Fetcher(lane, shared).run()) for lane in holding.lanes.values()]
                await self._told_to_stop()
                await self._drain(fetchers)
                for hanging in (shared.listener, *duties):
                    hanging.abort()
                for helper in helpers:
                    helper.cancel()
        finally:
            holding.close()
            await shared.link.close()
            await self._settles.close()
        telemetry.event("worker.stopped", f"{self.name} has stopped", **self.counts)
        return self.counts

    def stop(self) -> None:
        """Claim nothing more and finish what runs; said again, stop now. What is not finished is released."""
        if self._told:
            self._now.set()
        self._told = True
        self.drain()

    def drain(self) -> None:
        """Claim nothing more and finish what runs, as after the first `stop`; the next `stop` still is the first."""
        if not self._shared.stopping.is_set() and (running := self.running):
            text = f"finishing {running} running handlers, for at most {self._grace:g} s; said again, it does not wait"
            telemetry.event("worker.stopping", text)
        self._shared.stopping.set()
        self._shared.listener.wake_all()
        for lane in self._shared.holding.lanes.values():
            lane.wanted.set()

    def _presence(self, kind: str) -> Presence:
        facts = Facts(self.name, kind, self._app.version, sorted(handler.queue for handler in self._handlers))
        return Presence(facts, self._load, self._drain_wanted)

    def _load(self) -> tuple[int, int]:
        return self._shared.holding.load()

    def _drain_wanted(self) -> None:
        # in the thread of the heartbeat
        telemetry.event("worker.draining", f"an operator wants {self.name} to stop", worker=self.name)
        with contextlib.suppress(RuntimeError):  # it has just ended
            self._loop.call_soon_threadsafe(self._on_drain)

    async def _prepare(self) -> None:
        await self._shared.terms.check_version()
        if await self._shared.link.run(inspection.server_is_young()):
            self._shared.link.be_careful()  # the last worker may have gone down with it
        recorder = self._app.recorder()
        for handler in self._handlers:
            await self._shared.terms.prepare(handler.queue)
            executor = Executor(handler, recorder, self._app.version)
            self._shared.holding.lanes[handler.queue] = self._lane(handler, executor)

    def _lane(self, handler: Handler, executor: Executor) -> Lane:
        usual = _BATCHES if handler.batch is not None else _COROUTINES if handler.awaited else _THREADS
        concurrency = handler.concurrency or self._concurrency or usual
        kind = CoroutineLane if handler.awaited else ThreadLane
        holding = self._shared.holding
        return kind(executor, concurrency, self._claim_limit, holding.finished, holding.begin)

    async def _told_to_stop(self) -> None:
        shared = self._shared
        while not shared.stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05 if shared.until_idle else None):
                    await shared.stopping.wait()
            all_idle = len(shared.idle) == len(shared.holding.lanes)
            if shared.until_idle and all_idle and not shared.holding.leases:
                self.stop()

    async def _drain(self, fetchers: "list[asyncio.Task[None]]") -> None:
        holding = self._shared.holding
        holding.pause("the worker is stopping")
        # an answer that is on its way may bring a lease; an answer that is not is not waited for
        await asyncio.wait(fetchers, timeout=_LAST_WORDS)
        self._shared.link.abort()
        await asyncio.wait(fetchers, timeout=0.5)
        for fetcher in fetchers:
            fetcher.cancel()
        holding.pause("the worker is stopping")
        await holding.quiet(self._now, self._grace)
        for lane in holding.lanes.values():
            lane.cancel(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS):
                await asyncio.sleep(0.05 if holding.running() else 0)
                await holding.settler.flush()
                for held in list(holding.leases.values()):
                    # a handler that cannot be stopped still has it; it ends with this process
                    with contextlib.suppress(psycopg.Error, BartlebyError, OSError):
                        await self._settles.run(calls.release(held.id))
                for queue in list(self._shared.unsure):
                    with contextlib.suppress(psycopg.Error, BartlebyError, OSError):
                        await self._settles.run(attendance.give_back(queue, self.name, holding.known()))
        self._settles.abort()
