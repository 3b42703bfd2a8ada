"""/api/v1: pages, tags, documents, exact numbers, exports and refusals. What a verb does is proven by tests/sql."""

import csv
import io
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
from fastapi import FastAPI
from fastapi.testclient import TestClient

from bartleby import Client
from tests.kit.api import API, BIG, JSON, REASON, SECRET, body_of, fill_queue, get, post
from tests.kit.burying import bury, statuses
from tests.web.conftest import ClientAs, visiting


def ids_of(page: Any, name: str = "id") -> list[int]:
    return [each[name] for each in page["items"]]


def test_lists_come_page_by_page(browser: TestClient, dsn: str) -> None:
    ids = fill_queue(dsn, letters=3)
    with Client(dsn) as client:
        bury(client, [1, 2], kind="ValueError")
        client.tally()
        groups = [int(each.id) for each in client.groups()]
    plans = [post(browser, "/replays", 201, ids=ids)["id"] for _ in range(3)]
    for verb in ("pause", "resume") * 3:
        post(browser, f"/queues/orders/{verb}")
    lines = ids_of(get(browser, "/audit", action="queue.pause"))
    for path, query, name, expected in (
        ("/dead-letters", {"sort": "id", "filter": "type:KeyError"}, "message_id", ids),
        ("/groups", {}, "id", groups),
        ("/replays", {}, "id", plans[::-1]),
        (f"/replays/{plans[0]}/items", {}, "message_id", ids),
        ("/audit", {"action": "queue.pause"}, "id", lines),
    ):
        first = get(browser, path, limit=1, **query)
        rest = get(browser, path, limit=5, after=first["next"], **query)
        assert (ids_of(first, name), ids_of(rest, name), rest["next"]) == (expected[:1], expected[1:], None), path
    answer = browser.get(f"{API}/dead-letters", params={"sort": "id", "limit": 2})
    link, rel = answer.headers["link"].split("; ")
    last = browser.get(f"{API}/dead-letters{link.strip('<>').replace('limit=2', 'limit=5')}")
    assert (rel, ids_of(body_of(last), "message_id")) == ('rel="next"', [ids[2], ids[2] + 1, ids[2] + 2])
    assert "link" not in last.headers
    for path, query in (("/replays", {"status": "running"}), ("/groups", {"state": "resolved"})):
        assert get(browser, path, **query)["items"] == [], path


def test_unchanged_document_is_not_sent_again(browser: TestClient, dsn: str) -> None:
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


def test_overview_portrait_preview_and_verification_answer_with_documents(browser: TestClient, dsn: str) -> None:
    ids = fill_queue(dsn)
    with Client(dsn) as client:
        client.tally()
    plan = post(browser, "/replays", 201, filter="queue:orders", rate=1, canary=1, tolerance=0.5)
    assert (plan["status"], plan["items"], plan["will_run"]) == ("draft", 3, 3)
    preview = get(browser, f"/replays/{plan['id']}/preview")
    assert (preview["plan"], preview["changes"]) == (plan, [])
    (share,) = preview["shares"]
    died = [get(browser, f"/dead-letters/{each}")["dead_at"] for each in ids]
    assert (share["items"], share["first_dead_at"], share["last_dead_at"]) == (3, min(died), max(died))
    seen = get(browser, "/overview")
    assert [[each["dead"] for each in seen[name]] for name in ("queues", "groups")] == [[3], [3]]
    assert (seen["replays"], seen["sinks"]) == ([plan], [])
    portrait = get(browser, "/groups/1/portrait")
    for part, name in (("shared-values", "shared"), ("versions", "versions"), ("replays", "replays")):
        assert portrait[name] == get(browser, f"/groups/1/{part}"), name
    assert {"path": "payload.country", "value": "AT", "letters": 3, "of": 3} in portrait["shared"]
    assert {"schema", "audit", "server"} <= {each["check"] for each in get(browser, "/doctor")}
    anchor = get(browser, "/audit/anchor")["anchor"]
    assert get(browser, "/audit/verify", anchor=anchor) == {"intact": True, "problems": []}
    cut = get(browser, "/audit/verify", anchor=f"99:{'a' * 64}")
    assert (cut["intact"], bool(cut["problems"])) == (False, True)


