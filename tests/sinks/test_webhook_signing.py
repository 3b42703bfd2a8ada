"""What the webhook sink sends: CloudEvents or alerts, signed as Standard Webhooks wants it."""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from cloudevents.core.formats.json import JSONFormat
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from bartleby.errors import InvalidSettings
from bartleby.sinks import open_publisher
from bartleby.sinks.publisher import Published, Publisher
from bartleby.sinks.webhook import signed
from tests.kit.sinks.conformance import event, events, named
from tests.kit.sinks.receiver import Receiver, Reply

OLD = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
NEW = "whsec_plJ3nmyCDGBKInavdOK15jsl6b5VlKzhNXZsOtsPXnA="
TIMEOUT = 15.0


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with Receiver.running() as running:
        yield running


def opened(url: str, **options: Any) -> Publisher:
    return open_publisher("webhook", {"url": url, "secret": OLD, "allow_private": True, **options}, TIMEOUT)


async def test_an_event_is_a_cloud_event_in_structured_json(receiver: Receiver) -> None:
    publisher = opened(receiver.url)
    assert await publisher.publish([event(1)]) == [Published("200")]
    await publisher.close()
    (request,) = receiver.requests
    assert request.headers["content-type"] == "application/cloudevents+json"
    assert request.headers["user-agent"].startswith("bartleby/")
    assert request.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert request.path == "/hook"
    assert JSONFormat().read(None, request.body).get_id() == event(1)["id"]
    assert json.loads(request.body) == event(1)


async def test_the_signature_verifies_with_the_reference_library(receiver: Receiver) -> None:
    publisher = opened(receiver.url)
    await publisher.publish(events(3))
    await publisher.close()
    for request in receiver.requests:
        assert Webhook(OLD).verify(request.body, dict(request.headers)) == json.loads(request.body)
        assert request.headers["webhook-id"] == json.loads(request.body)["id"]
        with pytest.raises(WebhookVerificationError):
            Webhook(NEW).verify(request.body, dict(request.headers))
        with pytest.raises(WebhookVerificationError):
            Webhook(OLD).verify(request.body.replace(b"orders", b"others"), dict(request.headers))


async def test_while_secrets_are_rotated_a_receiver_needs_either(receiver: Receiver) -> None:
    publisher = opened(receiver.url, secret=[NEW, OLD])
    await publisher.publish([event(1)])
    await publisher.close()
    (request,) = receiver.requests
    assert len(request.headers["webhook-signature"].split(" ")) == 2
    for secret in (OLD, NEW):
        Webhook(secret).verify(request.body, dict(request.headers))


async def test_a_replay_outside_the_tolerance_does_not_verify() -> None:
    body = json.dumps(event(1)).encode()
    key = Webhook(OLD)._whsecret
    for seconds, expected in ((0, True), (-240, True), (-600, False), (600, False)):
        headers = signed("id", int(time.time()) + seconds, body, [key])
        if expected:
            Webhook(OLD).verify(body, headers)
        else:
            with pytest.raises(WebhookVerificationError, match="too"):
                Webhook(OLD).verify(body, headers)


async def test_the_id_is_the_same_when_it_is_sent_again() -> None:
    replies = iter([Reply(500), Reply(503), Reply(200)])
    async with Receiver.running(lambda _: next(replies)) as receiver:
        publisher = opened(receiver.url)
        outcomes = [(await publisher.publish([event(1)]))[0] for _ in range(3)]
        await publisher.close()
    assert named(outcomes) == ["Failed", "Failed", "Published"]
    assert {each.headers["webhook-id"] for each in receiver.requests} == {event(1)["id"]}
    assert len({each.body for each in receiver.requests}) == 1


async def test_secrets_and_headers_may_be_in_the_environment(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BARTLEBY_SINK_SECRET", NEW)
    monkeypatch.setenv("BARTLEBY_SINK_HEADER", "Bearer t0ken")
    publisher = opened(
        receiver.url, secret=["env:BARTLEBY_SINK_SECRET", OLD], headers={"Authorization": "env:BARTLEBY_SINK_HEADER"}
    )
    await publisher.publish([event(1)])
    await publisher.close()
    (request,) = receiver.requests
    assert request.headers["authorization"] == "Bearer t0ken"
    Webhook(NEW).verify(request.body, dict(request.headers))
    with pytest.raises(InvalidSettings, match="BARTLEBY_SINK_NOT_SET"):
        opened(receiver.url, secret="env:BARTLEBY_SINK_NOT_SET")


def test_no_error_shows_a_secret() -> None:
    mistakes: list[dict[str, Any]] = [
        {"secret": "whsec_c2VjcmV0"},
        {"headers": {"X": "s3cret\n"}},
        {"url": "https://u:s3cret@h/"},
    ]
    for options in mistakes:
        with pytest.raises(InvalidSettings) as caught:
            open_publisher("webhook", {"url": "https://example.com/", "secret": OLD, **options}, TIMEOUT)
        assert "s3cret" not in str(caught.value)
        assert "c2VjcmV0" not in str(caught.value)


async def test_an_alert_needs_no_secret(receiver: Receiver) -> None:
    options = {"url": receiver.url, "allow_private": True, "format": "alert", "routing_key": "R0UT1NG"}
    publisher = open_publisher("webhook", options, TIMEOUT)
    assert named(await publisher.publish([event(1)])) == ["Published"]
    await publisher.close()
    (request,) = receiver.requests
    body = json.loads(request.body)
    assert request.headers["content-type"] == "application/json"
    assert request.headers["webhook-id"] == event(1)["id"]
    assert "webhook-signature" not in request.headers
    assert body["routing_key"] == "R0UT1NG"
    assert body["text"].startswith("orders: message 1 is dead after 5 attempts")
    assert body["event"] == event(1)


async def test_an_alert_is_signed_if_there_is_a_secret(receiver: Receiver) -> None:
    publisher = opened(receiver.url, format="alert")
    await publisher.publish([event(1)])
    await publisher.close()
    (request,) = receiver.requests
    Webhook(OLD).verify(request.body, dict(request.headers))


async def test_a_text_that_is_no_unicode_is_sent_all_the_same(receiver: Receiver) -> None:
    publisher = opened(receiver.url)
    told = {**event(1), "data": {"error": "half a pair \ud83d"}}
    assert named(await publisher.publish([told])) == ["Published"]
    await publisher.close()
    assert json.loads(receiver.requests[0].body) == told
