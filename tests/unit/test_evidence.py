"""Pages of dead letters: where the next one starts, and how many rows are requested."""

from dataclasses import fields
from typing import Any

from bartleby import triage
from bartleby.evidence import DeadLetter

WIDTH = len(fields(DeadLetter))


def found(*ids: int) -> list[tuple[Any, ...]]:
    return [(number, *[None] * (WIDTH - 1), number, f"after {number}") for number in ids]


def gone(number: int) -> tuple[Any, ...]:
    return (*[None] * WIDTH, number, f"after {number}")


ENDED_EARLY = (*[None] * WIDTH, None, "far")


def test_next_page_starts_after_the_last_letter_or_where_the_search_ended() -> None:
    rows: list[tuple[list[tuple[Any, ...]], list[int], str | None]] = [
        ([], [], None),
        (found(1, 2), [1, 2], None),
        (found(1, 2, 3), [1, 2], "after 2"),
        ([ENDED_EARLY], [], "far"),
        ([*found(1, 2), ENDED_EARLY], [1, 2], "far"),
        ([*found(1), gone(2), *found(3)], [1], "after 2"),
        ([*found(1), gone(2)], [1], None),
    ]
    for number, (answer, ids, follows) in enumerate(rows):
        page = triage.dead_letters(limit=2).parse(answer)
        assert ([letter.message_id for letter in page], page.next) == (ids, follows), number


def test_one_row_more_is_requested_unless_the_page_has_the_largest_size() -> None:
    for limit, requested in ((1, 2), (9999, 10_000), (10_000, 10_000), (0, 0), (-1, -1), (10_001, 10_001)):
        assert triage.dead_letters(limit=limit).parameters[1] == requested
    page = triage.dead_letters(limit=10_000).parse(found(*range(1, 10_001)))
    assert (len(page), page.next) == (10_000, "after 10000")
    assert triage.dead_letters(limit=10_000).parse(found(*range(1, 10_000))).complete
