"""Handlers, messages and refusals for tests of a worker's guards."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from bartleby import Bartleby, Client, Message
from tests.kit.worker import lapse

Conn = psycopg.Connection[tuple[Any, ...]]
BOTH = pytest.mark.parametrize("awaited", [False, True], ids=["def", "async def"])


def make_solo(app: Bartleby, conn: Conn, queue: str, count: int = 1) -> int:
    """Send messages whose first worker dies, so that they have to run alone; pause their queue."""
    app.client.create_queue(queue)
    sent = list(app.send_many(queue, [{"payload": "solo"}] * count))
    with Client(app.settings.dsn) as victim:
        assert victim.claim(queue, "victim", limit=count) is not None
    lapse(conn)
    app.client.pause_queue(queue)
    return sent[0]


def handled_by(app: Bartleby, handle: Callable[[Message], object], *, awaited: bool, **options: Any) -> None:
    async def handle_awaited(message: Message) -> object:
        return handle(message)

    app.handler("orders", **options)(handle_awaited if awaited else handle)


def endless(cancelled: threading.Event, *, awaited: bool) -> Callable[[Message], Any]:
    """Return a handler that returns for 'quick', and for others never does unless it is cancelled."""

    def handle(message: Message) -> None:
        if message.payload == "quick":
            return
        try:
            while True:
                time.sleep(0.002)
        finally:
            cancelled.set()

    async def handle_awaited(message: Message) -> None:
        if message.payload == "quick":
            return
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    return handle_awaited if awaited else handle


@contextlib.contextmanager
def refused(conn: Conn, sqlstate: str = "XX000") -> Iterator[None]:
    """Let the server refuse every ack with an error for which a retry does not help."""
    conn.execute("alter function bartleby.ack(bigint, bigint[]) rename to ack_away")
    conn.execute(
        f"create function bartleby.ack(p_lease_id bigint, p_positions bigint[] default null) returns void language"
        f" plpgsql as $$ begin raise exception 'no' using errcode = '{sqlstate}'; end $$".encode()
    )
    try:
        yield
    finally:
        conn.execute("drop function bartleby.ack(bigint, bigint[])")
        conn.execute("alter function bartleby.ack_away(bigint, bigint[]) rename to ack")
