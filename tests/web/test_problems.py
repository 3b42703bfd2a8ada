"""Every error is a problem document or an error page with status and hint, and reveals nothing of the inside."""

import inspect
import json
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from bartleby import errors
from bartleby.surfaces.desk.queues import Queues
from bartleby.surfaces.web import ProxySettings, problems
from bartleby.surfaces.web.paths import without_host
from tests.kit.api import API, JSON, REASON, SAME, body_of, fill_queue, visiting
from tests.web.conftest import OpenConsole

STATUS = {
    "UnknownQueue": 404, "UnknownMessage": 404, "UnknownGroup": 404, "UnknownReplay": 404, "UnknownSink": 404,
    "UnknownToken": 404, "UnknownWorker": 404, "Forbidden": 403, "PlanDrifted": 409, "NeedsApproval": 409,
    "WrongState": 409, "QueueInUse": 409, "LeaseLost": 409, "PayloadTooLarge": 413, "InvalidQueueName": 422,
    "InvalidPolicy": 422, "InvalidMessage": 422, "InvalidArgument": 422, "InvalidFilter": 422, "InvalidPatch": 422,
    "InvalidSink": 422, "InvalidPayload": 422, "UndecodablePayload": 422, "KeyReused": 422, "NoConnection": 503,
    "NotInstalled": 503, "VersionMismatch": 503,
}  # fmt: skip
INTERNAL = {"WrongIsolation", "InvalidSettings", "InvalidHandler", "NoHandler", "NoApp", "BartlebyError"}
"""Mistakes of the console itself, which the caller cannot do anything about."""
Raising = tuple[dict[str, Exception], TestClient]
RAISE = f"{API}/test/raise"


@pytest.fixture
def raising(site: FastAPI) -> Iterator[Raising]:
    """A route of the API and a page that raise the given error."""
    given: dict[str, Exception] = {}

    def look(request: Request) -> None:
        raise given["error"]

    for path in (RAISE, "/test/raise"):
        site.add_api_route(path, look, methods=["GET"])
    with visiting(site) as visitor:
        yield given, visitor


def error_classes() -> dict[str, type[errors.BartlebyError]]:
    found = inspect.getmembers(errors, inspect.isclass)
    return {name: kind for name, kind in found if issubclass(kind, errors.BartlebyError)}


def test_every_error_class_has_its_status(raising: Raising) -> None:
    given, visitor = raising
    assert set(STATUS) | INTERNAL == set(error_classes())
    assert set(problems.STATUS.values()) <= set(problems.responses(404, 409, 413))
    for name, status in STATUS.items():
        given["error"] = error_classes()[name]("it is so", hint="do this")
        answer = visitor.get(RAISE)
        document = body_of(answer, status)
        assert (document["status"], document["request_id"]) == (status, answer.headers["x-request-id"]), name
        assert "it is so" in document["detail"], name
        assert all(document[each] for each in ("type", "title", "hint")), name
        assert ("retry-after" in answer.headers) == (status == 503), name
        page = visitor.get("/test/raise", headers={"Accept": "text/html"})
        assert (page.status_code, page.headers["content-type"].partition(";")[0]) == (status, "text/html"), name
        assert "it is so" in page.text.lower()
    for error, status, kind in (
        (errors.UnknownQueue("there is no queue 'x'"), 404, "unknown-queue"),
        (psycopg.errors.QueryCanceled("canceled"), 504, "too-slow"),
        (psycopg.errors.InsufficientPrivilege("denied"), 403, "insufficient-privilege"),
        (psycopg.errors.AdminShutdown("ended"), 503, "no-connection"),
    ):
        given["error"] = error
        assert body_of(visitor.get(RAISE), status)["type"] == f"urn:bartleby:{kind}"


