"""What this process holds: leases and their messages on the way from a claim to a settlement."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence

import psycopg

from bartleby import calls, telemetry
from bartleby.config import Settings
from bartleby.errors import BartlebyError
from bartleby.execute import Released, Settlement
from bartleby.heartbeat import Heartbeat
from bartleby.held import Held
from bartleby.lanes import Lane
from bartleby.link import Link
from bartleby.message import Lease, Message
from bartleby.presence import Presence
from bartleby.settling import Settler

_PUT_BACK_EVERY = 2.0
_PATIENT, _MOST_PATIENT = 5.0, 600.0
_ALONE_IN_A_ROW = 2.0
_ELSEWHERE = 10.0  # another worker may have the room for it

Following = Callable[[], Awaitable[tuple[Held, list[Message]] | None]]


class Holding:
    """Every lease of this process, the lanes its messages run in, and what settles and renews it."""

    def __init__(
        self, settings: Settings, link: Link, stopping: asyncio.Event, presence: Presence | None = None
    ) -> None:
        self.stopping = stopping
        self.lanes: dict[str, Lane] = {}
        self.leases: dict[int, Held] = {}
        self._past: set[int] = set()
        self._link = link
        self.settler = Settler(link, self._progress, self._settled, self._given_up)
        self._heartbeat = Heartbeat(settings, self._lost_elsewhere, presence)
        self._solo_over = asyncio.Event()
        self._patience = _PATIENT
        self._alone_again = 0.0

    def start(self) -> None:
        """Begin to renew leases."""
        self._loop = asyncio.get_running_loop()
        self._heartbeat.start()

    def close(self) -> None:
        """Run and renew nothing more."""
        for lane in self.lanes.values():
            lane.pause()
            lane.close()
        self._heartbeat.stop()

    def hold(self, lease: Lease, queue: str, length: float, asked: float) -> Held:
        """Hold what a claim handed out; `asked` is when the claim left."""
        backlog = self.lanes[queue].backlog
        held = Held(lease.id, queue, len(lease), length, asked, solo=lease.messages[0].solo, backlog=backlog)
        self.leases[held.id] = held
        self._heartbeat.hold(held)
        return held

    def finished(self, held: Held, message: Message, settlement: Settlement) -> None:
        """Take what became of a message; if the lease is lost, the result is refused."""
        if not held.lost:
            first = not held.done
            held.finish(message, settlement)
            if first or settlement is not None or held.left <= 0:
                self.settler.finished(held)

    def put_back(self, items: Sequence[tuple[Held, Message]], why: str, delay: float = 0.0) -> None:
        """Release messages that have not been started, at no charge."""
        for held, message in items:
            self.finished(held, message, Released(delay, why))

    def pause(self, why: str) -> None:
        """Start nothing more, and put back what waits."""
        for lane in self.lanes.values():
            lane.pause()
            self.put_back(lane.unstarted(), why)

    def running(self) -> int:
        """Return how many messages are with handlers whose end is awaited."""
        return sum(lane.running - lane.stuck for lane in self.lanes.values())

    def load(self) -> tuple[int, int]:
        """Return how many messages may run here at once, and how many do."""
        lanes = list(self.lanes.values())
        return sum(lane.concurrency for lane in lanes), sum(lane.running for lane in lanes)

    def busy(self) -> bool:
        """Return whether this process has anything to do, or a handler that will not end."""
        return bool(self.leases) or self._all_running() > 0

    def known(self) -> list[int]:
        """Return the leases that are held here, and those that were lost."""
        return [*self.leases, *self._past]

    def _all_running(self) -> int:
        return sum(lane.running for lane in self.lanes.values())

    async def quiet(self, enough: asyncio.Event, seconds: float) -> bool:
        """Return whether nothing runs any more, at the latest when it is enough or time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                # looked at, not waited for: lanes would tell of it a million times for nobody
                while self.running() and not enough.is_set():  # noqa: ASYNC110 - see above
                    await asyncio.sleep(0.005)
        return not self.running()

    async def run_alone(self, lane: Lane, held: Held, messages: list[Message], following: Following) -> None:
        """Run a message that may have killed a worker when nothing else is in this process for it to harm.

        Then, for a while, those that `following` brings: emptying the process is dear, and they come in numbers.
        """
        if (later := self._alone_again - time.monotonic()) > 0:
            why = "it cannot run alone here soon"
            self.put_back([(held, message) for message in messages], why, min(later, _ELSEWHERE))
            return
        self.pause("made room for a message that has to run alone")
        try:
            quiet = await self.quiet(self.stopping, self._patience)
            await until_either(self.settler.flush(), self.stopping)
            if quiet:
                self._patience = _PATIENT
                await self._run_all_alone(lane, held, messages, following)
            else:
                delay = self._tried_in_vain()
                self.put_back([(held, message) for message in messages], "it could not run alone here", delay)
        finally:
            if not self.stopping.is_set():
                for each in self.lanes.values():
                    each.resume()

    async def _run_all_alone(self, lane: Lane, held: Held, messages: list[Message], following: Following) -> None:
        end, left_behind = time.monotonic() + _ALONE_IN_A_ROW, self._all_running()
        while held.solo and messages:
            # one that was given up may still be at it, in a thread that nobody can stop
            if self.stopping.is_set() or self._all_running() > left_behind or not await self.begin(held):
                self.put_back([(held, message) for message in messages], "it could not run alone here", 1.0)
                return
            self._solo_over.clear()
            if not held.lost:
                lane.put(held, messages)
                lane.resume()
                await until_either(self._solo_over.wait(), self.stopping)
                lane.pause()
            if time.monotonic() > end or self.stopping.is_set() or (next_one := await following()) is None:
                return
            held, messages = next_one
        lane.put(held, messages)

    def _tried_in_vain(self) -> float:
        # More patient each time, so that handlers that take long do not keep it from its turn for ever; but standing
        # still is never more than a third of the time, for there may be one that has no end.
        if self.stopping.is_set():
            return 0.0
        delay = 2 * self._patience
        self._alone_again = time.monotonic() + delay
        self._patience = min(_MOST_PATIENT, 2 * self._patience)
        return min(delay, _ELSEWHERE)

    async def begin(self, held: Held, positions: Sequence[int] | None = None) -> bool:
        """Record that these messages of a lease, or all, begin now; return whether they may.

        From here on they are to blame if the lease lapses. What will not be run, since its lease was given up or is
        about to be, must not be said to begin: the database may not know of that yet, and would charge it.
        """
        if held.lost or held.deadline < time.monotonic():
            return False
        try:
            await self._link.run(calls.start(held.id, positions))
        except (psycopg.Error, BartlebyError, OSError) as error:
            telemetry.warning("start.not_recorded", str(error), queue=held.queue, lease_id=held.id)
            return False
        return True

    async def show_life(self) -> None:
        """Show the heartbeat, for ever, that the event loop gets to other things than its handlers."""
        try:
            while True:
                self._heartbeat.seen_alive = time.monotonic()
                await asyncio.sleep(0.25)
        finally:
            self._heartbeat.seen_alive = float("inf")  # at the end nobody shows it, and nobody blocks it

    async def watch_pace(self) -> None:
        """Put back, for ever, what was claimed for handlers that have become too slow for it."""
        while True:
            await asyncio.sleep(_PUT_BACK_EVERY)
            for lane in self.lanes.values():
                self.put_back(lane.too_much(_PUT_BACK_EVERY), "the handler has become slow: others may be faster")

    def _progress(self, held: Held) -> None:
        self.lanes[held.queue].wanted.set()

    def _settled(self, held: Held) -> None:
        self._heartbeat.forget(held)
        self._forget(held)

    def _given_up(self, held: Held) -> None:
        self._heartbeat.forget(held)
        self._past.add(held.id)
        if held.left > 0:
            self._lost(held)
        else:
            self._forget(held)

    def _forget(self, held: Held) -> None:
        self.leases.pop(held.id, None)
        if held.solo:
            self._solo_over.set()

    def _lost_elsewhere(self, held: Held) -> None:
        self._loop.call_soon_threadsafe(self._lost, held)

    def _lost(self, held: Held) -> None:
        if held.left <= 0:
            return  # it was just settled, or that is being tried
        held.lost = True
        self._past.add(held.id)
        self._forget(held)
        self.lanes[held.queue].cancel(held)
        telemetry.warning(
            "lease.lost",
            "the lease is lost, or could not be renewed or settled; its handlers are cancelled",
            queue=held.queue,
            lease_id=held.id,
        )


async def until_either(first: "asyncio._CoroutineLike[object]", stop: asyncio.Event) -> None:
    """Wait for something to end, or for the order to stop."""
    tasks = [asyncio.create_task(first), asyncio.create_task(stop.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
