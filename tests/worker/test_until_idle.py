"""A worker that ends when there is nothing to do does not end before that."""

import asyncio
from typing import Any

import pytest

from bartleby import Bartleby, Message
from bartleby.calls import Call
from bartleby.link import Link
from bartleby.waking import Listener
from tests.kit.worker import drain


def test_a_chain_over_two_queues_is_followed_to_its_end(app: Bartleby) -> None:
    @app.handler("orders")
    async def there(message: Message) -> None:
        if message.payload:
            await app.asend("parcels", message.payload - 1)

    @app.handler("parcels")
    def back(message: Message) -> None:
        if message.payload:
            app.send("orders", message.payload - 1)

    app.send("orders", 60)
    assert drain(app) == {"done": 61}


def test_what_is_sent_while_a_queue_is_looked_at_is_not_left_behind(
    app: Bartleby, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queue parcels was just found empty when a message of queue orders runs and sends to it."""
    plain, done, looked = Link.run, asyncio.Event(), False

    @app.handler("orders")
    async def order(message: Message) -> None:
        await asyncio.to_thread(app.send, "parcels", message.payload)
        done.set()

    @app.handler("parcels")
    async def parcel(message: Message) -> None: ...

    async def run(self: Link, call: Call[Any]) -> Any:
        nonlocal looked
        if "outlook" in call.text and call.parameters == ("parcels",) and not looked:
            looked = True
            await asyncio.to_thread(app.send, "orders", 1)
            await done.wait()
            await asyncio.sleep(0.3)  # until it is settled, and orders is found empty too
        return await plain(self, call)

    async def deaf(_listener: Listener) -> None:
        await asyncio.Event().wait()

    app.client.create_queue("parcels")
    monkeypatch.setattr(Link, "run", run)
    monkeypatch.setattr(Listener, "run", deaf)
    assert drain(app, poll=5) == {"done": 2}
