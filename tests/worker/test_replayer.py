"""The replayer: each worker has one, one at a time runs plans, and a plan survives the process that started it."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from bartleby import Advance, Client, replaying
from bartleby.config import Settings
from bartleby.evidence import ReplayId
from bartleby.pacing import LARGEST, Stride, pause
from bartleby.replaying import DUTY, Replayer
from tests.kit.dead_letters import bury
from tests.kit.worker import CapturedLog, Conn, present, sessions, until

BY: Any = {"actor": "ana", "reason": "fixed"}


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


async def test_one_of_two_replayers_runs_every_plan_and_reports_each_once(
    dsn: str, client: Client, conn: Conn, log: CapturedLog
) -> None:
    assert client.on_duty(DUTY) is None
    for queue in ("parcels", "mails"):
        client.create_queue(queue)

    def aborted() -> bool:
        bury(client, [], queue="mails")  # what was replayed dies again
        return status(client, doomed) == "aborted"

    async with AsyncExitStack() as first, AsyncExitStack() as second:
        await first.enter_async_context(running(dsn, "first"))
        await eventually(lambda: client.on_duty(DUTY) == "first")
        await second.enter_async_context(running(dsn, "second"))
        await eventually(lambda: len(sessions(conn, "replays")) == 2)
        plans = [started(client, bury(client, [1] * 3, queue=queue)) for queue in ("orders", "parcels")]
        doomed = started(client, bury(client, [1] * 6, queue="mails"), canary=2)
        await eventually(lambda: {status(client, each) for each in plans} == {"settling"})
        for queue in ("orders", "parcels"):
            client.ack(present(client.claim(queue, "tester", limit=10)).id)
        await eventually(lambda: {status(client, each) for each in plans} == {"finished"})
        await eventually(aborted)
        await eventually(lambda: len(log.of("replay.finished") + log.of("replay.aborted")) == 3)
        await first.aclose()
        await eventually(lambda: client.on_duty(DUTY) == "second")
    assert client.on_duty(DUTY) is None
    taken = [each.getMessage() for each in log.of("replay.taken")]
    assert sorted(taken) == [f"replay {each} is run here" for each in (*plans, doomed)]
    (event,) = log.of("replay.aborted")
    assert (event.levelname, "4 are left as they were" in event.getMessage()) == ("WARNING", True)


async def test_reason_for_waiting_is_reported_once(
    dsn: str, client: Client, log: CapturedLog, steps: list[float]
) -> None:
    replay_id = started(client, bury(client, [1] * 2))
    client.pause_queue("orders")
    async with running(dsn):
        await eventually(lambda: log.of("replay.waits"))
        seen = len(steps)
        await eventually(lambda: len(steps) > seen + 2)
        client.resume_queue("orders")
        await eventually(lambda: status(client, replay_id) == "settling")
    assert [each.getMessage() for each in log.of("replay.waits")] == [
        f"replay {replay_id}: waiting: queue orders is paused or its breaker is open"
    ]


@pytest.mark.own_database
async def test_failing_step_is_reported_once_and_repeated(
    dsn: str, client: Client, conn: Conn, *, log: CapturedLog, steps: list[float]
) -> None:
    replay_id = started(client, bury(client, [1]))
    conn.execute("alter function bartleby.advance_replays rename to hidden")
    async with running(dsn):
        await eventually(lambda: len(steps) >= 3)
        conn.execute("alter function bartleby.hidden rename to advance_replays")
        await eventually(lambda: status(client, replay_id) == "settling")
    assert len(log.of("replays.failed")) == 1


async def test_step_that_takes_long_makes_the_next_one_smaller(
    dsn: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(client, bury(client, [1] * 2))
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
