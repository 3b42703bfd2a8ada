"""What a request that was written by hand is told: the remedy is a request, and fits what is wrong."""

import pytest
from fastapi.testclient import TestClient

from bartleby import Client

FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture(autouse=True)
def _orders(dsn: str) -> None:
    with Client(dsn) as client:
        client.create_queue("orders")


# the first has one shape of body, the others have one of two
@pytest.mark.parametrize("path", ["queues/orders/pause", "queues/orders/messages", "dead-letters/discard", "replays"])
def test_a_body_that_does_not_say_that_it_is_json_is_told_to(browser: TestClient, path: str) -> None:
    answer = browser.post(f"/api/v1/{path}", content=b'{"ids": [3], "payload": 1, "reason": "x"}', headers=FORM)
    assert answer.status_code == 422
    assert "Content-Type: application/json" in answer.json()["hint"]


@pytest.mark.parametrize(
    ("method", "path", "wanted"),
    [
        ("POST", "workers/nobody/drain", "GET /api/v1/workers"),
        ("DELETE", "tokens/77?reason=x", "GET /api/v1/tokens"),
        ("POST", "sinks/nobodys/pause", "GET /api/v1/sinks"),
        ("POST", "queues/nobodys/pause", "GET /api/v1/queues"),
    ],
)
def test_a_remedy_is_a_request_and_no_sql(browser: TestClient, method: str, path: str, wanted: str) -> None:
    body = None if method == "DELETE" else {"reason": "x"}
    answer = browser.request(method, f"/api/v1/{path}", json=body)
    assert answer.status_code == 404
    assert wanted in answer.json()["hint"]
    assert "select" not in answer.json()["hint"]
