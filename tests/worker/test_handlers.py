"""Handlers as users write them: what they are called with, what is refused, and what may be said about them."""

import asyncio
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NotRequired, TypedDict

import psycopg
import pydantic
import pytest

from bartleby import Bartleby, InvalidHandler, InvalidPolicy, Message, NoHandler, RetryPolicy, UndecodablePayload
from tests.kit.worker import drain, row, state, until, working

Conn = psycopg.Connection[tuple[Any, ...]]


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


@pytest.fixture
def app(dsn: str) -> Bartleby:
    return Bartleby(dsn)


# What a handler is called with


def test_a_plain_handler_takes_a_message(app: Bartleby, conn: Conn) -> None:
    seen: list[Message] = []

    @app.handler("orders")
    def handle(message: Message) -> None:
        seen.append(message)

    app.client.create_queue("orders")
    sent = app.send("orders", {"id": 1}, headers={"a": 1}, key="k", generation=None)
    assert drain(app) == {"done": 1}
    (message,) = seen
    assert (message.id, message.queue, message.payload) == (sent, "orders", {"id": 1})
    assert (message.headers, message.key, message.attempt) == ({"a": 1}, "k", 1)
    assert state(conn) == (0, 0, 0, 0)


def test_an_async_handler_takes_a_message(app: Bartleby, conn: Conn) -> None:
    seen: list[object] = []

    @app.handler("orders")
    async def handle(message: Message) -> None:
        await asyncio.sleep(0)
        seen.append(message.payload)

    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(50)])
    assert drain(app) == {"done": 50}
    assert sorted(seen, key=str) == sorted(range(50), key=str)
    assert state(conn) == (0, 0, 0, 0)


def test_without_an_annotation_it_is_the_message(app: Bartleby) -> None:
    seen: list[object] = []
    app.handler("orders")(seen.append)
    app.client.create_queue("orders")
    app.send("orders", 5)
    drain(app)
    assert [type(each) for each in seen] == [Message]


TYPED: list[tuple[Any, object, object]] = [
    (Order, {"id": 1, "customer": {"name": "Ann"}, "more": 1}, Order(1, Customer("Ann"))),
    (Parcel, {"id": 2, "note": "x"}, {"id": 2, "note": "x"}),
    (Invoice, {"id": 3, "lines": ["a"]}, Invoice(id=3, lines=["a"])),
    (dict, {"a": 1}, {"a": 1}),
    (dict[str, int], {"a": 1}, {"a": 1}),
    (list[Order], [{"id": 1}], [Order(1)]),
    (str, "hello", "hello"),
    (int, 5, 5),
    (Order | None, None, None),
]


def typed_handler(app: Bartleby, queue: str, kind: Any, seen: dict[str, object], *, awaited: bool) -> None:
    """Register a handler whose payload has this type."""

    def handle(payload: Any) -> None:
        seen[queue] = payload

    async def handle_awaited(payload: Any) -> None:
        seen[queue] = payload

    function = handle_awaited if awaited else handle
    function.__annotations__["payload"] = kind
    app.handler(queue, retry={"max_attempts": 50})(function)


@pytest.mark.parametrize("awaited", [False, True])
def test_a_handler_takes_the_payload_by_its_type(app: Bartleby, awaited: bool) -> None:
    seen: dict[str, object] = {}
    for number, (kind, payload, _) in enumerate(TYPED):
        typed_handler(app, f"q{number}", kind, seen, awaited=awaited)
        app.client.create_queue(f"q{number}")
        app.send(f"q{number}", payload)
    assert drain(app) == {"done": len(TYPED)}
    for number, (_, _, expected) in enumerate(TYPED):
        assert seen[f"q{number}"] == expected
        assert type(seen[f"q{number}"]) is type(expected)


def test_a_handler_may_take_payload_and_message(app: Bartleby) -> None:
    seen: list[tuple[Order, int]] = []

    @app.handler("orders")
    def handle(order: Order, message: Message) -> None:
        seen.append((order, message.id))

    @app.handler("parcels")
    async def handle_parcel(parcel: Parcel, message: Message) -> None:
        seen.append((Order(parcel["id"]), message.id))

    for queue in ("orders", "parcels"):
        app.client.create_queue(queue)
    sent = [app.send("orders", {"id": 7}), app.send("parcels", {"id": 8})]
    assert drain(app) == {"done": 2}
    assert sorted(seen, key=lambda each: each[1]) == [(Order(7), sent[0]), (Order(8), sent[1])]


