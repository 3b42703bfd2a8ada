"""`bartleby.testing.run`: one message through its handler, without a database."""

import asyncio
import itertools
import time
from dataclasses import dataclass

import pytest

import bartleby
from bartleby import Bartleby, InvalidPayload, Message, Retry, Snooze, Terminal
from bartleby.execute import NoOutcome
from bartleby.testing import run


@dataclass
class Order:
    id: int


@pytest.fixture
def app() -> Bartleby:
    return Bartleby("postgresql://nobody@127.0.0.1:1/nowhere")  # no connection is made


def test_handler_gets_the_message_it_would_get(app: Bartleby) -> None:
    seen: list[Message] = []
    app.handler("orders")(seen.append)
    run(app, "orders", {"a": 1}, headers={"b": 2}, key="k", attempt=3, message_id=7, generation=4)
    [message] = seen
    assert (message.payload, message.headers, message.key) == ({"a": 1}, {"b": 2}, "k")
    assert (message.attempt, message.id, message.generation, message.queue) == (3, 7, 4, "orders")
    run(app, "orders")
    assert (seen[1].payload, seen[1].headers, seen[1].attempt) == (None, {}, 1)


async def test_error_of_a_handler_is_raised(app: Bartleby) -> None:
    def fails(message: Message) -> None:
        raise KeyError("customer")

    async def fails_awaited(message: Message) -> None:
        await asyncio.sleep(0)
        fails(message)

    for number, (function, batch) in enumerate(itertools.product((fails, fails_awaited), (None, 10))):
        app.handler(f"q{number}", batch=batch)(function)
        with pytest.raises(KeyError, match="customer") as raised:
            run(app, f"q{number}", 1)
        assert any(entry.name == "fails" for entry in raised.traceback)


def test_outcome_that_is_returned_is_raised(app: Bartleby) -> None:
    for number, outcome in enumerate([Terminal("never"), Retry("again"), Snooze(1), ValueError("x")]):
        app.handler(f"q{number}")(lambda _message, outcome=outcome: outcome)
        app.handler(f"batch{number}", batch=5)(lambda messages, outcome=outcome: [outcome for _ in messages])
        for queue in (f"q{number}", f"batch{number}"):
            with pytest.raises(type(outcome)):
                run(app, queue, 1)
    app.handler("forgets", batch=5)(lambda _messages: {})
    with pytest.raises(NoOutcome):
        run(app, "forgets", 1)


def test_payload_is_read_as_the_type_of_the_handler(app: Bartleby) -> None:
    taken: list[Order] = []

    @app.handler("orders", timeout=600)
    def handle(order: Order) -> None:
        taken.append(order)

    run(app, "orders", {"id": 7})
    assert taken == [Order(7)]
    with pytest.raises(InvalidPayload, match=r"payload\.id"):
        run(app, "orders", {"id": "x"})
    with pytest.raises(bartleby.UndecodablePayload):
        run(app, "orders", raw="[" * 100_000)


def test_handler_that_takes_too_long_times_out(app: Bartleby) -> None:
    @app.handler("plain", timeout=0.5)
    def plain(message: Message) -> None:
        time.sleep(message.payload)

    @app.handler("awaited", timeout=0.5)
    async def awaited(message: Message) -> None:
        await asyncio.sleep(message.payload)

    for queue in ("plain", "awaited"):
        with pytest.raises(TimeoutError, match=r"longer than 0\.5 s"):
            run(app, queue, 10)


def test_queue_without_a_usable_handler_is_refused(app: Bartleby) -> None:
    with pytest.raises(bartleby.NoHandler):
        run(app, "orders", 1)

    async def coroutine() -> None: ...

    app.handler("orders")(lambda _message: coroutine())
    with pytest.raises(bartleby.InvalidHandler, match="nobody runs"):
        run(app, "orders", 1)
