"""Secrets in payloads and exceptions are neither stored as evidence nor logged."""

from dataclasses import dataclass, make_dataclass
from datetime import datetime
from typing import Any, Literal, TypedDict

import psycopg
import pydantic

from bartleby import Bartleby, Message
from tests.kit.worker import Told, drain, row

Conn = psycopg.Connection[tuple[Any, ...]]
SECRET = "hunter2secret"


def everything_known(conn: Conn, told: Told) -> str:
    """Return what was stored and logged about failures, without the payload itself."""
    stored = [
        row(conn, f"select coalesce(jsonb_agg(to_jsonb(t) - 'payload'), '[]')::text from bartleby.{table} t")
        for table in ("attempts", "dead_letters", "groups", "events")
    ]
    logged = [f"{record.getMessage()} {vars(record)}" for record in told.records]
    return "\n".join([*stored, *logged])


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


def test_value_that_does_not_fit_is_not_shown_under_a_secret_name(app: Bartleby, conn: Conn, told: Told) -> None:
    named: list[tuple[Any, object]] = [
        (make_dataclass("Login", [("user", str), (name, int)]), {"user": "ana", name: SECRET}) for name in SECRET_NAMES
    ]
    shown = (make_dataclass("Order", [("number", int)]), {"number": "three"})
    cases = [*MISFITS, *named, shown]
    for number, (kind, payload) in enumerate(cases):

        def handle(order: Any) -> None: ...

        handle.__annotations__["order"] = kind
        app.handler(f"q{number}")(handle)
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
    assert SECRET not in everything_known(conn, told)


def test_token_in_an_exception_is_hidden_unless_it_is_one_of_a_parser(app: Bartleby, conn: Conn, told: Told) -> None:
    hidden = [
        "token: abcdefghijklmnop",
        "refused token : abcdefghijklmnop.qrst",
        "Token: abcdefghijklmnop",
        "token=abcdefghijklmnop",
        "{'token': 'abcdefghijklmnop'}",
    ]
    shown = ["Unexpected token: foo", "unexpected token: identifier", "3 tokens: 5"]

    def handle(message: Message) -> None:
        raise ValueError(message.payload)

    app.handler("orders", retry={"max_attempts": 1})(handle)
    sent = [app.send("orders", text) for text in (*hidden, *shown)]
    assert drain(app) == {"dead": len(sent)}
    assert "abcdefghijklmnop" not in everything_known(conn, told)
    errors = [row(conn, "select error from bartleby.dead_letters where message_id = %s", each) for each in sent]
    assert [("***" in error) for error in errors] == [True] * len(hidden) + [False] * len(shown)
    assert errors[len(hidden) :] == shown
