"""Refusals as rows of a table: every row is tried, and a failure names its row."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.kit.sql import Connection, refused

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


@contextmanager
def refused_row(name: object, sqlstate: str, word: str = "") -> Iterator[None]:
    """The block fails with this SQLSTATE, and the word is in the message, which is never long."""
    with refused(sqlstate, word, row=name) as caught:
        yield
    assert len(str(caught.value)) < 1000, f"{name}: the message has {len(str(caught.value))} characters"
