"""Threads of `def` handlers: stuck, interrupted, and beside a Django that fails or is slow."""

import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bartleby import Bartleby, Message, threads
from bartleby.execute import Executor
from tests.kit.guards import Conn, endless, handled_by, make_solo
from tests.kit.worker import Told, drain, state, until, working


class Django(ModuleType):
    """What a worker sees of Django when the application has imported it."""

    def __init__(self, close_old_connections: Callable[[], None]) -> None:
        super().__init__("django.db")
        self.close_old_connections = close_old_connections
        self.connections = SimpleNamespace(close_all=close_old_connections)


def test_django_without_settings_does_not_affect_handlers(
    app: Bartleby, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("settings are not configured")

    monkeypatch.setitem(sys.modules, "django.db", Django(fail))
    handled_by(app, lambda _: None, awaited=False)
    app.send_many("orders", [{"payload": number} for number in range(20)])
    assert drain(app) == {"done": 20}
    assert state(conn) == (0, 0, 0, 0)
    until(lambda: not [each for each in threading.enumerate() if each.name == "bartleby-orders"])


def test_timeout_holds_though_django_is_slow_before_the_handler(app: Bartleby, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "django.db", Django(lambda: time.sleep(0.05)))
    cancelled = threading.Event()
    app.handler("orders", timeout=1, retry={"max_attempts": 1})(endless(cancelled, awaited=False))
    app.send("orders", "endless")
    with working(app) as running:
        until(lambda: running.worker.counts["dead"] == 1)
        assert cancelled.wait(30)


def test_stuck_thread_delays_neither_solo_messages_nor_the_end(app: Bartleby, conn: Conn) -> None:
    go, alone = threading.Event(), threading.Event()

    @app.handler("orders", timeout=0.1, retry={"max_attempts": 1}, concurrency=1)
    def stuck(message: Message) -> None:
        go.wait()  # no exception gets in there

    @app.handler("others")
    async def other(message: Message) -> None:
        alone.set()

    make_solo(app, conn, "others")
    app.send("orders", "stuck")
    try:
        with working(app, grace=600) as running:
            until(lambda: running.worker.counts["dead"] == 1)
            until(lambda: running.worker.running == 0)
            app.client.resume_queue("others")
            assert alone.wait(30)  # and does not wait for a lease of 60 s
            until(lambda: running.worker.counts["done"] == 1)
            running.end()
    finally:
        go.set()


def test_stuck_threads_are_replaced_once_and_logged(app: Bartleby, conn: Conn, told: Told) -> None:
    go, ran = threading.Event(), threading.Semaphore(0)

    @app.handler("orders", timeout=1, retry={"max_attempts": 1}, concurrency=2)  # so slow that it claims nothing ahead
    def handle(message: Message) -> None:
        if message.payload == "stuck":
            go.wait()
        ran.release()

    app.send_many("orders", [{"payload": "stuck"}] * 2)
    try:
        with working(app) as running:
            until(lambda: running.worker.counts["dead"] == 2)
            app.send_many("orders", [{"payload": "next"}] * 3)
            for _ in range(3):
                assert ran.acquire(timeout=30)
            until(lambda: len(told.of("handler.stuck")) == 2)
            app.send_many("orders", [{"payload": "stuck"}] * 2)
            until(lambda: running.worker.counts["dead"] == 4)
            until(lambda: len(told.of("handler.stuck")) == 4)
            assert sum(each.name == "bartleby-orders" for each in threading.enumerate()) == 4
            lane = running.worker._shared.holding.lanes["orders"]
            until(lambda: lane.stuck == lane.running == 4)
            go.set()
            until(lambda: (lane.running, lane.stuck) == (0, 0))
            app.send("orders", "last")
            until(lambda: running.worker.counts["done"] == 4)
    finally:
        go.set()


def test_solo_message_waits_for_a_thread_that_is_being_interrupted(
    app: Bartleby, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be blamed for what the other does while it ends."""
    go, left, beside = threading.Event(), threading.Event(), []

    @app.handler("orders", timeout=0.05, retry={"max_attempts": 1})
    def handle(message: Message) -> None:
        try:
            go.wait()
        finally:
            left.set()

    @app.handler("others")
    async def other(message: Message) -> None:
        beside.append(not left.is_set())

    monkeypatch.setattr(threads, "_UNWINDING", 60.0)
    make_solo(app, conn, "others")
    app.send("orders", 1)
    try:
        with working(app) as running:
            until(lambda: running.worker.counts["dead"] == 1)
            app.client.resume_queue("others")
            until(lambda: state(conn, "others")[1] == 1)
            assert not beside
            go.set()
            until(lambda: running.worker.counts["done"] == 1)
    finally:
        go.set()
    assert beside == [False]


def test_stuck_thread_is_judged_once(app: Bartleby, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[int] = []
    judge_all = Executor.judge_all

    def counted(self: Executor, messages: Any, error: BaseException) -> Any:
        judged.append(len(messages))
        return judge_all(self, messages, error)

    monkeypatch.setattr(Executor, "judge_all", counted)
    go = threading.Event()

    @app.handler("orders", timeout=0.05, batch=5, retry={"max_attempts": 1})
    def handle(messages: list[Message]) -> None:
        go.wait()

    app.send_many("orders", [{"payload": number} for number in range(5)])  # no storm yet
    try:
        with working(app) as running:
            until(lambda: running.worker.counts["dead"] == 5)
            until(lambda: told.of("handler.stuck"))  # a second, and a hundred looks, later
    finally:
        go.set()
    assert judged == [5]
