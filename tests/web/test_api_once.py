"""A change that is asked for twice with one key is done once, by every kind of write."""

from fastapi.testclient import TestClient

from bartleby import Client
from tests.kit.api import API, WHY, get, post, said, shop
from tests.kit.burying import statuses
from tests.web.conftest import ClientAs

KEY = {"Idempotency-Key": "4d1f"}


def test_messages_are_sent_once(browser: TestClient, dsn: str) -> None:
    shop(dsn, letters=0)
    body = {"messages": [{"payload": 10**30}]}
    first = browser.post(f"{API}/queues/orders/messages", json=body, headers=KEY)
    again = browser.post(f"{API}/queues/orders/messages", json=body, headers=KEY)
    assert (said(again, 201), again.headers["idempotent-replay"]) == (said(first, 201), "true")
    assert "idempotent-replay" not in first.headers
    assert get(browser, "/queues/orders")["ready"] == 1


def test_a_key_of_another_request_is_refused(browser: TestClient, dsn: str) -> None:
    shop(dsn, letters=0)
    said(browser.post(f"{API}/queues/orders/pause", json=WHY, headers=KEY))
    other = browser.post(f"{API}/queues/orders/resume", json=WHY, headers=KEY)
    assert said(other, 422)["type"] == "urn:bartleby:key-reused"
    assert get(browser, "/queues/orders")["paused"] is True


def test_a_plan_is_made_once(browser: TestClient, dsn: str) -> None:
    body = {**WHY, "ids": shop(dsn)}
    first, again = (said(browser.post(f"{API}/replays", json=body, headers=KEY), 201) for _ in range(2))
    assert first == again
    assert len(get(browser, "/replays")["items"]) == 1


def test_letters_are_discarded_once_and_the_answer_is_that_of_the_first_time(browser: TestClient, dsn: str) -> None:
    ids = shop(dsn)
    body = {**WHY, "ids": ids}
    first, again = (said(browser.post(f"{API}/dead-letters/discard", json=body, headers=KEY)) for _ in range(2))
    assert (first["changed"], again) == (3, first)
    with Client(dsn) as client:
        assert statuses(client, ids) == ["discarded"] * 3
        assert len(client.audit_log(action="letter.discard")) == 1


def test_what_has_no_body_is_answered_again(browser: TestClient, dsn: str) -> None:
    shop(dsn, letters=0)
    for _ in range(2):
        said(browser.delete(f"{API}/queues/orders", params={"reason": "x"}, headers=KEY), 204)


def test_a_refusal_is_not_kept(browser: TestClient, dsn: str) -> None:
    path = f"{API}/queues/orders/pause"
    assert said(browser.post(path, json=WHY, headers=KEY), 404)["status"] == 404
    shop(dsn, letters=0)
    assert said(browser.post(path, json=WHY, headers=KEY))["paused"] is True


def test_a_key_that_is_none(browser: TestClient, dsn: str) -> None:
    shop(dsn, letters=0)
    for key in ("", "x" * 201):
        answer = browser.post(f"{API}/queues/orders/pause", json=WHY, headers={"Idempotency-Key": key})
        assert said(answer, 422)["status"] == 422


def test_what_an_agent_is_refused_stays_in_the_audit_whatever_key_it_sends(client_as: ClientAs, dsn: str) -> None:
    agent, person = client_as("agent", name="bot"), client_as("operator", name="ana")
    plan = post(agent, "/replays", 201, ids=shop(dsn))
    start = f"{API}/replays/{plan['id']}/start"
    said(agent.post(start, json=WHY, headers={"Idempotency-Key": "without a hash"}), 422)
    said(agent.post(start, json={**WHY, "hash": plan["hash"]}, headers={"Idempotency-Key": "too early"}), 409)
    post(person, f"/replays/{plan['id']}/approve", hash=plan["hash"])
    wrong = agent.post(start, json={**WHY, "hash": "0" * 64}, headers={"Idempotency-Key": "another plan"})
    assert said(wrong, 409)["type"] == "urn:bartleby:plan-drifted"
    with Client(dsn) as client:
        refused = [each.subject["why"] for each in client.audit_log(action="access.refuse", actor="agent:bot")]
    assert refused[::-1] == ["InvalidArgument", "NeedsApproval", "PlanDrifted"]
    started = agent.post(start, json={**WHY, "hash": plan["hash"]}, headers={"Idempotency-Key": "another plan 2"})
    assert said(started)["status"] == "running"
