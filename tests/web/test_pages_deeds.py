"""Pages over HTTP that lead to a deed: all that fit, what is left of a plan, rules taken back, tokens shown once."""

import re
from html import unescape

import psycopg
from fastapi.testclient import TestClient

from bartleby import Client, Failure
from bartleby.surfaces.web.pages.words import FIELDS, paths_in
from tests.kit.burying import bury, statuses
from tests.web.conftest import SAME, ClientAs, visiting

BY = {"actor": "ana", "reason": "testing"}


def test_all_that_fit_are_planned_or_discarded_as_many_as_were_frozen(browser: TestClient, client: Client) -> None:
    letters = bury(client, [{"n": n} for n in range(60)])
    listed = browser.get("/letters?filter=queue:orders").text
    assert 'data-matching="60"' in listed
    chosen = {"filter": "queue:orders", "ids": [str(each) for each in letters[:50]], "matching": "true", "looked": "60"}
    planned = browser.post("/operations", data={**chosen, "reason": "mended"}, headers=SAME)
    assert planned.status_code == 303
    plan = client.replays(limit=1)[0]
    assert (plan.items, plan.filter) == (60, "queue:orders")
    asked = browser.post("/letters/confirm", data={**chosen, "deed": "discard"}, headers=SAME).text
    assert "Discard 60 letters?" in asked
    assert 'name="expected" value="60"' in asked
    bury(client, [{"n": 60}])
    done = {"deed": "discard", "filter": "queue:orders", "expected": "60", "reason": "spam"}
    refused = browser.post("/letters/deed", data=done, headers=SAME)
    assert refused.status_code == 409
    assert statuses(client, letters) == ["dead"] * 60
    # without the mark only what was ticked is meant
    del chosen["matching"]
    assert (
        "Discard 50 letters?" in browser.post("/letters/confirm", data={**chosen, "deed": "discard"}, headers=SAME).text
    )


def test_a_plan_of_more_than_was_looked_at_says_so(browser: TestClient, client: Client) -> None:
    bury(client, [{"n": n} for n in range(3)])
    asked = {"filter": "queue:orders", "looked": "2", "reason": "mended"}
    made = browser.post("/operations", data=asked, headers=SAME)
    shown = browser.get(made.headers["location"]).text
    assert "3 letters are frozen in this plan; 2 fitted when you looked." in shown


def test_what_a_plan_has_left_dead_is_planned_again_with_its_settings(browser: TestClient, client: Client) -> None:
    letters = bury(client, [{"n": n, "exact": 0.1} for n in range(4)])
    patch = [{"op": "replace", "path": "/n", "value": 9}]
    first = client.plan_replay(ids=letters, patch=patch, rate=2.5, canary=2, tolerance=0.25, actor="ana", reason="x")
    assert browser.post(f"/operations/{first}/again", data={"reason": "x"}, headers=SAME).status_code == 422
    client.cancel_replay(first, **BY)
    shown = browser.get(f"/operations/{first}").text
    assert "4 left dead" in shown
    assert "Plan a replay of 4 letters" in shown
    assert "waiting" not in re.sub(r"<[^>]*>", "", shown.partition("<main")[2])
    made = browser.post(f"/operations/{first}/again", data={"reason": "mended"}, headers=SAME)
    second = client.replays(limit=1)[0]
    assert made.headers["location"] == f"/operations/{second.id}"
    assert (second.status, second.items, second.patch) == ("draft", 4, patch)
    assert (second.rate, second.canary, second.tolerance) == (2.5, 2, 0.25)


def test_a_merge_is_taken_back_on_the_page_of_its_group(browser: TestClient, client: Client) -> None:
    bury(client, [{"n": 1}], error="'a'")
    bury(client, [{"n": 2}], error="'b'")
    kept, merged = sorted(int(each.id) for each in client.groups(limit=2))
    client.merge_groups([merged], into=kept, **BY)
    (rule,) = client.group_rules()
    page = browser.get(f"/groups/{kept}").text
    assert f"Take back rule {rule.id}" in page
    done = browser.post(f"/groups/{kept}/rules/{rule.id}/remove", data={"reason": "two bugs"}, headers=SAME)
    assert done.status_code == 303
    assert client.group_rules() == []
    assert browser.post(f"/groups/{kept}/rules/999/remove", data={"reason": "x"}, headers=SAME).status_code == 404


def test_the_headline_of_a_group_has_its_type_once_and_no_letters_are_told(browser: TestClient, client: Client) -> None:
    letters = bury(client, [{"n": 1}])
    client.discard(letters, **BY)
    group = client.groups(limit=1, everything=True)[0].id
    text = browser.get(f"/groups/{group}").text
    headline = unescape(re.sub(r"<[^>]*>", "", re.search(r"<h1.*?</h1>", text, re.DOTALL)[0]))  # type: ignore[index]
    assert headline.count("KeyError") == 1, headline
    assert "It has no dead letters any more." in text


