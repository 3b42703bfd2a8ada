"""The executor by itself: every way a handler can end is a settlement of its message, and nothing gets past it."""

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
    moment = datetime(2024, 1, 1, tzinfo=UTC)
    return Message(
        MessageId(number),
        "orders",
        LeaseId(7),
        Position(number * 10),
        attempt,
        raw,
        None,
        None,
        None,
        moment,
        solo=False,
    )


def executor(function: Callable[..., Any], **options: Any) -> Executor:
    return Executor(handler("orders", function, **options), Recorder(), "1.0")


def run(function: Callable[..., Any], one: Message | None = None, **options: Any) -> Settlement:
    """Run a handler as a coroutine or here, as it is."""
    made = executor(function, **options)
    if made.handler.awaited:
        return asyncio.run(made.run(one or message()))
    return made.run_here(one or message())


def run_batch(function: Callable[..., Any], messages: Sequence[Message], **options: Any) -> list[Settlement]:
    made = executor(function, **{"batch": 100, **options})
    if made.handler.awaited:
        return asyncio.run(made.run_batch(messages))
    return made.run_batch_here(messages)


def saying(outcome: object, *, raised: bool, awaited: bool) -> Callable[..., Any]:
    def say(_: Message) -> object:
        if raised:
            raise outcome  # type: ignore[misc]
        return outcome

    async def say_awaited(one: Message) -> object:
        return say(one)

    return say_awaited if awaited else say


BOTH = pytest.mark.parametrize("awaited", [False, True])
WAYS = pytest.mark.parametrize("raised", [False, True])


@BOTH
@WAYS
def test_outcomes(raised: bool, awaited: bool) -> None:
    def said(outcome: object, **options: Any) -> Any:
        return run(saying(outcome, raised=raised, awaited=awaited), **options)

    snoozed = said(Snooze(5, "later"))
    assert isinstance(snoozed, Released)
    assert (snoozed.delay, snoozed.suspicion) == (5, 0)
    dead = said(Terminal("no"))
    assert isinstance(dead, Failed)
    assert (dead.report.verdict, dead.report.error, dead.suspicion) == ("dead", "no", 0)
    again = said(Retry(after=9))
    assert isinstance(again, Failed)
    assert (again.report.verdict, again.report.delay, again.suspicion) == (None, 9, 0)
    assert said(AlreadyHandled()) is None
    failed = said(ValueError("x"), retry={"max_attempts": 7, "give_up_after": 60, "backoff": "fixed", "base": 3})
    report = failed.report
    assert (report.position, report.error_type, report.error) == (10, "ValueError", "x")
    assert (report.max_attempts, report.give_up_after, report.delay) == (7, 60, 3)
    assert (report.worker_version, report.verdict, failed.suspicion) == ("1.0", None, 1)
    assert report.fingerprint


@BOTH
def test_the_delay_follows_the_attempt_and_without_a_curve_it_is_left_to_the_queue(awaited: bool) -> None:
    function = saying(ValueError("x"), raised=True, awaited=awaited)
    delays = [
        run(function, message(attempt=attempt), retry={"schedule": [1, 10, 100]}).report.delay  # type: ignore[union-attr]
        for attempt in (1, 2, 3, 9)
    ]
    assert delays == [1, 10, 100, 100]
    assert run(function, retry={"max_attempts": 3}).report.delay is None  # type: ignore[union-attr]


@BOTH
def test_trouble_of_the_server_is_spread(awaited: bool) -> None:
    random.seed(1)
    function = saying(psycopg.errors.DiskFull("x"), raised=True, awaited=awaited)
    found = [run(function) for _ in range(20)]
    delays = [each.delay for each in found if isinstance(each, Released) and each.suspicion == 5]
    assert len(set(delays)) == 20
    assert 1 <= min(delays) < max(delays) <= 5


