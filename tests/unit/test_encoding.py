"""Payloads: values survive encoding and decoding, and what cannot be sent is refused before anything is sent."""

import json
import math
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bartleby import message
from bartleby.errors import InvalidMessage, UndecodablePayload
from bartleby.message import LeaseId, Message, MessageId, Position, checked_key, decode, encode

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=20)


def same(one: Any, other: Any) -> bool:
    """Equal in value and in type: 1, 1.0 and True are three different things."""
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return type(one) is type(other) and one == other


@settings(derandomize=True, deadline=None)
@given(VALUES)
@example(2**53 + 1)
@example(-(2**64) - 1)
@example([2**63, 2**64, 10**30, 0.1 + 0.2, 5e-324])
@example([10**4299, 0.1, 1e-323, 1.7976931348623157e308, 123456789012345678901234567890])
@example({"": "\\u0000", "\\": ["\\\\u0000", '"\\u0000"', "\\" * 5 + "u0000", "\u2028\x7f\x9b\U0001f600"]})
def test_decoding_returns_the_encoded_value_with_both_loaders(value: Any) -> None:
    text = encode(value)
    assert same(decode(text), value)
    assert same(json.loads(text), value)
    assert decode("1" + "0" * 400) == 10**400, "jsonb prints 1e400 with all its digits"


def test_tuples_arrive_as_lists_and_keys_as_text() -> None:
    assert decode(encode({"pair": (1, 2)})) == {"pair": [1, 2]}
    keys = {1: "a", False: "b", None: "c", 2.5: "d"}
    assert decode(encode(keys)) == {"1": "a", "false": "b", "null": "c", "2.5": "d"}


def test_what_json_cannot_hold_is_refused_with_the_reason() -> None:
    circle: list[Any] = []
    circle.append({"again": circle})
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    rows: list[tuple[object, str]] = [
        (math.nan, "Out of range"), ({"a": [-math.inf]}, "Out of range"), ({"a\0b": 1}, "NUL"), (["\\\0"], "NUL"),
        ("\\\\u0000\0", "NUL"), ("\ud800", "lone surrogate"), ({"\udfff": 1}, "lone surrogate"), (10**5000, "4300"),
        (Decimal(1), "Decimal is not JSON serializable"), ({(1, 2): 3}, "keys must be str"),
        (deep, "nested too deep"), (circle, "Circular|contains itself"),
    ]  # fmt: skip
    for value, problem in rows:
        with pytest.raises(InvalidMessage, match=f"^message 7: .*({problem})") as caught:
            encode(value, index=7)
        assert caught.value.index == 7, problem


@pytest.mark.parametrize("orjson", [True, False])
def test_text_that_python_cannot_read_or_that_is_too_deep_for_the_stack_is_undecodable(
    orjson: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not orjson:
        monkeypatch.setattr(message, "_fast_loads", json.loads)
    for text in ("", "{", "nul", "[1,]", "1" * 4301, "1" + "0" * 130000, "[" * 5000 + "]" * 5000):
        with pytest.raises(UndecodablePayload, match=f"{len(text)} characters"):
            decode(text)
    text = "[" * 450 + "1234567890123456" + "]" * 450

    def low_on_stack(left: int, action: Callable[[], Any]) -> Any:
        return action() if left == 0 else low_on_stack(left - 1, action)

    frames = 0
    frame = sys._getframe()
    while frame.f_back is not None:
        frames, frame = frames + 1, frame.f_back
    with pytest.raises(UndecodablePayload):
        low_on_stack(sys.getrecursionlimit() - frames - 300, lambda: decode(text))
    assert decode(text)


def test_undecodable_message_has_its_text_and_a_key_is_checked() -> None:
    ids = MessageId(1), "orders", LeaseId(2), Position(3)
    undecodable = Message(*ids, 1, "1" * 5000, None, None, None, datetime.now(UTC), solo=False)
    with pytest.raises(UndecodablePayload):
        _ = undecodable.payload
    assert (undecodable.raw, undecodable.headers) == ("1" * 5000, {})
    assert "11111" not in repr(undecodable)
    for key in ("Straße ☃ \U0001f600", r"\u0000", " "):
        assert checked_key(key) == key
    for key in ("a\0b", "\ud800"):
        with pytest.raises(InvalidMessage, match="key"):
            checked_key(key)
