"""Typed payloads: matching values become the type, others are refused with their path; nothing is guessed."""

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, make_dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum, IntEnum
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NewType,
    NotRequired,
    Optional,
    Required,
    TypedDict,
    TypeVar,
    Union,
)
from uuid import UUID

import pydantic
import pydantic.dataclasses
import pytest

from bartleby.errors import InvalidPayload, UndecodablePayload
from bartleby.message import decode
from bartleby.typed import converter
from tests.kit import poison

T = TypeVar("T")
OrderId = NewType("OrderId", int)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Size(IntEnum):
    SMALL = 1


@dataclass
class Customer:
    id: int
    name: str = "nobody"


@dataclass
class Box(Generic[T]):
    content: T
    more: list[T] = field(default_factory=list)


@dataclass
class Final(Generic[T]):
    """Called like a word of typing."""

    value: T


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    id: OrderId
    customer: Customer
    parts: "list[Order]" = field(default_factory=list)
    constant: ClassVar[int] = 5
    total: int = field(default=0, init=False)


@dataclass
class Checked:
    low: int
    high: int
    factor: InitVar[int] = 1

    def __post_init__(self, factor: int) -> None:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        if self.low < 0:
            raise LookupError("below zero")
        if self.high == 404:
            raise ConnectionError("no server")
        self.high *= factor


class Loose(TypedDict, total=False):
    a: Required[int]
    b: str


class Tight(TypedDict):
    a: int
    b: NotRequired[list[Loose]]


class Model(pydantic.BaseModel):
    id: int
    names: list[str] = []


@pydantic.dataclasses.dataclass
class Validated:
    id: int


FITS: list[tuple[Any, Any, Any]] = [
    (int, 5, 5), (float, 5, 5.0), (str, "x", "x"), (bool, True, True), (None, None, None), (object, 5, 5),
    (Any, {"a": [1]}, {"a": [1]}), (dict, {"a": 1}, {"a": 1}), (list, [1, "x"], [1, "x"]), (list[int], [1], [1]),
    (dict[str, int], {"a": 1}, {"a": 1}), (dict[int, str], {"-7": "x"}, {-7: "x"}), (tuple, [1, "x"], (1, "x")),
    (Mapping[str, float], {"a": 1}, {"a": 1.0}), (Sequence[int], [1], [1]), (tuple[int, ...], [1, 2], (1, 2)),
    (tuple[int, str], [1, "x"], (1, "x")), (tuple[()], [], ()), (set[int], [1, 1], {1}),
    (Optional[int], None, None),  # noqa: UP045 - both spellings are in use
    (Union[int, str], "x", "x"),  # noqa: UP007 - both spellings are in use
    (int | float, 5, 5), (float | int, 5, 5), (Literal["a", 1] | None, None, None), (Colour, "blue", Colour.BLUE),
    (Size, 1, Size.SMALL), (Decimal, "1.50", Decimal("1.50")), (Decimal, 1.1, Decimal("1.1")), (Decimal, 7, Decimal(7)),
    (UUID, "12345678123456781234567812345678", UUID(int=0x12345678123456781234567812345678)),
    (datetime, "2026-03-01T12:00:00Z", datetime(2026, 3, 1, 12, tzinfo=UTC)), (date, "2026-03-01", date(2026, 3, 1)),
    (time, "12:30", time(12, 30)), (Annotated[int, "positive"], 5, 5), (list[OrderId], [5], [5]),
    (Customer, {"id": 1, "unknown": 1}, Customer(1)), (Box[Customer], {"content": {"id": 1}}, Box(Customer(1))),
    (Order, {"id": 1, "customer": {"id": 2}, "parts": [{"id": 3, "customer": {"id": 4}}], "total": 9, "constant": 9},
     Order(id=OrderId(1), customer=Customer(2), parts=[Order(id=OrderId(3), customer=Customer(4))])),
    (Box, {"content": "anything"}, Box("anything")), (Checked, {"low": 1, "high": 2, "factor": 3}, Checked(1, 6)),
    (Final[int], {"value": 1}, Final(1)), (Loose, {"a": 1, "c": 3}, {"a": 1}), (Validated, {"id": 5}, Validated(5)),
    (Tight, {"a": 1, "b": [{"a": 2, "b": "x"}]}, {"a": 1, "b": [{"a": 2, "b": "x"}]}),
    (list[Model], [{"id": "5"}], [Model(id=5)]), (Box[Model], {"content": {"id": 1}}, Box(Model(id=1))),
    (Customer | None, None, None), (Customer | list[Customer], [{"id": 1}], [Customer(1)]),
]  # fmt: skip


def test_matching_payload_becomes_its_type() -> None:
    for annotation, payload, expected in FITS:
        found = converter(annotation)(payload)
        assert (found, type(found)) == (expected, type(expected)), annotation


