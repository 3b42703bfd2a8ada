"""The Sentry sink with a local receiver: what it sends, and what the answers mean."""

import json
from typing import Any

import pytest

from bartleby.errors import InvalidSettings
from bartleby.sinks import open_publisher
from bartleby.sinks.http import Answer
from bartleby.sinks.publisher import Failed, Outcome, Published, Publisher, Refused
from bartleby.sinks.sentry import limited, sentry_event, sentry_id
from tests.kit.sinks.conformance import PATIENT, event, events, named
from tests.kit.sinks.receiver import Receiver, Reply

ACCEPTED = Reply(200, body=b'{"id":"9ec79c33ec9942ab8353589fcb2e04dc"}')


def opened(receiver: Receiver, **options: Any) -> Publisher:
    dsn = f"http://abc123@127.0.0.1:{receiver.port}/42"
    return open_publisher("sentry", {"dsn": dsn, "allow_private": True, **options}, PATIENT)


def of_type(kind: str, **data: Any) -> dict[str, Any]:
    letter = event(1)
    return {**letter, "type": f"io.bartleby.{kind}", "data": {**letter["data"], **data}}


@pytest.mark.seed("outbox-45", "outbox-46", "outbox-47", "outbox-48", "pgmq-59")
async def test_letter_is_an_envelope_with_one_event() -> None:
    facts = {"worker_version": "2.4.1", "worker": "host-1", "handler": "shop.fulfil"}
    facts |= {"message_type": "order.placed", "message_source": "shop"}
    letter = of_type("dead_letter.created", **facts, link="https://ops.example/letters/1")
    async with Receiver.running(lambda _: ACCEPTED) as receiver:
        publisher = opened(receiver, environment="production")
        assert named(await publisher.publish([letter])) == ["Published"]
        await publisher.close()
    (request,) = receiver.requests
    head, item, document = (json.loads(line) for line in request.body.splitlines())
    assert request.path == "/api/42/envelope/"
    assert request.headers["content-type"] == "application/x-sentry-envelope"
    for part in ("sentry_key=abc123", "sentry_version=7"):
        assert part in request.headers["x-sentry-auth"]
    assert (item["type"], item["length"]) == ("event", len(request.body.splitlines()[2]))
    assert head["event_id"] == document["event_id"] == sentry_id(letter["id"])
    expected = {
        "fingerprint": ["0123456789abcdef"], "environment": "production", "release": "2.4.1", "level": "error",
        "timestamp": letter["time"], "transaction": "shop.fulfil",
        "exception": {"values": [{"type": letter["data"]["error_type"], "value": letter["data"]["error"]}]},
    }  # fmt: skip
    assert document.items() >= expected.items()
    facts = {"handler": "shop.fulfil", "queue": "orders", "attempts": "5", "message_id": "1", "reason": "exhausted"}
    facts |= {"message_type": "order.placed", "message_source": "shop"}
    assert document["tags"].items() >= facts.items()
    assert document["extra"]["link"] == "https://ops.example/letters/1"


def test_event_has_an_id_release_and_level_without_payload() -> None:
    first, second = sentry_id("0a1b2c3d.1.1"), sentry_id("0a1b2c3d.1.2")
    assert first == sentry_id("0a1b2c3d.1.1") != second
    assert (len(first), set(first) <= set("0123456789abcdef")) == (32, True)
    full = of_type("dead_letter.created", payload="4111", headers={"token": "4111"}, key="4111", worker_version="2.4.1")
    document = sentry_event(full, None, "shop@7")
    assert (document["release"], "4111" in json.dumps(document)) == ("shop@7", False)
    crashed = {**event(1), "data": {"message_id": 1, "queue": "orders", "reason": "crashed"}}
    document = sentry_event(crashed, None, None)
    assert (document["level"], document["fingerprint"]) == ("fatal", ["orders/crashed"])
    assert (document["exception"]["values"][0]["type"], "release" in document) == ("crashed", False)
    assert sentry_event({"id": "x", "type": "io.bartleby.group.opened"}, None, None)["event_id"]
    tested = {**event(1), "type": "io.bartleby.sink.test", "data": {"sink": "errors", "kind": "sentry"}}
    document = sentry_event(tested, None, "shop@7")
    assert (document["level"], document["fingerprint"]) == ("info", ["bartleby/sink.test/errors"])
    assert (document["release"], "exception" in document, "environment" in document) == ("shop@7", False, False)


