"""A lane: the messages of one queue on their way through this process, and the coroutines that run them.

How much is claimed ahead follows from how long the handler takes: enough for a quarter of a second, so that quick
handlers never wait for the database and slow ones do not hoard what another worker could do.
"""

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from bartleby.execute import Executor, Released, Settlement
from bartleby.held import Backlog, Held
from bartleby.message import Message
from bartleby.starting import Begin, Items, begin_all, starts_first, with_others

_AHEAD_SECONDS = 0.25
_TURN = 0.002
_BACKLOG = 4
_HEARTBEAT_LOOKS = 0.02

CANCELLED = Released(0.0, "the worker cancelled it")
"""What becomes of a message whose handler was stopped; if its lease is lost, nothing does."""

Finished = Callable[[Held, Message, Settlement], None]


class Lane:
    """Where messages wait and run; what differs between coroutines and threads is left to the two kinds."""

    def __init__(self, executor: Executor, concurrency: int, batch: int, finished: Finished, begin: Begin) -> None:
        self.executor = executor
        self.handler = executor.handler
        self.concurrency = concurrency
        self.claim_limit = max(batch, self.handler.batch or 1)
        self.wanted = asyncio.Event()
        """Set when there is room for another claim."""
        self._enough = -1
        self.backlog = Backlog()
        self._capacity = concurrency * (self.handler.batch or 1)
        # two counters, each moved by one side only: threads begin, the event loop ends
        self._begun = 0
        self._ended = 0
        self._ended_before = 0
        self._buffer: deque[tuple[Held, Message]] = deque()
        self._finished = finished
        self._begin = begin
        self._paused = False
        self._seconds: float | None = None
        self._pace = None if self.handler.rate is None else Pace(self.handler.rate)

    @property
    def running(self) -> int:
        """How many messages are with handlers."""
        return self._begun - self._ended

    @property
    def stuck(self) -> int:
        """How many of these are long settled, and their handlers will not end."""
        return 0

    def put(self, held: Held, messages: Iterable[Message]) -> None:
        """Let these messages of a lease run."""
        self._buffer.extend((held, message) for message in messages)
        self.kick()

    def kick(self) -> None:
        """Run what waits."""
        raise NotImplementedError

    def cancel(self, held: Held | None) -> None:
        """Stop handlers whose lease is lost, or all of them: their results are not wanted."""
        raise NotImplementedError

    def room(self) -> int:
        """Return how many messages to claim now; if 0, `wanted` is set as soon as there is room."""
        if self.backlog.count > _BACKLOG * self.claim_limit:
            # the database takes settlements more slowly than the handlers make them
            self.wanted.clear()
            return 0
        ahead = 0
        if self._seconds is not None:
            ahead = min(2 * self.claim_limit, int(self._capacity * _AHEAD_SECONDS / max(self._seconds, 1e-6)))
        target = self._capacity + ahead
        if self._pace is not None:
            target = min(target, max(1, int(self._pace.rate)) * (self.handler.batch or 1))
        enough = max(min(self._capacity, target) - 1, target // 2)
        have = self.running - self.stuck + len(self._buffer)
        if have <= enough:
            self._enough = -1
            return min(target - have, self.claim_limit)
        self._enough = enough
        self.wanted.clear()
        return 0

    def runs_at_once(self) -> bool:
        """Return whether the next message need not wait for others."""
        return self._pace is None and self.running - self.stuck + len(self._buffer) < self._capacity

    def pause(self) -> None:
        """Start nothing more until resumed."""
        self._paused = True

    def resume(self) -> None:
        """Go on."""
        self._paused = False
        self.kick()

    def unstarted(self) -> list[tuple[Held, Message]]:
        """Take out and return what has not been started."""
        waiting = list(self._buffer)
        self._buffer.clear()
        self._look_for_room()
        return waiting

    def too_much(self, seconds: float) -> list[tuple[Held, Message]]:
        """Take out and return what waits though the last `seconds` show that it would wait for long."""
        ended, self._ended_before = self._ended - self._ended_before, self._ended
        spare = len(self._buffer) - 2 * ended - self._capacity
        if spare <= 0 or not self.running or self._pace is not None:
            return []
        self._seconds = max(self._seconds or 0.0, seconds)
        late = [self._buffer.pop() for _ in range(min(spare, len(self._buffer)))]
        self._look_for_room()
        return late

    def close(self) -> None:
        """Leave nothing behind."""

    def finish(self, held: Held, message: Message, settlement: Settlement) -> None:
        """Hand over what became of a message, and see whether there is room for more."""
        self._finished(held, message, settlement)
        if self._enough >= 0:
            self._look_for_room()

    def _look_for_room(self) -> None:
        if self._enough >= self.running - self.stuck + len(self._buffer):
            self.wanted.set()

    def _drop(self, held: Held | None) -> None:
        # nobody would finish these, and so nobody would look for room
        waiting = [item for item in self._buffer if item[0] is not held]
        if len(waiting) < len(self._buffer):
            self._buffer.clear()
            self._buffer.extend(waiting)
            self._look_for_room()

    def _took(self, seconds: float) -> None:
        self._seconds = seconds if self._seconds is None else self._seconds + 0.05 * (seconds - self._seconds)

    def _next(self) -> Items:
        # One message, or as many as a batch handler takes; those of lost leases are passed over. After a long sleep of
        # the whole process a lease may have lapsed before the heartbeat could look at it: its word is waited for.
        chosen: list[tuple[Held, Message]] = []
        most = self.handler.batch or 1
        while self._buffer:
            item = self._buffer.popleft()
            if item[0].deadline < time.monotonic() and not item[0].lost:
                self._buffer.appendleft(item)
                break
            if not item[0].lost:
                if most == 1:
                    return (item,)
                chosen.append(item)
                if len(chosen) == most:
                    break
        return chosen


class CoroutineLane(Lane):
    """Runs `async def` handlers in tasks that live as long as there is work.

    Handlers that never wait share one task. Another is started when all there are wait inside their handlers: this is
    seen by a callback that the event loop gets to only then.
    """

    def __init__(self, executor: Executor, concurrency: int, batch: int, finished: Finished, begin: Begin) -> None:
        super().__init__(executor, concurrency, batch, finished, begin)
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[asyncio.Task[None], Items] = {}
        self._unwanted: set[asyncio.Task[None]] = set()
        self._context = contextvars.copy_context()
        self._inside = 0
        self._looking = False

    def kick(self) -> None:
        """See whether another task is needed, as soon as those there are wait."""
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._start_another)

    def cancel(self, held: Held | None) -> None:
        """Cancel the tasks that run messages of this lease, or all."""
        self._drop(held)
        for task, items in self._tasks.items():
            if items and (held is None or any(each is held for each, _ in items)):
                self._unwanted.add(task)
                task.cancel()

    def _start_another(self) -> None:
        self._looking = False
        if self._buffer and not self._paused and self._inside == len(self._tasks) < self.concurrency:
            task = self._loop.create_task(self._work(), context=self._context.copy())
            self._tasks[task] = ()
            task.add_done_callback(self._task_over)
            self.kick()

    def _task_over(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self.kick()
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    async def _work(self) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - this is one
        turn_began = time.perf_counter()
        while self._buffer and not self._paused:
            if self._pace is not None and (wait := self._pace.wait()):
                await asyncio.sleep(wait)
                continue
            items = self._tasks[task] = self._next()
            if not items:
                await asyncio.sleep(_HEARTBEAT_LOOKS)
                continue
            began = time.perf_counter()
            settlements = await self._run(task, items)
            ended = time.perf_counter()
            self._took(ended - began)
            for (held, message), settlement in zip(items, settlements, strict=True):
                self.finish(held, message, settlement)
            if contextvars.copy_context() != self._context:
                return  # the handler has set a context variable, which is no business of the next message
            if ended - turn_began > _TURN:
                await asyncio.sleep(0)
                turn_began = time.perf_counter()

    async def _run(self, task: asyncio.Task[None], items: Items) -> Sequence[Settlement]:
        self._begun += len(items)
        self._inside += 1
        if not self._looking and self._buffer:
            self.kick()
        try:
            if starts_first(items):
                begun = await begin_all(items, self._begin)
                return with_others(items, begun, await self._settlements(begun) if begun else ())
            return await self._settlements(items)
        except asyncio.CancelledError as error:
            if task in self._unwanted:
                return [CANCELLED for _ in items]
            # nobody but the handler itself can have done that
            return self.executor.judge_all([message for _, message in items], error)
        except Exception as error:  # noqa: BLE001 - the last guard: what nobody settles would be leased for ever
            return self.executor.judge_all([message for _, message in items], error)
        finally:
            self._inside -= 1
            self._ended += len(items)
            self._tasks[task] = ()
            self._unwanted.discard(task)
            while task.cancelling():
                task.uncancel()

    async def _settlements(self, items: Items) -> Sequence[Settlement]:
        if self.handler.batch is None:
            return (await self.executor.run(items[0][1]),)
        return await self.executor.run_batch([message for _, message in items])


class Pace:
    """At most so many starts a second, evenly spread, in this process."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._next = 0.0

    def wait(self) -> float:
        """Return 0 and take a turn, or how long to wait for one."""
        now = time.monotonic()
        if now < self._next:
            return self._next - now
        self._next = max(self._next, now - 1 / self.rate) + 1 / self.rate
        return 0.0
