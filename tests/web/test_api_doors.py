"""Every route of the API, for everybody: nobody, reader, agent, operator, admin; held to a queue; and no secret.

Routes are found in the application itself. One that is not in the table here fails: who may use it has to be said.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from bartleby import Client, Failure
from tests.kit.api import API, WHY, every
from tests.kit.burying import bury
from tests.web.conftest import ClientAs, visiting

ROLES = ("reader", "agent", "operator", "admin")
SECRET = "hunter2-swordfish"
READ, PROPOSE, OPERATE, ADMIN = ROLES
HASH = {"hash": "0" * 64}
IDS = {"ids": [1]}


@dataclass(frozen=True)
class Row:
    """The least role that may use a route, its body beside a reason, and whether it is about all queues."""

    least: str
    body: Mapping[str, object] | None = None
    everywhere: bool = False


TABLE = {
    "GET /dead-letters": Row(READ),
    "GET /dead-letters/count": Row(READ),
    "GET /dead-letters/export": Row(READ),
    "GET /dead-letters/{message_id}": Row(READ),
    "GET /dead-letters/{message_id}/attempts": Row(READ),
    "POST /dead-letters/{message_id}/reveal": Row(OPERATE, {}),
    "POST /dead-letters/discard": Row(OPERATE, IDS),
    "POST /dead-letters/restore": Row(OPERATE, IDS),
    "POST /dead-letters/hold": Row(OPERATE, IDS),
    "POST /dead-letters/release": Row(OPERATE, IDS),
    "POST /dead-letters/replay": Row(OPERATE, IDS),
    "GET /groups": Row(READ),
    "GET /groups/{group_id}": Row(READ),
    "GET /groups/{group_id}/portrait": Row(READ),
    "GET /groups/{group_id}/shared-values": Row(READ),
    "GET /groups/{group_id}/versions": Row(READ),
    "GET /groups/{group_id}/replays": Row(READ),
    "POST /groups/{group_id}/acknowledge": Row(OPERATE, {}),
    "POST /groups/{group_id}/mute": Row(OPERATE, {"until": "2099-01-01T00:00:00Z"}),
    "POST /groups/{group_id}/resolve": Row(OPERATE, {}),
    "POST /groups/{group_id}/reopen": Row(OPERATE, {}),
    "POST /groups/{group_id}/split": Row(OPERATE, {"path": "payload.n", "value": 1}),
    "POST /groups/merge": Row(OPERATE, {"groups": [1], "into": 2}),
    "GET /group-rules": Row(READ),
    "DELETE /group-rules/{rule_id}": Row(OPERATE),
    "POST /replays": Row(PROPOSE, IDS),
    "GET /replays": Row(READ),
    "GET /replays/{replay_id}": Row(READ),
    "GET /replays/{replay_id}/preview": Row(READ),
    "GET /replays/{replay_id}/items": Row(READ),
    "GET /replays/{replay_id}/changes": Row(READ),
    "POST /replays/{replay_id}/start": Row(OPERATE, HASH),
    "POST /replays/{replay_id}/pause": Row(OPERATE, {}),
    "POST /replays/{replay_id}/resume": Row(OPERATE, {}),
    "POST /replays/{replay_id}/cancel": Row(OPERATE, {}),
    "POST /replays/{replay_id}/approve": Row(OPERATE, HASH),
    "GET /queues": Row(READ),
    "POST /queues": Row(ADMIN, {"name": "more"}, everywhere=True),
    "GET /queues/{queue}": Row(READ),
    "PATCH /queues/{queue}": Row(ADMIN, {"policy": {"max_attempts": 5}}),
    "DELETE /queues/{queue}": Row(ADMIN, everywhere=True),
    "POST /queues/{queue}/pause": Row(OPERATE, {}),
    "POST /queues/{queue}/resume": Row(OPERATE, {}),
    "POST /queues/{queue}/open-breaker": Row(OPERATE, {}),
    "POST /queues/{queue}/close-breaker": Row(OPERATE, {}),
    "POST /queues/{queue}/messages": Row(OPERATE, {"messages": [{"payload": 1}]}),
    "GET /messages/{message_id}": Row(READ),
    "GET /messages/{message_id}/story": Row(READ),
    "GET /overview": Row(READ),
    "GET /doctor": Row(READ, everywhere=True),
    "GET /workers": Row(READ, everywhere=True),
    "POST /workers/{worker}/drain": Row(OPERATE, {}, everywhere=True),
    "GET /sinks": Row(READ, everywhere=True),
    "GET /sinks/{sink}": Row(READ, everywhere=True),
    "PUT /sinks/{sink}": Row(ADMIN, {"kind": "log"}, everywhere=True),
    "DELETE /sinks/{sink}": Row(ADMIN, everywhere=True),
    "POST /sinks/{sink}/pause": Row(OPERATE, {}, everywhere=True),
    "POST /sinks/{sink}/resume": Row(OPERATE, {}, everywhere=True),
    "GET /audit": Row(READ, everywhere=True),
    "GET /audit/verify": Row(READ, everywhere=True),
    "GET /audit/anchor": Row(READ, everywhere=True),
    "GET /tokens": Row(ADMIN, everywhere=True),
    "POST /tokens": Row(ADMIN, {"name": "more", "role": "reader"}, everywhere=True),
    "DELETE /tokens/{token_id}": Row(ADMIN, everywhere=True),
    "POST /erasures": Row(ADMIN, {"key": "nobody"}, everywhere=True),
}
OPEN = {"GET /health", "GET /openapi.json", "HEAD /openapi.json"}
"""Other tests hold these."""


def routes(app: FastAPI) -> set[str]:
    """Every route of the API, as the table has it."""
    found = {(method, route.path) for route in every(app) for method in route.methods or ()}
    return {f"{method} {path.removeprefix(API)}" for method, path in found if path.startswith(f"{API}/")}


@dataclass(frozen=True)
class Shop:
    """A queue that is everybody's, and one whose every text is a secret of it."""

    theirs: dict[str, object]
    others: dict[str, object]


