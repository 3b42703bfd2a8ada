"""/api/v1/groups and group-rules: of how many bugs the letters died, and what is said of each."""

import pytest
from fastapi.testclient import TestClient

from bartleby import Client
from tests.kit.api import API, SECRET, get, post, said, shop
from tests.kit.burying import bury
from tests.web.conftest import ClientAs


@pytest.fixture
def bugs(dsn: str) -> list[int]:
    """Three groups of the queue `orders`, with 3, 2 and 1 letters."""
    with Client(dsn) as client:
        client.create_queue("orders")
        for count, kind in ((3, "KeyError"), (2, "ValueError"), (1, "TypeError")):
            payloads = [{"country": "AT", "n": each} for each in range(count)]
            bury(client, payloads, kind=kind)
        client.tally()
        return [int(each.id) for each in client.groups()]


def test_groups_come_largest_first_page_by_page(browser: TestClient, bugs: list[int]) -> None:
    first = get(browser, "/groups", limit=2)
    assert [each["id"] for each in first["items"]] == bugs[:2]
    second = get(browser, "/groups", limit=2, after=first["next"])
    assert ([each["id"] for each in second["items"]], second["next"]) == (bugs[2:], None)
    assert get(browser, "/groups", 422, after="nonsense")["status"] == 422
    assert get(browser, "/groups", queue="nowhere")["items"] == []
    assert get(browser, "/groups", state="resolved")["items"] == []


