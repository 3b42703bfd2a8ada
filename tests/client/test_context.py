"""What a handler sets in its context is gone with its message."""

import contextvars

import pytest

from bartleby import Bartleby, Message
from tests.kit.worker import drain

WHO: contextvars.ContextVar[int] = contextvars.ContextVar("who", default=0)
COUNT = 200


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("batch", [None, 10])
def test_context_variables_do_not_leak_into_the_next_message(app: Bartleby, awaited: bool, batch: int | None) -> None:
    found: list[int] = []

    def look(first: Message) -> None:
        found.append(WHO.get())
        WHO.set(first.id)

    if batch is None:

        def handle(message: Message) -> None:
            look(message)

        async def handle_async(message: Message) -> None:
            look(message)

        app.handler("orders", concurrency=1)(handle_async if awaited else handle)
    else:

        def handle_all(messages: list[Message]) -> list[None]:
            look(messages[0])
            return [None for _ in messages]

        async def handle_all_async(messages: list[Message]) -> list[None]:
            return handle_all(messages)

        app.handler("orders", concurrency=1, batch=batch)(handle_all_async if awaited else handle_all)
    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(COUNT)])
    assert drain(app) == {"done": COUNT}
    assert set(found) == {0}
