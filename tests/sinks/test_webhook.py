"""The webhook sink with a local receiver: what it sends and signs, what answers mean, limits of time, TLS."""

import asyncio
import json
import re
import ssl
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
import trustme
from cloudevents.core.formats.json import JSONFormat
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from bartleby.errors import InvalidSettings
from bartleby.sinks import http, open_publisher
from bartleby.sinks.http import retry_after
from bartleby.sinks.publisher import Failed, Outcome, Published, Publisher, Refused
from bartleby.sinks.webhook import signed
from tests.kit.sinks.conformance import event, events, named
from tests.kit.sinks.harness_webhook import SECRET
from tests.kit.sinks.receiver import Receiver, Reply, Request
from tests.kit.sinks.servers import until

NEW_SECRET = "whsec_plJ3nmyCDGBKInavdOK15jsl6b5VlKzhNXZsOtsPXnA="
PATIENT, SOON = 60.0, 0.5
"""The timeout where an answer comes, and where none does."""


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with Receiver.running() as running:
        yield running


def opened(url: str, timeout: float = PATIENT, **options: Any) -> Publisher:
    return open_publisher("webhook", {"url": url, "secret": SECRET, "allow_private": True, **options}, timeout)


async def outcome_of(reply: Reply, timeout: float = PATIENT, **options: Any) -> Outcome:  # noqa: ASYNC109 - the sink's
    """Return the outcome of an event that gets this answer."""
    async with Receiver.running(lambda _: reply) as receiver:
        publisher = opened(receiver.url, timeout, **options)
        (outcome,) = await publisher.publish([event(1)])
        await publisher.close()
        return outcome


async def test_event_is_a_signed_cloud_event(receiver: Receiver) -> None:
    publisher = opened(receiver.url, concurrency=1)
    assert await publisher.publish(events(3)) == [Published("200")] * 3
    broken = {**event(4), "data": {"error": "half a pair \ud83d"}}
    assert await publisher.publish([broken]) == [Published("200")]
    await publisher.close()
    assert [json.loads(each.body) for each in receiver.requests] == [*events(3), broken]
    for request in receiver.requests:
        headers = dict(request.headers)
        assert (request.path, headers["host"]) == ("/hook", f"127.0.0.1:{receiver.port}")
        assert headers["content-type"] == "application/cloudevents+json"
        assert headers["user-agent"].startswith("bartleby/")
        assert JSONFormat().read(None, request.body).get_id() == headers["webhook-id"]
        assert Webhook(SECRET).verify(request.body, headers) == json.loads(request.body)
        with pytest.raises(WebhookVerificationError):
            Webhook(NEW_SECRET).verify(request.body, headers)
        with pytest.raises(WebhookVerificationError):
            Webhook(SECRET).verify(request.body.replace(b"message", b"massage"), headers)


