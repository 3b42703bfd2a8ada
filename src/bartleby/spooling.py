"""The last resort: failures that the database cannot be told of are kept in a file, and entered when it is back.

When the database has not answered for a second, the failures that wait for their settlement are written down: now they
can be told whether the worker lives or not. One that the settler could not deliver, since the lease was lost meanwhile,
is entered as evidence as soon as the database answers. The same is done with what dead processes left here. While the
database answers, all of this is a look at a clock, twice a second.
"""

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import psycopg

from bartleby import calls, telemetry
from bartleby.config import Settings
from bartleby.errors import BartlebyError, InvalidArgument, NotInstalled
from bartleby.execute import Failed
from bartleby.link import Link, passing
from bartleby.message import Message, encode
from bartleby.settling import Settler
from bartleby.spool import Left, Spool, directory, obstacle

P = ParamSpec("P")
T = TypeVar("T")

_LOOK = 0.5
_PATIENCE, _STOPPING = 1.0, 0.1
_LONGEST_PAUSE = 5.0
_LOOK_AROUND = 30.0
_AT_ONCE = 100
_LAST_WORDS = 2.0
_MOST = 10_000


@dataclass(slots=True)
class _Kept:
    """A failure that waits. If it was given up by the settler, it is ours to enter."""

    id: str
    text: str
    written: bool = False
    given_up: bool = False


