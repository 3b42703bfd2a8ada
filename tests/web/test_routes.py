"""Walks over every route of the application: which roles may use it, no secret, no markup, and no change by a read.

Routes are found in the application itself. The least role of each is what docs/reference/http.md says.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from bartleby import Client
from tests.kit.api import API, REASON, SAME, SECRET, Places, all_routes, body_of, stock, visiting
from tests.web.conftest import ClientAs

ROLES = ("reader", "agent", "operator", "admin")
REFERENCE = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text()
TABLE = dict(re.findall(r"^\| `([A-Z]+ /\S+)` \| ([^|]+) \|", REFERENCE, re.MULTILINE))
"""The least role for each route, and "**all**" if the route is about all queues."""
del TABLE["GET /health"]
IDS: dict[str, object] = {"ids": [1]}
HASH: dict[str, object] = {"hash": "0" * 64}
BODIES: dict[str, dict[str, object]] = {
    **{f"POST /dead-letters/{verb}": IDS for verb in ("discard", "restore", "hold", "release", "replay")},
    **{f"POST /replays/{{replay_id}}/{verb}": HASH for verb in ("start", "approve")},
    "POST /groups/{group_id}/mute": {"until": "2099-01-01T00:00:00Z"},
    "POST /groups/{group_id}/split": {"path": "payload.n", "value": 1},
    "POST /groups/merge": {"groups": [1], "into": 2},
    "POST /replays": IDS,
    "POST /queues": {"name": "more"},
    "PATCH /queues/{queue}": {"policy": {"max_attempts": 5}},
    "POST /queues/{queue}/messages": {"messages": [{"payload": 1}]},
    "PUT /sinks/{sink}": {"kind": "log"},
    "POST /tokens": {"name": "more", "role": "reader"},
    "POST /erasures": {"key": "nobody"},
}
"""The bodies of routes that need more than a reason."""
EVIL = "<img src=x onerror=alert(1)>"
Shop = tuple[Places, Places]
PUBLIC = {"/api/v1/health", "/login", "/static/{version}/{name:path}"}
UNWALKED = re.compile(r"/(static/|login|logout|live$)")


@pytest.fixture
def shop(dsn: str) -> Shop:
    """Path parameters of a queue that callers may see, and of a queue `vault` in which every text says so."""
    with Client(dsn) as client:
        return stock(client, "orders", "fine"), stock(client, "vault", "vaulted")


def use(client: TestClient, route: str, places: dict[str, object], **body: object) -> tuple[int, str]:
    """Use a route of the API with these path parameters; return the status and the text."""
    method, path = route.split(" ")
    params = dict(REASON) if method == "DELETE" else {}
    if route.endswith("/changes"):
        params = {"message_id": str(places["message_id"])}
    reason = {} if path.endswith("/messages") else REASON
    content = None if method in {"GET", "DELETE"} else {**reason, **BODIES.get(route, {}), **body}
    answer = client.request(method, API + filled(path, places), params=params, json=content)
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


def test_every_route_of_the_api_is_in_the_reference(site: FastAPI) -> None:
    found = {f"{method} {route.path}" for route in all_routes(site) for method in route.methods or ()}
    api = {each.replace(API, "", 1) for each in found if f" {API}/" in each}
    assert api - {"GET /health", "GET /openapi.json", "HEAD /openapi.json"} == set(TABLE)


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
            allowed = {route for route in TABLE if TABLE[route].startswith(may)}
            before = len(owner.audit_log(limit=1000))
            for route in routes:
                status, text = use(client, route, shop[0])
                assert (role, route, status == 403, status < 500) == (role, route, route not in allowed, True), text
            if role == "reader":
                assert len(owner.audit_log(limit=1000)) == before
            if role == "agent":
                assert len(owner.audit_log(limit=1000, action="access.refuse")) == len(TABLE) - len(allowed)
        assert client_as("reader", name="head").head(f"{API}/tokens").status_code == 403


def test_principal_of_one_queue_reads_and_changes_nothing_of_another(client_as: ClientAs, shop: Shop, dsn: str) -> None:
    own, other = shop
    bodies: dict[str, dict[str, object]] = {
        "POST /groups/merge": {"groups": [other["group_id"]], "into": own["group_id"]},
        "POST /erasures": {"key": "vaulted-1", "queue": "vault"},
        "POST /tokens": {"role": "admin"},
    }
    mixed = ({"ids": [own["message_id"], other["message_id"]]}, {"ids": [own["message_id"]], "to": "vault"})
    with Client(dsn) as owner:

        def state() -> list[object]:
            letter = owner.dead_letter(int(str(other["message_id"])))
            return [owner.queues(), letter, owner.replays(), owner.groups("vault")]

        before = state()
        for role in ROLES:
            held = client_as(role, ["orders"], name=f"held {role}")
            for route, least in TABLE.items():
                ids = {"ids": [other["message_id"]]} if BODIES.get(route) is IDS else {}
                status, text = use(held, route, other, **{**ids, **bodies.get(route, {})})
                assert "vault" not in text.replace("'vault'", ""), (role, route)
                read = route.startswith("GET") and "{" not in route
                expected = {403 if "all" in least else 200} if read else {403, 404}
                assert status in expected, (role, route, status, text)
            if role != "reader":
                assert [use(held, "POST /replays", own, **body)[0] for body in mixed] == [404, 404]
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
        things = stock(client, "orders", EVIL)
        client.pause_queue("orders", actor=EVIL, reason=EVIL)
    pages = {path for method, path in places(site, things, api=False) if method == "GET"} - {"/metrics"}
    pages |= {"/groups?by=type", "/groups?by=owner", f"/letters?show=payload.a&show=payload.{EVIL}"}
    escaped = set()
    for path in pages:
        text = browser.get(path, params={"queue": "orders"} if "history" in path else None).text
        assert "<img src=x" not in text or path.startswith("/letters/words"), path
        if "&lt;img src=x" in text:
            escaped.add(path.partition("?")[0])
    one = {f"/{kind}/{things[f'{name}_id']}" for kind, name in (("groups", "group"), ("letters", "message"))}
    lists = {"/groups", "/letters", "/audit", "/operations", "/sinks", "/workers", "/tokens"}
    assert one | lists | {"/", "/queues/orders", f"/operations/{things['replay_id']}"} <= escaped


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
