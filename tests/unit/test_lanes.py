"""Lanes without a database: how much they claim, in which order they run, and that no slot or message is lost."""

import asyncio
import contextlib
import sys
import threading
import time
from typing import Any

import pytest

from bartleby import Message, lanes, threads
from bartleby.execute import Failed
from bartleby.lanes import CANCELLED, Lane, Pace
from bartleby.threads import ThreadLane
from tests.kit.lanes import MakeLane, lease, messages
from tests.kit.sinks.servers import eventually
from tests.kit.worker import BOTH, Gate, present


async def loop_turns() -> None:
    """Let the event loop run everything that is ready, several times."""
    for _ in range(50):
        await asyncio.sleep(0)


async def all_run(lane: Lane, count: int) -> None:
    """Wait until this many messages are with handlers."""
    await eventually(lambda: lane.running >= count and (not isinstance(lane, ThreadLane) or len(lane._runs) >= count))


async def nothing(message: Message) -> None: ...


@BOTH
async def test_paused_lane_starts_nothing_and_returns_what_waits(lane_of: MakeLane, awaited: bool) -> None:
    before, gate, held = threading.active_count(), Gate(), lease(10)
    lane, collected = lane_of(gate.handler(awaited=awaited), 2)
    lane.put(held, messages(10))
    await all_run(lane, 2)
    lane.pause()
    assert [message.id for _, message in lane.unstarted()] == list(range(3, 11))
    lane.put(held, messages(3, 100))
    gate.open()
    await collected.reach(2)
    await (eventually(lambda: lane._idle == 2) if isinstance(lane, ThreadLane) else loop_turns())
    assert (len(collected.settled), lane.running) == (2, 0)
    lane.resume()
    await collected.reach(5)
    assert sorted(collected.ids) == [1, 2, 100, 101, 102]
    if isinstance(lane, ThreadLane):
        lane.close()
        await eventually(lambda: threading.active_count() <= before)


@BOTH
async def test_lapsed_lease_waits_for_the_heartbeat_and_a_lost_one_is_skipped(
    lane_of: MakeLane, monkeypatch: pytest.MonkeyPatch, awaited: bool
) -> None:
    monkeypatch.setattr(lanes, "_HEARTBEAT_LOOKS", 0)
    monkeypatch.setattr(threads, "_TICK", 0.001)
    gate, lapsed, lost = Gate(), lease(2), lease(5, 8)
    gate.open()
    lane, collected = lane_of(gate.handler(awaited=awaited), 1)
    lapsed.deadline, lost.lost = time.monotonic() - 1, True
    lane.put(lost, messages(5, 6))
    lane.put(lapsed, messages(2))
    # it has looked three times
    await (eventually(lambda: lane._started >= 3) if isinstance(lane, ThreadLane) else loop_turns())
    assert not collected.settled
    lapsed.deadline = time.monotonic() + 3600
    await collected.reach(2)
    assert collected.ids == [1, 2]


@BOTH
@pytest.mark.parametrize("limit", [None, 3600])
async def test_cancelling_a_lease_stops_only_its_handlers_and_makes_room(
    lane_of: MakeLane, awaited: bool, limit: float | None
) -> None:
    gate, one, two = Gate(), lease(2), lease(2, 8)
    lane, collected = lane_of(gate.handler(awaited=awaited), 4, timeout=limit)
    lane.put(one, messages(2))
    lane.put(two, messages(2, 3))
    await all_run(lane, 4)
    assert (lane.room(), lane.wanted.is_set()) == (0, False)
    lane.cancel(one)
    await collected.reach(2)
    assert sorted(collected.ids) == [1, 2]
    assert [settlement for _, settlement in collected.settled] == [CANCELLED] * 2
    await eventually(lambda: lane.running == 2)
    await asyncio.wait_for(lane.wanted.wait(), 60)
    assert lane.room() > 0
    gate.open()
    await collected.reach(4)
    assert dict(collected.settled)[3] is None
    await eventually(lambda: lane.running == 0)


async def test_room_follows_the_duration_of_handlers(lane_of: MakeLane) -> None:
    rows: list[tuple[float | None, dict[str, Any], int]] = [
        (None, {"concurrency": 7}, 7),
        (0.00001, {"concurrency": 10}, 500),  # no more than one claim
        (0.3, {"concurrency": 4}, 7),
        (0.00001, {"concurrency": 100, "rate": 20}, 20),  # a second of work
    ]
    for seconds, options, room in rows:
        lane, _ = lane_of(nothing, **options)
        if seconds is not None:
            lane._took(seconds)
        assert lane.room() == room, (seconds, options)


