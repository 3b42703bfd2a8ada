"""Pages and forms of the console over HTTP, without a browser."""

import json
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
from fastapi.testclient import TestClient

from bartleby import Client
from bartleby.measures import policy
from bartleby.surfaces import web
from bartleby.surfaces.cli import cli
from bartleby.surfaces.web.pages import letters as letters_page
from bartleby.surfaces.web.pages.showing import hours
from bartleby.surfaces.web.pages.words import FIELDS
from tests.kit.api import SAME, shorten_searches
from tests.kit.clock import move_clock
from tests.kit.dead_letters import bury, statuses
from tests.kit.shop import fill_shop
from tests.kit.worker import present
from tests.web.conftest import ClientAs

BY: dict[str, Any] = {"actor": "ana", "reason": "testing"}
HTMX = {**SAME, "HX-Request": "true"}
Connection = psycopg.Connection[Any]


def send(browser: TestClient, path: str, headers: dict[str, str] = SAME, /, **data: Any) -> Any:
    """Post a form, with a reason unless there is one."""
    return browser.post(path, data={"reason": "a test", **data}, headers=headers)


def test_notice_of_an_action_is_shown_once_on_the_next_whole_page(browser: TestClient, client: Client) -> None:
    (letter,) = bury(client, [{"n": 1}])
    path, notice = f"/letters/{letter}", f"Letter {letter} is discarded."
    assert send(browser, f"{path}/discard", reason="<b>spam</b>").headers["location"]
    new = "/letters/new?since=2026-01-01T00:00:00Z"
    for part, target in (("/", "section#verdict"), (path, "div#page"), (new, "div#newer")):
        answer = browser.get(part, headers={"HX-Request": "true", "HX-Target": target})
        assert (answer.status_code, notice in answer.text, "set-cookie" in answer.headers) == (200, False, False), part
    shown, later = (browser.get(path, headers={"HX-Request": "true", "HX-Target": "main#main"}).text for _ in range(2))
    assert [text in shown for text in (notice, ">Undo<", "<b>spam</b>")] == [True, True, False]
    assert notice not in later
    for forged in ("nonsense", "eyJ0ZXh0IjogIjxzY3JpcHQ-IiwgInRvbmUiOiAiZ29vZCJ9", "W10="):
        browser.cookies.set("bartleby_told", forged)
        answer = browser.get("/queues")
        assert (answer.status_code, "<script>" in answer.text.partition("</head>")[2]) == (200, False)
        browser.cookies.clear()


def test_invalid_form_is_a_notice_or_an_error_page_in_plain_words(browser: TestClient, client: Client) -> None:
    letters = bury(client, [{"n": n} for n in range(3)])
    path = f"/letters/{letters[0]}"
    for headers in (SAME, HTMX):
        answer = browser.post(f"{path}/discard", headers=headers)
        assert (answer.status_code, "Reason: it is missing" in answer.text) == (422, True)
        assert "ody" not in answer.text.partition('class="notice bad"')[2].partition("</div>")[0]
    answer = send(browser, "/letters/deed", deed="hold", reason="x" * 2000, expected="many", ids=["a", "b"])
    number = "it has to be a whole number"
    for words in ("Reason: it is too long", f"Expected: {number}", f"Ids: {number}"):
        assert answer.text.count(words) == 1, words
    notice, whole = send(browser, f"{path}/edit", HTMX, payload="{"), send(browser, f"{path}/edit", payload="{")
    assert (notice.status_code, notice.headers["hx-retarget"], "not JSON" in notice.text) == (422, "#notices", True)
    assert (whole.status_code, "<h1>" in whole.text, "not JSON" in whole.text) == (422, True, True)
    for refused in (browser.get("/groups/999999"), send(browser, "/queues/nothing/pause", HTMX)):
        assert (refused.status_code, refused.headers["x-request-id"] in refused.text) == (404, True)
    for path, form in (  # an empty filter never means every letter
        ("/letters/confirm", {"deed": "discard", "filter": " "}),
        ("/operations", {"filter": ""}),
        ("/letters/deed", {"deed": "discard", "filter": "", "expected": "3"}),
    ):
        assert send(browser, path, **form).status_code == 422, path
    assert statuses(client, letters) == ["dead"] * 3


