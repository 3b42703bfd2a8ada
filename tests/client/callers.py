"""A caller's transaction in every supported library, with one interface for tests."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
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
    """A transaction that has begun, and the verbs of an app that are run in it, as plain functions.

    `connection` is given to the app; `cursor` executes statements, and `ends` commits or rolls back. If there is a
    `wait`, all of them are awaited.
    """

    connection: Any
    cursor: Any
    ends: Any
    wait: Callable[[Coroutine[Any, Any, Any]], Any] | None = None
    statement: Callable[[str], object] = str

    def execute(self, text: str) -> None:
        self.result(self.cursor.execute(self.statement(text)))

    def commit(self) -> None:
        self.result(self.ends.commit())

    def rollback(self) -> None:
        self.result(self.ends.rollback())

    def send(self, app: Bartleby, *args: Any, **kwargs: Any) -> Any:
        return self.result((app.asend if self.wait else app.send)(*args, connection=self.connection, **kwargs))

    def send_many(self, app: Bartleby, *args: Any) -> Any:
        using = app.using(self.connection)
        return self.result((using.asend_many if self.wait else using.send_many)(*args))

    def mark_handled(self, app: Bartleby, message: Message, **kwargs: Any) -> None:
        self.result((app.amark_handled if self.wait else app.mark_handled)(message, self.connection, **kwargs))

    def result(self, found: Any) -> Any:
        return self.wait(found) if self.wait else found


Begin = Callable[[str], AbstractContextManager[Caller]]


@contextmanager
def driver(connect: Callable[[str], Any], dsn: str, *, cursor: bool = False, awaited: bool = False) -> Iterator[Caller]:
    with asyncio.Runner() as loop:
        connection = loop.run(connect(dsn)) if awaited else connect(dsn)
        executing = connection.cursor()
        caller = Caller(executing if cursor else connection, executing, connection, loop.run if awaited else None)
        yield caller
        caller.result(connection.close())


@contextmanager
def with_alchemy(opening: Callable[[Any], Any], name: str, dsn: str, *, awaited: bool = False) -> Iterator[Caller]:
    create: Callable[..., Any] = alchemy.create_async_engine if awaited else sqlalchemy.create_engine
    with asyncio.Runner() as loop:
        opened = opening(create(with_driver(dsn, name), poolclass=NullPool))
        if isinstance(opened, alchemy.AsyncConnection):
            loop.run(finished(opened))
        caller = Caller(opened, opened, opened, loop.run if awaited else None, sqlalchemy.text)
        yield caller
        caller.result(opened.close())


class Atomic:
    """A block of Django that ends before its `with` would."""

    def __init__(self) -> None:
        self.block = transaction.atomic()
        self.block.__enter__()

    def commit(self) -> None:
        self.block.__exit__(None, None, None)

    def rollback(self) -> None:
        transaction.set_rollback(True)
        self.commit()


@contextmanager
def django_connection(pick: Callable[[], Any], dsn: str) -> Iterator[Caller]:
    use_django(dsn)
    yield Caller(pick(), django.db.connection.cursor(), Atomic())
    connections["default"].close()
    del connections["default"]


def use_django(dsn: str) -> None:
    if not django.conf.settings.configured:
        django.conf.settings.configure(USE_TZ=True, DATABASES={}, LOGGING_CONFIG=None)
        django.setup()
    parts = psycopg.conninfo.conninfo_to_dict(dsn)
    place = {"HOST": parts["host"], "PORT": parts["port"], "USER": parts["user"], "PASSWORD": parts["password"]}
    database = {"ENGINE": "django.db.backends.postgresql", "NAME": parts["dbname"], **place}
    connections.settings = connections.configure_settings({"default": database})


@contextmanager
def awaited_asyncpg(dsn: str, *, pooled: bool = False) -> Iterator[Caller]:
    with asyncio.Runner() as loop:
        pool = loop.run(finished(asyncpg.create_pool(dsn, min_size=1, max_size=1))) if pooled else None
        connection: Any = loop.run(finished(pool.acquire() if pool else asyncpg.connect(dsn)))
        block = connection.transaction()
        loop.run(block.start())
        yield Caller(connection, connection, block, loop.run)
        loop.run(finished(pool.release(connection)) if pool else connection.close())
        if pool:
            loop.run(pool.close())


async def finished(waiting: Awaitable[Any]) -> Any:
    return await waiting


def with_driver(dsn: str, name: str) -> str:
    return dsn.replace("postgresql://", f"postgresql+{name}://")


def scoped_session(engine: sqlalchemy.Engine) -> Any:
    return orm.scoped_session(orm.sessionmaker(engine))


def async_scoped_session(engine: alchemy.AsyncEngine) -> Any:
    return alchemy.async_scoped_session(alchemy.async_sessionmaker(engine), lambda: None)


CALLERS: dict[str, Begin] = {
    "psycopg": partial(driver, psycopg.connect),
    "psycopg cursor": partial(driver, psycopg.connect, cursor=True),
    "psycopg2": partial(driver, psycopg2.connect),
    "psycopg2 cursor": partial(driver, psycopg2.connect, cursor=True),
    "SQLAlchemy Session, psycopg": partial(with_alchemy, orm.Session, "psycopg"),
    "SQLAlchemy Session, psycopg2": partial(with_alchemy, orm.Session, "psycopg2"),
    "SQLAlchemy scoped_session": partial(with_alchemy, scoped_session, "psycopg"),
    "SQLAlchemy Connection, psycopg": partial(with_alchemy, sqlalchemy.Engine.connect, "psycopg"),
    "SQLAlchemy Connection, psycopg2": partial(with_alchemy, sqlalchemy.Engine.connect, "psycopg2"),
    "Django connection": partial(django_connection, lambda: django.db.connection),
    "Django connections": partial(django_connection, lambda: connections["default"]),
    "psycopg awaited": partial(driver, psycopg.AsyncConnection.connect, awaited=True),
    "psycopg awaited cursor": partial(driver, psycopg.AsyncConnection.connect, cursor=True, awaited=True),
    "SQLAlchemy AsyncSession, psycopg": partial(with_alchemy, alchemy.AsyncSession, "psycopg", awaited=True),
    "SQLAlchemy AsyncSession, asyncpg": partial(with_alchemy, alchemy.AsyncSession, "asyncpg", awaited=True),
    "SQLAlchemy async_scoped_session": partial(with_alchemy, async_scoped_session, "asyncpg", awaited=True),
    "SQLAlchemy AsyncConnection, psycopg": partial(with_alchemy, alchemy.AsyncEngine.connect, "psycopg", awaited=True),
    "SQLAlchemy AsyncConnection, asyncpg": partial(with_alchemy, alchemy.AsyncEngine.connect, "asyncpg", awaited=True),
    "asyncpg": awaited_asyncpg,
    "asyncpg pool": partial(awaited_asyncpg, pooled=True),
}
