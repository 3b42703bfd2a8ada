"""/api/v1/replays: planned, looked at, approved, let run and steered."""

import json

import pytest
from fastapi.testclient import TestClient

from bartleby import Client
from tests.kit.api import API, BIG, SECRET, WHY, get, post, said, shop
from tests.kit.burying import bury
from tests.web.conftest import ClientAs


def test_a_plan_is_made_looked_at_started_paused_resumed_and_cancelled(browser: TestClient, dsn: str) -> None:
    ids = shop(dsn)
    plan = post(browser, "/replays", 201, filter="queue:orders", rate=1, canary=1, tolerance=0.5)
    assert (plan["status"], plan["items"], plan["will_run"]) == ("draft", 3, 3)
    path = f"/replays/{plan['id']}"
    assert get(browser, path) == plan
    preview = get(browser, f"{path}/preview")
    assert (preview["plan"], preview["changes"]) == (plan, [])
    (share,) = preview["shares"]
    died = [get(browser, f"/dead-letters/{each}")["dead_at"] for each in ids]
    assert (share["items"], share["first_dead_at"], share["last_dead_at"]) == (3, min(died), max(died))
    items = get(browser, f"{path}/items", limit=2)
    assert ([each["message_id"] for each in items["items"]], items["next"]) == (ids[:2], str(ids[1]))
    rest = get(browser, f"{path}/items", limit=2, after=items["next"])
    assert ([each["message_id"] for each in rest["items"]], rest["next"]) == (ids[2:], None)
    assert post(browser, f"{path}/start", 409, hash="0" * 64)["type"] == "urn:bartleby:plan-drifted"
    assert post(browser, f"{path}/start", hash=plan["hash"])["status"] == "running"
    later = get(browser, f"{path}/preview")["shares"]
    assert later == [{**share, "first_dead_at": None, "last_dead_at": None}], "asked of a draft alone"
    assert post(browser, f"{path}/start", 409)["type"] == "urn:bartleby:wrong-state"
    assert post(browser, f"{path}/pause")["status"] == "paused"
    assert post(browser, f"{path}/resume")["status"] == "running"
    assert post(browser, f"{path}/cancel")["status"] == "cancelled"


def test_plans_are_listed_the_newest_first_page_by_page(browser: TestClient, dsn: str) -> None:
    first, *_ = shop(dsn)
    made = [post(browser, "/replays", 201, ids=[first])["id"] for _ in range(3)]
    page = get(browser, "/replays", limit=2)
    assert [each["id"] for each in page["items"]] == made[:0:-1]
    assert [each["id"] for each in get(browser, "/replays", limit=2, after=page["next"])["items"]] == made[:1]
    assert get(browser, "/replays", status="running")["items"] == []
    assert get(browser, "/replays", 422, status="nonsense")["status"] == 422


def test_a_plan_has_a_tag(browser: TestClient, dsn: str) -> None:
    plan = post(browser, "/replays", 201, ids=shop(dsn))
    answer = browser.get(f"{API}/replays/{plan['id']}")
    again = browser.get(f"{API}/replays/{plan['id']}", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304


def test_a_preview_never_runs_and_is_not_listed(browser: TestClient, dsn: str) -> None:
    plan = post(browser, "/replays", 201, ids=shop(dsn), preview=True)
    assert plan["status"] == "preview"
    assert get(browser, "/replays")["items"] == []
    assert post(browser, f"/replays/{plan['id']}/start", 409)["type"] == "urn:bartleby:wrong-state"


@pytest.mark.parametrize("number", ["1e400", str(BIG), "0.30000000000000000000000001"])
def test_a_patch_keeps_every_digit(browser: TestClient, dsn: str, number: str) -> None:
    first, *_ = shop(dsn)
    patch = f'[{{"op": "replace", "path": "/n", "value": {number}}}]'
    body = f'{{"reason": "why", "ids": [{first}], "patch": {patch}}}'
    answer = browser.post(f"{API}/replays", content=body, headers={"Content-Type": "application/json"})
    plan = json.loads(answer.text, parse_int=str, parse_float=str)
    assert answer.status_code == 201
    changes = browser.get(f"{API}/replays/{plan['id']}/changes", params={"message_id": first}).text
    (change,) = json.loads(changes, parse_int=str, parse_float=str)
    assert change["before"] == {"n": "0", "country": "AT"}
    digits = "1" + "0" * 400 if number == "1e400" else number
    assert (change["after"]["n"], plan["patch"][0]["value"]) == (digits, digits)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"filter": ""},
        {"ids": [1], "filter": "queue:orders"},
        {"ids": []},
        {"ids": [1], "rate": 0},
        {"ids": [1], "rate": "1"},
        {"ids": [1], "tolerance": 2},
        {"ids": [1], "patch": [{"op": "nonsense"}]},
        {"filter": "nonsense:"},
        {"ids": [1], "unknown": 1},
    ],
)
def test_what_cannot_be_planned_is_refused(browser: TestClient, dsn: str, body: dict[str, object]) -> None:
    shop(dsn)
    assert post(browser, "/replays", 422, **body)["status"] == 422
    assert get(browser, "/replays")["items"] == []


def test_a_target_that_is_not_there(browser: TestClient, dsn: str) -> None:
    first, *_ = shop(dsn)
    assert post(browser, "/replays", 404, ids=[first], to="nowhere")["type"] == "urn:bartleby:unknown-queue"


