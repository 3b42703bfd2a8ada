"""Typed payloads: they arrive as their type, and secrets in those that do not fit are neither stored nor logged."""

from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, Literal, TypedDict
from uuid import UUID

import psycopg
import pydantic

from bartleby import Bartleby, Message
from tests.kit.sql import value
from tests.kit.worker import Conn, Told, drain, handler_of

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


class Typed(TypedDict):
    password: int


Model = pydantic.create_model("Model", number=(int, ...), password=(int, ...))
Strict = pydantic.create_model("Strict", __config__={"extra": "forbid"}, number=(int, ...))
Account = make_dataclass("Account", [("password", Literal["a", "b"] | datetime)])
MISFITS: list[tuple[Any, object]] = [
    (make_dataclass("Login", [("user", str), ("api_key", int)]), {"user": "ana", "api_key": SECRET}),
    (Typed, {"password": SECRET}),
    (Model, {"number": 1, "password": SECRET}),
    (Model, {"number": "x", "password": SECRET}),
    (Model, SECRET),
    (Strict, {"number": 1, "password": SECRET}),
    (make_dataclass("Nested", [("accounts", list[Account])]), {"accounts": [{"password": SECRET}]}),  # type: ignore[valid-type]
    (make_dataclass("Many", [("passwords", list[int])]), {"passwords": [1, SECRET]}),
    (dict[str, int], {"password": SECRET}),
    (list[Model], [{"number": 1, "password": SECRET}]),  # type: ignore[valid-type]
]


def raise_secret(_: Message) -> None:
    raise ValueError(f"refused token : abcdefghijklmnop.qrst, token={SECRET}")


def test_value_that_does_not_fit_is_not_shown_under_a_secret_name(app: Bartleby, conn: Conn, told: Told) -> None:
    shown = (make_dataclass("Order", [("number", int)]), {"number": "three"})
    cases = [shown, *MISFITS]
    for number, (kind, payload) in enumerate(cases):
        app.handler(f"q{number}")(handler_of(print, awaited=False, takes=kind))
        app.client.create_queue(f"q{number}")
        app.send(f"q{number}", payload)
    assert drain(app) == {"dead": len(cases)}
    found = {letter.queue: letter for letter in app.client.dead_letters("queue:*", limit=100)}
    assert found["q0"].error == "payload.number: expected int, not 'three'"
    for letter in found.values():
        assert str(letter.error).startswith("payload"), letter.queue
        assert letter.traceback is None, "it would be of our own frames"
    # also what a handler raises is neither stored nor logged, except for the payload itself
    app.handler("orders", retry={"max_attempts": 1})(handler_of(raise_secret, awaited=True))
    app.send("orders", 1)
    assert drain(app) == {"dead": 1}
    known = [f"{record.getMessage()} {vars(record)}" for record in told.records]
    for table in ("attempts", "dead_letters", "groups", "events"):
        query = f"select coalesce(jsonb_agg(to_jsonb(t) - 'payload'), '[]')::text from bartleby.{table} t"
        known += [value(conn, query)]
    assert [text in str(known) for text in ("refused token", "abcdefghijklmnop", SECRET)] == [True, False, False]
