"""A typed payload arrives as it was sent: dataclasses and pydantic models, by every way to send."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import psycopg
import pydantic
import pytest

from bartleby import Bartleby
from tests.kit.worker import drain, row

Conn = psycopg.Connection[tuple[Any, ...]]


class Kind(Enum):
    PARCEL = "parcel"


@dataclass
class Item:
    name: str
    price: Decimal


@dataclass
class Order:
    id: UUID
    kind: Kind
    placed: datetime
    items: list[Item]
    notes: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Parcel(pydantic.BaseModel):
    id: UUID
    weight: Decimal
    sent: datetime


ORDER = Order(
    UUID(int=7), Kind.PARCEL, datetime(2026, 1, 2, 3, 4, 5, 6, UTC), [Item("ink", Decimal("1.10"))], {"a": (1, 2)}
)
PARCEL = Parcel(id=UUID(int=8), weight=Decimal("0.30"), sent=datetime(2026, 1, 2, tzinfo=UTC))


@pytest.mark.parametrize("how", ["send", "send_many", "connection", "client"])
@pytest.mark.parametrize(("kind", "payload"), [(Order, ORDER), (Parcel, PARCEL)], ids=["dataclass", "pydantic"])
def test_what_is_sent_typed_arrives_typed(
    app: Bartleby, dsn: str, *, how: str, kind: type[object], payload: object
) -> None:
    seen: list[object] = []

    def handle(order: object) -> None:
        seen.append(order)

    handle.__annotations__["order"] = kind
    app.handler("orders")(handle)
    match how:
        case "send":
            app.send("orders", payload)
        case "send_many":
            app.send_many("orders", [{"payload": payload}])
        case "client":
            app.client.send("orders", payload)
        case _:
            with psycopg.connect(dsn) as mine:
                app.send("orders", payload, connection=mine)
    assert drain(app) == {"done": 1}
    assert seen == [payload]


def test_what_cannot_be_sent_still_says_so(app: Bartleby, conn: Conn) -> None:
    for payload in (object(), Order, {"order": ORDER}):
        with pytest.raises(Exception, match="JSON") as caught:
            app.send("orders", payload)
        assert type(caught.value).__module__.startswith("bartleby")
    assert row(conn, "select count(*) from bartleby.log") == 0
