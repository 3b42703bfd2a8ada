"""The Sentry sink against a real server: what it is sent, and what its answers mean."""

import json
from typing import Any

import pytest

from bartleby.errors import InvalidSettings
from bartleby.sinks import open_publisher
from bartleby.sinks.http import Answer
from bartleby.sinks.publisher import Failed, Outcome, Published, Publisher, Refused
from bartleby.sinks.sentry import limited, sentry_event, sentry_id
from tests.kit.sinks.conformance import event, events, named
from tests.kit.sinks.receiver import Receiver, Reply, Request

ACCEPTED = Reply(200, body=b'{"id":"9ec79c33ec9942ab8353589fcb2e04dc"}')


def opened(receiver: Receiver, **options: Any) -> Publisher:
    dsn = f"http://abc123@127.0.0.1:{receiver.port}/42"
    return open_publisher("sentry", {"dsn": dsn, "allow_private": True, **options}, 15.0)


def of_type(kind: str, **data: Any) -> dict[str, Any]:
    told = event(1)
    return {**told, "type": f"io.bartleby.{kind}", "data": {**told["data"], **data}}


async def sent(told: dict[str, Any], **options: Any) -> tuple[Request, list[dict[str, Any]]]:
    async with Receiver.running(lambda _: ACCEPTED) as receiver:
        publisher = opened(receiver, **options)
        assert named(await publisher.publish([told])) == ["Published"]
        await publisher.close()
    (request,) = receiver.requests
    return request, [json.loads(line) for line in request.body.splitlines()]


async def answered(reply: Reply) -> Outcome:
    async with Receiver.running(lambda _: reply) as receiver:
        publisher = opened(receiver)
        (outcome,) = await publisher.publish([event(1)])
        await publisher.close()
        return outcome


async def test_a_letter_is_an_envelope_with_one_event() -> None:
    told = of_type(
        "dead_letter.created",
        worker_version="2.4.1",
        worker="host-1",
        handler="shop.fulfil",
        link="https://ops.example/letters/1",
    )
    request, (head, item, document) = await sent(told, environment="production")
    assert request.path == "/api/42/envelope/"
    assert request.headers["content-type"] == "application/x-sentry-envelope"
    assert "sentry_key=abc123" in request.headers["x-sentry-auth"]
    assert "sentry_version=7" in request.headers["x-sentry-auth"]
    assert item["type"] == "event"
    assert item["length"] == len(request.body.splitlines()[2])
    assert head["event_id"] == document["event_id"] == sentry_id(told["id"])
    assert document["fingerprint"] == ["0123456789abcdef"]
    assert document["environment"] == "production"
    assert document["release"] == "2.4.1"
    assert document["level"] == "error"
    assert document["timestamp"] == told["time"]
    (exception,) = document["exception"]["values"]
    assert (exception["type"], exception["value"]) == (told["data"]["error_type"], told["data"]["error"])
    tags = document["tags"]
    assert tags["handler"] == document["transaction"] == "shop.fulfil"
    assert (tags["queue"], tags["attempts"], tags["message_id"], tags["reason"]) == ("orders", "5", "1", "exhausted")
    assert document["extra"]["link"] == "https://ops.example/letters/1"


async def test_the_id_is_the_same_each_time_and_has_the_form_of_sentry() -> None:
    first, second = sentry_id("0a1b2c3d.1.1"), sentry_id("0a1b2c3d.1.2")
    assert first == sentry_id("0a1b2c3d.1.1")
    assert first != second
    assert len(first) == 32
    assert set(first) <= set("0123456789abcdef")


async def test_the_release_of_the_options_goes_before_the_version_of_the_worker() -> None:
    _, (_, _, document) = await sent(of_type("dead_letter.created", worker_version="2.4.1"), release="shop@7")
    assert document["release"] == "shop@7"


def test_a_letter_without_an_error_is_an_event_too() -> None:
    told = {**event(1), "data": {"message_id": 1, "queue": "orders", "reason": "crashed"}}
    document = sentry_event(told, None, None)
    assert document["level"] == "fatal"
    assert document["fingerprint"] == ["orders/crashed"]
    assert document["exception"]["values"][0]["type"] == "crashed"
    assert "release" not in document
    assert sentry_event({"id": "x", "type": "io.bartleby.group.opened"}, None, None)["event_id"]


async def test_the_test_of_a_sink_is_an_issue_of_its_own_and_no_error() -> None:
    told = {**event(1), "type": "io.bartleby.sink.test", "data": {"sink": "errors", "kind": "sentry"}}
    _, (_, _, document) = await sent(told)
    assert (document["level"], document["fingerprint"]) == ("info", ["bartleby/sink.test/errors"])
    assert document["logentry"]["formatted"] == "this is a test of sink errors, nothing has happened"
    assert "exception" not in document


