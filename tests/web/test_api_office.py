"""/api/v1 of the whole installation: overview, sinks, workers, audit, doctor, tokens, erasures."""

from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from bartleby import Client
from tests.kit.api import API, SECRET, WHY, get, post, said, shop
from tests.kit.burying import bury
from tests.web.conftest import ClientAs, visiting


def test_the_overview_has_what_is_now(browser: TestClient, dsn: str) -> None:
    ids = shop(dsn)
    plan = post(browser, "/replays", 201, ids=ids)
    with Client(dsn) as client:
        client.tally()
    seen = get(browser, "/overview")
    assert [each["dead"] for each in seen["queues"]] == [3]
    assert [each["dead"] for each in seen["groups"]] == [3]
    assert seen["replays"] == [plan]
    assert seen["sinks"] == []


def test_the_doctor_finds_what_the_command_finds(browser: TestClient) -> None:
    found = get(browser, "/doctor")
    assert {"schema", "audit", "server"} <= {each["check"] for each in found}


class TestSinks:
    def test_one_is_set_up_paused_resumed_and_removed(self, browser: TestClient) -> None:
        body = {**WHY, "kind": "log", "settings": {"attempts": 3, "delay": 1.5}}
        made = said(browser.put(f"{API}/sinks/bus", json=body))
        assert (made["name"], made["attempts"], made["delay"]) == ("bus", 3, 1.5)
        assert get(browser, "/sinks") == [get(browser, "/sinks/bus")]
        assert post(browser, "/sinks/bus/pause")["state"] == "paused"
        assert post(browser, "/sinks/bus/resume")["state"] == "working"
        said(browser.delete(f"{API}/sinks/bus", params={"reason": "not needed"}), 204)
        assert get(browser, "/sinks") == []

    def test_what_cannot_be_is_refused(self, browser: TestClient) -> None:
        wrong = browser.put(f"{API}/sinks/bus", json={**WHY, "kind": "nonsense"})
        assert said(wrong, 422)["type"] == "urn:bartleby:invalid-sink"
        assert get(browser, "/sinks/nowhere", 404)["type"] == "urn:bartleby:unknown-sink"
        assert post(browser, "/sinks/nowhere/pause", 404)["type"] == "urn:bartleby:unknown-sink"
        assert said(browser.delete(f"{API}/sinks/nowhere", params={"reason": "x"}), 404)["status"] == 404


class TestWorkers:
    def test_one_is_listed_and_drained(self, browser: TestClient, dsn: str) -> None:
        with Client(dsn) as client:
            client.report_worker("web-1", version="1.4", queues=["orders"], host="here", pid=7, concurrency=4)
            (found,) = get(browser, "/workers")
            assert (found["name"], found["version"], found["queues"]) == ("web-1", "1.4", ["orders"])
            assert post(browser, "/workers/web-1/drain")["changed"] is True
            assert post(browser, "/workers/web-1/drain")["changed"] is False
            assert client.workers()[0].wanted == "drain"
        assert post(browser, "/workers/nobody/drain", 404)["type"] == "urn:bartleby:unknown-worker"


class TestAudit:
    def test_it_is_read_page_by_page_verified_and_anchored(self, browser: TestClient, dsn: str) -> None:
        shop(dsn)
        for _ in range(3):
            post(browser, "/queues/orders/pause")
            post(browser, "/queues/orders/resume")
        first = get(browser, "/audit", limit=2, action="queue.pause")
        rest = get(browser, "/audit", limit=2, action="queue.pause", after=first["next"])
        lines = [*first["items"], *rest["items"]]
        assert [each["reason"] for each in lines] == ["a test"] * 3
        assert [each["id"] for each in lines] == sorted((each["id"] for each in lines), reverse=True)
        anchor = get(browser, "/audit/anchor")["anchor"]
        assert get(browser, "/audit/verify", anchor=anchor) == {"intact": True, "problems": []}
        assert get(browser, "/audit", actor="nobody")["items"] == []

    def test_a_line_has_the_request_that_wrote_it(self, browser: TestClient, dsn: str) -> None:
        shop(dsn)
        answer = browser.post(f"{API}/queues/orders/pause", json=WHY, headers={"X-Request-Id": "trace-7"})
        assert answer.headers["x-request-id"] == "trace-7"
        (line,) = get(browser, "/audit", request_id="trace-7")["items"]
        assert line["action"] == "queue.pause"
        post(browser, "/queues/orders/resume")
        assert get(browser, "/audit")["items"][0]["request_id"].startswith("api-")

    def test_a_cut_is_found(self, browser: TestClient) -> None:
        found = get(browser, "/audit/verify", anchor=f"99:{'a' * 64}")
        assert found["intact"] is False
        assert found["problems"]


