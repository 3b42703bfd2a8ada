"""Lists as somebody wants them: columns of what letters carry, groups in heaps, what a queue does, who was told."""

import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import cast

import psycopg
import pytest
from fastapi.testclient import TestClient

from bartleby import Client
from bartleby.events import Sink
from bartleby.evidence import DeadLetter
from bartleby.measures import policy
from bartleby.surfaces.web.pages.columns import cells, chosen, offered
from bartleby.surfaces.web.pages.heaps import heaps
from bartleby.surfaces.web.pages.hearing import heard
from bartleby.surfaces.web.pages.showing import hours
from tests.kit.burying import bury, statuses
from tests.web.conftest import SAME, ClientAs
from tests.web.test_pages_parts import group

NOW = datetime(2026, 11, 16, 3, 0, tzinfo=UTC)


def letter(**facts: object) -> DeadLetter:
    return cast(
        "DeadLetter", SimpleNamespace(**{"queue": "orders", "dead_at": NOW, "raw": None, "raw_headers": None, **facts})
    )


def sink(**facts: object) -> Sink:
    usual = {"created_at": NOW - timedelta(days=1), "types": ["*"], "queues": None, "oldest_waiting_at": None}
    return cast("Sink", SimpleNamespace(**{**usual, **facts}))


def test_a_column_has_what_the_letter_carries_and_no_more() -> None:
    found = letter(
        raw='{"a": {"b": 12345678901234567890.10}, "password": "***", "t": "x\\u0000y"}', reason="terminal", worker=None
    )
    columns = ["payload.a.b", "payload.password", "payload.a.b.c", "headers.tenant", "reason", "worker", "payload.a"]
    assert cells(found, columns) == [
        "12345678901234567890.10", "hidden", "", "", "terminal", "", '{"b": 12345678901234567890.10}',
    ]  # fmt: skip
    assert cells(letter(raw="not json"), ["payload.a"]) == [""]
    assert chosen(["payload.a", "nonsense", "payload.a", "version", f"payload.{'x' * 500}"]) == ["payload.a", "version"]
    assert len(chosen([f"payload.a{n}" for n in range(50)])) == 8
    assert offered([found], ["payload.gone"])[-3:] == ["payload.a.b", "payload.password", "payload.t"]


def test_an_outage_is_one_heap_of_many_queues() -> None:
    lost = [group(id=n, queue=f"q{n}", error_type="Lost", dead=n, deaths_by_hour=[0, n], owner=None) for n in (1, 2, 3)]
    other = group(id=9, queue="q1", error_type="KeyError", dead=4, deaths_by_hour=[1, 1], owner="ana")
    first, second = heaps([other, *lost], "type", "dead")
    assert (first.name, first.dead, first.deaths_by_hour, first.queues) == ("Lost", 6, [0, 6], ["q1", "q2", "q3"])
    assert [each.id for each in first.groups] == [3, 2, 1]
    assert (second.name, second.dead) == ("KeyError", 4)
    assert [each.name for each in heaps([other, *lost], "owner", "last")] == ["ana", "nobody"]
    assert heaps([], "queue", "hour") == []


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, ["told"]),
        ({"oldest_waiting_at": NOW - timedelta(seconds=1)}, ["waiting"]),
        ({"oldest_waiting_at": NOW + timedelta(seconds=1)}, ["told"]),
        ({"created_at": NOW + timedelta(seconds=1)}, ["later"]),
        ({"types": ["group.*"]}, []),
        ({"types": ["dead_letter.*"], "queues": ["mail"]}, []),
        ({"types": ["dead_letter.created"], "queues": ["orders"]}, ["told"]),
    ],
)
def test_a_sink_has_heard_of_a_letter_once_nothing_older_waits(facts: dict[str, object], said: Sequence[str]) -> None:
    assert [known for _, known in heard([sink(**facts)], letter())] == said
    assert heard([sink(**facts)], letter(queue="sink.chat")) == []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"backoff": "fixed", "base": 7},
        {"backoff": "quadratic", "base": 2, "cap": 40},
        {"backoff": "schedule", "schedule": [1, 5, 60]},
        {"backoff": "none"},
        {"backoff": "exponential", "base": 3, "factor": 4, "cap": 100},
        {"backoff": "exponential", "base": 0},
    ],
    ids=str,
)
def test_the_waits_that_are_shown_are_those_of_the_database(
    client: Client, conn: psycopg.Connection[tuple[object, ...]], changes: dict[str, object]
) -> None:
    client.configure_queue("orders", {**changes, "jitter": "none"})
    found = client.run(policy("orders"))
    assert found is not None
    question = "select extract(epoch from bartleby.retry_delay(q, %s))::float8 from bartleby.queue q"
    for attempt in (1, 2, 3, 4, 9, 20_000):
        row = conn.execute(question, [attempt]).fetchone()
        assert row is not None
        assert found.delay(attempt) == pytest.approx(row[0])
    assert client.run(policy("nothing")) is None


