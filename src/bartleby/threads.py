"""A lane for plain `def` handlers: they run in threads, so that one that blocks holds up nobody else.

Threads are woken one at a time, and more of them only when the handlers turn out to block: for handlers that take
microseconds a second thread only fights the first for the interpreter. A thread cannot be stopped from outside, but an
exception can be raised in it (as soon as it runs Python code); its result is not wanted in any case.
"""

import asyncio
import contextlib
import ctypes
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType

from bartleby.deadlines import late, stuck, traceback_of
from bartleby.execute import Executor, Interrupted, Settlement
from bartleby.held import Held
from bartleby.lanes import CANCELLED, Finished, Lane
from bartleby.message import Message
from bartleby.starting import Begin, Items, begin_all, starts_first, with_others

_TICK = 0.01
_QUICK = 0.0005
_UNWINDING = 1.0


class Run:
    """What one thread is doing."""

    __slots__ = ("began", "interrupted_at", "items", "lock", "over", "told")

    def __init__(self, items: Items) -> None:
        self.items = items
        self.began = time.monotonic()
        self.lock = threading.Lock()
        self.over = False
        self.interrupted_at: float | None = None
        self.told = False

    @property
    def stuck(self) -> bool:
        """Whether it was interrupted long ago, and still goes on."""
        return self.interrupted_at is not None and time.monotonic() - self.interrupted_at > _UNWINDING

    def end(self) -> bool:
        """Return whether this call was the first to end it: only that one says what became of the messages."""
        with self.lock:
            first, self.over = not self.over, True
            return first


