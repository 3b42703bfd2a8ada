"""Alerts: the sentence for each event, and the fields that Slack and PagerDuty read."""

import json
from typing import Any

from bartleby.sinks.alert import _SENTENCES, action, alert, incident, sentence, severity

TITLE = {"group_id": 3, "title": "CardDeclined: the bank declined", "queue": "orders", "fingerprint": "f00"}
LETTER = {
    "message_id": 17, "queue": "orders", "group_id": 3, "error_type": "CardDeclined", "error": "the bank declined",
}  # fmt: skip


def event(kind: str, /, **data: Any) -> dict[str, Any]:
    subject = f"message/{data['message_id']}" if "message_id" in data else f"group/{data.get('group_id', 3)}"
    source = "urn:bartleby:0a1b2c3d-0000-4000-8000-000000000000"
    return {"id": "0a1b2c3d.5", "source": source, "type": f"io.bartleby.{kind}", "subject": subject, "data": data}


SENTENCES = [
    (event("dead_letter.created", **LETTER, reason="exhausted", attempts=5),
     'orders: message 17 is dead after 5 attempts: "CardDeclined: the bank declined"'),
    (event("dead_letter.created", message_id=17, queue="orders", reason="crashed", attempts=1),
     "orders: message 17 killed its worker too often and is dead"),
    (event("dead_letter.died_again", **LETTER, attempts=1),
     'orders: message 17 was replayed and died again after 1 attempt: "CardDeclined: the bank declined"'),
    (event("dead_letter.expired", queue="orders", unresolved=1200),
     "orders: the evidence of 1,200 dead letters expired before anybody took care of them"),
    (event("group.escalated", **TITLE, dead=1280),
     'orders: already 1,280 dead letters of "CardDeclined: the bank declined"'),
    (event("group.regressed", **TITLE, resolved_version="2.4.1"),
     'orders: "CardDeclined: the bank declined" is back, though it was resolved in 2.4.1'),
    (event("replay.finished", queue="orders", replay_id=5, items=1395, done=1390, died_again=5, skipped=0),
     "orders: replay 5 of 1,395 finished; 1,390 done, 5 died again"),
    (event("sink.recovered", sink="bus", seconds=615.2), "sink bus works again, after 0:10:15"),
    (event("moon.full"), "io.bartleby.moon.full group/3"),
]  # fmt: skip


def test_every_event_becomes_a_sentence_and_a_valid_alert() -> None:
    for about, expected in SENTENCES:
        assert sentence(about) == expected
    for about in [each for each, _ in SENTENCES] + [event(kind) for kind in _SENTENCES]:
        body = json.loads(json.dumps(alert(about, "key")))
        assert (body["routing_key"], body["event"], bool(body["text"])) == ("key", about, True)
        assert body["event_action"] in {"trigger", "acknowledge", "resolve"}, about
        assert 0 < len(body["dedup_key"]) <= 255, about
        assert body["payload"]["severity"] in {"critical", "error", "warning", "info"}, about
        assert 0 < len(body["payload"]["summary"]) <= 1024, about
        assert body["payload"]["source"], about
    bare = {"id": "x.1", "type": "io.bartleby.dead_letter.created", "source": "urn:bartleby:x", "subject": "message/1"}
    assert (sentence(bare), alert(bare)["payload"]["source"]) == ("a message is dead", "bartleby")


def test_group_is_one_incident_from_beginning_to_end() -> None:
    story = {
        "trigger": event("group.opened", **TITLE),
        "trigger too": event("dead_letter.created", **LETTER),
        "trigger again": event("group.escalated", **TITLE, dead=10),
        "acknowledge": event("dead_letter.replayed", **LETTER),
        "resolve": event("group.drained", **TITLE),
        "trigger anew": event("group.regressed", **TITLE),
        "resolve anew": event("group.resolved", **TITLE),
    }
    assert len({incident(each) for each in story.values()}) == 1
    assert [action(each) for each in story.values()] == [expected.partition(" ")[0] for expected in story]
    expected = {"group.escalated": "critical", "dead_letter.created": "error", "group.resolved": "info"}
    assert {each: severity(event(each)) for each in expected} == expected


def test_breakers_queues_sinks_and_tests_are_incidents_of_their_own() -> None:
    queue, here = {"subject": "queue/orders"}, {"subject": "sink/ops"}
    tested = {**event("sink.test", sink="ops", kind="webhook"), **here}
    others = [
        event("group.opened", **TITLE),
        {**event("breaker.opened", queue="orders"), **queue},
        {**event("dead_letter.expired", queue="orders", unresolved=3), **queue},
        {**event("sink.degraded", sink="ops"), **here},
        {**event("group.opened", **TITLE), "source": "urn:bartleby:another"},
        tested,
    ]
    assert len({incident(each) for each in others}) == len(others)
    closed = {**event("breaker.closed", queue="orders"), **queue}
    assert (incident(closed), action(closed)) == (incident(others[1]), "resolve")
    # one of a test would stay open: PagerDuty answers 202 to the end of one that it does not know
    assert (action(tested), severity(tested)) == ("resolve", "info")


def test_text_of_an_error_is_escaped_and_shortened() -> None:
    body = alert(event("dead_letter.created", **{**LETTER, "error": "<!channel> & <https://evil.example|click here>"}))
    assert not set("<>") & set(body["text"]), "no commands for Slack"
    assert "&lt;!channel&gt; &amp; &lt;https" in body["text"]
    assert "<!channel>" in body["payload"]["summary"]
    escapes = {**LETTER, "error": "one\r\ntwo\x1b[31mred\x1b]0;title\x07 \u202eturned\u2028end"}
    shown = sentence(event("dead_letter.created", **escapes))
    assert shown.isprintable(), "no escapes for a terminal"
    assert "one two [31mred" in shown
    long = {**LETTER, "queue": "q" * 5000, "error": "x" * 100_000}
    assert len(sentence(event("dead_letter.created", **long))) <= 1024
    body = alert(event("dead_letter.created", **{**LETTER, "error": "x" * 100_000}))
    assert len(body["payload"]["summary"]) < 300


def test_link_is_in_every_field_that_a_receiver_reads_and_the_payload_is_left_out() -> None:
    link = "https://ops.example/groups/3?a=1&b=2"
    body = alert(event("dead_letter.created", **LETTER, link=link, payload={"card": "4111"}, headers={"a": "b"}))
    assert body["text"].endswith(" https://ops.example/groups/3?a=1&amp;b=2")  # Slack turns it back
    assert (body["client_url"], body["links"][0]["href"]) == (link, link)
    assert "4111" not in json.dumps(body["payload"])
    assert body["payload"]["custom_details"]["message_id"] == 17
