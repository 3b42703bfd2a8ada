"""For tests of the web console and the HTTP API: routes, requests, dead letters, and searches that stop early."""

from typing import Any

import psycopg
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.routing import Route

from bartleby import Client
from tests.kit.burying import bury

API = "/api/v1"
REASON = {"reason": "a test"}
SECRET = "hunter2-swordfish"
BIG = 123456789012345678901234567890
JSON = {"Content-Type": "application/json"}


def all_routes(app: FastAPI) -> list[Route]:
    """Return every route of the console; fail if one is not a plain route, because no test could walk it."""
    found = [route for route in app.routes if isinstance(route, Route)]
    assert len(found) == len(app.routes)
    return found


def body_of(answer: Any, status: int = 200) -> Any:
    """Return the document of an answer that must have this status."""
    assert answer.status_code == status, f"{answer.status_code}: {answer.text}"
    if status == 204:
        assert answer.content == b""
        return None
    kind = "application/problem+json" if status >= 400 else "application/json"
    assert answer.headers["content-type"] == kind
    return answer.json()


def get(client: TestClient, path: str, expected: int = 200, /, **query: Any) -> Any:
    return body_of(client.get(API + path, params=query), expected)


def post(client: TestClient, path: str, expected: int = 200, /, **body: Any) -> Any:
    """Return the document of a POST; a reason is added unless there is one."""
    return body_of(client.post(API + path, json={**REASON, **body}), expected)


def fill_queue(dsn: str, queue: str = "orders", letters: int = 3) -> list[int]:
    """Create a queue with dead letters; return their ids."""
    with Client(dsn) as client:
        client.create_queue(queue)
        return bury(client, [{"n": each, "country": "AT"} for each in range(letters)], queue=queue)


def shorten_searches(conn: psycopg.Connection[Any]) -> None:
    """Make searches stop after two letters that do not match, not after 100,000."""
    query = "select pg_get_functiondef(oid) from pg_proc where pronamespace = 'bartleby'::regnamespace and proname = %s"
    for name, many in (("search", "100000"), ("walk", "500"), ("few_letters", "20000")):
        for (text,) in conn.execute(query, [name]).fetchall():
            assert many in text
            conn.execute(text.replace(many, "2"))
    conn.commit()
