"""Every error is a problem with a status and words; none says what is nobody's business."""

import inspect
import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from pydantic import BaseModel, SecretStr

from bartleby import Client, errors
from bartleby.calls import Call
from bartleby.surfaces.web import ConsoleSettings, console, problems
from bartleby.surfaces.web.context import AtDesk
from tests.web.conftest import visiting

STATUS = {
    "UnknownQueue": 404, "UnknownMessage": 404, "UnknownGroup": 404, "UnknownReplay": 404, "UnknownSink": 404,
    "UnknownToken": 404, "UnknownWorker": 404, "Forbidden": 403, "PlanDrifted": 409, "NeedsApproval": 409,
    "WrongState": 409, "QueueInUse": 409, "LeaseLost": 409, "PayloadTooLarge": 413, "InvalidQueueName": 422,
    "InvalidPolicy": 422, "InvalidMessage": 422, "InvalidArgument": 422, "InvalidFilter": 422, "InvalidPatch": 422,
    "InvalidSink": 422, "InvalidPayload": 422, "UndecodablePayload": 422, "KeyReused": 422, "NoConnection": 503,
    "NotInstalled": 503, "VersionMismatch": 503,
}  # fmt: skip
OURS = {"WrongIsolation", "InvalidSettings", "InvalidHandler", "NoHandler", "NoApp", "BartlebyError"}
"""Mistakes of the console itself: whoever asks can do nothing about them."""


class Asked(BaseModel):
    filter: str = ""
    reason: str
    password: SecretStr | None = None


@pytest.fixture
def raising(site: FastAPI) -> Iterator[tuple[dict[str, Exception], TestClient]]:
    """A route that raises what it is told, for programs and for people."""
    told: dict[str, Exception] = {}

    def look(request: Request) -> None:
        raise told["error"]

    site.add_api_route("/api/v1/test/raise", look, methods=["GET"])
    site.add_api_route("/test/raise", look, methods=["GET"])

    @site.get("/api/v1/test/find")
    def find(desk: AtDesk, filter: str = "") -> int:
        return desk.letters.count(filter).letters

    @site.post("/api/v1/test/find")
    def find_too(desk: AtDesk, asked: Asked) -> int:
        return desk.letters.count(asked.filter).letters

    with visiting(site) as visitor:
        yield told, visitor


def error_classes() -> dict[str, type[errors.BartlebyError]]:
    return {
        name: kind
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.BartlebyError)
    }


def test_every_error_of_ours_has_a_status_or_is_a_mistake_of_ours() -> None:
    assert set(STATUS) | OURS == set(error_classes())


@pytest.mark.parametrize("name", sorted(STATUS))
def test_an_error_of_ours_is_a_problem(raising: tuple[dict[str, Exception], TestClient], name: str) -> None:
    told, visitor = raising
    told["error"] = error_classes()[name]("it is so", hint="do this")
    answer = visitor.get("/api/v1/test/raise")
    assert answer.status_code == STATUS[name]
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["status"] == STATUS[name]
    assert document["request_id"] == answer.headers["x-request-id"]
    assert document["type"].startswith("urn:bartleby:")
    assert "it is so" in document["detail"]
    assert document["title"]
    assert document["hint"]
    assert ("retry-after" in answer.headers) == (STATUS[name] == 503)
    page = visitor.get("/test/raise", headers={"Accept": "text/html"})
    assert page.status_code == STATUS[name]
    assert page.headers["content-type"].startswith("text/html")
    assert "it is so" in page.text.lower()


def test_the_kind_is_the_name_of_the_error(raising: tuple[dict[str, Exception], TestClient]) -> None:
    told, visitor = raising
    told["error"] = errors.UnknownQueue("there is no queue 'x'", hint="create it")
    document = visitor.get("/api/v1/test/raise").json()
    del document["request_id"]
    assert document == {
        "type": "urn:bartleby:unknown-queue",
        "title": "Unknown queue",
        "status": 404,
        "detail": "there is no queue 'x'",
        "hint": "create it",
    }


