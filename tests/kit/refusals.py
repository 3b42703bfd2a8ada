"""Refusals as rows of a table: a row that is not refused as expected is named by the failure."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from tests.kit.sql import Connection


def assert_refused(conn: Connection, sqlstate: str, word: str, statement: str, *parameters: Any) -> None:
    """The statement fails with this SQLSTATE, and the word is in the message."""
    with refused_row(f"{statement} {parameters!s:.200}", sqlstate, word), conn.transaction():
        conn.execute(statement.encode(), parameters or None)


@contextmanager
def refused_row(name: object, sqlstate: str, word: str = "") -> Iterator[None]:
    """The block fails with this SQLSTATE, and the word is in the message, which is never long."""
    caught = None
    try:
        yield
    except psycopg.Error as error:
        caught = error
    assert caught is not None, f"not refused: {name}"
    assert caught.sqlstate == sqlstate, f"{name}: {caught.sqlstate} {caught}"
    assert word in str(caught), f"{name}: {caught}"
    assert len(str(caught)) < 1000, f"{name}: the message has {len(str(caught))} characters"
