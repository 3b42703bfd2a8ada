"""A handler: the function a user wrote, and everything that was said about it."""

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from bartleby.errors import InvalidHandler, InvalidPolicy
from bartleby.message import Message
from bartleby.policy import RetryPolicy
from bartleby.typed import converter

_MOST_AT_ONCE = 10_000
_PAYLOAD_AND_MESSAGE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """A function for the messages of a queue. What is None is left to the worker or to the policy of the queue."""

    queue: str
    function: Callable[..., Any]
    name: str
    awaited: bool
    batch: int | None
    convert: Callable[[Any], Any] | None
    with_message: bool
    retry: RetryPolicy
    terminal: tuple[type[BaseException], ...]
    timeout: float | None
    concurrency: int | None
    rate: float | None
    once: str | None
    lease: float | None

    @property
    def package(self) -> str:
        """The top package that the function is in; a callable of some other kind has none."""
        return (getattr(self.function, "__module__", None) or "").partition(".")[0]

    def arguments(self, message: Message) -> tuple[Any, ...]:
        """Return what the function is called with; an error if the payload does not fit."""
        if self.convert is None:
            return (message,)
        payload = self.convert(message.payload)
        return (payload, message) if self.with_message else (payload,)


def handler(
    queue: str,
    function: Callable[..., Any],
    *,
    batch: int | None = None,
    retry: RetryPolicy | Mapping[str, Any] | None = None,
    terminal: Sequence[type[BaseException]] = (),
    timeout: float | timedelta | None = None,
    concurrency: int | None = None,
    rate: float | None = None,
    once: bool | str = False,
    lease: float | timedelta | None = None,
) -> Handler:
    """Return a handler, or say what is wrong with it."""
    name = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    _check_number(name, "batch", batch)
    _check_number(name, "concurrency", concurrency)
    _check_exceptions(name, terminal)
    if inspect.isasyncgenfunction(function) or (batch is None and inspect.isgeneratorfunction(function)):
        raise InvalidHandler(f"{name}: it has a yield in it, so calling it runs nothing")
    convert, with_message = _parameters(function, name, in_batch=batch is not None)
    return Handler(
        queue=queue,
        function=function,
        name=name,
        awaited=inspect.iscoroutinefunction(function)
        or inspect.iscoroutinefunction(getattr(function, "__call__", None)),  # noqa: B004 - an instance with async __call__
        batch=batch,
        convert=convert,
        with_message=with_message,
        retry=_policy(name, retry),
        terminal=tuple(terminal),
        timeout=_positive(name, "timeout", timeout),
        concurrency=concurrency,
        rate=_positive(name, "rate", rate),
        once=_once(name, once),
        lease=_positive(name, "lease", lease),
    )


def check_name(queue: object) -> None:
    """Raise an error for what is no name of a queue: most likely the decorator's parentheses were forgotten."""
    if not isinstance(queue, str):
        raise InvalidHandler("@app.handler needs the name of its queue", hint='@app.handler("orders")')


def _parameters(function: Callable[..., Any], name: str, *, in_batch: bool) -> tuple[Callable[[Any], Any] | None, bool]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
        hints = typing.get_type_hints(_annotated(function))
    except (TypeError, ValueError, NameError) as error:
        raise InvalidHandler(f"{name}: its parameters cannot be read: {error}") from error
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    required = [each for each in parameters if each.default is each.empty and each.kind not in variadic]
    by_name = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
    if (
        all(each.kind in by_name for each in parameters)
        or len(required) > _PAYLOAD_AND_MESSAGE
        or any(each.kind in by_name for each in required)
    ):
        raise InvalidHandler(
            f"{name}: a handler takes a Message, or a payload and if wanted the Message",
            hint="def handle(message: Message), def handle(order: Order), def handle(order: Order, message: Message)",
        )
    first = hints.get(parameters[0].name, Message)
    if in_batch:
        first = _member(first, name, alone=len(required) == 1)
    if first in {Message, Any, inspect.Parameter.empty}:
        if len(required) > 1:
            raise InvalidHandler(
                f"{name}: of two parameters the payload comes first, annotated with its type, and then the Message",
                hint="def handle(order: Order, message: Message)",
            )
        return None, False
    second = hints.get(parameters[1].name) if len(parameters) > 1 else None
    try:
        return converter(first), len(required) > 1 or second is Message or Message in typing.get_args(second)
    except TypeError as error:
        raise InvalidHandler(f"{name}: no payload can be {first!r}: {error}") from None


def _annotated(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _member(annotation: Any, name: str, *, alone: bool) -> Any:  # noqa: ANN401 - annotations
    if not alone or (annotation is not Message and typing.get_origin(annotation) not in {list, Sequence}):
        raise InvalidHandler(
            f"{name}: a batch handler takes one list",
            hint="def handle(messages: list[Message]), def handle(orders: list[Order])",
        )
    return (typing.get_args(annotation) or (Message,))[0]


def _policy(name: str, value: RetryPolicy | Mapping[str, Any] | None) -> RetryPolicy:
    try:
        return RetryPolicy.of(value)
    except InvalidPolicy as error:
        raise InvalidPolicy(f"{name}: {error}", hint=error.hint) from None


def _once(name: str, value: object) -> str | None:
    if value is False:
        return None
    if value is True:
        return "id"
    if not isinstance(value, str) or value not in {"id", "key"}:
        raise InvalidHandler(f"{name}: once is {value!r}; expected True (by the message's id) or 'key'")
    return value


def _check_number(name: str, what: str, value: object) -> None:
    if value is not None and not (isinstance(value, int) and 1 <= value <= _MOST_AT_ONCE):
        raise InvalidHandler(f"{name}: {what} is {value!r}; expected a whole number from 1 to {_MOST_AT_ONCE}")


def _check_exceptions(name: str, listed: object) -> None:
    if not isinstance(listed, Sequence) or not all(
        isinstance(each, type) and issubclass(each, BaseException) for each in listed
    ):
        raise InvalidHandler(f"{name}: terminal lists exception classes, such as [KeyError]")


def _positive(name: str, what: str, value: object) -> float | None:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if seconds is None:
        return None
    if not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise InvalidHandler(f"{name}: {what} is {value!r}; expected a number above 0")
    return seconds
