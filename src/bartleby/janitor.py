"""The janitor: takes back lapsed leases, turns the segments of the log, forgets what nobody needs any more.

Every worker has one, and one at a time works in a database: whoever holds the duty, a row that lapses unless renewed.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable

import psycopg

from bartleby import calls, telemetry
from bartleby.config import Settings
from bartleby.errors import BartlebyError
from bartleby.link import Link, passing
from bartleby.message import Reaped

DUTY = "janitor"
_HOLD = 3.0
_SHORT, _LONG = 5.0, 120.0
_REAP = 1.0
_TURN = 10.0
_PRUNE = 60.0
_MOST = 10_000
_NEWS = ("emptied", "carried over", "writing")


class Janitor:
    """Upkeep on a timer."""

    def __init__(
        self, settings: Settings, name: str, *, on_reaped: Callable[[list[Reaped]], None] | None = None
    ) -> None:
        self._name = name
        self._on_reaped = on_reaped or _tell
        self._link = Link(settings, "janitor", deadline=_SHORT)
        self._next = {"turn": 0.0, "prune": 0.0}

    def abort(self) -> None:
        """Let go of a connection that may hang."""
        self._link.abort()

    async def run(self) -> None:
        """Do it for ever."""
        try:
            while True:
                try:
                    self._link.deadline = _SHORT
                    if await self._link.run(calls.take_duty(DUTY, self._name, _HOLD)):
                        await self.round()
                except (psycopg.Error, BartlebyError, OSError) as error:
                    if not passing(error):
                        telemetry.warning("janitor.failed", f"upkeep did not work: {error}")
                await asyncio.sleep(_REAP * random.uniform(0.8, 1))  # noqa: S311 - spreads load, no secret
        finally:
            await self._leave()

    async def round(self) -> None:
        """Do what is due."""
        # reaping may take long after an outage, and is not worth less for it
        self._link.deadline = _LONG
        reaped = await self._link.run(calls.reap())
        if reaped:
            self._on_reaped(reaped)
        if self._due("turn", _TURN):
            done = await self._link.run(calls.turn())
            news = logging.INFO if any(word in done for word in _NEWS) else logging.DEBUG
            telemetry.event("segments.turned", done, level=news)
        if self._due("prune", _PRUNE):
            pruned = [each for each in await self._link.run(calls.prune(_MOST)) if each.rows]
            for each in pruned:
                telemetry.event("pruned", f"forgot {each.rows} {each.what}")
            if any(each.rows >= _MOST for each in pruned):
                self._next["prune"] = 0.0  # there is more

    def _due(self, what: str, every: float) -> bool:
        now = time.monotonic()
        if now < self._next[what]:
            return False
        self._next[what] = now + every
        return True

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(2):
                self._link.deadline = 2.0
                await self._link.run(calls.leave_duty(DUTY, self._name))
        except (psycopg.Error, BartlebyError, OSError):
            pass  # it lapses by itself
        finally:
            await self._link.close()


def _tell(reaped: list[Reaped]) -> None:
    fates = {"released": "comes back", "retry": "was charged and comes back", "dead": "is dead"}
    for lease in reaped:
        what = "its message" if lease.messages == 1 else f"each of its {lease.messages} messages"
        telemetry.warning(
            "lease.reaped",
            f"worker {lease.worker} stopped answering: {what} {fates.get(lease.outcome, lease.outcome)}",
            queue=lease.queue,
            lease_id=lease.lease_id,
        )
