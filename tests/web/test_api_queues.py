"""/api/v1/queues and messages: how each queue does, what steers it, and what is sent."""

import pytest
from fastapi.testclient import TestClient

from bartleby import Client
from tests.kit.api import API, WHY, get, post, said, shop
from tests.web.conftest import ClientAs


def test_a_queue_is_created_configured_looked_at_and_dropped(browser: TestClient) -> None:
    made = post(browser, "/queues", 201, name="orders", policy={"max_attempts": 3})
    assert (made["name"], made["ready"], made["paused"]) == ("orders", 0, False)
    assert get(browser, "/queues") == [get(browser, "/queues/orders")]
    body = {**WHY, "policy": {"max_attempts": 5}}
    assert said(browser.patch(f"{API}/queues/orders", json=body))["name"] == "orders"
    wrong = {**WHY, "policy": {"max_attempts": "many"}}
    assert said(browser.patch(f"{API}/queues/orders", json=wrong), 422)["type"] == "urn:bartleby:invalid-policy"
    assert said(browser.patch(f"{API}/queues/nowhere", json=body), 404)["type"] == "urn:bartleby:unknown-queue"
    said(browser.delete(f"{API}/queues/orders", params={"reason": "not needed"}), 204)
    assert get(browser, "/queues/orders", 404)["type"] == "urn:bartleby:unknown-queue"
    assert said(browser.delete(f"{API}/queues/orders", params={"reason": "again"}), 404)["status"] == 404


def test_a_queue_with_letters_is_dropped_by_force_only(browser: TestClient, dsn: str) -> None:
    shop(dsn)
    why = {"reason": "not needed"}
    assert said(browser.delete(f"{API}/queues/orders", params=why), 409)["type"] == "urn:bartleby:queue-in-use"
    said(browser.delete(f"{API}/queues/orders", params={**why, "force": True}), 204)


@pytest.mark.parametrize("name", ["", "Orders", "a b", "x" * 200])
def test_a_name_that_no_queue_can_have(browser: TestClient, name: str) -> None:
    assert post(browser, "/queues", 422, name=name)["status"] == 422


def test_a_queue_is_paused_and_its_breaker_opened(browser: TestClient, dsn: str) -> None:
    shop(dsn)
    assert post(browser, "/queues/orders/pause")["paused"] is True
    assert post(browser, "/queues/orders/resume")["paused"] is False
    opened = post(browser, "/queues/orders/open-breaker")
    assert (opened["changed"], opened["queue"]["breaker"]) == (True, "forced")
    assert post(browser, "/queues/orders/open-breaker")["changed"] is False
    assert post(browser, "/queues/orders/close-breaker")["changed"] is True
    for verb in ("pause", "resume", "open-breaker", "close-breaker"):
        assert post(browser, f"/queues/nowhere/{verb}", 404)["type"] == "urn:bartleby:unknown-queue"


def test_a_pause_may_have_an_end(browser: TestClient, dsn: str) -> None:
    shop(dsn)
    assert post(browser, "/queues/orders/pause", until="2099-01-01T10:00:00+01:00")["paused_until"] == (
        "2099-01-01T09:00:00+00:00"
    )
    assert post(browser, "/queues/orders/pause")["paused_until"] is None
    for past in ("2020-01-01T09:00:00Z", "9999-01-01T09:00:00Z"):
        refused = post(browser, "/queues/orders/pause", 422, until=past)
        assert refused["detail"].startswith("a queue is paused until a time to come")
    for none in ("soon", "2099-01-01T09:00:00", "30m"):
        assert post(browser, "/queues/orders/pause", 422, until=none)["status"] == 422
    post(browser, "/queues/orders/pause", until="2099-01-01T09:00:00Z")
    resumed = post(browser, "/queues/orders/resume")
    assert (resumed["paused"], resumed["paused_until"]) == (False, None)


