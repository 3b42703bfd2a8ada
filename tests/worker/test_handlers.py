"""Handlers as users write them: how they are called, what is refused, their limits and their timeouts."""

import contextvars
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import pydantic
import pytest

from bartleby import (
    Bartleby,
    BartlebyError,
    InvalidHandler,
    InvalidPolicy,
    Message,
    NoHandler,
    RetryPolicy,
    deadlines,
)
from bartleby.worker import Worker
from tests.kit.worker import (
    BOTH,
    LONG,
    Conn,
    Gate,
    drain,
    handler_of,
    numbered,
    present,
    state,
    time_out,
    until,
    working,
)


@dataclass
class Order:
    id: int


# Arguments


class Method:
    def __init__(self, seen: list[object]) -> None:
        self.seen = seen

    def handle(self, order: Order) -> None:
        self.seen.append(order)

    __call__ = handle


class AwaitedCall(Method):
    async def __call__(self, order: Order) -> None:  # type: ignore[override]
        self.seen.append(order)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return inner


def test_any_callable_takes_the_message_or_the_payload_by_its_type(app: Bartleby) -> None:
    seen: list[Any] = []

    def optional(order: Order, dry_run: bool = False) -> None:
        seen.append(order)

    def with_message(order: Order, message: Message) -> None:
        seen.append((order, message.key))

    async def with_default(order: Order, message: Message = None) -> None:  # type: ignore[assignment]
        seen.append((order, message.key))

    def with_union(order: Order, message: Message | None = None) -> None:
        seen.append((order, message and message.key))

    def take(message: Message) -> None:
        seen.append((message.queue, message.payload, message.headers, message.key, message.attempt))

    method = Method(seen)
    callables = (method.handle, method, AwaitedCall(seen), decorated(method.handle), optional)
    rows: list[tuple[Callable[..., Any], object]] = [(function, Order(5)) for function in callables]
    rows += [(function, (Order(5), "k")) for function in (with_message, with_default, with_union)]
    for function in (take, handler_of(take, awaited=True), functools.partial(lambda _, given: take(given), 1)):
        rows.append((function, (f"q{len(rows)}", {"id": 5}, {"a": 1}, "k", 1)))
    for number, (function, _) in enumerate(rows):
        assert app.handler(f"q{number}")(function) is function
        app.client.create_queue(f"q{number}")
        app.send_many(f"q{number}", [{"payload": Order(5), "headers": {"a": 1}, "key": "k"}])
    assert drain(app) == {"done": len(rows)}
    assert sorted(map(repr, seen)) == sorted(repr(expected) for _, expected in rows)


class Strict(pydantic.BaseModel, strict=True):
    id: UUID


@dataclass
class Tree:
    """Has exponentially many readings."""

    left: "Tree | dict[str, Tree] | int"


UNFIT: list[tuple[Any, object, str, object]] = [
    (Order, {"id": "x"}, "payload.id: expected int, not 'x'", Order(1)),
    (Strict, {"id": 1}, "payload.id: ", Strict(id=UUID(int=1))),
    (Tree, json.loads('{"left": ' * 100 + '"x"' + "}" * 100), "too many alternatives", Tree(1)),
]


@pytest.mark.seed("outbox-15", "outbox-16")
def test_unfit_payload_is_rejected_at_once_and_harms_no_other(app: Bartleby, conn: Conn) -> None:
    seen, sent = list[object](), list[int]()
    app.client.create_queue("bad")
    for number, (kind, payload, _, good) in enumerate(UNFIT):
        function = handler_of(seen.append, awaited=number % 2 == 0, takes=kind)
        app.handler(f"q{number}", retry={"max_attempts": 50})(function)
        app.client.create_queue(f"q{number}", {"max_attempts": 100, "invalid_to": "bad"})
        sent += app.send_many(f"q{number}", [{"payload": payload}])
        app.send(f"q{number}", good)
    assert drain(app) == {"dead": len(UNFIT), "done": len(UNFIT)}
    assert sorted(map(repr, seen)) == sorted(repr(good) for *_, good in UNFIT)
    assert state(conn, "bad")[0] == len(UNFIT)
    for message_id, (_, _, text, _) in zip(sent, UNFIT, strict=True):
        letter = present(app.client.dead_letter(message_id))
        assert (letter.reason, letter.attempts, text in (letter.error or "")) == ("unacceptable", 1, True), text
        assert (letter.error_type or "").endswith("InvalidPayload"), text
        (attempt,) = app.client.attempts(message_id)
        assert (attempt.outcome, attempt.traceback) == ("rejected", None), text


