"""How the rows of an answer are read; calls name one of these as their parser."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Row = tuple[Any, ...]


def nothing(_rows: Sequence[Row]) -> None:
    """Return nothing: the call is made for its effect."""


def scalar(rows: Sequence[Row]) -> Any:  # noqa: ANN401 - each call says what it is
    """Return the one value there is."""
    return rows[0][0]


def column(rows: Sequence[Row]) -> list[Any]:
    """Return the first value of each row."""
    return [row[0] for row in rows]


def every(kind: Callable[..., T]) -> Callable[[Sequence[Row]], list[T]]:
    """Return a parser that makes one of these of each row."""
    return lambda rows: [kind(*row) for row in rows]


def first(kind: Callable[..., T]) -> Callable[[Sequence[Row]], T | None]:
    """Return a parser that makes one of these of the first row, and None of no rows."""
    return lambda rows: kind(*rows[0]) if rows else None