async def test_both_secrets_sign_while_they_are_rotated(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARTLEBY_SINK_SECRET", NEW_SECRET)
    monkeypatch.setenv("BARTLEBY_SINK_HEADER", "Bearer t0ken")
    secrets, headers = ["env:BARTLEBY_SINK_SECRET", SECRET], {"Authorization": "env:BARTLEBY_SINK_HEADER"}
    publisher = opened(receiver.url, secret=secrets, headers=headers)
    await publisher.publish([event(1)])
    await publisher.close()
    (request,) = receiver.requests
    assert request.headers["authorization"] == "Bearer t0ken"
    assert len(request.headers["webhook-signature"].split(" ")) == 2
    for secret in (SECRET, NEW_SECRET):
        Webhook(secret).verify(request.body, dict(request.headers))
    with pytest.raises(InvalidSettings, match="BARTLEBY_SINK_NOT_SET"):
        opened(receiver.url, secret="env:BARTLEBY_SINK_NOT_SET")


def test_old_signature_does_not_verify() -> None:
    body = json.dumps(event(1)).encode()
    key = Webhook(SECRET)._whsecret
    for seconds, expected in ((0, True), (-240, True), (-600, False), (600, False)):
        headers = signed("id", int(time.time()) + seconds, body, [key])
        if expected:
            Webhook(SECRET).verify(body, headers)
        else:
            with pytest.raises(WebhookVerificationError, match="too"):
                Webhook(SECRET).verify(body, headers)


async def test_alert_needs_no_secret_and_is_signed_if_there_is_one(receiver: Receiver) -> None:
    options = {"url": receiver.url, "allow_private": True, "format": "alert", "routing_key": "R0UT1NG"}
    for more in ({}, {"secret": SECRET}):
        publisher = open_publisher("webhook", {**options, **more}, PATIENT)
        assert named(await publisher.publish([event(1)])) == ["Published"]
        await publisher.close()
    plain, with_secret = receiver.requests
    assert plain.headers["content-type"] == "application/json"
    assert plain.headers["webhook-id"] == event(1)["id"]
    assert "webhook-signature" not in plain.headers
    body = json.loads(plain.body)
    assert (body["routing_key"], body["event"]) == ("R0UT1NG", event(1))
    assert body["text"].startswith("orders: message 1 is dead after 5 attempts")
    Webhook(SECRET).verify(with_secret.body, dict(with_secret.headers))


async def test_id_and_body_are_the_same_when_an_event_is_sent_again() -> None:
    replies = iter([Reply(500), Reply(503), Reply(200)])
    async with Receiver.running(lambda _: next(replies)) as receiver:
        publisher = opened(receiver.url)
        outcomes = [(await publisher.publish([event(1)]))[0] for _ in range(3)]
        await publisher.close()
    assert named(outcomes) == ["Failed", "Failed", "Published"]
    assert {each.headers["webhook-id"] for each in receiver.requests} == {event(1)["id"]}
    assert len({each.body for each in receiver.requests}) == 1


ANSWERS: list[tuple[Reply, type[Outcome], str]] = [
    (Reply(200), Published, "200"),
    (Reply(202, body=b'{"status":"success"}'), Published, "202"),
    (Reply(204, body=b""), Published, "204"),
    (Reply(301, headers={"Location": "https://elsewhere.example/"}), Failed, "not followed"),
    (Reply(302, headers={"Location": "http://169.254.169.254/latest/"}), Failed, "169.254.169.254.*not followed"),
    (Reply(307, headers={"Location": "/again"}), Failed, "not followed"),
    (Reply(304, body=b""), Failed, "not followed"),
    (Reply(400, body=b"invalid_payload"), Refused, "400 Bad Request: invalid_payload"),
    *((Reply(status), Failed, str(status)) for status in (401, 403, 404, 405, 408, 425, 429, 502, 503)),
    *((Reply(status), Refused, str(status)) for status in (409, 413, 418)),
    (Reply(410), Refused, "410 Gone"),
    (Reply(422, body=b"\x1b[31mno\r\n"), Refused, r"\[31mno$"),
    (Reply(500, body=b"x" * 5000), Failed, "500 Internal Server Error: x{200}$"),
    (Reply(599), Failed, "answered 599"),
]


async def test_answer_decides_the_outcome() -> None:
    for reply, kind, text in ANSWERS:
        outcome = await outcome_of(reply)
        assert type(outcome) is kind, reply.status
        found = outcome.note if isinstance(outcome, Published) else outcome.why
        assert re.search(text, found), reply.status
        assert found.isprintable(), reply.status


async def test_retry_after_is_read_and_bounded() -> None:
    for value, expected in (
        (None, None), ("0", 0), ("120", 120), (" 5 ", 5), ("999999", 300), ("9" * 500, None), ("-1", None),
        ("inf", None), ("nan", None), ("1e3", None), ("soon", None), ("", None), ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 300), ("Fri, 31 Dec 99999 23:59:59 GMT", None),
    ):  # fmt: skip
        assert retry_after(value) == expected, value
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=240), usegmt=True)
    for status in (429, 503):
        outcome = await outcome_of(Reply(status, headers={"Retry-After": "7"}))
        assert getattr(outcome, "retry_after", None) == 7, status
        outcome = await outcome_of(Reply(status, headers={"Retry-After": date}))
        assert 0 < getattr(outcome, "retry_after", 0) <= 240, status


async def test_server_that_asks_to_wait_gets_no_more_requests_in_this_call() -> None:
    async with Receiver.running(lambda _: Reply(429, headers={"Retry-After": "3"})) as receiver:
        publisher = opened(receiver.url, concurrency=2)
        outcomes = await publisher.publish(events(100))
        await publisher.close()
    assert {type(each) for each in outcomes} == {Failed}
    assert {each.retry_after for each in outcomes if isinstance(each, Failed)} == {3.0}
    assert len(receiver.requests) <= 4


async def test_failed_event_does_not_stop_the_others() -> None:
    def answer(request: Request) -> Reply:
        return Reply({event(1)["id"]: 500, event(2)["id"]: 400}.get(request.headers["webhook-id"], 200))

    async with Receiver.running(answer) as receiver:
        publisher = opened(receiver.url, concurrency=1)
        outcomes = await publisher.publish(events(10))
        await publisher.close()
    assert named(outcomes) == ["Failed", "Refused", *["Published"] * 8]


async def test_server_that_does_not_answer_properly_is_a_failure() -> None:
    for reply, reason in (
        (Reply(wait=asyncio.Event()), "did not answer within 0.5 s"),
        (Reply(slow_head=True, pause=0.05), "did not answer within 0.5 s"),
        (Reply(cut=True), "disconnected"),
        (Reply(headers={"X-Long": "x" * 200_000}), ""),
        (Reply(headers={"Bad header": "\x00"}), ""),
    ):
        outcome = await outcome_of(reply, SOON if "within" in reason else PATIENT)
        assert isinstance(outcome, Failed), reply
        assert reason in outcome.why, reply
        assert "/hook" not in outcome.why, "the path may be the secret"


