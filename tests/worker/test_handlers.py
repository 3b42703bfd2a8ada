"""Handlers as users write them: how they are called, what is refused, their limits and their timeouts."""

import asyncio
import contextvars
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from enum import Enum
from typing import Any, NotRequired, TypedDict
from uuid import UUID

import pydantic
import pytest

from bartleby import Bartleby, BartlebyError, InvalidHandler, InvalidPolicy, Message, NoHandler, RetryPolicy
from bartleby.worker import Worker
from tests.kit.worker import BOTH, LONG, Conn, Gate, drain, handler_of, numbered, present, row, state, until, working


@dataclass
class Customer:
    name: str


@dataclass
class Order:
    id: int
    customer: Customer | None = None


class Parcel(TypedDict):
    id: int
    note: NotRequired[str]


class Invoice(pydantic.BaseModel):
    id: int
    lines: list[str] = []


class Kind(Enum):
    PARCEL = "parcel"


class Strict(pydantic.BaseModel, strict=True):
    id: UUID
    kind: Kind
    sent: date
    sizes: tuple[int, int]


@dataclass
class Add:
    left: "Add | Mul | int"


@dataclass
class Mul:
    left: "Add | Mul | int"


# Arguments

STRICT = {"id": str(UUID(int=1)), "kind": "parcel", "sent": "2026-01-02", "sizes": [1, 2]}
TYPED: list[tuple[Any, object, object]] = [
    (Order, {"id": 1, "customer": {"name": "Ann"}, "more": 1}, Order(1, Customer("Ann"))),
    (Parcel, {"id": 2, "note": "x"}, {"id": 2, "note": "x"}),
    (Invoice, {"id": 3, "lines": ["a"]}, Invoice(id=3, lines=["a"])),
    (Order | None, None, None),
    (Strict, STRICT, Strict(id=UUID(int=1), kind=Kind.PARCEL, sent=date(2026, 1, 2), sizes=(1, 2))),
    (Order, Order(4, Customer("Bo")), Order(4, Customer("Bo"))),
    (Invoice, Invoice(id=6), Invoice(id=6)),
]


class Method:
    def __init__(self, seen: list[object]) -> None:
        self.seen = seen

    def handle(self, order: Order) -> None:
        self.seen.append(order)

    def __call__(self, order: Order) -> None:
        self.seen.append(order)


class AwaitedCall(Method):
    async def __call__(self, order: Order) -> None:  # type: ignore[override]
        self.seen.append(order)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return inner


def partly(take: Callable[[Message], None], message: Message) -> None:
    take(message)


def test_any_callable_takes_the_message_or_the_payload_by_its_type(app: Bartleby) -> None:
    seen: list[Any] = []

    def optional(order: Order, dry_run: bool = False) -> None:
        seen.append(order)

    def with_message(order: Order, message: Message) -> None:
        seen.append((order, message.payload["id"]))

    async def with_default(parcel: Parcel, message: Message = None) -> None:  # type: ignore[assignment]
        seen.append((parcel, message.payload["id"]))

    def with_union(order: Order, message: Message | None = None) -> None:
        seen.append((order, message and message.payload["id"]))

    def take(message: Message) -> None:
        seen.append((message.queue, message.payload, message.headers, message.key, message.attempt))

    rows: list[tuple[Callable[..., Any], object, object]] = [
        (handler_of(seen.append, awaited=number % 2 == 0, takes=kind), payload, expected)
        for number, (kind, payload, expected) in enumerate(TYPED)
    ]
    method = Method(seen)
    callables = (method.handle, method, AwaitedCall(seen), decorated(method.handle), optional)
    rows += [(function, {"id": 5}, Order(5)) for function in callables]
    rows += [(with_message, {"id": 7}, (Order(7), 7)), (with_default, {"id": 8}, ({"id": 8}, 8))]
    rows += [(with_union, {"id": 9}, (Order(9), 9))]
    for function in (take, handler_of(take, awaited=True), functools.partial(partly, take)):
        rows.append((function, {"id": 1}, (f"q{len(rows)}", {"id": 1}, {"a": 1}, "k", 1)))
    for number, (function, payload, _) in enumerate(rows):
        assert app.handler(f"q{number}")(function) is function
        app.client.create_queue(f"q{number}")
        app.send_many(f"q{number}", [{"payload": payload, "headers": {"a": 1}, "key": "k"}])
    assert drain(app) == {"done": len(rows)}
    assert sorted(map(repr, seen)) == sorted(repr(expected) for _, _, expected in rows)


# Payloads that do not fit

UNFIT: list[tuple[Any, object, str]] = [
    (Order, {"id": "x"}, "payload.id: expected int, not 'x'"),
    (Strict, {**STRICT, "sizes": ["1", 2]}, "payload.sizes[0]: "),
    # it has exponentially many readings
    (Add, functools.reduce(lambda inner, _: {"left": inner}, range(100), "no number"), "payload"),  # type: ignore[arg-type,return-value]
]


