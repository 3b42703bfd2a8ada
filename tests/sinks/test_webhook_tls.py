"""The webhook sink over TLS, with a certificate authority of the test."""

import asyncio
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trustme

from bartleby.sinks import http, open_publisher
from bartleby.sinks.publisher import Failed, Outcome, Published, Publisher
from tests.kit.sinks.conformance import event
from tests.kit.sinks.receiver import Receiver
from tests.sinks.conftest import Eventually

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
TIMEOUT = 15.0


def opened(url: str, timeout: float = TIMEOUT, **options: Any) -> Publisher:
    return open_publisher("webhook", {"url": url, "secret": SECRET, "allow_private": True, **options}, timeout)


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


async def test_a_certificate_of_a_trusted_authority(authority: trustme.CA, trusted: str) -> None:
    assert await outcome_at(serving(authority, "localhost"), ca=trusted) == Published("200")


async def test_an_address_in_the_certificate(authority: trustme.CA, trusted: str) -> None:
    outcome = await outcome_at(serving(authority, "127.0.0.1"), host="127.0.0.1", ca=trusted)
    assert outcome == Published("200")


async def test_a_certificate_for_another_name(authority: trustme.CA, trusted: str) -> None:
    outcome = await outcome_at(serving(authority, "example.com"), ca=trusted)
    assert isinstance(outcome, Failed)
    assert "CERTIFICATE_VERIFY_FAILED" in outcome.why


async def test_a_certificate_of_a_stranger(authority: trustme.CA) -> None:
    outcome = await outcome_at(serving(authority, "localhost"))
    assert isinstance(outcome, Failed)
    assert "CERTIFICATE_VERIFY_FAILED" in outcome.why


async def test_a_certificate_that_is_too_old(authority: trustme.CA, trusted: str) -> None:
    old = serving(authority, "localhost", not_after=datetime(2020, 1, 1, tzinfo=UTC))
    outcome = await outcome_at(old, ca=trusted)
    assert isinstance(outcome, Failed)
    assert "expired" in outcome.why


async def test_connections_are_kept_and_say_whom_they_want(authority: trustme.CA, trusted: str) -> None:
    context = serving(authority, "localhost")
    wanted: list[str | None] = []
    context.sni_callback = lambda _, name, __: wanted.append(name)
    async with Receiver.running(context=context) as receiver:
        publisher = opened(f"https://localhost:{receiver.port}/hook", ca=trusted, concurrency=2)
        batch = [event(number, data_bytes=100_000 * (number % 2)) for number in range(20)]
        for _ in range(2):
            assert await publisher.publish(batch) == [Published("200")] * 20
        await publisher.close()
        assert len(receiver.requests) == 40
        assert receiver.connections <= 2
        assert set(wanted) == {"localhost"}


async def test_a_kept_connection_that_is_closed_meanwhile(authority: trustme.CA, trusted: str) -> None:
    async with Receiver.running(context=serving(authority, "localhost")) as receiver:
        publisher = opened(f"https://localhost:{receiver.port}/hook", ca=trusted)
        assert await publisher.publish([event(1)]) == [Published("200")]
        await receiver.stop()
        await receiver.start(serving(authority, "localhost"))
        assert await publisher.publish([event(2)]) == [Published("200")]
        await publisher.close()


async def test_who_speaks_before_the_handshake_is_not_listened_to(authority: trustme.CA, trusted: str) -> None:
    async def hasty(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(hasty, "127.0.0.1", 0) as server:
        publisher = opened(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/", ca=trusted)
        (outcome,) = await publisher.publish([event(1)])
        await publisher.close()
    assert isinstance(outcome, Failed)


async def test_certificates_named_by_the_environment(
    authority: trustme.CA, trusted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", trusted)
    assert await outcome_at(serving(authority, "localhost")) == Published("200")


async def test_certificates_where_this_system_has_them(
    authority: trustme.CA, trusted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python that was built elsewhere looks for them in vain."""
    nowhere = ssl.get_default_verify_paths()._replace(cafile="", capath="")
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: nowhere)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    monkeypatch.setattr(http, "_CERTIFICATES", ("/nowhere/ca.pem", trusted))
    assert await outcome_at(serving(authority, "localhost")) == Published("200")


async def test_a_server_without_tls() -> None:
    async with Receiver.running() as receiver:
        publisher = opened(f"https://127.0.0.1:{receiver.port}/hook", 1.0)
        (outcome,) = await publisher.publish([event(1)])
        await publisher.close()
        assert isinstance(outcome, Failed)
        assert receiver.requests == []


async def test_a_handshake_that_is_given_up_leaves_no_socket_behind(eventually: Eventually) -> None:
    async with Receiver.running() as receiver:  # it waits for a request in plain text

        async def connected() -> bool:
            return receiver.connected > 0

        async def left() -> bool:
            return receiver.connected == 0

        publisher = opened(f"https://127.0.0.1:{receiver.port}/hook")
        publishing = asyncio.create_task(publisher.publish([event(1)]))
        await eventually(connected)
        publishing.cancel()
        await asyncio.wait([publishing])
        await eventually(left)
        await publisher.close()