async def test_body_is_not_waited_for() -> None:
    never = asyncio.Event()
    async with asyncio.timeout(30):
        assert await outcome_of(Reply(200, body=b"x" * 1000, body_wait=never)) == Published("200")
        assert isinstance(await outcome_of(Reply(500, body=b"x" * 1000, body_wait=never)), Failed)


async def test_connections_are_kept_bounded_and_used_at_once(receiver: Receiver) -> None:
    publisher = opened(receiver.url, concurrency=3)
    for first in (1, 101):
        assert named(await publisher.publish(events(100, first))) == ["Published"] * 100
    await publisher.close()
    assert receiver.connections <= 3
    open_now: list[str] = []
    together = asyncio.Event()

    def answer(request: Request) -> Reply:
        open_now.append(request.headers["webhook-id"])
        if len(open_now) == 8:
            together.set()
        return Reply(wait=together)

    async with Receiver.running(answer) as parallel:
        publisher = opened(parallel.url)
        assert named(await publisher.publish(events(8))) == ["Published"] * 8
        await publisher.close()


# TLS


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def trusted(authority: trustme.CA, tmp_path: Path) -> str:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return str(tmp_path / "ca.pem")


def serving(authority: trustme.CA, *names: str, not_after: datetime | None = None) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names, not_after=not_after).configure_cert(made)
    return made


async def outcome_at(context: ssl.SSLContext, host: str = "localhost", **options: Any) -> Outcome:
    async with Receiver.running(context=context) as receiver:
        publisher = opened(f"https://{host}:{receiver.port}/hook", **options)
        (outcome,) = await publisher.publish([event(1)])
        await publisher.close()
        return outcome


async def test_certificate_is_checked(authority: trustme.CA, trusted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = serving(authority, "localhost")
    expired = serving(authority, "localhost", not_after=datetime(2020, 1, 1, tzinfo=UTC))
    rows: list[tuple[str, Outcome, str]] = [
        ("trusted", await outcome_at(here, ca=trusted), ""),
        ("address", await outcome_at(serving(authority, "127.0.0.1"), host="127.0.0.1", ca=trusted), ""),
        ("other name", await outcome_at(serving(authority, "example.com"), ca=trusted), "CERTIFICATE_VERIFY_FAILED"),
        ("unknown authority", await outcome_at(here), "CERTIFICATE_VERIFY_FAILED"),
        ("expired", await outcome_at(expired, ca=trusted), "expired"),
    ]
    with monkeypatch.context() as patched:
        patched.setenv("SSL_CERT_FILE", trusted)
        rows.append(("environment", await outcome_at(here), ""))
    nowhere = ssl.get_default_verify_paths()._replace(cafile="", capath="")  # as in a Python that was built elsewhere
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: nowhere)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    monkeypatch.setattr(http, "_CERTIFICATES", ("/nowhere/ca.pem", trusted))
    rows.append(("system", await outcome_at(here), ""))
    for name, outcome, reason in rows:
        assert isinstance(outcome, Failed if reason else Published), name
        assert reason in getattr(outcome, "why", ""), name


async def test_tls_connections_are_kept_name_their_host_and_are_replaced_when_closed(
    authority: trustme.CA, trusted: str
) -> None:
    context = serving(authority, "localhost")
    wanted: list[str | None] = []
    context.sni_callback = lambda _, name, __: wanted.append(name)
    async with Receiver.running(context=context) as receiver:
        publisher = opened(f"https://localhost:{receiver.port}/hook", ca=trusted, concurrency=2)
        batch = [event(number, data_bytes=100_000 * (number % 2)) for number in range(20)]
        for _ in range(2):
            assert await publisher.publish(batch) == [Published("200")] * 20
        assert (len(receiver.requests), receiver.connections <= 2) == (40, True)
        await receiver.stop()
        await receiver.start(context)
        assert await publisher.publish([event(2)]) == [Published("200")]
        await publisher.close()
    assert set(wanted) == {"localhost"}


async def test_plain_text_before_the_handshake_is_a_failure(trusted: str, receiver: Receiver) -> None:
    async def hasty(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(hasty, "127.0.0.1", 0) as server:
        publisher = opened(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/", ca=trusted)
        assert named(await publisher.publish([event(1)])) == ["Failed"]
        await publisher.close()
    publisher = opened(f"https://127.0.0.1:{receiver.port}/hook", SOON)
    assert named(await publisher.publish([event(1)])) == ["Failed"]
    await publisher.close()
    assert receiver.requests == []


async def test_cancelled_handshake_leaves_no_socket(receiver: Receiver) -> None:
    async def connected() -> bool:
        return receiver.connected > 0

    async def closed() -> bool:
        return receiver.connected == 0

    publisher = opened(f"https://127.0.0.1:{receiver.port}/hook")  # the receiver waits for plain text
    publishing = asyncio.create_task(publisher.publish([event(1)]))
    await until(connected)
    publishing.cancel()
    await asyncio.wait([publishing])
    await until(closed)
    await publisher.close()
