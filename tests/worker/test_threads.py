"""Threads of `def` handlers: stuck, interrupted, and beside a Django that fails."""

import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from bartleby import Bartleby, Message, threads
from bartleby.execute import Executor
from tests.kit.worker import Conn, Told, drain, handler_of, numbered, send_solo, state, until, working


def test_django_without_settings_does_not_affect_handlers(app: Bartleby, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails before the first handler of a thread, and when the thread ends."""
    monkeypatch.setitem(sys.modules, "django.db", ModuleType("without what a worker calls"))
    app.handler("orders")(handler_of(lambda _: None, awaited=False))
    app.send_many("orders", numbered(20))
    assert drain(app) == {"done": 20}
    until(lambda: not [each for each in threading.enumerate() if each.name == "bartleby-orders"])


def test_stuck_thread_delays_neither_solo_messages_nor_the_end(app: Bartleby, conn: Conn) -> None:
    go, alone = threading.Event(), threading.Event()

    @app.handler("orders", timeout=0.1, retry={"max_attempts": 1}, concurrency=1)
    def stuck(message: Message) -> None:
        go.wait()  # no exception gets in there

    app.handler("others")(handler_of(lambda _: alone.set(), awaited=True))
    send_solo(app, conn, "others")
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


def test_stuck_threads_are_replaced_once_and_logged(app: Bartleby, told: Told) -> None:
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
            app.send_many("orders", numbered(3))
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
    go, left, beside = threading.Event(), threading.Event(), list[bool]()

    @app.handler("orders", timeout=0.05, retry={"max_attempts": 1})
    def handle(message: Message) -> None:
        try:
            go.wait()
        finally:
            left.set()

    app.handler("others")(handler_of(lambda _: beside.append(not left.is_set()), awaited=True))
    monkeypatch.setattr(threads, "_UNWINDING", 60.0)
    send_solo(app, conn, "others")
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
    app.handler("orders", timeout=0.05, batch=5, retry={"max_attempts": 1})(
        handler_of(lambda _: go.wait(), awaited=False, takes=list[Message])
    )
    app.send_many("orders", numbered(5))  # no storm yet
    try:
        with working(app) as running:
            until(lambda: running.worker.counts["dead"] == 5)
            until(lambda: told.of("handler.stuck"))  # a second, and a hundred looks, later
    finally:
        go.set()
    assert judged == [5]
