"""Lanes without a database: how much they claim, in which order they run, and that no slot or message is lost."""

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from bartleby import Message, lanes, threads
from bartleby.execute import Executor, Failed, Settlement
from bartleby.failure import Recorder
from bartleby.handlers import handler
from bartleby.held import Backlog, Held
from bartleby.lanes import CANCELLED, CoroutineLane, Lane, Pace
from bartleby.message import LeaseId, MessageId, Position
from bartleby.threads import ThreadLane

AT = datetime(2024, 1, 1, tzinfo=UTC)
BOTH = pytest.mark.parametrize("awaited", [True, False], ids=["coroutines", "threads"])


def messages(count: int, first: int = 1) -> list[Message]:
    def message(number: int) -> Message:
        ids = MessageId(number), "orders", LeaseId(7), Position(number)
        return Message(*ids, 1, str(number), None, None, None, AT, solo=False)

    return [message(number) for number in range(first, first + count)]


class Collected:
    """The settlements that a lane hands over."""

    def __init__(self) -> None:
        self.settled: list[tuple[int, Settlement]] = []

    def __call__(self, _: Held, message: Message, settlement: Settlement) -> None:
        self.settled.append((message.id, settlement))

    @property
    def ids(self) -> list[int]:
        return [message_id for message_id, _ in self.settled]

    async def wait(self, count: int) -> None:
        await until(lambda: len(self.settled) >= count)


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met"
        await asyncio.sleep(0.001)


