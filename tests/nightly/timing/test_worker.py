"""How fast a worker is, and how much memory and how many statements it needs. Run on a machine that is not busy."""

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import Bartleby, Client, Failure, Message, Snooze, dev, schema
from bartleby.config import Settings
from bartleby.evidence import ReplayId
from bartleby.replaying import Replayer
from bartleby.surfaces.cli import connecting
from bench import pooler
from tests.kit.commands import PROGRAM
from tests.kit.proxy import proxied
from tests.kit.worker import ENVIRONMENT, LONG, Program, Told, drain, handler_of, row, state, until, working

Conn = psycopg.Connection[tuple[Any, ...]]
BOTH = pytest.mark.parametrize("awaited", [False, True])
BY: Any = {"actor": "ana", "reason": "fixed"}


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"payload": number} for number in range(count)]


# Waking up and stopping


@BOTH
def test_idle_worker_runs_a_message_at_once(app: Bartleby, awaited: bool) -> None:
    seen: list[float] = []
    app.handler("orders")(handler_of(lambda _: seen.append(time.monotonic()), awaited=awaited))
    with working(app, poll=30) as running:
        until(lambda: running.worker._shared.listener.listening)
        waits = []
        for number in range(1, 21):
            sent = time.monotonic()
            app.send("orders", number)
            until(lambda: len(seen) == number)  # noqa: B023 - at once
            waits.append(seen[-1] - sent)
    assert min(waits) < 0.1, waits
    assert sorted(waits)[10] < 2, waits


def test_retry_is_run_when_it_is_due(app: Bartleby) -> None:
    seen: list[float] = []

    @app.handler("orders")
    async def handle(message: Message) -> object:
        seen.append(time.monotonic())
        return Snooze(0.4) if len(seen) == 1 else None

    app.send("orders", 1)
    with working(app, poll=30) as running:
        until(lambda: running.worker.counts["done"] == 1)
    assert 0.35 < seen[1] - seen[0] < 4  # polling alone takes five seconds


def test_idle_worker_stops_at_once(app: Bartleby) -> None:
    app.handler("orders")(print)

    def took() -> float:
        with working(app, poll=30) as running:
            until(lambda: running.worker._shared.listener.listening)
            began = time.monotonic()
            running.end()
            return time.monotonic() - began

    assert any(took() < 2 for _ in range(3))


# How much is claimed, and how fast it is run


@BOTH
def test_slow_handlers_do_not_hoard(app: Bartleby, conn: Conn, awaited: bool) -> None:
    """Leased messages stay near the concurrency; what is done and not yet acknowledged does not count."""
    most = 0

    def handle(message: Message) -> None:
        time.sleep(0.2)

    async def handle_awaited(message: Message) -> None:
        await asyncio.sleep(0.2)

    app.handler("orders", concurrency=4)(handle_awaited if awaited else handle)
    app.send_many("orders", numbered(40))
    with working(app) as running:
        lanes = running.worker._shared.holding.lanes
        until(lambda: lanes)
        lane = lanes["orders"]
        while running.worker.counts["done"] < 20:
            done = lane.backlog.count
            leased = state(conn)[1]
            most = max(most, leased - max(done, lane.backlog.count))
    assert 4 <= most <= 12, most


def test_two_workers_share_slow_messages(app: Bartleby) -> None:
    app.handler("orders", concurrency=2)(handler_of(lambda _: time.sleep(0.1), awaited=False))
    with working(app) as one, working(app) as two:
        until(lambda: one.worker._shared.listener.listening and two.worker._shared.listener.listening)
        app.send_many("orders", numbered(80))
        until(lambda: one.worker.counts["done"] + two.worker.counts["done"] == 80)
        assert min(one.worker.counts["done"], two.worker.counts["done"]) >= 20


@pytest.mark.own_database
@BOTH
def test_quick_messages_cost_few_statements(app: Bartleby, conn: Conn, dsn: str, awaited: bool) -> None:
    conn.execute(f"alter database {dsn.rpartition('/')[2]} set track_functions = 'pl'".encode())

    def calls(name: str) -> int:
        conn.execute("select pg_stat_clear_snapshot()")
        query = "select coalesce(sum(calls), 0)::integer from pg_stat_user_functions where funcname = %s"
        return int(row(conn, query, name))

    app.handler("orders")(handler_of(lambda _: None, awaited=awaited))
    app.send_many("orders", numbered(5000))
    assert drain(app) == {"done": 5000}
    until(lambda: calls("claim"))
    assert calls("ack") <= 60
    assert calls("claim") <= 80


def test_failures_of_one_lease_cost_one_statement(app: Bartleby, conn: Conn) -> None:
    @app.handler("orders", terminal=[ValueError])
    async def handle(message: Message) -> None:
        raise ValueError(message.id)

    app.client.configure_queue("orders", {"breaker": "off"})
    app.send_many("orders", numbered(100))
    assert drain(app) == {"dead": 100}
    leases = row(conn, "select count(distinct lease_id) from bartleby.attempts")
    assert row(conn, "select count(distinct xmin::text) from bartleby.attempt") <= leases + 2
    assert leases <= 5


