"""Whoever writes a request by hand for the first time: what they get wrong is told with its remedy, and HEAD works."""

import json
import re
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from bartleby import Client
from bartleby.surfaces.web import ConsoleSettings, ProxySettings, console
from bartleby.surfaces.web.paths import without_host
from tests.kit.api import API, BIG, WHY, every, get, said, shop
from tests.web.conftest import ClientAs, visiting
from tests.web.test_api_doors import TABLE


@pytest.mark.parametrize(
    ("method", "path", "body", "detail", "hint"),
    [
        ("POST", "/queues", {"name": "x"}, "body.reason: Field required", "every change says why"),
        ("DELETE", "/queues/orders", None, "query.reason: Field required", "of a DELETE in the query"),
        ("DELETE", "/queues/orders?reason=x", None, "still has messages or letters", "?force=true"),
        ("POST", "/queues/orders/messages", {"id": 1}, "body.payload: Field required; body.id: Extra inputs", None),
        ("POST", "/queues/orders/messages", {"messages": [{}]}, "body.messages.0.payload: Field required", None),
        ("POST", "/queues/nope/messages", {"payload": 1}, "unknown queue: 'nope'", "POST /api/v1/queues creates one"),
        ("POST", "/dead-letters/discard", {"filter": "x", **WHY}, "body.expected: Field required", "/count?filter="),
        ("POST", "/dead-letters/discard", {"ids": ["1"], **WHY}, "body.ids.0: Input should be a valid integer", None),
        (
            "POST",
            "/dead-letters/discard",
            {"filter": "", "expected": 3, **WHY},
            "an empty filter",
            '"everything": true',
        ),
        ("POST", "/replays", {"filter": "", **WHY}, "an empty filter", '"everything": true'),
        ("GET", "/dead-letters?filter=queue:nope", None, "there is no queue nope", "GET /api/v1/queues"),
        ("GET", "/deadletters", None, "there is nothing at /api/v1/deadletters", "GET /api/v1/openapi.json"),
        ("GET", "", None, "there is nothing at /api/v1", "GET /api/v1/openapi.json"),
        (
            "GET",
            "/dead-letters?fliter=queue:x",
            None,
            "unknown parameter 'fliter'",
            "known: filter, sort, limit, after",
        ),
        ("GET", "/queues?name=orders", None, "unknown parameter 'name'", "there are none here"),
        ("GET", "/dead-letters?after=4", None, "query.after: String should match", "`next` of the page before"),
        ("POST", "/tokens", {"name": "x", "role": "reader", "expires": "30d", **WHY}, "body.expires", "2027-01-01T"),
        ("PUT", "/queues", None, "PUT cannot be done with /api/v1/queues; GET, POST can", None),
    ],
)
def test_what_is_wrong_is_told_with_its_remedy(  # noqa: PLR0917 - pytest passes them by name
    browser: TestClient, dsn: str, method: str, path: str, body: object, detail: str, hint: str | None
) -> None:
    shop(dsn)
    problem = browser.request(method, API + path, json=body).json()
    assert detail in problem["detail"]
    assert problem.get("hint") is None if hint is None else hint in problem["hint"]
    assert "select " not in problem.get("hint", "")


def test_every_parameter_that_is_documented_is_known_and_no_other_is(browser: TestClient, site: FastAPI) -> None:
    for path, methods in site.openapi()["paths"].items():
        for method, described in methods.items():
            names = [each["name"] for each in described.get("parameters", ()) if each["in"] == "query"]
            if path.endswith(("/health", "/metrics")):
                continue
            asked = filled(path, {"queue": "orders"})
            known = browser.request(method, asked, params=dict.fromkeys(names, "1"), json={}).text
            assert "unknown parameter" not in known
            other = browser.request(method, asked, params={"surprise": "1"}, json={})
            assert said(other, 422)["detail"] == "unknown parameter 'surprise'"


def test_what_can_be_done_instead_is_in_the_header(browser: TestClient) -> None:
    assert browser.put(f"{API}/queues").headers["allow"] == "GET, POST"
    assert browser.post(f"{API}/queues/orders").headers["allow"] == "GET, PATCH, DELETE"


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", ""])
def test_a_body_that_does_not_say_that_it_is_json_is_told_how(browser: TestClient, kind: str) -> None:
    body = json.dumps({"name": "x", **WHY})
    for content in (body, ""):
        answer = browser.post(f"{API}/queues", content=content, headers={"Content-Type": kind})
        assert "curl --json" in said(answer, 422)["hint"]


