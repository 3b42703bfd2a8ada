"""`bartleby.testing.run`: one message through its handler, without a database."""

import asyncio
import itertools
import time
from dataclasses import dataclass

import pytest

import bartleby
from bartleby import Bartleby, InvalidPayload, Message, Snooze, Terminal
from bartleby.execute import NoOutcome
from bartleby.testing import run


@dataclass
class Order:
    id: int


@pytest.fixture
def app() -> Bartleby:
    return Bartleby("postgresql://nobody@127.0.0.1:1/nowhere")  # no connection is made


def test_handler_gets_the_message_it_would_get(app: Bartleby) -> None:
    seen: list[Message | Order] = []

    @app.handler("orders")
    def handle(order: Order, message: Message) -> None:
        seen.extend((order, message))

    run(app, "orders", {"id": 7}, headers={"b": 2}, key="k", attempt=3, message_id=7, generation=4)
    order, message = seen
    assert isinstance(message, Message)
    assert (order, message.payload, message.headers, message.key) == (Order(7), {"id": 7}, {"b": 2}, "k")
    assert (message.attempt, message.id, message.generation, message.queue) == (3, 7, 4, "orders")
    with pytest.raises(InvalidPayload, match=r"payload\.id"):
        run(app, "orders", {"id": "x"})
    with pytest.raises(bartleby.UndecodablePayload):
        run(app, "orders", raw="[" * 100_000)


async def test_error_or_outcome_of_a_handler_is_raised(app: Bartleby) -> None:
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
    for outcome in (Terminal("never"), Snooze(1), ValueError("x")):
        name = type(outcome).__name__
        app.handler(name)(lambda _message, outcome=outcome: outcome)
        app.handler(f"batch{name}", batch=5)(lambda messages, outcome=outcome: [outcome for _ in messages])
        for queue in (name, f"batch{name}"):
            with pytest.raises(type(outcome)):
                run(app, queue, 1)
    app.handler("forgets", batch=5)(lambda _messages: {})
    with pytest.raises(NoOutcome):
        run(app, "forgets", 1)


def test_handler_that_takes_too_long_or_cannot_be_used_is_refused(app: Bartleby) -> None:
    async def awaited(message: Message) -> None:
        await asyncio.sleep(message.payload)

    app.handler("plain", timeout=0.5)(lambda message: time.sleep(message.payload))
    app.handler("awaited", timeout=0.5)(awaited)
    for queue in ("plain", "awaited"):
        with pytest.raises(TimeoutError, match=r"longer than 0\.5 s"):
            run(app, queue, 10)
    with pytest.raises(bartleby.NoHandler):
        run(app, "orders", 1)
    app.handler("orders")(lambda message: awaited(message) if message else None)
    with pytest.raises(bartleby.InvalidHandler, match="nobody runs"):
        run(app, "orders", 1)