@pytest.fixture
def shop(dsn: str) -> Shop:
    with Client(dsn) as client:
        made = [_stock(client, queue) for queue in ("orders", "vault")]
        client.put_sink("bus", "log", {}, actor="ana", reason="why")
        client.report_worker("web-1", queues=["orders", "vault"])
        token = client.add_token("token", "x", "0" * 64, "reader", actor="ana", reason="why")
    more = {"sink": "bus", "worker": "web-1", "token_id": token}
    return Shop({**made[0], **more}, {**made[1], **more})


def _stock(client: Client, queue: str) -> dict[str, object]:
    word = "vaulted" if queue == "vault" else "fine"
    by: dict[str, Any] = {"actor": "ana", "reason": f"{word} why"}
    client.create_queue(queue)
    payloads = [{"password": SECRET, "word": word, "n": each, "note": f"token={SECRET}"} for each in range(2)]
    said = f"{word}: password={SECRET}"
    ids = bury(client, payloads, queue=queue, error=said, key=f"{word}-1", headers={"authorization": SECRET})
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
    failure = Failure(lease.messages[0].position, "KeyError", said, f"Traceback: {said}", verdict="retry", delay=1000)
    client.fail(lease.id, [failure])
    rule = next(each.id for each in client.group_rules(queue))
    found = {"message_id": ids[0], "group_id": group.id, "rule_id": rule, "replay_id": plan, "queue": queue}
    return {**found, "alive": ids[1]}


def ask(client: TestClient, route: str, places: dict[str, object], **body: object) -> tuple[int, str]:
    """Use a route with these places; return the status and the answer."""
    method, path = route.split(" ")
    for name, value in places.items():
        path = path.replace(f"{{{name}}}", str(value))
    row = TABLE[route]
    params = {"reason": "a test"} if method == "DELETE" else {}
    if route.endswith("/changes"):
        params = {"message_id": str(places["message_id"])}
    content = None if row.body is None else {**({} if "messages" in row.body else WHY), **row.body, **body}
    answer = client.request(method, API + path, params=params, json=content)
    return answer.status_code, answer.text


def test_every_route_is_in_the_table(guarded: FastAPI) -> None:
    assert routes(guarded) - OPEN == set(TABLE)


def test_the_reference_has_every_route_and_who_may_use_it() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text()
    described = dict(re.findall(r"^\| `([A-Z]+ /\S+)` \| ([^|]+) \|", text, re.MULTILINE))
    expected = {route: f"{row.least}{', **all**' if row.everywhere else ''}" for route, row in TABLE.items()}
    assert described == {**expected, "GET /health": "everybody"}