def test_a_queue_shows_its_policy_and_nobody_sees_one_of_others(
    browser: TestClient, client: Client, client_as: ClientAs
) -> None:
    client.configure_queue("orders", {"max_attempts": 3, "backoff": "schedule", "schedule": [1, 600], "jitter": "none"})
    shown = browser.get("/queues/orders").text
    assert "1 s, 10 min<" in shown
    assert "3; then it is dead" in shown
    client.create_queue("mail")
    assert client_as("operator", ["mail"]).get("/queues/orders").status_code == 404


def test_a_pause_lasts_as_long_as_it_was_said(browser: TestClient, client: Client) -> None:
    asked = {"reason": "the gateway is down", "minutes": "15", "back": "/groups/7"}
    done = browser.post("/queues/orders/pause", data=asked, headers=SAME)
    assert (done.status_code, done.headers["location"]) == (303, "/groups/7")
    until = client.queues()[0].paused_until
    assert until is not None
    assert timedelta(minutes=14) < until - datetime.now(UTC) <= timedelta(minutes=15)
    assert "resumes" in browser.get("/queues").text
    for wrong in ("-1", "1e9", "nan", "inf"):
        answer = browser.post("/queues/orders/pause", data={"reason": "x", "minutes": wrong}, headers=SAME)
        assert answer.status_code == 422, wrong
    done = browser.post("/queues/orders/pause", data={"reason": "longer", "back": "//evil.example"}, headers=SAME)
    assert done.headers["location"] == "/queues/orders"
    assert client.queues()[0].paused_until is None


def test_a_letter_goes_into_another_queue_by_a_plan(browser: TestClient, client: Client) -> None:
    (letter_id,) = bury(client, [{"n": 1}])
    client.create_queue("orders.slow")
    asked = {"reason": "needs a long lease", "payload": '{"n": 1}', "to": "orders.slow"}
    made = browser.post(f"/letters/{letter_id}/edit", data=asked, headers=SAME)
    plan = client.replays(limit=1)[0]
    assert made.headers["location"] == f"/operations/{plan.id}"
    assert (plan.target, plan.patch, plan.items, plan.status) == ("orders.slow", None, 1, "draft")
    assert f"bartleby repro {letter_id}" in browser.get(f"/letters/{letter_id}").text


def test_after_a_deed_the_list_is_as_it_was_and_the_audit_undoes_it(browser: TestClient, client: Client) -> None:
    letters = bury(client, [{"n": n} for n in range(2)], key="order-1")
    chosen = {"deed": "discard", "filter": "key:order-1", "ids": [str(each) for each in letters]}
    assert 'name="back" value="key:order-1"' in browser.post("/letters/confirm", data=chosen, headers=SAME).text
    asked = {**chosen, "filter": "", "back": "key:order-1", "expected": "2", "reason": "spam"}
    done = browser.post("/letters/deed", data=asked, headers=SAME)
    assert done.headers["location"] == "/letters?filter=key%3Aorder-1"
    assert statuses(client, letters) == ["discarded"] * 2
    lines = client.audit_log(action="letter.discard")
    for path in ("/audit", "/"):
        assert f'name="request_id" value="{lines[0].request_id}"' in browser.get(path).text
    back = {"request_id": str(lines[0].request_id), "back": "/letters?filter=key%3Aorder-1"}
    assert browser.post("/undo", data=back, headers=SAME).headers["location"] == "/letters?filter=key%3Aorder-1"
    assert statuses(client, letters) == ["dead"] * 2
    for foreign in ("//evil.example", "/letters?filter=a&x=//evil", "https://evil.example/letters?filter=a"):
        gone = browser.post("/undo", data={**back, "back": foreign}, headers=SAME)
        assert gone.headers["location"] == "/letters"