def test_changes_answer_with_the_changed_object(browser: TestClient, dsn: str) -> None:
    ids = fill_queue(dsn)
    for path, body, expected in (
        ("/queues/orders/pause", {"until": "2099-01-01T10:00:00+01:00"}, {"paused_until": "2099-01-01T09:00:00+00:00"}),
        ("/queues/orders/pause", {}, {"paused": True, "paused_until": None}),
        ("/queues/orders/open-breaker", {}, {"changed": True}),
        ("/queues/orders/open-breaker", {}, {"changed": False}),
        ("/dead-letters/discard", {"ids": [*ids[:2], 999]}, {"asked": 3, "changed": 2, "refusals": 1}),
        ("/dead-letters/restore", {"filter": "status:discarded", "expected": 2}, {"changed": 2}),
        ("/groups/1/acknowledge", {"owner": "ana", "link": "https://tickets.example/1"}, {"owner": "ana"}),
        ("/dead-letters/replay", {"ids": ids[2:]}, {"message_ids": ids[2:]}),
        ("/erasures", {"key": "nobody", "queue": "orders"}, {"letters": 0}),
    ):
        assert post(browser, path, **body).items() >= expected.items(), path
    made = body_of(browser.put(f"{API}/sinks/bus", json={**REASON, "kind": "log", "settings": {"delay": 1.5}}))
    assert (made["name"], made["delay"], [made]) == ("bus", 1.5, get(browser, "/sinks"))
    plan = post(browser, "/replays", 201, ids=ids[:2], rate=1)
    path = f"/replays/{plan['id']}"
    assert post(browser, f"{path}/start", hash=plan["hash"])["status"] == "running"
    assert get(browser, f"{path}/preview")["shares"][0]["first_dead_at"] is None, "computed for drafts only"
    assert post(browser, f"{path}/cancel")["status"] == "cancelled"
    preview = post(browser, "/replays", 201, ids=ids[:2], preview=True)
    assert preview["status"] == "preview"
    assert post(browser, f"/replays/{preview['id']}/start", 409)["type"] == "urn:bartleby:wrong-state"
    assert ids_of(get(browser, "/replays")) == [plan["id"]]
    created = post(browser, "/queues", 201, name="more", policy={"max_attempts": 3})
    assert created == get(browser, "/queues/more")
    body_of(browser.delete(f"{API}/queues/orders", params={"reason": "not needed", "force": True}), 204)
    assert [each["name"] for each in get(browser, "/queues")] == ["more", "sink.bus"]


def test_exact_numbers_survive_in_payloads_patches_and_rules(
    browser: TestClient, client: Client, conn: psycopg.Connection[Any]
) -> None:
    for number in ("1e400", str(BIG), "0.10000000000000000000000000000001", "-0", "1E+3"):
        (kept,) = conn.execute("select (%s::jsonb)::text", [number]).fetchone() or ("",)
        one = f'{{"payload": {{"n": {number}}}, "headers": {{"h": {number}}}}}'
        body = f'{{"messages": [{one}, {{"payload": {{"n": 0.3}}}}]}}'
        answer = browser.post(f"{API}/queues/orders/messages", content=body, headers=JSON)
        exact, rounded = body_of(answer, 201)["message_ids"]
        assert f'"payload": {{"n": {kept}}}' in browser.get(f"{API}/messages/{exact}").text
        bury(client, [])
        dead = browser.get(f"{API}/dead-letters/{exact}").text
        assert f'"payload": {{"n": {kept}}}' in dead
        assert f'"headers": {{"h": {kept}}}' in dead
        patch = f'[{{"op": "replace", "path": "/n", "value": {number}}}]'
        body = f'{{"reason": "why", "ids": [{rounded}], "patch": {patch}}}'
        plan = browser.post(f"{API}/replays", content=body, headers=JSON).text
        assert f'"value": {kept}' in plan
        address = f"{API}/replays/{json.loads(plan)['id']}/changes"
        (change,) = json.loads(
            browser.get(address, params={"message_id": rounded}).text, parse_int=str, parse_float=str
        )
        assert (change["before"]["n"], change["after"]["n"]) == ("0.3", kept)
        group = json.loads(dead)["group_id"]
        split = f'{{"reason": "two bugs", "path": "payload.n", "value": {number}}}'
        made = body_of(browser.post(f"{API}/groups/{group}/split", content=split, headers=JSON))
        client.regroup()
        letters = [client.dead_letter(each) for each in (exact, rounded)]
        assert [each.group_id for each in letters if each] == [made["id"], group], number


