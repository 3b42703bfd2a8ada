"""The replayer: every worker has one, one at a time in a database runs plans, and it outlives who started a plan."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import Advance, Bartleby, Client, Failure, Message
from bartleby.config import Settings
from bartleby.evidence import ReplayId
from bartleby.message import MessageId
from bartleby.operations import Operator
from bartleby.pacing import LARGEST, Stride, pause
from bartleby.replaying import DUTY, Replayer
from bartleby.replays import ReplayItem
from tests.kit.worker import ENVIRONMENT, LONG, Told, drain, handler_of, row, sessions, until, working

Conn = psycopg.Connection[tuple[Any, ...]]
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
    """Send messages that die; return their ids."""
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
    plan = client.find_replay(replay_id)
    assert plan is not None
    return plan.status


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


# The duty


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


def test_every_worker_runs_plans(app: Bartleby, client: Client) -> None:
    app.handler("orders")(handler_of(lambda _: None, awaited=True))
    replay_id = started(client, bury(client, 1))
    with working(app) as worker:
        until(lambda: status(client, replay_id) == "finished")
        assert client.on_duty(DUTY) == worker.worker.name
    assert client.on_duty(DUTY) is None


def test_janitor_command_runs_plans(client: Client, dsn: str, tmp_path: Path) -> None:
    replay_id = started(client, bury(client, 3))
    command = [sys.executable, "-m", "bartleby", "--dsn", dsn, "janitor", "--log", "json"]
    log = tmp_path / "log"
    with log.open("w") as stderr, subprocess.Popen(command, env=ENVIRONMENT, stderr=stderr) as process:
        try:
            until(lambda: status(client, replay_id) == "settling" and '"event": "replay.taken"' in log.read_text())
            process.terminate()
            assert process.wait(timeout=LONG) == 0
        finally:
            process.kill()
    assert client.on_duty(DUTY) is None


def test_one_round_of_the_janitor_command_finishes_what_is_settled(
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


# What it reports


async def test_plans_run_side_by_side_and_each_is_reported_once(dsn: str, client: Client, told: Told) -> None:
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


# Trouble


async def test_replayer_survives_its_connection(dsn: str, client: Client, conn: Conn) -> None:
    replay_id = started(client, bury(client, 200), rate=100)
    replayed = "select count(*) from bartleby.replay_item where state = 'replayed'"
    async with running(dsn):
        await eventually(lambda: row(conn, replayed) > 10)
        (pid,) = sessions(conn, "replays")
        conn.execute("select pg_terminate_backend(%s, 30000)", [pid])
        await eventually(lambda: status(client, replay_id) == "settling")
        assert sessions(conn, "replays") != [pid]
    assert row(conn, "select count(*) from bartleby.log") == 200 + 200


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


@pytest.mark.own_database
async def test_step_that_takes_long_makes_the_next_one_smaller(dsn: str, client: Client, conn: Conn) -> None:
    conn.execute("""
        create function public.slow() returns trigger language plpgsql
        as 'begin perform pg_sleep(0.6); return null; end';
        create trigger slow after update on bartleby.replay_item execute function public.slow()""")
    started(client, bury(client, 2))
    replayer = Replayer(Settings(dsn), "me")
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


# A preview comes true

LIMIT = 2000
RUNS = {"run", "again"}


@dataclass
class Order:
    id: int
    note: object = None
    bug: str | None = None
    copied: str | None = None


class Shop:
    """Orders that are handled once; some die before their effect and some after it, until the bug is fixed."""

    def __init__(self, app: Bartleby, client: Client, conn: Conn, dsn: str) -> None:
        self.app, self.client = app, client
        self.ran: list[int] = []
        self.fixed = False
        conn.execute("create table parcel (order_id integer)")
        self.client.configure_queue("orders", {"max_attempts": 1, "payload_limit": LIMIT, "breaker": "off"})
        self.client.create_queue("parked")

        @app.handler("orders", once=True)
        def fulfil(order: Order, message: Message) -> None:
            self.ran.append(message.id)
            if order.bug == "before" and not self.fixed:
                raise KeyError("customer")
            with psycopg.connect(dsn) as connection:
                app.mark_handled(message, connection)
                connection.execute("insert into parcel values (%s)", [order.id])
            if order.bug == "after":
                raise ConnectionError("the printer is unavailable")

    def bury(self, *orders: Mapping[str, Any], **options: Any) -> list[int]:
        """Send orders that die; return their ids."""
        ids = [int(self.client.send("orders", {"id": n, **order}, **options)) for n, order in enumerate(orders)]
        drain(self.app)
        assert [fate.status for fate in self.client.fates(ids)] == ["dead"] * len(ids)
        return ids

    def one_of_each(self) -> dict[str, int]:
        """Return a letter for every class of the preview."""
        early = {"note": "x", "bug": "before"}
        names = ["again", "run", "held", "discarded", "resolved"]
        ids = dict(zip(names, self.bury(*[early] * len(names)), strict=True))
        (ids["already_handled"],) = self.bury({"note": "x", "bug": "after"})
        (ids["erased"],) = self.bury(early, key="customer-7")
        ids["patch_fails"], ids["too_large"], ids["invalid"] = self.bury(
            {"bug": "before"}, {"note": "x" * (LIMIT // 2 + 100), "bug": "before"}, {"note": 5, "bug": "before"}
        )
        self.client.replay([ids["again"]], **BY)
        drain(self.app)
        self.fixed = True
        self.client.replay([ids["resolved"]], **BY)
        drain(self.app)
        self.client.hold([ids["held"]], **BY)
        self.client.discard([ids["discarded"]], **BY)
        assert self.client.erase_key("customer-7", **BY)
        (parked,) = bury(self.client, 1, "parked")
        self.client.replay([parked], **BY)
        return {**ids, "replayed": parked, "unknown": 10**9}

    def finish(self, replay_id: int) -> dict[int, ReplayItem]:
        """Let a worker run the plan and its messages; return the items at the end."""
        operator = Operator(self.client, "ana")
        with working(self.app):
            until(lambda: operator.plan(replay_id).over, what="the end of the plan")
        assert operator.plan(replay_id).status == "finished"
        return {item.message_id: item for page in operator.items(replay_id) for item in page}


def test_every_class_of_a_preview_comes_true(app: Bartleby, client: Client, conn: Conn, dsn: str) -> None:
    shop = Shop(app, client, conn, dsn)
    wanted = shop.one_of_each()
    operator = Operator(client, "ana")
    before = {name: client.dead_letter(each) for name, each in wanted.items()}
    shop.ran.clear()
    patch = [{"op": "copy", "from": "/note", "path": "/copied"}]
    replay_id = client.plan_replay(ids=list(wanted.values()), patch=patch, **BY)
    operator.check_patched(replay_id, app.handlers)
    plan = operator.plan(replay_id)
    assert plan.predictions == dict.fromkeys(wanted, 1)
    client.start_replay(replay_id, hash=plan.hash, **BY)
    items = shop.finish(replay_id)
    for name, each in wanted.items():
        item, letter = items[each], client.dead_letter(each)
        assert item.prediction == name
        if name in RUNS:
            assert (item.state, item.problem) == ("done", None), name
            assert letter is not None
            assert (letter.status, letter.payload) == ("resolved", (before[name] or letter).payload), name
            assert letter.edited == {**letter.payload, "copied": "x"}, name
        elif name == "already_handled":
            assert item.state == "already_handled"
        else:
            assert item.state == "skipped", name
            assert (item.problem or "").startswith(f"{name}: "), name
            assert letter == before[name], name
    assert sorted(shop.ran) == sorted(wanted[name] for name in RUNS), "the effect of a message is there once"
    plan = operator.plan(replay_id)
    assert (plan.done, plan.already_handled, plan.skipped) == (2, 1, 9)
