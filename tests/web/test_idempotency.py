"""A change that is requested twice with one Idempotency-Key is done once and answered as the first time."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from starlette.responses import JSONResponse, Response

from bartleby import Client
from bartleby.errors import InvalidArgument
from bartleby.surfaces.desk import Desk
from bartleby.surfaces.web.context import AtDesk
from bartleby.surfaces.web.writing import once
from tests.kit.api import API, REASON, body_of, fill_queue, post
from tests.web.conftest import SAME, ClientAs, OpenConsole, add_token, visiting

KEY = {"Idempotency-Key": "4d1f"}
PAUSE = f"{API}/test/pause"


def with_routes(app: FastAPI) -> FastAPI:
    @app.post(PAUSE)
    def pause(request: Request, desk: AtDesk, asked: dict[str, Any]) -> Response:
        def act(desk: Desk) -> Response:
            desk.queues.pause("orders", reason=asked["reason"])
            if asked.get("fail"):
                raise InvalidArgument("not like this")
            return JSONResponse({"paused": asked["reason"]}, 201, {"Location": "/api/v1/queues/orders"})

        return once(request, desk, act, whole=asked.get("whole", True))

    return app


def pauses(client: Client) -> int:
    return len(client.audit_log(action="queue.pause"))


def test_same_request_is_done_once_and_answered_twice(site: FastAPI, client: Client) -> None:
    visitor = visiting(with_routes(site))
    for whole in (True, False):
        asked = {"reason": "ünder load", "whole": whole}
        headers = {"Idempotency-Key": f"whole {whole}"}
        before = pauses(client)
        first = visitor.post(PAUSE, json=asked, headers=headers)
        client.resume_queue("orders", actor="a test", reason="so that it could be done again")
        again = visitor.post(PAUSE, json=asked, headers=headers)
        assert (first.status_code, again.status_code, again.content) == (201, 201, first.content)
        for name in ("location", "content-type"):
            assert again.headers[name] == first.headers[name]
        assert "idempotent-replay" not in first.headers
        assert again.headers["idempotent-replay"] == "true"
        assert pauses(client) == before + 1
        assert not client.queues()[0].paused
    for headers in ({}, {}, {"Idempotency-Key": "a"}, {"Idempotency-Key": "b"}):
        assert visitor.post(PAUSE, json=REASON, headers=headers).status_code == 201
        client.resume_queue("orders", actor="a test", reason="again")
    assert pauses(client) == 6, "no key, or another key, is another request"


def test_every_kind_of_write_is_done_once(browser: TestClient, dsn: str) -> None:
    ids = fill_queue(dsn)
    for path, body, status in (
        ("/queues/orders/messages", {"messages": [{"payload": 10**30}]}, 201),
        ("/replays", {**REASON, "ids": ids}, 201),
        ("/dead-letters/discard", {**REASON, "ids": ids}, 200),
    ):
        key = {"Idempotency-Key": path}
        first, again = (body_of(browser.post(API + path, json=body, headers=key), status) for _ in range(2))
        assert first == again, path
    with Client(dsn) as client:
        assert (client.queues()[0].ready, len(client.replays())) == (1, 1)
        assert len(client.audit_log(action="letter.discard")) == 1
    post(browser, "/queues", 201, name="more")
    for _ in range(2):
        body_of(browser.delete(f"{API}/queues/more", params={"reason": "x"}, headers=KEY), 204)


def test_key_belongs_to_one_request_that_succeeded(site: FastAPI, client: Client) -> None:
    visitor = visiting(with_routes(site))
    for _ in range(2):
        answer = visitor.post(PAUSE, json={"reason": "load", "fail": True}, headers=KEY)
        assert body_of(answer, 422)["detail"] == "not like this"
    assert (pauses(client), client.queues()[0].paused) == (0, False)
    assert visitor.post(PAUSE, json={"reason": "load"}, headers=KEY).status_code == 201
    for path, body in (
        (PAUSE, {"reason": "other"}),
        (f"{PAUSE}?x=1", {"reason": "load"}),
        (f"{API}/queues/orders/resume", {"reason": "load"}),
    ):
        other = visitor.post(path, json=body, headers=KEY)
        assert body_of(other, 422)["type"] == "urn:bartleby:key-reused", path
    for key in ("", "x" * 201, "a\tb", "ü"):
        answer = visitor.post(PAUSE, json={"reason": "load"}, headers={b"Idempotency-Key": key.encode()})
        assert "Idempotency-Key" in body_of(answer, 422)["detail"], key
    assert (pauses(client), client.queues()[0].paused) == (1, True)


def test_keys_of_principals_are_separate(client_as: ClientAs, guarded: FastAPI, client: Client) -> None:
    with_routes(guarded)
    visitors = [client_as("operator", name="ann"), client_as("operator", name="bob"), client_as("admin", name="ann")]
    for visitor in visitors:
        assert "idempotent-replay" not in visitor.post(PAUSE, json=REASON, headers=KEY).headers
        client.resume_queue("orders", actor="a test", reason="again")
    assert pauses(client) == 3
    again = client_as("operator", name="ann").post(PAUSE, json=REASON, headers=KEY)
    assert again.headers["idempotent-replay"] == "true", "a second token of the same name and role"
    for role in ("reader", "agent"):
        refused = client_as(role)
        assert [refused.post(PAUSE, json=REASON, headers=KEY).status_code for _ in range(2)] == [403, 403]
    assert pauses(client) == 3
    assert [each.actor for each in client.audit_log(action="access.refuse")] == ["agent:agent"] * 2


def test_refusals_of_an_agent_stay_in_the_audit_log_with_a_key(client_as: ClientAs, dsn: str) -> None:
    agent, person = client_as("agent", name="bot"), client_as("operator", name="ana")
    plan = post(agent, "/replays", 201, ids=fill_queue(dsn))
    start = f"{API}/replays/{plan['id']}/start"

    def try_with(key: str, status: int, **body: str) -> Any:
        return body_of(agent.post(start, json={**REASON, **body}, headers={"Idempotency-Key": key}), status)

    try_with("without a hash", 422)
    try_with("too early", 409, hash=plan["hash"])
    post(person, f"/replays/{plan['id']}/approve", hash=plan["hash"])
    assert try_with("another plan", 409, hash="0" * 64)["type"] == "urn:bartleby:plan-drifted"
    with Client(dsn) as client:
        refused = [each.subject["why"] for each in client.audit_log(action="access.refuse", actor="agent:bot")]
    assert refused[::-1] == ["InvalidArgument", "NeedsApproval", "PlanDrifted"]
    assert try_with("another key", 200, hash=plan["hash"])["status"] == "running"


def test_second_of_two_simultaneous_requests_waits_for_the_first(
    site: FastAPI, client: Client, wait_for: Callable[[Callable[[], object]], None], is_waiting: Callable[[], bool]
) -> None:
    go_on, began = threading.Event(), threading.Event()

    @site.post("/api/v1/test/slow")
    def slow(request: Request, desk: AtDesk) -> Response:
        def act(desk: Desk) -> Response:
            desk.queues.pause("orders", reason="slowly")
            began.set()
            go_on.wait(60)
            return JSONResponse({"done": True})

        return once(request, desk, act)

    with ThreadPoolExecutor(2) as callers:
        first = callers.submit(visiting(site).post, "/api/v1/test/slow", headers=KEY)
        assert began.wait(60)
        second = callers.submit(visiting(site).post, "/api/v1/test/slow", headers=KEY)
        wait_for(is_waiting)
        go_on.set()
        answers = [each.result(60) for each in (first, second)]
    assert [each.headers.get("idempotent-replay", "") for each in answers] == ["", "true"]
    assert ([each.json() for each in answers], pauses(client)) == ([{"done": True}] * 2, 1)


def test_two_consoles_share_sessions_and_keys(dsn: str, client: Client, open_console: OpenConsole) -> None:
    visitors = [visiting(open_console()) for _ in range(2)]
    signed = visitors[0].post("/login", data={"secret": add_token(dsn, "operator")}, headers=SAME)
    for each in visitors:
        each.headers["Cookie"] = signed.headers["set-cookie"].partition(";")[0]
    path = f"{API}/queues/orders/pause"
    first, second = (each.post(path, json=REASON, headers={**SAME, **KEY}) for each in visitors)
    assert (first.status_code, first.text) == (second.status_code, second.text)
    assert (second.headers["idempotent-replay"], pauses(client)) == ("true", 1)
    visitors[1].post("/logout", headers=SAME)
    assert visitors[0].get("/queues").status_code == 303, "signed out of both"