def test_the_fields_that_are_offered_are_those_of_the_grammar(conn: psycopg.Connection[tuple[object, ...]]) -> None:
    rows = conn.execute("select field, choices from bartleby.filter_fields()").fetchall()
    assert {row[0] for row in rows} == set(FIELDS)
    for name, choices in rows:
        if choices is not None:
            assert FIELDS[str(name)][1] == tuple(choices)  # type: ignore[arg-type]


def test_what_a_filter_can_say_has_paths_of_its_letters_and_only_queues_of_whoever_asks(
    client: Client, client_as: ClientAs
) -> None:
    client.create_queue("mail")
    bury(client, [{"customer": {"id": 1, "e mail": "x"}, "items": [{"sku": 1}]}], headers={"tenant": "acme"})
    bury(client, [{"to": 1}], queue="mail", kind="Odd Error")
    found = client_as("reader", ["orders"]).get("/letters/words?filter=type:").json()
    assert found["queues"] == ["orders"]
    assert found["paths"] == ["payload.customer.id", "headers.tenant"]
    assert found["types"] == ["KeyError"]
    every = client_as("reader").get("/letters/words", params={"filter": "queue:mail"}).json()
    assert every["types"] == ['"Odd Error"']
    assert every["paths"] == ["payload.to"]


def test_paths_of_strange_documents_are_few_and_can_be_named() -> None:
    deep = "{" + '"a": {' * 50 + '"b": 1' + "}" * 51
    assert paths_in([deep, "not json", None, "5", '{"a b": 1, "": 2, "c:d": 3, "ok": null}']) == ["payload.ok"]
    assert len(paths_in(["{" + ",".join(f'"k{n}": 1' for n in range(500)) + "}"])) == 100


def test_a_token_is_shown_once_opens_what_it_says_and_is_revoked(
    client: Client, client_as: ClientAs, guarded: object
) -> None:
    admin = client_as("admin")
    asked = {"name": "ci", "role": "reader", "days": "30", "queues": "orders", "reason": "for the build"}
    made = admin.post("/tokens", data=asked)
    assert (made.status_code, made.headers["cache-control"]) == (200, "no-store")
    (secret,) = set(re.findall(r"bly_[\w-]{43}", made.text))
    assert secret not in admin.get("/tokens").text
    assert secret not in str(made.headers)
    token = next(each for each in client.tokens() if each.name == "ci")
    assert (token.role, token.queues) == ("reader", ["orders"])
    with visiting(guarded, Authorization=f"Bearer {secret}") as program:  # type: ignore[arg-type]
        assert program.get("/letters").status_code == 200
        assert program.get("/tokens").status_code == 403
        assert admin.post(f"/tokens/{token.id}/revoke", data={"reason": "left"}).status_code == 303
    assert token.id not in {each.id for each in client.tokens()}
    for wrong in ({"role": "king"}, {"days": "-1"}, {"name": ""}):
        assert admin.post("/tokens", data={**asked, **wrong}).status_code == 422, wrong


def test_only_an_admin_finds_the_tokens(client: Client, client_as: ClientAs) -> None:
    for role in ("reader", "agent", "operator"):
        somebody = client_as(role)
        assert somebody.get("/tokens").status_code == 403
        assert 'href="/tokens"' not in somebody.get("/queues").text
        added = somebody.post("/tokens", data={"name": "x", "role": "admin", "days": "1", "reason": "x"})
        assert added.status_code == 403
    assert {each.name for each in client.tokens()} == {"reader", "agent", "operator"}


def test_a_sink_says_what_it_waits_for_and_what_its_last_error_was(browser: TestClient, client: Client) -> None:
    client.put_sink("pager", "log", {}, **BY)
    assert "It waits for letters to die." in browser.get("/sinks").text
    bury(client, [{"n": 1}])
    assert "It waits for a relay to send what is there" in browser.get("/sinks").text
    client.report_sink("pager", failures=1, error="connection refused by pager.example")
    text = browser.get("/sinks").text
    assert "connection refused by pager.example" in text
    assert "it waits until the other side answers" in text


def test_an_error_page_has_the_id_of_its_request(browser: TestClient) -> None:
    missing = browser.get("/groups/999999")
    assert missing.headers["x-request-id"] in missing.text
    refused = browser.post("/queues/nothing/pause", data={"reason": "x"}, headers={**SAME, "HX-Request": "true"})
    assert refused.headers["x-request-id"] in refused.text


