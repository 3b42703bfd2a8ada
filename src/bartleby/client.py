"""Client and AsyncClient: two small runners of the same calls.

    client = Client("postgresql://…")          # a small pool; safe to share between threads
    client.send("orders", {"id": 42})          # in a transaction of its own
    with psycopg.connect(…) as connection:     # in yours: commit makes it visible
        client.using(connection).send("orders", {"id": 42})

Each verb is written once, in calls.py; here it becomes a method that runs the call, or awaits it.
"""

import functools
import inspect
import select
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, LiteralString, ParamSpec, Self, TypeVar, get_args, overload

import psycopg
from psycopg import IsolationLevel
from psycopg.rows import tuple_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout

from bartleby import calls
from bartleby.calls import Call, Row
from bartleby.config import Settings
from bartleby.errors import NoConnection, translated

P = ParamSpec("P")
T = TypeVar("T")
Connection = psycopg.Connection[Any]
AsyncConnection = psycopg.AsyncConnection[Any]

# A connection that lay idle this long, or that has something to tell, is asked whether it lives before it is used.
_STALE_SECONDS = 1.0
_ABOUT_THE_SERVER: LiteralString = "select pg_backend_pid(), current_setting('default_transaction_isolation')"


class Verb(Generic[P, T]):
    """A call as a method: of a Client it returns the answer, of an AsyncClient it is awaited."""

    def __init__(self, make: Callable[P, Call[T]]) -> None:
        self._make = make
        signature = inspect.signature(make)
        answer: Any = get_args(signature.return_annotation)[0]
        self._signature = signature.replace(return_annotation=answer)
        self._async_signature = signature.replace(return_annotation=Coroutine[Any, Any, answer])

    @overload
    def __get__(self, runner: None, owner: type) -> Callable[P, Call[T]]: ...
    @overload
    def __get__(self, runner: "Runner", owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, runner: "AsyncRunner", owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, runner: "Runner | AsyncRunner | None", owner: type) -> object:
        if runner is None:
            return self._make

        @functools.wraps(self._make)
        def method(*args: P.args, **kwargs: P.kwargs) -> T | Coroutine[Any, Any, T]:
            return runner.run(self._make(*args, **kwargs))

        signature = self._signature if isinstance(runner, Runner) else self._async_signature
        method.__signature__ = signature  # type: ignore[attr-defined] # for help() and editors
        return method


class Verbs:
    """What every client can do."""

    send = Verb(calls.send)
    send_many = Verb(calls.send_many)
    claim = Verb(calls.claim)
    extend = Verb(calls.extend)
    ack = Verb(calls.ack)
    fail = Verb(calls.fail)
    reject = Verb(calls.reject)
    release = Verb(calls.release)
    idle = Verb(calls.idle)
    channel = Verb(calls.channel)
    reap = Verb(calls.reap)
    turn = Verb(calls.turn)
    replay = Verb(calls.replay)
    create_queue = Verb(calls.create_queue)
    configure_queue = Verb(calls.configure_queue)
    drop_queue = Verb(calls.drop_queue)
    pause_queue = Verb(calls.pause_queue)
    resume_queue = Verb(calls.resume_queue)
    queues = Verb(calls.queues)
    dead_letters = Verb(calls.dead_letters)
    version = Verb(calls.version)
    drift = Verb(calls.drift)
    facts = Verb(calls.facts)
    oldest_xmin_holder = Verb(calls.oldest_xmin_holder)
    segments = Verb(calls.segments)


class Runner(Verbs):
    """Runs calls in a transaction that somebody else begins and ends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, call: Call[T]) -> T:
        """Run one call."""
        with translated():
            return call.parse(_rows(self._connection, call.text, call.parameters))


class AsyncRunner(Verbs):
    """Runs calls in a transaction that somebody else begins and ends."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def run(self, call: Call[T]) -> T:
        """Run one call."""
        with translated():
            return call.parse(await _async_rows(self._connection, call.text, call.parameters))


