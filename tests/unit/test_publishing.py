"""Events before they are published: references, batches, links, redaction."""

from typing import Any

import pytest

from bartleby.dressing import Item, NotAnEvent, chunk, dressed, event_number, reference_of, size_of, told


def event(subject: str, **data: Any) -> dict[str, Any]:
    return {"id": "0123abcd.7.2", "subject": subject, "data": data}


def test_reference_is_read_or_refused() -> None:
    assert reference_of({"event": 7}) == reference_of({"event": 7, "ordinals": None}) == {"event": 7}
    assert reference_of({"event": 7, "ordinals": [1, 100]}) == {"event": 7, "ordinals": [1, 100]}
    payloads: list[object] = [
        None, 7, "event", [], {}, {"event": None}, {"event": "7"}, {"event": True}, {"event": 7.5}, {"event": 2**63},
        {"event": 7, "ordinals": [-1]}, {"event": 7, "ordinals": 1}, {"event": 7, "ordinals": ["1"]},
        {"event": 7, "ordinals": [True]}, {"event": 7, "else": 1}, {"document": {"id": "x"}},
    ]  # fmt: skip
    for payload in payloads:
        with pytest.raises(NotAnEvent):
            reference_of(payload)
    assert event_number({"id": "0123abcd.7.2"}) == event_number({"id": "0123abcd.7"}) == 7


def test_batch_has_each_subject_once_and_a_limited_size() -> None:
    items = [Item(event(subject)) for subject in ("a", "b", "c", "a", "d")]
    assert chunk(items, 500, 1000) == items[:3]
    assert chunk(items, 2, 1000) == items[:2]
    for item in items:
        item.size = 400
    assert chunk(items, 500, 1000) == items[:2]
    assert chunk(items, 500, 300) == items[:1]  # an event larger than the limit goes alone


def test_link_is_added_if_all_its_fields_are_known() -> None:
    letter = event("message/7", message_id=7, queue="or ders")
    assert dressed(letter, "https://x/{queue}/{message_id}")["data"]["link"] == "https://x/or%20ders/7"
    assert "link" not in dressed(event("group/3", group_id=3), "https://x/{message_id}")["data"]
    assert dressed(event("group/3", group_id=3), "https://x/{group_id}?a={b}")["data"]["link"] == "https://x/3?a={b}"
    assert dressed(letter, None) == letter
    own = event("group/3", group_id=3, link="https://wiki")
    assert dressed(own, "https://x/{group_id}") == own


def test_payload_and_headers_are_redacted() -> None:
    payload = {
        "user": {"password": "geheim", "api_key": 5, "token": None, "name": "Ann"},
        "cards": ["4111 1111 1111 1111", 42, True, None, 1.5],
        "note": "postgresql://me:geheim@host/db",
    }
    left = dressed(event("message/1", payload=payload, headers={"Cookie": "a=b"}), None)["data"]
    assert left["payload"]["user"] == {"password": "***", "api_key": "***", "token": None, "name": "Ann"}
    assert left["payload"]["cards"] == ["***", 42, True, None, 1.5]
    assert ("geheim" in left["payload"]["note"], left["headers"]) == (False, {"Cookie": "***"})
    deep: Any = "password=geheim"
    for _ in range(5000):
        deep = [deep]
    assert dressed(event("message/1", payload=deep), None)["data"]["payload"] == "***"
    assert size_of(event("message/1", payload=deep)) == 1000
    assert told("nats://me:geheim@host:4222\n  cannot be reached") == "nats://me:***@host:4222 cannot be reached"
    assert len(told("x" * 100_000)) <= 1100
