"""A worker among others: it says every ten seconds that it is there and how much it does, and hears if it is to stop.

The heartbeat does it, in its thread and on its connection: a handler that blocks the event loop does not make a worker
look dead, and nothing that claims or settles waits for it. What fails here is tried again the next time, no more.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bartleby import attendance, telemetry
from bartleby.calls import Call
from bartleby.link import Link, passing

EVERY = 10.0
_UNDER_WAY, _LAST_WORDS = 0.2, 1.0


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change about a worker."""

    name: str
    kind: str
    version: str | None
    queues: Sequence[str]


class Presence:
    """Of one worker."""

    def __init__(self, facts: Facts, load: Callable[[], tuple[int, int]], on_drain: Callable[[], None]) -> None:
        """Ask `load` how many messages may run and how many do; call `on_drain`, once, in the heartbeat's thread."""
        self._facts = facts
        self._load = load
        self._on_drain = on_drain
        self._next = 0.0
        self._telling: asyncio.Task[None] | None = None
        self._known = False
        self._drained = False
        self._complaint = ""

    def keep_up(self, link: Link) -> None:
        """Begin to report if it is time to."""
        now = time.monotonic()
        if now >= self._next and (self._telling is None or self._telling.done()):
            self._next = now + EVERY
            self._telling = asyncio.create_task(self._report(link))

    async def settle(self, link: Link) -> None:
        """Wait a moment for what is under way: a report that comes after the leave would be a ghost.

        A database that does not answer by then is not told, for a stop has no time to wait for it.
        """
        until = time.monotonic() + _UNDER_WAY
        while link.busy and time.monotonic() < until:  # noqa: ASYNC110 - a few times, and only at the end
            await asyncio.sleep(0.005)
        self._known = self._known and link.connected and not link.busy

    async def leave(self, link: Link) -> None:
        """Say that the worker has stopped, if the database knows of it and answers."""
        if self._telling is not None and not self._telling.done():
            # its connection is shut by now
            await asyncio.wait([self._telling], timeout=_UNDER_WAY)
        if self._known:
            link.deadline = _LAST_WORDS
            try:
                await link.run(attendance.leave_worker(self._facts.name))
            except Exception as error:  # noqa: BLE001 - it is forgotten by itself
                telemetry.event("worker.unreported", f"it took no leave: {error}", level=logging.DEBUG)

    async def _report(self, link: Link) -> None:
        try:
            wanted = await link.run(self._call())
        except Exception as error:  # noqa: BLE001 - whatever it is, the worker works
            if not passing(error) and str(error) != self._complaint:
                self._complaint = str(error)
                telemetry.warning("worker.unreported", f"others cannot see this worker: {error}")
            return
        self._known = True
        if wanted == attendance.DRAIN and not self._drained:
            self._drained = True
            self._on_drain()

    def _call(self) -> Call[str]:
        facts, (concurrency, running) = self._facts, self._load()
        return attendance.report_worker(
            facts.name,
            kind=facts.kind,
            version=facts.version,
            queues=facts.queues,
            host=socket.gethostname(),
            pid=os.getpid(),
            concurrency=concurrency,
            running=running,
        )