def test_all_matching_letters_are_planned_or_discarded_only_if_as_many_as_shown(
    browser: TestClient, client: Client
) -> None:
    letters = bury(client, [{"n": n} for n in range(60)])
    assert 'data-matching="60"' in browser.get("/letters?filter=queue:orders").text
    ticked = {"filter": "queue:orders", "ids": [str(each) for each in letters[:50]]}
    every = {**ticked, "matching": "true", "looked": "59"}
    made = send(browser, "/operations", **every)
    plan = client.replays(limit=1)[0]
    assert (made.status_code, plan.items, plan.filter) == (303, 60, "queue:orders")
    shown = browser.get(made.headers["location"]).text
    assert "60 letters are frozen in this plan; 59 fitted when you looked." in shown
    assert "Discard 50 letters?" in send(browser, "/letters/confirm", **ticked, deed="discard").text
    asked = send(browser, "/letters/confirm", **every, deed="discard").text
    assert 'name="expected" value="60"' in asked
    bury(client, [{"n": 60}])
    assert send(browser, "/letters/deed", deed="discard", filter="queue:orders", expected="60").status_code == 409


def test_many_letters_are_replayed_or_discarded_only_if_their_number_is_typed(
    browser: TestClient, client: Client
) -> None:
    bury(client, [{"n": n} for n in range(120)])
    plan = present(client.find_replay(client.plan_replay("queue:orders", **BY)))
    start: tuple[str, dict[str, str]] = (f"/operations/{plan.id}/start", {"hash": plan.hash})
    for path, form in (start, ("/letters/deed", {"deed": "discard", "filter": "queue:orders", "expected": "120"})):
        refused = send(browser, path, **form, typed="12")
        assert (refused.status_code, "type 120" in refused.text) == (422, True), path
    assert (client.replays()[0].status, client.queues()[0].dead) == ("draft", 120)
    assert "To be sure, type 120" in browser.get(f"/operations/{plan.id}").text
    assert send(browser, start[0], **start[1], typed="120").is_redirect


def test_action_returns_to_its_list_and_the_audit_page_undoes_it(browser: TestClient, client: Client) -> None:
    letters = bury(client, [{"n": n} for n in range(2)], key="order-1")
    chosen: dict[str, Any] = {"deed": "discard", "ids": [str(each) for each in letters]}
    asked = send(browser, "/letters/confirm", **chosen, filter="key:order-1").text
    assert 'name="back" value="key:order-1"' in asked
    back = "/letters?filter=key%3Aorder-1"
    done = send(browser, "/letters/deed", **chosen, filter="", back="key:order-1", expected="2")
    assert (done.headers["location"], statuses(client, letters)) == (back, ["discarded"] * 2)
    request = client.audit_log(action="letter.discard")[0].request_id
    for path in ("/audit", "/"):
        assert f'name="request_id" value="{request}"' in browser.get(path).text
    assert send(browser, "/undo", request_id=request, back=back).headers["location"] == back
    assert statuses(client, letters) == ["dead"] * 2
    for foreign in ("//evil.example", "/letters?filter=a&x=//evil", "https://evil.example/letters?filter=a"):
        assert send(browser, "/undo", request_id=request, back=foreign).headers["location"] == "/letters"
    client.hold(letters, **BY)
    listed = browser.get("/letters?filter=held:yes").text
    assert ("Release 2 …" in listed, 'value="hold"' in listed) == (True, False)
    send(browser, "/letters/deed", deed="release", filter="held:yes", expected="2")
    assert client.count_letters("held:yes").letters == 0


def test_forms_of_letters_groups_sinks_and_workers_do_what_they_say(browser: TestClient, client: Client) -> None:
    letter, _ = bury(client, [1, 2])
    client.put_sink("bus", "log", {}, **BY)
    client.report_worker("web-1", queues=["orders"], host="node", pid=1, concurrency=1)
    number = client.groups()[0].id

    def group_after(action: str, **form: str) -> str:
        assert send(browser, f"/groups/{number}/{action}", **form).headers["location"] == f"/groups/{number}"
        return present(client.group(number)).state

    for action, form, status, held in (
        ("hold", {}, "dead", True),
        ("hold", {"on": "false"}, "dead", False),
        ("discard", {}, "discarded", False),
        ("discard", {}, "discarded", False),
        ("restore", {}, "dead", False),
        ("replay", {}, "replayed", False),
    ):
        done = send(browser, f"/letters/{letter}/{action}", **form)
        found = present(client.dead_letter(letter))
        assert (done.headers["location"], found.status, found.held_at is not None) == (
            f"/letters/{letter}",
            status,
            held,
        )
    assert group_after("acknowledge", link="https://bugs.example/1") == "acknowledged"
    assert group_after("mute", hours="2") == "muted"
    assert group_after("resolve", version="2.0") == "resolved"
    assert group_after("reopen") == "open"
    assert send(browser, f"/groups/{number}/mute", hours="1000").status_code == 422
    for verb, state in (("pause", "paused"), ("resume", "working")):
        assert send(browser, f"/sinks/bus/{verb}").headers["location"] == "/sinks"
        assert client.sinks()[0].state == state
    assert send(browser, "/sinks/bus/remove").status_code == 422
    assert send(browser, "/workers/drain", name="web-1").headers["location"] == "/workers"
    assert client.workers()[0].state == "draining"


