"""Every page and form, as the routes of the application have them: who may, no secret, and nothing by looking."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from bartleby import Client
from bartleby.surfaces.web import ConsoleSettings, console
from tests.kit.api import API, WHY, every
from tests.web.conftest import SAME, ClientAs, add_token, visiting
from tests.web.test_api_doors import SECRET, Shop, shop

__all__ = ["shop"]  # a fixture

OPEN = re.compile(r"/(static/|login|logout|live$)")


def places(app: FastAPI, things: dict[str, object]) -> Iterator[tuple[str, str]]:
    """Every route with these things in its path; a new kind of thing fails here."""
    for route in every(app):
        if OPEN.match(route.path):
            continue
        kind = route.path.split("/")[1]
        name = {"sinks": "bus", "workers": "web-1"}.get(kind, things["queue"])
        for verb in ("pause", "resume") if "{verb}" in route.path else ("",):
            path = route.path.format(**{**things, "rule": things["rule_id"], "name": name, "verb": verb})
            yield from ((method, path) for method in route.methods or ())


def pages(app: FastAPI, things: dict[str, object]) -> Iterator[tuple[str, str]]:
    """Every route that is no API's."""
    yield from (each for each in places(app, things) if not each[1].startswith(API))


def test_every_place_is_known(guarded: FastAPI, shop: Shop) -> None:
    found = set(pages(guarded, shop.theirs))
    assert sum(method == "GET" for method, _ in found) > 15
    assert sum(method == "POST" for method, _ in found) > 20


@pytest.mark.parametrize("queues", [None, ["orders"]])
def test_no_page_shows_a_reader_a_secret_or_a_queue_of_others(
    client_as: ClientAs, guarded: FastAPI, shop: Shop, queues: list[str] | None
) -> None:
    reader, shown = client_as("reader", queues, name="eva"), 0
    for things, foreign in ((shop.theirs, "vault"), (shop.others, "vaulted")):  # what was asked for is repeated
        for method, path in pages(guarded, things):
            if method == "GET":
                answer = reader.get(path, params={"queue": "orders"} if "history" in path else {})
                assert answer.status_code < 500, path
                assert SECRET not in answer.text, path
                assert queues is None or foreign not in answer.text, path
                shown += answer.status_code == 200
    assert shown > 15


def test_no_form_is_for_a_reader(
    client_as: ClientAs, guarded: FastAPI, shop: Shop, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, used, refused = client_as("reader"), list[str](), 0
    assert reader.get("/queues").status_code == 200
    for name in ("run", "transaction", "using"):
        monkeypatch.setattr(guarded.state.house.operator, name, lambda *_, name=name: used.append(name))
    form = {"reason": "a test", "hash": "0" * 64, "ids": str(shop.theirs["message_id"]), "name": "x", "role": "admin"}
    with Client(dsn) as owner:
        before = owner.audit_anchor()
        for method, path in pages(guarded, shop.theirs):
            if method != "GET":
                answer = reader.request(method, path, data=form, headers=SAME)
                assert answer.status_code < 500, path
                refused += answer.status_code == 403
        assert (used, owner.audit_anchor()) == ([], before)
    assert refused > 10


def test_nothing_is_changed_by_looking_at_the_address_of_a_deed(
    client_as: ClientAs, guarded: FastAPI, shop: Shop, dsn: str
) -> None:
    admin = client_as("admin")
    found = set(places(guarded, shop.theirs))
    looks = {path for method, path in found if method == "GET"}
    with Client(dsn) as owner:
        before = owner.audit_anchor()
        for path in {path for method, path in found if method not in {"GET", "HEAD"}} - looks:
            assert admin.get(path).status_code in {404, 405, 422}, path
        assert owner.audit_anchor() == before


def test_two_consoles_behind_one_name_are_one(dsn: str, shop: Shop) -> None:
    one, two = (console(dsn) for _ in range(2))
    try:
        visitors = [visiting(each) for each in (one, two)]
        signed = visitors[0].post("/login", data={"secret": add_token(dsn, "operator")}, headers=SAME)
        for each in visitors:
            each.headers["Cookie"] = signed.headers["set-cookie"].partition(";")[0]
        path, key = f"{API}/queues/orders/pause", {"Idempotency-Key": "once"}
        first, second = (each.post(path, json=WHY, headers={**SAME, **key}) for each in visitors)
        assert (first.status_code, first.text) == (second.status_code, second.text)
        assert second.headers["idempotent-replay"] == "true"
        assert visitors[1].post(path, json=WHY, headers={"Origin": "https://evil.example"}).status_code == 403
        visitors[1].post("/logout", headers=SAME)
        assert visitors[0].get("/queues").status_code == 303, "signed out of both"
    finally:
        one.close()
        two.close()


def test_what_can_be_asked_for_at_once_has_bounds(browser: TestClient, site: FastAPI) -> None:
    document: dict[str, Any] = site.openapi()
    asked = 0
    for path, verbs in document["paths"].items():
        names = {each["name"] for each in verbs.get("get", {}).get("parameters", [])}
        if "limit" in names:
            answer = browser.get(
                path.replace("{replay_id}", "1").replace("{group_id}", "1"), params={"limit": 1_000_000}
            )
            assert answer.status_code == 422, path
            asked += 1
    assert asked >= 5
    many = list(range(1, 102))
    refused = browser.post(f"{API}/dead-letters/replay", json={**WHY, "ids": many})
    assert refused.status_code == 422
    assert "100" in refused.text


def test_streams_have_a_bound(dsn: str) -> None:
    app = console(dsn, ConsoleSettings(streams=2))
    try:
        reader = visiting(app, Authorization=f"Bearer {add_token(dsn, 'reader')}")
        with app.state.house.streams.held("reader"):
            answer = reader.get("/live")
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "30")
    finally:
        app.close()
