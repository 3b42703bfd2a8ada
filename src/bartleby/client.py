"""Client and AsyncClient: two small runners of the same calls.

    client = Client("postgresql://…")          # a small pool; safe to share between threads
    client.send("orders", {"id": 42})          # in a transaction of its own
    with psycopg.connect(…) as connection:     # in yours: commit makes it visible
        client.using(connection).send("orders", {"id": 42})

Each verb is a method that runs its call, or awaits it.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Self, TypeVar

import psycopg
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout

from bartleby.calls import Call
from bartleby.config import Settings
from bartleby.errors import InvalidSettings, NoConnection, translated
from bartleby.pooling import (
    AsyncConnection,
    AsyncPooled,
    Connection,
    Pooled,
    async_rows,
    pool_options,
    rows,
)
from bartleby.verbs import AsyncVerbs, SyncVerbs

T = TypeVar("T")

_REASON_SECONDS = 2
"""How long a connection may take that only finds out why a pool has none."""


class Runner(SyncVerbs):
    """Runs calls in a transaction that somebody else begins and ends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, call: Call[T]) -> T:
        """Run one call."""
        with translated():
            return call.parse(rows(self._connection, call.text, call.parameters))


class AsyncRunner(AsyncVerbs):
    """Runs calls in a transaction that somebody else begins and ends."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def run(self, call: Call[T]) -> T:
        """Run one call."""
        with translated():
            return call.parse(await async_rows(self._connection, call.text, call.parameters))


class Client(Runner):
    """A pool of connections; each call is a transaction of its own. Close it, or use `with`."""

    def __init__(self, dsn: str | None = None, *, settings: Settings | None = None) -> None:
        self._settings = _settings(dsn, settings)
        self._pool = ConnectionPool(
            connection_class=Pooled,
            configure=Pooled.configure,
            check=Pooled.check,
            **pool_options(self._settings),
        )

    def run(self, call: Call[T]) -> T:
        """Run one call in a transaction of its own."""
        with self._connected() as connection:
            text = call.relaxed or call.text
            if connection.isolation_level is None:
                return call.parse(rows(connection, text, call.parameters))
            with self._begun(connection):
                return call.parse(rows(connection, text, call.parameters))

    @contextmanager
    def transaction(self) -> Iterator[Runner]:
        """Yield a client whose calls are one transaction; it is committed at the end, or undone by an error."""
        with self._connected() as connection, self._begun(connection):
            yield Runner(connection)

    @contextmanager
    def _connected(self) -> Iterator[Pooled]:
        pool = self._pool
        pool.open()
        try:
            with translated(), pool.connection() as connection:
                yield connection
        except PoolTimeout:
            raise self._no_connection() from None

    @contextmanager
    def _begun(self, connection: Pooled) -> Iterator[None]:
        with connection.transaction():
            yield

    def behind_pooler(self) -> bool:
        """Return whether something like pgbouncer stands between this client and the server."""
        self._pool.open()
        with self._pool.connection() as connection:
            return connection.prepare_threshold is None

    def is_local(self) -> bool:
        """Return whether the server is on this machine."""
        self._pool.open()
        with self._pool.connection() as connection:
            return connection.info.host.startswith("/") or connection.info.hostaddr in {"127.0.0.1", "::1"}

    def using(self, connection: Connection) -> Runner:
        """Return a client whose calls are part of the transaction of this psycopg connection."""
        return Runner(connection)

    def _no_connection(self) -> NoConnection:
        all_in_use = NoConnection.all_in_use(self._settings.max_connections, self._settings.connect_timeout)
        return self._reason() or all_in_use

    def _reason(self) -> NoConnection | None:
        # The pool only knows that time is up; a connection of our own says why.
        try:
            psycopg.connect(self._settings.dsn or "", connect_timeout=_REASON_SECONDS).close()
        except psycopg.Error as error:
            return NoConnection.because(error)
        return None

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(AsyncRunner):
    """A pool of connections; each call is a transaction of its own. Close it, or use `async with`."""

    def __init__(self, dsn: str | None = None, *, settings: Settings | None = None) -> None:
        self._settings = _settings(dsn, settings)
        self._pool = AsyncConnectionPool(
            connection_class=AsyncPooled,
            configure=AsyncPooled.configure,
            check=AsyncPooled.check,
            reset=AsyncPooled.reset,
            **pool_options(self._settings),
        )

    async def run(self, call: Call[T]) -> T:
        """Run one call in a transaction of its own."""
        async with self._connected() as connection:
            text = call.relaxed or call.text
            if connection.isolation_level is None:
                return call.parse(await async_rows(connection, text, call.parameters))
            async with connection.transaction():
                return call.parse(await async_rows(connection, text, call.parameters))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncRunner]:
        """Yield a client whose calls are one transaction; it is committed at the end, or undone by an error."""
        async with self._connected() as connection, connection.transaction():
            yield AsyncRunner(connection)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncPooled]:
        await self._pool.open()
        try:
            with translated():
                async with self._pool.connection() as connection:
                    yield connection
        except PoolTimeout:
            raise await self._no_connection() from None

    def using(self, connection: AsyncConnection) -> AsyncRunner:
        """Return a client whose calls are part of the transaction of this psycopg connection."""
        return AsyncRunner(connection)

    async def _no_connection(self) -> NoConnection:
        try:
            connection = await psycopg.AsyncConnection.connect(
                self._settings.dsn or "", connect_timeout=_REASON_SECONDS
            )
        except psycopg.Error as error:
            return NoConnection.because(error)
        await connection.close()
        return NoConnection.all_in_use(self._settings.max_connections, self._settings.connect_timeout)

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.sleep(0)  # for those that the pool's task is about to take back: closed, it forgets them
        await self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _settings(dsn: str | None, settings: Settings | None) -> Settings:
    if dsn is not None and settings is not None:
        raise InvalidSettings("a DSN and settings were given: put the DSN into the settings")
    return (settings or Settings.load(dsn=dsn)).with_database()
