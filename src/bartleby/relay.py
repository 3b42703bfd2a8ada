"""The relay: publishes events to sinks. It is the ordinary worker, with a handler that publishes.

Each sink has a worker of its own here. Workers share nothing but the process, so a sink that is down, or a message that
has to run alone, holds up no other; and a sink that is added, changed or removed is nobody else's concern.

Order is kept while one relay lives: a sink's events are published one chunk after another, and what fails is tried
again before anything later. With several relays each has a part of the events, and after a crash what was under way
comes later than what followed it: then the sequence number of an event tells its place. Nothing is lost in either case.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterable

import psycopg

from bartleby import calls, emitting, telemetry
from bartleby.app import Bartleby
from bartleby.config import Settings
from bartleby.dressing import told
from bartleby.errors import BartlebyError
from bartleby.events import SinkSettings
from bartleby.janitor import Janitor
from bartleby.link import Link, passing
from bartleby.publishing import BATCH, Outlet
from bartleby.replaying import Replayer
from bartleby.reporting import REPEAT, Reports
from bartleby.sinks import open_publisher
from bartleby.terms import Terms
from bartleby.worker import Worker

DUTY = "relay"
"""Held by one of the relays, so that others can see that there is one."""
_HOLD = 10.0
# Short, so that another relay takes over soon after a crash; the worker renews it.
_LEASE = 15.0
# More than there will be, but a lane that has a rate puts nothing back while its handler is slow: that would be the end
# of the order.
_RATE = 10_000.0
_LAST_WORDS = 2.0
_AGAIN, _LATEST = 1.0, 30.0


class Relay:
    """Publishes until `stop` is called.

    `sinks` names those to serve, all if None; `look` is how often to see whether they have changed, `grace` how long a
    publication may take to end after `stop`, and `poll` how often to look where nothing can be heard (in seconds).
    """

    def __init__(
        self,
        settings: Settings,
        *,
        sinks: Iterable[str] | None = None,
        look: float = 2.0,
        grace: float = 5.0,
        poll: float = 1.0,
    ) -> None:
        self.name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._settings = settings
        self._only = None if sinks is None else set(sinks)
        self._look, self._grace, self._poll = look, grace, poll
        self._link = Link(settings, "relay", deadline=5)
        self._stands: dict[str, _Stand] = {}
        self._troubles: dict[str, _Trouble] = {}
        self._stopping = asyncio.Event()
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Serve the sinks."""
        duties = Janitor(self._settings, self.name), Replayer(self._settings, self.name)
        try:
            await Terms(self._link).check_version()
            telemetry.event("relay.started", f"{self.name} publishes events", worker=self.name)
            async with asyncio.TaskGroup() as tasks:
                helpers = [tasks.create_task(duty.run()) for duty in duties]
                while not self._stopping.is_set():
                    await self._see(tasks)
                    await self._rest()
                for duty in duties:
                    duty.abort()
                for helper in helpers:
                    helper.cancel()
                await self._finish()
        finally:
            await self._link.close()
        telemetry.event("relay.stopped", f"{self.name} has stopped", worker=self.name)

    def stop(self) -> None:
        """End what is under way, and put back the rest; said again, do not wait."""
        self._stopping.set()
        self._news.set()
        self._link.abort()
        for stand in self._stands.values():
            stand.stop()

    def drain(self) -> None:
        """Stop, as one of its workers was told to: a sink that nobody serves would look as if somebody did."""
        if not self._stopping.is_set():
            self.stop()

    async def _see(self, tasks: asyncio.TaskGroup) -> None:
        try:
            await self._link.run(calls.take_duty(DUTY, self.name, _HOLD))
            found = await self._link.run(emitting.sink_settings())
        except (psycopg.Error, BartlebyError, OSError) as error:
            if not passing(error):
                telemetry.warning("relay.failed", f"the sinks cannot be looked up: {error}")
            return
        if self._stopping.is_set():
            return
        wanted = {sink.name: sink for sink in found if self._only is None or sink.name in self._only}
        for name, stand in list(self._stands.items()):
            if stand.ended:
                del self._stands[name]
            elif wanted.get(name) != stand.sink:
                stand.stop()  # another one takes its place when it has ended
        for name in self._troubles.keys() - wanted.keys():
            del self._troubles[name]
        for name, sink in wanted.items():
            trouble = self._troubles.get(name)
            if name not in self._stands and (trouble is None or trouble.over(sink)):
                self._stands[name] = stand = _Stand(self._settings, sink, self, self._grace, self._poll)
                tasks.create_task(self._serve(stand))

    async def _serve(self, stand: "_Stand") -> None:
        name = stand.sink.name
        began = time.monotonic()
        try:
            await stand.run()
        except Exception as error:  # noqa: BLE001 - one sink that cannot be served must not end the others
            before = self._troubles.get(name) if time.monotonic() - began < _LATEST else None
            self._troubles[name] = trouble = _Trouble.after(before, stand.sink, _sentence(error))
            if before is None or before.text != trouble.text:
                telemetry.warning("sink.unusable", f"sink {name} cannot be served: {trouble.text}", sink=name)
            if not passing(error) and trouble.untold():
                await self._complain(name, trouble)
        else:
            self._troubles.pop(name, None)
        finally:
            stand.ended = True
            self._news.set()

    async def _complain(self, sink: str, trouble: "_Trouble") -> None:
        # again and again: another relay may have told since that all is well, and may be gone
        with contextlib.suppress(psycopg.Error, BartlebyError, OSError):  # then at the next try
            await self._link.run(emitting.report_sink(sink, error=trouble.text))
            trouble.told_at = time.monotonic()

    async def _rest(self) -> None:
        self._news.clear()
        if not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look):
                    await self._news.wait()

    async def _finish(self) -> None:
        while not all(stand.ended for stand in self._stands.values()):
            self._news.clear()
            await self._news.wait()
        self._link.deadline = _LAST_WORDS
        with contextlib.suppress(psycopg.Error, BartlebyError, OSError):
            await self._link.run(calls.leave_duty(DUTY, self.name))