@pytest.mark.parametrize("verb", ["start", "pause", "resume", "cancel", "approve"])
def test_a_plan_that_is_not_there(browser: TestClient, verb: str) -> None:
    more = {"hash": "0" * 64} if verb == "approve" else {}
    assert post(browser, f"/replays/99/{verb}", 404, **more)["type"] == "urn:bartleby:unknown-replay"
    for part in ("", "/preview", "/items", "/changes?message_id=1"):
        assert get(browser, f"/replays/99{part}", 404)["status"] == 404 if "?" not in part else True


def test_somebody_else_approves(client_as: ClientAs, dsn: str) -> None:
    first, *_ = shop(dsn)
    ana, ben = client_as("operator", name="ana"), client_as("operator", name="ben")
    plan = post(ana, "/replays", 201, ids=[first])
    approved = post(ben, f"/replays/{plan['id']}/approve", hash=plan["hash"])
    assert approved["approved_by"] == "ben"
    own = ana.post(f"{API}/replays/{plan['id']}/approve", json={**WHY, "hash": plan["hash"]})
    assert own.status_code in {403, 409, 422}


class TestAgents:
    def test_one_proposes_and_runs_only_what_a_person_has_approved(self, client_as: ClientAs, dsn: str) -> None:
        first, *_ = shop(dsn)
        agent, person = client_as("agent", name="helper"), client_as("operator", name="ana")
        plan = post(agent, "/replays", 201, ids=[first])
        path = f"/replays/{plan['id']}"
        assert post(agent, f"{path}/start", 409, hash=plan["hash"])["type"] == "urn:bartleby:needs-approval"
        with Client(dsn) as client:
            (line,) = client.audit_log(action="access.refuse")
            assert (line.actor, line.subject["replay"]) == ("agent:helper", plan["id"])
        post(person, f"{path}/approve", hash=plan["hash"])
        assert post(agent, f"{path}/start", hash=plan["hash"])["status"] == "running"

    def test_one_is_not_a_person_of_the_same_name(self, client_as: ClientAs, dsn: str) -> None:
        first, *_ = shop(dsn)
        agent, person, ana = client_as("agent", name="bot"), client_as("operator", name="bot"), client_as("operator")
        plan = post(person, "/replays", 201, ids=[first])
        post(ana, f"/replays/{plan['id']}/approve", hash=plan["hash"])
        assert post(agent, f"/replays/{plan['id']}/start", 403, hash=plan["hash"])["status"] == 403
        assert post(agent, f"/replays/{plan['id']}/cancel", 403)["status"] == 403
        assert post(agent, "/replays", 201, ids=[first])["actor"] == "agent:bot"

    @pytest.mark.parametrize(
        "operation",
        [
            {"op": "copy", "from": "/password", "path": "/shown"},
            {"op": "move", "from": "/password", "path": "/shown"},
            {"op": "test", "path": "/password", "value": "guess"},
            {"op": "test", "path": "", "value": {"password": "guess"}},
        ],
    )
    def test_no_patch_tells_it_a_secret(self, client_as: ClientAs, dsn: str, operation: dict[str, object]) -> None:
        with Client(dsn) as client:
            client.create_queue("orders")
            (one,) = bury(client, [{"password": SECRET}])
        agent, operator, reader = client_as("agent"), client_as("operator"), client_as("reader")
        assert post(agent, "/replays", 403, ids=[one], patch=[operation])["type"] == "urn:bartleby:forbidden"
        plan = post(operator, "/replays", 201, ids=[one], patch=[operation])
        for path in (f"/changes?message_id={one}", "/preview", "", "/items"):
            answer = reader.get(f"{API}/replays/{plan['id']}{path}")
            assert answer.status_code == 200
            assert SECRET not in answer.text


def test_a_filter_and_a_patch_with_secrets_are_hidden_in_the_plan(client_as: ClientAs, dsn: str) -> None:
    with Client(dsn) as client:
        client.create_queue("orders")
        bury(client, [{"password": SECRET}])
    patch = [{"op": "replace", "path": "/password", "value": "new-" + SECRET}]
    filter = f"payload.password:{SECRET}"
    plan = post(client_as("operator"), "/replays", 201, filter=filter, patch=patch)
    reader = client_as("reader")
    assert plan["items"] == 1
    seen = get(reader, f"/replays/{plan['id']}")
    assert (seen["filter"], seen["patch"][0]["value"]) == ("***", "***")
    for path in ("/replays", f"/replays/{plan['id']}/preview", "/audit", "/overview"):
        assert SECRET not in reader.get(API + path).text


def test_a_plan_of_other_queues_is_not_there_for_whoever_is_held(client_as: ClientAs, dsn: str) -> None:
    (theirs,), (others,) = shop(dsn, "orders", 1), shop(dsn, "secret", 1)
    everybody, held = client_as("operator", name="ana"), client_as("operator", ["orders"])
    own = post(everybody, "/replays", 201, ids=[theirs])["id"]
    hidden = [
        post(everybody, "/replays", 201, ids=[theirs, others])["id"],
        post(everybody, "/replays", 201, ids=[others], to="orders")["id"],
        post(everybody, "/replays", 201, ids=[theirs], to="secret")["id"],
    ]
    assert [each["id"] for each in get(held, "/replays")["items"]] == [own]
    for each in hidden:
        for part in ("", "/preview", "/items", f"/changes?message_id={others}"):
            assert said(held.get(f"{API}/replays/{each}{part}"), 404)["status"] == 404
        assert post(held, f"/replays/{each}/start", 404)["status"] == 404
    assert post(held, "/replays", 404, ids=[others])["status"] == 404
    assert post(held, "/replays", 404, ids=[theirs], to="secret")["status"] == 404
