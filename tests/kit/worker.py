"""Workers for tests: in a thread of the test's own process, or as `python -m bartleby work` with an app file.

working(app)      a Worker in a thread; stopped at the end, and its error is raised
drain(app)        a Worker that runs until there is nothing to do; returns its counts
send_solo(app)    messages that have to run alone
handler_of(body)  a handler, plain or async, that answers as a function does
Gate              handlers that wait until the test opens the gate
Told              the log records of the library, by event name
Program           a `bartleby work` process: its lines, its exit code, its signals
until(condition)  waits for a condition instead of for a time
"""

import asyncio
import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar
from unittest import mock

import psycopg
import pytest

from bartleby import Bartleby, Client, Message, Terminal, fetching
from bartleby.heartbeat import Heartbeat
from bartleby.held import Held
from bartleby.link import Link
from bartleby.worker import Worker

T = TypeVar("T")
Conn = psycopg.Connection[tuple[Any, ...]]

BOTH = pytest.mark.parametrize("awaited", [False, True])
LONG = 60.0
GRACE_SECONDS = 5.0
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("BARTLEBY_")}


def until(condition: Callable[[], T], seconds: float = LONG, what: str = "") -> T:
    """Return the first true value of a condition."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what or condition}"
        time.sleep(0.003)
    return value


def present(value: T | None) -> T:
    """Return a value that must be there."""
    assert value is not None
    return value


def numbered(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Return messages whose payloads are numbers, to be sent together."""
    return [{"payload": number} for number in range(first, first + count)]


class Running:
    """A worker in a thread."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.counts: Counter[str] | None = None
        self.error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self.thread = threading.Thread(target=self._run, name="a worker")
        self.thread.start()
        assert self._started.wait(LONG)

    def stop(self) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self.worker.stop)

    def wait_for_loop(self) -> None:
        """Wait until the worker's loop has run what was scheduled before, such as a stop."""
        assert self._loop is not None
        turned = threading.Event()
        self._loop.call_soon_threadsafe(turned.set)
        assert turned.wait(LONG)

    def join(self, seconds: float = LONG) -> Counter[str]:
        """Wait for the end; return what was done."""
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "the worker does not end"
        if self.error is not None:
            raise self.error
        assert self.counts is not None
        return self.counts

    def end(self, seconds: float = LONG) -> Counter[str]:
        """Stop it as SIGTERM would, and wait."""
        self.stop()
        return self.join(seconds)

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
    """Run a worker; at the end it is stopped like by two SIGTERM."""
    running = Running(Worker(app, **{"poll": 0.05, "grace": GRACE_SECONDS, **options}))
    try:
        yield running
    finally:
        if running.thread.is_alive():
            running.stop()
            running.stop()
        running.thread.join(LONG)
        close(app)
    assert not running.thread.is_alive(), "the worker does not end"
    if running.error is not None:
        raise running.error


def drain(app: Bartleby, **options: Any) -> Counter[str]:
    """Work until nothing is left to do."""
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