class Method:
    def __init__(self, seen: list[object]) -> None:
        self.seen = seen

    def handle(self, order: Order) -> None:
        self.seen.append(order)

    def __call__(self, order: Order) -> None:
        self.seen.append(order)


class Awaitable:
    def __await__(self) -> Any:
        yield


class AwaitedCall:
    def __init__(self, seen: list[object]) -> None:
        self.seen = seen

    async def __call__(self, order: Order) -> None:
        self.seen.append(order)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return inner


def partly(seen: list[object], order: Order) -> None:
    seen.append(order)


def test_a_handler_may_be_any_callable(app: Bartleby) -> None:
    seen: list[object] = []

    def plain(order: Order) -> None:
        seen.append(order)

    def optional(order: Order, dry_run: bool = False) -> None:
        seen.append(order)

    functions: list[Callable[..., Any]] = [
        Method(seen).handle,
        Method(seen),
        AwaitedCall(seen),
        decorated(plain),
        functools.partial(partly, seen),
        optional,
    ]
    for number, function in enumerate(functions):
        app.handler(f"q{number}")(function)
        app.client.create_queue(f"q{number}")
        app.send(f"q{number}", {"id": number})
    assert drain(app) == {"done": len(functions)}
    assert sorted(seen, key=str) == [Order(number) for number in range(len(functions))]


def test_the_decorator_gives_the_function_back(app: Bartleby) -> None:
    def handle(message: Message) -> None: ...

    assert app.handler("orders")(handle) is handle


# Payloads that do not fit


@pytest.fixture
def digits_of_python() -> Iterator[None]:
    """A Python that decodes shorter numbers than the core takes."""
    before = sys.get_int_max_str_digits()
    yield
    sys.set_int_max_str_digits(before)


UNFIT: list[tuple[Any, object, str]] = [
    (Order, {"id": "x"}, "payload.id: expected int, not 'x'"),
    (Order, {"id": 1, "customer": {"name": 5}}, "payload.customer"),
    (Order, [1], "payload"),
    (Parcel, {"note": "x"}, "id"),
    (Invoice, {"id": "x"}, "id"),
    (list[int], {"a": 1}, "payload"),
]


@pytest.mark.parametrize("awaited", [False, True])
def test_a_payload_that_does_not_fit_is_unacceptable_and_never_retried(
    app: Bartleby, conn: Conn, awaited: bool
) -> None:
    seen: dict[str, object] = {}
    sent: dict[str, int] = {}
    app.client.create_queue("bad")
    for number, (kind, payload, _) in enumerate(UNFIT):
        queue = f"q{number}"
        typed_handler(app, queue, kind, seen, awaited=awaited)
        app.client.create_queue(queue, {"max_attempts": 100, "invalid_to": "bad"})
        sent[queue] = app.send(queue, payload, headers={"trace": queue})
    assert drain(app) == {"dead": len(UNFIT)}
    assert not seen
    assert state(conn, "bad")[0] == len(UNFIT)
    for number, (_, payload, says) in enumerate(UNFIT):
        unacceptable(app, conn, f"q{number}", sent[f"q{number}"], payload, says)


def unacceptable(app: Bartleby, conn: Conn, queue: str, sent: int, payload: object, says: str) -> None:  # noqa: PLR0917
    letter = app.client.dead_letter(sent)
    assert letter is not None
    assert (letter.reason, letter.status, letter.attempts) == ("unacceptable", "dead", 1)
    assert (letter.error_type or "").endswith("InvalidPayload")
    assert says in (letter.error or "")
    (attempt,) = app.client.attempts(sent)
    assert (attempt.outcome, attempt.verdict) == ("rejected", "dead")
    assert "does not validate" in (attempt.rule or "")
    query = "select payload, headers from bartleby.messages where queue = 'bad' and headers ->> 'trace' = %s"
    copy, headers = row(conn, query, queue)
    assert copy == payload
    assert "rejection_timestamp" in headers
    assert (headers["original_queue"], headers["rejection_reason"]) == (queue, "unacceptable")