class ThreadLane(Lane):
    """Runs `def` handlers."""

    def __init__(self, executor: Executor, concurrency: int, batch: int, finished: Finished, begin: Begin) -> None:
        super().__init__(executor, concurrency, batch, finished, begin)
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._threads = 0
        self._idle = 0
        self._started = 0
        self._seen_started = 0
        self._closing = False
        self._runs: dict[int, Run] = {}
        self._outcomes: deque[tuple[Run, Sequence[Settlement], float]] = deque()
        self._told = False
        self._ticking: asyncio.TimerHandle | None = None

    @property
    def stuck(self) -> int:
        """How many of these are long settled, and their handlers will not end."""
        return sum(len(run.items) for run in list(self._runs.values()) if run.stuck)

    def kick(self) -> None:
        """Wake threads: one for quick handlers, else as many as there are messages for."""
        if self._paused or not self._buffer:
            return
        quick = self._seconds is None or self._seconds < _QUICK
        self._wake(1 if quick else min(self.concurrency, len(self._buffer)))
        if self._ticking is None:
            self._ticking = self._loop.call_later(_TICK, self._tick)

    def cancel(self, held: Held | None) -> None:
        """Interrupt the threads that run messages of this lease, or all."""
        with self._changed:
            self._drop(held)
        for thread, run in list(self._runs.items()):
            if held is None or any(each is held for each, _ in run.items):
                self._interrupt(thread, run, [CANCELLED for _ in run.items])

    def unstarted(self) -> list[tuple[Held, Message]]:
        """Take out and return what has not been started."""
        with self._changed:
            return super().unstarted()

    def too_much(self, seconds: float) -> list[tuple[Held, Message]]:
        """Take out and return what waits though the last `seconds` show that it would wait for long."""
        with self._changed:
            return super().too_much(seconds)

    def close(self) -> None:
        """Let idle threads end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _wake(self, count: int) -> None:
        with self._changed:
            self._changed.notify(count)
            # one that will not end is replaced, but not without end
            lost = min(self.concurrency, sum(run.stuck for run in list(self._runs.values())))
            new = min(count - self._idle, self.concurrency + lost - self._threads)
            for _ in range(new):
                self._threads += 1
                threading.Thread(target=self._live, name=f"bartleby-{self.handler.queue}", daemon=True).start()

    def _tick(self) -> None:
        self._ticking = None
        if self.handler.timeout is not None:
            self._time_out(self.handler.timeout)
        if self._buffer and not self._paused:
            if self._started == self._seen_started or self._seconds is None:
                self._wake(1 + self._threads)
            self._seen_started = self._started
        self._tell_of_the_stuck()
        with self._changed:
            busy = self._buffer or self.running
        if busy:
            self._ticking = self._loop.call_later(_TICK, self._tick)

    def _tell_of_the_stuck(self) -> None:
        for run in list(self._runs.values()):
            if run.stuck and not run.told:
                run.told = True
                stuck(self.handler.name)

    def _live(self) -> None:
        thread = threading.get_ident()
        while True:
            with self._changed:
                while not self._closing and (self._paused or not self._buffer):
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                if self._closing:
                    self._threads -= 1
                    break
                if self._pace is not None and (wait := self._pace.wait()):
                    items: Items = ()
                else:
                    wait, items = _TICK, self._next()
                    self._begun += len(items)
                    self._started += 1
            if items:
                self._run(thread, items)
            else:
                time.sleep(wait)
        _leave_django()

    def _run(self, thread: int, items: Items) -> None:
        run = self._runs[thread] = Run(items)
        try:
            settlements = self._settlements(run)
            if run.end():
                self._tell(run, settlements)
            for _ in range(20 if run.interrupted_at is not None else 0):
                # the exception is on its way and must not reach the next message, unless the handler caught it
                time.sleep(0.001)
        except Interrupted:
            pass
        finally:
            del self._runs[thread]
            if run.interrupted_at is not None:
                self._call_soon(self._free, len(items))

    def _settlements(self, run: Run) -> Sequence[Settlement]:
        if starts_first(run.items):
            run.began = math.inf  # its time has not begun
            try:
                begun = asyncio.run_coroutine_threadsafe(begin_all(run.items, self._begin), self._loop).result()
            finally:
                run.began = time.monotonic()
            return with_others(run.items, begun, self._called(begun) if begun else ())
        return self._called(run.items)

    def _called(self, items: Items) -> Sequence[Settlement]:
        _refresh_django()
        try:
            if self.handler.batch is None:
                return (self.executor.run_here(items[0][1]),)
            return self.executor.run_batch_here([message for _, message in items])
        except Exception as error:  # noqa: BLE001 - the last guard: what nobody settles would be leased for ever
            return self.executor.judge_all([message for _, message in items], error)

    def _tell(self, run: Run, settlements: Sequence[Settlement]) -> None:
        self._outcomes.append((run, settlements, max(0.0, time.monotonic() - run.began)))
        if not self._told:
            self._told = True
            self._call_soon(self._collect)

    def _call_soon(self, callback: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the worker has ended; nobody wants to know any more
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _collect(self) -> None:
        self._told = False
        while self._outcomes:
            run, settlements, seconds = self._outcomes.popleft()
            self._took(seconds)
            if run.interrupted_at is None:  # else its thread is still at it
                self._ended += len(run.items)
            for (held, message), settlement in zip(run.items, settlements, strict=True):
                self.finish(held, message, settlement)

    def _free(self, count: int) -> None:
        self._ended += count
        self._look_for_room()

    def _time_out(self, limit: float) -> None:
        now = time.monotonic()
        for thread, run in list(self._runs.items()):
            if not run.over and now - run.began > limit:
                error = TimeoutError(late(limit)).with_traceback(_where(thread))
                self._interrupt(thread, run, self.executor.judge_all([message for _, message in run.items], error))

    def _interrupt(self, thread: int, run: Run, settlements: Sequence[Settlement]) -> None:
        with run.lock:
            if run.over:
                return
            run.over, run.interrupted_at = True, time.monotonic()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Interrupted))
        self._tell(run, settlements)


def _refresh_django() -> None:
    # Django has a connection for each thread, and replaces one that broke or is old only when it is told to. If that
    # fails, or Django is there and not configured, the handler finds out when it wants a connection.
    if "django.db" in sys.modules:
        with contextlib.suppress(Exception):
            sys.modules["django.db"].close_old_connections()


def _leave_django() -> None:
    if "django.db" in sys.modules:
        with contextlib.suppress(Exception):
            sys.modules["django.db"].connections.close_all()


def _where(thread: int) -> TracebackType | None:
    # what the thread is doing now
    frame: FrameType | None = sys._current_frames().get(thread)  # noqa: SLF001 - there is no other way
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return traceback_of(reversed(frames))
