"""Threads of `def` handlers: stuck, interrupted, and beside a Django that fails."""

import contextlib
import sys
import threading
from types import ModuleType
from unittest import mock

import pytest

from bartleby import Bartleby, Message, threads
from bartleby.execute import Executor
from tests.kit.worker import (
    LONG,
    CapturedLog,
    Conn,
    Running,
    drain,
    handler_of,
    numbered,
    send_solo,
    state,
    time_out,
    until,
    working,
)


def test_django_without_settings_does_not_affect_handlers(app: Bartleby, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails before the first handler of a thread, and when the thread ends."""
    monkeypatch.setitem(sys.modules, "django.db", ModuleType("without what a worker calls"))
    app.handler("orders")(handler_of(lambda _: None, awaited=False))
    app.send_many("orders", numbered(20))
    assert drain(app) == {"done": 20}
    until(lambda: not [each for each in threading.enumerate() if each.name == "bartleby-orders"])


class Stuck:
    """A handler that does not end for the payload `stuck`, though it is interrupted; it reports what has run."""

    def __init__(self) -> None:
        self._go = threading.Event()
        self.ran = threading.Semaphore(0)
        self._inside = threading.Semaphore(0)

    def handle(self, message: Message) -> None:
        if message.payload == "stuck":
            try:
                self._inside.release()
                self._go.wait()
            except BaseException:  # noqa: BLE001 - it may be interrupted before it waits
                self._go.wait()
        self.ran.release()

    def wait_for(self, count: int) -> None:
        """Wait until so many more have run."""
        for _ in range(count):
            assert self.ran.acquire(timeout=LONG)

    def time_out(self, running: Running, count: int) -> None:
        """Let the time be over for so many, once they do not end."""
        for _ in range(count):
            assert self._inside.acquire(timeout=LONG)
        time_out(running)

    def close(self) -> None:
        """Let all end."""
        self._go.set()


def test_stuck_threads_are_judged_logged_and_replaced_once_and_not_waited_for(
    app: Bartleby, conn: Conn, log: CapturedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, judge_all, tick = Stuck(), Executor.judge_all, threads.ThreadLane._tick
    earlier = set(threading.enumerate())
    monkeypatch.setattr(Executor, "judge_all", judged := mock.create_autospec(judge_all, side_effect=judge_all))
    monkeypatch.setattr(threads.ThreadLane, "_tick", looked := mock.create_autospec(tick, side_effect=tick))
    monkeypatch.setattr(threads, "_UNWINDING", 0.0)
    # its messages take so long that it claims nothing ahead
    app.handler("orders", timeout=3600, retry={"max_attempts": 1}, concurrency=2, lease=600)(stuck.handle)
    app.handler("others", lease=600)(handler_of(lambda _: stuck.ran.release(), awaited=True))
    send_solo(app, conn, "others")
    app.send_many("orders", [{"payload": "stuck"}] * 2)
    with contextlib.closing(stuck), working(app) as running:
        stuck.time_out(running, 2)
        until(lambda: running.worker.counts["dead"] == 2)
        lane = running.worker._shared.holding.lanes["orders"]
        app.send_many("orders", numbered(3))
        stuck.wait_for(3)
        until(lambda: len(log.of("handler.stuck")) == 2)
        app.send_many("orders", [{"payload": "stuck"}] * 2)
        stuck.time_out(running, 2)
        until(lambda: running.worker.counts["dead"] == 4)
        until(lambda: len(log.of("handler.stuck")) == lane.stuck == lane.running == 4)
        looks = looked.call_count
        until(lambda: looked.call_count > looks + 10)
        assert judged.call_count == 4
        assert sum(each.name == "bartleby-orders" for each in set(threading.enumerate()) - earlier) == 4
        app.client.resume_queue("others")
        stuck.wait_for(1)  # the message that has to run alone does not wait for a lease
        stuck.close()
        until(lambda: (lane.running, lane.stuck) == (0, 0))
        app.send("orders", "last")
        until(lambda: running.worker.counts["done"] == 5)


def test_stuck_thread_does_not_delay_the_end(app: Bartleby, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_UNWINDING", 0.0)
    go = threading.Event()
    app.handler("orders", timeout=0.1, retry={"max_attempts": 1})(handler_of(lambda _: go.wait(), awaited=False))
    app.send("orders", 1)
    try:
        with working(app, grace=600) as running:
            until(lambda: running.worker.counts["dead"] == 1)
            running.end()
    finally:
        go.set()


def test_solo_message_waits_for_a_thread_that_is_being_interrupted(
    app: Bartleby, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be blamed for what the other does while it ends."""
    go, inside, left, beside = threading.Event(), threading.Event(), threading.Event(), list[bool]()

    @app.handler("orders", timeout=3600, retry={"max_attempts": 1})
    def handle(message: Message) -> None:
        try:
            inside.set()
            go.wait()
        finally:
            left.set()

    app.handler("others")(handler_of(lambda _: beside.append(not left.is_set()), awaited=True))
    monkeypatch.setattr(threads, "_UNWINDING", 60.0)
    send_solo(app, conn, "others")
    app.send("orders", 1)
    try:
        with working(app) as running:
            assert inside.wait(LONG)
            time_out(running)
            until(lambda: running.worker.counts["dead"] == 1)
            app.client.resume_queue("others")
            until(lambda: state(conn, "others")[1] == 1)
            assert not beside
            go.set()
            until(lambda: running.worker.counts["done"] == 1)
    finally:
        go.set()
    assert beside == [False]