@BOTH
@pytest.mark.parametrize("error", [InvalidPayload("payload.id: no"), UndecodablePayload("no")])
def test_what_does_not_validate_is_unacceptable(error: BaseException, awaited: bool) -> None:
    found = run(saying(error, raised=True, awaited=awaited))
    assert isinstance(found, Failed)
    assert (found.report.reason, found.report.verdict, found.suspicion) == ("unacceptable", "dead", 0)


def test_a_payload_that_does_not_fit_never_reaches_the_handler() -> None:
    def handle(order: Order) -> None:
        raise AssertionError

    found = run(handle, message(raw='{"id": "x"}'))
    assert isinstance(found, Failed)
    assert found.report.reason == "unacceptable"
    found = run(handle, message(raw="{"))
    assert isinstance(found, Failed)
    assert found.report.error_type.endswith("UndecodablePayload")


def test_the_interruption_of_a_thread_is_no_failure_of_its_message() -> None:
    def interrupted(_: Message) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        run(interrupted)
    with pytest.raises(Interrupted):
        run_batch(interrupted, [message()])


async def test_a_cancelled_handler_is_not_settled_here() -> None:
    async def wait(_: Message) -> None:
        await asyncio.sleep(60)

    for made in (executor(wait).run(message()), executor(wait, timeout=30).run(message())):
        task = asyncio.create_task(made)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_timeout_is_a_failure_that_shows_where_it_was() -> None:
    async def deeper() -> None:
        await asyncio.sleep(60)

    async def wait(_: Message) -> None:
        await deeper()

    found = await executor(wait, timeout=0.01).run(message())
    assert isinstance(found, Failed)
    assert found.report.error == "the handler took longer than 0.01 s"
    assert "deeper" in (found.report.traceback or "")
    assert found.suspicion == 5


async def test_a_timeout_leaves_no_cancellation_behind() -> None:
    async def wait(_: Message) -> None:
        await asyncio.sleep(60)

    await executor(wait, timeout=0.01).run(message())
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_a_handler_that_ends_in_time_has_its_result_and_its_errors() -> None:
    async def exits(_: Message) -> None:
        raise SystemExit(3)

    async def says(_: Message) -> object:
        await asyncio.sleep(0)
        return Snooze(5)

    found = await executor(exits, timeout=5).run(message())
    assert isinstance(found, Failed)
    assert found.report.error_type == "SystemExit"
    snoozed = await executor(says, timeout=5).run(message())
    assert isinstance(snoozed, Released)


# Batches


@BOTH
def test_a_batch_gives_each_message_its_own_report(awaited: bool) -> None:
    messages = [message(number, attempt=number) for number in (1, 2, 3)]
    function = saying(ValueError("x"), raised=True, awaited=awaited)
    found = run_batch(function, messages, retry={"schedule": [1, 10, 100]})
    assert [each.report.position for each in found if isinstance(each, Failed)] == [10, 20, 30]
    assert [each.report.delay for each in found if isinstance(each, Failed)] == [1, 10, 100]
    assert len({each.report.fingerprint for each in found if isinstance(each, Failed)}) == 1


@BOTH
def test_a_message_that_is_delivered_twice_in_one_batch_is_settled_twice(awaited: bool) -> None:
    """It cannot happen, and if it does no position may be left over."""
    one = message(1)
    found = run_batch(saying([Done(), Terminal()], raised=False, awaited=awaited), [one, one])
    assert len(found) == 2


@BOTH
@pytest.mark.parametrize("many", [0, 1, 5])
def test_a_batch_of_any_size(many: int, awaited: bool) -> None:
    messages = [message(number) for number in range(1, many + 1)]
    found = run_batch(saying([Done()] * many, raised=False, awaited=awaited), messages)
    assert found == [None] * many


@BOTH
def test_wrong_words_are_told_apart(awaited: bool) -> None:
    messages = [message(number) for number in range(1, 5)]
    found = run_batch(saying([5, "x"], raised=False, awaited=awaited), messages)
    texts = [each.report.error for each in found if isinstance(each, Failed)]
    assert ["(int)" in texts[0], "(str)" in texts[1]] == [True, True]
    assert all("said nothing" in text for text in texts[2:])
