"""Context variables that a handler sets end with its message."""

import contextvars
from typing import Any

from bartleby import Bartleby, Message
from tests.kit.worker import drain

LAST: contextvars.ContextVar[int] = contextvars.ContextVar("last", default=0)


def test_context_variables_do_not_leak_into_the_next_message(app: Bartleby) -> None:
    found: list[int] = []

    def look(first: Message) -> None:
        found.append(LAST.get())
        LAST.set(first.id)

    async def look_async(first: Message) -> None:
        look(first)

    def look_batch(messages: list[Message]) -> list[None]:
        look(messages[0])
        return [None for _ in messages]

    async def look_batch_async(messages: list[Message]) -> list[None]:
        return look_batch(messages)

    handlers: list[tuple[Any, int | None]] = [
        (look, None), (look_async, None), (look_batch, 10), (look_batch_async, 10),
    ]  # fmt: skip
    for number, (function, batch) in enumerate(handlers):
        app.handler(f"q{number}", concurrency=1, batch=batch)(function)
        app.client.create_queue(f"q{number}")
        app.send_many(f"q{number}", [{"payload": each} for each in range(100)])
    assert drain(app) == {"done": 400}
    assert set(found) == {0}