class TestTokens:
    def test_one_is_added_works_and_is_revoked(self, client_as: ClientAs, dsn: str, guarded: FastAPI) -> None:
        shop(dsn)
        admin = client_as("admin")
        made = post(admin, "/tokens", 201, name="deploy", role="reader", queues=["orders"])
        assert made["secret"].startswith("bly_")
        listed = next(each for each in get(admin, "/tokens") if each["id"] == made["id"])
        assert (listed["name"], listed["role"], listed["queues"]) == ("deploy", "reader", ["orders"])
        assert made["secret"] not in admin.get(f"{API}/tokens").text
        program = visiting(guarded, Authorization=f"Bearer {made['secret']}")
        assert [each["name"] for each in get(program, "/queues")] == ["orders"]
        said(admin.delete(f"{API}/tokens/{made['id']}", params={"reason": "leaked"}), 204)
        assert get(program, "/queues", 401)["status"] == 401
        assert said(admin.delete(f"{API}/tokens/{made['id']}", params={"reason": "x"}), 404)["status"] == 404

    def test_one_ends_after_90_days_unless_something_else_is_said(self, browser: TestClient) -> None:
        said_of = {"usual": {}, "forever": {"expires": "never"}, "then": {"expires": "2100-01-01T00:00:00Z"}}
        for name, said_so in said_of.items():
            post(browser, "/tokens", 201, name=name, role="reader", **said_so)
        ends = {each["name"]: each["expires_at"] for each in get(browser, "/tokens")}
        left = datetime.fromisoformat(ends["usual"]) - datetime.now(UTC)
        assert timedelta(days=89) < left <= timedelta(days=90)
        assert ends["forever"] is None
        assert datetime.fromisoformat(ends["then"]) == datetime(2100, 1, 1, tzinfo=UTC)

    def test_no_secret_is_kept_anywhere(self, client_as: ClientAs, dsn: str) -> None:
        admin = client_as("admin")
        headers = {"Idempotency-Key": "one"}
        body = {**WHY, "name": "deploy", "role": "reader"}
        secret = said(admin.post(f"{API}/tokens", json=body, headers=headers), 201)["secret"]
        with psycopg.connect(dsn) as connection:
            kept = connection.execute("select row_to_json(a)::text from bartleby.answer a").fetchall()
            assert secret not in str(kept)
            assert secret not in str(connection.execute("select row_to_json(a)::text from bartleby.audit a").fetchall())

    @pytest.mark.parametrize(
        "body",
        [
            {"role": "emperor"},
            {"queues": []},
            {"queues": ["Not A Queue"]},
            {"expires": datetime(1999, 1, 1, tzinfo=UTC).isoformat()},
            {"expires": "2030-01-01"},
            {"name": ""},
        ],
    )
    def test_what_cannot_be_is_refused(self, browser: TestClient, body: dict[str, object]) -> None:
        assert post(browser, "/tokens", 422, **{"name": "x", "role": "reader", **body})["status"] == 422
        assert get(browser, "/tokens") == []


def test_a_key_is_erased(browser: TestClient, dsn: str) -> None:
    with Client(dsn) as client:
        client.create_queue("orders")
        (one,) = bury(client, [{"who": SECRET}], key="customer-17")
        bury(client, [{"who": "somebody else"}], key="customer-18")
    assert post(browser, "/erasures", key="customer-17", queue="orders") == {"letters": 1}
    letter = get(browser, f"/dead-letters/{one}")
    assert (letter["payload"], letter["key"], letter["erased_at"] is not None) == (None, None, True)
    assert post(browser, "/erasures", 404, key="customer-17", queue="nowhere")["type"] == "urn:bartleby:unknown-queue"