@pytest.mark.seed("outbox-15", "outbox-16")
def test_unfit_payload_is_rejected_at_once_and_harms_no_other(app: Bartleby, conn: Conn) -> None:
    seen: list[object] = []
    app.client.create_queue("bad")
    sent = []
    for number, (kind, payload, _) in enumerate(UNFIT):
        function = handler_of(seen.append, awaited=number % 2 == 0, takes=kind)
        app.handler(f"q{number}", retry={"max_attempts": 50})(function)
        app.client.create_queue(f"q{number}", {"max_attempts": 100, "invalid_to": "bad"})
        sent.append(app.send(f"q{number}", payload))
    app.send("q0", {"id": 1})
    assert drain(app) == {"dead": len(UNFIT), "done": 1}
    assert seen == [Order(1)]
    assert state(conn, "bad")[0] == len(UNFIT)
    for message_id, (_, _, word) in zip(sent, UNFIT, strict=True):
        letter = present(app.client.dead_letter(message_id))
        assert (letter.reason, letter.attempts) == ("unacceptable", 1), word
        assert (letter.error_type or "").endswith("InvalidPayload"), word
        assert word in (letter.error or "")
        (attempt,) = app.client.attempts(message_id)
        assert (attempt.outcome, attempt.traceback) == ("rejected", None), word


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
    (ignore, {"concurrency": "many"}, InvalidHandler, "concurrency is 'many'"),
    (ignore, {"timeout": 0}, InvalidHandler, "timeout is 0; expected a number above 0"),
    (ignore, {"timeout": float("inf")}, InvalidHandler, "timeout"),
    (ignore, {"rate": 0}, InvalidHandler, "rate is 0"),
    (ignore, {"lease": 0}, InvalidHandler, "lease"),
    (ignore, {"once": "payload"}, InvalidHandler, "once is 'payload'; expected True"),
    (ignore, {"once": 1}, InvalidHandler, "once is 1"),
    (ignore, {"terminal": KeyError}, InvalidHandler, "terminal lists exception classes, such as [KeyError]"),
    (ignore, {"terminal": "KeyError"}, InvalidHandler, "terminal lists"),
    (ignore, {"retry": {"max_attempt": 3}}, InvalidPolicy, "ignore: unknown policy key: 'max_attempt'"),
    (ignore, {"retry": {"max_attempts": 0}}, InvalidPolicy, 'bad value for policy key "max_attempts": 0'),
    (ignore, {"retry": {"lease": 60}}, InvalidPolicy, "unknown policy key: 'lease'"),
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


def outcomes(given: Any) -> object:
    return [None] * len(given) if isinstance(given, list) else None


def test_context_variables_do_not_leak_into_the_next_message(app: Bartleby) -> None:
    last, found = contextvars.ContextVar("last", default=0), list[int]()

    def look(given: Any) -> object:
        found.append(last.get())
        last.set(1)
        return outcomes(given)

    for number in range(4):
        function = handler_of(look, awaited=number % 2 == 0, takes=Message if number < 2 else list[Message])
        app.handler(f"q{number}", concurrency=1, batch=None if number < 2 else 10)(function)
        app.client.create_queue(f"q{number}")
        app.send_many(f"q{number}", numbered(100))
    assert drain(app) == {"done": 400}
    assert set(found) == {0}


def test_concurrency_of_the_handler_goes_before_that_of_the_worker(app: Bartleby) -> None:
    for awaited in (0, 1):
        app.handler(f"own{awaited}", concurrency=3)(handler_of(print, awaited=bool(awaited)))
        app.handler(f"all{awaited}")(handler_of(print, awaited=bool(awaited)))
    with working(app, concurrency=2) as running:
        lanes = running.worker._shared.holding.lanes
        until(lambda: len(lanes) == 4)
        assert {queue: lane.concurrency for queue, lane in lanes.items()} == {
            "own0": 3,
            "all0": 2,
            "own1": 3,
            "all1": 2,
        }


# Timeouts


@BOTH
@pytest.mark.parametrize("stubborn", [False, True])
def test_handler_that_takes_too_long_is_stopped_and_its_message_fails(
    app: Bartleby, conn: Conn, awaited: bool, stubborn: bool
) -> None:
    """A stubborn one is left behind, and its result is ignored."""
    gate = Gate(stubborn=stubborn)
    app.handler("orders", timeout=0.3, retry={"max_attempts": 1})(gate.handler(awaited=awaited))
    sent = app.send("orders", 1)
    with working(app) as running:
        until(lambda: running.worker.counts["dead"])
        assert stubborn or gate.cancelled.wait(LONG)
        gate.open()
        assert running.end() == {"dead": 1}
    (attempt,) = app.client.attempts(sent)
    assert (attempt.error_type, attempt.error) == ("TimeoutError", "the handler took longer than 0.3 s")
    assert ("asyncio.sleep(0.002)" if awaited else "time.sleep(0.002)") in (attempt.traceback or "")
    assert state(conn) == (0, 0, 0, 1)


@BOTH
def test_timeout_of_a_batch_fails_all_of_it(app: Bartleby, conn: Conn, awaited: bool) -> None:
    def handle(messages: list[Message]) -> None:
        while True:
            time.sleep(0.001)

    async def handle_awaited(messages: list[Message]) -> None:
        await asyncio.sleep(3600)

    app.handler("orders", batch=5, timeout=0.05, retry={"max_attempts": 1})(handle_awaited if awaited else handle)
    app.send_many("orders", numbered(5))
    assert drain(app) == {"dead": 5}
    failures = row(conn, "select array_agg(distinct error_type || ': ' || error) from bartleby.attempts")
    assert failures == ["TimeoutError: the handler took longer than 0.05 s"]
