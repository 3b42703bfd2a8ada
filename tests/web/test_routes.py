"""Walks over every route of the application: who may use it, no secret, no markup, nothing changed by looking.

Routes are found in the application itself. A route of the API that is not in TABLE fails the first test.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from bartleby import Client, Failure
from bartleby.surfaces.web import console
from tests.kit.api import API, REASON, SECRET, all_routes, body_of
from tests.kit.burying import bury
from tests.web.conftest import SAME, ClientAs, visiting

ROLES = ("reader", "agent", "operator", "admin")
READ, PROPOSE, OPERATE, ADMIN = ROLES
HASH = {"hash": "0" * 64}
IDS = {"ids": [1]}
EVIL = "<img src=x onerror=alert(1)>"
Places = dict[str, object]
Shop = tuple[Places, Places]


@dataclass(frozen=True)
class Row:
    """The least role that may use a route, its body beside a reason, and whether it is about all queues."""

    least: str
    body: Mapping[str, object] | None = None
    everywhere: bool = False


TABLE = {
    **dict.fromkeys(["GET /dead-letters", "GET /dead-letters/count", "GET /dead-letters/export",
        "GET /dead-letters/{message_id}", "GET /dead-letters/{message_id}/attempts", "GET /groups",
        "GET /groups/{group_id}", "GET /groups/{group_id}/portrait", "GET /groups/{group_id}/shared-values",
        "GET /groups/{group_id}/versions", "GET /groups/{group_id}/replays", "GET /group-rules", "GET /replays",
        "GET /replays/{replay_id}", "GET /replays/{replay_id}/preview", "GET /replays/{replay_id}/items",
        "GET /replays/{replay_id}/changes", "GET /queues", "GET /queues/{queue}", "GET /messages/{message_id}",
        "GET /messages/{message_id}/story", "GET /overview"], Row(READ)),
    **dict.fromkeys(["POST /dead-letters/{message_id}/reveal", "POST /groups/{group_id}/acknowledge",
        "POST /groups/{group_id}/resolve", "POST /groups/{group_id}/reopen", "POST /replays/{replay_id}/pause",
        "POST /replays/{replay_id}/resume", "POST /replays/{replay_id}/cancel", "POST /queues/{queue}/pause",
        "POST /queues/{queue}/resume", "POST /queues/{queue}/open-breaker",
        "POST /queues/{queue}/close-breaker"], Row(OPERATE, {})),
    **dict.fromkeys(["POST /dead-letters/discard", "POST /dead-letters/restore", "POST /dead-letters/hold",
        "POST /dead-letters/release", "POST /dead-letters/replay"], Row(OPERATE, IDS)),
    **dict.fromkeys(["POST /replays/{replay_id}/start", "POST /replays/{replay_id}/approve"], Row(OPERATE, HASH)),
    **dict.fromkeys(["DELETE /queues/{queue}", "DELETE /sinks/{sink}", "GET /tokens",
        "DELETE /tokens/{token_id}"], Row(ADMIN, everywhere=True)),
    **dict.fromkeys(["GET /doctor", "GET /workers", "GET /sinks", "GET /sinks/{sink}", "GET /audit",
        "GET /audit/verify", "GET /audit/anchor"], Row(READ, everywhere=True)),
    **dict.fromkeys(["POST /workers/{worker}/drain", "POST /sinks/{sink}/pause",
        "POST /sinks/{sink}/resume"], Row(OPERATE, {}, everywhere=True)),
    "POST /groups/{group_id}/mute": Row(OPERATE, {"until": "2099-01-01T00:00:00Z"}),
    "POST /groups/{group_id}/split": Row(OPERATE, {"path": "payload.n", "value": 1}),
    "POST /groups/merge": Row(OPERATE, {"groups": [1], "into": 2}),
    "DELETE /group-rules/{rule_id}": Row(OPERATE),
    "POST /replays": Row(PROPOSE, IDS),
    "POST /queues": Row(ADMIN, {"name": "more"}, everywhere=True),
    "PATCH /queues/{queue}": Row(ADMIN, {"policy": {"max_attempts": 5}}),
    "POST /queues/{queue}/messages": Row(OPERATE, {"messages": [{"payload": 1}]}),
    "PUT /sinks/{sink}": Row(ADMIN, {"kind": "log"}, everywhere=True),
    "POST /tokens": Row(ADMIN, {"name": "more", "role": "reader"}, everywhere=True),
    "POST /erasures": Row(ADMIN, {"key": "nobody"}, everywhere=True),
}  # fmt: skip
PUBLIC = {"/api/v1/health", "/login", "/static/{version}/{name:path}"}
UNWALKED = re.compile(r"/(static/|login|logout|live$)")


@pytest.fixture
def shop(dsn: str) -> Shop:
    """Path parameters of a queue that callers may see, and of a queue `vault` in which every text says so."""
    with Client(dsn) as client:
        own, other = (_stock(client, queue) for queue in ("orders", "vault"))
        client.put_sink("bus", "log", {}, actor="ana", reason="why")
        client.report_worker("web-1", queues=["orders", "vault"])
        token = client.add_token("token", "x", "0" * 64, "reader", actor="ana", reason="why")
    more = {"sink": "bus", "worker": "web-1", "token_id": token}
    return {**own, **more}, {**other, **more}


def _stock(client: Client, queue: str) -> dict[str, object]:
    word = "vaulted" if queue == "vault" else "fine"
    by: dict[str, Any] = {"actor": "ana", "reason": f"{word} why"}
    client.create_queue(queue)
    payloads = [{"password": SECRET, "word": word, "n": each, "note": f"token={SECRET}"} for each in range(2)]
    error = f"{word}: password={SECRET}"
    ids = bury(client, payloads, queue=queue, error=error, key=f"{word}-1", headers={"authorization": SECRET})
    client.tally()
    (group,) = client.groups(queue)
    client.split_group(group.id, "payload.password", SECRET, **by)
    client.regroup()
    client.tally()
    patch = [
        {"op": "replace", "path": "/password", "value": f"{SECRET}-2"},
        {"op": "copy", "from": "/password", "path": "/x"},
    ]
    plan = client.plan_replay(f"queue:{queue} payload.password:{SECRET}", patch=patch, **by)
    client.replay(ids[1:], **by)
    lease = client.claim(queue, "web-1")
    assert lease is not None
    failure = Failure(lease.messages[0].position, "KeyError", error, f"Traceback: {error}", verdict="retry", delay=1000)
    client.fail(lease.id, [failure])
    rule = next(each.id for each in client.group_rules(queue))
    split = client.dead_letters(f"id:{ids[0]}").items[0].group_id
    found = {"message_id": ids[0], "group_id": split, "rule_id": rule, "replay_id": plan, "queue": queue}
    return {**found, "alive": ids[1]}


def use(client: TestClient, route: str, places: dict[str, object], **body: object) -> tuple[int, str]:
    """Use a route of the API with these path parameters; return the status and the text."""
    method, path = route.split(" ")
    for name, value in places.items():
        path = path.replace(f"{{{name}}}", str(value))
    row = TABLE[route]
    params = dict(REASON) if method == "DELETE" else {}
    if route.endswith("/changes"):
        params = {"message_id": str(places["message_id"])}
    content = None if row.body is None else {**({} if "messages" in row.body else REASON), **row.body, **body}
    answer = client.request(method, API + path, params=params, json=content)
    return answer.status_code, answer.text


def places(app: FastAPI, things: dict[str, object], *, api: bool) -> Iterator[tuple[str, str]]:
    """Yield method and path of every route of the API, or of every page and form; fail on an unknown parameter."""
    for route in all_routes(app):
        if UNWALKED.match(route.path) or route.path.startswith(API) is not api:
            continue
        kind = route.path.split("/")[1]
        name = {"sinks": "bus", "workers": "web-1"}.get(kind, things["queue"])
        for verb in ("pause", "resume") if "{verb}" in route.path else ("",):
            path = route.path.format(**{**things, "rule": things["rule_id"], "name": name, "verb": verb})
            yield from ((method, path) for method in route.methods or ())


def filled(path: str, known: dict[str, Any]) -> str:
    """Return the path of a route with its parameters; 1 where none is known."""
    return re.sub(r"\{(\w+)(:\w+)?\}", lambda found: str(known.get(found[1], 1)), path)


def test_every_route_of_the_api_is_in_the_table_and_in_the_reference() -> None:
    app = console("postgresql://nowhere/")
    found = {f"{method} {route.path}" for route in all_routes(app) for method in route.methods or ()}
    app.state.house.close()
    api = {each.replace(API, "", 1) for each in found if f" {API}/" in each}
    assert api - {"GET /health", "GET /openapi.json", "HEAD /openapi.json"} == set(TABLE)
    text = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text()
    described = dict(re.findall(r"^\| `([A-Z]+ /\S+)` \| ([^|]+) \|", text, re.MULTILINE))
    expected = {route: f"{row.least}{', **all**' if row.everywhere else ''}" for route, row in TABLE.items()}
    assert described == {**expected, "GET /health": "everybody"}


def test_anonymous_caller_is_refused_on_every_route(guarded: FastAPI) -> None:
    visitor = visiting(guarded)
    found = {(method, route.path) for route in all_routes(guarded) for method in route.methods or ()}
    assert {("POST", "/logout"), ("GET", f"{API}/openapi.json"), ("GET", "/login")} <= found
    for method, path in sorted(found | {("HEAD", path) for method, path in found if method == "GET"}):
        if path in PUBLIC:
            continue
        answer = visitor.request(method, filled(path, {}))
        if path.startswith("/api/") or path in {"/metrics", "/live"}:
            assert answer.status_code == 401, (method, path)
        else:
            assert answer.headers.get("location", "").startswith("/login"), (method, path, answer.status_code)
    assert visitor.head(f"{API}/health").status_code == 200
    assert visitor.post(f"{API}/health").status_code == 401
    for path in (
        "/api/v1/health/", "/api/v1/health/../queues", "/api/v1/healthy", "//api/v1/health", "/login/", "/x/login",
        "/static", "/api/v1/queues/static/", "/api/v1/queues?/api/v1/health", "/api/v1/health%2f", "/API/V1/HEALTH",
    ):  # fmt: skip
        assert visitor.get(path).status_code in {303, 401}, path


def test_each_role_may_use_exactly_the_routes_of_the_table(client_as: ClientAs, shop: Shop, dsn: str) -> None:
    routes = sorted(TABLE, key=lambda each: each.startswith("DELETE"))
    with Client(dsn) as owner:
        for role in ROLES:
            client, may = client_as(role), ROLES[: ROLES.index(role) + 1]
            before = len(owner.audit_log(limit=1000))
            for route in routes:
                status, text = use(client, route, shop[0])
                allowed = TABLE[route].least in may
                assert (role, route, status == 403, status < 500) == (role, route, not allowed, True), text
            if role == "reader":
                assert len(owner.audit_log(limit=1000)) == before
            if role == "agent":
                refused = sum(row.least not in may for row in TABLE.values())
                assert len(owner.audit_log(limit=1000, action="access.refuse")) == refused
        assert client_as("reader", name="head").head(f"{API}/tokens").status_code == 403


def test_principal_of_one_queue_reads_and_changes_nothing_of_another(client_as: ClientAs, shop: Shop, dsn: str) -> None:
    own, other = shop
    bodies: dict[str, dict[str, object]] = {
        "POST /groups/merge": {"groups": [other["group_id"]], "into": own["group_id"]},
        "POST /erasures": {"key": "vaulted-1", "queue": "vault"},
        "POST /tokens": {"role": "admin"},
    }
    with Client(dsn) as owner:

        def state() -> list[object]:
            letter = owner.dead_letter(int(str(other["message_id"])))
            return [owner.queues(), letter, owner.replays(), owner.groups("vault")]

        before = state()
        for role in ROLES:
            held = client_as(role, ["orders"], name=f"held {role}")
            for route, row in TABLE.items():
                ids = {"ids": [other["message_id"]]} if row.body is IDS else {}
                status, text = use(held, route, other, **{**ids, **bodies.get(route, {})})
                assert "vault" not in text.replace("'vault'", ""), (role, route)
                expected = {403, 404} if "{" in route or row.body is not None else {403 if row.everywhere else 200}
                assert status in expected, (role, route, status, text)
        assert state() == before


def test_reader_is_shown_no_secret_no_action_and_no_queue_of_others(
    client_as: ClientAs, guarded: FastAPI, shop: Shop
) -> None:
    own, other = shop
    for queues in (None, ["orders"]):
        reader = client_as("reader", queues, name=f"eva {queues}")
        seen = shown = 0
        for things in (own, {**own, "message_id": own["alive"]}):
            for route in TABLE:
                if route.startswith("GET "):
                    status, text = use(reader, route, things)
                    assert SECRET not in text, route
                    seen += status == 200
        assert seen > (40 if queues is None else 30)
        for kind in ("csv", "jsonl"):
            answer = reader.get(f"{API}/dead-letters/export?filter=status:any&format={kind}")
            assert ("***" in answer.text, SECRET in answer.text) == (True, False)
        # a page of something that is not there repeats the name it was asked for
        for things, foreign in ((own, "vault"), (other, "vaulted")):
            for method, path in places(guarded, things, api=False):
                if method == "GET":
                    page = reader.get(path, params={"queue": "orders"} if "history" in path else {})
                    assert page.status_code < 500, path
                    assert SECRET not in page.text, path
                    assert queues is None or foreign not in page.text, path
                    for form in re.findall(r'<form(?=[^>]*method="post").*?</form>', page.text, re.DOTALL):
                        assert "<button" not in form or "/audit/verify" in form, path
                    shown += page.status_code == 200
        assert shown > 15


def test_reader_never_reaches_the_connection_that_writes(
    client_as: ClientAs, guarded: FastAPI, shop: Shop, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, admin, used = client_as("reader"), client_as("admin"), list[str]()
    assert use(reader, "GET /queues", shop[0])[0] == 200
    for name in ("run", "transaction", "using"):
        monkeypatch.setattr(guarded.state.house.operator, name, lambda *_, name=name: used.append(name))
    form = {"reason": "a test", "hash": "0" * 64, "ids": str(shop[0]["message_id"]), "name": "x", "role": "admin"}
    found = {each for api in (True, False) for each in places(guarded, shop[0], api=api)}
    looks = {path for method, path in found if method == "GET"}
    with Client(dsn) as owner:
        before = owner.audit_anchor()
        answers = [
            reader.request(method, path, data=form, headers=SAME).status_code
            for method, path in sorted(found)
            if method not in {"GET", "HEAD"} and not path.startswith(API)
        ]
        assert (answers.count(403) > 10, max(answers) < 500, len(answers) > 20) == (True, True, True)
        reader.headers["Idempotency-Key"] = "one"
        for route in TABLE:
            use(reader, route, shop[0])
        # nor does a GET of an action, or of its head
        for path in {path for method, path in found if method not in {"GET", "HEAD"}} - looks:
            statuses = {admin.get(path).status_code, admin.head(path).status_code}
            assert statuses <= {404, 405, 422}, path
        assert (used, owner.audit_anchor()) == ([], before)


def test_every_get_has_a_head_with_the_same_status_and_type(browser: TestClient, site: FastAPI, shop: Shop) -> None:
    known = {**shop[0], "name": "orders"}
    compared = 0
    for path in sorted({route.path for route in all_routes(site) if "GET" in (route.methods or ())} - {"/live"}):
        head, whole = browser.head(filled(path, known)), browser.get(filled(path, known))
        assert (path, head.status_code, head.content) == (path, whole.status_code, b"")
        assert head.headers.get("content-type") == whole.headers.get("content-type"), path
        compared += head.is_success
    assert compared > 35
    assert browser.head("/live").status_code == 405, "the stream does not end"
    assert site.state.house.streams.open == 0


def test_every_page_escapes_texts_of_strangers(browser: TestClient, site: FastAPI, dsn: str) -> None:
    with Client(dsn) as client:
        client.create_queue("orders")
        first, _ = bury(client, [{"a": EVIL, EVIL: 1}, {"a": 2}], kind=EVIL, error=EVIL, key=EVIL, headers={EVIL: EVIL})
        client.tally()
        group = client.groups(limit=1)[0].id
        by: dict[str, Any] = {"actor": EVIL, "reason": EVIL}
        client.acknowledge_group(group, owner=EVIL, **by)
        client.split_group(group, "payload.a", EVIL, **by)
        plan = client.plan_replay("queue:orders", patch=[{"op": "add", "path": "/b", "value": EVIL}], **by)
        client.hold([first], **by)
        client.pause_queue("orders", **by)
        client.put_sink("bus", "log", {}, **by)
        client.report_sink("bus", failures=1, error=EVIL)
        client.report_worker("web-1", version=EVIL, host=EVIL, queues=["orders"])
        token = client.add_token("token", EVIL, "0" * 64, "reader", **by)
        rule = client.group_rules("orders")[0].id
    things: Places = {
        "message_id": first, "group_id": group, "rule_id": rule, "replay_id": plan, "queue": "orders",
        "token_id": token,
    }  # fmt: skip
    pages = {path for method, path in places(site, things, api=False) if method == "GET"} - {"/metrics"}
    pages |= {"/groups?by=type", "/groups?by=owner", f"/letters?show=payload.a&show=payload.{EVIL}"}
    escaped = set()
    for path in pages:
        text = browser.get(path, params={"queue": "orders"} if "history" in path else None).text
        assert "<img src=x" not in text or path.startswith("/letters/words"), path
        if "&lt;img src=x" in text:
            escaped.add(path.partition("?")[0])
    wanted = {"/", "/groups", f"/groups/{group}", "/letters", f"/letters/{first}", f"/operations/{plan}", "/audit"}
    assert wanted | {"/operations", "/queues/orders", "/sinks", "/workers", "/tokens"} <= escaped


def test_documented_query_parameters_are_known_and_bounded_and_others_are_refused(
    browser: TestClient, site: FastAPI
) -> None:
    bounded = 0
    for path, methods in site.openapi()["paths"].items():
        if path.endswith(("/health", "/metrics")):
            continue
        for method, described in methods.items():
            names = [each["name"] for each in described.get("parameters", ()) if each["in"] == "query"]
            address = filled(path, {"queue": "orders"})
            known = browser.request(method, address, params=dict.fromkeys(names, "1"), json={}).text
            assert "unknown parameter" not in known, address
            other = browser.request(method, address, params={"surprise": "1"}, json={})
            assert body_of(other, 422)["detail"] == "unknown parameter 'surprise'", address
            if "limit" in names:
                assert browser.get(address, params={"limit": 1_000_000}).status_code == 422, address
                bounded += 1
    assert bounded >= 5
