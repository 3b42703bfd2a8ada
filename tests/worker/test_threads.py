"""Threads of `def` handlers: stuck, interrupted, and beside a Django that fails."""

import sys
import threading
from types import ModuleType
from unittest import mock

import pytest

from bartleby import Bartleby, Message, threads
from bartleby.execute import Executor
from tests.kit.worker import LONG, CapturedLog, Conn, drain, handler_of, numbered, send_solo, state, until, working


def test_django_without_settings_does_not_affect_handlers(app: Bartleby, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails before the first handler of a thread, and when the thread ends."""
    monkeypatch.setitem(sys.modules, "django.db", ModuleType("without what a worker calls"))
    app.handler("orders")(handler_of(lambda _: None, awaited=False))
    app.send_many("orders", numbered(20))
    assert drain(app) == {"done": 20}
    until(lambda: not [each for each in threading.enumerate() if each.name == "bartleby-orders"])


def test_stuck_threads_are_judged_logged_and_replaced_once_and_not_waited_for(
    app: Bartleby, conn: Conn, log: CapturedLog
) -> None:
    go, ran = threading.Event(), threading.Semaphore(0)
    judge_all = mock.patch.object(Executor, "judge_all", autospec=True, side_effect=Executor.judge_all)

    @app.handler("orders", timeout=1, retry={"max_attempts": 1}, concurrency=2)  # so slow that it claims nothing ahead
    def handle(message: Message) -> None:
        if message.payload == "stuck":
            go.wait()
        ran.release()

    app.handler("others")(handler_of(lambda _: ran.release(), awaited=True))
    send_solo(app, conn, "others")
    app.send_many("orders", [{"payload": "stuck"}] * 2)
    try:
        with judge_all as judged, working(app) as running:
            until(lambda: running.worker.counts["dead"] == 2)
            lane = running.worker._shared.holding.lanes["orders"]
            app.send_many("orders", numbered(3))
            for _ in range(3):
                assert ran.acquire(timeout=30)
            until(lambda: len(log.of("handler.stuck")) == 2)
            app.send_many("orders", [{"payload": "stuck"}] * 2)
            until(lambda: running.worker.counts["dead"] == 4)
            until(lambda: len(log.of("handler.stuck")) == lane.stuck == lane.running == 4)  # after a hundred looks
            assert judged.call_count == 4
            assert sum(each.name == "bartleby-orders" for each in threading.enumerate()) == 4
            app.client.resume_queue("others")
            assert ran.acquire(timeout=30), "the message that has to run alone does not wait for a lease of 60 s"
            go.set()
            until(lambda: (lane.running, lane.stuck) == (0, 0))
            app.send("orders", "last")
            until(lambda: running.worker.counts["done"] == 5)
    finally:
        go.set()


def test_stuck_thread_does_not_delay_the_end(app: Bartleby) -> None:
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
            lane = running.worker._shared.holding.lanes["orders"]
            assert isinstance(lane, threads.ThreadLane)
            (run,) = lane._runs.values()
            run.began -= 3601
            until(lambda: running.worker.counts["dead"] == 1)
            app.client.resume_queue("others")
            until(lambda: state(conn, "others")[1] == 1)
            assert not beside
            go.set()
            until(lambda: running.worker.counts["done"] == 1)
    finally:
        go.set()
    assert beside == [False]
