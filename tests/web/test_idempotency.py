"""A change that is requested twice with one Idempotency-Key is done once and answered as the first time."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from bartleby import Client, WrongState
from tests.kit.api import API, REASON, body_of, fill_queue, post, visiting
from tests.kit.worker import until
from tests.web.conftest import ClientAs

KEY = {"Idempotency-Key": "4d1f"}
PAUSE = f"{API}/queues/orders/pause"


def test_same_request_is_done_once_and_answered_twice(browser: TestClient, dsn: str) -> None:
    ids = fill_queue(dsn)
    plan = {"reason": "ünder load", "ids": ids}
    for path, body, status in (
        ("/queues/orders/messages", {"messages": [{"payload": 10**30}]}, 201),
        ("/replays", plan, 201),
        ("/dead-letters/discard", {**REASON, "ids": ids}, 200),  # not in one transaction
    ):
        first, again = (browser.post(API + path, json=body, headers={"Idempotency-Key": path}) for _ in range(2))
        assert (first.status_code, again.status_code, again.content) == (status, status, first.content), path
        assert again.headers["content-type"] == first.headers["content-type"] == "application/json", path
        assert [each.headers.get("idempotent-replay") for each in (first, again)] == [None, "true"], path
    with Client(dsn) as client:
        assert (client.queues()[0].ready, len(client.replays())) == (1, 1)
        assert len(client.audit_log(action="letter.discard")) == 1
        for headers in ({}, {}, KEY):
            body_of(browser.post(f"{API}/replays", json=plan, headers=headers), 201)
        assert len(client.replays()) == 4, "no key, or another key, is another request"


def test_key_belongs_to_one_request_that_succeeded(browser: TestClient, client: Client) -> None:
    drop, asked = f"{API}/queues/later", {"reason": "load"}
    for _ in range(2):
        body_of(browser.delete(drop, params=asked, headers=KEY), 404)
    client.create_queue("later")
    for _ in range(2):
        body_of(browser.delete(drop, params=asked, headers=KEY), 204)
    for method, path, query in (("DELETE", drop, REASON), ("DELETE", f"{drop}s", asked), ("POST", PAUSE, {})):
        other = browser.request(method, path, params=query, json=asked if method == "POST" else None, headers=KEY)
        assert body_of(other, 422)["type"] == "urn:bartleby:key-reused", path
    body_of(browser.post(PAUSE, json=asked, headers={"Idempotency-Key": "pause"}))
    other = browser.post(PAUSE, json=REASON, headers={"Idempotency-Key": "pause"})
    assert body_of(other, 422)["type"] == "urn:bartleby:key-reused", "another body"
    for key in ("", "x" * 201, "a\tb", "ü"):
        answer = browser.post(PAUSE, json=asked, headers={b"Idempotency-Key": key.encode()})
        assert "Idempotency-Key" in body_of(answer, 422)["detail"], key


def test_change_and_its_kept_answer_are_one_transaction(
    browser: TestClient, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise WrongState("the answer cannot be kept")

    monkeypatch.setattr("bartleby.surfaces.web.writing._Taken._keep", fail)
    body_of(browser.post(PAUSE, json=REASON, headers=KEY), 409)
    assert (client.queues()[0].paused, client.audit_log(action="queue.pause")) == (False, [])
    monkeypatch.undo()
    assert "idempotent-replay" not in browser.post(PAUSE, json=REASON, headers=KEY).headers


def test_keys_of_principals_are_separate(client_as: ClientAs, client: Client) -> None:
    visitors = [client_as("operator", name="ann"), client_as("operator", name="bob"), client_as("admin", name="ann")]
    for visitor in visitors:
        assert "idempotent-replay" not in visitor.post(PAUSE, json=REASON, headers=KEY).headers
    again = client_as("operator", name="ann").post(PAUSE, json=REASON, headers=KEY)
    assert again.headers["idempotent-replay"] == "true", "a second token of the same name and role"
    for role in ("reader", "agent"):
        refused = client_as(role)
        assert [refused.post(PAUSE, json=REASON, headers=KEY).status_code for _ in range(2)] == [403, 403]
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
    site: FastAPI, dsn: str, conn: psycopg.Connection[Any]
) -> None:
    asked = {**REASON, "ids": fill_queue(dsn)}
    waiting = "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    with ThreadPoolExecutor(2) as callers:
        with psycopg.connect(dsn) as locking:
            locking.execute("lock table bartleby.replay")
            both = [callers.submit(visiting(site).post, f"{API}/replays", json=asked, headers=KEY) for _ in range(2)]
            until(lambda: conn.execute(waiting).rowcount == 2)
        answers = [each.result(60) for each in both]
    assert sorted(each.headers.get("idempotent-replay", "") for each in answers) == ["", "true"]
    assert [each.status_code for each in answers] == [201, 201]
    with Client(dsn) as client:
        assert len(client.replays()) == 1
