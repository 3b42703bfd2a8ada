"""Batch handlers: a list of messages in, an outcome for each out; what is not mentioned has failed."""

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from bartleby import AlreadyHandled, Bartleby, Done, Failure, Message, Retry, Snooze, Terminal
from tests.kit.worker import drain, state, until, working

Conn = psycopg.Connection[tuple[Any, ...]]
BOTH = pytest.mark.parametrize("awaited", [False, True])


@dataclass
class Order:
    id: int


@pytest.fixture
def app(dsn: str) -> Bartleby:
    return Bartleby(dsn)


def batch_handler(app: Bartleby, answer: Any, *, awaited: bool, **options: Any) -> list[list[Message]]:
    """Register a batch handler that answers with answer(messages); return what it was called with."""
    calls: list[list[Message]] = []

    def handle(messages: list[Message]) -> Any:
        calls.append(messages)
        return answer(messages)

    async def handle_awaited(messages: list[Message]) -> Any:
        calls.append(messages)
        await asyncio.sleep(0)
        return answer(messages)

    app.handler("orders", **{"batch": 10, "concurrency": 1, **options})(handle_awaited if awaited else handle)
    return calls


def send(app: Bartleby, count: int, **policy: Any) -> list[int]:
    app.client.create_queue("orders", policy)
    return list(app.send_many("orders", [{"payload": {"id": number}} for number in range(count)]))


def errors(app: Bartleby, ids: list[int]) -> list[str | None]:
    """Return the type of the first failed attempt of each message; None if there was none."""
    return [attempts[0].error_type if (attempts := app.client.attempts(each)) else None for each in ids]


@BOTH
def test_every_message_gets_what_was_said_of_it(app: Bartleby, conn: Conn, awaited: bool) -> None:
    outcomes: list[object] = [None, Done, Done(), Retry(after=3000), Retry, Snooze(3000)]
    outcomes += [Terminal("no"), Terminal, AlreadyHandled(), ValueError("x")]
    calls = batch_handler(
        app,
        lambda messages: {message.id: outcomes[message.payload["id"]] for message in messages},
        awaited=awaited,
        retry={"backoff": "fixed", "base": 3000},
    )
    ids = send(app, 10)
    counts = drain(app)
    assert counts == {"done": 4, "retried": 3, "released": 1, "dead": 2}
    assert len(calls) == 1
    outcome, terminal = "bartleby.Retry", "bartleby.Terminal"
    assert errors(app, ids) == [None] * 3 + [outcome] * 2 + [None] + [terminal] * 2 + [None, "ValueError"]
    assert state(conn) == (0, 0, 4, 2)


@BOTH
@pytest.mark.parametrize("kind", ["list", "tuple", "generator", "mapping by message", "values view"])
def test_outcomes_may_come_in_the_order_of_the_messages(app: Bartleby, kind: str, awaited: bool) -> None:
    def answer(messages: list[Message]) -> object:
        each: dict[Message, object] = {
            message: Done() if message.payload["id"] % 2 else Terminal() for message in messages
        }
        kinds = {
            "list": list(each.values()),
            "tuple": tuple(each.values()),
            "generator": (outcome for outcome in each.values()),
            "mapping by message": each,
            "values view": each.values(),
        }
        return kinds[kind]

    batch_handler(app, answer, awaited=awaited)
    ids = send(app, 10)
    assert drain(app) == {"done": 5, "dead": 5}
    assert [error is None for error in errors(app, ids)] == [False, True] * 5


@BOTH
def test_what_is_not_mentioned_is_a_failure_of_that_message_only(app: Bartleby, conn: Conn, awaited: bool) -> None:
    batch_handler(
        app,
        lambda messages: {message.id: Done() for message in messages if message.payload["id"] != 3},
        awaited=awaited,
        retry={"max_attempts": 1},
    )
    ids = send(app, 10)
    assert drain(app) == {"done": 9, "dead": 1}
    (attempt,) = app.client.attempts(ids[3])
    assert (attempt.error_type or "").endswith("NoOutcome")
    assert "said nothing about this message; it returns a mapping" in (attempt.error or "")