class _Stand:
    """One sink as it is set up now, and the worker that serves it."""

    def __init__(self, settings: Settings, sink: SinkSettings, relay: Relay, grace: float, poll: float) -> None:
        self.sink = sink
        self.ended = False
        self._settings = settings
        self._relay = relay
        self._grace, self._poll = grace, poll
        self._stopping = asyncio.Event()
        self._worker: Worker | None = None

    def stop(self) -> None:
        """Stop serving it."""
        self._stopping.set()
        if self._worker is not None:
            self._worker.stop()

    async def run(self) -> None:
        """Serve it until stopped."""
        sink = self.sink
        publisher = open_publisher(sink.kind, sink.options, sink.timeout)
        link = Link(self._settings, f"sink {sink.name}")
        reports = Reports(sink.name, link)
        outlet = Outlet(sink, publisher, worker=self._relay.name, link=link, stopping=self._stopping, reports=reports)
        app = Bartleby(settings=self._settings)
        app.handler(sink.queue, batch=BATCH, concurrency=1, rate=_RATE, lease=_LEASE)(outlet.handle)
        self._worker = Worker(
            app,
            claim_limit=BATCH,
            grace=self._grace,
            poll=self._poll,
            upkeep=False,
            kind="relay",
            on_drain=self._relay.drain,
        )
        over = asyncio.Event()
        telling = asyncio.create_task(reports.run(over))
        try:
            if not self._stopping.is_set():
                await self._worker.run()
        finally:
            # not cancelled: what is just being reported would be reported twice
            over.set()
            link.deadline = _LAST_WORDS
            await asyncio.wait([telling], timeout=_LAST_WORDS)
            link.abort()
            await asyncio.wait([telling])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS):
                    await publisher.close()
            await link.close()


class _Trouble:
    """Why a sink could not be served, and when to try again."""

    def __init__(self, sink: SinkSettings, text: str, pause: float) -> None:
        self.text = text
        self.pause = pause
        self.told_at = float("-inf")
        self._sink = sink
        self._until = time.monotonic() + pause

    @classmethod
    def after(cls, before: "_Trouble | None", sink: SinkSettings, text: str) -> "_Trouble":
        """Return one that is waited for longer than the one before."""
        made = cls(sink, text, _AGAIN if before is None else min(_LATEST, 2 * before.pause))
        if before is not None and before.text == text:
            made.told_at = before.told_at
        return made

    def untold(self) -> bool:
        """Return whether the database is to be told, be it once more."""
        return time.monotonic() >= self.told_at + REPEAT

    def over(self, sink: SinkSettings) -> bool:
        """Return whether to try again: the sink was changed, or it is time."""
        return sink != self._sink or time.monotonic() >= self._until


def _sentence(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return _sentence(error.exceptions[0])
    if isinstance(error, BartlebyError):
        return told(f"{error}; {error.hint}" if error.hint else str(error))
    return told(f"{type(error).__name__}: {error}")
