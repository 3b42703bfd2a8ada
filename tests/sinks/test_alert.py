"""Events for people: what is said, and what Slack, PagerDuty and a plain receiver make of it."""

import json
from typing import Any

import pytest

from bartleby.sinks.alert import action, alert, incident, sentence, severity

TITLE = {"group_id": 3, "title": "CardDeclined: the bank declined", "queue": "orders", "fingerprint": "f00"}
LETTER = {
    "message_id": 17,
    "queue": "orders",
    "group_id": 3,
    "error_type": "CardDeclined",
    "error": "the bank declined",
}


def event(kind: str, /, **data: Any) -> dict[str, Any]:
    subject = f"message/{data['message_id']}" if "message_id" in data else f"group/{data.get('group_id', 3)}"
    return {
        "specversion": "1.0",
        "id": "0a1b2c3d.5",
        "source": "urn:bartleby:0a1b2c3d-0000-4000-8000-000000000000",
        "type": f"io.bartleby.{kind}",
        "subject": subject,
        "time": "2026-01-01T00:00:00.000000Z",
        "data": data,
    }


SENTENCES = [
    (
        event("dead_letter.created", **LETTER, reason="exhausted", attempts=5),
        'orders: message 17 is dead after 5 attempts: "CardDeclined: the bank declined"',
    ),
    (
        event("dead_letter.created", message_id=17, queue="orders", reason="crashed", attempts=1),
        "orders: message 17 killed its worker too often and is dead",
    ),
    (event("dead_letter.created", message_id=17), "message 17 is dead"),
    (
        event("dead_letter.died_again", **LETTER, attempts=1),
        'orders: message 17 was replayed and died again after 1 attempt: "CardDeclined: the bank declined"',
    ),
    (
        event("dead_letter.replayed", **LETTER, actor="ana", comment="fixed in 2.4.1"),
        "orders: message 17 is replayed by ana: fixed in 2.4.1",
    ),
    (event("dead_letter.resolved", **LETTER), "orders: message 17 was handled after all"),
    (
        event("dead_letter.discarded", **LETTER, actor="ana", comment="test data"),
        "orders: message 17 was discarded by ana: test data",
    ),
    (event("dead_letter.restored", **LETTER), "orders: message 17 is a dead letter again"),
    (
        event("dead_letter.expired", queue="orders", unresolved=1200),
        "orders: the evidence of 1,200 dead letters expired before anybody took care of them",
    ),
    (
        event("dead_letter.payload_expired", queue="orders", unresolved=1),
        "orders: the payloads of 1 dead letter expired before anybody took care of them",
    ),
    (event("group.opened", **TITLE), 'orders: new: "CardDeclined: the bank declined"'),
    (
        event("group.escalated", **TITLE, dead=1280),
        'orders: already 1,280 dead letters of "CardDeclined: the bank declined"',
    ),
    (
        event("group.escalated", **TITLE, dead=11),
        'orders: already 11 dead letters of "CardDeclined: the bank declined"',
    ),
    (
        event("group.regressed", **TITLE, resolved_version="2.4.1"),
        'orders: "CardDeclined: the bank declined" is back, though it was resolved in 2.4.1',
    ),
    (event("group.resolved", **TITLE), 'orders: "CardDeclined: the bank declined" is resolved'),
    (event("group.drained", **TITLE), 'orders: no dead letter of "CardDeclined: the bank declined" is left'),
    (
        event("breaker.opened", queue="orders", cause="92% of 50 attempts failed"),
        "orders: breaker is open, only probes run: 92% of 50 attempts failed",
    ),
    (event("breaker.closed", queue="orders"), "orders: breaker is closed, all messages run"),
    (
        event("replay.finished", queue="orders", replay_id=5, items=1395, done=1390, died_again=5, skipped=0),
        "orders: replay 5 of 1,395 finished; 1,390 done, 5 died again",
    ),
    (
        event("replay.aborted", replay_id=5, items=395, cause="3 of 10 died again", died_again=3),
        "replay 5 of 395 stopped by itself: 3 of 10 died again; 3 died again",
    ),
    (event("replay.cancelled", replay_id=5), "replay 5 was cancelled"),
    (event("sink.degraded", sink="bus", error="connection refused"), "sink bus takes nothing: connection refused"),
    (event("sink.recovered", sink="bus", seconds=615.2), "sink bus works again, after 0:10:15"),
    (event("sink.recovered", sink="bus", seconds=90, removed=True), "sink bus was removed, after 0:01:30"),
    (event("sink.test", sink="ops", kind="webhook"), "this is a test of sink ops, nothing has happened"),
    (event("moon.full"), "io.bartleby.moon.full group/3"),
]


@pytest.mark.parametrize(
    ("told", "expected"), SENTENCES, ids=lambda each: each["type"] if isinstance(each, dict) else ""
)
def test_sentences(told: dict[str, Any], expected: str) -> None:
    assert sentence(told) == expected