def test_nobody_comes_in_without_saying_who_they_are(guarded: FastAPI, shop: Shop) -> None:
    nobody = visiting(guarded)
    wrong = visiting(guarded, Authorization="Bearer bly_nonsense")
    for route in TABLE:
        assert (route, ask(nobody, route, shop.theirs)[0]) == (route, 401)
    assert ask(wrong, "GET /queues", shop.theirs)[0] == 401


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_do_what_the_table_says_and_no_more(client_as: ClientAs, shop: Shop, dsn: str, role: str) -> None:
    client = client_as(role)
    may = ROLES[: ROLES.index(role) + 1]
    with Client(dsn) as owner:
        before = len(owner.audit_log(limit=1000))
        # what is dropped is dropped at the end
        for route in sorted(TABLE, key=lambda each: each.startswith("DELETE")):
            status, text = ask(client, route, shop.theirs)
            allowed = TABLE[route].least in may
            assert (route, status == 403, status < 500) == (route, not allowed, True), text
        if role == "reader":
            assert len(owner.audit_log(limit=1000)) == before
        if role == "agent":
            refused = sum(1 for row in TABLE.values() if row.least not in may)
            lines = owner.audit_log(limit=1000, action="access.refuse")
            assert len(lines) == refused


@pytest.mark.parametrize("role", ROLES)
def test_whoever_is_held_to_a_queue_finds_and_touches_nothing_of_another(
    client_as: ClientAs, shop: Shop, dsn: str, role: str
) -> None:
    held = client_as(role, ["orders"], name="held")
    bodies: dict[str, dict[str, object]] = {
        "POST /groups/merge": {"groups": [shop.others["group_id"]], "into": shop.theirs["group_id"]},
        "POST /erasures": {"key": "vaulted-1", "queue": "vault"},
        "POST /tokens": {"role": "admin"},
    }
    with Client(dsn) as owner:
        before = (
            owner.queues(),
            [owner.dead_letter(int(str(shop.others["message_id"])))],
            owner.replays(),
            owner.groups("vault"),
        )
        for route, row in TABLE.items():
            ids = {"ids": [shop.others["message_id"]]} if row.body is IDS else {}
            status, text = ask(held, route, shop.others, **{**ids, **bodies.get(route, {})})
            assert "vaulted" not in text, route
            assert "vault" not in text.replace("'vault'", ""), route
            if "{" in route or row.body is not None:
                assert status in {403, 404}, (route, status, text)
            elif row.everywhere:
                assert status == 403, route
            else:
                assert status == 200, route
        for name in (
            "queue:vault",
            "vaulted",
            "key:vaulted-1",
            "status:any -queue:orders",
            f"id:{shop.others['message_id']}",
        ):
            answer = held.get(f"{API}/dead-letters", params={"filter": name})
            assert "vaulted" not in answer.text
        after = (
            owner.queues(),
            [owner.dead_letter(int(str(shop.others["message_id"])))],
            owner.replays(),
            owner.groups("vault"),
        )
    assert after == before


@pytest.mark.parametrize("queues", [None, ["orders"]])
def test_no_answer_to_a_reader_has_a_secret(client_as: ClientAs, shop: Shop, queues: list[str] | None) -> None:
    reader = client_as("reader", queues, name="eva")
    seen = 0
    for place in (shop.theirs, {**shop.theirs, "message_id": shop.theirs["alive"]}):
        for route in TABLE:
            if route.startswith("GET "):
                status, text = ask(reader, route, place)
                assert SECRET not in text, route
                seen += status == 200
    for query in ("?filter=status:any&format=csv", "?filter=status:any&format=jsonl"):
        answer = reader.get(f"{API}/dead-letters/export{query}")
        assert answer.status_code == 200
        assert "***" in answer.text
        assert SECRET not in answer.text
    assert seen > 40 if queues is None else seen > 30


def test_a_reader_never_gets_to_what_changes_things(
    client_as: ClientAs, guarded: FastAPI, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = client_as("reader")
    assert ask(reader, "GET /queues", shop.theirs)[0] == 200
    operator = guarded.state.house.operator
    used: list[str] = []
    for name in ("run", "transaction", "using"):
        monkeypatch.setattr(operator, name, lambda *_, name=name: used.append(name))
    reader.headers["Idempotency-Key"] = "one"
    for route in TABLE:
        ask(reader, route, shop.theirs)
    assert used == []


def test_what_is_not_there_is_a_problem_too(client_as: ClientAs) -> None:
    reader = client_as("reader")
    for method, path, status in (("GET", "/nowhere", 404), ("PUT", "/queues", 405), ("DELETE", "/overview", 405)):
        answer = reader.request(method, API + path)
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