@BOTH
def test_batches_stay_full_though_handlers_are_slow(app: Bartleby, awaited: bool) -> None:
    sizes: list[int] = []

    def handle(messages: list[Message]) -> list[None]:
        sizes.append(len(messages))
        time.sleep(0.3)
        return [None for _ in messages]

    async def handle_awaited(messages: list[Message]) -> list[None]:
        sizes.append(len(messages))
        await asyncio.sleep(0.3)
        return [None for _ in messages]

    app.handler("orders", batch=25, concurrency=1)(handle_awaited if awaited else handle)
    app.send_many("orders", numbered(100))
    assert drain(app) == {"done": 100}
    assert max(sizes) == 25
    assert len(sizes) <= 6, sizes


@BOTH
def test_rate_is_kept_and_reached(app: Bartleby, awaited: bool) -> None:
    starts: list[float] = []

    def handle(message: Message) -> None:
        starts.append(time.monotonic())
        time.sleep(0.1)

    async def handle_awaited(message: Message) -> None:
        starts.append(time.monotonic())
        await asyncio.sleep(0.1)

    app.handler("orders", rate=40)(handle_awaited if awaited else handle)
    app.send_many("orders", numbered(41))
    assert drain(app) == {"done": 41}
    starts.sort()
    assert 0.93 <= starts[-1] - starts[0] < 3.5, "one after another it would take four seconds"
    # within any quarter of a second no more than ten, one that was saved up, and one for the clock
    assert max(sum(start <= each < start + 0.25 for each in starts) for start in starts) <= 12


# After a restart of the server


@pytest.fixture
def folder(scratch: Path) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="bartleby-test-", dir=scratch))
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_work_goes_on_within_seconds_after_a_restart(folder: Path, mode: Any) -> None:
    settings = {"fsync": "off", "max_connections": "20"}
    server = dev.start(folder, settings=settings)
    try:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            schema.install(connection)
        app = Bartleby(server.dsn)
        app.client.create_queue("orders")
        app.handler("orders", concurrency=4, lease=3)(handler_of(lambda _: None, awaited=True))
        app.send_many("orders", numbered(400))
        with working(app) as running:
            until(lambda: running.worker.counts["done"] > 50)
            waits = []
            for _ in range(2):
                server.stop(mode)
                server = dev.start(folder, settings=settings)
                back, before = time.monotonic(), running.worker.counts["done"]
                app.send_many("orders", numbered(100))
                until(lambda: running.worker.counts["done"] > before)  # noqa: B023 - at once
                waits.append(time.monotonic() - back)
            running.end()
        assert min(waits) < 3, waits
        assert max(waits) < 7, waits
    finally:
        server.stop("immediate")


@pytest.mark.pgbouncer
def test_command_waits_for_the_server_behind_a_pooler(server: dev.Server, dsn: str, told: Told) -> None:
    """Seconds after it is back: a pooler does not try it at once."""
    with proxied(server.port) as proxy, pooler.pgbouncer(replace(server, port=proxy.port)) as port:
        through = f"{dsn.rpartition('@')[0]}@127.0.0.1:{port}/{dsn.rpartition('/')[2]}"
        psycopg.connect(through).close()  # it knows the password from now on
        proxy.lead_to(1)
        proxy.cut()
        waiting = threading.Thread(target=connecting.wait_for, args=[through])
        waiting.start()
        until(lambda: told.of("database.away"))
        assert waiting.is_alive()
        proxy.lead_to(server.port)
        waiting.join(LONG)
        assert told.of("database.back")


# Replay plans


def bury(client: Client, count: int) -> list[int]:
    ids: list[int] = []
    for start in range(0, count, 1000):
        some = client.send_many("orders", [{"payload": 1}] * min(1000, count - start))
        lease = client.claim("orders", "tester", limit=len(some))
        assert lease is not None
        client.fail(lease.id, [Failure(each.position, "KeyError", "'x'", verdict="dead") for each in lease])
        ids += some
    return ids


def started(client: Client, count: int, **options: Any) -> ReplayId:
    replay_id = client.plan_replay(ids=bury(client, count), **BY, **options)
    client.start_replay(replay_id, **BY)
    return replay_id


@asynccontextmanager
async def replaying(dsn: str) -> AsyncIterator[None]:
    replayer = Replayer(Settings(dsn), "me")
    task = asyncio.create_task(replayer.run())
    try:
        yield
    finally:
        replayer.abort()
        task.cancel()
        await asyncio.wait([task])


