"""Every way to run calls, with one interface for tests: all verbs are plain functions."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import psycopg

from bartleby import AsyncClient, Client
from bartleby.client import AsyncRunner, Runner


@dataclass(frozen=True)
class Transaction:
    """A transaction of the caller, and the verbs that are run in it."""

    api: Runner
    query: Callable[[str], Any]
    commit: Callable[[], None]
    rollback: Callable[[], None]


@dataclass(frozen=True)
class Way:
    """The verbs, and how to begin a transaction of the caller."""

    api: Runner
    begin: Callable[[], Transaction]
    own_transactions: bool


class Plain:
    """The verbs of an asynchronous client as plain functions."""

    def __init__(self, runner: AsyncRunner, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._runner = runner
        self._run = run

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._run(getattr(self._runner, name)(*args, **kwargs))


@contextmanager
def plain_client(dsn: str, *, using: bool = False) -> Iterator[Way]:
    opened: list[psycopg.Connection[Any]] = []

    def begin(*, autocommit: bool = False) -> Transaction:
        connection = psycopg.connect(dsn, autocommit=autocommit)
        opened.append(connection)
        return Transaction(
            client.using(connection),
            lambda text: connection.execute(text.encode()).fetchall(),
            connection.commit,
            connection.rollback,
        )

    with Client(dsn) as client:
        api = begin(autocommit=True).api if using else client
        yield Way(api, begin, own_transactions=not using)
        for connection in opened:
            connection.close()


@contextmanager
def awaited_client(dsn: str, *, using: bool = False) -> Iterator[Way]:
    opened: list[psycopg.AsyncConnection[Any]] = []
    with asyncio.Runner() as loop:

        def begin(*, autocommit: bool = False) -> Transaction:
            connection = loop.run(psycopg.AsyncConnection.connect(dsn, autocommit=autocommit))
            opened.append(connection)

            async def query(text: str) -> Any:
                return await (await connection.execute(text.encode())).fetchall()

            return Transaction(
                cast("Runner", Plain(client.using(connection), loop.run)),
                lambda text: loop.run(query(text)),
                lambda: loop.run(connection.commit()),
                lambda: loop.run(connection.rollback()),
            )

        client = AsyncClient(dsn)
        api = begin(autocommit=True).api if using else cast("Runner", Plain(client, loop.run))
        yield Way(api, begin, own_transactions=not using)
        for connection in opened:
            loop.run(connection.close())
        loop.run(client.close())


@contextmanager
def plain_using(dsn: str) -> Iterator[Way]:
    with plain_client(dsn, using=True) as way:
        yield way


@contextmanager
def awaited_using(dsn: str) -> Iterator[Way]:
    with awaited_client(dsn, using=True) as way:
        yield way


WAYS = {
    "Client": plain_client,
    "AsyncClient": awaited_client,
    "Client.using": plain_using,
    "AsyncClient.using": awaited_using,
    "Client through pgbouncer": plain_client,
    "AsyncClient through pgbouncer": awaited_client,
}