async def loop_turns(count: int = 50) -> None:
    """Let the event loop run everything that is ready, several times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def all_run(lane: Lane, count: int) -> None:
    """Wait until this many messages are with handlers."""
    await until(lambda: lane.running >= count and (not isinstance(lane, ThreadLane) or len(lane._runs) >= count))


def lease(size: int, number: int = 7, length: float = 3600) -> Held:
    return Held(LeaseId(number), "orders", size, length, time.monotonic(), solo=False, backlog=Backlog())


def lane_of(
    function: Callable[..., Any], concurrency: int = 3, batch: int = 500, **options: Any
) -> tuple[CoroutineLane, Collected]:
    collected = Collected()
    executor = Executor(handler("orders", function, **options), Recorder(), None)
    return CoroutineLane(executor, concurrency, batch, collected), collected


@pytest.fixture
def opened() -> Iterator[list[ThreadLane]]:
    made: list[ThreadLane] = []
    yield made
    for lane in made:
        lane.close()


def threads_of(
    opened: list[ThreadLane], function: Callable[..., Any], concurrency: int = 4, **options: Any
) -> tuple[ThreadLane, Collected]:
    collected = Collected()
    executor = Executor(handler("orders", function, **options), Recorder(), None)
    lane = ThreadLane(executor, concurrency, 500, collected)
    opened.append(lane)
    return lane, collected


async def nothing(message: Message) -> None: ...


class Gate:
    """Handlers of both kinds that run until the gate is open."""

    def __init__(self) -> None:
        self.open = threading.Event()

    async def wait(self, _: Message) -> None:
        await until(self.open.is_set)

    def wait_here(self, _: Message) -> None:
        while not self.open.is_set():
            time.sleep(0.001)

    def lane(self, opened: list[ThreadLane], concurrency: int, *, awaited: bool) -> tuple[Lane, Collected]:
        return lane_of(self.wait, concurrency) if awaited else threads_of(opened, self.wait_here, concurrency)


@BOTH
async def test_paused_lane_starts_nothing_and_returns_what_waits(opened: list[ThreadLane], awaited: bool) -> None:
    before, gate, held = threading.active_count(), Gate(), lease(10)
    lane, collected = gate.lane(opened, 2, awaited=awaited)
    lane.put(held, messages(10))
    await all_run(lane, 2)
    lane.pause()
    assert [message.id for _, message in lane.unstarted()] == list(range(3, 11))
    lane.put(held, messages(3, 100))
    gate.open.set()
    await collected.wait(2)
    await (until(lambda: lane._idle == 2) if isinstance(lane, ThreadLane) else loop_turns())
    assert (len(collected.settled), lane.running) == (2, 0)
    lane.resume()
    await collected.wait(5)
    assert sorted(collected.ids) == [1, 2, 100, 101, 102]
    if isinstance(lane, ThreadLane):
        lane.close()
        await until(lambda: threading.active_count() <= before)


@BOTH
async def test_lapsed_lease_waits_for_the_heartbeat_and_a_lost_one_is_skipped(
    opened: list[ThreadLane], monkeypatch: pytest.MonkeyPatch, awaited: bool
) -> None:
    monkeypatch.setattr(lanes, "_HEARTBEAT_LOOKS", 0)
    monkeypatch.setattr(threads, "_TICK", 0.001)
    gate, lapsed, lost = Gate(), lease(2), lease(5, 8)
    gate.open.set()
    lane, collected = gate.lane(opened, 1, awaited=awaited)
    lapsed.deadline, lost.lost = time.monotonic() - 1, True
    lane.put(lost, messages(5, 6))
    lane.put(lapsed, messages(2))
    # it has looked three times
    await (until(lambda: lane._started >= 3) if isinstance(lane, ThreadLane) else loop_turns())
    assert not collected.settled
    lapsed.deadline = time.monotonic() + 3600
    await collected.wait(2)
    assert collected.ids == [1, 2]


@BOTH
async def test_cancelling_a_lease_stops_only_its_handlers_and_makes_room(
    opened: list[ThreadLane], awaited: bool
) -> None:
    gate, one, two = Gate(), lease(2), lease(2, 8)
    lane, collected = gate.lane(opened, 4, awaited=awaited)
    lane.put(one, messages(2))
    lane.put(two, messages(2, 3))
    await all_run(lane, 4)
    assert (lane.room(), lane.wanted.is_set()) == (0, False)
    lane.cancel(one)
    await collected.wait(2)
    assert sorted(collected.ids) == [1, 2]
    assert [settlement for _, settlement in collected.settled] == [CANCELLED] * 2
    await until(lambda: lane.running == 2)
    await asyncio.wait_for(lane.wanted.wait(), 60)
    assert lane.room() > 0
    gate.open.set()
    await collected.wait(4)
    assert dict(collected.settled)[3] is None
    await until(lambda: lane.running == 0)


async def test_room_follows_the_duration_of_handlers() -> None:
    rows: list[tuple[float | None, dict[str, Any], int]] = [
        (None, {"concurrency": 7}, 7),
        (0.00001, {"concurrency": 10, "batch": 500}, 500),  # no more than one claim
        (0.3, {"concurrency": 4}, 7),
        (0.00001, {"concurrency": 100, "rate": 20}, 20),  # a second of work
    ]
    for seconds, options, room in rows:
        lane, _ = lane_of(nothing, **options)
        if seconds is not None:
            lane._took(seconds)
        assert lane.room() == room, (seconds, options)


async def test_handler_that_swallows_its_cancellation_does_not_affect_the_next() -> None:
    async def stubborn(message: Message) -> None:
        if message.id == 1:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        await asyncio.sleep(0)

    lane, collected = lane_of(stubborn, concurrency=1)
    lane.put(lease(20), messages(20))
    await all_run(lane, 1)
    await asyncio.sleep(0)
    lane.cancel(None)
    await collected.wait(20)
    assert lane.running == 0
    assert all(settlement is None for message_id, settlement in collected.settled if message_id > 1)


@pytest.mark.parametrize("limit", [None, 600])
async def test_every_end_of_a_handler_frees_its_slot(limit: float | None) -> None:
    errors = {2: asyncio.CancelledError, 3: SystemExit, 4: GeneratorExit}

    async def wild(message: Message) -> object:
        task = asyncio.current_task()
        assert task is not None
        match message.id % 8:
            case 0:
                task.cancel()
                await asyncio.sleep(0)
            case 1:
                task.cancel()
            case 2 | 3 | 4 as number:
                raise errors[number]
            case 5:
                return asyncio.CancelledError
            case 6:
                async with asyncio.timeout(0.001):
                    await asyncio.Event().wait()
            case _:
                await asyncio.sleep(0.001)
        return None

    lane, collected = lane_of(wild, concurrency=4, timeout=limit)
    lane.put(lease(80), messages(80))
    await collected.wait(80)
    assert lane.running == 0
    assert sorted(collected.ids) == list(range(1, 81))
    assert {type(settlement) for _, settlement in collected.settled} <= {type(None), Failed}
    lane.put(lease(4), messages(4, 103))
    await collected.wait(84)


async def test_handlers_that_never_wait_let_the_event_loop_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_TURN", -1.0)  # a turn is over after each message
    lane, collected = lane_of(nothing, concurrency=1)
    lane.put(lease(100), messages(100))
    turns = 0
    while len(collected.settled) < 100:
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 100
    assert collected.ids == list(range(1, 101))
    assert (lane.running, lane._seconds is None) == (0, False)


async def test_messages_that_would_wait_for_long_are_returned() -> None:
    go = asyncio.Event()

    async def sometimes_slow(message: Message) -> None:
        if message.id > 100:
            await go.wait()

    lane, collected = lane_of(sometimes_slow, concurrency=2)
    lane.put(lease(100), messages(100))
    await collected.wait(100)
    assert not lane.too_much(2.0)
    lane.put(lease(300), messages(300, 101))
    await all_run(lane, 2)
    returned = [message.id for _ in range(2) for _, message in lane.too_much(2.0)]
    # what the handlers could not have begun in twice the time goes back, the latest first
    assert len(returned) >= 290
    assert max(returned) == 400
    assert min(returned) > 102
    assert lane.running == 2
    assert lane.room() <= 2, "it is not claimed again at once"
    go.set()


def test_pace_gives_no_more_turns_than_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for rate in (1, 10, 1000):
        now, pace, turns = 1000.0, Pace(rate), 0
        for _ in range(20_000):
            wait = pace.wait()
            now += wait
            turns += not wait
            if now > 1010:
                break
        assert min(10 * rate, 9_000) * 0.95 <= turns <= 10 * rate + 2, rate
    pace = Pace(10)
    pace.wait()
    now += 3600
    assert [bool(pace.wait()) for _ in range(3)].count(False) <= 2, "it saves up one turn at most"


# Threads


async def test_threads_do_not_leak_slots_and_are_as_many_as_configured(opened: list[ThreadLane]) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        lane, collected = threads_of(opened, lambda _: None, concurrency=8)
        for round_ in range(10):
            lane.put(lease(500), messages(500, 1 + 500 * round_))
            await asyncio.sleep(0)
        await collected.wait(5000)
    finally:
        sys.setswitchinterval(before)
    assert lane.running == 0
    assert sorted(collected.ids) == list(range(1, 5001))
    barrier = threading.Barrier(4)
    lane, collected = threads_of(opened, lambda _: barrier.wait(60))
    lane.put(lease(8), messages(8))
    await collected.wait(8)
    assert (lane._threads, {settlement for _, settlement in collected.settled}) == (4, {None})


async def test_interrupted_thread_runs_the_next_message(opened: list[ThreadLane]) -> None:
    def handle(message: Message) -> None:
        while message.id == 1:
            time.sleep(0.001)

    lane, collected = threads_of(opened, handle, concurrency=1)
    lane.put(lease(10), messages(10))
    await until(lambda: lane._runs)
    lane._time_out(-1.0)  # every running message is late
    await collected.wait(10)
    await until(lambda: lane.running == 0)
    assert [message_id for message_id, settlement in collected.settled if isinstance(settlement, Failed)] == [1]


async def test_thread_that_cannot_be_interrupted_keeps_its_slot_and_settles_once(opened: list[ThreadLane]) -> None:
    stuck = threading.Lock()
    stuck.acquire()

    def handle(message: Message) -> None:
        if message.id == 1:
            with contextlib.suppress(BaseException):  # the interruption arrives late, and is swallowed
                stuck.acquire()
                while True:
                    time.sleep(0.001)

    lane, collected = threads_of(opened, handle, concurrency=2)
    lane.put(lease(5), messages(5))
    await collected.wait(4)
    lane._time_out(-1.0)
    await collected.wait(5)
    assert lane.running == 1
    assert isinstance(dict(collected.settled)[1], Failed)
    assert lane.room() > 0
    stuck.release()
    await until(lambda: lane.running == 0)
    assert len(collected.settled) == 5


async def test_every_thread_takes_its_turn_from_one_pace(opened: list[ThreadLane]) -> None:
    class EverySecondTurn:
        rate = 50.0
        asked = granted = 0

        def wait(self) -> float:
            self.asked += 1
            self.granted += self.asked % 2 == 0
            return 0.001 * (self.asked % 2)

    lane, collected = threads_of(opened, lambda _: None, rate=50)
    assert isinstance(lane._pace, Pace)
    lane._pace = pace = EverySecondTurn()  # type: ignore[assignment]
    lane.put(lease(26), messages(26))
    await collected.wait(26)
    assert pace.granted == 26


async def test_timeout_is_noticed_if_the_thread_is_slow_to_begin(
    opened: list[ThreadLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer must not stop between taking the last message from the buffer and marking it as running."""

    class SlowToBegin(threads.Run):
        def __init__(self, *arguments: Any) -> None:
            time.sleep(0.05)
            super().__init__(*arguments)

    monkeypatch.setattr(threads, "Run", SlowToBegin)
    lane, collected = threads_of(opened, Gate().wait_here, concurrency=1, timeout=0.05)
    lane.put(lease(1), messages(1))
    try:
        await until(lambda: collected.settled)
    finally:
        lane.cancel(None)
    assert isinstance(collected.settled[0][1], Failed)
