"""/api/v1: pages, tags, documents, exact numbers, exports and refusals. What a verb does is proven by tests/sql."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from bartleby import Client
from tests.kit.api import API, BIG, JSON, REASON, SECRET, body_of, fill_queue, get, post, visiting
from tests.kit.clock import move_clock
from tests.kit.dead_letters import bury, statuses
from tests.kit.openapi import fuzz
from tests.web.conftest import ClientAs, OpenConsole


def ids_of(page: Any, name: str = "id") -> list[int]:
    return [each[name] for each in page["items"]]


def test_lists_come_page_by_page(browser: TestClient, dsn: str) -> None:
    ids = fill_queue(dsn, letters=3)
    with Client(dsn) as client:
        bury(client, [1, 2], kind="ValueError")
        client.tally()
        groups = [int(each.id) for each in client.groups()]
    plans = [post(browser, "/replays", 201, ids=ids)["id"] for _ in range(3)]
    lines = ids_of(get(browser, "/audit", action="replay.plan"))
    for path, query, name, expected in (
        ("/dead-letters", {"sort": "id", "filter": "type:KeyError"}, "message_id", ids),
        ("/groups", {}, "id", groups),
        ("/replays", {"status": "draft"}, "id", plans[::-1]),
        (f"/replays/{plans[0]}/items", {}, "message_id", ids),
        ("/audit", {"action": "replay.plan"}, "id", lines),
    ):
        first = get(browser, path, limit=1, **query)
        rest = get(browser, path, limit=5, after=first["next"], **query)
        assert (ids_of(first, name), ids_of(rest, name), rest["next"]) == (expected[:1], expected[1:], None), path
    answer = browser.get(f"{API}/dead-letters", params={"sort": "id", "limit": 2})
    link, rel = answer.headers["link"].split("; ")
    last = browser.get(f"{API}/dead-letters{link.strip('<>').replace('limit=2', 'limit=5')}")
    assert (rel, ids_of(body_of(last), "message_id")) == ('rel="next"', [ids[2], ids[2] + 1, ids[2] + 2])
    assert "link" not in last.headers


def test_unchanged_document_is_not_sent_again(
    browser: TestClient, dsn: str, conn: psycopg.Connection[tuple[Any, ...]]
) -> None:
    move_clock(conn).half_past()  # the document of a group counts by the hour
    first, *_ = fill_queue(dsn)
    plan = post(browser, "/replays", 201, ids=[first])["id"]
    for path in (f"/dead-letters/{first}", "/groups/1", f"/replays/{plan}"):
        tag = browser.get(API + path).headers["etag"]
        again = browser.get(API + path, headers={"If-None-Match": f'"other", W/{tag}'})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag), path
    tag = browser.get(f"{API}/dead-letters/{first}").headers["etag"]
    post(browser, "/dead-letters/hold", ids=[first])
    changed = browser.get(f"{API}/dead-letters/{first}", headers={"If-None-Match": tag})
    assert (changed.status_code, changed.headers["etag"] != tag) == (200, True)


def test_read_routes_return_documents(browser: TestClient, dsn: str) -> None:
    ids = fill_queue(dsn)
    with Client(dsn) as client:
        client.tally()
    plan = post(browser, "/replays", 201, filter="queue:orders", rate=1, canary=1, tolerance=0.5)
    preview = get(browser, f"/replays/{plan['id']}/preview")
    assert (preview["plan"], preview["changes"], plan["will_run"]) == (plan, [], 3)
    died = [get(browser, f"/dead-letters/{each}")["dead_at"] for each in ids]
    assert [preview["shares"][0][name] for name in ("first_dead_at", "last_dead_at")] == [min(died), max(died)]
    seen, portrait = get(browser, "/overview"), get(browser, "/groups/1/portrait")
    assert [each["dead"] for name in ("queues", "groups") for each in seen[name]] == [3, 3]
    assert (seen["replays"], seen["sinks"]) == ([plan], [])
    for part, name in (("shared-values", "shared"), ("versions", "versions"), ("replays", "replays")):
        assert portrait[name] == get(browser, f"/groups/1/{part}"), name
    assert {"schema", "audit", "server"} <= {each["check"] for each in get(browser, "/doctor")}
    anchor = get(browser, "/audit/anchor")["anchor"]
    for text, intact in ((anchor, True), (f"99:{'a' * 64}", False)):
        found = get(browser, "/audit/verify", anchor=text)
        assert (found["intact"], found["problems"] == []) == (intact, intact)


def test_changes_answer_with_the_changed_object(browser: TestClient, dsn: str) -> None:
    ids = fill_queue(dsn)
    for path, body, expected in (
        ("/queues/orders/pause", {"until": "2099-01-01T10:00:00+01:00"}, {"paused_until": "2099-01-01T09:00:00+00:00"}),
        ("/queues/orders/open-breaker", {}, {"changed": True}),
        ("/dead-letters/discard", {"ids": [*ids[:2], 999]}, {"asked": 3, "changed": 2, "refusals": 1}),
        ("/dead-letters/restore", {"filter": "status:discarded", "expected": 2}, {"changed": 2}),
        ("/groups/1/acknowledge", {"owner": "ana", "link": "https://tickets.example/1"}, {"owner": "ana"}),
    ):
        assert post(browser, path, **body).items() >= expected.items(), path
    made = body_of(browser.put(f"{API}/sinks/bus", json={**REASON, "kind": "log", "settings": {"delay": 1.5}}))
    assert (made["name"], made["delay"], [made]) == ("bus", 1.5, get(browser, "/sinks"))
    assert post(browser, "/queues", 201, name="more") == get(browser, "/queues/more")
    preview = post(browser, "/replays", 201, ids=ids[:2], preview=True)
    assert preview["status"] == "preview"
    assert post(browser, f"/replays/{preview['id']}/start", 409)["type"] == "urn:bartleby:wrong-state"
    assert get(browser, "/replays")["items"] == [], "a preview is not listed"


def test_exact_numbers_survive_in_payloads_patches_and_rules(
    browser: TestClient, client: Client, conn: psycopg.Connection[Any]
) -> None:
    for number in ("1e400", str(BIG), "0.10000000000000000000000000000001", "-0"):
        (kept,) = conn.execute("select (%s::jsonb)::text", [number]).fetchone() or ("",)
        one = f'{{"payload": {{"n": {number}}}, "headers": {{"h": {number}}}}}'
        body = f'{{"messages": [{one}, {{"payload": {{"n": 0.3}}}}]}}'
        answer = browser.post(f"{API}/queues/orders/messages", content=body, headers=JSON)
        exact, rounded = body_of(answer, 201)["message_ids"]
        assert f'"payload": {{"n": {kept}}}' in browser.get(f"{API}/messages/{exact}").text
        bury(client, [])
        dead = browser.get(f"{API}/dead-letters/{exact}").text
        for part in (f'"payload": {{"n": {kept}}}', f'"headers": {{"h": {kept}}}'):
            assert part in dead
        patch = f'[{{"op": "replace", "path": "/n", "value": {number}}}]'
        body = f'{{"reason": "why", "ids": [{rounded}], "patch": {patch}}}'
        plan = browser.post(f"{API}/replays", content=body, headers=JSON).text
        assert f'"value": {kept}' in plan
        changes = browser.get(f"{API}/replays/{json.loads(plan)['id']}/changes", params={"message_id": rounded})
        assert f'"after": {{"n": {kept}}}' in changes.text
        group = json.loads(dead)["group_id"]
        split = f'{{"reason": "two bugs", "path": "payload.n", "value": {number}}}'
        made = body_of(browser.post(f"{API}/groups/{group}/split", content=split, headers=JSON))
        client.regroup()
        letters = [client.dead_letter(each) for each in (exact, rounded)]
        assert [each.group_id for each in letters if each] == [made["id"], group], number


def test_messages_are_sent_with_their_options(browser: TestClient, dsn: str) -> None:
    fill_queue(dsn, letters=0)
    path, options = "/queues/orders/messages", {"headers": {"trace": "x"}, "max_attempts": 2, "generation": 7}
    message = {"payload": {"messages": [1.5, "ä", None]}, "key": "a", **options}
    for body in (message, {"messages": [message]}):
        (sent,) = body_of(browser.post(API + path, json=body), 201)["message_ids"]
        assert get(browser, f"/messages/{sent}").items() >= message.items()
    unique = {"messages": [{"payload": 1, "key": "b", "delay": 60, "unique_for": 3600}]}
    first, again = (body_of(browser.post(API + path, json=unique), 201)["message_ids"] for _ in range(2))
    assert (first, get(browser, f"/messages/{first[0]}")["state"]) == (again, "deferred")


def test_invalid_requests_are_refused_and_change_nothing(browser: TestClient, dsn: str) -> None:
    ids = fill_queue(dsn)
    token, split = {"name": "x", "role": "reader"}, '{"reason": "x", "path": "payload.n", "value": %s}'
    sent, batch = "/queues/orders/messages", '{"messages": [{"payload": %s}]}'
    with Client(dsn) as client:
        client.create_queue("small", {"payload_limit": 2000})
        before = (client.queues(), client.replays(), client.groups(), client.tokens(), client.sinks())
        anchor = client.audit_anchor()
    refusals: list[tuple[int, str, Any]] = [
        (422, "POST /dead-letters/discard", [{}, {"ids": []}, {"ids": [0]}, {"ids": [2**63]},
            {"ids": [1], "reason": " "}, {"ids": [1], "filter": "x", "expected": 1}, {"ids": [1], "surprise": 1}]),
        (409, "POST /dead-letters/discard", [{"filter": "queue:orders", "expected": 2}]),
        (422, "POST /dead-letters/replay", [{"ids": list(range(1, 102))}]),
        (422, "POST /replays", [{}, {"ids": [1], "filter": "queue:orders"}, {"ids": [1], "rate": 0},
            {"ids": [1], "rate": "1"}, {"ids": [1], "tolerance": 2}, {"ids": [1], "patch": [{"op": "nonsense"}]}]),
        *((404, f"GET {path}", [None]) for path in ("/replays/99/preview", "/replays/99/items", "/dead-letters/99",
            "/dead-letters/99/attempts", "/messages/99", "/messages/99/story", "/queues/nowhere", "/sinks/nowhere",
            "/groups/99/portrait", "/groups/99/shared-values", "/groups/99/versions", "/groups/99/replays")),
        *((422, f"GET {path}", [None]) for path in ("/dead-letters/0", f"/dead-letters/{2**63}",
            "/groups?after=nonsense", "/replays?status=nonsense", "/dead-letters/export?filter=nonsense:")),
        (422, "POST /groups/1/split", [split % value for value in ("NaN", "Infinity", '"\\u0000"', '"\\ud800"')]),
        (422, "POST /queues", [{"name": ""}, {"name": "Orders"}, {"name": "x" * 200}]),
        (422, "POST /queues/orders/pause", [{"until": "2020-01-01T09:00:00Z"}, {"until": "30m"},
            {"until": "9999-01-01T09:00:00Z"}, {"until": "2099-01-01T09:00:00"}]),
        (422, f"POST {sent}", [batch % rest for rest in ('1, "surprise": 2', '1, "key": ""', '1, "delay": -1',
            '1, "delay": 1e400', '1, "delay": "1"', "NaN", '"\\u0000"', '"\\ud800"', '{"\\u0000": 1}',
            '1, "unique_for": 5', "1e200000", "[" * 800 + "]" * 800)]),
        (422, f"POST {sent}", ["{}", '{"messages": []}', '{"messages": [{"payload": 1}], "payload": 2}']),
        (413, "POST /queues/small/messages", [json.dumps({"payload": [f"{each:x}" * 9 for each in range(10_000)]})]),
        (422, "POST /tokens", [{**token, "role": "emperor"}, {**token, "queues": []}, {**token, "name": ""},
            {**token, "queues": ["Not A Queue"]}, {**token, "expires": "1999-01-01T00:00:00Z"},
            {**token, "expires": "2030-01-01"}]),
        (405, "DELETE /overview", [None]),
        *((404, f"DELETE {path}?reason=x", [None]) for path in ("/sinks/nowhere", "/tokens/99", "/group-rules/99")),
    ]  # fmt: skip
    for status, route, bodies in refusals:
        method, path = route.split(" ")
        for body in bodies:
            content = json.dumps({**REASON, **body}) if isinstance(body, dict) else body
            answer = browser.request(method, API + path, content=content, headers=JSON if content else {})
            row = (route, str(content)[:200], answer.text[:200])
            assert answer.headers["content-type"] == "application/problem+json", row
            assert answer.status_code == answer.json()["status"] == status, row
    for broken in ("{", "[" * 100_000, '{"ids": [' + "9" * 5000 + "]}", '{"reason": "\\ud800", "ids": [1]}', "\xff"):
        answer = browser.post(f"{API}/dead-letters/discard", content=broken.encode("latin-1"), headers=JSON)
        assert answer.status_code in {400, 422}, broken[:50]
        assert answer.headers["content-type"] == "application/problem+json"
    with Client(dsn) as client:
        assert (client.queues(), client.replays(), client.groups(), client.tokens(), client.sinks()) == before
        assert (client.audit_anchor(), statuses(client, ids)) == (anchor, ["dead"] * 3)


def test_export_is_json_lines_or_a_table(browser: TestClient, dsn: str) -> None:
    address = f"{API}/dead-letters/export"
    assert browser.get(address).content == b""
    first, *_ = ids = fill_queue(dsn)
    answer = browser.get(address, params={"sort": "id"})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert 'filename="dead-letters.jsonl"' in answer.headers["content-disposition"]
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [each["message_id"] for each in lines] == ids
    assert lines[0] == get(browser, f"/dead-letters/{first}")
    answer = browser.get(address, params={"format": "csv", "filter": f"id:{first}"})
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert [line.split(",")[0] for line in answer.text.splitlines()] == ["message_id", str(first)]


def test_token_is_added_works_and_is_stored_nowhere(client_as: ClientAs, dsn: str, guarded: FastAPI) -> None:
    fill_queue(dsn)
    admin = client_as("admin")
    body = {**REASON, "name": "deploy", "role": "reader", "queues": ["orders"]}
    made = body_of(admin.post(f"{API}/tokens", json=body, headers={"Idempotency-Key": "one"}), 201)
    for name, expires in {"forever": "never", "then": "2100-01-01T00:00:00Z"}.items():
        post(admin, "/tokens", 201, name=name, role="reader", expires=expires)
    listed = {each["name"]: each for each in get(admin, "/tokens")}
    assert (listed["deploy"]["id"], listed["deploy"]["queues"]) == (made["id"], ["orders"])
    assert made["secret"] not in admin.get(f"{API}/tokens").text
    with psycopg.connect(dsn) as connection:  # not even in the stored answer of an idempotency key
        for table in ("answer", "audit", "token"):
            rows = connection.execute(f"select row_to_json(t)::text from bartleby.{table} t".encode()).fetchall()
            assert made["secret"] not in str(rows), table
    program = visiting(guarded, Authorization=f"Bearer {made['secret']}")
    assert [each["name"] for each in get(program, "/queues")] == ["orders"]
    assert listed["forever"]["expires_at"] is None
    assert datetime.fromisoformat(listed["then"]["expires_at"]) == datetime(2100, 1, 1, tzinfo=UTC)
    left = datetime.fromisoformat(listed["deploy"]["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=89) < left <= timedelta(days=90), "the default"


def test_secrets_are_revealed_to_operators_and_hidden_in_plans_and_patches(client_as: ClientAs, dsn: str) -> None:
    card = 4111111111111111
    operator, reader = client_as("operator"), client_as("reader")
    with Client(dsn) as client:
        client.create_queue("orders")
        one, _ = bury(client, [{"password": SECRET, "number": card}] * 2, headers={"authorization": SECRET})
        (group,) = client.groups()
        client.split_group(group.id, "payload.number", card, actor="ana", reason="two bugs")
        letter = post(operator, f"/dead-letters/{one}/reveal", reason="looking for the cause")
        assert (letter["payload"]["password"], letter["headers"]) == (SECRET, {"authorization": SECRET})
        (line,) = client.audit_log(action="payload.reveal")
    subject = {"message_id": one, "queue": "orders"}
    assert (line.actor, line.reason, line.subject) == ("operator", "looking for the cause", subject)
    seen = [f"/groups/{group.id}/portrait", "/group-rules", "/audit", "/dead-letters", "/replays", "/overview"]
    for operation in (
        {"op": "test", "path": "/password", "value": SECRET},
        {"op": "replace", "path": "/number", "value": card},
    ):
        plan = post(operator, "/replays", 201, filter=f"payload.password:{SECRET}", patch=[operation])["id"]
        seen += (f"/replays/{plan}{path}" for path in ("", "/preview", "/items", f"/changes?message_id={one}"))
    for path in seen:
        answer = reader.get(API + path)
        assert (answer.status_code, SECRET in answer.text, str(card) in answer.text) == (200, False, False), path
    last = get(reader, "/replays")["items"][0]
    assert (last["items"], last["filter"], last["patch"][0]["value"]) == (2, "***", "***")
    assert get(reader, "/group-rules")[0]["value"] == "***"


# threads of the pools use `random` while hypothesis draws a case, which looks like a strategy that does
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
def test_random_requests_get_documented_answers(dsn: str, open_console: OpenConsole) -> None:
    """A short slice of tests/nightly/fuzz/test_web.py."""
    fuzz(open_console(writes_per_minute=1_000_000), dsn, examples=4, step=7)
