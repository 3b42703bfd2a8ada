"""Runs replay plans: what somebody started goes on, whatever becomes of their terminal.

Every worker can do it, and one at a time in a database does: whoever holds the duty. The steps themselves are safe
in any number of hands, so a duty that changes hands too early does no harm. It has a connection of its own, and the
worker does not wait for it.
"""

import asyncio
import logging
import random
import time

import psycopg

from bartleby import calls, plans, telemetry
from bartleby.config import Settings
from bartleby.errors import BartlebyError
from bartleby.link import Link, passing
from bartleby.pacing import Stride, pause
from bartleby.replays import OVER, Advance

DUTY = "replays"
_HOLD = 3.0
_LEAVE_SECONDS = 2.0
_RENEW = 1.0
_LOOK = 1.0
_DEADLINE, _DEADLINE_OF_A_STEP = 5.0, 30.0
_REPEAT = 60.0


class Replayer:
    """Steps of every running plan, for ever."""

    def __init__(self, settings: Settings, name: str) -> None:
        self._name = name
        self._link = Link(settings, "replays", deadline=_DEADLINE)
        self._renew_at = 0.0
        self._stride = Stride()
        self._told: dict[int, set[str]] = {}
        self._failed: tuple[str, float] = ("", 0.0)

    def abort(self) -> None:
        """Let go of a connection that may hang."""
        self._link.abort()

    async def run(self) -> None:
        """Do it until cancelled."""
        try:
            while True:
                rest = _LOOK * random.uniform(0.8, 1)  # noqa: S311 - spreads load, no secret
                try:
                    if await self._on_duty():
                        rest = min(rest, await self.step())
                except (psycopg.Error, BartlebyError, OSError) as error:
                    self._renew_at = 0.0
                    if not passing(error):
                        self._complain(str(error))
                await asyncio.sleep(rest)
        finally:
            await self._leave()

    async def step(self) -> float:
        """Take one step of every running plan; return how long to rest."""
        self._link.deadline = _DEADLINE_OF_A_STEP
        items, began = self._stride.items, time.monotonic()
        try:
            steps = await self._link.run(plans.advance_replays(items))
        finally:
            self._stride.took(time.monotonic() - began)
        for each in steps:
            self._tell(each)
        self._told = {each.replay_id: self._told[each.replay_id] for each in steps if each.status not in OVER}
        return pause(steps, items)

    async def _on_duty(self) -> bool:
        if time.monotonic() < self._renew_at:
            return True
        self._link.deadline = _DEADLINE
        ours = await self._link.run(calls.take_duty(DUTY, self._name, _HOLD))
        self._renew_at = time.monotonic() + _RENEW if ours else 0.0
        return ours

    def _tell(self, step: Advance) -> None:
        if step.replay_id not in self._told:
            telemetry.event("replay.taken", f"replay {step.replay_id} is run here", replay_id=step.replay_id)
        told = self._told.setdefault(step.replay_id, set())
        over = step.status in OVER
        text = step.note or (step.status if over else None)
        if text is None or text in told:
            return
        told.add(text)
        level = logging.WARNING if step.status == "aborted" else logging.INFO
        name = f"replay.{step.status}" if over else "replay.waits"
        telemetry.event(name, f"replay {step.replay_id}: {text}", level=level, replay_id=step.replay_id)

    def _complain(self, problem: str) -> None:
        # what does not work is tried every second, and need not be told as often
        before, until = self._failed
        if problem != before or time.monotonic() > until:
            self._failed = problem, time.monotonic() + _REPEAT
            telemetry.warning("replays.failed", f"replay plans do not advance: {problem}")

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                self._link.deadline = _LEAVE_SECONDS
                await self._link.run(calls.leave_duty(DUTY, self._name))
        except (psycopg.Error, BartlebyError, OSError):
            pass  # it lapses by itself
        finally:
            await self._link.close()
