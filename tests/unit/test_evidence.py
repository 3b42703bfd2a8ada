"""Values that describe failures: pages, counts, filter terms, and payloads decoded on access."""

from dataclasses import fields
from typing import Any

from bartleby import triage
from bartleby.evidence import Count, DeadLetter, Deed, GroupId, Page, SharedValue, term
from bartleby.message import MessageId
from bartleby.replays import Change

WIDTH = len(fields(DeadLetter))


def test_values_count_quote_decode_and_mark_refusals() -> None:
    page = Page((1, 2, 3), "cursor")
    assert (list(page), len(page), page.complete) == ([1, 2, 3], 3, False)
    assert Page(()).complete
    assert not Page(())
    assert str(Count(12345, exact=True)) == "12,345"
    assert str(Count(10000, exact=False)) == "10,000+"
    terms = {
        "billing.eu-1": "billing.eu-1",
        "1..2": '"1..2"',
        "": '""',
        'a "b" c*,d': '"a \\"b\\" c*,d"',
        GroupId(5): "5",
    }
    assert {value: term("key", value) for value in terms} == {value: f"key:{quoted}" for value, quoted in terms.items()}
    assert SharedValue("customer.id", "42", 9, 10).value == 42
    change = Change(MessageId(1), '{"a": 1}', "null")
    assert (change.before, change.after) == ({"a": 1}, None)
    assert "1111" not in repr(Change(MessageId(1), "1" * 5000, None))
    assert Deed(MessageId(1), "refused", "held by ana").refused
    assert not Deed(MessageId(1), "discarded", "discarded by ana just now: spam").refused


def found(*ids: int) -> list[tuple[Any, ...]]:
    return [(number, *[None] * (WIDTH - 1), number, f"after {number}") for number in ids]


def gone(number: int) -> tuple[Any, ...]:
    return (*[None] * WIDTH, number, f"after {number}")


def ended_early(place: str) -> tuple[Any, ...]:
    return (*[None] * WIDTH, None, place)


def test_next_page_starts_after_the_last_letter_or_where_the_search_ended() -> None:
    rows: list[tuple[list[tuple[Any, ...]], list[int], str | None]] = [
        ([], [], None),
        (found(1), [1], None),
        (found(1, 2), [1, 2], None),
        (found(1, 2, 3), [1, 2], "after 2"),
        ([ended_early("far")], [], "far"),
        ([*found(1), ended_early("far")], [1], "far"),
        ([*found(1, 2), ended_early("far")], [1, 2], "far"),
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
