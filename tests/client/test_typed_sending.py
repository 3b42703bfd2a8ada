"""Typed payloads: dataclasses and pydantic models arrive as their type, however they are sent."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import psycopg
import pydantic
import pytest

from bartleby import Bartleby, InvalidMessage
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


def test_typed_payload_arrives_as_its_type(app: Bartleby, dsn: str) -> None:
    seen: list[object] = []
    for queue, kind, payload in (("dataclass", Order, ORDER), ("pydantic", Parcel, PARCEL)):

        def handle(order: object) -> None:
            seen.append(order)

        handle.__annotations__["order"] = kind
        app.handler(queue)(handle)
        app.client.create_queue(queue)
        app.send(queue, payload)
        app.send_many(queue, [{"payload": payload}])
        app.client.send(queue, payload)
        with psycopg.connect(dsn) as mine:
            app.send(queue, payload, connection=mine)
        assert drain(app, queues=[queue]) == {"done": 4}
        assert seen == [payload] * 4, queue
        seen.clear()


def test_payload_that_is_not_json_is_refused(app: Bartleby, conn: Conn) -> None:
    for payload in (object(), Order, {"order": ORDER}):
        with pytest.raises(InvalidMessage, match="JSON"):
            app.send("orders", payload)
    assert row(conn, "select count(*) from bartleby.log") == 0