def test_a_plan_that_nobody_runs_says_so(
    browser: TestClient, client: Client, conn: psycopg.Connection[tuple[object, ...]]
) -> None:
    bury(client, [{"n": 1}])
    plan = client.plan_replay("queue:orders", actor="ana", reason="mended")
    client.start_replay(plan, actor="ana", reason="go")
    assert "Nobody has taken a letter" not in browser.get(f"/operations/{plan}").text
    conn.execute("update bartleby.replay set started_at = started_at - interval '1 minute'")
    conn.commit()
    assert "Nobody has taken a letter" in browser.get(f"/operations/{plan}").text


def test_who_comes_second_is_told_who_has_started_the_plan(
    browser: TestClient, client: Client, client_as: ClientAs
) -> None:
    bury(client, [{"n": 1}])
    plan = client.plan_replay("queue:orders", actor="ana", reason="mended")
    found = client.find_replay(plan)
    assert found is not None
    asked = {"reason": "go", "hash": found.hash}
    client.start_replay(plan, actor="benedikta", reason="the rates are there")
    second = browser.post(f"/operations/{plan}/start", data=asked, headers=SAME)
    assert second.status_code == 409
    assert "started by benedikta" in second.text
    # whoever is held to some queues may not read the audit
    held = client_as("operator", ["orders"]).post(f"/operations/{plan}/start", data=asked, headers=SAME)
    assert held.status_code == 409
    assert "benedikta" not in held.text


def test_versions_of_a_large_group_say_of_how_many_letters_they_are(browser: TestClient, client: Client) -> None:
    bury(client, [{"n": n} for n in range(250)])
    path = f"/groups/{client.groups()[0].id}"
    assert "of the newest" not in browser.get(path).text
    bury(client, [{"n": 250}])
    assert "of the newest 250<" in browser.get(path).text


def test_each_day_of_a_story_has_its_date_once(
    browser: TestClient, client: Client, conn: psycopg.Connection[tuple[object, ...]]
) -> None:
    (letter_id,) = bury(client, [{"n": 1}])
    conn.execute("update bartleby.dead_letter set created_at = '2026-01-05 23:00Z'")
    conn.execute("update bartleby.attempt set failed_at = '2026-01-07 01:00Z'")
    conn.commit()
    story = browser.get(f"/letters/{letter_id}").text.partition('id="story"')[2].partition("</ol>")[0]
    days = re.findall(r'<time class="day"[^>]*?( hidden)?>([-\d]+)</time>', story)
    assert days == [("", "2026-01-05"), ("", "2026-01-07")]
    client.hold([letter_id], actor="ana", reason="one")
    client.hold([letter_id], on=False, actor="ana", reason="two")
    story = browser.get(f"/letters/{letter_id}").text.partition('id="story"')[2].partition("</ol>")[0]
    assert re.findall(r'class="day"[^>]*?( hidden)?>', story) == ["", "", "", " hidden"]


def test_times_in_sentences_are_utc_and_say_so_whatever_zone_the_console_runs_in(
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


def test_a_bar_finds_also_what_died_in_the_last_minute_of_its_hour(
    client: Client, conn: psycopg.Connection[tuple[object, ...]]
) -> None:
    (one,) = bury(client, [{"n": 1}])
    conn.execute("update bartleby.dead_letter set dead_at = date_trunc('hour', dead_at) + interval '59.9 minutes'")
    conn.commit()
    (row,) = conn.execute("select dead_at from bartleby.dead_letter").fetchall()
    died = cast("datetime", row[0])
    *_, before, last, after = hours([0, 0, 1, 0], died.astimezone(UTC) + timedelta(hours=1))
    assert [each.message_id for each in client.dead_letters(f"status:any {last.filter}")] == [one]
    for empty in (before, after):
        assert not list(client.dead_letters(f"status:any {empty.filter}"))


def test_names_of_strangers_are_texts_in_columns_and_heaps(browser: TestClient, client: Client) -> None:
    evil = "<img src=x onerror=alert(1)>"
    bury(client, [{"a": evil, evil: 1}], kind=evil, error=evil)
    client.acknowledge_group(client.groups(limit=1)[0].id, owner=evil, actor=evil, reason=evil)
    for path, query in (
        ("/groups", {"by": "type"}),
        ("/groups", {"by": "owner"}),
        ("/letters", {"show": ["payload.a", f"payload.{evil}"]}),
        ("/queues/orders", {}),
        ("/audit", {}),
    ):
        text = browser.get(path, params=query).text
        assert evil not in text
        assert "&lt;img src=x" in text, path