def test_messages_are_sent_with_their_options(browser: TestClient, dsn: str) -> None:
    fill_queue(dsn, letters=0)
    path = f"{API}/queues/orders/messages"
    messages: list[dict[str, Any]] = [
        {"payload": {"n": 1}, "headers": {"trace": "x"}, "key": "a", "max_attempts": 2, "generation": 7},
        {"payload": None},
        {"payload": [1.5, "ä", True], "key": None, "delay": 60},
    ]
    ids = body_of(browser.post(path, json={"messages": messages}), 201)["message_ids"]
    first, second, third = (get(browser, f"/messages/{each}") for each in ids)
    assert first.items() >= messages[0].items()
    assert (second["payload"], second["headers"], second["state"]) == (None, None, "ready")
    assert (third["payload"], third["state"]) == ([1.5, "ä", True], "deferred")
    unique = {"messages": [{"payload": 1, "key": "b", "unique_for": 3600}]}
    assert body_of(browser.post(path, json=unique), 201) == body_of(browser.post(path, json=unique), 201)
    single = {"payload": {"messages": 1}, "key": "a", "delay": 60, "headers": None}
    (sent,) = body_of(browser.post(path, json=single), 201)["message_ids"]
    found = get(browser, f"/messages/{sent}")
    assert (found["payload"], found["key"], found["state"]) == ({"messages": 1}, "a", "deferred")


def test_invalid_requests_are_refused_and_change_nothing(browser: TestClient, dsn: str) -> None:
    first, *_ = ids = fill_queue(dsn)
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
        (404, "POST /replays", [{"ids": [first], "to": "nowhere"}]),
        *((404, f"GET {path}", [None]) for path in ("/replays/99/preview", "/replays/99/items", "/dead-letters/99",
            "/dead-letters/99/attempts", "/messages/99", "/messages/99/story", "/queues/nowhere", "/sinks/nowhere",
            "/groups/99/portrait", "/groups/99/shared-values", "/groups/99/versions", "/groups/99/replays")),
        *((422, f"GET {path}", [None]) for path in ("/dead-letters/0", f"/dead-letters/{2**63}",
            "/groups?after=nonsense", "/replays?status=nonsense", "/dead-letters/export?filter=nonsense:")),
        (422, "POST /groups/1/split", [split % value for value in ("NaN", "Infinity", '"\\u0000"', '"\\ud800"')]),
        (422, "POST /groups/1/mute", [{"until": "2099-01-01T00:00:00"}, {"until": "1999-01-01T00:00:00Z"}]),
        (422, "PATCH /queues/orders", [{"policy": {"max_attempts": "many"}}]),
        (422, "POST /queues", [{"name": ""}, {"name": "Orders"}, {"name": "x" * 200}]),
        (422, "POST /queues/orders/pause", [{"until": "2020-01-01T09:00:00Z"}, {"until": "30m"},
            {"until": "9999-01-01T09:00:00Z"}, {"until": "2099-01-01T09:00:00"}]),
        (422, f"POST {sent}", [batch % rest for rest in ('1, "surprise": 2', '1, "key": ""', '1, "delay": -1',
            '1, "delay": 1e400', '1, "delay": "1"', "NaN", '"\\u0000"', '"\\ud800"', '{"\\u0000": 1}',
            '1, "unique_for": 5', "1e200000", "[" * 800 + "]" * 800)]),
        (422, f"POST {sent}", ["{}", '{"messages": []}', '{"messages": [{"payload": 1}], "payload": 2}']),
        (413, "POST /queues/small/messages", [json.dumps({"payload": [f"{each:x}" * 9 for each in range(10_000)]})]),
        (422, "PUT /sinks/bus", [{"kind": "nonsense"}]),
        (422, "POST /tokens", [{**token, "role": "emperor"}, {**token, "queues": []}, {**token, "name": ""},
            {**token, "queues": ["Not A Queue"]}, {**token, "expires": "1999-01-01T00:00:00Z"},
            {**token, "expires": "2030-01-01"}]),
        (404, "POST /erasures", [{"key": "x", "queue": "nowhere"}]),
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


