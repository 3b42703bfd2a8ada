"""When a page of letters is the last: told by one row more than asked for, or by a search that ended early."""

from dataclasses import fields
from typing import Any

import pytest

from bartleby import triage
from bartleby.evidence import DeadLetter

WIDTH = len(fields(DeadLetter))


def found(*ids: int) -> list[tuple[Any, ...]]:
    return [(number, *[None] * (WIDTH - 1), number, f"after {number}") for number in ids]


def gone(number: int) -> tuple[Any, ...]:
    return (*[None] * WIDTH, number, f"after {number}")


def ended_early(place: str) -> tuple[Any, ...]:
    return (*[None] * WIDTH, None, place)


@pytest.mark.parametrize(
    ("rows", "ids", "follows"),
    [
        ([], [], None),
        (found(1), [1], None),
        (found(1, 2), [1, 2], None),
        (found(1, 2, 3), [1, 2], "after 2"),
        ([ended_early("far")], [], "far"),
        ([*found(1), ended_early("far")], [1], "far"),
        ([*found(1, 2), ended_early("far")], [1, 2], "far"),
        ([*found(1), gone(2), *found(3)], [1], "after 2"),
        ([*found(1), gone(2)], [1], None),
    ],
)
def test_a_page_of_two(rows: list[tuple[Any, ...]], ids: list[int], follows: str | None) -> None:
    page = triage.dead_letters(limit=2).parse(rows)
    assert [letter.message_id for letter in page] == ids
    assert page.next == follows


@pytest.mark.parametrize(
    ("limit", "asked"), [(1, 2), (9999, 10_000), (10_000, 10_000), (0, 0), (-1, -1), (10_001, 10_001)]
)
def test_one_more_is_asked_for_where_it_may_be(limit: int, asked: int) -> None:
    assert triage.dead_letters(limit=limit).parameters[1] == asked


def test_the_largest_page_that_is_full_may_not_be_the_last() -> None:
    page = triage.dead_letters(limit=10_000).parse(found(*range(1, 10_001)))
    assert (len(page), page.next) == (10_000, "after 10000")
    assert triage.dead_letters(limit=10_000).parse(found(*range(1, 10_000))).complete
