"""Secrets in payloads and exceptions: neither the database nor the log learns them."""

from dataclasses import dataclass, make_dataclass
from datetime import datetime
from typing import Any, Literal, TypedDict

import psycopg
import pydantic
import pytest

from bartleby import Bartleby, Message
from tests.kit.worker import Told, drain, row

Conn = psycopg.Connection[tuple[Any, ...]]
SECRET = "hunter2secret"


def everything_known(conn: Conn, told: Told) -> str:
    """Return all that was stored and logged of failures, but for the payload itself."""
    stored = [
        row(conn, f"select coalesce(jsonb_agg(to_jsonb(t) - 'payload'), '[]')::text from bartleby.{table} t")
        for table in ("attempts", "dead_letters", "groups", "events")
    ]
    logged = [f"{record.getMessage()} {vars(record)}" for record in told.records]
    return "\n".join([*stored, *logged])


def handle_as(app: Bartleby, kind: Any) -> None:
    def handle(order: Any) -> None: ...

    handle.__annotations__["order"] = kind
    app.handler("orders")(handle)


def refused(app: Bartleby, conn: Conn, told: Told, payload: object) -> str:
    """Let a payload be refused; return the error after looking for the secret everywhere."""
    app.send("orders", payload)
    assert drain(app) == {"dead": 1}
    error, traceback = row(conn, "select error, traceback from bartleby.dead_letters")
    assert traceback is None  # it would be of our own frames
    assert SECRET not in everything_known(conn, told)
    return str(error)


@pytest.mark.parametrize(
    "name",
    [
        "password", "passwd", "api_key", "token", "access_token", "client_secret", "credentials", "private_key",
        "authorization", "cookie", "jwt", "auth", "pin", "ssn", "iban", "card_number",
    ],
)  # fmt: skip
def test_the_value_of_a_misfit_is_nobodys_business(app: Bartleby, conn: Conn, told: Told, name: str) -> None:
    handle_as(app, make_dataclass("Login", [("user", str), (name, int)]))
    assert refused(app, conn, told, {"user": "ana", name: SECRET}).startswith(f"payload.{name}: ")


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


CASES: list[tuple[Any, object]] = [
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


@pytest.mark.parametrize(("kind", "payload"), CASES)
def test_wherever_it_stands_its_value_is_not_shown(
    app: Bartleby, conn: Conn, told: Told, *, kind: Any, payload: object
) -> None:
    handle_as(app, kind)
    assert refused(app, conn, told, payload).startswith("payload")


def test_a_value_that_is_no_secret_is_shown(app: Bartleby, conn: Conn, told: Told) -> None:
    handle_as(app, make_dataclass("Order", [("number", int)]))
    assert refused(app, conn, told, {"number": "three"}) == "payload.number: expected int, not 'three'"


@pytest.mark.parametrize(
    "text",
    [
        "token: abcdefghijklmnop",
        "refused token : abcdefghijklmnop.qrst",
        "Token: abcdefghijklmnop",
        "token=abcdefghijklmnop",
        "{'token': 'abcdefghijklmnop'}",
    ],
)
def test_a_token_in_an_exception_is_hidden(app: Bartleby, conn: Conn, told: Told, text: str) -> None:
    def handle(message: Message) -> None:
        raise ValueError(message.payload)

    app.handler("orders", retry={"max_attempts": 1})(handle)
    app.send("orders", text)
    assert drain(app) == {"dead": 1}
    known = everything_known(conn, told)
    assert "abcdefghijklmnop" not in known
    assert "***" in row(conn, "select error from bartleby.dead_letters")


@pytest.mark.parametrize("text", ["Unexpected token: foo", "unexpected token: identifier", "3 tokens: 5"])
def test_a_token_of_a_parser_is_shown(app: Bartleby, conn: Conn, text: str) -> None:
    def handle(message: Message) -> None:
        raise ValueError(text)

    app.handler("orders", retry={"max_attempts": 1})(handle)
    app.send("orders", 1)
    assert drain(app) == {"dead": 1}
    assert row(conn, "select error from bartleby.dead_letters") == text
