"""What an event looks like when it leaves, and which go together."""

from typing import Any

import pytest

from bartleby.dressing import Item, NotAnEvent, chunk, dressed, event_number, redacted, reference_of, size_of, told


def event(subject: str, **data: Any) -> dict[str, Any]:
    return {"id": "0123abcd.7.2", "subject": subject, "data": data}


@pytest.mark.parametrize(
    ("payload", "reference"),
    [
        ({"event": 7}, {"event": 7}),
        ({"event": 7, "ordinals": [1, 100]}, {"event": 7, "ordinals": [1, 100]}),
        ({"event": 7, "ordinals": None}, {"event": 7}),
    ],
)
def test_a_reference(payload: object, reference: object) -> None:
    assert reference_of(payload) == reference


@pytest.mark.parametrize(
    "payload",
    [
        None,
        7,
        "event",
        [],
        {},
        {"event": None},
        {"event": "7"},
        {"event": True},
        {"event": 7.5},
        {"event": 2**63},
        {"event": 7, "ordinals": [-1]},
        {"event": 7, "ordinals": 1},
        {"event": 7, "ordinals": ["1"]},
        {"event": 7, "ordinals": [True]},
        {"event": 7, "else": 1},
        {"document": {"id": "x"}},
    ],
)
def test_what_is_no_reference_is_an_error(payload: object) -> None:
    with pytest.raises(NotAnEvent):
        reference_of(payload)


def test_the_row_of_an_event_is_in_its_id() -> None:
    assert event_number({"id": "0123abcd.7.2"}) == event_number({"id": "0123abcd.7"}) == 7


def test_a_chunk_has_no_subject_twice_and_is_not_too_large() -> None:
    items = [Item(event(subject)) for subject in ("a", "b", "c", "a", "d")]
    assert chunk(items, 500, 1000) == items[:3]
    assert chunk(items[3:], 500, 1000) == items[3:]
    assert chunk(items, 2, 1000) == items[:2]
    assert chunk([], 5, 1000) == []
    for item in items:
        item.size = 400
    assert chunk(items, 500, 1000) == items[:2]
    assert chunk(items, 500, 300) == items[:1]  # it has to go somehow


def test_a_link_is_filled_in_where_all_of_it_is_known() -> None:
    letter = event("message/7", message_id=7, queue="or ders")
    assert dressed(letter, "https://x/{queue}/{message_id}")["data"]["link"] == "https://x/or%20ders/7"
    assert "link" not in dressed(event("group/3", group_id=3), "https://x/{message_id}")["data"]
    assert dressed(event("group/3", group_id=3), "https://x/{group_id}?a={b}")["data"]["link"] == "https://x/3?a={b}"
    assert dressed(letter, None) == letter
    assert dressed(event("group/3", group_id=3, link="https://wiki"), "https://x/{group_id}")["data"]["link"] == (
        "https://wiki"
    )
    assert "link" not in letter["data"]


def test_payload_and_headers_lose_their_secrets_and_nothing_else() -> None:
    payload = {
        "user": {"password": "geheim", "api_key": 5, "token": None, "name": "Ann"},
        "cards": ["4111 1111 1111 1111", 42, True, None, 1.5],
        "note": "postgresql://me:geheim@host/db and Authorization: Bearer abcdefgh12345678",
    }
    found = redacted(payload)
    assert found["user"] == {"password": "***", "api_key": "***", "token": None, "name": "Ann"}
    assert found["cards"] == ["***", 42, True, None, 1.5]
    assert "geheim" not in found["note"]
    assert "12345678" not in found["note"]
    left = dressed(event("message/1", error="password=x", payload=payload, headers={"Cookie": "a=b"}), None)["data"]
    assert left["headers"] == {"Cookie": "***"}
    assert left["payload"] == found


def test_what_is_too_deep_to_look_into_is_left_out() -> None:
    deep: Any = "password=geheim"
    for _ in range(5000):
        deep = [deep]
    assert dressed(event("message/1", payload=deep), None)["data"]["payload"] == "***"
    assert size_of(event("message/1", payload=deep)) == 1000


def test_what_a_sink_says_is_one_line_without_secrets() -> None:
    assert told("nats://me:geheim@host:4222\n  cannot be reached") == "nats://me:***@host:4222 cannot be reached"
    assert len(told("x" * 100_000)) <= 1100
