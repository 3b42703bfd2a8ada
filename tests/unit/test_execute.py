"""The executor: delays, interruptions, timeouts and batches. tests/worker/test_outcomes.py has every outcome."""

import asyncio
import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from bartleby import Done, InvalidPayload, Message, Snooze, Terminal, UndecodablePayload
from bartleby.execute import Executor, Failed, Interrupted, Released, Settlement
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


def run_batch(function: Callable[..., Any], messages: Sequence[Message], **options: Any) -> list[Settlement]:
    made = executor(function, **{"batch": 100, **options})
    if made.handler.awaited:
        return asyncio.run(made.run_batch(messages))
    return made.run_batch_here(messages)


def ending(outcome: object, *, raised: bool, awaited: bool) -> Callable[..., Any]:
    def end(_: Message) -> object:
        if raised:
            raise outcome  # type: ignore[misc]
        return outcome

    async def end_awaited(one: Message) -> object:
        return end(one)

    return end_awaited if awaited else end


BOTH = pytest.mark.parametrize("awaited", [False, True], ids=["called", "awaited"])


@BOTH
def test_failure_has_the_delay_of_its_attempt_and_trouble_of_the_server_is_spread(awaited: bool) -> None:
    function = ending(ValueError("x"), raised=True, awaited=awaited)
    delays = [
        run(function, message(attempt=attempt), retry={"schedule": [1, 10, 100]}).report.delay  # type: ignore[union-attr]
        for attempt in (1, 2, 3, 9)
    ]
    assert delays == [1, 10, 100, 100]
    assert run(function, retry={"max_attempts": 3}).report.delay is None  # type: ignore[union-attr]
    for error in (InvalidPayload("payload.id: no"), UndecodablePayload("no")):
        found = run(ending(error, raised=True, awaited=awaited))
        assert isinstance(found, Failed)
        assert (found.report.reason, found.report.verdict, found.suspicion) == ("unacceptable", "dead", 0)
    random.seed(1)
    full = ending(psycopg.errors.DiskFull("x"), raised=True, awaited=awaited)
    spread = [each.delay for _ in range(20) if isinstance(each := run(full), Released) and each.suspicion == 5]
    assert len(set(spread)) == 20
    assert 1 <= min(spread) < max(spread) <= 5


async def test_interruption_and_cancellation_are_not_failures_of_the_message() -> None:
    def interrupted(_: Message) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        run(interrupted)
    with pytest.raises(Interrupted):
        run_batch(interrupted, [message()])

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


@BOTH
def test_batch_gives_each_message_its_own_settlement(awaited: bool) -> None:
    messages = [message(number, attempt=number) for number in (1, 2, 3)]
    function = ending(ValueError("x"), raised=True, awaited=awaited)
    found = run_batch(function, messages, retry={"schedule": [1, 10, 100]})
    assert [each.report.position for each in found if isinstance(each, Failed)] == [10, 20, 30]
    assert [each.report.delay for each in found if isinstance(each, Failed)] == [1, 10, 100]
    assert len({each.report.fingerprint for each in found if isinstance(each, Failed)}) == 1
    for count in (0, 1, 5):
        done = run_batch(ending([Done()] * count, raised=False, awaited=awaited), [message()] * count)
        assert done == [None] * count
    twice = run_batch(ending([Done(), Terminal()], raised=False, awaited=awaited), [message(), message()])
    assert len(twice) == 2, "every position of a batch is settled"
    wrong = run_batch(ending([5, "x"], raised=False, awaited=awaited), [message(number) for number in range(1, 5)])
    texts = [each.report.error for each in wrong if isinstance(each, Failed)]
    assert ["(int)" in texts[0], "(str)" in texts[1]] == [True, True]
    assert all("said nothing" in text for text in texts[2:])
