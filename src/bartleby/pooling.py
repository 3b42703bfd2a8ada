"""Connections of a client: what they find out about the server, and when they are asked whether they still live."""

import select
import time
from types import TracebackType
from typing import Any, LiteralString

import psycopg
from psycopg import IsolationLevel
from psycopg.rows import tuple_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from bartleby import inspection
from bartleby.answers import Row
from bartleby.config import Settings

Connection = psycopg.Connection[Any]
AsyncConnection = psycopg.AsyncConnection[Any]

# A connection that lay idle this long, or that has something to tell, is asked whether it lives before it is used.
_STALE_SECONDS = 1.0


def pool_options(settings: Settings) -> dict[str, Any]:
    """Return what both kinds of pool are made with."""
    sizes = {"min_size": 0, "max_size": settings.max_connections, "timeout": settings.connect_timeout}
    return {"conninfo": settings.dsn, "kwargs": {"autocommit": True}, "open": False, **sizes}


def rows(connection: Connection, text: LiteralString, parameters: tuple[object, ...]) -> list[Row]:
    """Run a statement and return its rows, whatever row factory the connection has."""
    with connection.cursor(row_factory=tuple_row) as cursor:
        return cursor.execute(text, parameters).fetchall()


async def async_rows(connection: AsyncConnection, text: LiteralString, parameters: tuple[object, ...]) -> list[Row]:
    """Run a statement and return its rows, whatever row factory the connection has."""
    async with connection.cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(text, parameters)
        return await cursor.fetchall()


def _doubtful(connection: "Pooled | AsyncPooled") -> bool:
    # A living server has nothing to tell an idle connection: what can be read there is most likely its end.
    news = select.poll()
    news.register(connection.fileno(), select.POLLIN)
    return time.monotonic() - connection.used_at > _STALE_SECONDS or bool(news.poll(0))


class Pooled(psycopg.Connection[Any]):
    """A connection of the pool: it knows when it was last used, and what stands between it and the server."""

    used_at = 0.0

    @staticmethod
    def configure(connection: "Pooled") -> None:
        """Adapt a new connection to what it is connected to."""
        call = inspection.session(connection.info.backend_pid)
        pid, isolation = call.parse(rows(connection, call.text, call.parameters))
        if pid != connection.info.backend_pid:
            # A pooler stands between, and may hand the next statement to another server process.
            connection.prepare_threshold = None
        if isolation != "read committed":
            # Claims need it; a setting of the session would leak through a pooler.
            connection.isolation_level = IsolationLevel.READ_COMMITTED

    @staticmethod
    def check(connection: "Pooled") -> None:
        """Raise an error if the connection is broken."""
        if _doubtful(connection):
            ConnectionPool.check_connection(connection)

    # Not the pool's `reset`: for that a thread takes it back, later, and forgets it unclosed if the pool is closed.
    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remember when it was used."""
        super().__exit__(kind, raised, trace)
        self.used_at = time.monotonic()


class AsyncPooled(psycopg.AsyncConnection[Any]):
    """The same, awaited."""

    used_at = 0.0

    @staticmethod
    async def configure(connection: "AsyncPooled") -> None:
        """Adapt a new connection to what it is connected to."""
        call = inspection.session(connection.info.backend_pid)
        pid, isolation = call.parse(await async_rows(connection, call.text, call.parameters))
        if pid != connection.info.backend_pid:
            connection.prepare_threshold = None
        if isolation != "read committed":
            await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)

    @staticmethod
    async def check(connection: "AsyncPooled") -> None:
        """Raise an error if the connection is broken."""
        if _doubtful(connection):
            await AsyncConnectionPool.check_connection(connection)

    # In a task of the pool's own: whoever used it may be cancelled, and it is to come back all the same.
    @staticmethod
    async def reset(connection: "AsyncPooled") -> None:
        """Remember when it was used."""
        connection.used_at = time.monotonic()
