"""Failures on demand, and what became of them."""

import functools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self, cast

import psycopg

from bartleby.anatomy import type_name
from bartleby.app import Bartleby
from bartleby.client import Runner
from bartleby.errors import UnknownQueue
from bartleby.evidence import DeadLetter, term
from bartleby.message import Queue
from bartleby.operations import Operator
from bartleby.testing.clock import dsn_of

_SHOWN = 10

Error = BaseException | type[BaseException]


class Failures:
    """Failures that are still to come. In a `with`, those that did not come are forgotten at its end."""

    def __init__(self, error: Error, times: int) -> None:
        self.left = times
        self._error = error
        self._lock = threading.Lock()

    def take(self) -> Error | None:
        """Return the error if there is one left, and count it."""
        with self._lock:
            if not self.left:
                return None
            self.left -= 1
        # else the traceback of each time would be part of the next
        return self._error.with_traceback(None) if isinstance(self._error, BaseException) else self._error

    def forget(self) -> None:
        """Let no more of them come."""
        self.left = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()


def fail_next(app: Bartleby, queue: str, error: Error, times: int = 1) -> Failures:
    """Have the next runs of a queue's handler raise an error instead of doing anything.

    To be said before the worker starts. Said again, the new failures come after those before. A batch is one run.
    """
    [handler] = app.handlers_for([queue])
    planned: deque[Failures] | None = getattr(handler.function, "planned_failures", None)
    if planned is None:
        planned = deque()
        function = _failing(handler.function, planned, awaited=handler.awaited)
        app.handlers[queue] = replace(handler, function=function)
    failures = Failures(error, times)
    planned.append(failures)
    return failures


def _failing(function: Callable[..., Any], planned: deque[Failures], *, awaited: bool) -> Callable[..., Any]:
    def fail() -> None:
        for failures in tuple(planned):
            error = failures.take()
            if error is not None:
                raise error

    @functools.wraps(function)
    async def awaited_run(*arguments: object) -> object:
        fail()
        return await function(*arguments)

    @functools.wraps(function)
    def plain_run(*arguments: object) -> object:
        fail()
        return function(*arguments)

    run: Any = awaited_run if awaited else plain_run
    run.planned_failures = planned  # where the next call finds them
    return cast("Callable[..., Any]", run)


def assert_dead(
    app: Bartleby,
    queue: str,
    *,
    error_type: type[BaseException] | str | None = None,
    count: int | None = None,
    reason: str | None = None,
) -> list[DeadLetter]:
    """Assert that messages of a queue are dead, and return their letters, newest first.

    Without `count` one at least. `error_type` is an exception class or its name, with or without its module; `reason`
    is that of the letter: exhausted, terminal, unacceptable, crashed or expired.
    """
    __tracebackhide__ = True
    with psycopg.connect(dsn_of(app), autocommit=True) as connection:
        runner = Runner(connection)
        known = {each.name: each for each in runner.queues()}
        if queue not in known:
            raise UnknownQueue(f"there is no queue {queue!r}; there are: {', '.join(known) or 'none'}")
        letters = list(Operator(runner, "assert_dead").letters(term("queue", queue)))
    wanted = type_name(error_type) if isinstance(error_type, type) else error_type
    found = [
        letter
        for letter in letters
        if (wanted is None or _is(letter.error_type, wanted)) and (reason is None or letter.reason == reason)
    ]
    if len(found) == count or (count is None and found):
        return found
    raise AssertionError(_story(known[queue], letters, found, _wish(count, wanted, reason)))


def _is(error_type: str | None, wanted: str) -> bool:
    return error_type is not None and (error_type == wanted or error_type.endswith(f".{wanted}"))


def _wish(count: int | None, wanted: str | None, reason: str | None) -> str:
    number = "dead letters" if count is None else f"{count} dead letter{'' if count == 1 else 's'}"
    return number + (f" of {wanted}" if wanted else "") + (f" for reason {reason}" if reason else "")


def _story(queue: Queue, letters: list[DeadLetter], found: list[DeadLetter], wish: str) -> str:
    lines = [f"expected {wish} in queue {queue.name!r}, found {len(found) or 'none'}"]
    lines += [f"  {letter.message_id}: {_line(letter)}" for letter in letters[:_SHOWN]]
    if len(letters) > _SHOWN:
        lines.append(f"  … and {len(letters) - _SHOWN} more")
    lines.append(
        f"  the queue: {queue.ready} ready, {queue.leased} leased, {queue.deferred} deferred, {queue.dead} dead"
    )
    if queue.ready:
        lines.append("  ready messages have not been run: drain(app) runs them")
    if queue.deferred:
        lines.append(
            "  deferred messages wait for a retry or a delay: move the clock, or drain(app) in a test database"
        )
    if queue.breaker in {"open", "forced"}:
        lines.append(f"  its breaker is {queue.breaker}: no attempt is charged ({queue.breaker_cause})")
    return "\n".join(lines)


def _line(letter: DeadLetter) -> str:
    error = (letter.error or "").partition("\n")[0][:200]
    attempts = f"{letter.attempts} attempt{'' if letter.attempts == 1 else 's'}"
    return f"{letter.error_type or 'no error'}: {error} ({letter.reason} after {attempts})"
