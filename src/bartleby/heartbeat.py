"""The heartbeat of a worker: it renews leases from a thread and a connection of its own.

A handler that blocks the event loop, or all connections, must not cost the worker its leases. A lease that could not be
renewed in time counts as lost here before it lapses there: the deadline is measured from the moment the request left.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable

import psycopg

from bartleby import calls, telemetry
from bartleby.config import Settings
from bartleby.errors import BartlebyError, LeaseLost
from bartleby.held import Held
from bartleby.link import Link
from bartleby.presence import Presence

_SOONEST = 0.02
_STUCK = 3.0
_IDLE = 3.0
_JOIN_SECONDS = 5.0


class Heartbeat:
    """Renews what it is told of, and tells which leases are lost."""

    def __init__(self, settings: Settings, on_lost: Callable[[Held], None], presence: Presence | None = None) -> None:
        """Call `on_lost` in the heartbeat's thread; with `presence`, tell the database that this worker is there."""
        self._settings = settings
        self._on_lost = on_lost
        self._presence = presence
        self._held: dict[int, Held] = {}
        self._stopping = threading.Event()
        self.seen_alive = float("inf")
        """When the worker's event loop last ran, by the monotonic clock."""
        self._stuck = False
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._beat()), name="bartleby-heartbeat", daemon=True
        )

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; what is still held is renewed no more."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)

    def hold(self, held: Held) -> None:
        """Renew this lease from now on."""
        self._held[held.id] = held

    def forget(self, held: Held) -> None:
        """Renew it no more."""
        self._held.pop(held.id, None)

    async def _beat(self) -> None:
        link = Link(self._settings, "heartbeat")
        # two tasks: a renewal that hangs must not keep us from seeing that time is up
        renewing = asyncio.create_task(self._renew_for_ever(link))
        while not self._stopping.is_set():
            self._give_up(list(self._held.values()))
            self._watch_loop()
            if self._presence is not None:
                self._presence.keep_up(link)
            await asyncio.sleep(self._pause())
        if self._presence is not None:
            await self._presence.settle(link)
        if link.busy:
            link.abort()
        renewing.cancel()
        await asyncio.wait([renewing])
        if self._presence is not None:
            await self._presence.leave(link)
        await link.close()

    async def _renew_for_ever(self, link: Link) -> None:
        while True:
            leases = list(self._held.values())
            link.deadline = min(10.0, max(1.0, self._shortest() / 3)) if leases else _IDLE
            try:
                await self._renew(link, leases)
            except Exception as error:  # noqa: BLE001 - whatever it is, leases must be renewed
                telemetry.error("heartbeat.failed", f"{type(error).__name__}: {error}")
            await asyncio.sleep(self._pause())

    def _shortest(self) -> float:
        return min((held.length for held in list(self._held.values())), default=1.0)

    def _pause(self) -> float:
        return min(0.2, max(_SOONEST, self._shortest() / 12))

    async def _renew(self, link: Link, leases: Iterable[Held]) -> None:
        now = time.monotonic()
        due: dict[float, list[Held]] = {}
        for held in leases:
            if not held.lost and now - held.extended >= held.length / 3:
                due.setdefault(held.length, []).append(held)
        for length, group in due.items():
            await self._extend(link, length, group)

    async def _extend(self, link: Link, length: float, group: list[Held]) -> None:
        while group:
            asked = time.monotonic()
            try:
                await link.run(calls.extend([held.id for held in group], length))
            except LeaseLost as error:
                lost = set(error.lease_ids)
                for held in group:
                    if held.id in lost:
                        self._lose(held)
                group = [held for held in group if held.id not in lost] if lost else []
            except (psycopg.Error, BartlebyError, OSError):
                return  # the next beat tries again, until the deadline
            else:
                for held in group:
                    held.extended = asked
                    held.deadline = asked + length
                return

    def _watch_loop(self) -> None:
        seconds = time.monotonic() - self.seen_alive
        if seconds < _STUCK:
            self._stuck = False
        elif not self._stuck:
            self._stuck = True
            text = f"an async handler has blocked the event loop for {seconds:.0f} s: declare it with def, or await"
            telemetry.warning("loop.blocked", text)

    def _give_up(self, leases: Iterable[Held]) -> None:
        now = time.monotonic()
        for held in leases:
            if now > held.deadline:
                self._lose(held)

    def _lose(self, held: Held) -> None:
        if not held.lost and self._held.pop(held.id, None) is not None:
            self._on_lost(held)