async def test_only_errors_are_sent() -> None:
    kinds = ("dead_letter.created", "dead_letter.died_again", "group.opened", "group.escalated", "group.regressed")
    others = ("group.resolved", "group.drained", "dead_letter.resolved", "dead_letter.replayed", "breaker.opened")
    async with Receiver.running(lambda _: ACCEPTED) as receiver:
        publisher = opened(receiver)
        for kind in (*kinds, "sink.test", *others, "sink.degraded"):
            before = len(receiver.requests)
            (outcome,) = await publisher.publish([of_type(kind, title="T", dead=10)])
            is_sent = kind in kinds or kind == "sink.test"
            assert outcome == Published("200" if is_sent else "nothing for Sentry"), kind
            assert len(receiver.requests) - before == int(is_sent), kind
        await publisher.close()


async def test_answer_decides_the_outcome() -> None:
    limits = "X-Sentry-Rate-Limits"
    rows: list[tuple[Reply, Outcome | type[Outcome]]] = [(Reply(413), Refused), (Reply(403), Failed)]
    waits: list[tuple[dict[str, str], float]] = [
        ({}, 60),
        ({"Retry-After": "12"}, 12),
        ({limits: "30::organization"}, 30),
        ({limits: "5:transaction:key, 45:default;error:organization", "Retry-After": "9"}, 45),
        ({limits: "nonsense", "Retry-After": "9"}, 60),
    ]
    rows += [(Reply(429, headers=headers), Failed("answered 429 Too Many Requests: ok", w)) for headers, w in waits]
    for reply, expected in rows:
        async with Receiver.running(lambda _, reply=reply: reply) as receiver:  # type: ignore[misc]
            publisher = opened(receiver)
            (outcome,) = await publisher.publish([event(1)])
            await publisher.close()
        assert (type(outcome) if isinstance(expected, type) else outcome) == expected, reply
    for value in ("60:transaction:organization", "60:session;attachment:key", "", ":", "x:error:y", "60"):
        assert limited(Answer(200, {limits.lower(): value}, "")) == (60 if value == "60" else 0), value


async def test_limit_sent_with_success_holds_for_the_next_call() -> None:
    limit = Reply(200, headers={"X-Sentry-Rate-Limits": "300:error:organization"}, body=ACCEPTED.body)
    async with Receiver.running(lambda _: limit) as receiver:
        publisher = opened(receiver)
        assert named(await publisher.publish([event(1)])) == ["Published"]
        outcomes = await publisher.publish(events(5, first=2))
        await publisher.close()
    assert len(receiver.requests) == 1
    assert all(isinstance(each, Failed) and 0 < (each.retry_after or 0) <= 300 for each in outcomes)


def test_dsn_is_parsed_or_refused_without_showing_its_key() -> None:
    for dsn, path in (
        ("https://k3y@o1.ingest.sentry.io/42", "/api/42/envelope/"),
        ("https://k3y:secret@sentry.example:9000/prefix/42", "/prefix/api/42/envelope/"),
    ):
        publisher = open_publisher("sentry", {"dsn": dsn}, 1.0)
        assert publisher._to.to.path == path  # type: ignore[attr-defined]
    for dsn in (
        "https://o1.ingest.sentry.io/42", "https://k3y@o1.ingest.sentry.io/", "https://k3y@/42", "k3y",
        "http://k3y@o1.ingest.sentry.io/42", "gopher://k3y@o1.ingest.sentry.io/42", "https://k3y@[::1/1",
        "https://k3y@169.254.169.254/42", "https://k3y@2130706433/42", "https://k3y@evil@127.0.0.1/42",
        "https://k y@host.example/42", "https://k3y@host.example/42?x=1", "https://k3y@host.example/a/../42#x",
    ):  # fmt: skip
        with pytest.raises(InvalidSettings, match="option 'dsn' of a sentry sink") as caught:
            open_publisher("sentry", {"dsn": dsn}, 1.0)
        assert "k3y" not in str(caught.value), dsn