@BOTH
def test_a_short_or_senseless_answer_fails_the_others(app: Bartleby, conn: Conn, awaited: bool) -> None:
    answers: list[object] = [None, 5, "done", b"done", [], {}, True, [Done()], {"1": Done()}, {None: 1}]

    def handle(messages: list[Message]) -> Any:
        return answers[messages[0].payload]

    async def handle_awaited(messages: list[Message]) -> Any:
        return answers[messages[0].payload]

    for number in range(len(answers)):
        queue = f"q{number}"
        app.handler(queue, batch=10, concurrency=1, retry={"max_attempts": 1})(handle_awaited if awaited else handle)
        app.client.create_queue(queue)
        app.send_many(queue, [{"payload": number}] * 4)
    assert drain(app) == {"done": 1, "dead": 39}
    assert [state(conn, f"q{number}")[3] for number in range(len(answers))] == [4, 4, 4, 4, 4, 4, 4, 3, 4, 4]


@BOTH
def test_something_that_is_no_outcome_is_said_so(app: Bartleby, awaited: bool) -> None:
    batch_handler(app, lambda _: [5, "ok", dict, object()], awaited=awaited, retry={"max_attempts": 1})
    ids = send(app, 4)
    assert drain(app) == {"dead": 4}
    texts = [app.client.attempts(each)[0].error or "" for each in ids]
    assert [text.partition("(")[2].partition(")")[0] for text in texts] == ["int", "str", "type", "object"]


@BOTH
def test_an_exception_is_everybodys(app: Bartleby, conn: Conn, awaited: bool) -> None:
    def answer(_: object) -> None:
        raise ValueError("the bank is closed")

    batch_handler(app, answer, awaited=awaited, retry={"max_attempts": 1})
    ids = send(app, 5)
    assert drain(app) == {"dead": 5}
    assert errors(app, ids) == ["ValueError"] * 5
    prints = conn.execute("select distinct fingerprint, traceback is not null from bartleby.attempts").fetchall()
    assert len(prints) == 1
    assert prints[0][1]


@BOTH
@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()])
def test_no_exception_of_a_batch_ends_the_worker(app: Bartleby, error: BaseException, awaited: bool) -> None:
    def answer(_: object) -> None:
        raise error

    batch_handler(app, answer, awaited=awaited, retry={"max_attempts": 1})
    send(app, 3)
    assert drain(app) == {"dead": 3}


def endless(messages: list[Message]) -> Iterator[Done]:
    while True:
        yield Done()


def breaks_off(messages: list[Message]) -> Iterator[Done]:
    yield Done()
    yield Done()
    raise ValueError("half-way")


class Broken(Mapping[int, object]):
    def __getitem__(self, key: int) -> object:
        raise RuntimeError("broken")

    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("broken")

    def __len__(self) -> int:
        raise RuntimeError("broken")


class Liar:
    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")

    @__class__.setter
    def __class__(self, value: object) -> None: ...


class Unborn(Terminal):
    def __init__(self) -> None:
        raise SystemError("not even born")


@BOTH
@pytest.mark.parametrize(
    "answer",
    [
        endless,
        breaks_off,
        lambda _: Broken(),
        lambda messages: [Liar() for _ in messages],
        lambda messages: {message.id: Liar() for message in messages},
        lambda messages: [Unborn for _ in messages],
        lambda _: Liar(),
        lambda _: {Liar(): 1},
    ],
    ids=["endless", "breaks off", "broken mapping", "lying outcomes", "lying mapping", "unborn", "liar", "lying key"],
)
def test_a_hostile_answer_leaves_nothing_unsettled(app: Bartleby, conn: Conn, answer: Any, awaited: bool) -> None:
    batch_handler(app, answer, awaited=awaited, retry={"max_attempts": 1})
    send(app, 5)
    counts = drain(app)
    assert counts["done"] + counts["dead"] == 5
    assert state(conn)[:3] == (0, 0, 0)
    if answer is endless:
        assert counts["done"] == 5


