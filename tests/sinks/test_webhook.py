"""The webhook sink with a local receiver: what it sends and signs, what answers mean, limits of time, TLS."""

import asyncio
import json
import re
import ssl
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
import trustme
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from bartleby.sinks import http
from bartleby.sinks.http import retry_after
from bartleby.sinks.publisher import Failed, Outcome, Published, Refused
from tests.kit.sinks.conformance import PATIENT, event, events, named
from tests.kit.sinks.harness_webhook import SECRET, webhook
from tests.kit.sinks.receiver import Receiver, Reply, Request
from tests.kit.sinks.servers import eventually

NEW_SECRET = "whsec_plJ3nmyCDGBKInavdOK15jsl6b5VlKzhNXZsOtsPXnA="
SOON = 0.5
"""The timeout where no answer comes."""


async def outcome_of(
    reply: Reply | None = None,
    timeout: float = PATIENT,  # noqa: ASYNC109 - the sink's
    context: ssl.SSLContext | None = None,
    host: str = "localhost",
    **options: Any,
) -> Outcome:
    """Return the outcome of an event that gets this answer, over TLS if there is a context."""
    async with Receiver.running(lambda _: reply or Reply(), context) as receiver:
        url = receiver.url if context is None else f"https://{host}:{receiver.port}/hook"
        publisher = webhook(url, timeout, **options)
        (outcome,) = await publisher.publish([event(1)])
        await publisher.close()
        return outcome


async def test_event_is_a_signed_cloud_event_and_both_secrets_sign_while_they_are_rotated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BARTLEBY_SINK_SECRET", NEW_SECRET)
    monkeypatch.setenv("BARTLEBY_SINK_HEADER", "Bearer t0ken")
    both, token = ["env:BARTLEBY_SINK_SECRET", SECRET], {"Authorization": "env:BARTLEBY_SINK_HEADER"}
    choices: list[dict[str, Any]] = [{}, {"secret": both, "headers": token}]
    broken = {**event(2), "data": {"error": "half a pair \ud83d"}}
    async with Receiver.running() as receiver:
        for options in choices:
            publisher = webhook(receiver.url, concurrency=1, **options)
            assert await publisher.publish([event(1), broken]) == [Published("200")] * 2
            await publisher.close()
    assert [json.loads(each.body) for each in receiver.requests] == [event(1), broken] * 2
    for number, request in enumerate(receiver.requests):
        headers = dict(request.headers)
        assert (request.path, headers["host"]) == ("/hook", f"127.0.0.1:{receiver.port}")
        assert headers["content-type"] == "application/cloudevents+json"
        assert headers["user-agent"].startswith("bartleby/")
        assert headers["webhook-id"] == json.loads(request.body)["id"]
        assert headers.get("authorization") == (None if number < 2 else "Bearer t0ken")
        Webhook(SECRET).verify(request.body, headers)
        with pytest.raises(WebhookVerificationError):
            Webhook(SECRET).verify(request.body.replace(b"letter", b"ladder"), headers)
        if number < 2:
            with pytest.raises(WebhookVerificationError):
                Webhook(NEW_SECRET).verify(request.body, headers)
        else:
            Webhook(NEW_SECRET).verify(request.body, headers)


async def test_alert_needs_no_secret_and_is_signed_if_there_is_one() -> None:
    async with Receiver.running() as receiver:
        for secret in (None, SECRET):
            publisher = webhook(receiver.url, secret=secret, format="alert", routing_key="R0UT1NG")
            assert named(await publisher.publish([event(1)])) == ["Published"]
            await publisher.close()
    plain, with_secret = receiver.requests
    assert (plain.headers["content-type"], plain.headers["webhook-id"]) == ("application/json", event(1)["id"])
    assert "webhook-signature" not in plain.headers
    body = json.loads(plain.body)
    assert (body["routing_key"], body["event"]) == ("R0UT1NG", event(1))
    Webhook(SECRET).verify(with_secret.body, dict(with_secret.headers))


ANSWERS: list[tuple[Reply, type[Outcome], str]] = [
    (Reply(202, body=b'{"status":"success"}'), Published, "202"),
    (Reply(204, body=b""), Published, "204"),
    (Reply(302, headers={"Location": "http://169.254.169.254/latest/"}), Failed, "169.254.169.254.*not followed"),
    (Reply(304, body=b""), Failed, "not followed"),
    (Reply(400, body=b"invalid_payload"), Refused, "400 Bad Request: invalid_payload"),
    *((Reply(status), Failed, str(status)) for status in (401, 403, 404, 405, 408, 425, 429, 503)),
    *((Reply(status), Refused, str(status)) for status in (409, 410, 413, 418)),
    (Reply(422, body=b"\x1b[31mno\r\n"), Refused, r"\[31mno$"),
    (Reply(500, body=b"x" * 5000), Failed, "500 Internal Server Error: x{200}$"),
    (Reply(599), Failed, "answered 599"),
    (Reply(wait=asyncio.Event()), Failed, "did not answer within 0.5 s"),
    (Reply(pause=0.05), Failed, "did not answer within 0.5 s"),
    (Reply(raw=b"", last=True), Failed, "disconnected"),
]