def test_export_is_json_lines_or_a_table_without_formulas(browser: TestClient, dsn: str) -> None:
    address = f"{API}/dead-letters/export"
    assert browser.get(address).content == b""
    empty = browser.get(address, params={"format": "csv"}).text
    assert (empty.startswith("message_id,queue,"), empty.count("\n")) == (True, 1)
    first, *_ = ids = fill_queue(dsn)
    answer = browser.get(address, params={"sort": "id"})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert 'filename="dead-letters.jsonl"' in answer.headers["content-disposition"]
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [each["message_id"] for each in lines] == ids
    assert lines[0] == get(browser, f"/dead-letters/{first}")
    with Client(dsn) as client:
        bury(client, ["=cmd|'/c calc'!A1"], error="=1+1", key="@SUM(A1)")
    answer = browser.get(address, params={"format": "csv", "filter": "error:1+1"})
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    head, row = csv.reader(io.StringIO(answer.text, newline=""))
    cells = dict(zip(head, row, strict=True))
    assert (cells["error"], cells["key"]) == ("'=1+1", "'@SUM(A1)")
    assert not any(cell.startswith(("=", "+", "-", "@", "\t")) for cell in row)


def test_plan_that_touches_another_queue_does_not_exist_for_a_principal_of_one(client_as: ClientAs, dsn: str) -> None:
    (theirs,), (others,) = fill_queue(dsn, "orders", 1), fill_queue(dsn, "secret", 1)
    unlimited, held = client_as("operator", name="ana"), client_as("operator", ["orders"])
    own = post(unlimited, "/replays", 201, ids=[theirs])["id"]
    bodies = ({"ids": [theirs, others]}, {"ids": [others], "to": "orders"}, {"ids": [theirs], "to": "secret"})
    hidden = [post(unlimited, "/replays", 201, **body)["id"] for body in bodies]
    assert ids_of(get(held, "/replays")) == [own]
    for each in hidden:
        for part in ("", "/preview", "/items", f"/changes?message_id={others}"):
            assert body_of(held.get(f"{API}/replays/{each}{part}"), 404)["status"] == 404
        assert post(held, f"/replays/{each}/start", 404)["status"] == 404
    for body in bodies:
        assert post(held, "/replays", 404, **body)["status"] == 404
    assert get(held, "/dead-letters", 422, filter="queue:orders age:1x")["position"] == 18, "as the caller wrote it"


