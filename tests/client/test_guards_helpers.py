"""The parts beside the handlers: heartbeat, settler, breaker, supervisor. One fault in them once stopped everything."""

import asyncio
import subprocess
import sys
import threading
import time
from datetime import datetime
from enum import Enum
from typing import Any
from uuid import UUID

import psycopg
import pydantic
import pytest

from bartleby import AlreadyHandled, Bartleby, Message, heartbeat, supervisor
from bartleby.execute import Executor
from bartleby.holding import Holding
from bartleby.worker import Worker
from tests.kit.guards import BOTH, Conn, handled_by, make_solo
from tests.kit.worker import Told, drain, row, state, until, working


def test_the_heartbeat_outlives_whatever_happens_to_it(
    app: Bartleby, conn: Conn, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew, faults = heartbeat.Heartbeat._renew, [RuntimeError("cannot be"), MemoryError()]
    go, seen = threading.Event(), []

    async def faulty(self: heartbeat.Heartbeat, *arguments: Any) -> None:
        if faults and self._held:
            raise faults.pop()
        await renew(self, *arguments)

    @app.handler("orders", lease=4)
    def handle(message: Message) -> None:
        seen.append(message.attempt)
        go.wait(60)

    def lapses() -> Any:
        return row(conn, "select until from bartleby.lease where not isempty(pending)")

    monkeypatch.setattr(heartbeat.Heartbeat, "_renew", faulty)
    app.send("orders", 1)
    with working(app) as running:
        first = until(lapses)
        until(lambda: len(told.of("heartbeat.failed")) == 2)
        second = until(lambda: (found := lapses()) > first and found)
        until(lambda: lapses() > second)
        go.set()
        until(lambda: running.worker.counts["done"] == 1)
    assert seen == [1]
    assert not told.of("lease.lost")


def test_a_breaker_that_cannot_be_opened_costs_no_settlement(app: Bartleby, conn: Conn, told: Told) -> None:
    conn.execute(
        "create or replace function bartleby.open_breaker(p_queue text, p_cause text, p_over interval) returns boolean"
        " language plpgsql as $$ begin raise exception 'no' using errcode = 'XX000'; end $$"
    )

    def handle(message: Message) -> None:
        raise ConnectionError

    handled_by(app, handle, awaited=True, retry={"max_attempts": 1})
    app.send_many("orders", [{"payload": number} for number in range(20)])
    assert drain(app) == {"dead": 20}
    assert told.of("breaker.failed")
    assert not told.of("settlement.impossible")
    assert state(conn) == (0, 0, 0, 20)


def test_many_solo_messages_empty_the_process_once(app: Bartleby, conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[str] = []
    pause = Holding.pause

    def counted(self: Holding, why: str) -> None:
        pauses.append(why)
        pause(self, why)

    monkeypatch.setattr(Holding, "pause", counted)
    seen: list[bool] = []
    handled_by(app, lambda message: seen.append(message.solo), awaited=True)
    make_solo(app, conn, "orders", 30)
    app.client.resume_queue("orders")
    assert drain(app) == {"done": 30}
    assert seen == [True] * 30
    assert sum("alone" in why for why in pauses) <= 3


def test_a_thread_that_does_not_come_back_is_looked_at_once(
    app: Bartleby, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_until_idle_does_not_say_at_every_look_that_it_does_not_wait_for_a_breaker(app: Bartleby, told: Told) -> None:
    app.handler("orders")(print)
    tries: list[float] = []

    @app.handler("others", retry={"base": 0.3, "backoff": "fixed"})
    async def retried(message: Message) -> None:
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise ValueError

    app.client.create_queue("others")
    app.send("orders", 1)
    app.send("others", 1)
    app.client.force_breaker("orders", actor="me", reason="a test")
    assert drain(app) == {"retried": 2, "done": 1}
    # once, and perhaps again after each claim; it looked dozens of times
    assert 1 <= len(told.of("worker.gave_up")) < 10


# What an application hands over


def test_the_queues_of_a_worker_may_be_a_generator(app: Bartleby) -> None:
    seen: list[object] = []
    for queue in ("orders", "others"):
        app.handler(queue)(lambda message: seen.append(message.queue))
    app.client.create_queue("others")
    for queue in ("orders", "others"):
        app.send(queue, 1)
    assert drain(app, queues=(each for each in ["orders"])) == {"done": 1}
    assert seen == ["orders"]
    assert [each.queue for each in Worker(app, queues=iter(["others"]))._handlers] == ["others"]


@pytest.mark.parametrize("optional", [False, True])
def test_a_second_parameter_gets_the_message_though_it_has_a_default(app: Bartleby, optional: bool) -> None:
    seen: list[Message | None] = []

    def plain(order: int, message: Message = None) -> None:  # type: ignore[assignment]
        seen.append(message)

    def union(order: int, message: Message | None = None) -> None:
        seen.append(message)

    app.handler("orders")(union if optional else plain)
    sent = app.send("orders", 7)
    assert drain(app) == {"done": 1}
    assert [each and each.id for each in seen] == [sent]


class Kind(Enum):
    PARCEL = "parcel"


class Strict(pydantic.BaseModel, strict=True):
    id: UUID
    kind: Kind
    sent: datetime
    sizes: tuple[int, int]


def test_a_strict_model_takes_what_json_can_say(app: Bartleby, conn: Conn) -> None:
    seen: list[Strict] = []

    @app.handler("orders")
    def handle(parcel: Strict) -> None:
        seen.append(parcel)

    app.send("orders", {"id": str(UUID(int=1)), "kind": "parcel", "sent": "2026-01-02T03:04:05Z", "sizes": [1, 2]})
    app.send("orders", {"id": str(UUID(int=1)), "kind": "parcel", "sent": "2026-01-02T03:04:05Z", "sizes": ["1", 2]})
    assert drain(app) == {"done": 1, "dead": 1}
    assert (seen[0].kind, seen[0].sizes) == (Kind.PARCEL, (1, 2))
    assert row(conn, "select error from bartleby.dead_letters").startswith("payload.sizes[0]: ")


@BOTH
@pytest.mark.parametrize(
    ("leaves", "outcome"),
    [
        ([AlreadyHandled()], {"done": 1}),
        ([AlreadyHandled(), ExceptionGroup("inner", [AlreadyHandled()])], {"done": 1}),
        ([AlreadyHandled(), ValueError()], {"dead": 1}),
    ],
    ids=["one", "nested", "and another"],
)
def test_a_group_of_nothing_but_already_handled_is_done(
    app: Bartleby, *, awaited: bool, leaves: list[Exception], outcome: dict[str, int]
) -> None:
    def handle(message: Message) -> None:
        raise ExceptionGroup("of a task group", leaves)

    handled_by(app, handle, awaited=awaited, retry={"max_attempts": 1})
    app.send("orders", 1)
    assert drain(app) == outcome


def test_a_message_that_was_handled_is_done_though_a_task_of_the_handler_found_out(
    app: Bartleby, conn: Conn, dsn: str
) -> None:
    @app.handler("orders", retry={"max_attempts": 1})
    async def handle(message: Message) -> None:
        async def mark() -> None:
            async with await psycopg.AsyncConnection.connect(dsn) as mine:
                await app.amark_handled(message, mine)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(mark())

    sent = app.send("orders", 1)
    assert row(conn, "select bartleby.mark_handled('orders', 'orders', %s)", f"id:{sent}")
    assert drain(app) == {"done": 1}


def test_what_an_exception_says_forges_no_line_in_anybodys_log(app: Bartleby, told: Told) -> None:
    def handle(message: Message) -> None:
        raise ValueError("two\nlines and \x1b[31mcolour")

    handled_by(app, handle, awaited=False, retry={"max_attempts": 1})
    app.send("orders", 1)
    drain(app)
    (record,) = told.of("message.dead")
    assert record.getMessage().isprintable()


# Processes


def test_a_child_that_cannot_be_started_now_costs_no_other_its_life(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen, refusals = subprocess.Popen, [BlockingIOError("no more processes")]

    def scarce(*arguments: Any, **options: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return popen(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", scarce)
    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE", 0.1)
    made = supervisor.Supervisor([sys.executable, "-c", ""], {}, 2, 1.0)
    assert made.run() == 0
    assert len(told.of("worker.not_started")) == 1
