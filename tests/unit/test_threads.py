"""Lanes of threads without a database: slots that never leak, and interruptions that hit the right message."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bartleby import Message, threads
from bartleby.execute import Executor, Failed
from bartleby.failure import Recorder
from bartleby.handlers import handler
from bartleby.lanes import CANCELLED
from bartleby.threads import ThreadLane
from tests.unit.test_lanes import Collected, lease, messages


@pytest.fixture
def lanes() -> Iterator[list[ThreadLane]]:
    made: list[ThreadLane] = []
    yield made
    for lane in made:
        lane.close()


def lane_of(
    lanes: list[ThreadLane], function: Callable[..., Any], concurrency: int = 4, **options: Any
) -> tuple[ThreadLane, Collected]:
    collected = Collected()
    executor = Executor(handler("orders", function, **options), Recorder(), None)
    lane = ThreadLane(executor, concurrency, 500, collected)
    lanes.append(lane)
    return lane, collected


async def until(condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.001)


async def test_slots_do_not_leak_however_the_threads_are_switched(lanes: list[ThreadLane]) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        lane, collected = lane_of(lanes, lambda _: None, concurrency=8)
        for round_ in range(20):
            lane.put(lease(500), messages(500, 1 + 500 * round_))
            await asyncio.sleep(0)
        await collected.wait(10_000)
    finally:
        sys.setswitchinterval(before)
    assert lane.running == 0
    assert sorted(collected.ids) == list(range(1, 10_001))


async def test_handlers_that_block_get_more_threads_and_no_more_than_said(lanes: list[ThreadLane]) -> None:
    barrier = threading.Barrier(4)
    lane, collected = lane_of(lanes, lambda _: barrier.wait(30))
    lane.put(lease(8), messages(8))
    await collected.wait(8)
    assert lane._threads == 4
    assert all(settlement is None for _, settlement in collected.settled)


async def test_quick_handlers_need_one_thread(lanes: list[ThreadLane]) -> None:
    async def threads_needed() -> int:
        names: set[int] = set()
        lane, collected = lane_of(lanes, lambda _: names.add(threading.get_ident()))
        for round_ in range(10):
            lane.put(lease(100), messages(100, 1 + 100 * round_))
            await collected.wait(100 * (round_ + 1))
        return len(names)

    # one that does not get the processor for a while looks like one that blocks
    assert min([await threads_needed() for _ in range(5)]) <= 2


async def test_a_timeout_hits_its_message_and_nothing_after_it(lanes: list[ThreadLane]) -> None:
    """The race is between the end of a handler and its interruption: handlers end just when time is up."""
    stray: list[BaseException] = []
    limit = 0.15  # more than a thread that wants to do next to nothing has to wait for the processor

    def close_to_the_limit(message: Message) -> None:
        if message.id % 2:
            deadline = time.monotonic() + limit
            while time.monotonic() < deadline:
                pass
            return
        try:
            for _ in range(50):
                pass
        except BaseException as error:
            stray.append(error)
            raise

    lane, collected = lane_of(lanes, close_to_the_limit, concurrency=2, timeout=limit)
    lane.put(lease(60), messages(60))
    await collected.wait(60)
    await until(lambda: lane.running == 0)
    assert not stray
    even = [settlement for message_id, settlement in collected.settled if message_id % 2 == 0]
    assert even == [None] * 30
    assert len(collected.settled) == 60
    assert (
        lane._threads
        == len([each for each in threading.enumerate() if each.name == "bartleby-orders" and each.is_alive()])
        or lane._threads <= 2
    )


async def test_a_thread_that_was_interrupted_goes_on_with_other_messages(lanes: list[ThreadLane]) -> None:
    def handle(message: Message) -> None:
        while message.id == 1:
            time.sleep(0.001)

    lane, collected = lane_of(lanes, handle, concurrency=1, timeout=0.3)
    lane.put(lease(10), messages(10))
    await collected.wait(10)
    await until(lambda: lane.running == 0)
    failed = [message_id for message_id, settlement in collected.settled if isinstance(settlement, Failed)]
    assert failed == [1]


async def test_a_thread_that_cannot_be_interrupted_keeps_its_slot_and_says_nothing_later(
    lanes: list[ThreadLane],
) -> None:
    stuck = threading.Lock()
    stuck.acquire()

    def handle(message: Message) -> None:
        if message.id == 1:
            stuck.acquire()

    lane, collected = lane_of(lanes, handle, concurrency=2, timeout=0.3)
    lane.put(lease(5), messages(5))
    await collected.wait(5)
    await until(lambda: lane.running == 1)
    assert isinstance(dict(collected.settled)[1], Failed)
    assert lane.room() > 0
    stuck.release()
    await until(lambda: lane.running == 0)
    assert len(collected.settled) == 5


async def test_cancelling_a_lease_interrupts_its_threads_and_no_others(lanes: list[ThreadLane]) -> None:
    go = threading.Event()

    def handle(message: Message) -> None:
        while not go.is_set():
            time.sleep(0.001)

    lane, collected = lane_of(lanes, handle, concurrency=4)
    one, two = lease(2), lease(2, 8)
    lane.put(one, messages(2))
    lane.put(two, messages(2, 3))
    await until(lambda: lane.running == 4)
    lane.cancel(one)
    await collected.wait(2)
    assert sorted(collected.ids) == [1, 2]
    assert [settlement for _, settlement in collected.settled] == [CANCELLED] * 2
    await until(lambda: lane.running == 2)
    go.set()
    await collected.wait(4)
    await until(lambda: lane.running == 0)


async def test_a_paused_lane_starts_nothing_and_gives_back_what_waits(lanes: list[ThreadLane]) -> None:
    go = threading.Event()
    lane, collected = lane_of(lanes, lambda _: go.wait(60), concurrency=2)
    held = lease(10)
    lane.put(held, messages(10))
    await until(lambda: lane.running == 2)
    lane.pause()
    assert len(lane.unstarted()) == 8
    lane.put(held, messages(3, 100))
    go.set()
    await collected.wait(2)
    await until(lambda: lane.running == 0)
    await asyncio.sleep(0.05)
    assert len(collected.settled) == 2
    lane.resume()
    await collected.wait(5)


async def test_a_closed_lane_leaves_no_thread(lanes: list[ThreadLane]) -> None:
    before = threading.active_count()
    lane, collected = lane_of(lanes, lambda _: time.sleep(0.001), concurrency=4)
    lane.put(lease(50), messages(50))
    await collected.wait(50)
    lane.close()
    await until(lambda: threading.active_count() <= before)


async def test_a_rate_is_kept_by_several_threads(lanes: list[ThreadLane]) -> None:
    starts: list[float] = []
    lane, collected = lane_of(lanes, lambda _: starts.append(time.monotonic()), rate=50)
    began = time.monotonic()
    lane.put(lease(26), messages(26))
    await collected.wait(26)
    assert max(starts) - began >= 0.46


async def test_what_may_have_lapsed_waits_for_the_word_of_the_heartbeat(lanes: list[ThreadLane]) -> None:
    lane, collected = lane_of(lanes, lambda _: None)
    held = lease(2)
    held.deadline = time.monotonic() - 1
    lane.put(held, messages(2))
    await asyncio.sleep(0.05)
    assert not collected.settled
    held.deadline = time.monotonic() + 60
    await collected.wait(2)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError, StopIteration])
async def test_no_exception_ends_a_thread(lanes: list[ThreadLane], error: type[BaseException]) -> None:
    def handle(message: Message) -> None:
        raise error

    lane, collected = lane_of(lanes, handle, concurrency=1)
    lane.put(lease(20), messages(20))
    await collected.wait(20)
    assert lane._threads == 1
    assert lane.running == 0


async def test_a_timeout_is_noticed_though_the_thread_was_slow_to_begin(
    lanes: list[ThreadLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock must not stop between the last message's leaving the buffer and its being known to run."""

    class SlowToBegin(threads.Run):
        def __init__(self, *arguments: Any) -> None:
            time.sleep(0.05)
            super().__init__(*arguments)

    def handle(message: Message) -> None:
        while True:
            time.sleep(0.001)

    monkeypatch.setattr(threads, "Run", SlowToBegin)
    lane, collected = lane_of(lanes, handle, concurrency=1, timeout=0.05)
    lane.put(lease(1), messages(1))
    try:
        await until(lambda: collected.settled)
    finally:
        lane.cancel(None)
    assert isinstance(collected.settled[0][1], Failed)