def test_without_invalid_to_it_goes_to_dead_letter_to(app: Bartleby, conn: Conn) -> None:
    @app.handler("orders")
    def handle(order: Order) -> None: ...

    app.client.create_queue("graves")
    app.client.create_queue("orders", {"dead_letter_to": "graves"})
    app.send("orders", "no order")
    assert drain(app) == {"dead": 1}
    assert state(conn) == (0, 0, 0, 1)
    assert state(conn, "graves")[0] == 1


def test_a_bad_payload_spoils_no_other(app: Bartleby, conn: Conn) -> None:
    seen: list[int] = []

    @app.handler("orders")
    async def handle(order: Order) -> None:
        seen.append(order.id)

    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": {"id": number if number % 5 else "x"}} for number in range(100)])
    assert drain(app) == {"done": 80, "dead": 20}
    assert sorted(seen) == [number for number in range(100) if number % 5]
    assert state(conn) == (0, 0, 0, 20)


def test_a_payload_that_cannot_be_decoded_is_unacceptable(app: Bartleby, digits_of_python: None) -> None:
    @app.handler("orders")
    def handle(message: Message) -> None:
        assert message.payload

    app.client.create_queue("orders")
    sent = app.send("orders", 10**1000 - 1)
    app.send("orders", 1)
    sys.set_int_max_str_digits(640)
    assert drain(app) == {"done": 1, "dead": 1}
    letter = app.client.dead_letter(sent)
    assert letter is not None
    assert letter.reason == "unacceptable"
    assert (letter.error_type or "").endswith(UndecodablePayload.__name__)


def test_a_model_that_a_handler_validates_itself_is_terminal_too(app: Bartleby) -> None:
    @app.handler("orders")
    def handle(message: Message) -> None:
        Invoice.model_validate({"id": "x"})

    app.client.create_queue("orders")
    sent = app.send("orders", 1)
    assert drain(app) == {"dead": 1}
    (attempt,) = app.client.attempts(sent)
    assert "ValidationError is terminal" in (attempt.rule or "")
    letter = app.client.dead_letter(sent)
    assert letter is not None
    assert letter.reason == "terminal"


# What cannot be a handler


def ignore(message: Message) -> None: ...


def no_parameters() -> None: ...
def three(a: Order, b: Message, c: int) -> None: ...
def keyword_only(*, message: Message) -> None: ...
def only_keywords(**named: object) -> None: ...
def untyped_pair(order, message) -> None: ...  # type: ignore[no-untyped-def] # noqa: ANN001
def of_bytes(order: bytes) -> None: ...
def unresolvable(order: "Nowhere") -> None: ...  # type: ignore[name-defined] # noqa: F821


def generating(message: Message):  # type: ignore[no-untyped-def] # noqa: ANN201
    yield


async def generating_awaited(message: Message):  # type: ignore[no-untyped-def] # noqa: ANN201
    yield


@pytest.mark.parametrize(
    "function",
    [
        no_parameters,
        three,
        keyword_only,
        only_keywords,
        untyped_pair,
        of_bytes,
        unresolvable,
        generating,
        generating_awaited,
    ],
    ids=lambda function: str(function.__name__),
)
def test_what_cannot_be_called_with_a_message_is_refused_at_once(app: Bartleby, function: Any) -> None:
    with pytest.raises(InvalidHandler, match=function.__name__) as caught:
        app.handler("orders")(function)
    assert not app.handlers
    assert "handler" in str(caught.value) or "payload" in str(caught.value)