def test_unexpected_error_is_logged_and_reveals_nothing(
    raising: Raising, caplog: pytest.LogCaptureFixture, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, visitor = raising
    kinds: list[Any] = [error_classes()[name] for name in INTERNAL]
    for kind in [*kinds, ValueError, psycopg.ProgrammingError, psycopg.errors.UniqueViolation]:
        given["error"] = kind("a s3cret")
        caplog.clear()
        for path in (RAISE, "/test/raise"):
            answer = visitor.get(path, headers={"X-Request-Id": "seen-1"})
            assert (answer.status_code, answer.headers["x-request-id"]) == (500, "seen-1"), kind
            assert not any(each in answer.text for each in ("s3cret", "Traceback"))
        assert all(words in caplog.text for words in ("seen-1", kind.__name__, "in look")), kind
    # a form has its own handler of errors
    monkeypatch.setattr(Queues, "resume", Mock(side_effect=psycopg.ProgrammingError("out of order")))
    answer = visitor.post("/queues/orders/resume", data=REASON, headers={**SAME, "X-Request-Id": "form-1"})
    assert (answer.status_code, "form-1: ProgrammingError: out of order" in caplog.text) == (500, True)
    # what the log keeps has no payload and no password
    payload = "a payload"
    with psycopg.connect(dsn) as connection:
        connection.execute("create temp table t (payload text check (payload = ''))")
        with pytest.raises(psycopg.errors.CheckViolation, match=payload) as caught:
            connection.execute("insert into t values (%s)", [payload])
        connection.rollback()
    for error, kept, hidden in (
        (caught.value, "violates check constraint", payload),
        (ValueError("no such user: password=hunter2"), "no such user", "hunter2"),
    ):
        given["error"] = error
        assert visitor.get(RAISE).status_code == 500
        assert (kept in caplog.text, hidden in caplog.text) == (True, False)


def test_invalid_request_names_the_place_and_does_not_repeat_the_value(browser: TestClient) -> None:
    written = "type:KeyErr colour:red"
    for answer in (
        browser.get(f"{API}/dead-letters", params={"filter": written}),
        browser.post(f"{API}/replays", json={"filter": written, **REASON}),
    ):
        document = body_of(answer, 422)
        assert (document["type"], document["position"]) == ("urn:bartleby:invalid-filter", 13)
        assert document["pointed"] == f"{written}\n{' ' * 12}^"
    answer = browser.post(f"{API}/tokens", json={"name": ["s3cret"], "role": "s3cret"})
    document = body_of(answer, 422)
    assert document["type"] == "urn:bartleby:invalid-request"
    assert {each["where"] for each in document["errors"]} == {"body.name", "body.role", "body.reason"}
    assert "s3cret" not in answer.text
    answer = browser.post(f"{API}/queues", content='{"name": hunter2}', headers=JSON)
    assert body_of(answer, 422)["errors"] == [{"where": "body", "message": "no JSON at character 9: Expecting value"}]
    assert "hunter2" not in answer.text


def test_hint_of_a_problem_is_a_request_that_helps(browser: TestClient, dsn: str) -> None:
    fill_queue(dsn)
    discard, everything = "/dead-letters/discard", '"everything": true'
    expires = {"name": "x", "role": "reader", "expires": "30d", **REASON}
    for method, path, body, detail, hint in (
        ("POST", "/queues", {"name": "x"}, "body.reason: Field required", "every change says why"),
        ("DELETE", "/queues/orders", None, "query.reason: Field required", "of a DELETE in the query"),
        ("DELETE", "/queues/orders?reason=x", None, "still has messages or letters", "?force=true"),
        ("POST", "/queues/orders/messages", {"id": 1}, "body.payload: Field required; body.id: Extra inputs", None),
        ("POST", "/queues/orders/messages", {"messages": [{"payload": 1}, {"payload": "\0"}]}, "message 1: ", None),
        ("POST", "/queues/nope/messages", {"payload": 1}, "unknown queue: 'nope'", "POST /api/v1/queues creates one"),
        ("POST", discard, {"filter": "x", **REASON}, "body.expected: Field required", "/count?filter="),
        ("POST", discard, {"ids": ["1"], **REASON}, "body.ids.0: Input should be a valid integer", None),
        ("POST", discard, {"filter": "", "expected": 3, **REASON}, "an empty filter", everything),
        ("POST", "/replays", {"filter": "", **REASON}, "an empty filter", everything),
        ("GET", "/dead-letters?filter=queue:nope", None, "there is no queue nope", "GET /api/v1/queues"),
        ("GET", "/deadletters", None, "there is nothing at /api/v1/deadletters", "GET /api/v1/openapi.json"),
        ("GET", "/dead-letters?fliter=queue:x", None, "unknown parameter 'fliter'", "known: filter, sort"),
        ("GET", "/dead-letters?after=4", None, "query.after: String should match", "`next` of the page before"),
        ("POST", "/tokens", expires, "body.expires", "2027-01-01T"),
        ("PUT", "/queues", None, "PUT cannot be done with /api/v1/queues; GET, POST can", None),
    ):  # fmt: skip
        problem = browser.request(method, API + path, json=body).json()
        assert detail in problem["detail"], path
        assert problem.get("hint") is None if hint is None else hint in problem["hint"], path
        assert "select " not in problem.get("hint", ""), path
    assert browser.put(f"{API}/queues").headers["allow"] == "GET, POST"
    assert browser.post(f"{API}/queues/orders").headers["allow"] == "GET, PATCH, DELETE"
    form = json.dumps({"ids": [3], "payload": 1, "name": "x", **REASON})
    for path in ("queues", "queues/orders/pause", "queues/orders/messages", "dead-letters/discard", "replays"):
        for kind, content in product(("application/x-www-form-urlencoded", "text/plain", ""), (form, "")):
            answer = browser.post(f"{API}/{path}", content=content, headers={"Content-Type": kind})
            hint = body_of(answer, 422)["hint"]
            assert "Content-Type: application/json" in hint or "curl --json" in hint, (path, kind)


def test_missing_page_is_a_page(site: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    answer = visiting(site).get("/<script>alert(1)</script>")
    assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (404, "text/html")
    assert "<script>alert" not in answer.text
    site.state.error_page = Mock(side_effect=LookupError("there is no template"))
    answer = visiting(site).get("/none")
    assert (answer.status_code, "<h1>Not found</h1>" in answer.text) == (404, True)
    assert ["there is no template" in text for text in (caplog.text, answer.text)] == [True, False]


def test_request_id_of_the_caller_is_kept_if_it_is_valid(browser: TestClient) -> None:
    for given in ("deploy-17", "a.b:c/d+e=", "x" * 100):
        assert browser.get("/api/v1/none", headers={"X-Request-Id": given}).headers["x-request-id"] == given
    for given in ("x" * 101, "a b", "<script>", "a\tb", ""):
        made = browser.get("/api/v1/none", headers={"X-Request-Id": given}).headers["x-request-id"]
        assert made.startswith("api-"), given
    assert browser.get("/none").headers["x-request-id"].startswith("web-")


def test_redirect_for_a_trailing_slash_keeps_the_name_of_the_proxy(open_console: OpenConsole) -> None:
    app = open_console(authenticate=False, proxy=ProxySettings(("127.0.0.0/8",)), hosts=("ops.example.com",))
    headers = {"Host": "localhost:1234", "X-Forwarded-Host": "ops.example.com"}
    for path in ("/queues/", f"{API}/queues/"):
        answer = visiting(app).get(f"{path}?limit=1", headers=headers)
        assert (answer.status_code, answer.headers["location"]) == (307, f"{path.rstrip('/')}?limit=1")
    assert without_host("http://ops/queues?a=1", "http://ops") == "/queues?a=1"
    for location in (
        "/login", "http://ops", "http://ops//evil.example/", "http://ops/\\evil.example/", "http://ops.evil.example/",
        "https://elsewhere.example/",
    ):  # fmt: skip
        assert without_host(location, "http://ops") == location
