"""Pages and forms of the console over HTTP, without a browser."""

import re
import shlex
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from bartleby import Client, Failure
from bartleby.measures import policy
from bartleby.surfaces import web
from bartleby.surfaces.cli import cli
from bartleby.surfaces.web.pages import letters as letters_page
from bartleby.surfaces.web.pages.showing import hours
from bartleby.surfaces.web.pages.words import FIELDS
from tests.kit.api import shorten_searches
from tests.kit.burying import bury, statuses
from tests.kit.shop import furnish
from tests.web.conftest import SAME, ClientAs, visiting

BY: dict[str, Any] = {"actor": "ana", "reason": "testing"}
HTMX = {**SAME, "HX-Request": "true"}
Connection = psycopg.Connection[Any]


def send(browser: TestClient, path: str, headers: dict[str, str] = SAME, /, **data: Any) -> Any:
    """Post a form, with a reason unless there is one."""
    return browser.post(path, data={"reason": "a test", **data}, headers=headers)


def text_of(page: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", page))


def test_notice_of_an_action_is_shown_once_on_the_next_whole_page(browser: TestClient, client: Client) -> None:
    (letter,) = bury(client, [{"n": 1}])
    path, notice = f"/letters/{letter}", f"Letter {letter} is discarded."
    assert send(browser, f"{path}/discard", reason="<b>spam</b>").headers["location"]
    new = "/letters/new?since=2026-01-01T00:00:00Z"
    for part, target in (("/", "section#verdict"), (path, "div#page"), (new, "div#newer")):
        answer = browser.get(part, headers={"HX-Request": "true", "HX-Target": target})
        assert (answer.status_code, notice in answer.text, "set-cookie" in answer.headers) == (200, False, False), part
    whole = {"HX-Request": "true", "HX-Target": "main#main"}
    shown = browser.get(path, headers=whole).text
    assert notice in shown
    assert ">Undo<" in shown
    assert "<b>spam</b>" not in shown
    assert notice not in browser.get(path, headers=whole).text
    for forged in ("nonsense", "eyJ0ZXh0IjogIjxzY3JpcHQ-IiwgInRvbmUiOiAiZ29vZCJ9", "W10="):
        browser.cookies.set("bartleby_told", forged)
        answer = browser.get("/queues")
        assert answer.status_code == 200
        assert "<script>" not in answer.text.partition("</head>")[2]
        browser.cookies.clear()


def test_invalid_form_is_a_notice_or_an_error_page_in_plain_words(browser: TestClient, client: Client) -> None:
    letters = bury(client, [{"n": n} for n in range(3)])
    path = f"/letters/{letters[0]}"
    for headers in (SAME, HTMX):
        answer = browser.post(f"{path}/discard", headers=headers)
        assert answer.status_code == 422
        assert "Reason: it is missing" in answer.text
        assert "ody" not in answer.text.partition('class="notice bad"')[2].partition("</div>")[0]
    answer = send(browser, "/letters/deed", deed="hold", reason="x" * 2000, expected="many", ids=["a", "b"])
    number = "it has to be a whole number"
    for words in ("Reason: it is too long", f"Expected: {number}", f"Ids: {number}"):
        assert answer.text.count(words) == 1, words
    notice = send(browser, f"{path}/edit", HTMX, payload="{")
    assert (notice.status_code, notice.headers["hx-retarget"]) == (422, "#notices")
    whole = send(browser, f"{path}/edit", payload="{")
    assert (whole.status_code, "<h1>" in whole.text) == (422, True)
    assert "not JSON" in notice.text
    assert "not JSON" in whole.text
    for missing in ("/letters/999999", "/groups/999999", "/operations/999999", "/queues/nothing"):
        assert browser.get(missing).status_code in {404, 409}, missing
    for refused in (browser.get("/groups/999999"), send(browser, "/queues/nothing/pause", HTMX)):
        assert refused.headers["x-request-id"] in refused.text
    # an empty filter never means every letter
    for path, form in (
        ("/letters/confirm", {"deed": "discard", "filter": " "}),
        ("/operations", {"filter": ""}),
        ("/letters/deed", {"deed": "discard", "filter": "", "expected": "3"}),
    ):
        assert send(browser, path, **form).status_code == 422, path
    assert statuses(client, letters) == ["dead"] * 3


@pytest.mark.own_database
def test_error_of_a_form_is_logged(
    browser: TestClient, client: Client, conn: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    conn.execute("""
        create or replace function bartleby.resume_queue(p_queue text, p_actor text default null,
          p_reason text default null, p_request_id text default null) returns void language plpgsql
        as $$ begin raise exception 'out of order' using errcode = 'XX000'; end $$""")
    answer = send(browser, "/queues/orders/resume")
    assert answer.status_code == 500
    (line,) = [each.getMessage() for each in caplog.records if "out of order" in each.getMessage()]
    assert line.startswith(answer.headers["x-request-id"])


def test_all_matching_letters_are_planned_or_discarded_only_if_as_many_as_shown(
    browser: TestClient, client: Client
) -> None:
    letters = bury(client, [{"n": n} for n in range(60)])
    assert 'data-matching="60"' in browser.get("/letters?filter=queue:orders").text
    chosen = {"filter": "queue:orders", "ids": [str(each) for each in letters[:50]], "matching": "true", "looked": "59"}
    made = send(browser, "/operations", **chosen)
    plan = client.replays(limit=1)[0]
    assert (made.status_code, plan.items, plan.filter) == (303, 60, "queue:orders")
    shown = browser.get(made.headers["location"]).text
    assert "60 letters are frozen in this plan; 59 fitted when you looked." in shown
    asked = send(browser, "/letters/confirm", **chosen, deed="discard").text
    assert "Discard 60 letters?" in asked
    assert 'name="expected" value="60"' in asked
    bury(client, [{"n": 60}])
    assert send(browser, "/letters/deed", deed="discard", filter="queue:orders", expected="60").status_code == 409
    assert statuses(client, letters) == ["dead"] * 60
    del chosen["matching"]  # without it, the ticked letters are meant
    assert "Discard 50 letters?" in send(browser, "/letters/confirm", **chosen, deed="discard").text


def test_action_returns_to_its_list_and_the_audit_page_undoes_it(browser: TestClient, client: Client) -> None:
    letters = bury(client, [{"n": n} for n in range(2)], key="order-1")
    chosen: dict[str, Any] = {"deed": "discard", "filter": "key:order-1", "ids": [str(each) for each in letters]}
    assert 'name="back" value="key:order-1"' in send(browser, "/letters/confirm", **chosen).text
    done = send(browser, "/letters/deed", **{**chosen, "filter": ""}, back="key:order-1", expected="2")
    assert done.headers["location"] == "/letters?filter=key%3Aorder-1"
    assert statuses(client, letters) == ["discarded"] * 2
    assert "Restore 2 letters?" in send(browser, "/letters/confirm", deed="restore", filter='-error:"status: 500"').text
    request = client.audit_log(action="letter.discard")[0].request_id
    for path in ("/audit", "/"):
        assert f'name="request_id" value="{request}"' in browser.get(path).text
    back = "/letters?filter=key%3Aorder-1"
    assert send(browser, "/undo", request_id=request, back=back).headers["location"] == back
    assert statuses(client, letters) == ["dead"] * 2
    for foreign in ("//evil.example", "/letters?filter=a&x=//evil", "https://evil.example/letters?filter=a"):
        assert send(browser, "/undo", request_id=request, back=foreign).headers["location"] == "/letters"


def test_letter_page_offers_actions_and_no_revealed_secret_in_its_form(browser: TestClient, client: Client) -> None:
    (letter,) = bury(client, [{"password": "hunter2"}])
    path = f"/letters/{letter}"
    group = f"/groups/{client.groups()[0].id}"
    page = browser.get(group).text
    assert 'name="looked" value="1"' in page
    assert "Discard 1 letter…" in page
    assert "when that is mended, replay it" in browser.get(path).text
    assert f"bartleby repro {letter}" in browser.get(path).text
    shown = send(browser, f"{path}/reveal").text
    edited = re.search(r'<textarea name="payload"[^>]*>(.*?)</textarea>', shown, re.DOTALL)
    assert "hunter2" in shown
    assert edited is not None
    assert "hunter2" not in edited[1], "it would be in the patch as if it had been changed"


def test_story_of_a_letter_has_each_date_once_and_says_if_it_is_held(
    browser: TestClient, client: Client, conn: Connection
) -> None:
    (letter,) = bury(client, [{"n": 1}])
    path = f"/letters/{letter}"
    conn.execute("update bartleby.dead_letter set created_at = '2026-01-05 23:00Z'")
    conn.execute("update bartleby.attempt set failed_at = '2026-01-07 01:00Z'")
    story = browser.get(path).text.partition('id="story"')[2].partition("</ol>")[0]
    days = re.findall(r'<time class="day"[^>]*?( hidden)?>([-\d]+)</time>', story)
    assert days == [("", "2026-01-05"), ("", "2026-01-07")]
    client.hold([letter], **BY)
    held = browser.get(path).text
    assert "It is on hold: neither replayed nor discarded" in held
    assert "replay it" not in held
    client.hold([letter], on=False, **BY)
    story = browser.get(path).text.partition('id="story"')[2].partition("</ol>")[0]
    assert re.findall(r'class="day"[^>]*?( hidden)?>', story) == ["", "", "", " hidden"]


def test_edited_letter_becomes_a_plan(browser: TestClient, client: Client) -> None:
    (letter,) = bury(client, [{"password": "hunter2"}])
    path, group = f"/letters/{letter}", f"/groups/{client.groups()[0].id}"
    client.create_queue("orders.slow")
    made = send(browser, f"{path}/edit", payload='{"password": "***"}', to="orders.slow")
    plan = client.replays(limit=1)[0]
    assert made.headers["location"] == f"/operations/{plan.id}"
    assert (plan.target, plan.patch, plan.items, plan.status) == ("orders.slow", None, 1, "draft")
    client.discard([letter], **BY)
    page = browser.get(group).text
    headline = text_of(re.search(r"<h1.*?</h1>", page, re.DOTALL)[0])  # type: ignore[index]
    assert headline.count("KeyError") == 1, headline
    assert "It has no dead letters any more." in page


def test_held_letters_are_released_together(browser: TestClient, client: Client) -> None:
    client.hold(bury(client, [{"n": n} for n in range(3)]), actor="ana", reason="a lawsuit")
    listed = browser.get("/letters?filter=held:yes").text
    assert "Release 3 …" in listed
    assert 'value="hold"' not in listed
    asked = unescape(send(browser, "/letters/confirm", deed="release", filter="held:yes").text)
    assert "bartleby hold held:yes --off --reason" in asked
    send(browser, "/letters/deed", deed="release", filter="held:yes", expected="3")
    assert not [each for each in client.dead_letters(limit=3) if each.held_at]


def test_group_page_takes_a_merge_back_and_counts_versions(browser: TestClient, client: Client) -> None:
    bury(client, [{"n": n} for n in range(250)], error="'a'")
    kept = client.groups()[0].id
    assert "of the newest" not in browser.get(f"/groups/{kept}").text
    bury(client, [{"n": 250}], error="'a'")
    assert "of the newest 250<" in browser.get(f"/groups/{kept}").text
    bury(client, [{"n": 2}], error="'b'")
    merged = client.groups()[1].id
    client.merge_groups([merged], into=kept, **BY)
    (rule,) = client.group_rules()
    assert f"Take back rule {rule.id}" in browser.get(f"/groups/{kept}").text
    assert send(browser, f"/groups/{kept}/rules/{rule.id}/remove").status_code == 303
    assert client.group_rules() == []
    assert send(browser, f"/groups/{kept}/rules/999/remove").status_code == 404


def test_plan_with_changed_letters_starts_only_if_drift_is_accepted(
    browser: TestClient, client: Client, client_as: ClientAs, conn: Connection
) -> None:
    letters = bury(client, [{"n": n} for n in range(3)])
    client.plan_replay("queue:orders", **BY)
    plan = client.replays(limit=1)[0]
    path = f"/operations/{plan.id}"
    client.discard(letters[:1], **BY)
    assert 'name="accept_drift"' in browser.get(path).text
    refused = send(browser, f"{path}/start", hash=plan.hash)
    assert refused.status_code == 409
    assert "tick that it may run all the same" in refused.text
    assert send(browser, f"{path}/start", hash=plan.hash, accept_drift="true").is_redirect
    started = client.find_replay(plan.id)
    assert started is not None
    assert started.status != "draft"
    assert "Nobody has taken a letter" not in browser.get(path).text
    conn.execute("update bartleby.replay set started_at = started_at - interval '1 minute'")
    assert "Nobody has taken a letter" in browser.get(path).text
    # a second start names the first operator, unless the caller may not read the audit log
    starter = client.audit_log(action="replay.start")[0].actor
    second = send(browser, f"{path}/start", hash=plan.hash)
    assert (second.status_code, f"started by {starter}" in second.text) == (409, True)
    held = send(client_as("operator", ["orders"]), f"{path}/start", hash=plan.hash)
    assert (held.status_code, "started by" in held.text) == (409, False)


def test_remaining_letters_of_a_plan_are_planned_again(browser: TestClient, client: Client) -> None:
    letters = bury(client, [{"n": n, "exact": 0.1} for n in range(8)])
    patch = [{"op": "replace", "path": "/n", "value": 9}]
    first = client.plan_replay(ids=letters, patch=patch, canary=2, tolerance=0.0, **BY)
    path = f"/operations/{first}"
    assert send(browser, f"{path}/again").status_code == 422
    client.start_replay(first, **BY)
    client.advance_replays()
    lease = client.claim("orders", "web-1", limit=10)
    assert lease is not None
    assert len(lease) == 2
    client.fail(lease.id, [Failure(each.position, "TypeError", "still broken", verdict="dead") for each in lease])
    client.advance_replays()
    shown = browser.get(path).text
    assert "It stopped by itself: too many died again." in shown
    group = next(each.id for each in client.groups(limit=10) if each.error_type == "TypeError")
    assert f'href="/groups/{group}">group {group}: TypeError, 2</a>' in shown
    for words in ("6 left dead", "Plan a replay of 6 letters"):
        assert words in shown
    assert "waiting" not in text_of(shown.partition("<main")[2])
    made = send(browser, f"{path}/again")
    second = client.replays(limit=1)[0]
    assert made.headers["location"] == f"/operations/{second.id}"
    assert (second.status, second.items, second.patch) == ("draft", 6, patch)
    limited = client.plan_replay(ids=letters, rate=2.5, canary=3, tolerance=0.25, **BY)
    client.cancel_replay(limited, **BY)
    assert send(browser, f"/operations/{limited}/again").status_code == 303
    third = client.replays(limit=1)[0]
    assert (third.rate, third.canary, third.tolerance) == (2.5, 3, 0.25)


def test_filter_suggestions_are_those_of_the_grammar_and_of_the_own_queues(
    client: Client, client_as: ClientAs, conn: Connection
) -> None:
    rows = conn.execute("select field, choices from bartleby.filter_fields()").fetchall()
    assert {name for name, _ in rows} == set(FIELDS)
    assert all(FIELDS[name][1] == tuple(choices) for name, choices in rows if choices is not None)
    client.create_queue("mail")
    bury(client, [{"customer": {"id": 1, "e mail": "x"}, "items": [{"sku": 1}]}], headers={"tenant": "acme"})
    bury(client, [{"to": 1}], queue="mail", kind="Odd Error")
    found = client_as("reader", ["orders"]).get("/letters/words?filter=type:").json()
    assert (found["queues"], found["types"]) == (["orders"], ["KeyError"])
    assert found["paths"] == ["payload.customer.id", "headers.tenant"]
    every = client_as("reader").get("/letters/words", params={"filter": "queue:mail"}).json()
    assert (every["types"], every["paths"]) == (['"Odd Error"'], ["payload.to"])


def test_token_is_shown_once_and_only_admins_manage_tokens(
    client: Client, client_as: ClientAs, guarded: FastAPI
) -> None:
    admin = client_as("admin")
    asked = {"name": "ci", "role": "reader", "days": "30", "queues": "orders"}
    made = send(admin, "/tokens", **asked)
    assert (made.status_code, made.headers["cache-control"]) == (200, "no-store")
    (secret,) = set(re.findall(r"bly_[\w-]{43}", made.text))
    assert secret not in admin.get("/tokens").text
    assert secret not in str(made.headers)
    token = next(each for each in client.tokens() if each.name == "ci")
    assert (token.role, token.queues) == ("reader", ["orders"])
    assert visiting(guarded, Authorization=f"Bearer {secret}").get("/letters").status_code == 200
    assert send(admin, f"/tokens/{token.id}/revoke").status_code == 303
    for wrong in ({"role": "king"}, {"days": "-1"}, {"name": ""}):
        assert send(admin, "/tokens", **{**asked, **wrong}).status_code == 422, wrong
    for role in ("reader", "agent", "operator"):
        caller = client_as(role)
        assert caller.get("/tokens").status_code == 403
        assert 'href="/tokens"' not in caller.get("/queues").text
        assert send(caller, "/tokens", name="x", role="admin", days="1").status_code == 403
    assert {each.name for each in client.tokens()} == {"admin", "reader", "agent", "operator"}


def test_sink_page_says_what_it_waits_for(browser: TestClient, client: Client) -> None:
    client.put_sink("pager", "log", {}, **BY)
    assert "It waits for letters to die." in browser.get("/sinks").text
    bury(client, [{"n": 1}])
    assert "It waits for a relay to send what is there" in browser.get("/sinks").text
    client.report_sink("pager", failures=1, error="connection refused by pager.example")
    text = browser.get("/sinks").text
    assert "connection refused by pager.example" in text
    assert "it waits until the other side answers" in text


def test_queue_page_pauses_for_a_time_and_shows_the_policy(browser: TestClient, client: Client) -> None:
    client.configure_queue("orders", {"max_attempts": 3, "backoff": "schedule", "schedule": [1, 600], "jitter": "none"})
    shown = browser.get("/queues/orders").text
    assert "1 s, 10 min<" in shown
    assert "3; then it is dead" in shown
    done = send(browser, "/queues/orders/pause", minutes="15", back="/groups/7")
    assert (done.status_code, done.headers["location"]) == (303, "/groups/7")
    until = client.queues()[0].paused_until
    assert until is not None
    assert timedelta(0) < until - datetime.now(UTC) <= timedelta(minutes=15)
    assert "resumes" in browser.get("/queues").text
    for wrong in ("-1", "1e9", "nan", "inf"):
        assert send(browser, "/queues/orders/pause", minutes=wrong).status_code == 422, wrong
    done = send(browser, "/queues/orders/pause", back="//evil.example")
    assert done.headers["location"] == "/queues/orders"
    assert client.queues()[0].paused_until is None


def test_retry_delays_on_the_page_are_those_of_the_database(client: Client, conn: Connection) -> None:
    question = "select extract(epoch from bartleby.retry_delay(q, %s))::float8 from bartleby.queue q"
    for changes in (
        {},
        {"backoff": "fixed", "base": 7},
        {"backoff": "quadratic", "base": 2, "cap": 40},
        {"backoff": "schedule", "schedule": [1, 5, 60]},
        {"backoff": "none"},
        {"backoff": "exponential", "base": 3, "factor": 4, "cap": 100},
        {"backoff": "exponential", "base": 0},
    ):
        client.configure_queue("orders", {**changes, "jitter": "none"})
        found = client.run(policy("orders"))
        assert found is not None
        for attempt in (1, 2, 3, 4, 9, 20_000):
            (expected,) = conn.execute(question, [attempt]).fetchone() or (None,)
            assert found.delay(attempt) == pytest.approx(expected), (changes, attempt)
    assert client.run(policy("nothing")) is None


def test_times_in_sentences_are_utc_in_every_time_zone(
    browser: TestClient, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = client.send("orders", {"n": 1}, delay=86_400)
    assert client.open_breaker("orders", "a test", 0)
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "IST-5:30")
        time.tzset()
        stopped, story = browser.get("/queues/orders").text, browser.get(f"/letters/{sent}").text
    time.tzset()
    assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", stopped), stopped
    assert re.search(r"deferred until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", story), story


def test_bar_of_an_hour_filters_by_that_whole_hour(client: Client, conn: Connection) -> None:
    (one,) = bury(client, [{"n": 1}])
    conn.execute("update bartleby.dead_letter set dead_at = date_trunc('hour', dead_at) + interval '59.9 minutes'")
    ((died,),) = conn.execute("select dead_at from bartleby.dead_letter").fetchall()
    *_, before, last, after = hours([0, 0, 1, 0], died.astimezone(UTC) + timedelta(hours=1))
    assert [each.message_id for each in client.dead_letters(f"status:any {last.filter}")] == [one]
    for empty in (before, after):
        assert not list(client.dead_letters(f"status:any {empty.filter}"))


def parts_of(browser: TestClient, path: str | None) -> Iterator[str]:
    """Yield a page, and the parts that it loads by itself until there are no more."""
    while path:
        yield (text := browser.get(path).text)
        onward = re.search(r'hx-get="(/letters\?[^"]*)" hx-trigger="load,', text)
        path = unescape(onward[1]) if onward else None


def ids_of(parts: list[str]) -> list[int]:
    return [int(each) for text in parts for each in re.findall(r'name="ids" value="(\d+)"', text)]


@pytest.mark.own_database
def test_long_search_is_shown_part_by_part_without_loss_or_repetition(
    browser: TestClient, client: Client, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    rare = []
    for _ in range(5):
        bury(client, [{"n": n} for n in range(3)])
        rare += bury(client, [{"n": 3}], error="rare")
    shorten_searches(conn)
    for sort in ("newest", "oldest", "id", "-id"):
        shown = list(parts_of(browser, f"/letters?filter=error:rare&sort={sort}&show=version"))
        wanted = rare if sort in {"oldest", "id"} else rare[::-1]
        assert ids_of(shown) == wanted, sort
        assert ids_of(shown[:1]) != wanted, sort
        assert all(re.search("Looked (back|up) to ", text) for text in shown[:-1])
        assert "Looked" not in shown[-1]
        assert "<strong>5</strong> found<" in shown[-1]
        assert " found so far<" in shown[0]
        link = re.search(r'<a href="(/letters\?[^"]*)">Look further', shown[0])  # for browsers without scripts
        assert link is not None
        assert "have=" not in link[1]
    *before, last = parts_of(browser, "/letters?filter=error:nobody")
    assert len(before) >= 2
    assert ["No letter fits" in each for each in [*before, last]] == [False] * len(before) + [True]
    monkeypatch.setattr(letters_page, "_PAGE", 3)
    *_, last = shown = list(parts_of(browser, "/letters?filter=error:rare"))
    assert ids_of(shown) == rare[:1:-1]
    onward = re.search(r'rel="next" href="([^"]*)"', last)
    assert onward is not None
    assert "<strong>3+</strong> found " in last
    rest = list(parts_of(browser, unescape(onward[1])))
    assert ids_of(rest) == rare[1::-1]
    assert 'hx-select-oob="#paging"' in rest[0], "the first page has shown the count"
    assert not any("No letter fits" in text for text in rest)


def parse(words: list[str]) -> None:
    """Parse a command line as click does, without running it."""
    command: click.Command = cli
    name, arguments, context = words[0], words[1:], None
    while True:
        context = command.make_context(name, list(arguments), parent=context)
        rest = [*context._protected_args, *context.args]
        if not isinstance(command, click.Group) or not rest:
            return
        found, inner, arguments = command.resolve_command(context, rest)
        assert inner is not None
        name, command = found or name, inner


def test_every_command_that_a_page_offers_can_be_typed(browser: TestClient, dsn: str) -> None:
    with pytest.raises(click.NoSuchOption):
        parse(["bartleby", "sinks", "add", "a", "webhook", "--set", "b=c"])
    with Client(dsn) as client:
        ids = furnish(client)
        client.split_group(ids["group"], "payload.order.currency", "JPY", actor="ana", reason="another bug")
    pages = (
        "/", "/groups", "/groups/{group}", "/letters", "/letters?filter=queue:orders", "/letters/{letter}",
        "/letters/{discarded}", "/letters/{held}", "/letters/{retried}", "/operations", "/operations/{draft}",
        "/operations/{edit}", "/operations/{stopped}", "/queues", "/queues/billing", "/queues/search.index", "/workers",
        "/sinks", "/audit", "/doctor", "/tokens",
    )  # fmt: skip
    texts = [browser.get(path.format(**ids)).text for path in pages]
    texts += [path.read_text() for path in (Path(web.__file__).parent / "templates").glob("*.html")]
    offered = re.findall(r'data-copy="(bartleby [^"]*)"|<code>(bartleby [^<{]*)</code>', "\n".join(texts))
    seen = {unescape("".join(each)) for each in offered}
    assert len(seen) > 50
    for each in sorted(seen):
        try:
            parse(shlex.split(each))
        except click.ClickException as error:
            pytest.fail(f"{each}: {error.format_message()}")
    verbs = {" ".join(shlex.split(each)[1:3]) for each in seen}
    wanted = ("groups split", "groups rules", "workers drain", "tokens revoke", "sinks reconcile", "queues pause")
    assert set(wanted) <= verbs
