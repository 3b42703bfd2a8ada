"""Typed payloads: they arrive as their type, and secrets in those that do not fit are neither stored nor logged."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from uuid import UUID

import psycopg
import pydantic

from bartleby import Bartleby, Message
from tests.kit.sql import value
from tests.kit.worker import CapturedLog, Conn, drain, handler_of

SECRET = "hunter2secret"


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


PLACED = datetime(2026, 1, 2, 3, 4, 5, 6, UTC)
ORDER = Order(UUID(int=7), Kind.PARCEL, PLACED, [Item("ink", Decimal("1.10"))], {"a": (1, 2)})
PARCEL = Parcel(id=UUID(int=8), weight=Decimal("0.30"), sent=PLACED)


def test_typed_payload_arrives_as_its_type(app: Bartleby, dsn: str) -> None:
    seen: list[object] = []
    for queue, payload in (("dataclass", ORDER), ("pydantic", PARCEL)):
        app.handler(queue)(handler_of(seen.append, awaited=False, takes=type(payload)))
        app.client.create_queue(queue)
        app.send(queue, payload)
        app.send_many(queue, [{"payload": payload}])
        app.client.send(queue, payload)
        with psycopg.connect(dsn) as mine:
            app.send(queue, payload, connection=mine)
        assert drain(app, queues=[queue]) == {"done": 4}
        assert seen == [payload] * 4, queue
        seen.clear()


def raise_secret(_: Message) -> None:
    raise ValueError(f"refused token : abcdefghijklmnop.qrst, token={SECRET}")


def test_no_secret_of_a_payload_or_an_error_is_stored_or_logged(app: Bartleby, conn: Conn, log: CapturedLog) -> None:
    """tests/unit/test_typed.py has all payloads that do not fit."""
    app.client.create_queue("typed")
    app.handler("typed")(handler_of(print, awaited=False, takes=dict[str, int]))
    app.handler("orders", retry={"max_attempts": 1})(handler_of(raise_secret, awaited=True))
    app.send("typed", {"password": SECRET})
    app.send("orders", 1)
    assert drain(app) == {"dead": 2}
    [letter] = app.client.dead_letters("queue:typed")
    assert (str(letter.error)[:7], letter.traceback) == ("payload", None), "it would be of our own frames"
    known = [f"{record.getMessage()} {vars(record)}" for record in log.records]
    for table in ("attempts", "dead_letters", "groups", "events"):
        query = f"select coalesce(jsonb_agg(to_jsonb(t) - 'payload'), '[]')::text from bartleby.{table} t"
        known += [value(conn, query)]
    assert [text in str(known) for text in ("refused token", "abcdefghijklmnop", SECRET)] == [True, False, False]
