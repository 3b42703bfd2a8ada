"""What a type checker sees of the application. Checked by mypy, never run: an unused ignore is an error there."""

from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, assert_type

import psycopg

from bartleby import AsyncClient, Bartleby, Client, Done, Message, Outcome, Retry, RetryPolicy, Snooze, Terminal
from bartleby.message import MessageId
from bartleby.worker import Worker

app = Bartleby("postgresql:///shop", version="1.0", generation=3, redact=["secret-[0-9]+"])


@dataclass
class Order:
    id: int


@app.handler("orders", retry={"max_attempts": 3}, terminal=[KeyError], timeout=30, concurrency=5, rate=10.5)
def plain(message: Message) -> None: ...


@app.handler("parcels", retry=RetryPolicy(backoff="fixed", base=timedelta(seconds=5)), timeout=timedelta(minutes=1))
async def awaited(order: Order, message: Message) -> Retry | None:
    return Retry(after=timedelta(hours=1)) if message.attempt == 1 else None


@app.handler("bulk", batch=100, once="key", lease=30)
def bulk(orders: list[Order]) -> dict[int, Done | Outcome]:
    return {order.id: Snooze(5) if order.id else Terminal() for order in orders}


def a_handler_stays_the_function_it_was(message: Message) -> None:
    assert_type(plain(message=message), None)
    running = assert_type(awaited(Order(1), message=message), Coroutine[Any, Any, Retry | None])
    running.close()
    plain(5)  # type: ignore[arg-type]
    assert_type(bulk([Order(1)]), dict[int, Done | Outcome])


def what_an_application_returns(connection: psycopg.Connection) -> None:
    assert_type(app.send("orders", {"id": 1}, key="k", delay=timedelta(hours=1)), MessageId)
    assert_type(app.using(connection).send("orders", 1), MessageId)
    assert_type(app.client, Client)
    assert_type(app.async_client, AsyncClient)
    assert_type(app.generation, int | None)


async def what_is_awaited(message: Message, connection: psycopg.AsyncConnection) -> None:
    assert_type(await app.asend("orders", 1, connection=connection, key="k"), MessageId)
    assert_type(await app.asend_many("orders", [{"payload": 1}]), list[MessageId])
    assert_type(await app.amark_handled(message, connection), None)
    worker = Worker(app, queues=["orders"], concurrency=4, until_idle=True, grace=5)
    assert_type(await worker.run(), Counter[str])
    assert_type(worker.stop(), None)


def what_is_wrong(connection: psycopg.Connection) -> None:
    app.handler("orders", timeout="5")  # type: ignore[arg-type]
    app.handler("orders", terminal=KeyError)  # type: ignore[arg-type]
    app.handler("orders", retry=5)  # type: ignore[arg-type]
    app.send("orders", 1, delay="soon")  # type: ignore[arg-type]
    app.mark_handled(5, connection)  # type: ignore[arg-type]
    Retry(after="soon")  # type: ignore[arg-type]
    RetryPolicy(max_attempt=3)  # type: ignore[call-arg]
    Bartleby(dsn=5)  # type: ignore[arg-type]
