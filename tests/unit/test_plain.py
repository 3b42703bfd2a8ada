"""What is sent as a class arrives as that class."""

import enum
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from uuid import UUID

import pydantic
import pytest

from bartleby import InvalidMessage, calls
from bartleby.message import decode, encode
from bartleby.plain import plain
from bartleby.typed import converter


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Line:
    article: UUID
    price: Decimal


@dataclass
class Order:
    id: int
    at: datetime
    day: date
    colour: Colour
    lines: list[Line] = field(default_factory=list)
    note: str | None = None


class Model(pydantic.BaseModel):
    id: int
    at: datetime


ORDER = Order(
    10**20,
    datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    date(2026, 1, 2),
    Colour.RED,
    [Line(UUID(int=7), Decimal("12.50"))],
)


@pytest.mark.parametrize("payload", [ORDER, Model(id=1, at=ORDER.at)])
def test_there_and_back(payload: object) -> None:
    assert converter(type(payload))(decode(encode(plain(payload)))) == payload


def test_it_can_be_sent_alone_and_in_a_bulk() -> None:
    one = calls.send("orders", ORDER).parameters[1]
    many = calls.send_many("orders", [{"payload": ORDER, "delay": 1}]).parameters[1]
    assert isinstance(one, str)
    assert isinstance(many, str)
    assert decode(many) == [{"payload": decode(one), "delay": 1}]


@pytest.mark.parametrize("payload", [{"at": ORDER.at}, {1, 2}, Order, object(), ORDER.at])
def test_anything_else_is_as_it_was_and_refused_if_it_is_not_json(payload: object) -> None:
    assert plain(payload) is payload
    with pytest.raises(InvalidMessage, match="not JSON"):
        calls.send("orders", payload)
