"""What changes while somebody looks: one stream a page, one look at the database for all of them.

A heart beats every two seconds while anybody listens, however many do. Each listener gets the numbers that have changed
since the last beat, and only those of the queues that are theirs; who sees the same queues shares the work of counting.
When the database cannot be reached the beat says so. A stream ends after a minute and its page opens another, so that
whoever is not let in any more hears no more. A server that stops finds no stream that goes on for ever.
"""

import asyncio
import json
import signal
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from bartleby.client import Client
from bartleby.events import Sink
from bartleby.evidence import Group
from bartleby.measures import latest_groups, open_groups
from bartleby.message import Queue
from bartleby.principal import Permission, Principal
from bartleby.replays import Replay
from bartleby.surfaces.web.attending import Attendance
from bartleby.surfaces.web.context import house, principal

BEAT = 2.0
_GLANCE = 0.25
_MOST_GROUPS = 200
_REMEMBERED = 900
_LONGEST_STREAM = 60.0
_STOPPED = frozenset({"open", "forced", "half_open"})

Numbers = dict[str, int | float | str | None]

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class Pulse:
    """How things were at one moment."""

    at: datetime
    queues: tuple[Queue, ...]
    groups: tuple[Group, ...]
    plans: tuple[Replay, ...]
    sinks: tuple[Sink, ...]
    latest: tuple[Group, ...] = ()
    open: Sequence[tuple[str, int]] = ()

    def numbers(self, somebody: Principal) -> Numbers:
        """Return what somebody may see of it, as numbers with names."""
        queues = [each for each in self.queues if somebody.sees(each.name)]
        largest, latest = ([each for each in some if somebody.sees(each.queue)] for some in (self.groups, self.latest))
        groups = list({each.id: each for each in (*largest, *latest)}.values())
        found: Numbers = dict(_totals(queues, groups))
        found["groups.open"] = sum(count for queue, count in self.open if somebody.sees(queue))
        # deaths are seen by what is dead, for the queues know of every group; which groups are latest changes
        gone = sum(each.replayed + each.resolved + each.discarded for each in largest)
        found["letters.ever"] = sum(each.dead for each in queues) + gone
        for queue in queues:
            found |= dict(_of_queue(queue, self.at))
        for group in groups:
            name = f"group.{group.id}"
            found |= {f"{name}.dead": group.dead, f"{name}.hour": group.deaths_last_hour}
            found[f"{name}.last"] = group.last_dead_at.isoformat() if group.last_dead_at else None
        if somebody.queues is None:
            found["plans.active"] = sum(1 for each in self.plans if each.status != "draft")
            found["sinks.waiting"] = sum(each.waiting for each in self.sinks)
            found |= {f"plan.{each.id}.settled": each.settled for each in self.plans}
            found |= {f"sink.{each.name}.waiting": each.waiting for each in self.sinks}
        return found


@dataclass(slots=True)
class Heart:
    """Looks at the database for everybody who listens."""

    client: Client
    pulse: Pulse | None = None
    trouble: str | None = None
    listeners: int = 0
    beats: int = 0
    attendance: Attendance = field(default_factory=Attendance)
    history: deque[tuple[float, dict[str, tuple[int, int, float]]]] = field(
        default_factory=lambda: deque(maxlen=_REMEMBERED)
    )
    _numbers: dict[frozenset[str] | None, Numbers] = field(default_factory=dict)
    _beat: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "bartleby-heart"))

    def awake(self) -> "Heart":
        """Return it, or one that goes on for it in another event loop: what has waited in the old one does not beat."""
        if self._task is None or self._task.get_loop() is asyncio.get_running_loop():
            return self
        return Heart(self.client, self.pulse, history=self.history)

    async def listen(self) -> AsyncGenerator[None]:
        """Go on at every beat."""
        self.listeners += 1
        try:
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._run())  # what was seen before nobody listened is old
            elif self.pulse is not None:
                yield
            while True:
                await self._beat.wait()
                yield
        finally:
            self.listeners -= 1

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self.listeners and not _leaving():
            began = loop.time()
            try:
                self.pulse = await loop.run_in_executor(self._thread, self._look)
                self.trouble = None
                self._numbers = {}
                self._remember(self.pulse)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next beat may find it gone
                self.trouble = type(error).__name__
            self.beats += 1
            self._go_on()
            await _rest(max(began + BEAT, loop.time() + 0.2))
        self._go_on()

    def _go_on(self) -> None:
        beat, self._beat = self._beat, asyncio.Event()
        beat.set()

    def numbers(self, pulse: Pulse, somebody: Principal) -> Numbers:
        """Return what somebody may see of the last look, counted once for all who see the same."""
        if somebody.queues not in self._numbers:
            self._numbers[somebody.queues] = pulse.numbers(somebody)
        return self._numbers[somebody.queues]

    def _look(self) -> Pulse:
        client = self.client
        active = ["running", "paused", "settling", "draft"]
        groups = client.groups(limit=_MOST_GROUPS)
        latest = client.run(latest_groups()) if len(groups) == _MOST_GROUPS else []
        waiting = client.run(open_groups())
        return Pulse(
            datetime.now(UTC),
            tuple(client.queues()),
            tuple(groups),
            tuple(client.replays(limit=50, statuses=active)),
            tuple(client.sinks()),
            tuple(latest),
            waiting,
        )

    def _remember(self, pulse: Pulse) -> None:
        ages = {each.name: (each.ready, each.dead, _age(each, pulse.at)) for each in pulse.queues}
        self.history.append((pulse.at.timestamp(), ages))