async def eventually(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(until, condition)


def replayed(conn: Conn, replay_id: int) -> tuple[int, float]:
    query = """select count(*), extract(epoch from max(replayed_at))::float8
        from bartleby.replay_item where state = 'replayed' and replay_id = %s"""
    found: tuple[int, float] = row(conn, query, replay_id)
    return found


@pytest.mark.parametrize("rate", [40.0, 400.0])
async def test_rate_of_a_replay_is_kept(dsn: str, app: Bartleby, conn: Conn, rate: float) -> None:
    measured = []
    for _ in range(3):  # a step may be late, and nothing makes up for the last one
        replay_id = started(app.client, int(rate * 4), rate=rate)
        async with replaying(dsn):
            await eventually(lambda: replayed(conn, replay_id)[0] > rate / 2)  # noqa: B023 - at once
            before, began = replayed(conn, replay_id)
            await eventually(lambda: replayed(conn, replay_id)[0] == int(rate * 4))  # noqa: B023 - at once
        after, ended = replayed(conn, replay_id)
        measured.append((after - before) / (ended - began))
        if measured[-1] == pytest.approx(rate, rel=0.05):
            return
    pytest.fail(f"{measured} a second instead of {rate}")


@pytest.mark.parametrize("verb", ["pause_replay", "cancel_replay"])
async def test_replay_is_paused_and_cancelled_promptly(dsn: str, app: Bartleby, conn: Conn, verb: str) -> None:
    replay_id = started(app.client, 20_000, window=20_000)
    async with replaying(dsn):
        await eventually(lambda: replayed(conn, replay_id)[0] > 0)
        began = time.monotonic()
        await asyncio.to_thread(getattr(app.client, verb), replay_id, actor="ben", reason="stop")
        assert time.monotonic() - began < 10
        stopped = replayed(conn, replay_id)[0]
        assert stopped < 20_000
        await asyncio.sleep(0.3)
        assert replayed(conn, replay_id)[0] == stopped


BROKEN = """
from bartleby import Bartleby, Message

app = Bartleby(version="1.0")

@app.handler("orders")
def ship(message: Message) -> None:
    return message.payload["customer"]["name"]
"""
FIXED = BROKEN.replace("1.0", "1.1").replace('["customer"]["name"]', '.get("customer")')
DEAD = 300


def test_dead_letters_of_a_bug_are_replayed_within_a_minute_of_typing(app: Bartleby, dsn: str, tmp_path: Path) -> None:
    """From the list of groups to a replayed fix, in five commands."""
    client, seconds = app.client, 0.0

    def run(*words: str) -> Any:
        nonlocal seconds
        environment = {**ENVIRONMENT, "BARTLEBY_DSN": dsn, "BARTLEBY_ACTOR": "ana"}
        began = time.monotonic()
        done = subprocess.run(
            [*PROGRAM, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        seconds += time.monotonic() - began
        assert done.returncode == 0, done.stderr + done.stdout
        return json.loads(done.stdout) if "--json" in words else done.stdout

    def deploy(code: str) -> Program:
        (tmp_path / "shop.py").write_text(code)
        program = Program(dsn, "shop:app", cwd=tmp_path)
        program.wait_for("works on orders")
        return program

    client.configure_queue("orders", {"max_attempts": 1, "breaker": "off"})
    client.send_many("orders", [{"payload": {"n": n, "customer": None}} for n in range(DEAD)])
    with deploy(BROKEN) as broken:
        until(lambda: client.count_letters("queue:orders").letters == DEAD)
        (found,) = run("groups", "--json")
        group = str(found["id"])
        assert found["dead"] == DEAD
        assert "TypeError" in run("groups", "show", group)
        broken.term()
        broken.end()
    with deploy(FIXED):
        plan = run("replay", f"group:{group}", "--reason", "fixed in 1.1", "--yes", "--json")
        run("groups", "resolve", group, "--in", "1.1", "--reason", "fixed in 1.1")
        assert run("groups", "--json") == []
    assert (plan["status"], plan["done"], plan["items"]) == ("finished", DEAD, DEAD)
    assert client.count_letters("queue:orders status:resolved").letters == DEAD
    assert seconds < 60


# Memory

CHILD = """
import gc, json, os, resource, sys
from pathlib import Path
from bartleby import Client

def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

dsn, count, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
seen, sizes = 0, []
with Client(dsn) as client:
    while lease := client.claim("orders", "drain", limit=batch):
        seen += sum(message.payload["n"] >= 0 for message in lease)
        client.ack(lease.id)
        if seen >= (len(sizes) + 1) * count // 10:
            sizes.append(resident())
print(json.dumps({"seen": seen, "sizes": sizes}))
"""
"""Drains the queue in batches, decodes every payload, and measures its resident memory after each tenth."""


@pytest.mark.timeout(600)
def test_client_that_drains_a_queue_needs_no_more_memory_at_the_end(app: Bartleby, dsn: str, conn: Conn) -> None:
    count = 300_000
    conn.execute(
        "select count(*) from (select jsonb_agg(jsonb_build_object("
        "'payload', jsonb_build_object('n', n, 'text', repeat('x', 200)))) as batch"
        " from generate_series(1, %s) n group by n / 1000) m, bartleby.send_many('orders', m.batch)",
        [count],
    )
    done = subprocess.run(
        [sys.executable, "-c", CHILD, dsn, str(count), "500"], capture_output=True, text=True, check=True
    )
    report = json.loads(done.stdout)
    assert report["seen"] == count
    _, warm, *later = report["sizes"]
    assert len(later) == 8
    assert max(later) < warm * 1.05 + (2 << 20), report["sizes"]