class Spooler:
    """Keeps what the settler cannot tell, and enters what was kept."""

    def __init__(self, settings: Settings, settler: Settler, worker: str, stopping: asyncio.Event) -> None:
        self._settings = settings
        self._settler = settler
        self._worker = worker
        self._stopping = stopping
        self._link = Link(settings, "spool", deadline=5.0)
        self._database: str | None = None
        self._spool: Spool | None = None
        self._kept: dict[tuple[int, int], _Kept] = {}
        """By lease and position."""
        self._since: dict[tuple[int, int], float] = {}
        self._thread = ThreadPoolExecutor(1, "bartleby-spool")
        self._told: set[str] = set()
        self._looked_around = self._failing = False

    @property
    def idle(self) -> bool:
        """Whether there is nothing to enter, or nothing that can be entered now."""
        if self._database is None or not self._looked_around or self._settler.given_up:
            return self._database is None
        return self._failing or not any(kept.given_up for kept in self._kept.values())

    async def prepare(self, link: Link) -> None:
        """Find out which database this is, and where to keep what it cannot be told."""
        try:
            self._database = await link.run(calls.spool_identity())
        except (NotInstalled, psycopg.errors.InsufficientPrivilege) as error:
            self._tell("spool.unusable", "start", f"failures are not kept while the database is away: {error}")
            return
        folder = directory(self._settings.spool)
        if folder is None:
            return
        why = await self._run(obstacle, folder)
        if why is None:
            self._spool = Spool(folder / self._database)
        else:
            self._tell("spool.unusable", "start", f"failures are not kept while the database is away: {why}")

    async def watch(self) -> None:
        """Keep, for ever, what cannot be told."""
        while self._database is not None:
            with contextlib.suppress(TimeoutError):
                if self._stopping.is_set():
                    await asyncio.sleep(_STOPPING)
                else:
                    async with asyncio.timeout(_LOOK):
                        await self._stopping.wait()
            await self._guarded("keep", self._keep(_STOPPING if self._stopping.is_set() else _PATIENCE))

    async def enter(self) -> None:
        """Enter, for ever, what was kept and nobody else will tell."""
        pause, next_look = _LOOK, 0.0
        while self._database is not None:
            own = [kept for kept in self._kept.values() if kept.given_up]
            around = time.monotonic() >= next_look
            if own or around:
                self._failing = not await self._guarded("enter", self._enter(own, around=around))
                self._looked_around = True
                pause = min(_LONGEST_PAUSE, pause * 2) if self._failing else _LOOK
                if around and not self._failing:
                    next_look = time.monotonic() + _LOOK_AROUND
                await self._link.close()
            await asyncio.sleep(pause)

    def abort(self) -> None:
        """Let go of a connection that may hang."""
        self._link.abort()

    async def close(self) -> None:
        """Keep what is still untold; it is the next worker's to tell."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS):
                await self._guarded("keep", self._keep(0.0))
                if self._spool is not None and self._spool.in_use:
                    await self._run(self._spool.close)
        self._thread.shutdown(wait=False)
        await self._link.close()

    async def _keep(self, patience: float) -> None:
        now, spool = time.monotonic(), self._spool
        in_use = bool(self._kept or self._settler.given_up) or (spool is not None and spool.in_use)
        if not in_use and now - self._settler.answered < patience:
            return
        self._look(now, patience)
        if spool is None:
            return
        fresh = [kept for kept in self._kept.values() if not kept.written]
        # in parts: where not all of it has room, some has
        for first in range(0, len(fresh), _AT_ONCE):
            part = fresh[first : first + _AT_ONCE]
            await self._run(spool.write, [kept.text for kept in part])
            for kept in part:
                kept.written = True
        if fresh:
            text = f"failures that cannot be told now are kept in {spool.folder}"
            telemetry.warning("spool.kept", text, messages=len(fresh))
        elif not self._kept and spool.in_use:
            await self._run(spool.clear)

    def _look(self, now: float, patience: float) -> None:
        waiting = {(each[0].lease_id, each[0].position): each for each in self._settler.given_up}
        lost = set(waiting)
        self._settler.given_up.clear()
        waiting.update(((each[0].lease_id, each[0].position), each) for each in self._settler.undelivered())
        self._since = {key: self._since.get(key, now) for key in waiting}
        # what is not waiting any more, the database has
        self._kept = {key: kept for key, kept in self._kept.items() if kept.given_up or key in waiting}
        for key, (message, failed) in waiting.items():
            # while the database answers, however slowly, it is only their turn that they wait for
            if key in lost or now - max(self._since[key], self._settler.answered) >= patience:
                if key not in self._kept:
                    if len(self._kept) >= _MOST:
                        self._tell("spool.full", "full", f"more than {_MOST:,} failures cannot be told")
                        continue
                    self._kept[key] = self._entry(message, failed, time.time() - (now - self._since[key]))
                self._kept[key].given_up |= key in lost

    def _entry(self, message: Message, failed: Failed, failed_at: float) -> _Kept:
        identity = str(uuid.uuid4())
        entry = {
            "id": identity,
            "database": self._database,
            "queue": message.queue,
            "worker": self._worker,
            "lease_id": message.lease_id,
            "position": message.position,
            "message_id": message.id,
            "attempt": message.attempt,
            "failed_at": round(failed_at, 3),
            "failure": calls.reported(failed.report),
        }
        return _Kept(identity, encode(entry))

    async def _enter(self, own: Sequence[_Kept], *, around: bool) -> None:
        for first in range(0, len(own), _AT_ONCE):
            entered = await self._entered({kept.id: kept.text for kept in own[first : first + _AT_ONCE]})
            self._kept = {key: kept for key, kept in self._kept.items() if kept.id not in entered}
            self._tell_entered(Counter(entered.values()), "by this worker")
        if around and self._spool is not None:
            for path in await self._run(self._spool.left):
                try:
                    left = await self._run(Left.take, path)
                    if left is not None:
                        await self._enter_left(left)
                except OSError as error:
                    self._tell("spool.failed", str(path), f"what was left in {path} cannot be entered: {error}")

    async def _enter_left(self, left: Left) -> None:
        try:
            await self._enter_all(left)
        finally:
            await self._run(left.close)

    async def _enter_all(self, left: Left) -> None:
        counts: Counter[str] = Counter()
        while batch := await self._run(left.batch):
            counts.update((await self._entered(batch)).values())
        self._tell_entered(counts, f"in {left.path.name}")
        unusable = left.unreadable + counts["refused"] + counts["elsewhere"]
        if unusable:
            aside = await self._run(left.put_aside)
            telemetry.error("spool.unusable", f"{unusable} lines of {aside} cannot be entered")
        else:
            await self._run(left.remove)

    async def _entered(self, entries: Mapping[str, str]) -> dict[str, str]:
        # one at a time: together they would wait for those who wait for one of them, and one bad one would cost all
        return {key: await self._outcome(text) for key, text in entries.items()}

    async def _outcome(self, entry: str) -> str:
        try:
            [outcome] = (await self._link.run(calls.enter_spooled([entry]))).values()
        except (InvalidArgument, psycopg.DataError) as error:
            telemetry.error("spool.refused", f"a failure that was kept cannot be entered: {error}")
            return "refused"
        return outcome

    @staticmethod
    def _tell_entered(counts: Counter[str], whose: str) -> None:
        if counts:
            told = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
            telemetry.event("spool.entered", f"failures that were kept {whose} are entered: {told}", **counts)

    async def _guarded(self, what: str, doing: Awaitable[None]) -> bool:
        # the last resort must not be what brings a worker down
        try:
            await doing
        except (psycopg.Error, BartlebyError, OSError) as error:
            if isinstance(error, OSError) or not passing(error):
                self._tell("spool.failed", what, f"cannot {what} failures that could not be told: {error}")
        except Exception as error:  # noqa: BLE001 - see above
            self._tell("spool.failed", what, f"{type(error).__name__}: {error}")
        else:
            self._told.discard(what)  # the next trouble is another one
            return True
        return False

    def _tell(self, name: str, what: str, text: str) -> None:
        # once, however often it is tried in vain
        if what not in self._told:
            self._told.add(what)
            telemetry.warning(name, text, worker=self._worker)

    async def _run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*arguments, **named))