def test_token_is_added_works_and_is_revoked(client_as: ClientAs, dsn: str, guarded: FastAPI) -> None:
    fill_queue(dsn)
    admin = client_as("admin")
    body = {**REASON, "name": "deploy", "role": "reader", "queues": ["orders"]}
    made = body_of(admin.post(f"{API}/tokens", json=body, headers={"Idempotency-Key": "one"}), 201)
    assert made["secret"].startswith("bly_")
    listed = {each["name"]: each for each in get(admin, "/tokens")}
    assert (listed["deploy"]["id"], listed["deploy"]["queues"]) == (made["id"], ["orders"])
    assert made["secret"] not in admin.get(f"{API}/tokens").text
    with psycopg.connect(dsn) as connection:  # not even in the stored answer of an idempotency key
        for table in ("answer", "audit", "token"):
            rows = connection.execute(f"select row_to_json(t)::text from bartleby.{table} t".encode()).fetchall()
            assert made["secret"] not in str(rows), table
    program = visiting(guarded, Authorization=f"Bearer {made['secret']}")
    assert [each["name"] for each in get(program, "/queues")] == ["orders"]
    body_of(admin.delete(f"{API}/tokens/{made['id']}", params={"reason": "leaked"}), 204)
    assert get(program, "/queues", 401)["status"] == 401
    for name, expires in {"forever": "never", "then": "2100-01-01T00:00:00Z"}.items():
        post(admin, "/tokens", 201, name=name, role="reader", expires=expires)
    ends = {each["name"]: each["expires_at"] for each in get(admin, "/tokens")}
    assert ends["forever"] is None
    assert datetime.fromisoformat(ends["then"]) == datetime(2100, 1, 1, tzinfo=UTC)
    left = datetime.fromisoformat(listed["deploy"]["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=89) < left <= timedelta(days=90), "the default"


def test_secrets_are_revealed_to_operators_and_found_by_no_filter_of_a_reader(client_as: ClientAs, dsn: str) -> None:
    operator, reader = client_as("operator"), client_as("reader")
    with Client(dsn) as client:
        client.create_queue("orders")
        (one,) = bury(client, [{"password": SECRET, "n": BIG}], headers={"authorization": SECRET})
        assert SECRET not in operator.get(f"{API}/dead-letters/{one}").text
        letter = post(operator, f"/dead-letters/{one}/reveal", reason="looking for the cause")
        assert (letter["payload"], letter["headers"]) == ({"password": SECRET, "n": BIG}, {"authorization": SECRET})
        (line,) = client.audit_log(action="payload.reveal")
    subject = {"message_id": one, "queue": "orders"}
    assert (line.actor, line.reason, line.subject) == ("operator", "looking for the cause", subject)
    for filter in (f"payload.password:{SECRET}", 'payload."pass\\word":x', "PAYLOAD.a.api_key:>1"):
        assert get(reader, "/dead-letters", 403, filter=filter)["type"] == "urn:bartleby:forbidden", filter
        assert len(get(operator, "/dead-letters", filter=filter)["items"]) == filter.endswith(SECRET), filter


def test_secrets_are_hidden_in_plans_patches_and_rules(client_as: ClientAs, dsn: str) -> None:
    card = 4111111111111111
    agent, operator, reader = (client_as(role) for role in ("agent", "operator", "reader"))
    with Client(dsn) as client:
        client.create_queue("orders")
        one, _ = bury(client, [{"password": SECRET, "number": card}] * 2)
        (group,) = client.groups()
        client.split_group(group.id, "payload.number", card, actor="ana", reason="two bugs")
    plans: list[int] = []
    seen = [f"/groups/{group.id}/portrait", "/group-rules", "/audit", "/dead-letters", "/replays", "/overview"]
    for operation in (
        {"op": "copy", "from": "/password", "path": "/shown"},
        {"op": "move", "from": "/password", "path": "/shown"},
        {"op": "test", "path": "/password", "value": SECRET},
        {"op": "test", "path": "", "value": {"password": SECRET}},
        {"op": "replace", "path": "/number", "value": card},
        {"op": "replace", "path": "/password", "value": f"new-{SECRET}"},
    ):
        if operation["op"] != "replace":
            refused = post(agent, "/replays", 403, ids=[one], patch=[operation])
            assert refused["type"] == "urn:bartleby:forbidden", operation
        plan = post(operator, "/replays", 201, filter=f"payload.password:{SECRET}", patch=[operation])["id"]
        plans.append(plan)
        seen += (f"/replays/{plan}{path}" for path in ("", "/preview", "/items", f"/changes?message_id={one}"))
    for path in seen:
        answer = reader.get(API + path)
        assert answer.status_code == 200, path
        assert SECRET not in answer.text, path
        assert str(card) not in answer.text, path
    assert get(reader, "/dead-letters")["items"][0]["payload"] == {"password": "***", "number": "***"}
    last = get(reader, f"/replays/{plans[-1]}")
    assert (last["items"], last["filter"], last["patch"][0]["value"]) == (2, "***", "***")
    assert get(reader, "/group-rules")[0]["value"] == "***"
