"""Workers for tests: in a thread of the test's own process, or as `python -m bartleby work` with an app file."""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar
from unittest import mock

import psycopg
import pytest

from bartleby import Bartleby, Client, Message, Terminal, fetching
from bartleby.heartbeat import Heartbeat
from bartleby.held import Held
from bartleby.link import Link
from bartleby.threads import ThreadLane
from bartleby.worker import Worker

T = TypeVar("T")
Conn = psycopg.Connection[tuple[Any, ...]]

BOTH = pytest.mark.parametrize("awaited", [False, True])
LONG = 60.0
GRACE_SECONDS = 5.0
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("BARTLEBY_")}


def until(condition: Callable[[], T], seconds: float = LONG, what: str = "") -> T:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what or condition}"
        time.sleep(0.003)
    return value


def present(value: T | None) -> T:
    assert value is not None
    return value


def numbered(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Return messages whose payloads are numbers, to be sent together."""
    return [{"payload": number} for number in range(first, first + count)]


class Running:
    """A worker or relay in a thread; at the end of `with` it is stopped like by two SIGTERM, and its error raised."""

    def __init__(self, worker: Any) -> None:
        self.worker: Worker = worker
        self.counts: Counter[str] | None = None
        self.error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self.thread = threading.Thread(target=self._run, name="a worker")
        self.thread.start()
        assert self._started.wait(LONG)

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            present(self._loop).call_soon_threadsafe(self.worker.stop)

    def wait_for_loop(self) -> None:
        """Wait until the worker's loop has run what was scheduled before, such as a stop."""
        turned = threading.Event()
        present(self._loop).call_soon_threadsafe(turned.set)
        assert turned.wait(LONG)

    def join(self) -> Counter[str]:
        self.thread.join(LONG)
        assert not self.thread.is_alive(), "it does not end"
        if self.error is not None:
            raise self.error
        return present(self.counts)

    def end(self) -> Counter[str]:
        """Stop it as SIGTERM would, and wait."""
        self.stop()
        return self.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.thread.is_alive():
            self.stop()
            self.stop()
        self.thread.join(LONG)
        assert not self.thread.is_alive(), "it does not end"
        if self.error is not None and kind is None:
            raise self.error

    def _run(self) -> None:
        try:
            self.counts = asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001 - the test sees it
            self.error = error
        finally:
            self._started.set()

    async def _main(self) -> Counter[str]:
        self._loop = asyncio.get_running_loop()
        self._started.set()
        return await self.worker.run()


@contextlib.contextmanager
def working(app: Bartleby, **options: Any) -> Iterator[Running]:
    try:
        with Running(Worker(app, **{"poll": 0.05, "grace": GRACE_SECONDS, **options})) as running:
            yield running
    finally:
        if client := app.__dict__.pop("client", None):
            client.close()


def drain(app: Bartleby, **options: Any) -> Counter[str]:
    # it looks for the end more often than users need it: this runs hundreds of times
    with mock.patch.object(fetching, "_LOOK_EVERY", 0.02), working(app, until_idle=True, **options) as running:
        return running.join()


def handler_of(body: Callable[[Any], object], *, awaited: bool, takes: Any = Message) -> Callable[..., Any]:
    """Return a handler, plain or async, that answers as `body` does; `takes` is the type of its parameter."""

    def handle(given: Any) -> object:
        return body(given)

    async def handle_awaited(given: Any) -> object:
        await asyncio.sleep(0)
        return body(given)

    function = handle_awaited if awaited else handle
    function.__annotations__["given"] = takes
    return function


class HostileAnswer:
    """An answer of a handler that raises when its class is read."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")

    @__class__.setter
    def __class__(self, value: object) -> None: ...


class FailingTerminal(Terminal):
    def __init__(self) -> None:
        raise SystemError("cannot be made")


def first_only() -> Callable[[Message], bool]:
    """Return a condition that holds for the first message and no other."""
    turns = itertools.count()
    return lambda _: next(turns) == 0


class Gate:
    """Handlers that report their start and wait until the gate is opened; `holds` says which messages wait.

    Stubborn ones ignore that they are cancelled.
    """

    def __init__(self, holds: Callable[[Message], bool] = lambda _: True, *, stubborn: bool = False) -> None:
        self._holds = holds
        self._ignored = [BaseException] if stubborn else []
        self._started = threading.Semaphore(0)
        self._open = threading.Event()
        self.cancelled = threading.Event()
        """Set when a waiting handler was stopped from outside."""

    def handler(self, *, awaited: bool) -> Callable[..., Any]:
        return self._wait_awaited if awaited else self._wait

    def wait_for_start(self, count: int = 1) -> None:
        for _ in range(count):
            assert self._started.acquire(timeout=LONG)

    @property
    def another_started(self) -> bool:
        return self._started.acquire(blocking=False)

    def open(self) -> None:
        self._open.set()

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self._started.release()
        try:
            yield
        except BaseException:
            self.cancelled.set()
            raise

    def _wait(self, message: Message) -> None:
        if self._holds(message):
            with self._inside():
                while not self._open.is_set():
                    with contextlib.suppress(*self._ignored):
                        time.sleep(0.002)

    async def _wait_awaited(self, message: Message) -> None:
        if self._holds(message):
            with self._inside():
                while not self._open.is_set():
                    with contextlib.suppress(*self._ignored):
                        await asyncio.sleep(0.002)


def renew_now(worker: Worker) -> None:
    """Let the heartbeat renew every lease of a worker at each beat from now on, however long the leases are."""
    heartbeat = worker._shared.holding._heartbeat

    async def renew(link: Link, leases: Iterable[Held]) -> None:
        due = list(leases)
        for held in due:
            held.extended = float("-inf")
        await Heartbeat._renew(heartbeat, link, due)

    heartbeat._renew = renew  # type: ignore[method-assign]


def time_out(running: Running, queue: str = "orders") -> None:
    """Let the time be over for the threads that run handlers of a queue."""
    lane = running.worker._shared.holding.lanes[queue]
    assert isinstance(lane, ThreadLane)
    for run in list(lane._runs.values()):
        run.began -= present(lane.handler.timeout) + 1


def claim_ahead(running: Running, queue: str = "orders") -> None:
    """Let a lane claim more than it runs, as it does after many quick messages; call this before they are sent."""
    present(until(lambda: running.worker._shared.holding.lanes.get(queue)))._seconds = 0.0001


def send_solo(app: Bartleby, conn: Conn, queue: str, count: int = 1) -> list[int]:
    """Send messages whose first worker dies, so that they come back marked solo; the queue is paused then."""
    app.client.create_queue(queue)
    sent: list[int] = list(app.send_many(queue, [{"payload": "solo"}] * count))
    with Client(app.settings.dsn) as victim:
        assert len(present(victim.claim(queue, "victim", limit=count, alone=False))) == count
    lapse(conn)
    app.client.pause_queue(queue)
    for each in sent:
        found = present(app.client.find_message(each))
        assert (found.solo, found.attempts) == (True, 0)
    return sent


class CapturedLog(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def of(self, event: str) -> list[logging.LogRecord]:
        return [record for record in self.records if getattr(record, "event", None) == event]

    @classmethod
    @contextlib.contextmanager
    def capturing(cls) -> Iterator[Self]:
        captured, logger = cls(), logging.getLogger("bartleby")
        before = logger.level
        logger.addHandler(captured)
        logger.setLevel(logging.DEBUG)
        try:
            yield captured
        finally:
            logger.removeHandler(captured)
            logger.setLevel(before)


class Program:
    """`bartleby work …` as a process, or another command; its lines on standard error are collected."""

    def __init__(
        self, dsn: str, *arguments: str, cwd: Path, environment: Mapping[str, str] | None = None, command: str = "work"
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bartleby", "--dsn", dsn, command, *arguments],
            cwd=cwd, env={**ENVIRONMENT, **(environment or {})}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.pid = self.process.pid
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with present(self.process.stderr) as stream:
            for line in stream:
                self.lines.append(line.rstrip("\n"))

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until this many lines have this in it."""

        def seen() -> bool:
            ended = self.process.poll() is not None
            found = sum(text in line for line in self.lines) >= times
            assert found or not ended, self.text()
            return found

        until(seen, what=f"{text!r} among {self.lines}")

    def text(self) -> str:
        return "\n".join(self.lines)

    def events(self) -> list[dict[str, Any]]:
        """Return the lines of --log json; each must be an object."""
        found = [json.loads(line) for line in self.lines]
        assert all(isinstance(each, dict) for each in found)
        return found

    def term(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> int:
        until(lambda: self.process.poll() is not None, what=f"the end of it:\n{self.text()}")
        self._reader.join(LONG)
        return self.process.wait()

    def __enter__(self) -> Self:
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(LONG)

    def __exit__(self, *_: object) -> None:
        self.kill()


def children_of(pid: int) -> list[int]:
    """Return the processes that this one has started and not yet buried."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in found]


def kill_without_reaping(pid: int) -> None:
    """Kill a child and leave a zombie, which still has its pid."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def state(conn: Conn, name: str = "orders") -> tuple[int, int, int, int]:
    """Return how many messages of a queue are ready, leased, deferred and dead."""
    query = "select ready, leased, deferred, dead from bartleby.queues where name = %s"
    [(ready, leased, deferred, dead)] = conn.execute(query, [name]).fetchall()
    return ready, leased, deferred, dead


def sessions(conn: Conn, name: str) -> list[int]:
    """Return the backends of a worker's connection: claims, settles, heartbeat, listener, janitor."""
    query = "select pid from pg_stat_activity where datname = current_database() and application_name = %s"
    return [pid for (pid,) in conn.execute(query, [f"bartleby {name}"])]


def lapse(conn: Conn, *, but: Collection[int] = ()) -> None:
    """Let the leases of this moment, but for some, lapse and take them back, before a heartbeat can renew them."""
    found = conn.execute("select id from bartleby.lease where not isempty(pending)")
    leases = [lease for (lease,) in found if lease not in but]
    lapsing = b"update bartleby.lease set until = bartleby.clock() - interval '1 s' where id = any (%s)"

    def taken_back() -> bool:
        with conn.transaction():
            conn.execute(lapsing, [leases])
            conn.execute("select bartleby.reap()")
        held = "select from bartleby.lease where id = any (%s) and not isempty(pending)"
        return conn.execute(held, [leases]).rowcount == 0

    until(taken_back)