# Declarations


def ignore(message: Message) -> None: ...
def no_parameters() -> None: ...
def three(a: Order, b: Message, c: int) -> None: ...
def keyword_only(*, message: Message) -> None: ...
def untyped_pair(order, message) -> None: ...  # type: ignore[no-untyped-def] # noqa: ANN001
def of_bytes(order: bytes) -> None: ...
def unresolvable(order: "Nowhere") -> None: ...  # type: ignore[name-defined] # noqa: F821
def two_lists(orders: list[Order], messages: list[Message]) -> None: ...
def no_list(order: Order) -> None: ...


def generating(message: Message):  # type: ignore[no-untyped-def] # noqa: ANN201
    yield


async def generating_awaited(message: Message):  # type: ignore[no-untyped-def] # noqa: ANN201
    yield


REFUSED: list[tuple[Callable[..., Any], dict[str, Any], type[BartlebyError], str]] = [
    (no_parameters, {}, InvalidHandler, "no_parameters: a handler takes a Message"),
    (three, {}, InvalidHandler, "three: a handler takes a Message"),
    (keyword_only, {}, InvalidHandler, "keyword_only: a handler takes a Message"),
    (untyped_pair, {}, InvalidHandler, "the payload comes first"),
    (of_bytes, {}, InvalidHandler, "of_bytes: no payload can be"),
    (unresolvable, {}, InvalidHandler, "its parameters cannot be read"),
    (generating, {}, InvalidHandler, "it has a yield in it"),
    (generating_awaited, {}, InvalidHandler, "it has a yield in it"),
    (two_lists, {"batch": 10}, InvalidHandler, "a batch handler takes one list"),
    (no_list, {"batch": 10}, InvalidHandler, "a batch handler takes one list"),
    (ignore, {"batch": 0}, InvalidHandler, "batch is 0; expected a whole number from 1"),
    (ignore, {"concurrency": 10_001}, InvalidHandler, "10001"),
    (ignore, {"timeout": 0}, InvalidHandler, "timeout is 0; expected a number above 0"),
    (ignore, {"timeout": float("inf")}, InvalidHandler, "timeout"),
    (ignore, {"rate": 0}, InvalidHandler, "rate is 0"),
    (ignore, {"lease": 0}, InvalidHandler, "lease"),
    (ignore, {"once": "payload"}, InvalidHandler, "once is 'payload'; expected True"),
    (ignore, {"once": 1}, InvalidHandler, "once is 1"),
    (ignore, {"terminal": KeyError}, InvalidHandler, "terminal lists exception classes, such as [KeyError]"),
    (ignore, {"terminal": "KeyError"}, InvalidHandler, "terminal lists"),
    (ignore, {"retry": {"max_attempt": 3}}, InvalidPolicy, "ignore: unknown policy key: 'max_attempt'"),
    (ignore, {"retry": "often"}, InvalidPolicy, "a retry policy is a RetryPolicy or a mapping"),
]


def test_wrong_declarations_are_refused() -> None:
    app = Bartleby("postgresql://not.used/none")
    for function, options, error, word in REFUSED:
        with pytest.raises(error) as caught:
            app.handler("orders", **options)(function)
        assert word in str(caught.value), (function, options)
        assert caught.value.hint or error is InvalidHandler, options
    assert not app.handlers
    with pytest.raises(NoHandler, match="the application has no handlers") as none:
        app.handlers_for()
    assert "@app.handler" in (none.value.hint or "")


