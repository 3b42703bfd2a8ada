"""How fast a worker is, and how much memory and how many statements it needs."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bartleby import Bartleby, Message
from bartleby.config import Settings
from bartleby.replaying import Replayer
from tests.kit import plans
from tests.kit.own_server import OwnServer
from tests.kit.sql import create, value
from tests.kit.worker import BOTH, Conn, drain, handler_of, numbered, until, working


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
        return int(value(conn, query, name))

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
    leases = value(conn, "select count(distinct lease_id) from bartleby.attempts")
    assert value(conn, "select count(distinct xmin::text) from bartleby.attempt") <= leases + 2
    assert leases <= 5


def test_rate_is_reached(app: Bartleby) -> None:
    begun: list[float] = []

    @app.handler("orders", rate=40)
    def handle(message: Message) -> None:
        begun.append(time.monotonic())
        time.sleep(0.1)

    took = []
    for _ in range(3):
        begun.clear()
        app.send_many("orders", numbered(41))
        assert drain(app) == {"done": 41}
        took.append(max(begun) - min(begun))
    assert min(took) < 2, "one after another it would take four seconds"


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


def replayed(conn: Conn, replay_id: int) -> tuple[int, float]:
    query = """select count(*), extract(epoch from max(replayed_at))::float8
        from bartleby.replay_item where state = 'replayed' and replay_id = %s"""
    [found] = conn.execute(query, [replay_id]).fetchall()
    return found[0], found[1]


@pytest.mark.parametrize("rate", [40.0, 400.0])
async def test_rate_of_a_replay_is_kept(dsn: str, conn: Conn, rate: float) -> None:
    create(conn, "orders")
    replaying = asyncio.create_task(Replayer(Settings(dsn), "me").run())
    measured = []
    for _ in range(5):  # a step may be late, and nothing makes up for the last one
        replay_id = plans.started(conn, plans.die(conn, int(rate * 4), "orders"), rate=rate)
        await asyncio.to_thread(until, lambda: replayed(conn, replay_id)[0] > rate / 2)  # noqa: B023 - at once
        before, began = replayed(conn, replay_id)
        await asyncio.to_thread(until, lambda: replayed(conn, replay_id)[0] == int(rate * 4))  # noqa: B023 - at once
        after, ended = replayed(conn, replay_id)
        measured.append((after - before) / (ended - began))
        if measured[-1] == pytest.approx(rate, rel=0.05):
            break
    replaying.cancel()
    await asyncio.wait([replaying])
    assert measured[-1] == pytest.approx(rate, rel=0.05), measured


CHILD = """
import asyncio, gc, json, resource, sys
from pathlib import Path
from bartleby import Bartleby, Message
from bartleby.worker import Worker

app, count = Bartleby(sys.argv[1]), int(sys.argv[2])
seen, sizes = 0, []

@app.handler("orders")
async def handle(message: Message) -> None:
    global seen
    assert message.payload["n"]
    seen += 1
    if seen >= (len(sizes) + 1) * count // 10:
        gc.collect()
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())

asyncio.run(Worker(app, until_idle=True).run())
print(json.dumps({"seen": seen, "sizes": sizes}))
"""
"""Drains the queue, decodes every payload, and measures its resident memory after each tenth."""


@pytest.mark.timeout(600)
def test_worker_that_drains_a_queue_needs_no_more_memory_at_the_end(app: Bartleby, dsn: str, conn: Conn) -> None:
    count = 300_000
    conn.execute(
        "select count(*) from (select jsonb_agg(jsonb_build_object("
        "'payload', jsonb_build_object('n', n, 'text', repeat('x', 200)))) as batch"
        " from generate_series(1, %s) n group by n / 1000) m, bartleby.send_many('orders', m.batch)",
        [count],
    )
    command = [sys.executable, "-c", CHILD, dsn, str(count)]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert report["seen"] == count
    _, warm, *later = report["sizes"]
    assert len(later) == 8
    assert max(later) < warm * 1.05 + (3 << 20), report["sizes"]
