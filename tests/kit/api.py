"""What tests of the API share: letters to ask for, and short words for requests."""

from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.routing import Route

from bartleby import Client
from tests.kit.burying import bury

API = "/api/v1"
WHY = {"reason": "a test"}
SECRET = "hunter2-swordfish"
BIG = 123456789012345678901234567890


def every(app: FastAPI) -> list[Route]:
    """Return every route of the console; one that is no plain route, so that nobody could walk it, fails here."""
    found = [route for route in app.routes if isinstance(route, Route)]
    assert len(found) == len(app.routes)
    return found


def said(answer: Any, status: int = 200) -> Any:
    """Return what an answer says, if it has this status."""
    assert answer.status_code == status, f"{answer.status_code}: {answer.text}"
    if status == 204:
        assert answer.content == b""
        return None
    kind = "application/problem+json" if status >= 400 else "application/json"
    assert answer.headers["content-type"] == kind
    return answer.json()


def get(client: TestClient, path: str, expected: int = 200, /, **query: Any) -> Any:
    """Return what a GET says."""
    return said(client.get(API + path, params=query), expected)


def post(client: TestClient, path: str, expected: int = 200, /, **body: Any) -> Any:
    """Return what a POST says, with a reason unless there is one."""
    return said(client.post(API + path, json={**WHY, **body}), expected)


def shop(dsn: str, queue: str = "orders", letters: int = 3) -> list[int]:
    """Make a queue with so many dead letters; return their ids."""
    with Client(dsn) as client:
        client.create_queue(queue)
        return bury(client, [{"n": each, "country": "AT"} for each in range(letters)], queue=queue)
