"""How much is taken on: requests a minute and at once, failed logins, bytes of a body, open streams."""

import asyncio
import hashlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

_MOST_KEYS = 10_000
_MOST_WAITING = 100
_PATIENCE = 30.0
_MOST_DIGITS = 18  # Python takes no number of thousands


class Buckets:
    """A bucket of tokens for each key, that fills again by itself."""

    def __init__(self, per_minute: float, burst: float) -> None:
        self._per_second = per_minute / 60
        self._burst = max(burst, 1.0)
        self._lock = threading.Lock()
        self._levels: OrderedDict[object, tuple[float, float]] = OrderedDict()

    def wait(self, key: object) -> float:
        """Return in how many seconds there is a token; 0 if there is one now. Nothing is taken."""
        with self._lock:
            return max(0.0, (1 - self._level(key)) / self._per_second)

    def take(self, key: object) -> float:
        """Take a token and return 0, or return in how many seconds there is one."""
        with self._lock:
            level = self._level(key)
            if level < 1:
                return (1 - level) / self._per_second
            self._levels[key] = (level - 1, time.monotonic())
            self._levels.move_to_end(key)
            while len(self._levels) > _MOST_KEYS:
                self._levels.popitem(last=False)
            return 0.0

    def _level(self, key: object) -> float:
        level, at = self._levels.get(key, (self._burst, 0.0))
        return min(self._burst, level + (time.monotonic() - at) * self._per_second)


class Streams:
    """How many streams are open: no more than a number, and of one principal no more than half of it."""

    def __init__(self, most: int) -> None:
        self._most, self.each = most, max(1, most // 2)
        self._lock = threading.RLock()  # a stream that never began ends when garbage is collected, be it in here
        self._open: dict[str, int] = {}

    @property
    def open(self) -> int:
        """How many are open now."""
        return sum(self._open.values())

    @contextmanager
    def held(self, principal: str) -> Iterator[None]:
        """Count a stream while it lasts; a problem for one too many."""
        with self._lock:
            if self.open >= self._most or self._open.get(principal, 0) >= self.each:
                raise HTTPException(429, "too many streams are open", {"Retry-After": "30"})
            self._open[principal] = self._open.get(principal, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._open[principal] -= 1
                if not self._open[principal]:
                    del self._open[principal]


@dataclass(slots=True, eq=False)
class Turn:
    """The turn of one request: it is left while others can have it, and taken again."""

    free: asyncio.Semaphore
    taken: bool = False

    async def take(self) -> None:
        """Wait for the turn."""
        await self.free.acquire()
        self.taken = True

    def leave(self) -> None:
        """Let others have it."""
        if self.taken:
            self.taken = False
            self.free.release()


class Turns:
    """Who is at work: of one principal no more than three quarters of what there is to work with.

    The next one waits, and holds neither a thread nor a connection.
    """

    def __init__(self, most: int) -> None:
        self.each = max(1, most * 3 // 4)
        self._queues: dict[object, tuple[asyncio.Semaphore, list[Turn]]] = {}

    @asynccontextmanager
    async def held(self, principal: str) -> AsyncIterator[Turn]:
        """Wait for a turn, and have it; a problem for one too many, or after too long."""
        key = principal, asyncio.get_running_loop()
        free, here = self._queues.setdefault(key, (asyncio.Semaphore(self.each), []))
        if len(here) >= self.each + _MOST_WAITING:
            raise _too_many_at_once()
        turn = Turn(free)
        here.append(turn)
        try:
            try:
                async with asyncio.timeout(_PATIENCE):
                    await turn.take()
            except TimeoutError:
                raise _too_many_at_once() from None
            yield turn
        finally:
            turn.leave()
            here.remove(turn)
            if not here:
                del self._queues[key]


def _too_many_at_once() -> HTTPException:
    return HTTPException(429, "too many requests of yours are at work; wait for some of them", {"Retry-After": "5"})


def too_large(length: str | None, most: int) -> bool:
    """Return whether a body says that it is larger than this."""
    return length is not None and (not length.isdecimal() or len(length) > _MOST_DIGITS or int(length) > most)


class BodyDigest:
    """What a body was, as far as it has been received."""

    def __init__(self) -> None:
        self._total = hashlib.sha256()

    def add(self, part: bytes) -> None:
        """Go on with the next part."""
        self._total.update(part)

    def hex(self) -> str:
        """Return the digest of what has been received."""
        return self._total.hexdigest()


def limited(receive: Receive, most: int, digest: BodyDigest) -> Receive:
    """Return what receives a body, until it is larger than this; the digest knows what was received."""
    seen = 0

    async def receiving() -> Message:
        nonlocal seen
        message = await receive()
        part = message.get("body", b"")
        seen += len(part)
        if seen > most:
            raise HTTPException(413, f"a request has at most {most:,} bytes")
        digest.add(part)
        return message

    return receiving


async def arrived(receive: Receive) -> Receive:
    """Return what receives a body that is here: whoever is still sending it works at nothing."""
    here = deque([await receive()])
    while here[-1].get("more_body"):
        here.append(await receive())

    async def receiving() -> Message:
        return here.popleft() if here else await receive()

    return receiving