def test_a_generator_function_may_be_a_batch_handler(app: Bartleby) -> None:
    @app.handler("orders", batch=10, concurrency=1)
    def handle(messages: list[Message]) -> Iterator[object]:
        for message in messages:
            yield Terminal() if message.payload["id"] == 2 else Done()

    ids = send(app, 5)
    assert drain(app) == {"done": 4, "dead": 1}
    assert errors(app, ids)[2] == "bartleby.Terminal"


# Payloads


@BOTH
def test_a_payload_that_does_not_fit_spoils_no_other(app: Bartleby, conn: Conn, awaited: bool) -> None:
    seen: list[list[Order]] = []

    def handle(orders: list[Order]) -> list[Done]:
        seen.append(orders)
        return [Done() for _ in orders]

    async def handle_awaited(orders: list[Order]) -> list[Done]:
        return handle(orders)

    app.handler("orders", batch=10, concurrency=1)(handle_awaited if awaited else handle)
    app.client.create_queue("orders")
    ids = app.send_many("orders", [{"payload": {"id": number if number % 3 else "x"}} for number in range(6)])
    assert drain(app) == {"done": 4, "dead": 2}
    assert seen == [[Order(1), Order(2), Order(4), Order(5)]]
    reasons = [letter.reason if (letter := app.client.dead_letter(each)) else None for each in ids]
    assert reasons == ["unacceptable", None, None, "unacceptable", None, None]


def test_if_no_payload_fits_the_handler_is_not_called(app: Bartleby) -> None:
    seen: list[object] = []

    @app.handler("orders", batch=10)
    def handle(orders: list[Order]) -> None:
        seen.append(orders)

    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": "x"}] * 3)
    assert drain(app) == {"dead": 3}
    assert not seen


# Sizes


@BOTH
def test_batches_are_full_when_there_is_enough_though_handlers_are_slow(app: Bartleby, awaited: bool) -> None:
    sizes: list[int] = []

    def handle(messages: list[Message]) -> list[None]:
        sizes.append(len(messages))
        time.sleep(0.3)
        return [None for _ in messages]

    async def handle_awaited(messages: list[Message]) -> list[None]:
        sizes.append(len(messages))
        await asyncio.sleep(0.3)
        return [None for _ in messages]

    app.handler("orders", batch=25, concurrency=1)(handle_awaited if awaited else handle)
    send(app, 100)
    assert drain(app) == {"done": 100}
    assert max(sizes) == 25
    assert len(sizes) <= 6, sizes


@BOTH
def test_several_batches_run_at_once_and_no_more_than_said(app: Bartleby, awaited: bool) -> None:
    lock, running, most = threading.Lock(), 0, 0
    full = threading.Event()

    def change(by: int) -> None:
        nonlocal running, most
        with lock:
            running += by
            most = max(most, running)
            if running == 3:
                full.set()

    def handle(messages: list[Message]) -> list[None]:
        change(1)
        full.wait(30)
        change(-1)
        return [None for _ in messages]

    async def handle_awaited(messages: list[Message]) -> list[None]:
        change(1)
        until_full = asyncio.get_running_loop().run_in_executor(None, full.wait, 30)
        await until_full
        change(-1)
        return [None for _ in messages]

    app.handler("orders", batch=5, concurrency=3)(handle_awaited if awaited else handle)
    send(app, 60)
    assert drain(app) == {"done": 60}
    assert most == 3


@BOTH
def test_a_batch_does_not_wait_to_be_full(app: Bartleby, awaited: bool) -> None:
    batch_handler(app, lambda messages: [None for _ in messages], awaited=awaited, batch=1000)
    app.client.create_queue("orders")
    with working(app) as running:
        for number in range(1, 4):
            app.send("orders", number)
            until(lambda: running.worker.counts["done"] >= running.worker.counts.total() == number)  # noqa: B023 - at once


