"""Client and AsyncClient: two small runners of the same calls.

    client = Client("postgresql://…")          # a small pool; safe to share between threads
    client.send("orders", {"id": 42})          # in a transaction of its own
    with psycopg.connect(…) as connection:     # in yours: commit makes it visible
        client.using(connection).send("orders", {"id": 42})

Each verb is written once, in calls.py; here it becomes a method that runs the call, or awaits it.
"""

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Generic, ParamSpec, Self, TypeVar, get_args, overload

import psycopg
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout

from bartleby import calls, inspection, operating
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

P = ParamSpec("P")
T = TypeVar("T")


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
    start = Verb(calls.start)
    extend = Verb(calls.extend)
    ack = Verb(calls.ack)
    fail = Verb(calls.fail)
    reject = Verb(calls.reject)
    release = Verb(calls.release)
    idle = Verb(calls.idle)
    channel = Verb(calls.channel)
    reap = Verb(calls.reap)
    turn = Verb(calls.turn)
    lease_length = Verb(calls.lease_length)
    outlook = Verb(calls.outlook)
    open_breaker = Verb(calls.open_breaker)
    mark_handled = Verb(calls.mark_handled)
    handled_keys = Verb(calls.handled_keys)
    take_duty = Verb(calls.take_duty)
    leave_duty = Verb(calls.leave_duty)
    prune = Verb(calls.prune)
    create_queue = Verb(operating.create_queue)
    configure_queue = Verb(operating.configure_queue)
    drop_queue = Verb(operating.drop_queue)
    pause_queue = Verb(operating.pause_queue)
    resume_queue = Verb(operating.resume_queue)
    close_breaker = Verb(operating.close_breaker)
    force_breaker = Verb(operating.force_breaker)
    queues = Verb(operating.queues)
    dead_letters = Verb(operating.dead_letters)
    dead_letter = Verb(operating.dead_letter)
    groups = Verb(operating.groups)
    attempts = Verb(operating.attempts)
    find_message = Verb(operating.find_message)
    last_message_id = Verb(operating.last_message_id)
    replay = Verb(operating.replay)
    version = Verb(inspection.version)
    drift = Verb(inspection.drift)
    facts = Verb(inspection.facts)
    oldest_xmin_holder = Verb(inspection.oldest_xmin_holder)
    segments = Verb(inspection.segments)


class Runner(Verbs):
    """Runs calls in a transaction that somebody else begins and ends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, call: Call[T]) -> T:
        """Run one call."""
        with translated():
            return call.parse(rows(self._connection, call.text, call.parameters))


class AsyncRunner(Verbs):
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
            reset=Pooled.reset,
            **pool_options(self._settings),
        )

    def run(self, call: Call[T]) -> T:
        """Run one call in a transaction of its own."""
        self._pool.open()
        try:
            with translated(), self._pool.connection() as connection:
                text = call.relaxed or call.text
                if connection.isolation_level is None:
                    return call.parse(rows(connection, text, call.parameters))
                with connection.transaction():
                    return call.parse(rows(connection, text, call.parameters))
        except PoolTimeout:
            raise self._no_connection() from None

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
        await self._pool.open()
        try:
            with translated():
                async with self._pool.connection() as connection:
                    text = call.relaxed or call.text
                    if connection.isolation_level is None:
                        return call.parse(await async_rows(connection, text, call.parameters))
                    async with connection.transaction():
                        return call.parse(await async_rows(connection, text, call.parameters))
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


def _settings(dsn: str | None, settings: Settings | None) -> Settings:
    if dsn is not None and settings is not None:
        raise InvalidSettings("a DSN and settings were given: put the DSN into the settings")
    return (settings or Settings.load(dsn=dsn)).with_database()