@pytest.mark.parametrize("kind", ["two parameters", "no list"])
def test_a_batch_handler_takes_one_list(app: Bartleby, kind: str) -> None:
    def two(orders: list[Order], messages: list[Message]) -> None: ...
    def no_list(order: Order) -> None: ...

    with pytest.raises(InvalidHandler, match="list"):
        app.handler("orders", batch=10)(two if kind == "two parameters" else no_list)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch": 0}, "batch is 0; expected a whole number from 1"),
        ({"batch": 1.5}, r"batch is 1\.5"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"concurrency": 10_001}, "10001"),
        ({"concurrency": "many"}, "concurrency is 'many'"),
        ({"timeout": 0}, "timeout is 0; expected a number above 0"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": float("inf")}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"timeout": "5"}, "timeout is '5'"),
        ({"rate": 0}, "rate is 0"),
        ({"lease": 0}, "lease"),
        ({"once": "payload"}, "once is 'payload'; expected True"),
        ({"once": []}, "once"),
        ({"once": 1}, "once is 1"),
        ({"terminal": KeyError}, r"terminal lists exception classes, such as \[KeyError\]"),
        ({"terminal": [5]}, "terminal lists"),
        ({"terminal": "KeyError"}, "terminal lists"),
    ],
)
def test_a_bad_option_is_named(app: Bartleby, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidHandler, match=says):
        app.handler("orders", **options)(ignore)


@pytest.mark.parametrize(
    ("retry", "says"),
    [
        ({"max_attempt": 3}, "unknown policy key: 'max_attempt'"),
        ({"max_attempts": 0}, 'bad value for policy key "max_attempts": 0'),
        ({"backoff": "linear"}, 'bad value for policy key "backoff"'),
        ({"base": -1}, "base"),
        ({"schedule": []}, "schedule"),
        ({"lease": 60}, "unknown policy key: 'lease'"),
        ("often", "a retry policy is a RetryPolicy or a mapping"),
    ],
)
def test_a_bad_retry_policy_is_named_with_its_remedy(app: Bartleby, retry: Any, says: str) -> None:
    with pytest.raises(InvalidPolicy, match=says) as caught:
        app.handler("orders", retry=retry)(ignore)
    assert caught.value.hint


def test_a_queue_has_one_handler(app: Bartleby) -> None:
    app.handler("orders")(print)
    with pytest.raises(InvalidHandler, match="queue 'orders' already has the handler"):
        app.handler("orders")(print)


def test_an_app_without_handlers_names_the_remedy(app: Bartleby) -> None:
    with pytest.raises(NoHandler, match="the application has no handlers") as caught:
        app.handlers_for()
    assert "@app.handler" in (caught.value.hint or "")


def test_a_queue_without_a_handler_names_the_remedy_and_what_there_is(app: Bartleby) -> None:
    app.handler("orders")(print)
    app.handler("parcels")(print)
    with pytest.raises(
        NoHandler, match="no handler for queue 'nope'; there are handlers for: orders, parcels"
    ) as caught:
        app.handlers_for(["orders", "nope"])
    assert '@app.handler("nope")' in (caught.value.hint or "")
    assert [each.queue for each in app.handlers_for(["parcels", "parcels"])] == ["parcels"]


def test_durations_may_be_timedeltas(app: Bartleby) -> None:
    retry = RetryPolicy(base=timedelta(seconds=2), backoff="fixed")
    app.handler("orders", timeout=timedelta(minutes=1), lease=timedelta(seconds=5), retry=retry)(print)
    handler = app.handlers["orders"]
    assert (handler.timeout, handler.lease, handler.retry.delay(1)) == (60, 5, 2)


@pytest.mark.parametrize("kind", ["generator", "async generator", "awaitable"])
def test_a_function_that_returns_something_to_be_run_is_not_done(app: Bartleby, kind: str) -> None:
    def generate() -> Any:
        yield

    async def generate_awaited() -> Any:
        yield

    makers: dict[str, Callable[[], object]] = {
        "generator": generate,
        "async generator": generate_awaited,
        "awaitable": Awaitable,
    }
    made = makers[kind]
    app.handler("orders", retry={"max_attempts": 1})(lambda _: made())
    app.client.create_queue("orders")
    app.send("orders", 1)
    assert drain(app) == {"dead": 1}


def test_a_plain_function_that_returns_a_coroutine_is_an_error_that_names_the_remedy(app: Bartleby) -> None:
    async def handle(message: Message) -> None: ...

    def careless(message: Message) -> object:
        return handle(message)

    app.handler("orders", retry={"max_attempts": 1})(careless)
    app.client.create_queue("orders")
    sent = app.send("orders", 1)
    assert drain(app) == {"dead": 1}
    letter = app.client.dead_letter(sent)
    assert letter is not None
    assert "declare it with async def" in (letter.error or "")