async def test_answer_decides_the_outcome() -> None:
    for reply, kind, text in ANSWERS:
        outcome = await outcome_of(reply, SOON if "within" in text else PATIENT)
        assert type(outcome) is kind, reply
        found = outcome.note if isinstance(outcome, Published) else outcome.why
        assert re.search(text, found), reply
        assert found.isprintable(), reply
        assert "/hook" not in found, "the path may be the secret"


async def test_retry_after_is_read_and_bounded() -> None:
    for value, expected in (
        (None, None), ("0", 0), ("120", 120), (" 5 ", 5), ("999999", 300), ("9" * 500, None), ("-1", None),
        ("inf", None), ("nan", None), ("1e3", None), ("soon", None), ("", None), ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 300), ("Fri, 31 Dec 99999 23:59:59 GMT", None),
    ):  # fmt: skip
        assert retry_after(value) == expected, value
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=240), usegmt=True)
    assert 0 < (retry_after(date) or 0) <= 240
    assert await outcome_of(Reply(503, headers={"Retry-After": "7"})) == Failed(
        "answered 503 Service Unavailable: ok", 7
    )


async def test_failed_event_stops_the_others_of_its_call_if_the_server_asks_to_wait() -> None:
    def answer(request: Request) -> Reply:
        return Reply({event(1)["id"]: 500, event(2)["id"]: 400}.get(request.headers["webhook-id"], 200))

    async with Receiver.running(answer) as receiver:
        publisher = webhook(receiver.url, concurrency=2)
        assert named(await publisher.publish(events(10))) == ["Failed", "Refused", *["Published"] * 8]
        receiver.answer = lambda _: Reply(429, headers={"Retry-After": "3"})
        outcomes = await publisher.publish(events(100))
        await publisher.close()
    assert {each.retry_after for each in outcomes if isinstance(each, Failed)} == {3.0}
    assert (named(outcomes), len(receiver.requests) <= 14) == (["Failed"] * 100, True)


async def test_body_is_not_waited_for() -> None:
    async with asyncio.timeout(PATIENT):
        assert await outcome_of(Reply(200, body=b"x" * 1000, body_wait=asyncio.Event())) == Published("200")


AUTHORITY = trustme.CA()


@pytest.fixture
def trusted(tmp_path: Path) -> str:
    AUTHORITY.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return str(tmp_path / "ca.pem")


def serving(*names: str, not_after: datetime | None = None) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    AUTHORITY.issue_cert(*names, not_after=not_after).configure_cert(made)
    return made


async def test_certificate_is_checked(trusted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here, numbered, elsewhere = serving("localhost"), serving("127.0.0.1"), serving("example.com")
    expired = serving("localhost", not_after=datetime(2020, 1, 1, tzinfo=UTC))
    rows: list[tuple[str, Outcome, str]] = [
        ("trusted", await outcome_of(context=here, ca=trusted), ""),
        ("address", await outcome_of(context=numbered, host="127.0.0.1", ca=trusted), ""),
        ("other name", await outcome_of(context=elsewhere, ca=trusted), "CERTIFICATE_VERIFY_FAILED"),
        ("unknown authority", await outcome_of(context=here), "CERTIFICATE_VERIFY_FAILED"),
        ("expired", await outcome_of(context=expired, ca=trusted), "expired"),
    ]
    with monkeypatch.context() as patched:
        patched.setenv("SSL_CERT_FILE", trusted)
        rows.append(("environment", await outcome_of(context=here), ""))
    nowhere = ssl.get_default_verify_paths()._replace(cafile="", capath="")  # as in a Python that was built elsewhere
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: nowhere)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    monkeypatch.setattr(http, "_CERTIFICATES", ("/nowhere/ca.pem", trusted))
    rows.append(("system", await outcome_of(context=here), ""))
    for name, outcome, reason in rows:
        assert isinstance(outcome, Failed if reason else Published), name
        assert reason in getattr(outcome, "why", ""), name


async def test_tls_connections_are_kept_name_their_host_and_are_replaced_when_closed(trusted: str) -> None:
    context = serving("localhost")
    wanted: list[str | None] = []
    context.sni_callback = lambda _, name, __: wanted.append(name)
    async with Receiver.running(context=context) as receiver:
        publisher = webhook(f"https://localhost:{receiver.port}/hook", ca=trusted, concurrency=2)
        batch = [event(number, data_bytes=100_000 * (number % 2)) for number in range(20)]
        for _ in range(2):
            assert await publisher.publish(batch) == [Published("200")] * 20
        assert (len(receiver.requests), receiver.connections <= 2) == (40, True)
        await receiver.stop()
        await receiver.start(context)
        assert await publisher.publish([event(2)]) == [Published("200")]
        await publisher.close()
    assert set(wanted) == {"localhost"}


async def test_server_without_tls_is_a_failure_and_a_cancelled_handshake_leaves_no_socket() -> None:
    async def hasty(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(hasty, "127.0.0.1", 0) as server:
        publisher = webhook(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
        assert named(await publisher.publish([event(1)])) == ["Failed"]
        await publisher.close()
    async with Receiver.running() as receiver:  # waits for plain text
        publisher = webhook(f"https://127.0.0.1:{receiver.port}/hook")
        publishing = asyncio.create_task(publisher.publish([event(1)]))
        await eventually(lambda: receiver.connected > 0)
        publishing.cancel()
        await asyncio.wait([publishing])
        await eventually(lambda: receiver.connected == 0)
        await publisher.close()
    assert receiver.requests == []
