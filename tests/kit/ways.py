"""Every way to run calls, with one interface for tests: all verbs are plain functions."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import psycopg
from psycopg.rows import dict_row

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
    """The verbs of a client as plain functions."""

    def __init__(self, runner: Runner | AsyncRunner, run: Callable[[Any], Any]) -> None:
        self._runner = runner
        self._run = run

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._run(getattr(self._runner, name)(*args, **kwargs))


@contextmanager
def opened_way(dsn: str, *, awaited: bool = False, using: bool = False) -> Iterator[Way]:
    """A client, or one that is `using` a connection with rows of another shape."""
    connections: list[Any] = []
    with asyncio.Runner() as loop:
        run: Callable[[Any], Any] = loop.run if awaited else lambda found: found
        connect: Callable[..., Any] = psycopg.AsyncConnection.connect if awaited else psycopg.connect
        client: Any = AsyncClient(dsn) if awaited else Client(dsn)

        def begin(**options: Any) -> Transaction:
            connection = run(connect(dsn, **options))
            connections.append(connection)
            return Transaction(
                cast("Runner", Plain(client.using(connection), run)),
                lambda text: run(run(connection.execute(text.encode())).fetchall()),
                lambda: run(connection.commit()),
                lambda: run(connection.rollback()),
            )

        api = begin(autocommit=True, row_factory=dict_row).api if using else cast("Runner", Plain(client, run))
        yield Way(api, begin, own_transactions=not using)
        assert not using or connections[0].row_factory is dict_row
        for each in (*connections, client):
            run(each.close())


WAYS: dict[str, Callable[[str], AbstractContextManager[Way]]] = {
    "Client": opened_way,
    "AsyncClient": partial(opened_way, awaited=True),
    "Client.using": partial(opened_way, using=True),
    "AsyncClient.using": partial(opened_way, awaited=True, using=True),
    "Client through pgbouncer": opened_way,
    "AsyncClient through pgbouncer": partial(opened_way, awaited=True),
}