def heart(request: Request) -> Heart:
    """Return the heart of an application."""
    state = request.app.state
    if not hasattr(state, "heart"):
        state.heart = Heart(house(request).reader)
    found: Heart = state.heart
    return found


def last_pulse(request: Request) -> Pulse | None:
    """Return how things were when they were last seen; nothing if nobody has listened."""
    return heart(request).pulse


Listener = Annotated[Principal, Depends(principal)]


@router.get("/live")
async def live(request: Request, somebody: Listener, place: str = "") -> StreamingResponse:
    """Tell what changes, and who else looks at the same page, until whoever listens goes away."""
    somebody.require(Permission.READ)
    request.app.state.heart = beating = heart(request).awake()
    held = ExitStack()
    held.enter_context(house(request).streams.held(somebody.name))
    held.enter_context(beating.attendance.at(place, somebody))
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return _Stream(_counted(beating, somebody, held, place), media_type="text/event-stream", headers=headers)


@router.get("/live/history")
def history(request: Request, somebody: Listener, queue: str) -> JSONResponse:
    """Return how a queue did while somebody looked: times, ready, dead, and the age of the oldest in seconds."""
    somebody.require(Permission.READ)
    told = list(heart(request).history) if somebody.sees(queue) else []
    rows = [(at, *ages[queue]) for at, ages in told if queue in ages]
    columns = [list(each) for each in zip(*rows, strict=True)] or [[], [], [], []]
    return JSONResponse(columns, headers={"Cache-Control": "no-store"})


class _Stream(StreamingResponse):
    """A stream that a server may cut off when it stops: that is an end like any other, and not an error."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        async def sending(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await super().__call__(scope, receive, sending)
        except asyncio.CancelledError:
            if not began:
                raise
            await send({"type": "http.response.body", "body": b""})


async def _rest(until: float) -> None:
    loop = asyncio.get_running_loop()
    while (left := until - loop.time()) > 0 and not _leaving():  # noqa: ASYNC110 - nobody tells when a server stops
        await asyncio.sleep(min(_GLANCE, left))


def _leaving() -> bool:
    # uvicorn waits for streams to end before it tells an application that it stops
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return bool(getattr(server, "should_exit", False))


async def _counted(beating: Heart, somebody: Principal, held: ExitStack, place: str) -> AsyncIterator[str]:
    with held:
        async with aclosing(_told(beating, somebody, place)) as told:
            async for each in told:
                yield each


async def _told(beating: Heart, somebody: Principal, place: str = "") -> AsyncGenerator[str]:
    loop = asyncio.get_running_loop()
    until = loop.time() + _LONGEST_STREAM
    known: Numbers = {}
    yield "retry: 2000\n\n"
    async with aclosing(beating.listen()) as beats:
        async for _ in beats:
            if _leaving():
                return
            pulse = beating.pulse
            if beating.trouble is not None or pulse is None:
                yield _event("away", {"trouble": beating.trouble, "at": datetime.now(UTC).isoformat()})
            else:
                numbers = beating.numbers(pulse, somebody)
                if place:
                    numbers = numbers | {"here": ", ".join(beating.attendance.others(place, somebody))}
                changed = {name: value for name, value in numbers.items() if known.get(name, "") != value}
                known = numbers
                yield _event("pulse", {"at": pulse.at.isoformat(), "numbers": changed})
            if loop.time() > until:  # whoever is not welcome any more is asked again who they are
                yield _event("again", {})
                return


def _event(name: str, said: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(said, separators=(',', ':'))}\n\n"


def _totals(queues: list[Queue], groups: list[Group]) -> Iterator[tuple[str, int]]:
    yield "letters.dead", sum(each.dead for each in queues)
    yield "letters.hour", sum(each.deaths_last_hour for each in groups)
    yield "groups.newest", max((each.id for each in groups), default=0)
    work = [each for each in queues if not each.name.startswith("sink.")]
    yield "queues.stopped", sum(1 for each in work if each.paused or each.breaker in _STOPPED)
    yield "messages.ready", sum(each.ready for each in work)
    yield "messages.leased", sum(each.leased for each in work)
    yield "messages.deferred", sum(each.deferred for each in work)


def _of_queue(queue: Queue, now: datetime) -> Iterator[tuple[str, int | float | str]]:
    name = f"queue.{queue.name}"
    yield f"{name}.ready", queue.ready
    yield f"{name}.leased", queue.leased
    yield f"{name}.deferred", queue.deferred
    yield f"{name}.dead", queue.dead
    yield f"{name}.age", round(_age(queue, now), 1)
    yield f"{name}.state", "paused" if queue.paused else queue.breaker


def _age(queue: Queue, now: datetime) -> float:
    return 0.0 if queue.oldest_ready_at is None else max(0.0, (now - queue.oldest_ready_at).total_seconds())