# Limits of a handler


@pytest.mark.parametrize("awaited", [False, True])
def test_concurrency_bounds_what_runs_at_once(app: Bartleby, conn: Conn, awaited: bool) -> None:
    lock, running, most = threading.Lock(), 0, 0
    full = threading.Event()

    def enter() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 3:
                full.set()

    def leave() -> None:
        nonlocal running
        with lock:
            running -= 1

    def handle(message: Message) -> None:
        enter()
        full.wait(5)
        time.sleep(0.002)
        leave()

    async def handle_awaited(message: Message) -> None:
        enter()
        while not full.is_set():  # noqa: ASYNC110 - threads set it too
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.002)
        leave()

    app.handler("orders", concurrency=3)(handle_awaited if awaited else handle)
    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(60)])
    assert drain(app, concurrency=50) == {"done": 60}
    assert most == 3


@pytest.mark.parametrize("awaited", [False, True])
def test_the_workers_concurrency_counts_where_the_handler_names_none(app: Bartleby, awaited: bool) -> None:
    lock, running, most = threading.Lock(), 0, 0

    def handle(message: Message) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.005)
        with lock:
            running -= 1

    async def handle_awaited(message: Message) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1

    app.handler("orders")(handle_awaited if awaited else handle)
    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(20)])
    assert drain(app, concurrency=2) == {"done": 20}
    assert most == 2


@pytest.mark.parametrize("awaited", [False, True])
def test_a_rate_is_kept(app: Bartleby, awaited: bool) -> None:
    starts: list[float] = []

    def handle(message: Message) -> None:
        starts.append(time.monotonic())

    async def handle_awaited(message: Message) -> None:
        starts.append(time.monotonic())

    app.handler("orders", rate=40)(handle_awaited if awaited else handle)
    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(41)])
    assert drain(app) == {"done": 41}
    starts.sort()
    took = starts[-1] - starts[0]
    assert took >= 0.93, f"41 starts in {took:.2f} s"
    # within any quarter of a second no more than ten, one that was saved up, and one for the clock
    assert max(sum(start <= each < start + 0.25 for each in starts) for start in starts) <= 12


@pytest.mark.parametrize("awaited", [False, True])
def test_the_rate_is_reached_when_handlers_are_slower_than_it(app: Bartleby, awaited: bool) -> None:
    starts: list[float] = []

    def handle(message: Message) -> None:
        starts.append(time.monotonic())
        time.sleep(0.1)

    async def handle_awaited(message: Message) -> None:
        starts.append(time.monotonic())
        await asyncio.sleep(0.1)

    app.handler("orders", rate=50)(handle_awaited if awaited else handle)
    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(50)])
    assert drain(app) == {"done": 50}
    assert max(starts) - min(starts) < 4.5, "one after another it would take 5 s"


# Timeouts


def failure_of(app: Bartleby, message_id: int) -> tuple[str | None, str | None, str | None]:
    (attempt,) = app.client.attempts(message_id)
    return attempt.error_type, attempt.error, attempt.traceback


def test_an_async_handler_that_takes_too_long_is_cancelled_and_its_message_failed(app: Bartleby) -> None:
    cancelled = threading.Event()

    @app.handler("orders", timeout=0.3, retry={"max_attempts": 1})
    async def handle(message: Message) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    app.client.create_queue("orders")
    sent = app.send("orders", 1)
    assert drain(app) == {"dead": 1}
    assert cancelled.is_set()
    kind, text, trace = failure_of(app, sent)
    assert (kind, text) == ("TimeoutError", "the handler took longer than 0.3 s")
    assert "asyncio.sleep(60)" in (trace or "")


def test_a_sync_handler_that_takes_too_long_is_interrupted_and_its_message_failed(app: Bartleby) -> None:
    interrupted = threading.Event()

    @app.handler("orders", timeout=0.5, retry={"max_attempts": 1})
    def handle(message: Message) -> None:
        try:
            while True:
                time.sleep(0.001)
        finally:
            interrupted.set()

    app.client.create_queue("orders")
    sent = app.send("orders", 1)
    assert drain(app) == {"dead": 1}
    assert interrupted.wait(30)
    kind, text, trace = failure_of(app, sent)
    assert (kind, text) == ("TimeoutError", "the handler took longer than 0.5 s")
    assert "time.sleep(0.001)" in (trace or "")


