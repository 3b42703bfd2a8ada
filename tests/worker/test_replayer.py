"""The replayer: every worker has one, one at a time in a database runs plans, and it outlives who started a plan."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from bartleby import Advance, Bartleby, Client, Failure, replaying
from bartleby.config import Settings
from bartleby.evidence import ReplayId
from bartleby.message import MessageId
from bartleby.pacing import LARGEST, Stride, pause
from bartleby.replaying import DUTY, Replayer
from tests.kit.worker import Conn, Told, present, sessions, until

BY: Any = {"actor": "ana", "reason": "fixed"}


@pytest.fixture
def client(dsn: str, app: Bartleby) -> Iterator[Client]:
    """A client that does not end with a worker of the application."""
    with Client(dsn) as opened:
        yield opened


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Grows with each step of a replayer that was made or has failed."""
    made: list[float] = []
    plain = Replayer.step

    async def step(self: Replayer) -> float:
        try:
            return await plain(self)
        finally:
            made.append(0.0)

    monkeypatch.setattr(Replayer, "step", step)
    return made


def bury(client: Client, count: int, queue: str = "orders") -> list[MessageId]:
    sent = client.send_many(queue, [{"payload": 1}] * count)
    fail_all(client, queue)
    return list(sent)


def fail_all(client: Client, queue: str = "orders") -> None:
    lease = client.claim(queue, "tester", limit=1000)
    if lease is not None:
        client.fail(lease.id, [Failure(each.position, "KeyError", "'x'", verdict="dead") for each in lease])


def started(client: Client, ids: Sequence[int], **options: Any) -> ReplayId:
    replay_id = client.plan_replay(ids=ids, **BY, **options)
    client.start_replay(replay_id, **BY)
    return replay_id


def status(client: Client, replay_id: int) -> str:
    return present(client.find_replay(replay_id)).status


@asynccontextmanager
async def running(dsn: str, name: str = "me") -> AsyncIterator[Replayer]:
    replayer = Replayer(Settings(dsn), name)
    task = asyncio.create_task(replayer.run())
    try:
        yield replayer
    finally:
        replayer.abort()
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()


async def eventually(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(until, condition)


async def test_one_of_two_replayers_runs_plans_and_the_other_takes_over(dsn: str, client: Client, conn: Conn) -> None:
    assert client.on_duty(DUTY) is None
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        await first.enter_async_context(running(dsn, "first"))
        await eventually(lambda: client.on_duty(DUTY) == "first")
        await second.enter_async_context(running(dsn, "second"))
        await eventually(lambda: len(sessions(conn, "replays")) == 2)
        replay_id = started(client, bury(client, 3))
        with Told.listening() as told:
            await eventually(lambda: status(client, replay_id) == "settling")
            assert len(told.of("replay.taken")) <= 1
        await first.aclose()
        await eventually(lambda: client.on_duty(DUTY) == "second")
    assert client.on_duty(DUTY) is None


async def test_plans_run_side_by_side_and_each_is_reported_once(dsn: str, client: Client, told: Told) -> None:
    client.create_queue("parcels")
    one, two = started(client, bury(client, 3)), started(client, bury(client, 3, "parcels"))
    async with running(dsn):
        await eventually(lambda: {status(client, each) for each in (one, two)} == {"settling"})
        for queue in ("orders", "parcels"):
            client.ack(present(client.claim(queue, "tester", limit=10)).id)
        await eventually(lambda: {status(client, each) for each in (one, two)} == {"finished"})
        await eventually(lambda: len(told.of("replay.finished")) == 2)
    taken = sorted(each.getMessage() for each in told.of("replay.taken"))
    assert taken == [f"replay {each} is run here" for each in (one, two)]


async def test_reason_for_waiting_is_reported_once(dsn: str, client: Client, told: Told, steps: list[float]) -> None:
    replay_id = started(client, bury(client, 2))
    client.pause_queue("orders")
    async with running(dsn):
        await eventually(lambda: told.of("replay.waits"))
        seen = len(steps)
        await eventually(lambda: len(steps) > seen + 2)
        client.resume_queue("orders")
        await eventually(lambda: status(client, replay_id) == "settling")
    assert [each.getMessage() for each in told.of("replay.waits")] == [
        f"replay {replay_id}: waiting: queue orders is paused or its breaker is open"
    ]


async def test_canary_that_dies_is_a_warning(dsn: str, client: Client, told: Told) -> None:
    replay_id = started(client, bury(client, 6), canary=2)

    def aborted() -> bool:
        fail_all(client)
        return status(client, replay_id) == "aborted"

    async with running(dsn):
        await eventually(aborted)
        await eventually(lambda: told.of("replay.aborted"))
    (event,) = told.of("replay.aborted")
    assert event.levelname == "WARNING"
    assert "4 are left as they were" in event.getMessage()


@pytest.mark.own_database
async def test_failing_step_is_reported_once_and_repeated(
    dsn: str, client: Client, conn: Conn, *, told: Told, steps: list[float]
) -> None:
    replay_id = started(client, bury(client, 1))
    conn.execute("alter function bartleby.advance_replays rename to hidden")
    async with running(dsn):
        await eventually(lambda: len(steps) >= 3)
        conn.execute("alter function bartleby.hidden rename to advance_replays")
        await eventually(lambda: status(client, replay_id) == "settling")
    assert len(told.of("replays.failed")) == 1


async def test_step_that_takes_long_makes_the_next_one_smaller(
    dsn: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(client, bury(client, 2))
    replayer, clock = Replayer(Settings(dsn), "me"), itertools.count()
    monkeypatch.setattr(replaying, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    await replayer.step()
    await replayer._leave()
    assert replayer._stride.items == LARGEST // 2


def test_pauses_and_strides_have_their_bounds() -> None:
    def step(*, moved: int = 0, wait: float | None = 0.0) -> Advance:
        return Advance(ReplayId(1), "running", moved, None if wait is None else timedelta(seconds=wait), None)

    for steps, seconds in (
        ([], 1.0),
        ([step(moved=LARGEST)], 0.0),
        ([step(moved=5)], 0.02),
        ([step(wait=None)], 0.02),
        ([step(wait=0.3)], 0.3),
        ([step(wait=60)], 1.0),
        ([step(wait=0.3), step(wait=0.1)], 0.1),
    ):
        assert pause(steps) == pytest.approx(seconds), steps
    stride = Stride()
    for seconds, items in ((1.0, 10), (0.3, 10), (0.01, LARGEST)):
        for _ in range(20):
            stride.took(seconds)
        assert stride.items == items, seconds