NO_INTEGER = "Input should be a valid integer, unable to parse string as an integer"
REFUSED: list[tuple[Any, Any, str]] = [
    (int, "1", "payload: expected int, not '1'"), (int, True, "payload: expected int, not true"),
    (int, {"secret": 1}, "payload: expected int, not an object"), (bool, 1, "payload: expected bool, not 1"),
    (int, "x" * 1000, "payload: expected int, not '" + "x" * 60 + "…'"), (str, 1, "payload: expected str, not 1"),
    (float, True, "payload: expected float, not true"), (None, 0, "payload: expected null, not 0"),
    (list[int], [1, "x"], "payload[1]: expected int, not 'x'"), (set[Any], [[]], "payload: unhashable type: 'list'"),
    (dict[str, int], {"a b": "x"}, "payload['a b']: expected int, not 'x'"),
    (dict, [], "payload: expected an object, not a list"), (tuple[int, str], [1], "payload: expected 2 items, not 1"),
    (dict[int, str], {"x": "y"}, "payload.x: expected a key that is an int, not 'x'"),
    (int | None, "x", "payload: expected int or null, not 'x'"), (Customer, {}, "payload.id: missing"),
    (Literal["a", 1], True, "payload: expected one of 'a', 1, not true"),
    (Colour, "green", "payload: expected one of 'red', 'blue', not 'green'"),
    (Size, True, "payload: expected 1, not true"),
    (Colour, ["red"], "payload: expected one of 'red', 'blue', not a list"),
    (Decimal, "NaN", "payload: expected Decimal, not 'NaN'"), (Decimal, True, "payload: expected Decimal, not true"),
    (Decimal, " 1", "payload: expected Decimal, not ' 1'"), (UUID, 5, "payload: expected UUID, not 5"),
    (datetime, 1700000000, "payload: expected datetime, not 1700000000"),
    (date, "2026-02-30", "payload: expected date, not '2026-02-30'"),
    (Customer, [], "payload: expected an object, not a list"), (Loose, {"b": "x"}, "payload.a: missing"),
    (Checked, {"low": -1, "high": 1}, "payload: LookupError: below zero"),
    (list[Checked], [{"low": 2, "high": 1}], "payload[0]: low 2 is above high 1"),
    (Tight, {"a": 1, "b": [{"a": 1}, {"a": "x"}]}, "payload.b[1].a: expected int, not 'x'"),
    (Box[Model], {"content": {"id": "x"}}, f"payload.content.id: {NO_INTEGER}"),
    (Validated, {"id": "x"}, f"payload.id: {NO_INTEGER}"),
    (str | list[Customer], [{"id": 1}, {"id": None}], "payload[1].id: expected int, not null"),
]  # fmt: skip


def test_payload_that_does_not_match_is_refused_with_its_path() -> None:
    def refusal(annotation: Any, payload: object) -> str:
        with pytest.raises(InvalidPayload) as found:
            converter(annotation)(payload)
        return str(found.value)

    for annotation, payload, message in REFUSED:
        assert refusal(annotation, payload) == message, annotation
    deep: dict[str, Any] = {"id": 1, "customer": {"id": 1}}
    for _ in range(5000):
        deep = {"id": 1, "customer": {"id": 1}, "parts": [deep]}
    assert refusal(Order, deep) == "payload: nested too deep"
    message = refusal(Model, {"id": "x", "names": [1, 2, 3]})
    assert message.startswith("payload.id: Input should be a valid integer")
    assert "; names[0]: Input should be a valid string; names[1]: " in message
    assert message.endswith("; and 1 more")


Secret = pydantic.create_model("Secret", number=(int, ...), password=(int, ...))
Strict = pydantic.create_model("Strict", __config__={"extra": "forbid"}, number=(int, ...))
Account = make_dataclass("Account", [("password", Literal["a", "b"] | datetime)])


def test_value_that_does_not_fit_is_not_shown_under_a_secret_name() -> None:
    secret = "hunter2secret"
    rows: list[tuple[Any, object]] = [
        (Secret, {"number": 1, "password": secret}), (Secret, {"number": "x", "password": secret}), (Secret, secret),
        (Strict, {"number": 1, "password": secret}), (list[Account], [{"password": secret}]),  # type: ignore[valid-type]
        (make_dataclass("Many", [("passwords", list[int])]), {"passwords": [1, secret]}),
        (dict[str, int], {"password": secret}), (list[Secret], [{"number": 1, "password": secret}]),  # type: ignore[valid-type]
    ]  # fmt: skip
    for annotation, payload in rows:
        with pytest.raises(InvalidPayload, match="payload") as found:
            converter(annotation)(payload)
        assert secret not in f"{found.value} {found.value.__cause__}", annotation


def test_error_of_a_class_is_kept_as_cause_or_passed_on_if_it_is_not_about_the_payload() -> None:
    with pytest.raises(InvalidPayload) as found:
        converter(Checked)({"low": 2, "high": 1})
    assert isinstance(found.value.__cause__, ValueError)
    with pytest.raises(ConnectionError):
        converter(Checked)({"low": 1, "high": 404})
    first, second = map(converter(Box[int]), ({"content": 1}, {"content": 2}))
    assert first.more is not second.more, "a default is not shared"


def test_type_that_no_payload_can_have_is_refused_when_the_handler_is_declared() -> None:
    types: list[Any] = [
        bytes, complex, list[bytes], dict[str, bytes], int | bytes, Box[bytes], "Order", 5, [int], Final[bytes],
    ]  # fmt: skip
    for annotation in types:
        with pytest.raises(TypeError, match="no payload can be turned into"):
            converter(annotation)

    @dataclass
    class Broken:
        other: "Nowhere"  # type: ignore[name-defined]  # noqa: F821 - that is the point

    with pytest.raises(TypeError, match="Nowhere"):
        converter(Broken)


def test_no_poisonous_payload_becomes_an_order() -> None:
    for name, payload in poison.PAYLOADS.items():
        with pytest.raises((InvalidPayload, UndecodablePayload)) as found:
            converter(poison.Order)(decode(payload))
        assert len(str(found.value)) < 300, name
    order = converter(poison.Order)(decode(poison.GOOD))
    assert (order.customer.id, order.price) == (2, Decimal("1.5"))