def test_messages_are_sent_in_order_with_what_is_said_of_them(browser: TestClient, dsn: str) -> None:
    shop(dsn, letters=0)
    messages = [
        {"payload": {"n": 1}, "headers": {"trace": "x"}, "key": "a", "max_attempts": 2, "generation": 7},
        {"payload": None},
        {"payload": [1.5, "ä", True], "key": None, "delay": 60},
    ]
    answer = browser.post(f"{API}/queues/orders/messages", json={"messages": messages})
    ids = said(answer, 201)["message_ids"]
    first, second, third = (get(browser, f"/messages/{each}") for each in ids)
    assert (first["payload"], first["headers"], first["key"], first["max_attempts"], first["generation"]) == (
        {"n": 1}, {"trace": "x"}, "a", 2, 7,
    )  # fmt: skip
    assert (second["payload"], second["headers"], second["state"]) == (None, None, "ready")
    assert (third["payload"], third["state"]) == ([1.5, "ä", True], "deferred")


def test_a_message_of_a_key_is_sent_once(browser: TestClient, dsn: str) -> None:
    shop(dsn, letters=0)
    body = {"messages": [{"payload": 1, "key": "a", "unique_for": 3600}]}
    first = said(browser.post(f"{API}/queues/orders/messages", json=body), 201)
    assert said(browser.post(f"{API}/queues/orders/messages", json=body), 201) == first


@pytest.mark.parametrize(
    "body",
    [
        "{}",
        '{"messages": []}',
        '{"messages": [{}]}',
        '{"messages": [{"payload": 1, "surprise": 2}]}',
        '{"messages": [{"payload": 1, "key": ""}]}',
        '{"messages": [{"payload": 1, "delay": -1}]}',
        '{"messages": [{"payload": 1, "delay": 1e400}]}',
        '{"messages": [{"payload": 1, "delay": "1"}]}',
        '{"messages": [{"payload": NaN}]}',
        '{"messages": [{"payload": "\\u0000"}]}',
        '{"messages": [{"payload": "\\ud800"}]}',
        '{"messages": [{"payload": {"\\u0000": 1}}]}',
        '{"messages": [{"payload": 1, "unique_for": 5}]}',
        '{"messages": [{"payload": 1e200000}]}',
        f'{{"messages": [{{"payload": {"[" * 800}{"]" * 800}}}]}}',
    ],
)
def test_a_message_that_cannot_be_sent_is_refused(browser: TestClient, dsn: str, body: str) -> None:
    shop(dsn, letters=0)
    answer = browser.post(f"{API}/queues/orders/messages", content=body, headers={"Content-Type": "application/json"})
    assert said(answer, answer.status_code)["status"] in {400, 422}
    assert get(browser, "/queues/orders")["ready"] == 0


def test_one_bad_message_of_many_is_named_and_none_is_sent(browser: TestClient, dsn: str) -> None:
    shop(dsn, letters=0)
    body = {"messages": [{"payload": 1}, {"payload": "\0"}]}
    assert said(browser.post(f"{API}/queues/orders/messages", json=body), 422)["detail"].startswith("message 1: ")
    assert get(browser, "/queues/orders")["ready"] == 0
    nowhere = browser.post(f"{API}/queues/nowhere/messages", json={"messages": [{"payload": 1}]})
    assert said(nowhere, 404)["type"] == "urn:bartleby:unknown-queue"


def test_a_message_that_is_too_large(browser: TestClient, dsn: str) -> None:
    with Client(dsn) as client:
        client.create_queue("orders", {"payload_limit": 2000})
    body = {"messages": [{"payload": [f"{each:x}" * 9 for each in range(10_000)]}]}
    assert said(browser.post(f"{API}/queues/orders/messages", json=body), 413)["status"] == 413


def test_whoever_is_held_to_a_queue_sees_and_steers_it_only(client_as: ClientAs, dsn: str) -> None:
    shop(dsn, "orders")
    shop(dsn, "secret")
    held = client_as("admin", ["orders"])
    assert [each["name"] for each in get(held, "/queues")] == ["orders"]
    assert post(held, "/queues/orders/pause")["paused"] is True
    for verb in ("pause", "resume", "open-breaker", "close-breaker"):
        assert post(held, f"/queues/secret/{verb}", 404)["status"] == 404
    assert post(held, "/queues", 403, name="more")["type"] == "urn:bartleby:forbidden"
    body = {"messages": [{"payload": 1}]}
    assert said(held.post(f"{API}/queues/secret/messages", json=body), 404)["status"] == 404
    assert said(held.post(f"{API}/queues/orders/messages", json=body), 201)["message_ids"]