@pytest.mark.parametrize("name", [*sorted(OURS), "ValueError", "psycopg.ProgrammingError", "UniqueViolation"])
def test_what_nobody_expected_says_nothing_of_the_inside(
    raising: tuple[dict[str, Exception], TestClient], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    told, visitor = raising
    kinds: dict[str, Any] = {
        **error_classes(),
        "ValueError": ValueError,
        "psycopg.ProgrammingError": psycopg.ProgrammingError,
        "UniqueViolation": psycopg.errors.UniqueViolation,
    }
    told["error"] = kinds[name]("a s3cret")
    for path in ("/api/v1/test/raise", "/test/raise"):
        answer = visitor.get(path, headers={"X-Request-Id": "seen-1"})
        assert answer.status_code == 500
        assert "s3cret" not in answer.text
        assert "Traceback" not in answer.text
        assert answer.headers["x-request-id"] == "seen-1"
    assert "seen-1" in caplog.text
    assert told["error"].__class__.__name__ in caplog.text
    assert "in look" in caplog.text, "where it happened"


def test_the_log_has_no_secrets(
    raising: tuple[dict[str, Exception], TestClient], caplog: pytest.LogCaptureFixture, dsn: str
) -> None:
    told, visitor = raising
    payload = "a payload"
    with psycopg.connect(dsn) as connection:
        connection.execute("create temp table t (payload text check (payload = ''))")
        with pytest.raises(psycopg.errors.CheckViolation) as caught:
            connection.execute("insert into t values (%s)", [payload])
        connection.rollback()
    assert payload in str(caught.value)
    told["error"] = caught.value
    assert visitor.get("/api/v1/test/raise").status_code == 500
    assert "violates check constraint" in caplog.text
    assert payload not in caplog.text
    told["error"] = ValueError("no such user: password=hunter2")
    assert visitor.get("/api/v1/test/raise").status_code == 500
    assert "no such user" in caplog.text
    assert "hunter2" not in caplog.text


def test_a_filter_is_pointed_at(raising: tuple[dict[str, Exception], TestClient]) -> None:
    _, visitor = raising
    written = "type:KeyErr colour:red"
    for answer in (
        visitor.get("/api/v1/test/find", params={"filter": written}),
        visitor.post("/api/v1/test/find", json={"filter": written, "reason": "x"}),
    ):
        assert answer.status_code == 422
        document = answer.json()
        assert document["type"] == "urn:bartleby:invalid-filter"
        assert document["position"] == 13
        assert document["pointed"] == f"{written}\n{' ' * 12}^"


def test_a_request_that_cannot_be_understood_is_told_where_and_not_repeated(
    raising: tuple[dict[str, Exception], TestClient],
) -> None:
    _, visitor = raising
    answer = visitor.post("/api/v1/test/find", json={"filter": 3, "password": ["s3cret"]})
    assert answer.status_code == 422
    document = answer.json()
    assert document["type"] == "urn:bartleby:invalid-request"
    assert {each["where"] for each in document["errors"]} == {"body.filter", "body.reason", "body.password"}
    assert "s3cret" not in answer.text
    broken = visitor.post("/api/v1/test/find", content=b"{", headers={"Content-Type": "application/json"})
    assert broken.status_code == 422
    assert broken.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/api/v1/none", 404), ("PUT", "/api/v1/test/find", 405)]
)
def test_what_does_not_exist_is_a_problem_too(
    raising: tuple[dict[str, Exception], TestClient], method: str, path: str, status: int
) -> None:
    _, visitor = raising
    answer = visitor.request(method, path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == status
    assert ("allow" in answer.headers) == (status == 405)


def test_a_page_that_does_not_exist_is_a_page(browser: TestClient) -> None:
    answer = browser.get("/<script>alert(1)</script>")
    assert answer.status_code == 404
    assert answer.headers["content-type"].startswith("text/html")
    assert "<script>alert" not in answer.text


def test_a_page_that_cannot_be_shown_is_a_plain_one(site: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: Request, document: object) -> str:
        raise LookupError("there is no template")

    site.state.error_page = broken
    answer = visiting(site).get("/none")
    assert answer.status_code == 404
    assert "<h1>Not found</h1>" in answer.text
    assert "there is no template" in caplog.text
    assert "there is no template" not in answer.text


def test_what_takes_too_long_is_stopped_and_told(site: FastAPI, monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
    monkeypatch.setattr("bartleby.surfaces.pools._READER_TIMEOUT", "50ms")
    app = console(dsn, ConsoleSettings(authenticate=False))

    @app.get("/api/v1/test/slow")
    def slow(desk: AtDesk) -> None:
        desk.seat.looking().run(Call("select pg_sleep(60)", (), list))

    answer = visiting(app).get("/api/v1/test/slow")
    app.state.house.close()
    assert answer.status_code == 504
    assert answer.json()["type"] == "urn:bartleby:too-slow"
    assert "narrow it down" in answer.json()["hint"]


def test_errors_of_the_database_arrive_as_what_they_are(site: FastAPI, dsn: str) -> None:
    @site.get("/api/v1/test/{what}")
    def do(what: str, desk: AtDesk) -> None:
        if what == "missing":
            desk.queues.pause("none", reason="x")
        elif what == "name":
            desk.queues.create("Not A Name", {}, reason="x")
        elif what == "reading":
            desk.seat.reader.create_queue("orders")
        else:
            desk.queues.drop("orders", reason="x")

    with Client(dsn) as client:
        client.create_queue("orders")
        client.send("orders", 1)
    visitor = visiting(site)
    expected = {"missing": (404, "unknown-queue"), "name": (422, "invalid-queue-name"),
                "reading": (403, "insufficient-privilege"), "drop": (409, "queue-in-use")}  # fmt: skip
    for what, (status, kind) in expected.items():
        answer = visitor.get(f"/api/v1/test/{what}")
        assert (answer.status_code, answer.json()["type"]) == (status, f"urn:bartleby:{kind}")


def test_problems_are_documented(site: FastAPI) -> None:
    site.add_api_route("/api/v1/test/documented", lambda: None, responses=problems.responses(404, 409))
    document = visiting(site).get("/api/v1/openapi.json").json()
    assert document["components"]["schemas"]["Problem"] == json.loads(json.dumps(problems.SCHEMA))
    said = document["paths"]["/api/v1/test/documented"]["get"]["responses"]
    assert {"401", "403", "404", "409", "422", "429", "503", "504"} <= set(said)
    for status in ("404", "422"):
        assert said[status]["content"] == {
            "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
        }


def test_every_status_that_there_is_can_be_documented() -> None:
    assert set(problems.STATUS.values()) <= set(problems.responses(404, 409, 413))


@pytest.mark.parametrize("given", ["deploy-17", "a.b:c/d+e=", "x" * 100])
def test_a_request_keeps_the_id_that_it_brings(browser: TestClient, given: str) -> None:
    assert browser.get("/api/v1/none", headers={"X-Request-Id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["x" * 101, "a b", "<script>", "a\tb", ""])
def test_an_id_that_is_none_is_made_up(browser: TestClient, given: str) -> None:
    made = browser.get("/api/v1/none", headers={"X-Request-Id": given}).headers["x-request-id"]
    assert made.startswith("api-")
    assert browser.get("/none").headers["x-request-id"].startswith("web-")