@pytest.mark.parametrize(("told", "_"), SENTENCES, ids=lambda each: each["type"] if isinstance(each, dict) else "")
def test_every_event_makes_an_alert_that_pagerduty_takes(told: dict[str, Any], _: object) -> None:
    body = json.loads(json.dumps(alert(told, "key")))
    assert body["routing_key"] == "key"
    assert body["event_action"] in {"trigger", "acknowledge", "resolve"}
    assert 0 < len(body["dedup_key"]) <= 255
    assert body["payload"]["severity"] in {"critical", "error", "warning", "info"}
    assert 0 < len(body["payload"]["summary"]) <= 1024
    assert body["payload"]["source"]
    assert body["text"]
    assert body["event"] == told


def test_a_group_is_one_incident_from_beginning_to_end() -> None:
    story = [
        event("group.opened", **TITLE),
        event("dead_letter.created", **LETTER),
        event("group.escalated", **TITLE, dead=10),
        event("dead_letter.replayed", **LETTER),
        event("group.drained", **TITLE),
        event("group.regressed", **TITLE),
        event("group.resolved", **TITLE),
    ]
    assert len({incident(each) for each in story}) == 1
    assert [action(each) for each in story] == [
        "trigger",
        "trigger",
        "trigger",
        "acknowledge",
        "resolve",
        "trigger",
        "resolve",
    ]


def test_other_things_are_incidents_of_their_own() -> None:
    queue = {"subject": "queue/orders"}
    told = [
        event("group.opened", **TITLE),
        {**event("breaker.opened", queue="orders"), **queue},
        {**event("dead_letter.expired", queue="orders", unresolved=3), **queue},
        {**event("sink.degraded", sink="bus"), "subject": "sink/bus"},
        {**event("replay.aborted", replay_id=5), "subject": "replay/5"},
        {**event("group.opened", **TITLE), "source": "urn:bartleby:another"},
    ]
    assert len({incident(each) for each in told}) == len(told)
    closed = {**event("breaker.closed", queue="orders"), **queue}
    assert incident(closed) == incident(told[1])
    assert action(closed) == "resolve"


def test_a_test_opens_no_incident_and_ends_none_that_is_real() -> None:
    """Nobody would close it. PagerDuty answers 202 to the end of an incident that it does not know."""
    here = {"subject": "sink/ops"}
    told = {**event("sink.test", sink="ops", kind="webhook"), **here}
    assert (action(told), severity(told)) == ("resolve", "info")
    assert incident(told) != incident({**event("sink.degraded", sink="ops", error="gone"), **here})
    assert alert(told)["text"] == "this is a test of sink ops, nothing has happened"


def test_severity_follows_what_happened() -> None:
    expected = {"group.escalated": "critical", "dead_letter.created": "error", "group.resolved": "info"}
    assert {each: severity(event(each)) for each in expected} == expected


def test_words_of_an_error_do_not_command_slack() -> None:
    letter = {**LETTER, "error": "<!channel> & <https://evil.example|click here>"}
    body = alert(event("dead_letter.created", **letter))
    assert "<" not in body["text"]
    assert ">" not in body["text"]
    assert "&lt;!channel&gt; &amp; &lt;https" in body["text"]
    assert "<!channel>" in body["payload"]["summary"]


def test_words_of_an_error_do_not_steer_a_terminal() -> None:
    letter = {**LETTER, "error": "one\r\ntwo\x1b[31mred\x1b]0;title\x07 \u202eturned\u2028end"}
    said = sentence(event("dead_letter.created", **letter))
    assert said.isprintable()
    assert "one two [31mred" in said


def test_long_words_are_cut() -> None:
    letter = {**LETTER, "queue": "q" * 5000, "error": "x" * 100_000}
    said = sentence(event("dead_letter.created", **letter))
    assert len(said) <= 1024
    body = alert(event("dead_letter.created", **{**LETTER, "error": "x" * 100_000}))
    assert len(body["payload"]["summary"]) < 300


def test_the_link_is_where_each_looks_for_it() -> None:
    link = "https://ops.example/groups/3?a=1&b=2"
    body = alert(event("group.opened", **TITLE, link=link))
    assert body["text"].endswith(" https://ops.example/groups/3?a=1&amp;b=2")  # Slack turns it back
    assert body["client_url"] == link
    assert body["links"] == [{"href": link, "text": "Open in Bartleby"}]
    assert "links" not in alert(event("group.opened", **TITLE))


def test_a_payload_is_not_repeated_for_pagerduty() -> None:
    body = alert(event("dead_letter.created", **LETTER, payload={"card": "4111"}, headers={"a": "b"}))
    assert "4111" not in json.dumps(body["payload"])
    assert body["payload"]["custom_details"]["message_id"] == 17
    assert body["event"]["data"]["payload"] == {"card": "4111"}


def test_an_event_without_data_is_told_too() -> None:
    bare = {"id": "x.1", "type": "io.bartleby.dead_letter.created", "source": "urn:bartleby:x", "subject": "message/1"}
    assert sentence(bare) == "a message is dead"
    assert alert(bare)["payload"]["source"] == "bartleby"
    for kind in {told["type"] for told, _ in SENTENCES}:
        assert sentence({"type": kind})