def test_a_page_is_not_packed_for_it_has_secrets_beside_texts_of_strangers(browser: TestClient, client: Client) -> None:
    bury(client, [{"n": n} for n in range(50)])
    for path in ("/letters?filter=queue:orders", "/groups/1", "/letters/1", "/audit"):
        answer = browser.get(path, headers={"Accept-Encoding": "gzip, br"})
        assert len(answer.text) > 5000
        assert "content-encoding" not in answer.headers


def test_a_plan_that_stopped_by_itself_says_where_to_look_and_what_is_left(browser: TestClient, client: Client) -> None:
    letters = bury(client, [{"n": n} for n in range(8)])
    plan = client.plan_replay(ids=letters, canary=2, tolerance=0.0, actor="ana", reason="mended, they say")
    client.start_replay(plan, actor="ana", reason="go")
    client.advance_replays()
    lease = client.claim("orders", "web-1", limit=10)
    assert lease is not None
    assert len(lease) == 2
    client.fail(lease.id, [Failure(each.position, "TypeError", "still broken", verdict="dead") for each in lease])
    client.advance_replays()
    text = browser.get(f"/operations/{plan}").text
    assert "It stopped by itself: too many died again." in text
    group = next(each.id for each in client.groups(limit=10) if each.error_type == "TypeError")
    assert f'href="/groups/{group}">group {group}: TypeError, 2</a>' in text
    assert "6 left dead" in text
    assert "Plan a replay of 6 letters" in text


def test_what_is_held_is_released_at_once_and_the_command_says_so_too(browser: TestClient, client: Client) -> None:
    letters = bury(client, [{"n": n} for n in range(3)])
    client.hold(letters, actor="ana", reason="a lawsuit")
    listed = browser.get("/letters?filter=held:yes").text
    assert "Release 3 …" in listed
    assert 'value="hold"' not in listed
    meant = {"deed": "release", "filter": "held:yes"}
    asked = unescape(browser.post("/letters/confirm", data=meant, headers=SAME).text)
    assert "bartleby hold held:yes --off --reason" in asked
    browser.post("/letters/deed", data={**meant, "expected": "3", "reason": "looked at"}, headers=SAME)
    assert not [each for each in client.dead_letters(limit=3) if each.held_at]


def test_a_form_knows_how_many_were_looked_at_and_no_secret_that_was_revealed(
    browser: TestClient, client: Client
) -> None:
    (letter,) = bury(client, [{"password": "hunter2"}])
    group = client.groups()[0].id
    assert 'name="looked" value="1"' in browser.get(f"/groups/{group}").text
    shown = browser.post(f"/letters/{letter}/reveal", data={"reason": "asked"}, headers=SAME).text
    edited = re.search(r'<textarea name="payload"[^>]*>(.*?)</textarea>', shown, re.DOTALL)
    assert "hunter2" in shown
    assert edited is not None
    assert "hunter2" not in edited[1], "it would be in the patch as if somebody had changed it"


def test_what_is_to_be_restored_was_discarded_whatever_words_its_error_has(browser: TestClient, client: Client) -> None:
    letters = bury(client, [{"n": n} for n in range(3)])
    client.discard(letters[:2], actor="ana", reason="spam")
    meant = {"deed": "restore", "filter": '-error:"status: 500"'}
    assert "Restore 2 letters?" in browser.post("/letters/confirm", data=meant, headers=SAME).text


def test_one_is_one_and_what_is_held_is_not_to_be_replayed(browser: TestClient, client: Client) -> None:
    (letter,) = bury(client, [{"n": 1}])
    group = client.groups()[0].id
    assert "Discard 1 letter…" in browser.get(f"/groups/{group}").text
    assert "when that is mended, replay it" in browser.get(f"/letters/{letter}").text
    client.hold([letter], actor="ana", reason="a lawsuit")
    held = browser.get(f"/letters/{letter}").text
    assert "It is on hold: neither replayed nor discarded" in held
    assert "replay it" not in held


def test_a_plan_whose_letters_have_changed_runs_only_if_that_is_ticked(browser: TestClient, client: Client) -> None:
    letters = bury(client, [{"n": n} for n in range(3)])
    client.plan_replay("queue:orders", actor="ana", reason="mended")
    plan = client.replays(limit=1)[0]
    client.discard(letters[:1], actor="ana", reason="spam")
    start = {"hash": plan.hash, "reason": "mended"}
    assert 'name="accept_drift"' in browser.get(f"/operations/{plan.id}").text
    refused = browser.post(f"/operations/{plan.id}/start", data=start, headers=SAME)
    assert refused.status_code == 409
    assert "tick that it may run all the same" in refused.text
    assert browser.post(
        f"/operations/{plan.id}/start", data={**start, "accept_drift": "true"}, headers=SAME
    ).is_redirect
    started = client.find_replay(plan.id)
    assert started is not None
    assert started.status != "draft"
