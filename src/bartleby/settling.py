"""Settling: what handlers did goes to the database in batches, and stays here until the database has it.

An ack waits for its lease to be finished, or a moment; so a thousand quick messages cost one statement, and a slow one
is settled as soon as it is done. While the database is away nothing is given up: a settlement is repeated until it is
accepted or the lease turns out to be lost, and then nothing was changed.
"""

import asyncio
import contextlib
import functools
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import psycopg

from bartleby import calls, inspection, telemetry
from bartleby.breaker import Storm, Window
from bartleby.calls import Call
from bartleby.errors import BartlebyError, InvalidArgument, LeaseLost
from bartleby.execute import Failed, Released
from bartleby.held import Held
from bartleby.link import Link, passing
from bartleby.message import Decision, Failure, Message

T = TypeVar("T")

_MOMENT = 0.03
# the lease is lost; or one of several settlements cannot be taken, which must not cost the others theirs
_REFUSED = (LeaseLost, InvalidArgument)
_LONGEST_PAUSE = 1.0


class Settler:
    """Settles leases one after another, on one connection."""

    def __init__(
        self,
        link: Link,
        on_progress: Callable[[Held], None],
        on_settled: Callable[[Held], None],
        on_refused: Callable[[Held], None],
    ) -> None:
        self._link = link
        self._on_progress = on_progress
        self._on_settled = on_settled
        self._on_refused = on_refused
        self.counts: Counter[str] = Counter()
        """Messages done, retried, dead, released and refused."""
        self.storms: set[str] = set()
        """Queues whose breakers this worker opened."""
        self._windows: dict[str, Window] = {}
        self._whole: deque[Held] = deque()
        self._partly: dict[Held, float] = {}
        """Leases of which something is known, and since when."""
        self._news = asyncio.Event()
        self._clean = asyncio.Event()
        self._hurry = False
        self._spare = telemetry.Spare("messages.failed", "more messages failed; see `bartleby dead`")

    def finished(self, held: Held) -> None:
        """Take notice that messages of this lease are finished."""
        if held.left <= 0:
            self._partly.pop(held, None)
            self._whole.append(held)
            self._news.set()
        elif held not in self._partly:
            self._partly[held] = time.monotonic()
            if len(self._partly) == 1:
                self._news.set()

    async def flush(self) -> None:
        """Return when everything known so far is settled."""
        self._hurry = True
        self._clean.clear()
        self._news.set()
        await self._clean.wait()

    async def run(self) -> None:
        """Settle for ever."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_MOMENT if self._partly else None):
                    await self._news.wait()
            self._news.clear()
            while held := self._next():
                try:
                    await self._settle(held)
                except (psycopg.Error, BartlebyError, OSError) as error:
                    # it cannot be told; the lease lapses, and the messages are delivered again
                    telemetry.error("settlement.impossible", str(error), queue=held.queue, lease_id=held.id)
                    self._on_refused(held)
            self._hurry = False
            self._clean.set()

    def _next(self) -> Held | None:
        if self._whole:
            return self._whole.popleft()
        if not self._partly:
            return None
        held, since = next(iter(self._partly.items()))
        if not self._hurry and time.monotonic() - since < _MOMENT:
            return None
        del self._partly[held]
        return held

    async def _settle(self, held: Held) -> None:
        done, failed, released = held.take()
        try:
            await self._watch(held, len(done), failed)
            if done:
                whole = len(done) == held.size
                await self._acked(held, None if whole else done, len(done))
            if failed:
                await self._failed(held, failed)
            if released:
                await self._released(held, released)
        finally:
            held.backlog.count -= len(done) + len(failed) + len(released)
            self._on_progress(held)
        if held.left <= 0 and not held.unsettled():
            self._on_settled(held)

    async def _watch(
        self,
        held: Held,
        done: int,
        failed: Sequence[tuple[Message, Failed]],
    ) -> None:
        # The breaker opens before the failures are reported: they are the outage's, and cost no attempt.
        window = self._windows.setdefault(held.queue, Window())
        now = time.monotonic()
        if done:
            window.succeeded(done, now)
        for message, failure in failed:
            if failure.suspicion:
                report = failure.report
                window.failed(message.id, failure.suspicion, f"{report.error_type}: {report.error}", now)
        if failed and (storm := window.storm(now)) is not None:
            if await self._opened(held, storm):
                self.storms.add(held.queue)
                telemetry.warning(
                    "breaker.opened", f"the breaker of queue {held.queue} is open: {storm.cause}", queue=held.queue
                )
            window.reset()

    async def _opened(self, held: Held, storm: Storm) -> bool:
        try:
            return await self._insist(held, calls.open_breaker(held.queue, storm.cause, storm.over))
        except (psycopg.Error, BartlebyError, OSError) as error:
            # the settlements that wait behind this are worth more
            telemetry.error("breaker.failed", str(error), queue=held.queue)
            return False

    async def _acked(self, held: Held, positions: list[int] | None, count: int) -> None:
        try:
            await self._insist(held, calls.ack(held.id, positions))
        except _REFUSED:
            await self._one_by_one(held, positions, lambda position: calls.ack(held.id, [position]))
        else:
            self.counts["done"] += count

    async def _failed(self, held: Held, failed: list[tuple[Message, Failed]]) -> None:
        states = {each.sqlstate for _, each in failed if each.sqlstate is not None}
        told = {state for state in states if await self._insist(held, inspection.server_trouble(held.id, state))}

        def reports() -> list[Failure]:
            # made anew for each try: that the last one failed may be the trouble
            troubled = states if self._link.troubled_at >= held.granted else told
            return [_blamed(each, ours=each.sqlstate in troubled) for _, each in failed]

        try:
            decisions = await self._insist(held, lambda: calls.fail(held.id, reports()))
        except _REFUSED:
            by_position = {report.position: report for report in reports()}
            await self._one_by_one(
                held, list(by_position), lambda position: calls.fail(held.id, [by_position[position]])
            )
        else:
            self._tell(held.queue, failed, decisions)

    def _tell(self, queue: str, failed: list[tuple[Message, Failed]], decisions: list[Decision]) -> None:
        by_position: dict[int, tuple[Message, Failure]] = {
            each.report.position: (message, each.report) for message, each in failed
        }
        for decision in decisions:
            message, report = by_position[decision.position]
            dead = decision.verdict == "dead"
            self.counts["dead" if dead else "retried"] += 1
            if not self._spare.take():
                continue
            when = decision.retry_at and decision.retry_at.astimezone().isoformat(timespec="milliseconds")
            telemetry.event(
                "message.dead" if dead else "message.failed",
                f"{report.error_type}: {report.error[:200]}",
                level=logging.WARNING if dead else logging.INFO,
                queue=queue,
                message_id=message.id,
                handler=report.handler,
                attempt=message.attempt,
                **({"retry_at": when} if when else {}),
            )

    async def _released(self, held: Held, released: list[tuple[Message, Released]]) -> None:
        alike: dict[Released, list[int]] = {}
        for message, release in released:
            alike.setdefault(release, []).append(message.position)
        for release, positions in alike.items():
            telemetry.event(
                "message.released", release.why, queue=held.queue, messages=len(positions), delay=release.delay
            )
            call = functools.partial(calls.release, held.id, delay=release.delay, ran=release.ran)
            try:
                await self._insist(held, call(positions))
            except _REFUSED:
                await self._one_by_one(held, positions, lambda position, call=call: call([position]))  # type: ignore[misc]
            else:
                self.counts["released"] += len(positions)

    async def _one_by_one(self, held: Held, positions: list[int] | None, call: Callable[[int], Call[T]]) -> None:
        # Perhaps only the answer to an earlier try was lost, and these are settled; that says nothing of the others.
        refused = set(range(held.size) if positions is None else ())
        for position in positions or ():
            try:
                await self._insist(held, call(position))
            except _REFUSED:
                refused.add(position)
        if refused:
            self.counts["refused"] += len(refused)
            telemetry.warning(
                "settlement.refused",
                "the lease was lost, this was settled before, or it cannot be taken; nothing was changed",
                queue=held.queue,
                lease_id=held.id,
                messages=len(refused),
            )

    async def _insist(self, held: Held, call: Call[T] | Callable[[], Call[T]]) -> T:
        pause = 0.05
        while True:
            try:
                return await self._link.run(call if isinstance(call, Call) else call())
            except (psycopg.Error, OSError) as error:
                if held.lost or not passing(error):
                    raise
                await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - spreads load, no secret
                pause = min(_LONGEST_PAUSE, pause * 2)


def _blamed(failed: Failed, *, ours: bool) -> Failure:
    # What only the handler saw is trouble of another server, or of this message: it is charged like any failure.
    report = failed.report
    if failed.sqlstate is None:
        return report
    if ours:
        return replace(report, verdict="release", delay=None, rule=f"{report.rule}, and Bartleby's own has it too")
    return replace(report, rule=f"{report.rule}, but Bartleby's own has none")
