"""A caller's transaction in every supported library, with one interface for tests."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import django
import django.conf
import django.db
import psycopg
import psycopg2  # type: ignore[import-untyped]
import sqlalchemy
from django.db import connections, transaction
from sqlalchemy import NullPool, orm
from sqlalchemy.ext import asyncio as alchemy

from bartleby import Message
from bartleby.app import Bartleby

# Django refuses to use a connection where an event loop runs, and pytest-asyncio may run one.
os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"


@dataclass(frozen=True)
class Caller:
    """A transaction that has begun, and the verbs of an app that are run in it, as plain functions."""

    connection: Any
    execute: Callable[[str], object]
    commit: Callable[[], object]
    rollback: Callable[[], object]
    wait: Callable[[Coroutine[Any, Any, Any]], Any] | None = None

    def send(self, app: Bartleby, *args: Any, **kwargs: Any) -> Any:
        if self.wait is None:
            return app.send(*args, connection=self.connection, **kwargs)
        return self.wait(app.asend(*args, connection=self.connection, **kwargs))

    def send_many(self, app: Bartleby, *args: Any) -> Any:
        using = app.using(self.connection)
        return using.send_many(*args) if self.wait is None else self.wait(using.asend_many(*args))

    def mark_handled(self, app: Bartleby, message: Message, **kwargs: Any) -> None:
        if self.wait is None:
            app.mark_handled(message, self.connection, **kwargs)
        else:
            self.wait(app.amark_handled(message, self.connection, **kwargs))


Begin = Callable[[str], AbstractContextManager[Caller]]


@contextmanager
def psycopg_connection(dsn: str, pick: Callable[[Any], Any] = lambda connection: connection) -> Iterator[Caller]:
    connection = psycopg.connect(dsn)
    yield Caller(
        pick(connection), lambda text: connection.execute(text.encode()), connection.commit, connection.rollback
    )
    connection.close()


def psycopg_cursor(dsn: str) -> AbstractContextManager[Caller]:
    return psycopg_connection(dsn, lambda connection: connection.cursor())


@contextmanager
def psycopg2_connection(dsn: str, pick: Callable[[Any], Any] = lambda connection: connection) -> Iterator[Caller]:
    connection = psycopg2.connect(dsn)

    def execute(text: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(text)

    yield Caller(pick(connection), execute, connection.commit, connection.rollback)
    connection.close()


def psycopg2_cursor(dsn: str) -> AbstractContextManager[Caller]:
    return psycopg2_connection(dsn, lambda connection: connection.cursor())


@contextmanager
def session(dsn: str, driver: str = "psycopg", *, scoped: bool = False) -> Iterator[Caller]:
    engine = sqlalchemy.create_engine(with_driver(dsn, driver), poolclass=NullPool)
    maker = orm.sessionmaker(engine)
    opened: Any = orm.scoped_session(maker) if scoped else maker()
    yield Caller(opened, lambda text: opened.execute(sqlalchemy.text(text)), opened.commit, opened.rollback)
    opened.close()
    engine.dispose()


@contextmanager
def alchemy_connection(dsn: str, driver: str = "psycopg") -> Iterator[Caller]:
    engine = sqlalchemy.create_engine(with_driver(dsn, driver), poolclass=NullPool)
    with engine.connect() as connection:
        yield Caller(
            connection,
            lambda text: connection.execute(sqlalchemy.text(text)),
            connection.commit,
            connection.rollback,
        )
    engine.dispose()


@contextmanager
def django_connection(dsn: str, pick: Callable[[], Any] = lambda: django.db.connection) -> Iterator[Caller]:
    use_django(dsn)
    block = transaction.atomic()
    block.__enter__()
    ended = []

    def execute(text: str) -> None:
        with django.db.connection.cursor() as cursor:
            cursor.execute(text)

    def end(*, wanted: bool) -> None:
        if not wanted:
            transaction.set_rollback(True)
        ended.append(True)
        block.__exit__(None, None, None)

    yield Caller(pick(), execute, lambda: end(wanted=True), lambda: end(wanted=False))
    if not ended:
        end(wanted=False)
    connections["default"].close()
    del connections["default"]


def django_connections(dsn: str) -> AbstractContextManager[Caller]:
    return django_connection(dsn, lambda: connections["default"])


def use_django(dsn: str) -> None:
    if not django.conf.settings.configured:
        django.conf.settings.configure(USE_TZ=True, DATABASES={}, LOGGING_CONFIG=None)
        django.setup()
    parts = psycopg.conninfo.conninfo_to_dict(dsn)
    place = {"HOST": parts["host"], "PORT": parts["port"], "USER": parts["user"], "PASSWORD": parts["password"]}
    database = {"ENGINE": "django.db.backends.postgresql", "NAME": parts["dbname"], **place}
    connections.settings = connections.configure_settings({"default": database})


@contextmanager
def awaited_psycopg(dsn: str, pick: Callable[[Any], Any] = lambda connection: connection) -> Iterator[Caller]:
    with asyncio.Runner() as loop:
        connection = loop.run(psycopg.AsyncConnection.connect(dsn))
        yield Caller(
            pick(connection),
            lambda text: loop.run(connection.execute(text.encode())),
            lambda: loop.run(connection.commit()),
            lambda: loop.run(connection.rollback()),
            loop.run,
        )
        loop.run(connection.close())


def awaited_psycopg_cursor(dsn: str) -> AbstractContextManager[Caller]:
    return awaited_psycopg(dsn, lambda connection: connection.cursor())


@contextmanager
def awaited_session(dsn: str, driver: str, *, scoped: bool = False) -> Iterator[Caller]:
    engine = alchemy.create_async_engine(with_driver(dsn, driver), poolclass=NullPool)
    maker = alchemy.async_sessionmaker(engine)
    opened: Any = alchemy.async_scoped_session(maker, lambda: None) if scoped else maker()
    with asyncio.Runner() as loop:
        yield Caller(
            opened,
            lambda text: loop.run(opened.execute(sqlalchemy.text(text))),
            lambda: loop.run(opened.commit()),
            lambda: loop.run(opened.rollback()),
            loop.run,
        )
        loop.run(opened.close())
        loop.run(engine.dispose())


@contextmanager
def awaited_alchemy_connection(dsn: str, driver: str) -> Iterator[Caller]:
    engine = alchemy.create_async_engine(with_driver(dsn, driver), poolclass=NullPool)
    with asyncio.Runner() as loop:
        connection = loop.run(started(engine.connect()))
        yield Caller(
            connection,
            lambda text: loop.run(connection.execute(sqlalchemy.text(text))),
            lambda: loop.run(connection.commit()),
            lambda: loop.run(connection.rollback()),
            loop.run,
        )
        loop.run(connection.close())
        loop.run(engine.dispose())


async def started(connection: alchemy.AsyncConnection) -> alchemy.AsyncConnection:
    return await connection


@contextmanager
def asyncpg_connection(dsn: str, *, pooled: bool = False) -> Iterator[Caller]:
    with asyncio.Runner() as loop:
        pool = loop.run(started_pool(dsn)) if pooled else None
        connection: Any = loop.run(acquired(pool)) if pool else loop.run(asyncpg.connect(dsn))
        block = connection.transaction()
        loop.run(block.start())
        yield Caller(
            connection,
            lambda text: loop.run(connection.execute(text)),
            lambda: loop.run(block.commit()),
            lambda: loop.run(block.rollback()),
            loop.run,
        )
        if pool:
            loop.run(pool.release(connection))
            loop.run(pool.close())
        else:
            loop.run(connection.close())


async def started_pool(dsn: str) -> Any:
    return await asyncpg.create_pool(dsn, min_size=1, max_size=1)


async def acquired(pool: Any) -> Any:
    return await pool.acquire()


def asyncpg_pool(dsn: str) -> AbstractContextManager[Caller]:
    return asyncpg_connection(dsn, pooled=True)


def with_driver(dsn: str, driver: str) -> str:
    return dsn.replace("postgresql://", f"postgresql+{driver}://")


CALLERS: dict[str, Begin] = {
    "psycopg": psycopg_connection,
    "psycopg cursor": psycopg_cursor,
    "psycopg2": psycopg2_connection,
    "psycopg2 cursor": psycopg2_cursor,
    "SQLAlchemy Session, psycopg": session,
    "SQLAlchemy Session, psycopg2": lambda dsn: session(dsn, "psycopg2"),
    "SQLAlchemy scoped_session": lambda dsn: session(dsn, scoped=True),
    "SQLAlchemy Connection, psycopg": alchemy_connection,
    "SQLAlchemy Connection, psycopg2": lambda dsn: alchemy_connection(dsn, "psycopg2"),
    "Django connection": django_connection,
    "Django connections": django_connections,
    "psycopg awaited": awaited_psycopg,
    "psycopg awaited cursor": awaited_psycopg_cursor,
    "SQLAlchemy AsyncSession, psycopg": lambda dsn: awaited_session(dsn, "psycopg"),
    "SQLAlchemy AsyncSession, asyncpg": lambda dsn: awaited_session(dsn, "asyncpg"),
    "SQLAlchemy async_scoped_session": lambda dsn: awaited_session(dsn, "asyncpg", scoped=True),
    "SQLAlchemy AsyncConnection, psycopg": lambda dsn: awaited_alchemy_connection(dsn, "psycopg"),
    "SQLAlchemy AsyncConnection, asyncpg": lambda dsn: awaited_alchemy_connection(dsn, "asyncpg"),
    "asyncpg": asyncpg_connection,
    "asyncpg pool": asyncpg_pool,
}
