"""The executor: every way in which a handler can end becomes a settlement of its message."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from bartleby import AlreadyHandled, Done, InvalidPayload, Message, Retry, Snooze, Terminal, UndecodablePayload
from bartleby.execute import Executor, Failed, Interrupted, Released, Settlement
from bartleby.failure import Recorder
from bartleby.handlers import handler
from bartleby.message import LeaseId, MessageId, Position


@dataclass
class Order:
    id: int


def message(number: int = 1, *, attempt: int = 1, raw: str = "{}") -> Message:
    at = datetime(2024, 1, 1, tzinfo=UTC)
    return Message(
        MessageId(number), "orders", LeaseId(7), Position(number * 10), attempt, raw, None, None, None, at, solo=False
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
def test_outcomes_have_the_same_effect_returned_and_raised(awaited: bool) -> None:
    for raised in (False, True):

        def settled(outcome: object, *, raised: bool = raised, **options: Any) -> Any:
            return run(ending(outcome, raised=raised, awaited=awaited), **options)

        snoozed = settled(Snooze(5, "later"))
        assert isinstance(snoozed, Released)
        assert (snoozed.delay, snoozed.suspicion) == (5, 0)
        dead = settled(Terminal("no"))
        assert isinstance(dead, Failed)
        assert (dead.report.verdict, dead.report.error, dead.suspicion) == ("dead", "no", 0)
        again = settled(Retry(after=9))
        assert isinstance(again, Failed)
        assert (again.report.verdict, again.report.delay, again.suspicion) == (None, 9, 0)
        assert settled(AlreadyHandled()) is None
        policy = {"max_attempts": 7, "give_up_after": 60, "backoff": "fixed", "base": 3}
        failed = settled(ValueError("x"), retry=policy)
        report = failed.report
        assert (report.position, report.error_type, report.error) == (10, "ValueError", "x")
        assert (report.max_attempts, report.give_up_after, report.delay) == (7, 60, 3)
        assert (report.worker_version, report.verdict, failed.suspicion) == ("1.0", None, 1)
        assert report.fingerprint


@BOTH
def test_failure_has_the_delay_of_its_attempt_and_an_unacceptable_payload_is_dead(awaited: bool) -> None:
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


@BOTH
def test_release_after_trouble_of_the_server_is_spread(awaited: bool) -> None:
    random.seed(1)
    function = ending(psycopg.errors.DiskFull("x"), raised=True, awaited=awaited)
    found = [run(function) for _ in range(20)]
    delays = [each.delay for each in found if isinstance(each, Released) and each.suspicion == 5]
    assert len(set(delays)) == 20
    assert 1 <= min(delays) < max(delays) <= 5


def test_payload_that_does_not_match_never_reaches_the_handler() -> None:
    def handle(order: Order) -> None:
        raise AssertionError

    found = run(handle, message(raw='{"id": "x"}'))
    assert isinstance(found, Failed)
    assert found.report.reason == "unacceptable"
    found = run(handle, message(raw="{"))
    assert isinstance(found, Failed)
    assert found.report.error_type.endswith("UndecodablePayload")


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


async def test_handler_that_ends_before_its_timeout_keeps_its_result_and_errors() -> None:
    async def exits(_: Message) -> None:
        raise SystemExit(3)

    async def snoozes(_: Message) -> object:
        await asyncio.sleep(0)
        return Snooze(5)

    found = await executor(exits, timeout=3600).run(message())
    assert isinstance(found, Failed)
    assert found.report.error_type == "SystemExit"
    snoozed = await executor(snoozes, timeout=3600).run(message())
    assert isinstance(snoozed, Released)


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


@BOTH
def test_wrong_results_of_a_batch_name_their_type(awaited: bool) -> None:
    messages = [message(number) for number in range(1, 5)]
    found = run_batch(ending([5, "x"], raised=False, awaited=awaited), messages)
    texts = [each.report.error for each in found if isinstance(each, Failed)]
    assert ["(int)" in texts[0], "(str)" in texts[1]] == [True, True]
    assert all("said nothing" in text for text in texts[2:])