async def test_the_test_of_a_sink_finds_out_that_nobody_is_there() -> None:
    told = {**event(1), "type": "io.bartleby.sink.test", "data": {"sink": "errors", "kind": "sentry"}}
    publisher = open_publisher("sentry", {"dsn": "http://abc@127.0.0.1:1/42", "allow_private": True}, 1.0)
    assert named(await publisher.publish([told])) == ["Failed"]


def test_a_payload_is_not_sent() -> None:
    told = of_type("dead_letter.created", payload={"card": "4111"}, headers={"token": "4222"}, key="4333")
    for canary in ("4111", "4222", "4333"):
        assert canary not in json.dumps(sentry_event(told, None, None))


@pytest.mark.parametrize(
    ("kind", "is_sent"),
    [
        ("dead_letter.created", True),
        ("dead_letter.died_again", True),
        ("group.opened", True),
        ("group.escalated", True),
        ("group.regressed", True),
        ("sink.test", True),
        ("group.resolved", False),
        ("group.drained", False),
        ("dead_letter.resolved", False),
        ("dead_letter.replayed", False),
        ("breaker.opened", False),
        ("sink.degraded", False),
    ],
)
async def test_only_what_is_an_error_is_sent(kind: str, is_sent: bool) -> None:
    async with Receiver.running(lambda _: ACCEPTED) as receiver:
        publisher = opened(receiver)
        outcomes = await publisher.publish([of_type(kind, title="T", dead=10)])
        await publisher.close()
    assert outcomes == [Published("200" if is_sent else "nothing for Sentry")]
    assert len(receiver.requests) == int(is_sent)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(200, Published), (400, Refused), (413, Refused), (401, Failed), (403, Failed), (404, Failed), (500, Failed)],
)
async def test_what_an_answer_means(status: int, kind: type[Any]) -> None:
    assert type(await answered(Reply(status, body=b'{"detail":"why"}'))) is kind


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 60),
        ({"Retry-After": "12"}, 12),
        ({"Retry-After": "100000"}, 300),
        ({"X-Sentry-Rate-Limits": "30:error:organization:quota"}, 30),
        ({"X-Sentry-Rate-Limits": "30::organization"}, 30),
        ({"X-Sentry-Rate-Limits": "5:transaction:key, 45:default;error:organization", "Retry-After": "9"}, 45),
        ({"X-Sentry-Rate-Limits": "nonsense", "Retry-After": "9"}, 60),
    ],
)
async def test_too_many_requests_says_how_long(headers: dict[str, str], expected: float) -> None:
    outcome = await answered(Reply(429, headers=headers))
    assert isinstance(outcome, Failed)
    assert outcome.retry_after == expected


def test_limits_of_other_categories_are_not_ours() -> None:
    for value in ("60:transaction:organization", "60:session;attachment:key", "", ":", "x:error:y", "60"):
        expected = 60 if value == "60" else 0
        assert limited(Answer(200, {"x-sentry-rate-limits": value}, "")) == expected


async def test_a_limit_told_with_success_is_kept_by_the_next_call() -> None:
    limit = Reply(200, headers={"X-Sentry-Rate-Limits": "30:error:organization"}, body=ACCEPTED.body)
    async with Receiver.running(lambda _: limit) as receiver:
        publisher = opened(receiver)
        assert named(await publisher.publish([event(1)])) == ["Published"]
        outcomes = await publisher.publish(events(5, first=2))
        await publisher.close()
    assert len(receiver.requests) == 1
    assert all(isinstance(each, Failed) and 0 < (each.retry_after or 0) <= 30 for each in outcomes)


@pytest.mark.parametrize(
    ("dsn", "path"),
    [
        ("https://k3y@o1.ingest.sentry.io/42", "/api/42/envelope/"),
        ("https://k3y:secret@sentry.example:9000/prefix/42", "/prefix/api/42/envelope/"),
    ],
)
def test_a_dsn_is_taken_apart(dsn: str, path: str) -> None:
    publisher = open_publisher("sentry", {"dsn": dsn}, 1.0)
    assert publisher._to.to.path == path  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "dsn",
    [
        "https://o1.ingest.sentry.io/42",
        "https://k3y@o1.ingest.sentry.io/",
        "https://k3y@/42",
        "http://k3y@o1.ingest.sentry.io/42",
        "https://k3y@127.0.0.1/42",
        "https://k3y@2130706433/42",
        "https://k3y@evil@127.0.0.1/42",
        "https://k y@host.example/42",
        "https://k3y@host.example/42?x=1",
        "https://k3y@host.example/a/../42#x",
        "k3y",
    ],
)
def test_a_dsn_that_cannot_be_used(dsn: str) -> None:
    with pytest.raises(InvalidSettings, match="option 'dsn' of a sentry sink") as caught:
        open_publisher("sentry", {"dsn": dsn}, 1.0)
    assert "k3y" not in str(caught.value)
