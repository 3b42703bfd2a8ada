"""Payloads: what goes in comes out, and what cannot go in is refused with a reason before anything is sent."""

import json
import math
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bartleby import message
from bartleby.errors import InvalidMessage, UndecodablePayload
from bartleby.message import LeaseId, Message, MessageId, Position, checked_key, decode, encode

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=20)


@pytest.fixture(params=["fast", "standard"])
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With orjson, and as if it were not installed."""
    if request.param == "standard":
        monkeypatch.setattr(message, "_fast_loads", json.loads)
    return str(request.param)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def same(one: Any, other: Any) -> bool:
    """Equal in value and in type: 1, 1.0 and True are three different things."""
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return type(one) is type(other) and one == other


@given(VALUES)
@example(2**53 + 1)
@example(-(2**64) - 1)
@example([10**4299, 0.1, 1e-323, 1.7976931348623157e308, 123456789012345678901234567890])
@example({"": "\\u0000", "\\": ["\\\\u0000", "\u2028\x7f\x9b\U0001f600"]})
def test_what_is_encoded_is_decoded_as_it_was(value: Any) -> None:
    assert same(decode(encode(value)), value)


@given(VALUES)
def test_both_loaders_read_the_same(value: Any) -> None:
    text = encode(value)
    assert same(decode(text), json.loads(text))


@pytest.mark.parametrize(
    "number",
    [2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**4299, 0.1 + 0.2, 1e-320, 5e-324, 1.7976931348623157e308],
    ids=lambda number: f"{float(number):g}" if abs(number) < 1e300 else "huge",
)
def test_numbers_are_exact(number: float, loader: str) -> None:
    assert same(decode(encode([number])), [number])


def test_an_exponent_beyond_a_float_arrives_as_postgresql_writes_it(loader: str) -> None:
    # jsonb keeps 1e400 as a number with 401 digits and prints all of them
    assert decode("1" + "0" * 400) == 10**400
    with pytest.raises(InvalidMessage, match="Out of range"):
        encode(1e400)


def test_tuples_arrive_as_lists_and_keys_as_text() -> None:
    assert decode(encode({"pair": (1, 2)})) == {"pair": [1, 2]}
    assert decode(encode({1: "a", False: "b", None: "c", 2.5: "d"})) == {
        "1": "a",
        "false": "b",
        "null": "c",
        "2.5": "d",
    }


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (math.nan, "Out of range"),
        ({"a": [math.inf]}, "Out of range"),
        (-math.inf, "Out of range"),
        ("a\0b", "NUL"),
        ({"a\0b": 1}, "NUL"),
        (["\\\0"], "NUL"),
        ("\\\\u0000\0", "NUL"),
        ("\ud800", "lone surrogate"),
        ({"\udfff": 1}, "lone surrogate"),
        (10**5000, "4300"),
        (datetime.now(UTC), "datetime is not JSON serializable"),
        (Decimal(1), "Decimal is not JSON serializable"),
        (b"bytes", "bytes is not JSON serializable"),
        ({1, 2}, "set is not JSON serializable"),
        ({(1, 2): 3}, "keys must be str"),
        (object(), "object is not JSON serializable"),
        (nested(5000), "nested too deep"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_json_cannot_hold_is_refused_with_the_reason(value: object, problem: str) -> None:
    with pytest.raises(InvalidMessage, match=problem) as caught:
        encode(value)
    assert caught.value.index is None
    with pytest.raises(InvalidMessage, match=f"^message 7: .*{problem}") as caught:
        encode(value, index=7)
    assert caught.value.index == 7


def test_a_value_that_contains_itself_is_refused() -> None:
    circle: list[Any] = []
    circle.append({"again": circle})
    with pytest.raises(InvalidMessage, match=r"Circular|contains itself"):
        encode(circle)


@pytest.mark.parametrize("text", [r"\u0000", r"\\u0000", r"C:\u0000", "\\" * 5 + "u0000", '"\\u0000"'])
def test_a_backslash_and_u0000_in_a_text_are_six_legal_characters(text: str) -> None:
    assert decode(encode(text)) == text
    assert decode(encode({text: 1})) == {text: 1}


@pytest.mark.parametrize(
    "text",
    ["", "{", "nul", "[1,]", "1" * 4301, "1" + "0" * 130000, "[" * 5000 + "]" * 5000],
    ids=lambda text: text[:4] or "nothing",
)
def test_what_python_cannot_read_is_an_error_of_ours(text: str, loader: str) -> None:
    with pytest.raises(UndecodablePayload, match=f"{len(text)} characters"):
        decode(text)


def test_too_deep_for_the_rest_of_the_stack_is_an_error_of_ours(loader: str) -> None:
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


def received(raw: str, headers: str | None = None) -> Message:
    return Message(
        MessageId(1), "orders", LeaseId(2), Position(3), 1, raw, headers, None, None, datetime.now(UTC), solo=False
    )


def test_a_payload_is_decoded_at_the_first_look_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def counting(text: str) -> object:
        seen.append(text)
        return json.loads(text)

    monkeypatch.setattr(message, "_fast_loads", counting)
    got = received('{"order": 42}')
    assert seen == []
    assert got.payload is got.payload
    assert seen == ['{"order": 42}']


def test_null_is_a_payload_and_no_headers_are_empty_headers() -> None:
    got = received("null")
    assert got.payload is None
    assert got.headers == {}
    assert received("1", '{"type": "made"}').headers == {"type": "made"}


def test_a_payload_that_cannot_be_decoded_can_be_looked_at() -> None:
    got = received("1" * 5000)
    with pytest.raises(UndecodablePayload):
        _ = got.payload
    assert got.raw == "1" * 5000
    assert "11111" not in repr(got)


def test_messages_are_values() -> None:
    got = received("[1]")
    with pytest.raises(AttributeError):
        got.attempt = 2  # type: ignore[misc]
    assert hash(got) == hash(got)


@pytest.mark.parametrize("key", ["a\0b", "\ud800", "order-\udfff"])
def test_a_key_that_postgresql_cannot_store_is_refused(key: str) -> None:
    with pytest.raises(InvalidMessage, match="key"):
        checked_key(key)


@pytest.mark.parametrize("key", ["order-8812", "Straße ☃ \U0001f600", r"\u0000", " "])
def test_any_other_key_is_kept(key: str) -> None:
    assert checked_key(key) == key
