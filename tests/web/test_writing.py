"""A change that is asked for twice with one key is done once, and answered as the first time."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from starlette.responses import JSONResponse, Response

from bartleby import Client
from bartleby.errors import InvalidArgument
from bartleby.surfaces.desk import Desk
from bartleby.surfaces.web.context import AtDesk
from bartleby.surfaces.web.writing import once
from tests.web.conftest import ClientAs, visiting


@pytest.fixture
def queue(dsn: str) -> Iterator[Client]:
    with Client(dsn) as client:
        client.create_queue("orders")
        yield client


def with_routes(app: FastAPI) -> FastAPI:
    @app.post("/api/v1/test/pause")
    def pause(request: Request, desk: AtDesk, asked: dict[str, Any]) -> Response:
        def act(desk: Desk) -> Response:
            desk.queues.pause("orders", reason=asked["reason"])
            if asked.get("fail"):
                raise InvalidArgument("not like this")
            return JSONResponse({"paused": asked["reason"]}, 201, {"Location": "/api/v1/queues/orders"})

        return once(request, desk, act, whole=asked.get("whole", True))

    @app.post("/api/v1/test/nothing")
    def nothing(request: Request, desk: AtDesk) -> Response:
        return once(request, desk, lambda _: Response(None, 204))

    return app


def pauses(client: Client) -> int:
    return len(client.audit_log(action="queue.pause"))


@pytest.mark.parametrize("whole", [True, False])
def test_the_same_request_is_done_once_and_answered_twice(site: FastAPI, queue: Client, whole: bool) -> None:
    visitor = visiting(with_routes(site))
    asked = {"reason": "ünder load", "whole": whole}
    first = visitor.post("/api/v1/test/pause", json=asked, headers={"Idempotency-Key": "a"})
    queue.resume_queue("orders", actor="a test", reason="so that it could be done again")
    again = visitor.post("/api/v1/test/pause", json=asked, headers={"Idempotency-Key": "a"})
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.content == again.content
    assert again.headers["location"] == first.headers["location"]
    assert again.headers["content-type"] == first.headers["content-type"]
    assert "idempotent-replay" not in first.headers
    assert again.headers["idempotent-replay"] == "true"
    assert pauses(queue) == 1
    assert not queue.queues()[0].paused


def test_an_answer_without_a_body_is_one_again(site: FastAPI, queue: Client) -> None:
    visitor = visiting(with_routes(site))
    answers = [visitor.post("/api/v1/test/nothing", headers={"Idempotency-Key": "a"}) for _ in range(2)]
    assert [(each.status_code, each.content) for each in answers] == [(204, b""), (204, b"")]


def test_without_a_key_and_with_another_it_is_done_again(site: FastAPI, queue: Client) -> None:
    visitor = visiting(with_routes(site))
    for headers in ({}, {}, {"Idempotency-Key": "a"}, {"Idempotency-Key": "b"}):
        answer = visitor.post("/api/v1/test/pause", json={"reason": "load"}, headers=headers)
        assert answer.status_code == 201
        queue.resume_queue("orders", actor="a test", reason="again")
    assert pauses(queue) == 4


def test_a_key_is_for_one_request(site: FastAPI, queue: Client) -> None:
    visitor = visiting(with_routes(site))
    key = {"Idempotency-Key": "a"}
    assert visitor.post("/api/v1/test/pause", json={"reason": "load"}, headers=key).status_code == 201
    other = visitor.post("/api/v1/test/pause", json={"reason": "other"}, headers=key)
    assert other.status_code == 422
    assert other.json()["type"] == "urn:bartleby:key-reused"
    assert visitor.post("/api/v1/test/nothing", headers=key).status_code == 422
    assert visitor.post("/api/v1/test/pause?x=1", json={"reason": "load"}, headers=key).status_code == 422


def test_what_failed_was_not_done_and_may_be_asked_for_again(site: FastAPI, queue: Client) -> None:
    visitor = visiting(with_routes(site))
    asked = {"reason": "load", "fail": True}
    for _ in range(2):
        answer = visitor.post("/api/v1/test/pause", json=asked, headers={"Idempotency-Key": "a"})
        assert answer.status_code == 422
        assert answer.json()["detail"] == "not like this"
    assert pauses(queue) == 0
    assert not queue.queues()[0].paused


@pytest.mark.parametrize("key", ["", "x" * 201, "a\tb", "ü"])
def test_a_key_that_is_none(site: FastAPI, queue: Client, key: str) -> None:
    headers = {b"Idempotency-Key": key.encode()}
    answer = visiting(with_routes(site)).post("/api/v1/test/pause", json={"reason": "load"}, headers=headers)
    assert answer.status_code == 422
    assert "Idempotency-Key" in answer.json()["detail"]


def test_keys_of_others_are_others(client_as: ClientAs, guarded: FastAPI, queue: Client) -> None:
    with_routes(guarded)
    visitors = [client_as("operator", name="ann"), client_as("operator", name="bob"), client_as("admin", name="ann")]
    for visitor in visitors:
        answer = visitor.post("/api/v1/test/pause", json={"reason": "load"}, headers={"Idempotency-Key": "a"})
        assert "idempotent-replay" not in answer.headers
        queue.resume_queue("orders", actor="a test", reason="again")
    assert pauses(queue) == 3
    # a second token of the same name and rights is the same program
    again = client_as("operator", name="ann").post(
        "/api/v1/test/pause", json={"reason": "load"}, headers={"Idempotency-Key": "a"}
    )
    assert again.headers["idempotent-replay"] == "true"


def test_who_may_not_is_refused_with_a_key_too(client_as: ClientAs, guarded: FastAPI, queue: Client) -> None:
    with_routes(guarded)
    for role in ("reader", "agent"):
        for _ in range(2):
            answer = client_as(role).post(
                "/api/v1/test/pause", json={"reason": "load"}, headers={"Idempotency-Key": "a"}
            )
            assert answer.status_code == 403
    assert pauses(queue) == 0
    refused = queue.audit_log(action="access.refuse")
    assert [each.actor for each in refused] == ["agent:agent", "agent:agent"]


def test_of_two_at_once_the_second_waits_for_the_first(
    site: FastAPI, queue: Client, wait_for: Callable[[Callable[[], object]], None], is_waiting: Callable[[], bool]
) -> None:
    go_on = threading.Event()
    began = threading.Event()
    done: list[str] = []

    @site.post("/api/v1/test/slow")
    def slow(request: Request, desk: AtDesk) -> Response:
        def act(desk: Desk) -> Response:
            desk.queues.pause("orders", reason="slowly")
            done.append(request.state.request_id)
            began.set()
            go_on.wait(30)
            return JSONResponse({"done": True})

        return once(request, desk, act)

    answers: list[Any] = []

    def ask() -> None:
        answers.append(visiting(site).post("/api/v1/test/slow", headers={"Idempotency-Key": "a"}))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    threads[0].start()
    assert began.wait(30)
    threads[1].start()
    wait_for(is_waiting)
    go_on.set()
    for each in threads:
        each.join(30)
    assert sorted(each.headers.get("idempotent-replay", "") for each in answers) == ["", "true"]
    assert {each.text for each in answers} == {json.dumps({"done": True}, separators=(",", ":"))}
    assert len(done) == 1


def test_the_request_is_in_the_audit_by_its_id(browser: TestClient, site: FastAPI, queue: Client) -> None:
    with_routes(site)
    headers = {"Idempotency-Key": "a", "X-Request-Id": "deploy-17"}
    assert browser.post("/api/v1/test/pause", json={"reason": "load"}, headers=headers).status_code == 201
    assert [each.request_id for each in queue.audit_log(action="queue.pause")] == ["deploy-17"]
    queue.resume_queue("orders", actor="a test", reason="again")
    assert browser.post("/api/v1/test/pause", json={"reason": "load"}).status_code == 201
    assert str(queue.audit_log(action="queue.pause")[0].request_id).startswith("api-")
