"""Databases for tests: copies of a template that has the schema and a clock to move.

They lie on the server of BARTLEBY_TEST_DSN, else on a PostgreSQL that is started for the purpose and removed with all
that is in it. BARTLEBY_DSN is never asked: that may be somebody's real database.
"""

import contextlib
import itertools
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from bartleby import dev, schema

_ENOUGH_MEMORY = 2 << 30
_SETTINGS = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "max_connections": "200"}

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A server on which test databases can be made."""

    dsn: str
    template: str
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """Make a database, return its address, and drop it at the end whoever is still connected."""
        name = f"{self.template}_{next(self._numbers)}"
        with _made(self.dsn, name, self.template) as dsn:
            yield dsn


@contextlib.contextmanager
def sandbox() -> Iterator[Sandbox]:
    """Find or start a server, and make the template."""
    template = f"bartleby_test_{os.getpid()}_{secrets.token_hex(3)}"
    with _server() as dsn, _made(dsn, template, "template1") as made:
        with psycopg.connect(made, autocommit=True) as connection:
            schema.install(connection)
            connection.execute((files("bartleby") / "testing" / "clock.sql").read_bytes())
        yield Sandbox(dsn, template)


@contextlib.contextmanager
def _server() -> Iterator[str]:
    given = os.environ.get("BARTLEBY_TEST_DSN")
    if given:
        yield given
        return
    folder = Path(tempfile.mkdtemp(prefix="bartleby-test-", dir=_place()))
    try:
        with dev.start(folder, settings=_SETTINGS) as server:
            yield server.dsn
    except dev.NoPostgres as error:
        raise dev.NoPostgres(f"{error}\n  BARTLEBY_TEST_DSN=postgresql://...  makes test databases there") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _place() -> str | None:
    # In memory if there is plenty of it: making a database takes a tenth of the time there.
    memory = Path("/dev/shm")  # noqa: S108 - only a directory that mkdtemp makes is used in it
    if not os.access(memory, os.W_OK):
        return None
    state = os.statvfs(memory)
    return (
        str(memory) if state.f_bavail * state.f_frsize >= _ENOUGH_MEMORY and not state.f_flag & os.ST_NOEXEC else None
    )


@contextlib.contextmanager
def _made(dsn: str, name: str, template: str) -> Iterator[str]:
    create = sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template))
    _execute(dsn, create)
    try:
        yield _address(dsn, name)
    finally:
        _execute(dsn, sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))


def _execute(dsn: str, statement: sql.Composed) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(statement)


def _address(dsn: str, name: str) -> str:
    # A URL stays one, for libraries that know nothing else.
    return urlsplit(dsn)._replace(path=f"/{name}").geturl() if "://" in dsn else make_conninfo(dsn, dbname=name)
