"""Refusals as rows of a table: every row is tried, and a failure names its row."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg

from tests.kit.sql import Connection

Refusal = tuple[str, Callable[[], object], str, str]


def assert_refused(conn: Connection, sqlstate: str, word: str, statement: str, *parameters: Any) -> None:
    """The statement fails with this SQLSTATE, and the word is in the message."""
    with refused_row(f"{statement} {parameters!s:.200}", sqlstate, word), conn.transaction():
        conn.execute(statement.encode(), parameters or None)


def check_refusals(refusals: Iterable[Refusal]) -> None:
    """Each row is a name, a call, the SQLSTATE it is refused with, and a part of the message."""
    for name, call, sqlstate, words in refusals:
        with refused_row(name, sqlstate, words):
            call()


def check_refused_queries(conn: Connection, sqlstate: str, words: str, *queries: str) -> None:
    """Each query is refused with this SQLSTATE and says these words."""
    check_refusals((query, partial(conn.execute, query.encode()), sqlstate, words) for query in queries)


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