def test_letter_page_has_its_story_and_edits_without_revealed_secrets(
    browser: TestClient, client: Client, conn: Connection
) -> None:
    (letter,) = bury(client, [{"password": "hunter2"}])
    path = f"/letters/{letter}"
    conn.execute("update bartleby.dead_letter set created_at = '2026-01-05 23:00Z'")
    conn.execute("update bartleby.attempt set failed_at = '2026-01-07 01:00Z'")
    move_clock(conn).half_past()  # far from midnight
    client.hold([letter], **BY)
    held = browser.get(path).text
    assert "It is on hold: neither replayed nor discarded" in held
    assert "replay it" not in held
    client.hold([letter], on=False, **BY)
    story = browser.get(path).text.partition('id="story"')[2].partition("</ol>")[0]
    days = re.findall(r'<time class="day"[^>]*?( hidden)?>([-\d]+)</time>', story)
    assert [day for _, day in days[:2]] == ["2026-01-05", "2026-01-07"]
    assert [hidden for hidden, _ in days] == ["", "", "", " hidden"], "a day is shown once"
    shown = send(browser, f"{path}/reveal").text
    edited = re.search(r'<textarea name="payload"[^>]*>(.*?)</textarea>', shown, re.DOTALL)
    assert "hunter2" in shown
    assert edited is not None
    assert "hunter2" not in edited[1], "it would be in the patch as if it had been changed"
    client.create_queue("orders.slow")
    made = send(browser, f"{path}/edit", payload='{"password": "***"}', to="orders.slow")
    plan = client.replays(limit=1)[0]
    assert made.headers["location"] == f"/operations/{plan.id}"
    assert (plan.target, plan.patch, plan.items, plan.status) == ("orders.slow", None, 1, "draft")


def test_group_is_split_and_merged_and_a_merge_is_taken_back(browser: TestClient, client: Client) -> None:
    bury(client, [{"currency": each} for each in ["JPY"] * 249 + ["EUR"]], error="'a'")
    first = client.groups()[0].id
    page = browser.get(f"/groups/{first}").text
    assert ('name="looked" value="250"' in page, "of the newest" in page) == (True, False)
    bury(client, [{"currency": "EUR"}], error="'a'")
    assert "of the newest 250<" in browser.get(f"/groups/{first}").text
    made = send(browser, f"/groups/{first}/split", path="payload.currency", value='"EUR"').headers["location"]
    client.regroup()
    second = made.removeprefix("/groups/")
    assert send(browser, f"/groups/{first}/merge", into=second).headers["location"] == made
    rule = client.group_rules()[0].id
    assert f"Take back rule {rule}" in browser.get(made).text
    assert send(browser, f"{made}/rules/{rule}/remove").status_code == 303
    assert rule not in {each.id for each in client.group_rules()}
    client.discard([each.message_id for each in client.dead_letters("queue:orders", limit=500)], **BY)
    assert "It has no dead letters any more." in browser.get(made).text


def test_plan_with_changed_letters_starts_only_if_drift_is_accepted_and_is_steered(
    browser: TestClient, client: Client, client_as: ClientAs, conn: Connection
) -> None:
    letters = bury(client, [{"n": n} for n in range(3)])
    client.plan_replay("queue:orders", **BY)
    plan = client.replays(limit=1)[0]
    path = f"/operations/{plan.id}"
    client.discard(letters[:1], **BY)
    assert 'name="accept_drift"' in browser.get(path).text
    refused = send(browser, f"{path}/start", hash=plan.hash)
    assert (refused.status_code, "tick that it may run all the same" in refused.text) == (409, True)
    assert send(browser, f"{path}/start", hash=plan.hash, accept_drift="true").is_redirect
    assert "Nobody has taken a letter" not in browser.get(path).text
    conn.execute("update bartleby.replay set started_at = started_at - interval '1 minute'")
    assert "Nobody has taken a letter" in browser.get(path).text
    # a second start names the first operator, unless the caller may not read the audit log
    starter = f"started by {client.audit_log(action='replay.start')[0].actor}"
    for caller, named in ((browser, True), (client_as("operator", ["orders"]), False)):
        second = send(caller, f"{path}/start", hash=plan.hash)
        assert (second.status_code, starter in second.text, "started by" in second.text) == (409, named, named)
    for verb, button, state in (
        ("pause", f"Pause replay {plan.id}", "paused"),
        ("resume", "Resume: 3 letters to go", "running"),
        ("cancel", f"Cancel replay {plan.id}", "cancelled"),
    ):
        assert button in browser.get(path).text
        assert send(browser, f"{path}/{verb}").is_redirect
        assert client.replays(limit=1)[0].status == state