class Liar:
    """An answer of a handler that cannot be asked what it is."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")

    @__class__.setter
    def __class__(self, value: object) -> None: ...


class Unborn(Terminal):
    """An outcome that cannot be made."""

    def __init__(self) -> None:
        raise SystemError("cannot be made")


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

    def _wait(self, message: Message) -> None:
        if not self._holds(message):
            return
        self._started.release()
        try:
            while not self._open.is_set():
                with contextlib.suppress(*self._ignored):
                    time.sleep(0.002)
        except BaseException:
            self.cancelled.set()
            raise

    async def _wait_awaited(self, message: Message) -> None:
        if not self._holds(message):
            return
        self._started.release()
        try:
            while not self._open.is_set():
                with contextlib.suppress(*self._ignored):
                    await asyncio.sleep(0.002)
        except BaseException:
            self.cancelled.set()
            raise


def renew_now(running: Running) -> None:
    """Let the heartbeat renew every lease of a worker at each beat from now on, however long the leases are."""
    heartbeat = running.worker._shared.holding._heartbeat

    async def renew(link: Link, leases: Iterable[Held]) -> None:
        due = list(leases)
        for held in due:
            held.extended = float("-inf")
        await Heartbeat._renew(heartbeat, link, due)

    heartbeat._renew = renew  # type: ignore[method-assign]


def claim_ahead(running: Running, queue: str = "orders") -> None:
    """Let a lane claim more than it runs, as it does after many quick messages; to be said before they are sent."""
    present(until(lambda: running.worker._shared.holding.lanes.get(queue)))._seconds = 0.0001


def send_solo(app: Bartleby, conn: Conn, queue: str, count: int = 1) -> list[int]:
    """Send messages whose first worker dies, so that they come back marked solo; the queue is paused then."""
    app.client.create_queue(queue)
    sent: list[int] = list(app.send_many(queue, [{"payload": "solo"}] * count))
    with Client(app.settings.dsn) as victim:
        assert len(present(victim.claim(queue, "victim", limit=count))) == count
    lapse(conn)
    app.client.pause_queue(queue)
    for each in sent:
        found = present(app.client.find_message(each))
        assert (found.solo, found.attempts) == (True, 0)
    return sent


def close(app: Bartleby) -> None:
    client = app.__dict__.pop("client", None)
    if client is not None:
        client.close()


class Told(logging.Handler):
    """Collects what the library tells."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def of(self, event: str) -> list[logging.LogRecord]:
        return [record for record in self.records if getattr(record, "event", None) == event]

    @classmethod
    @contextlib.contextmanager
    def listening(cls) -> Iterator[Self]:
        told, logger = cls(), logging.getLogger("bartleby")
        before = logger.level
        logger.addHandler(told)
        logger.setLevel(logging.DEBUG)
        try:
            yield told
        finally:
            logger.removeHandler(told)
            logger.setLevel(before)


class Program:
    """`bartleby work …` as a process; what it says on standard error is collected by line."""

    def __init__(
        self, dsn: str | None, *arguments: str, cwd: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        named = ["--dsn", dsn] if dsn else []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bartleby", *named, "work", *arguments],
            cwd=cwd,
            env={**ENVIRONMENT, **(environment or {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._news: queue.Queue[None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.lines.append(line.rstrip("\n"))

    def wait_for(self, text: str, times: int = 1, seconds: float = LONG) -> None:
        """Wait until a line has this in it."""

        def seen() -> bool:
            assert self.process.poll() is None or sum(text in line for line in self.lines) >= times, self.text()
            return sum(text in line for line in self.lines) >= times

        until(seen, seconds, f"{text!r} among {self.lines}")

    def text(self) -> str:
        return "\n".join(self.lines)

    def events(self) -> list[dict[str, Any]]:
        """Return the lines of --log json; each must be an object."""
        found = [json.loads(line) for line in self.lines]
        assert all(isinstance(each, dict) for each in found)
        return found

    def term(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def end(self, seconds: float = LONG) -> int:
        """Wait for its end; return the exit code."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.text()}") from None
        self._reader.join(LONG)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(LONG)


def children_of(pid: int) -> list[int]:
    """Return the processes that this one has started and not yet buried."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in found]


def row(conn: Conn, query: str, *parameters: object) -> Any:
    """Return the first row, or the value if it has one column."""
    found = conn.execute(query.encode(), parameters).fetchone()
    return found[0] if found is not None and len(found) == 1 else found


def state(conn: Conn, name: str = "orders") -> tuple[int, int, int, int]:
    """Return how many messages of a queue are ready, leased, deferred and dead."""
    found: tuple[int, int, int, int] = row(
        conn, "select ready, leased, deferred, dead from bartleby.queues where name = %s", name
    )
    return found


def sessions(conn: Conn, name: str) -> list[int]:
    """Return the backends of a worker's connection: claims, settles, heartbeat, listener, janitor."""
    query = "select pid from pg_stat_activity where datname = current_database() and application_name = %s"
    return [pid for (pid,) in conn.execute(query, [f"bartleby {name}"])]


def lapse(conn: Conn) -> None:
    """Let the leases of this moment lapse and take them back, before a heartbeat can renew them."""
    leases = [lease for (lease,) in conn.execute("select id from bartleby.lease where not isempty(pending)")]
    lapsing = b"update bartleby.lease set until = bartleby.clock() - interval '1 s' where id = any (%s)"

    def taken_back() -> bool:
        with conn.transaction():
            conn.execute(lapsing, [leases])
            conn.execute("select bartleby.reap()")
        held = "select count(*) from bartleby.lease where id = any (%s) and not isempty(pending)"
        return bool(row(conn, held, leases) == 0)

    until(taken_back)
