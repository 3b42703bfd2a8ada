"""The janitor: takes back lapsed leases, ends pauses, turns the segments of the log, adds up counts, forgets the old.

Every worker has one, and one at a time works in a database: whoever holds the duty, a row that lapses unless renewed.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable

import psycopg

from bartleby import calls, grouping, telemetry
from bartleby.config import Settings
from bartleby.errors import BartlebyError
from bartleby.link import Link, passing
from bartleby.message import Reaped

DUTY = "janitor"
_HOLD = 3.0
_LEAVE_SECONDS = 2.0
_SHORT, _LONG = 5.0, 120.0
_REAP = 1.0
_TURN = 10.0
_PRUNE = 60.0
_BULK = 2000
_LITTLE = 200  # what grows old is forgotten so much at a time, and a tenth of the time: nobody waits for it
_REST = 9
_WALK = 20_000  # letters looked at, most of which stay where they are
_SPELL, _BREATH = 0.5, 0.02
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
        await self._tally()
        await self._link.run(grouping.regroup(_WALK))
        if seen := await self._link.run(calls.watch()):
            telemetry.event("pgmq.watched", f"{seen} messages of pgmq were settled or moved by somebody else")
        if self._due("prune", _PRUNE):
            await self._prune()

    async def _tally(self) -> None:
        # in short transactions, and not for long: leases are waiting to be taken back
        until = time.monotonic() + _SPELL
        while time.monotonic() < until:
            if await self._link.run(grouping.tally(_BULK)) < _BULK:
                return
            await asyncio.sleep(_BREATH)

    async def _prune(self) -> None:
        until, total = time.monotonic() + _SPELL, Counter[str]()
        while True:
            begun = time.monotonic()
            pruned = await self._link.run(calls.prune(_LITTLE))
            total.update({each.what: each.rows for each in pruned})
            more = any(each.rows >= _LITTLE for each in pruned)
            if not more or time.monotonic() > until:
                break
            await asyncio.sleep(_REST * (time.monotonic() - begun))
        for what, rows in total.items():
            if rows:
                telemetry.event("pruned", f"forgot {rows} {what}")
        if more:
            self._next["prune"] = 0.0

    def _due(self, what: str, every: float) -> bool:
        now = time.monotonic()
        if now < self._next[what]:
            return False
        self._next[what] = now + every
        return True

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                self._link.deadline = _LEAVE_SECONDS
                await self._link.run(calls.leave_duty(DUTY, self._name))
        except (psycopg.Error, BartlebyError, OSError):
            pass  # it lapses by itself
        finally:
            await self._link.close()


def _tell(reaped: list[Reaped]) -> None:
    fates = {"released": "back, at no charge", "retry": "charged, and back", "dead": "dead"}
    for lease in reaped:
        what = "1 message is" if lease.messages == 1 else f"{lease.messages} messages are"
        telemetry.warning(
            "lease.reaped",
            f"worker {lease.worker} stopped answering: {what} {fates.get(lease.outcome, lease.outcome)}",
            queue=lease.queue,
            lease_id=lease.lease_id,
        )