def test_remaining_letters_of_a_plan_with_a_patch_are_planned_again(browser: TestClient, client: Client) -> None:
    letters = bury(client, [{"n": n, "exact": 0.1} for n in range(8)])
    patch = [{"op": "replace", "path": "/n", "value": 9}]
    form = {"ids": [str(each) for each in letters], "patch": json.dumps(patch)}
    path = send(browser, "/operations", **form, canary="2", rate="1e6", tolerance="0.25").headers["location"]
    first = client.replays(limit=1)[0].id
    draft = browser.get(path).text
    assert "2 go first; if more than 25 % of them die again, the rest is left alone" in draft
    assert draft.count('<ins class="new-text">9</ins>') == 5, "of five letters"
    assert send(browser, f"{path}/again").status_code == 422
    client.start_replay(first, **BY)
    client.advance_replays()
    bury(client, [], kind="TypeError", error="still broken")
    client.advance_replays()
    shown = browser.get(path).text
    group = next(each.id for each in client.groups(limit=10) if each.error_type == "TypeError")
    for words in (
        "It stopped by itself: too many died again.", "6 left dead", "Plan a replay of 6 letters", "still broken</td>",
        f'href="/groups/{group}">group {group}: TypeError, 2</a>',
    ):  # fmt: skip
        assert words in shown
    assert "waiting" not in re.sub(r"<[^>]*>", "", shown.partition("<main")[2])
    made = send(browser, f"{path}/again")
    second = client.replays(limit=1)[0]
    assert made.headers["location"] == f"/operations/{second.id}"
    assert (second.status, second.items, second.patch) == ("draft", 6, patch)
    assert (second.rate, second.canary, second.tolerance) == (1e6, 2, 0.25)


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


def test_token_is_shown_once_and_only_admins_manage_tokens(client: Client, client_as: ClientAs) -> None:
    admin, operator = client_as("admin"), client_as("operator")
    asked = {"name": "ci", "role": "reader", "days": "30", "queues": "orders"}
    made = send(admin, "/tokens", **asked)
    assert (made.status_code, made.headers["cache-control"]) == (200, "no-store")
    (secret,) = set(re.findall(r"bly_[\w-]{43}", made.text))
    assert secret not in f"{made.headers}{admin.get('/tokens').text}"
    token = next(each for each in client.tokens() if each.name == "ci")
    assert (token.role, token.queues) == ("reader", ["orders"])
    assert send(admin, f"/tokens/{token.id}/revoke").status_code == 303
    for wrong in ({"role": "king"}, {"days": "-1"}, {"name": ""}):
        assert send(admin, "/tokens", **{**asked, **wrong}).status_code == 422, wrong
    assert [operator.get("/tokens").status_code, send(operator, "/tokens", **asked).status_code] == [403, 403]
    assert 'href="/tokens"' not in operator.get("/queues").text


def test_pages_of_queues_sinks_workers_and_filters_say_what_they_wait_for(
    browser: TestClient, client: Client, conn: Connection
) -> None:
    client.configure_queue("orders", {"max_attempts": 3, "backoff": "schedule", "schedule": [1, 600], "jitter": "none"})
    client.put_sink("pager", "log", {}, **BY)
    for name in ("here", "gone"):
        client.report_worker(name, queues=["orders"], host="node", pid=1, concurrency=1)
    conn.execute("update bartleby.worker set seen_at = seen_at - interval '1 minute' where name = 'gone'")
    waiting = browser.get("/sinks").text
    bury(client, [{"n": 1}])
    relay = browser.get("/sinks").text
    client.report_sink("pager", failures=1, error="connection refused by pager.example")
    for page, words in (
        (waiting, ["It waits for letters to die."]),
        (relay, ["It waits for a relay to send what is there"]),
        ("/sinks", ["connection refused by pager.example", "it waits until the other side answers"]),
        ("/queues/orders", ["1 s, 10 min<", "3; then it is dead", "gone"]),
        ("/workers", ["Drain here<", "it hears nobody"]),
        (
            "/letters?filter=queue:orders age:1x",
            [f"queue:orders age:1x\n{' ' * len('queue:orders age:')}^", "aria-invalid"],
        ),
    ):
        text = browser.get(page).text if page.startswith("/") else page
        assert [each for each in words if each not in text] == [], page
    assert "Drain gone<" not in browser.get("/workers").text


