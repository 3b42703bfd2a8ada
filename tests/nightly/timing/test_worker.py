"""How fast a worker is, and how much memory and how many statements it needs."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import Bartleby, Client, Failure, Message, dev
from bartleby.config import Settings
from bartleby.evidence import ReplayId
from bartleby.replaying import Replayer
from bartleby.surfaces.cli import connecting
from bench import pooler
from tests.kit.proxy import proxied
from tests.kit.worker import LONG, Told, drain, handler_of, row, until, working
from tests.nightly.chaos.servers import OwnServer

Conn = psycopg.Connection[tuple[Any, ...]]
BOTH = pytest.mark.parametrize("awaited", [False, True])
BY: Any = {"actor": "ana", "reason": "fixed"}


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"payload": number} for number in range(count)]


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


def test_rate_is_reached(app: Bartleby) -> None:
    begun: list[float] = []

    def took() -> float:
        begun.clear()
        app.send_many("orders", numbered(41))
        assert drain(app) == {"done": 41}
        return max(begun) - min(begun)

    @app.handler("orders", rate=40)
    def handle(message: Message) -> None:
        begun.append(time.monotonic())
        time.sleep(0.1)

    # one after another it would take four seconds
    assert min(took() for _ in range(3)) < 2


# After a restart of the server


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_work_goes_on_within_seconds_after_a_restart(scratch: Path, mode: Any) -> None:
    with OwnServer(scratch, {"fsync": "off", "max_connections": "20"}) as server:
        app = Bartleby(server.dsn)
        app.client.create_queue("orders")
        app.handler("orders", concurrency=4, lease=3)(handler_of(lambda _: None, awaited=True))
        app.send_many("orders", numbered(400))
        with working(app) as running:
            until(lambda: running.worker.counts["done"] > 50)
            waits = []
            for _ in range(3):
                server.running.stop(mode)
                server.start_again()
                back, before = time.monotonic(), running.worker.counts["done"]
                app.send_many("orders", numbered(100))
                until(lambda: running.worker.counts["done"] > before)  # noqa: B023 - at once
                waits.append(time.monotonic() - back)
            running.end()
    assert min(waits) < 3, waits


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


def started(client: Client, count: int, **options: Any) -> ReplayId:
    ids: list[int] = []
    for start in range(0, count, 1000):
        some = client.send_many("orders", [{"payload": 1}] * min(1000, count - start))
        lease = client.claim("orders", "tester", limit=len(some))
        assert lease is not None
        client.fail(lease.id, [Failure(each.position, "KeyError", "'x'", verdict="dead") for each in lease])
        ids += some
    replay_id = client.plan_replay(ids=ids, **BY, **options)
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
    for _ in range(5):  # a step may be late, and nothing makes up for the last one
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
async def test_plan_that_is_stopped_makes_no_further_step(dsn: str, app: Bartleby, conn: Conn, verb: str) -> None:
    replay_id = started(app.client, 20_000, window=20_000)
    untouched = "select md5(string_agg(d::text, '' order by message_id)) from bartleby.dead_letter d"
    async with replaying(dsn):
        await eventually(lambda: replayed(conn, replay_id)[0] > 0)
        await asyncio.to_thread(getattr(app.client, verb), replay_id, actor="ben", reason="stop")
        stopped, letters = replayed(conn, replay_id)[0], row(conn, f"{untouched} where status = 'dead'")
        assert stopped < 20_000
        await asyncio.sleep(0.3)
        assert replayed(conn, replay_id)[0] == stopped == row(conn, "select count(*) from bartleby.messages")
        assert row(conn, f"{untouched} where status = 'dead'") == letters


# Memory

CHILD = """
import asyncio, gc, json, resource, sys
from pathlib import Path
from bartleby import Bartleby, Client, Message
from bartleby.worker import Worker

dsn, count, consumer = sys.argv[1], int(sys.argv[2]), sys.argv[3]
seen, sizes = 0, []

def see(message):
    global seen
    assert message.payload["n"]
    seen += 1
    if seen >= (len(sizes) + 1) * count // 10:
        gc.collect()
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())

if consumer == "worker":
    app = Bartleby(dsn)
    @app.handler("orders")
    async def handle(message: Message) -> None:
        see(message)
    asyncio.run(Worker(app, until_idle=True).run())
else:
    with Client(dsn) as client:
        while lease := client.claim("orders", "drain", limit=500):
            for message in lease:
                see(message)
            client.ack(lease.id)
print(json.dumps({"seen": seen, "sizes": sizes}))
"""
"""Drains the queue, decodes every payload, and measures its resident memory after each tenth."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("consumer", ["client", "worker"])
def test_consumer_that_drains_a_queue_needs_no_more_memory_at_the_end(
    app: Bartleby, dsn: str, conn: Conn, consumer: str
) -> None:
    count = 300_000
    conn.execute(
        "select count(*) from (select jsonb_agg(jsonb_build_object("
        "'payload', jsonb_build_object('n', n, 'text', repeat('x', 200)))) as batch"
        " from generate_series(1, %s) n group by n / 1000) m, bartleby.send_many('orders', m.batch)",
        [count],
    )
    command = [sys.executable, "-c", CHILD, dsn, str(count), consumer]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert report["seen"] == count
    _, warm, *later = report["sizes"]
    assert len(later) == 8
    assert max(later) < warm * 1.05 + (3 << 20), report["sizes"]