def test_where_json_ends_too_early_is_told(browser: TestClient) -> None:
    headers = {"Content-Type": "application/json"}
    answer = browser.post(f"{API}/queues", content='{"name": hunter2}', headers=headers)
    assert said(answer, 422)["errors"] == [{"where": "body", "message": "no JSON at character 9: Expecting value"}]
    assert "hunter2" not in answer.text


def test_one_message_needs_no_list(browser: TestClient, dsn: str) -> None:
    shop(dsn, letters=0)
    body = f'{{"payload": {{"n": {BIG}, "x": 1.10}}, "key": "a", "delay": 60, "headers": null}}'
    headers = {"Content-Type": "application/json"}
    answer = browser.post(f"{API}/queues/orders/messages", content=body, headers=headers)
    (sent,) = said(answer, 201)["message_ids"]
    found = browser.get(f"{API}/messages/{sent}")
    assert f'{{"n": {BIG}, "x": 1.10}}' in found.text
    assert (found.json()["key"], found.json()["state"]) == ("a", "deferred")
    many = browser.post(f"{API}/queues/orders/messages", json={"messages": [{"payload": {"messages": 1}}]})
    (other,) = said(many, 201)["message_ids"]
    assert get(browser, f"/messages/{other}")["payload"] == {"messages": 1}
    mixed = browser.post(f"{API}/queues/orders/messages", json={"messages": [{"payload": 1}], "payload": 2})
    assert said(mixed, 422)["detail"] == "body.payload: Extra inputs are not permitted"


def filled(path: str, places: dict[str, Any]) -> str:
    """Return a path of a route with its places; 1 where nothing is known."""
    return re.sub(r"\{(\w+)(:\w+)?\}", lambda found: str(places.get(found[1], 1)), path)


def test_behind_a_proxy_a_slash_too_many_leads_to_the_name_that_people_know(dsn: str) -> None:
    proxy = ProxySettings(("127.0.0.0/8",))
    app = console(dsn, ConsoleSettings(authenticate=False, proxy=proxy, hosts=("ops.example.com",)))
    told = {"Host": "localhost:1234", "X-Forwarded-Host": "ops.example.com"}
    for path in ("/queues/", f"{API}/queues/"):
        answer = visiting(app).get(f"{path}?limit=1", headers=told)
        assert (answer.status_code, answer.headers["location"]) == (307, f"{path.rstrip('/')}?limit=1")
    app.close()


@pytest.mark.parametrize(
    ("location", "left"),
    [
        ("http://ops/queues?a=1", "/queues?a=1"),
        ("/login", "/login"),
        ("http://ops", "http://ops"),
        ("http://ops//evil.example/", "http://ops//evil.example/"),
        ("http://ops/\\evil.example/", "http://ops/\\evil.example/"),
        ("http://ops.evil.example/", "http://ops.evil.example/"),
        ("https://elsewhere.example/", "https://elsewhere.example/"),
    ],
)
def test_only_our_own_name_is_left_out_of_where_to_go(location: str, left: str) -> None:
    assert without_host(location, "http://ops") == left


class TestHead:
    def test_every_look_can_be_asked_for_its_head(self, browser: TestClient, site: FastAPI, dsn: str) -> None:
        ids = shop(dsn)
        places: dict[str, Any] = {"message_id": ids[0], "group_id": 1, "queue": "orders"}
        paths = {route.path for route in every(site) if "GET" in (route.methods or ())}
        compared = 0
        for path in sorted(paths - {"/live"}):
            asked = filled(path, places)
            head, whole = browser.head(asked), browser.get(asked)
            assert (asked, head.status_code, head.content) == (asked, whole.status_code, b"")
            assert head.headers.get("content-type") == whole.headers.get("content-type")
            compared += head.is_success
        assert compared > 25

    def test_it_is_no_way_around_the_door(self, guarded: FastAPI, client_as: ClientAs) -> None:
        nobody = visiting(guarded)
        for route in TABLE:
            method, path = route.split(" ")
            if method == "GET":
                assert nobody.head(API + filled(path, {})).status_code == 401
        assert nobody.head("/letters").status_code == 303
        assert nobody.head(f"{API}/health").status_code == 200
        assert client_as("reader").head(f"{API}/tokens").status_code == 403

    def test_a_stream_that_never_ends_has_none(self, browser: TestClient, site: FastAPI) -> None:
        assert browser.head("/live").status_code == 405
        assert site.state.house.streams.open == 0

    def test_it_changes_nothing(self, browser: TestClient, dsn: str) -> None:
        shop(dsn)
        assert browser.head(f"{API}/dead-letters/discard").status_code in {404, 405, 422}
        with Client(dsn) as client:
            assert client.queues()[0].dead == 3
