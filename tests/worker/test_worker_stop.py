"""The end of a worker: what runs is finished within the grace, the rest goes back uncharged, and nothing is left."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
import pytest

from bartleby import Bartleby, Message, heartbeat, holding
from bartleby.config import Settings
from bartleby.holding import Holding
from bartleby.link import Link
from tests.kit.worker import Program, Told, row, state, until, working

Conn = psycopg.Connection[tuple[Any, ...]]
BOTH = pytest.mark.parametrize("awaited", [False, True])

SHOP = """
import asyncio, os, time
from bartleby import Bartleby

app = Bartleby()
note = os.open("notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def say(text):
    os.write(note, (text + "\\n").encode())

def goes_on(message):
    return message.payload == "go" and not os.path.exists("go")

@app.handler("sync", concurrency=2)
def sync(message):
    say("begin")
    try:
        while goes_on(message):
            time.sleep(0.01)
        if message.payload != "go":
            time.sleep(message.payload)
    finally:
        say("end")

@app.handler("coroutines", concurrency=2)
async def coroutines(message):
    say("begin")
    try:
        while goes_on(message):
            await asyncio.sleep(0.01)
        if message.payload != "go":
            await asyncio.sleep(message.payload)
    finally:
        say("end")
"""


@pytest.fixture
def app(dsn: str) -> Iterator[Bartleby]:
    made = Bartleby(dsn)
    yield made
    made.client.close()


@pytest.fixture
def shop(tmp_path: Path, app: Bartleby) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    for queue in ("sync", "coroutines"):
        app.client.create_queue(queue)
    return tmp_path


def notes(folder: Path) -> list[str]:
    file = folder / "notes"
    return file.read_text().split() if file.exists() else []


def attempts_spent(conn: Conn) -> int:
    return int(row(conn, "select coalesce(sum(attempts), 0)::integer from bartleby.messages"))


@BOTH
def test_what_runs_is_finished_and_the_rest_released_uncharged(
    app: Bartleby, conn: Conn, monkeypatch: pytest.MonkeyPatch, awaited: bool
) -> None:
    monkeypatch.setattr(holding, "_PUT_BACK_EVERY", 3600.0)
    started, go = threading.Semaphore(0), threading.Event()

    def handle(message: Message) -> None:
        if message.payload != "quick":
            started.release()
            go.wait(60)

    async def handle_awaited(message: Message) -> None:
        if message.payload != "quick":
            started.release()
            while not go.is_set():  # noqa: ASYNC110 - another thread sets it
                await asyncio.sleep(0.005)

    app.handler("orders", concurrency=2, retry={"max_attempts": 1})(handle_awaited if awaited else handle)
    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": "quick"}] * 100)
    with working(app, grace=60) as running:
        until(lambda: running.worker.counts["done"] == 100)
        app.send_many("orders", [{"payload": number} for number in range(20)])
        for _ in range(2):
            assert started.acquire(timeout=30)
        until(lambda: state(conn)[1] > 2)  # quick ones made it claim ahead
        running.stop()
        until(lambda: state(conn)[1] == 2)
        assert running.thread.is_alive()
        assert not started.acquire(blocking=False)
        go.set()
        counts = running.join()
    assert counts["done"] == 102
    assert counts["dead"] == counts["retried"] == counts["refused"] == 0
    ready, leased, deferred, dead = state(conn)
    assert (ready + deferred, leased, dead) == (18, 0, 0)
    assert attempts_spent(conn) == 0


@BOTH
def test_what_is_not_finished_within_the_grace_is_cancelled_and_released(
    app: Bartleby, conn: Conn, awaited: bool
) -> None:
    started, ended = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        started.set()
        try:
            while True:
                time.sleep(0.005)
        finally:
            ended.set()

    async def handle_awaited(message: Message) -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    app.handler("orders", retry={"max_attempts": 1})(handle_awaited if awaited else handle)
    app.client.create_queue("orders")
    app.send("orders", 1)
    with working(app, grace=0.3) as running:
        assert started.wait(30)
        began = time.monotonic()
        counts = running.end()
        took = time.monotonic() - began
    assert ended.wait(30)
    assert counts == {"released": 1}
    assert 0.25 < took < 20  # the handler would take a minute
    assert state(conn)[1] == state(conn)[3] == attempts_spent(conn) == 0


@BOTH
def test_a_second_order_to_stop_means_now(app: Bartleby, conn: Conn, awaited: bool) -> None:
    started = threading.Event()

    def handle(message: Message) -> None:
        started.set()
        while True:
            time.sleep(0.005)

    async def handle_awaited(message: Message) -> None:
        started.set()
        await asyncio.sleep(60)

    app.handler("orders")(handle_awaited if awaited else handle)
    app.client.create_queue("orders")
    app.send("orders", 1)
    with working(app, grace=60) as running:
        assert started.wait(30)
        running.stop()
        running.thread.join(0.2)
        assert running.thread.is_alive()
        began = time.monotonic()
        counts = running.end()
    assert time.monotonic() - began < 20  # the grace would be a minute
    assert counts == {"released": 1}
    assert attempts_spent(conn) == 0


@BOTH
def test_a_handler_that_cannot_be_stopped_does_not_keep_its_message(app: Bartleby, conn: Conn, awaited: bool) -> None:
    started, go = threading.Event(), threading.Lock()
    go.acquire()

    def handle(message: Message) -> None:
        started.set()
        go.acquire()  # in C

    async def handle_awaited(message: Message) -> None:
        started.set()
        while True:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                if not go.locked():
                    raise

    app.handler("orders", retry={"max_attempts": 1})(handle_awaited if awaited else handle)
    app.client.create_queue("orders")
    app.send("orders", 1)
    with working(app, grace=0.1) as running:
        assert started.wait(30)
        running.stop()
        until(lambda: state(conn)[1] == 0)
        go.release()
        running.join()
    assert attempts_spent(conn) == 0
    assert state(conn)[3] == 0


def test_a_worker_that_is_stopped_while_it_sleeps_ends_at_once(app: Bartleby) -> None:
    app.handler("orders")(print)

    def took() -> float:
        with working(app, poll=30) as running:
            until(lambda: running.worker._shared.listener.listening)
            began = time.monotonic()
            running.end()
            return time.monotonic() - began

    # who does not wake up at once is waited for, for two seconds; one may be as slow on a machine that is busy
    assert any(took() < 2 for _ in range(3))


async def test_nobody_is_said_to_block_a_loop_that_has_no_one_to_show_its_life(dsn: str, told: Told) -> None:
    settings = Settings(dsn=dsn)
    holding = Holding(settings, Link(settings, "settles"), asyncio.Event())
    showing = asyncio.create_task(holding.show_life())
    await asyncio.sleep(0)
    assert holding._heartbeat.seen_alive <= time.monotonic()
    showing.cancel()
    await asyncio.wait([showing])
    with mock.patch.object(heartbeat, "_STUCK", 0.0):
        holding._heartbeat._watch_loop()
    assert not told.of("loop.blocked")


def test_a_worker_that_is_stopped_before_it_began_ends(app: Bartleby) -> None:
    app.handler("orders")(print)
    with working(app) as running:
        running.end()


def test_restarts_under_load_leave_every_attempt_count_unchanged(app: Bartleby, conn: Conn) -> None:
    seen: list[tuple[int, int]] = []

    @app.handler("orders", concurrency=4)
    async def handle(message: Message) -> None:
        seen.append((message.id, message.attempt))
        await asyncio.sleep(0.001)

    @app.handler("parcels", concurrency=4)
    def handle_here(message: Message) -> None:
        seen.append((message.id, message.attempt))
        time.sleep(0.001)

    for queue in ("orders", "parcels"):
        app.client.create_queue(queue)
        app.send_many(queue, [{"payload": number} for number in range(600)])
    done = 0
    for _ in range(8):
        with working(app, grace=5) as running:
            until(lambda: running.worker.counts["done"] > 50 or len(seen) == 1200)
            done += running.end()["done"]
    with working(app, until_idle=True) as running:
        done += running.join()["done"]
    assert done == 1200
    assert {attempt for _, attempt in seen} == {1}
    assert len(seen) == 1200
    assert row(conn, "select count(*) from bartleby.attempts") == 0


# As a process


@pytest.mark.parametrize("queue", ["sync", "coroutines"])
@pytest.mark.parametrize("order", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_with_zero(
    app: Bartleby, conn: Conn, shop: Path, *, dsn: str, queue: str, order: signal.Signals
) -> None:
    app.send_many(queue, [{"payload": "go"}] * 10)
    with Program(dsn, "shop:app", "--log", "json", cwd=shop) as program:
        until(lambda: notes(shop).count("begin") == 2)
        os.kill(program.pid, order)
        program.wait_for("finishing 2 running handlers")
        (shop / "go").touch()
        assert program.end() == 0
        events = program.events()
    assert notes(shop).count("begin") == notes(shop).count("end") == 2
    ready, leased, deferred, dead = state(conn, queue)
    assert (ready + deferred, leased, dead) == (8, 0, 0)
    assert attempts_spent(conn) == 0
    assert events[-1]["event"] == "worker.stopped"
    assert events[-1]["done"] == 2


@pytest.mark.parametrize("queue", ["sync", "coroutines"])
def test_a_second_signal_ends_it_now_and_releases_what_ran(
    app: Bartleby, conn: Conn, shop: Path, dsn: str, queue: str
) -> None:
    app.send(queue, 60)
    with Program(dsn, "shop:app", "--grace", "50", cwd=shop) as program:
        until(lambda: notes(shop) == ["begin"])
        program.term()
        program.wait_for("finishing 1 running handlers")  # two signals at once would be one
        assert program.process.poll() is None
        program.term()
        assert program.end() == 0
        assert "Traceback" not in program.text()
    assert state(conn, queue)[1] == 0
    assert attempts_spent(conn) == 0
    assert row(conn, "select count(*) from bartleby.attempts") == 0


def test_the_grace_of_the_process_is_kept(app: Bartleby, conn: Conn, shop: Path, dsn: str) -> None:
    app.send("sync", 60)
    with Program(dsn, "shop:app", "--grace", "0.3", cwd=shop) as program, Told.listening():
        until(lambda: notes(shop) == ["begin"])
        program.term()
        assert program.end() == 0
    assert state(conn, "sync")[1] == 0
    assert attempts_spent(conn) == 0