@pytest.mark.parametrize("limit", [None, 600])
async def test_every_end_of_a_handler_frees_its_slot(lane_of: MakeLane, limit: float | None) -> None:
    errors = {2: asyncio.CancelledError, 3: SystemExit, 4: GeneratorExit}

    async def wild(message: Message) -> object:
        task = present(asyncio.current_task())
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
    await collected.reach(80)
    assert lane.running == 0
    assert sorted(collected.ids) == list(range(1, 81))
    assert {type(settlement) for _, settlement in collected.settled} <= {type(None), Failed}


async def test_handlers_that_never_wait_let_the_event_loop_run(
    lane_of: MakeLane, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_messages_that_would_wait_for_long_are_returned(lane_of: MakeLane) -> None:
    go = asyncio.Event()

    async def sometimes_slow(message: Message) -> None:
        if message.id > 100:
            await go.wait()

    lane, collected = lane_of(sometimes_slow, concurrency=2)
    lane.put(lease(100), messages(100))
    await collected.reach(100)
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
    for rate in (1, 1000):
        now, pace, turns = 1000.0, Pace(rate), 0
        while now < 1009.5:
            wait = pace.wait()
            now += wait
            turns += not wait
        assert 9 * rate <= turns <= 9.5 * rate + 2, rate
        now += 3600
        assert [bool(pace.wait()) for _ in range(3)].count(False) <= 2, "it saves up one turn at most"


async def test_threads_do_not_leak_slots_and_are_as_many_as_configured(lane_of: MakeLane) -> None:
    lane, collected = lane_of(lambda _: None, concurrency=8)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for round_ in range(10):
            lane.put(lease(500), messages(500, 1 + 500 * round_))
            await asyncio.sleep(0)
        await collected.reach(5000)
    finally:
        sys.setswitchinterval(before)
    assert lane.running == 0
    assert sorted(collected.ids) == list(range(1, 5001))
    barrier = threading.Barrier(4)
    lane, collected = lane_of(lambda _: barrier.wait(60))
    lane.put(lease(8), messages(8))
    await collected.reach(8)
    assert (lane._threads, {settlement for _, settlement in collected.settled}) == (4, {None})


async def test_thread_that_cannot_be_interrupted_keeps_its_slot_and_settles_once(
    lane_of: MakeLane,
) -> None:
    inside, over = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        while message.id == 1:
            time.sleep(0.001)
        if message.id == 2:
            while not over.is_set():
                with contextlib.suppress(BaseException):  # the interruption is swallowed, whenever it arrives
                    inside.set()
                    over.wait()

    lane, collected = lane_of(handle, concurrency=2)
    lane.put(lease(10), messages(10))
    await eventually(lambda: len(lane._runs) == 2 and inside.is_set())
    lane._time_out(-1.0)  # every running message is late
    await collected.reach(10)
    await eventually(lambda: lane.running == 1)
    failed = {message_id for message_id, settlement in collected.settled if isinstance(settlement, Failed)}
    assert failed == {1, 2}
    assert lane.room() > 0
    over.set()
    await eventually(lambda: lane.running == 0)
    assert len(collected.settled) == 10


async def test_every_thread_takes_its_turn_from_one_pace(lane_of: MakeLane) -> None:
    class EverySecondTurn:
        rate = 50.0
        asked = granted = 0

        def wait(self) -> float:
            self.asked += 1
            self.granted += self.asked % 2 == 0
            return 0.001 * (self.asked % 2)

    lane, collected = lane_of(lambda _: None, rate=50)
    assert isinstance(lane._pace, Pace)
    lane._pace = pace = EverySecondTurn()
    lane.put(lease(26), messages(26))
    await collected.reach(26)
    assert pace.granted == 26


async def test_timeout_is_noticed_if_the_thread_is_slow_to_begin(
    lane_of: MakeLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer must not stop between taking the last message from the buffer and marking it as running."""

    class SlowToBegin(threads.Run):
        def __init__(self, *arguments: Any) -> None:
            time.sleep(0.05)
            super().__init__(*arguments)

    monkeypatch.setattr(threads, "Run", SlowToBegin)
    lane, collected = lane_of(Gate().handler(awaited=False), concurrency=1, timeout=0.05)
    lane.put(lease(1), messages(1))
    try:
        await eventually(lambda: collected.settled)
    finally:
        lane.cancel(None)
    assert isinstance(collected.settled[0][1], Failed)