class Client(Runner):
    """A pool of connections; each call is a transaction of its own. Close it, or use `with`."""

    def __init__(self, dsn: str | None = None, *, settings: Settings | None = None) -> None:
        self._settings = (settings or Settings.load(dsn=dsn)).with_database()
        self._pool = ConnectionPool(
            connection_class=_Pooled,
            configure=_Pooled.configure,
            check=_Pooled.check,
            reset=_Pooled.reset,
            **_pool_options(self._settings),
        )

    def run(self, call: Call[T]) -> T:
        """Run one call in a transaction of its own."""
        self._pool.open()
        try:
            with translated(), self._pool.connection() as connection:
                text = call.relaxed or call.text
                if connection.isolation_level is None:
                    return call.parse(_rows(connection, text, call.parameters))
                with connection.transaction():
                    return call.parse(_rows(connection, text, call.parameters))
        except PoolTimeout:
            raise self._no_connection() from None

    def behind_pooler(self) -> bool:
        """Return whether something like pgbouncer stands between this client and the server."""
        self._pool.open()
        with self._pool.connection() as connection:
            return connection.prepare_threshold is None

    def using(self, connection: Connection) -> Runner:
        """Return a client whose calls are part of the transaction of this psycopg connection."""
        return Runner(connection)

    def _no_connection(self) -> NoConnection:
        # The pool only knows that time is up; a connection of our own says why.
        try:
            psycopg.connect(self._settings.dsn or "", connect_timeout=2).close()
        except psycopg.Error as error:
            return NoConnection.because(error)
        return NoConnection.all_in_use(self._settings.max_connections, self._settings.connect_timeout)

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
        self._settings = (settings or Settings.load(dsn=dsn)).with_database()
        self._pool = AsyncConnectionPool(
            connection_class=_AsyncPooled,
            configure=_AsyncPooled.configure,
            check=_AsyncPooled.check,
            reset=_AsyncPooled.reset,
            **_pool_options(self._settings),
        )

    async def run(self, call: Call[T]) -> T:
        """Run one call in a transaction of its own."""
        await self._pool.open()
        try:
            with translated():
                async with self._pool.connection() as connection:
                    text = call.relaxed or call.text
                    if connection.isolation_level is None:
                        return call.parse(await _async_rows(connection, text, call.parameters))
                    async with connection.transaction():
                        return call.parse(await _async_rows(connection, text, call.parameters))
        except PoolTimeout:
            raise await self._no_connection() from None

    def using(self, connection: AsyncConnection) -> AsyncRunner:
        """Return a client whose calls are part of the transaction of this psycopg connection."""
        return AsyncRunner(connection)

    async def _no_connection(self) -> NoConnection:
        try:
            connection = await psycopg.AsyncConnection.connect(self._settings.dsn or "", connect_timeout=2)
        except psycopg.Error as error:
            return NoConnection.because(error)
        await connection.close()
        return NoConnection.all_in_use(self._settings.max_connections, self._settings.connect_timeout)

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _pool_options(settings: Settings) -> dict[str, Any]:
    sizes = {"min_size": 0, "max_size": settings.max_connections, "timeout": settings.connect_timeout}
    return {"conninfo": settings.dsn, "kwargs": {"autocommit": True}, "open": False, **sizes}


def _rows(connection: Connection, text: LiteralString, parameters: tuple[object, ...]) -> list[Row]:
    with connection.cursor(row_factory=tuple_row) as cursor:
        return cursor.execute(text, parameters).fetchall()


async def _async_rows(connection: AsyncConnection, text: LiteralString, parameters: tuple[object, ...]) -> list[Row]:
    async with connection.cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(text, parameters)
        return await cursor.fetchall()


def _doubtful(connection: "_Pooled | _AsyncPooled") -> bool:
    # A living server has nothing to tell an idle connection: what can be read there is most likely its end.
    news = select.poll()
    news.register(connection.fileno(), select.POLLIN)
    return time.monotonic() - connection.used_at > _STALE_SECONDS or bool(news.poll(0))


class _Pooled(psycopg.Connection[Any]):
    """A connection of the pool: it knows when it was last used, and what stands between it and the server."""

    used_at = 0.0

    @staticmethod
    def configure(connection: "_Pooled") -> None:
        pid, isolation = _rows(connection, _ABOUT_THE_SERVER, ())[0]
        if pid != connection.info.backend_pid:
            # A pooler stands between, and may hand the next statement to another server process.
            connection.prepare_threshold = None
        if isolation != "read committed":
            # Claims need it; a setting of the session would leak through a pooler.
            connection.isolation_level = IsolationLevel.READ_COMMITTED

    @staticmethod
    def check(connection: "_Pooled") -> None:
        if _doubtful(connection):
            ConnectionPool.check_connection(connection)

    @staticmethod
    def reset(connection: "_Pooled") -> None:
        connection.used_at = time.monotonic()


class _AsyncPooled(psycopg.AsyncConnection[Any]):
    """The same, awaited."""

    used_at = 0.0

    @staticmethod
    async def configure(connection: "_AsyncPooled") -> None:
        pid, isolation = (await _async_rows(connection, _ABOUT_THE_SERVER, ()))[0]
        if pid != connection.info.backend_pid:
            connection.prepare_threshold = None
        if isolation != "read committed":
            await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)

    @staticmethod
    async def check(connection: "_AsyncPooled") -> None:
        if _doubtful(connection):
            await AsyncConnectionPool.check_connection(connection)

    @staticmethod
    async def reset(connection: "_AsyncPooled") -> None:
        connection.used_at = time.monotonic()