def test_handlers_are_found_by_queue() -> None:
    app = Bartleby("postgresql://not.used/none")
    retry = RetryPolicy(base=timedelta(seconds=2), backoff="fixed")
    app.handler("orders", timeout=timedelta(minutes=1), lease=timedelta(seconds=5), retry=retry)(ignore)
    app.handler("parcels")(ignore)
    handler = app.handlers["orders"]
    assert (handler.timeout, handler.lease, handler.retry.delay(1)) == (60, 5, 2)
    assert [each.queue for each in app.handlers_for(["parcels", "parcels"])] == ["parcels"]
    assert [each.queue for each in Worker(app, queues=iter(["parcels"]))._handlers] == ["parcels"]
    with pytest.raises(InvalidHandler, match="queue 'orders' already has the handler"):
        app.handler("orders")(ignore)
    with pytest.raises(NoHandler, match="for queue 'nope'; there are handlers for: orders, parcels") as missing:
        app.handlers_for(["orders", "nope"])
    assert '@app.handler("nope")' in (missing.value.hint or "")


def test_context_variables_do_not_leak_into_the_next_message(app: Bartleby) -> None:
    last, found = contextvars.ContextVar("last", default=0), list[int]()

    def look(given: Any) -> object:
        found.append(last.get())
        last.set(1)
        return [None] * len(given) if isinstance(given, list) else None

    for number in range(4):
        function = handler_of(look, awaited=number % 2 == 0, takes=Message if number < 2 else list[Message])
        app.handler(f"q{number}", concurrency=1, batch=None if number < 2 else 10)(function)
        app.client.create_queue(f"q{number}")
        app.send_many(f"q{number}", numbered(100))
    assert drain(app) == {"done": 400}
    assert set(found) == {0}


def test_concurrency_of_the_handler_takes_precedence_over_that_of_the_worker(app: Bartleby) -> None:
    for queue, concurrency in (("own", 3), ("all", None)):
        for awaited in (False, True):
            app.handler(f"{queue}{awaited:d}", concurrency=concurrency)(handler_of(print, awaited=awaited))
    with working(app, concurrency=2) as running:
        lanes = running.worker._shared.holding.lanes
        until(lambda: len(lanes) == 4)
        found = {queue: lane.concurrency for queue, lane in lanes.items()}
    assert found == {"own0": 3, "own1": 3, "all0": 2, "all1": 2}


@BOTH
@pytest.mark.parametrize(("stubborn", "batch"), [(False, None), (True, None), (False, 5)])
def test_handler_that_takes_too_long_is_stopped_and_its_messages_fail(
    app: Bartleby, conn: Conn, monkeypatch: pytest.MonkeyPatch, *, awaited: bool, stubborn: bool, batch: int | None
) -> None:
    """A stubborn one is left behind, and its result is ignored."""
    monkeypatch.setattr(deadlines, "_LAST_CHANCE", 0.1)
    gate, timeout = Gate(stubborn=stubborn), 0.1 if awaited else 3600
    app.handler("orders", timeout=timeout, batch=batch, retry={"max_attempts": 1})(gate.handler(awaited=awaited))
    sent = app.send_many("orders", numbered(batch or 1))
    with working(app) as running:
        gate.wait_for_start()
        if not awaited:  # a thread may need longer than any short timeout until it is in the handler
            time_out(running)
        until(lambda: running.worker.counts["dead"] == len(sent))
        assert stubborn or gate.cancelled.wait(LONG)
        gate.open()
        assert running.end() == {"dead": len(sent)}
    for each in sent:
        (attempt,) = app.client.attempts(each)
        assert (attempt.error_type, attempt.error) == ("TimeoutError", f"the handler took longer than {timeout} s")
        assert f"in {gate.handler(awaited=awaited).__qualname__}" in (attempt.traceback or "")
    assert state(conn) == (0, 0, 0, len(sent))