def test_queue_is_paused_for_a_time_from_its_group_and_resumed(browser: TestClient, client: Client) -> None:
    bury(client, [1])
    group = f"/groups/{client.groups()[0].id}"
    assert 'action="/queues/orders/pause"' in browser.get(group).text
    began = datetime.now(UTC)
    done = send(browser, "/queues/orders/pause", minutes="15", back=group)
    assert (done.status_code, done.headers["location"]) == (303, group)
    assert 'action="/queues/orders/resume"' in browser.get(group).text
    until = present(client.queues()[0].paused_until)
    assert began + timedelta(minutes=15) <= until <= datetime.now(UTC) + timedelta(minutes=15)
    assert "resumes" in browser.get("/queues").text
    for wrong in ("-1", "1e9", "nan", "inf"):
        assert send(browser, "/queues/orders/pause", minutes=wrong).status_code == 422, wrong
    done = send(browser, "/queues/orders/pause", back="//evil.example")
    assert done.headers["location"] == "/queues/orders"
    assert client.queues()[0].paused_until is None


def test_retry_delays_on_the_page_are_those_of_the_database(client: Client, conn: Connection) -> None:
    question = "select extract(epoch from bartleby.retry_delay(q, %s))::float8 from bartleby.queue q"
    for changes in (
        {"backoff": "fixed", "base": 7},
        {"backoff": "quadratic", "base": 2, "cap": 40},
        {"backoff": "schedule", "schedule": [1, 5, 60]},
        {"backoff": "none"},
        {"backoff": "exponential", "base": 3, "factor": 4, "cap": 100},
        {"backoff": "exponential", "base": 0},
    ):
        client.configure_queue("orders", {**changes, "jitter": "none"})
        found = present(client.run(policy("orders")))
        for attempt in (1, 2, 3, 4, 9, 20_000):
            (expected,) = conn.execute(question, [attempt]).fetchone() or (None,)
            assert found.delay(attempt) == pytest.approx(expected), (changes, attempt)


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
        assert " found so far<" in shown[0]
        assert ("Looked" in shown[-1], "<strong>5</strong> found<" in shown[-1]) == (False, True)
        link = re.search(r'<a href="(/letters\?[^"]*)">Look further', shown[0])  # for browsers without scripts
        assert link is not None
        assert "have=" not in link[1]
    *before, last = parts_of(browser, "/letters?filter=error:nobody")
    assert len(before) >= 2
    assert ["No letter fits" in each for each in [*before, last]] == [False] * len(before) + [True]
    monkeypatch.setattr(letters_page, "_PAGE", 3)
    *_, last = shown = list(parts_of(browser, "/letters?filter=error:rare"))
    assert ids_of(shown) == rare[:1:-1]
    assert "<strong>3+</strong> found " in last
    onward = present(re.search(r'rel="next" href="([^"]*)"', last))
    rest = list(parts_of(browser, unescape(onward[1])))
    assert ids_of(rest) == rare[1::-1]
    assert not any("No letter fits" in text for text in rest)


def parse(command: click.Command, words: list[str], parent: click.Context | None = None) -> None:
    """Parse a command line as click does, without running it."""
    context = command.make_context(words[0], words[1:], parent=parent)
    rest = [*context._protected_args, *context.args]
    if isinstance(command, click.Group) and rest:
        name, inner, arguments = command.resolve_command(context, rest)
        assert inner is not None
        parse(inner, [name or words[0], *arguments], context)


def test_every_command_that_a_page_offers_can_be_typed(browser: TestClient, dsn: str) -> None:
    with pytest.raises(click.NoSuchOption):
        parse(cli, ["bartleby", "sinks", "add", "a", "webhook", "--set", "b=c"])
    with Client(dsn) as client:
        ids = fill_shop(client)
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
            parse(cli, shlex.split(each))
        except click.ClickException as error:
            pytest.fail(f"{each}: {error.format_message()}")