def test_one_group_has_a_tag_and_a_portrait(browser: TestClient, bugs: list[int]) -> None:
    answer = browser.get(f"{API}/groups/{bugs[0]}")
    assert said(answer)["error_type"] == "KeyError"
    again = browser.get(f"{API}/groups/{bugs[0]}", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304
    portrait = get(browser, f"/groups/{bugs[0]}/portrait")
    assert portrait["group"]["id"] == bugs[0]
    assert portrait["versions"] == get(browser, f"/groups/{bugs[0]}/versions")
    assert portrait["shared"] == get(browser, f"/groups/{bugs[0]}/shared-values")
    assert portrait["replays"] == get(browser, f"/groups/{bugs[0]}/replays") == []
    assert {"path": "payload.country", "value": "AT", "letters": 3, "of": 3} in portrait["shared"]


@pytest.mark.parametrize("part", ["", "/portrait", "/shared-values", "/versions", "/replays"])
def test_a_group_that_is_not_there(browser: TestClient, part: str) -> None:
    assert get(browser, f"/groups/99{part}", 404)["type"] == "urn:bartleby:unknown-group"


def test_a_bug_is_acknowledged_muted_resolved_and_reopened(browser: TestClient, bugs: list[int]) -> None:
    path = f"/groups/{bugs[0]}"
    known = post(browser, f"{path}/acknowledge", owner="ana", link="https://tickets.example/1")
    assert (known["state"], known["owner"], known["note"]) == ("acknowledged", "ana", "a test")
    assert post(browser, f"{path}/mute", until="2099-01-01T00:00:00Z")["state"] == "muted"
    assert post(browser, f"{path}/resolve", version="1.4")["resolved_version"] == "1.4"
    assert post(browser, f"{path}/reopen")["state"] == "open"
    assert post(browser, f"{path}/mute", 422, until="2099-01-01T00:00:00")["status"] == 422
    assert post(browser, f"{path}/mute", 422, until="1999-01-01T00:00:00Z")["status"] == 422
    assert post(browser, "/groups/99/resolve", 404)["type"] == "urn:bartleby:unknown-group"


def test_groups_are_merged_and_the_rule_is_taken_back(browser: TestClient, bugs: list[int], dsn: str) -> None:
    assert post(browser, "/groups/merge", groups=bugs[1:2], into=bugs[0])["letters"] == 2
    (rule,) = get(browser, "/group-rules")
    assert (rule["from_group"], rule["to_group"], rule["path"]) == (bugs[1], bugs[0], None)
    path = f"{API}/group-rules/{rule['id']}"
    assert said(browser.delete(path), 422)["status"] == 422
    said(browser.delete(path, params={"reason": "a mistake"}), 204)
    assert get(browser, "/group-rules") == []
    assert said(browser.delete(path, params={"reason": "a mistake"}), 404)["status"] == 404
    with Client(dsn) as client:
        assert client.audit_log(limit=1)[0].reason == "a mistake"


@pytest.mark.parametrize("number", ["1e400", "123456789012345678901234567890", "0.30000000000000000000000001"])
def test_a_group_is_split_by_a_value_with_every_digit(browser: TestClient, dsn: str, number: str) -> None:
    with Client(dsn) as client:
        client.create_queue("orders")
        content = {"Content-Type": "application/json"}
        body = f'{{"messages": [{{"payload": {{"n": {number}}}}}, {{"payload": {{"n": 0.3}}}}]}}'
        exact, rounded = said(browser.post(f"{API}/queues/orders/messages", content=body, headers=content), 201)[
            "message_ids"
        ]
        bury(client, [])
        first = client.dead_letter(rounded)
        assert first is not None
        split = f'{{"reason": "two bugs", "path": "payload.n", "value": {number}}}'
        made = said(browser.post(f"{API}/groups/{first.group_id}/split", content=split, headers=content))
        client.regroup()
        assert [each.group_id for each in map(client.dead_letter, (exact, rounded)) if each] == [
            made["id"], first.group_id,
        ]  # fmt: skip


@pytest.mark.parametrize("value", ["NaN", "Infinity", '"\\u0000"', '"\\ud800"'])
def test_a_value_that_cannot_be_stored_is_refused(browser: TestClient, bugs: list[int], value: str) -> None:
    body = f'{{"reason": "why", "path": "payload.n", "value": {value}}}'
    answer = browser.post(f"{API}/groups/{bugs[0]}/split", content=body, headers={"Content-Type": "application/json"})
    assert said(answer, 422)["status"] == 422


def test_values_of_secrets_are_hidden_in_what_letters_share_in_rules_and_in_the_audit(
    client_as: ClientAs, dsn: str
) -> None:
    with Client(dsn) as client:
        client.create_queue("orders")
        bury(client, [{"password": SECRET}, {"password": SECRET}], error=f"password={SECRET}")
        (group,) = client.groups()
        client.split_group(group.id, "payload.password", SECRET, actor="ana", reason="two bugs")
        reader = client_as("reader")
        for path in (f"/groups/{group.id}/portrait", "/group-rules", "/audit", "/groups"):
            answer = reader.get(API + path)
            assert answer.status_code == 200
            assert SECRET not in answer.text
        assert get(reader, "/group-rules")[0]["value"] == "***"


def test_the_number_of_a_card_is_hidden_also_where_it_is_a_number(client_as: ClientAs, dsn: str) -> None:
    card = 4111111111111111
    with Client(dsn) as client:
        client.create_queue("orders")
        bury(client, [{"number": card}, {"number": card}])
        (group,) = client.groups()
        patch = [{"op": "replace", "path": "/number", "value": card}]
        client.plan_replay("queue:orders", patch=patch, actor="ana", reason="why")
        client.split_group(group.id, "payload.number", card, actor="ana", reason="two bugs")
    reader = client_as("reader")
    for path in (f"/groups/{group.id}/portrait", "/group-rules", "/audit", "/dead-letters", "/replays/1/preview"):
        answer = reader.get(API + path)
        assert answer.status_code == 200
        assert str(card) not in answer.text
    assert get(reader, "/dead-letters")["items"][0]["payload"] == {"number": "***"}


def test_whoever_is_held_to_a_queue_sees_its_groups_only(client_as: ClientAs, dsn: str) -> None:
    shop(dsn, "orders")
    shop(dsn, "secret")
    with Client(dsn) as client:
        client.tally()
        theirs, others = client.groups("orders")[0].id, client.groups("secret")[0].id
    held = client_as("operator", ["orders"])
    assert [each["id"] for each in get(held, "/groups")["items"]] == [theirs]
    assert get(held, "/groups", queue="secret")["items"] == []
    assert get(held, f"/groups/{others}", 404)["status"] == 404
    assert post(held, "/groups/merge", 404, groups=[others], into=theirs)["status"] == 404