def test_a_sync_handler_that_blocks_in_c_is_failed_at_once_and_its_result_refused(app: Bartleby, conn: Conn) -> None:
    release, over = threading.Lock(), threading.Event()
    release.acquire()

    @app.handler("orders", timeout=1, retry={"max_attempts": 1}, concurrency=2)
    def handle(message: Message) -> None:
        if message.payload == "block":
            release.acquire()  # in C, without a look at anything
            over.set()

    app.client.create_queue("orders")
    sent = app.send("orders", "block")
    with working(app) as running:
        until(lambda: running.worker.counts["dead"])
        app.send("orders", "quick")  # the other thread goes on
        until(lambda: running.worker.counts["done"])
        release.release()
        running.end()
    assert running.worker.counts == {"dead": 1, "done": 1}
    assert failure_of(app, sent)[0] == "TimeoutError"
    assert state(conn) == (0, 0, 0, 1)


@pytest.mark.parametrize("awaited", [False, True])
def test_a_handler_that_swallows_its_end_still_times_out(app: Bartleby, conn: Conn, awaited: bool) -> None:
    enough = threading.Event()

    def handle(message: Message) -> None:
        while not enough.is_set():
            try:
                while not enough.is_set():
                    time.sleep(0.001)
            except BaseException:  # noqa: BLE001, S110 - the point
                pass

    async def handle_awaited(message: Message) -> None:
        while not enough.is_set():
            try:
                while not enough.is_set():  # noqa: ASYNC110 - another thread sets it
                    await asyncio.sleep(0.001)
            except BaseException:  # noqa: BLE001, S110 - the point
                pass

    app.handler("orders", timeout=0.05, retry={"max_attempts": 1})(handle_awaited if awaited else handle)
    app.client.create_queue("orders")
    app.send("orders", 1)
    with working(app) as running:
        try:
            until(lambda: running.worker.counts["dead"])
        finally:
            enough.set()
        running.end()
    assert running.worker.counts == {"dead": 1}
    assert state(conn) == (0, 0, 0, 1)


def test_a_timeout_reaches_the_right_message_and_no_later_one(app: Bartleby, conn: Conn) -> None:
    """The exception raised in a thread from outside must not hit what the thread does next."""

    @app.handler("orders", timeout=1, retry={"max_attempts": 1}, concurrency=2)
    def handle(message: Message) -> None:
        if message.payload % 20 == 0:
            deadline = time.monotonic() + 4
            while time.monotonic() < deadline:
                pass

    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(200)])
    counts = drain(app)
    assert counts["dead"] + counts["done"] == 200
    dead = {json for (json,) in conn.execute("select payload from bartleby.dead_letters")}
    assert dead <= {number for number in range(200) if number % 20 == 0}
    assert counts["dead"] >= 5


def test_a_timeout_of_the_handlers_own_is_not_taken_for_ours(app: Bartleby) -> None:
    @app.handler("orders", timeout=30, retry={"max_attempts": 1})
    async def handle(message: Message) -> None:
        raise TimeoutError("the bank did not answer")

    app.client.create_queue("orders")
    sent = app.send("orders", 1)
    drain(app)
    assert failure_of(app, sent)[1] == "the bank did not answer"


@pytest.mark.parametrize("awaited", [False, True])
def test_a_timeout_bounds_a_whole_batch(app: Bartleby, conn: Conn, awaited: bool) -> None:
    def handle(messages: list[Message]) -> list[None]:
        while True:
            time.sleep(0.001)

    async def handle_awaited(messages: list[Message]) -> list[None]:
        await asyncio.sleep(60)
        return [None for _ in messages]

    app.handler("orders", batch=5, timeout=0.05, retry={"max_attempts": 1})(handle_awaited if awaited else handle)
    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(5)])
    assert drain(app) == {"dead": 5}
    kinds = conn.execute("select distinct error_type, error from bartleby.attempts").fetchall()
    assert kinds == [("TimeoutError", "the handler took longer than 0.05 s")]
