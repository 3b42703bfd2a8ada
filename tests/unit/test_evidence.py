"""The nouns of failure decode what they hold when it is looked at."""

from bartleby.evidence import Count, Deed, GroupId, Page, SharedValue, term
from bartleby.message import MessageId
from bartleby.replays import Change


def test_a_page_is_its_items_and_knows_whether_more_follow() -> None:
    page = Page((1, 2, 3), "cursor")
    assert (list(page), len(page), page.complete) == ([1, 2, 3], 3, False)
    assert Page(()).complete
    assert not Page(())


def test_a_count_that_is_not_exact_says_so() -> None:
    assert str(Count(12345, exact=True)) == "12,345"
    assert str(Count(10000, exact=False)) == "10,000+"


def test_a_term_takes_its_value_as_it_is() -> None:
    assert term("queue", "billing.eu-1") == "queue:billing.eu-1"
    assert term("dead", "1..2") == 'dead:"1..2"'
    assert term("key", "") == 'key:""'
    assert term("key", 'a "b" c*,d') == 'key:"a \\"b\\" c*,d"'
    assert term("group", GroupId(5)) == "group:5"


def test_a_deed_is_refused_or_done() -> None:
    assert Deed(MessageId(1), "refused", "held by ana").refused
    assert not Deed(MessageId(1), "discarded", "discarded by ana just now: spam").refused


def test_payloads_are_decoded_when_they_are_looked_at() -> None:
    assert SharedValue("customer.id", "42", 9, 10).value == 42
    change = Change(MessageId(1), '{"a": 1}', "null")
    assert (change.before, change.after) == ({"a": 1}, None)
    undecodable = Change(MessageId(1), "1" * 5000, None)
    assert "1111" not in repr(undecodable)
