"""The clock of a test database: stopped, and moved by the test."""

from datetime import datetime, timedelta
from typing import Any, LiteralString, Self

import psycopg

from bartleby.app import Bartleby
from bartleby.config import Settings
from bartleby.errors import InvalidArgument

_MISSING = ("3F000", "42P01", "42883")


class Clock:
    """The clock of one test database. In a `with` it goes on at the end, from where it is."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def now(self) -> datetime:
        """Return what it says."""
        now: datetime = self._ask("select coalesce(frozen_at, clock_timestamp()) + shift from bartleby_testing.clock")
        return now

    def advance(self, by: float | timedelta) -> None:
        """Move it by so many seconds, and wake the workers that wait for a time."""
        seconds = by.total_seconds() if isinstance(by, timedelta) else by
        self._ask("select bartleby_testing.advance(make_interval(secs => %s::float8))", seconds)

    def freeze(self) -> None:
        """Stop it where it is."""
        self._ask("select bartleby_testing.freeze(true)")

    def go_on(self) -> None:
        """Let it go on from where it is."""
        self._ask("select bartleby_testing.freeze(false)")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on()

    def _ask(self, text: LiteralString, *parameters: object) -> Any:  # noqa: ANN401 - each question has its answer
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            try:
                return connection.execute(text, parameters).fetchall()[0][0]
            except psycopg.Error as error:
                if error.sqlstate not in _MISSING:
                    raise
                name = connection.info.dbname
                raise InvalidArgument(
                    f"the clock of database {name!r} is not moved: bartleby.testing did not make that database",
                    hint="use the fixture: from bartleby.testing import bartleby_database",
                ) from None


def frozen_clock(database: Bartleby | str) -> Clock:
    """Stop the clock of a test database, and return it. Only databases of `bartleby_database` have such a clock."""
    clock = Clock(dsn_of(database))
    clock.freeze()
    return clock


def dsn_of(database: Bartleby | str) -> str:
    """Return the address of an application's database."""
    settings = Settings(dsn=database) if isinstance(database, str) else database.settings
    return settings.with_database().dsn or ""
