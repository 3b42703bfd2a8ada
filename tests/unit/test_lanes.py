"""Lanes of coroutines without a database: how much they take, in which order, and that nothing is ever left over."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from bartleby import Message
from bartleby.execute import Executor, Failed, Released, Settlement
from bartleby.failure import Recorder
from bartleby.handlers import handler
from bartleby.held import Backlog, Held
from bartleby.lanes import CANCELLED, CoroutineLane, Pace
from bartleby.message import LeaseId, MessageId, Position


def messages(count: int, first: int = 1) -> list[Message]:
    moment = datetime(2024, 1, 1, tzinfo=UTC)
    return [
        Message(
            MessageId(number),
            "orders",
            LeaseId(7),
            Position(number),
            1,
            str(number),
            None,
            None,
            None,
            moment,
            solo=False,
        )
        for number in range(first, first + count)
    ]


class Collected:
    """Where a lane hands over what became of its messages."""

    def __init__(self) -> None:
        self.settled: list[tuple[int, Settlement]] = []

    def __call__(self, _: Held, message: Message, settlement: Settlement) -> None:
        self.settled.append((message.id, settlement))

    @property
    def ids(self) -> list[int]:
        return [message_id for message_id, _ in self.settled]

    async def wait(self, count: int) -> None:
        deadline = time.monotonic() + 30
        while len(self.settled) < count:
            assert time.monotonic() < deadline, f"{len(self.settled)} of {count}"
            await asyncio.sleep(0.001)


def lease(size: int, number: int = 7, length: float = 60) -> Held:
    return Held(LeaseId(number), "orders", size, length, time.monotonic(), solo=False, backlog=Backlog())


def lane_of(
    function: Callable[..., Any], concurrency: int = 3, batch: int = 500, **options: Any
) -> tuple[CoroutineLane, Collected]:
    collected = Collected()
    executor = Executor(handler("orders", function, **options), Recorder(), None)
    return CoroutineLane(executor, concurrency, batch, collected), collected


async def all_run(lane: CoroutineLane, count: int) -> None:
    """Wait until so many messages are with handlers."""
    async with asyncio.timeout(30):
        while lane.running < count:  # noqa: ASYNC110 - lanes tell nobody
            await asyncio.sleep(0)


async def nothing(message: Message) -> None: ...


async def test_every_message_is_settled_once_and_in_order_if_nothing_waits() -> None:
    lane, collected = lane_of(nothing, concurrency=1)
    lane.put(lease(1000), messages(1000))
    await collected.wait(1000)
    assert collected.ids == list(range(1, 1001))
    assert lane.running == 0


async def test_room_is_the_concurrency_before_anything_is_known() -> None:
    lane, _ = lane_of(nothing, concurrency=7)
    assert lane.room() == 7


async def test_room_grows_for_quick_handlers_and_is_bounded_by_a_claim() -> None:
    lane, collected = lane_of(nothing, concurrency=10, batch=500)
    lane.put(lease(200), messages(200))  # enough to forget one that had to wait for the processor
    await collected.wait(200)
    assert lane.room() == 500


async def test_room_stays_small_for_slow_handlers() -> None:
    async def slow(message: Message) -> None:
        await asyncio.sleep(0.3)

    lane, collected = lane_of(slow, concurrency=4)
    lane.put(lease(4), messages(4))
    await collected.wait(4)
    assert 4 <= lane.room() <= 8


async def test_room_of_a_paced_handler_is_a_second_of_work() -> None:
    lane, collected = lane_of(nothing, concurrency=100, rate=20)
    lane.put(lease(5), messages(5))
    await collected.wait(5)
    assert lane.room() <= 20


async def test_wanted_is_set_when_there_is_room_again() -> None:
    go = asyncio.Event()

    async def wait(message: Message) -> None:
        await go.wait()

    lane, collected = lane_of(wait, concurrency=2)
    lane.put(lease(2), messages(2))
    await all_run(lane, 2)
    assert lane.room() == 0
    assert not lane.wanted.is_set()
    go.set()
    await asyncio.wait_for(lane.wanted.wait(), 30)
    await collected.wait(2)
    assert lane.room() > 0


async def test_a_paused_lane_starts_nothing_and_gives_back_what_waits() -> None:
    go = asyncio.Event()

    async def wait(message: Message) -> None:
        await go.wait()

    lane, collected = lane_of(wait, concurrency=2)
    held = lease(10)
    lane.put(held, messages(10))
    await all_run(lane, 2)
    lane.pause()
    assert [message.id for _, message in lane.unstarted()] == list(range(3, 11))
    lane.put(held, messages(3, 100))
    go.set()
    await collected.wait(2)
    await asyncio.sleep(0.02)
    assert len(collected.settled) == 2
    assert lane.running == 0
    lane.resume()
    await collected.wait(5)
    assert sorted(collected.ids) == [1, 2, 100, 101, 102]


async def test_messages_of_a_lost_lease_are_passed_over() -> None:
    lane, collected = lane_of(nothing, concurrency=1)
    lost, kept = lease(5), lease(5, 8)
    lost.lost = True
    lane.put(lost, messages(5))
    lane.put(kept, messages(5, 6))
    await collected.wait(5)
    await asyncio.sleep(0.01)
    assert collected.ids == [6, 7, 8, 9, 10]


async def test_what_may_have_lapsed_waits_for_the_word_of_the_heartbeat() -> None:
    lane, collected = lane_of(nothing)
    held = lease(2, length=0.0)
    held.deadline = time.monotonic() - 1
    lane.put(held, messages(2))
    await asyncio.sleep(0.1)
    assert not collected.settled
    held.deadline = time.monotonic() + 60
    await collected.wait(2)


async def test_cancelling_a_lease_stops_its_handlers_and_no_others() -> None:
    ended: list[int] = []
    go = asyncio.Event()

    async def wait(message: Message) -> None:
        try:
            await go.wait()
        finally:
            ended.append(message.id)

    lane, collected = lane_of(wait, concurrency=4)
    one, two = lease(2), lease(2, 8)
    lane.put(one, messages(2))
    lane.put(two, messages(2, 3))
    await all_run(lane, 4)
    lane.cancel(one)
    await collected.wait(2)
    assert sorted(ended) == [1, 2]
    assert [settlement for _, settlement in collected.settled] == [CANCELLED] * 2
    go.set()
    await collected.wait(4)
    assert dict(collected.settled)[3] is None
    assert lane.running == 0


async def test_a_handler_that_swallows_its_cancellation_leaves_no_trace_for_the_next() -> None:
    async def stubborn(message: Message) -> None:
        if message.id == 1:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return
        await asyncio.sleep(0)

    lane, collected = lane_of(stubborn, concurrency=1)
    lane.put(lease(20), messages(20))
    await all_run(lane, 1)
    await asyncio.sleep(0)
    lane.cancel(None)
    await collected.wait(20)
    assert lane.running == 0
    assert all(settlement is None for message_id, settlement in collected.settled if message_id > 1)


@pytest.mark.parametrize("limit", [None, 60])
async def test_no_end_of_a_handler_takes_a_slot_along(limit: float | None) -> None:
    async def wild(message: Message) -> object:
        task = asyncio.current_task()
        assert task is not None
        match message.id % 8:
            case 0:
                task.cancel()
                await asyncio.sleep(0)
            case 1:
                task.cancel()
            case 2:
                raise asyncio.CancelledError
            case 3:
                raise SystemExit
            case 4:
                raise GeneratorExit
            case 5:
                return asyncio.CancelledError
            case 6:
                async with asyncio.timeout(0.001):
                    await asyncio.sleep(60)
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


async def busy(_message: Message) -> None:
    end = time.perf_counter() + 0.001
    while time.perf_counter() < end:
        pass


@pytest.mark.parametrize(("handler", "count"), [(nothing, 20_000), (busy, 200)])
async def test_handlers_that_never_wait_leave_the_loop_its_turn(handler: Any, count: int) -> None:
    lane, collected = lane_of(handler, concurrency=1)
    lane.put(lease(count), messages(count))
    turns = 0
    while len(collected.settled) < count:
        await asyncio.sleep(0)
        turns += 1
    # a turn is 2 ms, and 20,000 that do nothing take some 60
    assert turns > 15


async def test_what_would_wait_for_long_is_taken_out_again() -> None:
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
    given_back = [message.id for _, message in lane.too_much(2.0)]
    given_back += [message.id for _, message in lane.too_much(2.0)]
    # what the handlers could not have begun in twice the time goes back, the latest first
    assert len(given_back) >= 290
    assert max(given_back) == 400
    assert min(given_back) > 102
    assert lane.running == 2
    assert lane.room() <= 2, "and it is not claimed again at once"
    go.set()


@pytest.mark.parametrize("rate", [1, 10, 1000])
def test_a_pace_gives_no_more_turns_than_its_rate(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace, turns = Pace(rate), 0
    for _ in range(20_000):
        wait = pace.wait()
        if wait:
            now += wait
        else:
            turns += 1
        if now > 1010:
            break
    assert turns <= 10 * rate + 2
    assert turns >= min(10 * rate, 9_000) * 0.95


def test_a_pace_saves_up_at_most_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = Pace(10)
    pace.wait()
    now += 3600
    assert [bool(pace.wait()) for _ in range(3)].count(False) <= 2


async def test_a_release_that_the_handler_asks_for_is_passed_on() -> None:
    from bartleby import Snooze

    async def snooze(message: Message) -> object:
        return Snooze(5)

    lane, collected = lane_of(snooze)
    lane.put(lease(1), messages(1))
    await collected.wait(1)
    settlement = collected.settled[0][1]
    assert isinstance(settlement, Released)
    assert settlement.delay == 5