@BOTH
def test_the_delay_of_each_follows_its_own_attempts(app: Bartleby, conn: Conn, awaited: bool) -> None:
    def answer(_: object) -> None:
        raise ValueError

    batch_handler(app, answer, awaited=awaited, retry={"schedule": [0.001, 4000], "max_attempts": 9})
    first = send(app, 1)[0]
    drain(app)
    with working(app) as running:
        app.send("orders", {"id": 2})
        until(lambda: running.worker.counts["retried"] == 2)
    delays = [(each.retry_at - each.failed_at).total_seconds() for each in app.client.attempts(first) if each.retry_at]
    assert delays == pytest.approx([0.001, 4000], abs=0.1)


@BOTH
def test_in_one_batch_too_each_has_the_delay_of_its_attempt(app: Bartleby, conn: Conn, awaited: bool) -> None:
    batch_handler(
        app,
        lambda messages: (
            ValueError("all") if len(messages) < 2 else [error := ValueError("all")] and [error] * len(messages)
        ),
        awaited=awaited,
        retry={"schedule": [3000, 6000, 9000], "max_attempts": 9},
    )
    app.client.create_queue("orders")
    ids = app.send_many("orders", [{"payload": 1}] * 2)
    lease = app.client.claim("orders", "w", limit=1)
    assert lease is not None
    app.client.fail(lease.id, [Failure(lease.messages[0].position, "E", "e", delay=0)])
    assert drain(app) == {"retried": 2}
    delays = {each: app.client.attempts(each)[-1] for each in ids}
    seconds = [(each.retry_at - each.failed_at).total_seconds() for each in delays.values() if each.retry_at]
    assert seconds == pytest.approx([6000, 3000], abs=0.5)


@BOTH
def test_a_batch_of_which_one_was_handled_before_is_run_without_it(app: Bartleby, conn: Conn, awaited: bool) -> None:
    """mark_handled raises for one message, and the transaction of all of them is undone."""
    rounds: list[list[int]] = []

    def effect(messages: list[Message]) -> list[None]:
        rounds.append([message.id for message in messages])
        with psycopg.connect(str(app.settings.dsn)) as mine:
            for message in messages:
                app.mark_handled(message, mine)
        return [None for _ in messages]

    batch_handler(app, effect, awaited=awaited)
    ids = send(app, 4)
    conn.execute("select bartleby.mark_handled('orders', 'orders', %s)", [f"id:{ids[1]}"])
    counts = drain(app)
    assert counts == {"done": 4, "released": 3}
    assert rounds[0] == ids
    assert sorted(each for later in rounds[1:] for each in later) == [ids[0], ids[2], ids[3]]
    assert state(conn) == (0, 0, 0, 0)


@BOTH
def test_already_handled_that_names_no_message_acks_none(app: Bartleby, conn: Conn, awaited: bool) -> None:
    def answer(_: object) -> None:
        raise AlreadyHandled

    batch_handler(app, answer, awaited=awaited, retry={"max_attempts": 1})
    send(app, 3)
    assert drain(app) == {"dead": 3}


@BOTH
def test_a_rate_counts_batches_and_leaves_them_full(app: Bartleby, awaited: bool) -> None:
    calls = batch_handler(app, lambda messages: [None for _ in messages], awaited=awaited, batch=50, rate=5)
    send(app, 150)
    assert drain(app) == {"done": 150}
    assert max(len(call) for call in calls) == 50
    assert len(calls) <= 4, [len(call) for call in calls]


@BOTH
def test_a_batch_may_be_larger_than_a_claim(app: Bartleby, awaited: bool) -> None:
    calls = batch_handler(app, lambda messages: [None for _ in messages], awaited=awaited, batch=1200)
    send(app, 2400)
    assert drain(app) == {"done": 2400}
    assert max(len(call) for call in calls) == 1200, [len(call) for call in calls]
