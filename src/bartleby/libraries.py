"""The libraries a caller's connection may come from, recognised by the names of their classes.

Nothing is imported that the caller did not import.
"""

import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, LiteralString

from psycopg.pq import TransactionStatus

from bartleby.answers import Row
from bartleby.errors import InvalidArgument
from bartleby.pooling import async_rows, rows

Foreign = Any
"""An object of another library."""

_SUPPORTED = (
    "a connection, cursor or session of psycopg, psycopg2, SQLAlchemy (with psycopg, psycopg2 or asyncpg) or Django,"
    " or an awaited one of psycopg, SQLAlchemy or asyncpg"
)
_DRIVERS = {"psycopg", "psycopg2", "asyncpg"}
_PLACEHOLDER = re.compile(r"%s(::jsonb)?")


@dataclass(frozen=True, slots=True)
class Plain:
    """How a synchronous connection is used: opened, whether its transaction lasts beyond a statement, and its rows."""

    opened: Callable[[Foreign], Foreign]
    lasting: Callable[[Foreign], bool]
    rows: Callable[[Foreign, LiteralString, tuple[object, ...]], Sequence[Row]]


@dataclass(frozen=True, slots=True)
class Awaited:
    """The same of an asynchronous one."""

    opened: Callable[[Foreign], Awaitable[Foreign]]
    lasting: Callable[[Foreign], bool]
    rows: Callable[[Foreign, LiteralString, tuple[object, ...]], Awaitable[Sequence[Row]]]


def kind_of(connection: Foreign) -> Plain | Awaited:
    """Return how a connection is used, or say which ones can be."""
    for base in type(connection).__mro__:
        kind = _KINDS.get(f"{base.__module__.partition('.')[0]}.{base.__name__}")
        if kind is not None:
            return kind
    raise InvalidArgument(f"{full_name(connection)} is no connection that is known here", hint=f"give {_SUPPORTED}")


def full_name(thing: Foreign) -> str:
    """Return what something is."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _numbered(text: LiteralString) -> str:
    # A caller may have given asyncpg an encoder for jsonb; ours is a text already.
    numbers = count(1)
    return _PLACEHOLDER.sub(lambda found: f"${next(numbers)}{'::text::jsonb' if found[1] else ''}", text)


def _itself(connection: Foreign) -> Foreign:
    return connection


async def _awaited_itself(connection: Foreign) -> Foreign:
    return connection


def _its_connection(cursor: Foreign) -> Foreign:
    return cursor.connection


async def _awaited_its_connection(cursor: Foreign) -> Foreign:
    return cursor.connection


def _psycopg_lasts(connection: Foreign) -> bool:
    return not connection.autocommit or connection.info.transaction_status != TransactionStatus.IDLE


def _psycopg2_rows(connection: Foreign, text: LiteralString, parameters: tuple[object, ...]) -> Sequence[Row]:
    plain = sys.modules["psycopg2.extensions"].cursor  # the connection may make other rows
    with connection.cursor(cursor_factory=plain) as cursor:
        cursor.execute(text, parameters)
        return list(cursor.fetchall())


def _django_opened(connection: Foreign) -> Foreign:
    if getattr(connection, "vendor", None) != "postgresql":
        raise InvalidArgument("this connection of Django is not one to PostgreSQL", hint=f"give {_SUPPORTED}")
    return connection


def _django_lasts(connection: Foreign) -> bool:
    return bool(connection.in_atomic_block or not connection.get_autocommit())


def _django_rows(connection: Foreign, text: LiteralString, parameters: tuple[object, ...]) -> Sequence[Row]:
    with connection.cursor() as cursor:
        cursor.execute(text, parameters)
        return list(cursor.fetchall())


def _session_opened(session: Foreign) -> Foreign:
    return _alchemy_opened(session.connection())


async def _awaited_session_opened(session: Foreign) -> Foreign:
    return _alchemy_opened(await session.connection())


def _alchemy_opened(connection: Foreign) -> Foreign:
    dialect = connection.dialect
    if dialect.name != "postgresql" or dialect.driver not in _DRIVERS:
        raise InvalidArgument(f"SQLAlchemy uses {dialect.name}+{dialect.driver} here", hint=f"give {_SUPPORTED}")
    return connection


async def _awaited_alchemy_opened(connection: Foreign) -> Foreign:
    return _alchemy_opened(connection)


def _alchemy_lasts(connection: Foreign) -> bool:
    plain: Foreign = getattr(connection, "sync_connection", connection)
    return not plain.connection.dbapi_connection.autocommit


def _alchemy_text(connection: Foreign, text: LiteralString) -> str:
    return _numbered(text) if connection.dialect.driver == "asyncpg" else text


def _alchemy_rows(connection: Foreign, text: LiteralString, parameters: tuple[object, ...]) -> Sequence[Row]:
    answer = connection.exec_driver_sql(_alchemy_text(connection, text), parameters)
    return [tuple(row) for row in answer.fetchall()]


async def _awaited_alchemy_rows(
    connection: Foreign, text: LiteralString, parameters: tuple[object, ...]
) -> Sequence[Row]:
    answer = await connection.exec_driver_sql(_alchemy_text(connection, text), parameters)
    return [tuple(row) for row in answer.fetchall()]


def _asyncpg_lasts(connection: Foreign) -> bool:
    return bool(connection.is_in_transaction())


async def _asyncpg_rows(connection: Foreign, text: LiteralString, parameters: tuple[object, ...]) -> Sequence[Row]:
    return [tuple(row) for row in await connection.fetch(_numbered(text), *parameters)]


_session = Plain(_session_opened, _alchemy_lasts, _alchemy_rows)
_awaited_session = Awaited(_awaited_session_opened, _alchemy_lasts, _awaited_alchemy_rows)
_django = Plain(_django_opened, _django_lasts, _django_rows)
_asyncpg = Awaited(_awaited_itself, _asyncpg_lasts, _asyncpg_rows)

_KINDS: dict[str, Plain | Awaited] = {
    "psycopg.Connection": Plain(_itself, _psycopg_lasts, rows),
    "psycopg.Cursor": Plain(_its_connection, _psycopg_lasts, rows),
    "psycopg.AsyncConnection": Awaited(_awaited_itself, _psycopg_lasts, async_rows),
    "psycopg.AsyncCursor": Awaited(_awaited_its_connection, _psycopg_lasts, async_rows),
    "psycopg2.connection": Plain(_itself, _psycopg_lasts, _psycopg2_rows),
    "psycopg2.cursor": Plain(_its_connection, _psycopg_lasts, _psycopg2_rows),
    "sqlalchemy.Connection": Plain(_alchemy_opened, _alchemy_lasts, _alchemy_rows),
    "sqlalchemy.Session": _session,
    "sqlalchemy.scoped_session": _session,
    "sqlalchemy.AsyncConnection": Awaited(_awaited_alchemy_opened, _alchemy_lasts, _awaited_alchemy_rows),
    "sqlalchemy.AsyncSession": _awaited_session,
    "sqlalchemy.async_scoped_session": _awaited_session,
    "asyncpg.Connection": _asyncpg,
    "asyncpg.PoolConnectionProxy": _asyncpg,
    "django.BaseDatabaseWrapper": _django,
    "django.ConnectionProxy": _django,
}
