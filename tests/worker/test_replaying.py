"""The runner of replay plans: in every worker, one at a time in a database, and it outlives whoever started a plan."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import Advance, Bartleby, Client, Failure, Message
from bartleby.config import Settings
from bartleby.evidence import ReplayId
from bartleby.message import MessageId
from bartleby.pacing import LARGEST, Stride, pause
from bartleby.replaying import DUTY, Replayer
from tests.kit.worker import ENVIRONMENT, Program, Told, row, sessions, until, working

Conn = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def client(app: Bartleby) -> Client:
    return app.client


def bury(client: Client, count: int, queue: str = "orders", payload: object = 1) -> list[MessageId]:
    ids: list[MessageId] = []
    for start in range(0, count, 1000):
        some = client.send_many(queue, [{"payload": payload}] * min(1000, count - start))
        lease = client.claim(queue, "tester", limit=len(some))
        assert lease is not None
        failures = [Failure(each.position, "KeyError", "'x'", fingerprint="f", verdict="dead") for each in lease]
        client.fail(lease.id, failures)
        ids += some
    return ids


def started(client: Client, ids: Sequence[int], **options: Any) -> ReplayId:
    replay_id = client.plan_replay(ids=ids, actor="ana", reason="fixed", **options)
    client.start_replay(replay_id, actor="ana", reason="fixed")
    return replay_id


def status(client: Client, replay_id: int) -> str:
    plan = client.find_replay(replay_id)
    assert plan is not None
    return plan.status


def alive(client: Client, replay_id: int) -> int:
    plan = client.find_replay(replay_id)
    assert plan is not None
    return plan.items - plan.waiting - plan.skipped


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


async def eventually(condition: Callable[[], object], seconds: float = 30) -> float:
    """Wait for a condition; return how long that took."""
    began = time.monotonic()
    while not await asyncio.to_thread(condition):
        assert time.monotonic() - began < seconds, "waited in vain"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


# Whoever has the duty


async def test_the_runner_has_the_duty_and_leaves_it_when_it_ends(dsn: str, client: Client) -> None:
    assert client.on_duty(DUTY) is None
    async with running(dsn):
        await eventually(lambda: client.on_duty(DUTY) == "me")
    assert client.on_duty(DUTY) is None


async def test_of_two_runners_one_works_and_the_other_takes_over(dsn: str, client: Client, conn: Conn) -> None:
    async with running(dsn, "first") as first:
        await eventually(lambda: client.on_duty(DUTY) == "first")
        async with running(dsn, "second"):
            await eventually(lambda: len(sessions(conn, "replays")) == 2)
            replay_id = started(client, bury(client, 3))
            with Told.listening() as told:
                await eventually(lambda: status(client, replay_id) == "settling")
                assert len(told.of("replay.taken")) <= 1
            assert client.on_duty(DUTY) == "first"
            first.abort()
            await first._leave()
            conn.execute("update bartleby.duty set holder = 'nobody', until = '-infinity' where name = %s", [DUTY])
            await eventually(lambda: client.on_duty(DUTY) is not None)


def test_every_worker_runs_plans(app: Bartleby, client: Client) -> None:
    done = threading.Event()

    @app.handler("orders")
    async def handle(message: Message) -> None:
        done.set()

    replay_id = started(client, bury(client, 1))
    with working(app) as worker:
        assert done.wait(30)
        until(lambda: status(client, replay_id) == "finished")
        assert client.on_duty(DUTY) == worker.worker.name
    with Client(app.settings.dsn) as opened:
        assert opened.on_duty(DUTY) is None


def test_the_janitor_command_runs_plans(client: Client, dsn: str, tmp_path: Path) -> None:
    replay_id = started(client, bury(client, 3))
    command = [sys.executable, "-m", "bartleby", "--dsn", dsn, "janitor", "--log", "json"]
    said = tmp_path / "said"
    with said.open("w") as stderr, subprocess.Popen(command, env=ENVIRONMENT, stderr=stderr) as process:
        try:
            until(lambda: status(client, replay_id) == "settling" and '"event": "replay.taken"' in said.read_text())
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
    assert client.on_duty(DUTY) is None


def test_one_round_of_the_janitor_tallies_and_finishes_what_is_settled(
    client: Client, bartleby: Callable[..., Any]
) -> None:
    replay_id = started(client, bury(client, 1))
    client.advance_replays()
    lease = client.claim("orders", "tester")
    assert lease is not None
    client.ack(lease.id)
    assert status(client, replay_id) == "settling"
    assert bartleby("janitor", "--once").code == 0
    assert status(client, replay_id) == "finished"


# What a plan asks for


async def test_plans_run_side_by_side_and_are_told_once(dsn: str, client: Client, told: Told) -> None:
    client.create_queue("parcels")
    one, two = started(client, bury(client, 3)), started(client, bury(client, 3, "parcels"))
    async with running(dsn):
        await eventually(lambda: {status(client, each) for each in (one, two)} == {"settling"})
        for queue in ("orders", "parcels"):
            lease = client.claim(queue, "tester", limit=10)
            assert lease is not None
            client.ack(lease.id)
        await eventually(lambda: {status(client, each) for each in (one, two)} == {"finished"})
        await eventually(lambda: len(told.of("replay.finished")) == 2)
    assert sorted(each.getMessage() for each in told.of("replay.taken")) == [
        f"replay {each} is run here" for each in (one, two)
    ]


async def test_what_a_plan_waits_for_is_told_once(dsn: str, client: Client, told: Told) -> None:
    replay_id = started(client, bury(client, 2))
    client.pause_queue("orders")
    async with running(dsn):
        await eventually(lambda: told.of("replay.waits"))
        await asyncio.sleep(0.6)  # three more looks
        client.resume_queue("orders")
        await eventually(lambda: status(client, replay_id) == "settling")
    assert [each.getMessage() for each in told.of("replay.waits")] == [
        f"replay {replay_id}: waiting: queue orders is paused or its breaker is open"
    ]


async def test_a_canary_that_dies_is_a_warning(dsn: str, client: Client, told: Told) -> None:
    replay_id = started(client, bury(client, 6), canary=2)

    def die() -> bool:
        lease = client.claim("orders", "tester", limit=10)
        if lease is not None:
            client.fail(lease.id, [Failure(each.position, "KeyError", "'x'", verdict="dead") for each in lease])
        return status(client, replay_id) == "aborted"

    async with running(dsn):
        await eventually(die)
        await eventually(lambda: told.of("replay.aborted"))
    (event,) = told.of("replay.aborted")
    assert event.levelname == "WARNING"
    assert "4 are left as they were" in event.getMessage()
    assert alive(client, replay_id) == 2


@pytest.mark.parametrize("rate", [40.0, 400.0])
async def test_the_rate_is_kept(dsn: str, client: Client, conn: Conn, rate: float) -> None:
    measured = []
    for _ in range(3):  # a step is late if somebody else has the processor, and nothing makes up for the last one
        measured.append(await pace(dsn, client, conn, rate))
        if measured[-1] == pytest.approx(rate, rel=0.05):
            return
    pytest.fail(f"{measured} a second instead of {rate}")


async def pace(dsn: str, client: Client, conn: Conn, rate: float) -> float:
    """How many a second a plan replays that may replay so many."""
    replay_id = started(client, bury(client, int(rate * 4)), rate=rate)
    query = """select count(*), extract(epoch from max(replayed_at))::float8
        from bartleby.replay_item where state = 'replayed' and replay_id = %s"""
    async with running(dsn):
        await eventually(lambda: row(conn, query, replay_id)[0] > rate / 2)
        before, began = row(conn, query, replay_id)
        await eventually(lambda: status(client, replay_id) == "settling")
    after, ended = row(conn, query, replay_id)
    return float((after - before) / (ended - began))


@pytest.mark.parametrize("verb", ["pause_replay", "cancel_replay"])
async def test_pause_and_cancel_are_prompt_while_steps_follow_each_other(
    dsn: str, client: Client, conn: Conn, verb: str
) -> None:
    replay_id = started(client, bury(client, 20_000), window=20_000)
    async with running(dsn, "one"), running(dsn, "two"):
        await eventually(lambda: alive(client, replay_id) > 0)
        began = time.monotonic()
        await asyncio.to_thread(getattr(client, verb), replay_id, actor="ben", reason="stop")
        assert time.monotonic() - began < 10
        stopped = alive(client, replay_id)
        assert stopped < 20_000
        await asyncio.sleep(0.3)
        assert alive(client, replay_id) == stopped


async def test_steps_get_smaller_where_they_take_long(dsn: str, client: Client, conn: Conn) -> None:
    conn.execute("""
        create function public.slow() returns trigger language plpgsql
        as 'begin perform pg_sleep(0.6); return null; end';
        create trigger slow after update on bartleby.replay_item execute function public.slow()""")
    started(client, bury(client, 2))
    replayer = Replayer(Settings(dsn), "me")
    await replayer.step()
    assert replayer._stride.items == LARGEST // 2
    conn.execute("drop trigger slow on bartleby.replay_item")
    for _ in range(5):  # each may be slow on a machine that is busy
        started(client, bury(client, 2))
        await replayer.step()
    assert replayer._stride.items == LARGEST
    await replayer._leave()


# Whatever happens to it


async def test_it_survives_its_connection(dsn: str, client: Client, conn: Conn) -> None:
    replay_id = started(client, bury(client, 300), rate=100)
    async with running(dsn):
        await eventually(lambda: alive(client, replay_id) > 20)
        (pid,) = sessions(conn, "replays")
        conn.execute("select pg_terminate_backend(%s, 5000)", [pid])
        await eventually(lambda: status(client, replay_id) == "settling")
        assert sessions(conn, "replays") != [pid]
    assert row(conn, "select count(*) from bartleby.log") == 300 + 300


async def test_what_does_not_work_is_told_once_and_tried_again(dsn: str, client: Client, conn: Conn) -> None:
    replay_id = started(client, bury(client, 1))
    conn.execute("alter function bartleby.advance_replays rename to hidden")
    with Told.listening() as told:
        async with running(dsn):
            await eventually(lambda: told.of("replays.failed"))
            await asyncio.sleep(1.2)  # the next look
            conn.execute("alter function bartleby.hidden rename to advance_replays")
            await eventually(lambda: status(client, replay_id) == "settling")
        assert len(told.of("replays.failed")) == 1


def test_a_database_that_is_away_does_not_end_the_worker(app: Bartleby, client: Client, conn: Conn) -> None:
    @app.handler("orders")
    async def handle(message: Message) -> None: ...

    replay_id = started(client, bury(client, 200), rate=100)
    with working(app), Told.listening() as told:
        until(lambda: alive(client, replay_id) > 10)
        for _ in range(5):
            for pid in sessions(conn, "replays"):
                with contextlib.suppress(psycopg.Error):
                    conn.execute("select pg_terminate_backend(%s, 5000)", [pid])
        until(lambda: status(client, replay_id) == "finished")
        assert not told.of("replays.failed")
    with Client(app.settings.dsn) as opened:
        plan = opened.find_replay(replay_id)
        assert plan is not None
        assert plan.done == 200


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(
        "from bartleby import Bartleby\napp = Bartleby()\n@app.handler('orders')\ndef handle(message): pass\n"
    )
    return tmp_path


def test_a_runner_that_was_killed_is_replaced_and_every_item_lives_once(
    app: Bartleby, client: Client, conn: Conn, *, dsn: str, shop: Path
) -> None:
    replay_id = started(client, bury(client, 600), rate=150)
    with Program(dsn, "shop:app", cwd=shop) as victim:
        until(lambda: alive(client, replay_id) > 50)
        holder = client.on_duty(DUTY)
        with Program(dsn, "shop:app", cwd=shop) as heir:
            heir.wait_for("worker.started")
            os.kill(victim.pid, signal.SIGKILL)
            victim.end()
            until(lambda: client.on_duty(DUTY) not in {None, holder})
            # what the victim had claimed and not acked is run when its lease of half a minute has lapsed
            until(lambda: status(client, replay_id) == "finished", 90)
            plan = client.find_replay(replay_id)
    assert plan is not None
    assert (plan.done, plan.died_again, plan.skipped) == (600, 0, 0)
    twice = (
        "select count(*) from (select message_id from bartleby.dead_letter where cycle > 2 or status <> 'resolved') t"
    )
    assert row(conn, twice) == 0


# How long to rest


def step(*, moved: int = 0, wait: float | None = 0.0) -> Advance:
    return Advance(ReplayId(1), "running", moved, None if wait is None else timedelta(seconds=wait), None)


@pytest.mark.parametrize(
    ("steps", "seconds"),
    [
        ([], 1.0),
        ([step(moved=LARGEST)], 0.0),
        ([step(moved=5)], 0.02),
        ([step(wait=None)], 0.02),
        ([step(wait=0.3)], 0.3),
        ([step(wait=60)], 1.0),
        ([step(wait=0.3), step(wait=0.1)], 0.1),
    ],
)
def test_it_rests_as_long_as_the_most_impatient_plan_allows(steps: list[Advance], seconds: float) -> None:
    assert pause(steps) == pytest.approx(seconds)


def test_a_stride_shrinks_and_grows_within_bounds() -> None:
    stride = Stride()
    for _ in range(20):
        stride.took(1.0)
    assert stride.items == 10
    stride.took(0.3)
    assert stride.items == 10
    for _ in range(20):
        stride.took(0.01)
    assert stride.items == LARGEST
