"""Secrets in payloads and exceptions are neither stored as evidence nor logged."""

from dataclasses import dataclass, make_dataclass
from datetime import datetime
from typing import Any, Literal, TypedDict

import pydantic

from bartleby import Bartleby, Message
from tests.kit.worker import Conn, Told, drain, handler_of, row

SECRET = "hunter2secret"


SECRET_NAMES = [
    "password", "passwd", "api_key", "token", "access_token", "client_secret", "credentials", "private_key",
    "authorization", "cookie", "jwt", "auth", "pin", "ssn", "iban", "card_number",
]  # fmt: skip


class Typed(TypedDict):
    password: int


class Model(pydantic.BaseModel):
    number: int
    password: int


class Strict(pydantic.BaseModel, extra="forbid"):
    number: int


@dataclass
class Account:
    password: Literal["a", "b"] | datetime


@dataclass
class Nested:
    accounts: list[Account]


@dataclass
class Many:
    passwords: list[int]


MISFITS: list[tuple[Any, object]] = [
    (Typed, {"password": SECRET}),
    (Model, {"number": 1, "password": SECRET}),
    (Model, {"number": "x", "password": SECRET}),
    (Model, SECRET),
    (Strict, {"number": 1, "password": SECRET}),
    (Nested, {"accounts": [{"password": SECRET}]}),
    (Many, {"passwords": [1, SECRET]}),
    (dict[str, int], {"password": SECRET}),
    (list[Model], [{"number": 1, "password": SECRET}]),
]


def raise_secret(_: Message) -> None:
    raise ValueError(f"refused token : abcdefghijklmnop.qrst, token={SECRET}")


def test_value_that_does_not_fit_is_not_shown_under_a_secret_name(app: Bartleby, conn: Conn, told: Told) -> None:
    named: list[tuple[Any, object]] = [
        (make_dataclass("Login", [("user", str), (name, int)]), {"user": "ana", name: SECRET}) for name in SECRET_NAMES
    ]
    shown = (make_dataclass("Order", [("number", int)]), {"number": "three"})
    cases = [*MISFITS, *named, shown]
    for number, (kind, payload) in enumerate(cases):
        app.handler(f"q{number}")(handler_of(print, awaited=False, takes=kind))
        app.client.create_queue(f"q{number}")
        app.send(f"q{number}", payload)
    assert drain(app) == {"dead": len(cases)}
    found = {letter.queue: letter for letter in app.client.dead_letters("queue:*", limit=100)}
    for number, name in enumerate(SECRET_NAMES, len(MISFITS)):
        assert str(found[f"q{number}"].error).startswith(f"payload.{name}: "), name
    for letter in found.values():
        assert str(letter.error).startswith("payload"), letter.queue
        assert letter.traceback is None, "it would be of our own frames"
    assert found[f"q{len(cases) - 1}"].error == "payload.number: expected int, not 'three'"
    # also what a handler raises is neither stored nor logged, except for the payload itself
    app.handler("orders", retry={"max_attempts": 1})(handler_of(raise_secret, awaited=True))
    app.send("orders", 1)
    assert drain(app) == {"dead": 1}
    known = [f"{record.getMessage()} {vars(record)}" for record in told.records]
    for table in ("attempts", "dead_letters", "groups", "events"):
        query = f"select coalesce(jsonb_agg(to_jsonb(t) - 'payload'), '[]')::text from bartleby.{table} t"
        known += [row(conn, query)]
    assert [text in str(known) for text in ("refused token", "abcdefghijklmnop", SECRET)] == [True, False, False]
