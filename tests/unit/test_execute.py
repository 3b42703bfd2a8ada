"""The executor: delays, cancellation and timeouts. tests/worker has outcomes and batches."""

import asyncio
import random
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from bartleby import InvalidPayload, Message, Snooze, UndecodablePayload
from bartleby.execute import Executor, Failed, Released, Settlement
from bartleby.failure import Recorder
from bartleby.handlers import handler
from bartleby.message import LeaseId, MessageId, Position


def message(number: int = 1, *, attempt: int = 1) -> Message:
    at = datetime(2024, 1, 1, tzinfo=UTC)
    return Message(
        MessageId(number), "orders", LeaseId(7), Position(number * 10), attempt, "{}", None, None, None, at, solo=False
    )


def executor(function: Callable[..., Any], **options: Any) -> Executor:
    return Executor(handler("orders", function, **options), Recorder(), "1.0")


def run(function: Callable[..., Any], one: Message | None = None, **options: Any) -> Settlement:
    """Run a handler: a coroutine in a loop, a function here."""
    made = executor(function, **options)
    if made.handler.awaited:
        return asyncio.run(made.run(one or message()))
    return made.run_here(one or message())


def raising(error: Exception, *, awaited: bool) -> Callable[..., Any]:
    def fail(_: Message) -> None:
        raise error

    async def fail_awaited(one: Message) -> None:
        fail(one)

    return fail_awaited if awaited else fail


BOTH = pytest.mark.parametrize("awaited", [False, True], ids=["called", "awaited"])


@BOTH
def test_failure_has_the_delay_of_its_attempt_and_trouble_of_the_server_is_spread(awaited: bool) -> None:
    function = raising(ValueError("x"), awaited=awaited)
    delays = [
        run(function, message(attempt=attempt), retry={"schedule": [1, 10, 100]}).report.delay  # type: ignore[union-attr]
        for attempt in (1, 2, 3, 9)
    ]
    assert delays == [1, 10, 100, 100]
    assert run(function, retry={"max_attempts": 3}).report.delay is None  # type: ignore[union-attr]
    for error in (InvalidPayload("payload.id: no"), UndecodablePayload("no")):
        found = run(raising(error, awaited=awaited))
        assert isinstance(found, Failed)
        assert (found.report.reason, found.report.verdict, found.suspicion) == ("unacceptable", "dead", 0)
    random.seed(1)
    full = raising(psycopg.errors.DiskFull("x"), awaited=awaited)
    spread = [each.delay for _ in range(20) if isinstance(each := run(full), Released) and each.suspicion == 5]
    assert len(set(spread)) == 20
    assert 1 <= min(spread) < max(spread) <= 5


async def test_cancellation_is_not_a_failure_of_the_message() -> None:
    async def wait(_: Message) -> None:
        await asyncio.Event().wait()

    for made in (executor(wait).run(message()), executor(wait, timeout=3600).run(message())):
        task = asyncio.create_task(made)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_timeout_is_a_failure_that_shows_where_it_was_and_cancels_nothing_else() -> None:
    async def exits(_: Message) -> None:
        raise SystemExit(3)

    async def snoozes(_: Message) -> object:
        await asyncio.sleep(0)
        return Snooze(5)

    async def deeper() -> None:
        await asyncio.Event().wait()

    async def wait(_: Message) -> None:
        await deeper()

    found = await executor(wait, timeout=0.01).run(message())
    assert isinstance(found, Failed)
    assert found.report.error == "the handler took longer than 0.01 s"
    assert "deeper" in (found.report.traceback or "")
    assert found.suspicion == 5
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)
    found = await executor(exits, timeout=3600).run(message())
    assert isinstance(found, Failed)
    assert found.report.error_type == "SystemExit"
    assert isinstance(await executor(snoozes, timeout=3600).run(message()), Released)
