"""The nats sink and servers that want to know who it is: passwords, tokens, credentials, permissions, TLS."""

import base64
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeAlias

import nkeys  # type: ignore[import-untyped]
import pytest
import trustme

from bartleby.errors import InvalidSettings
from bartleby.sinks import open_publisher
from bartleby.sinks.publisher import Failed
from tests.kit.sinks.conformance import PATIENCE, PATIENT, TIMEOUT, event, named
from tests.kit.sinks.harness_nats import Harness, server
from tests.kit.sinks.servers import free_port

Guarded: TypeAlias = Callable[[str], Awaitable[int]]


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    """Starts a server with something in its configuration, and returns its port."""
    if reason := Harness.missing():
        pytest.skip(reason)
    async with AsyncExitStack() as started:

        async def start(configuration: str) -> int:
            port = free_port()
            process = server(f"guarded-{port}", port, tmp_path, configuration)
            await process.start()
            started.push_async_callback(process.stop)
            return port

        yield start


async def publish(
    port: int, scheme: str = "nats", host: str = "127.0.0.1", within: float = PATIENT, **options: Any
) -> str:
    """Publish an event; return the name of its outcome, and why."""
    publisher = open_publisher("nats", {"url": f"{scheme}://{host}:{port}", "create": True, **options}, within)
    begun = time.monotonic()
    (outcome,) = await publisher.publish([event(1)])
    assert time.monotonic() - begun < within + PATIENCE
    await publisher.close()
    return f"{named([outcome])[0]} {getattr(outcome, 'why', '')}"


async def test_a_user_with_a_password(guarded: Guarded) -> None:
    port = await guarded("authorization { user: bob, password: secret }")
    assert "Published" in await publish(port, user="bob", password="secret")
    assert "Published" in await publish(port, host="bob:secret@127.0.0.1")
    told = await publish(port, user="bob", password="wrong")
    assert "Failed" in told
    assert "Authorization Violation" in told
    assert "wrong" not in told
    assert "Authorization Violation" in await publish(port)


async def test_a_secret_from_the_environment(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    port = await guarded("authorization { token: s3cret }")
    monkeypatch.setenv("BARTLEBY_SINK_TOKEN", "s3cret")
    assert "Published" in await publish(port, token="env:BARTLEBY_SINK_TOKEN")
    assert "Authorization Violation" in await publish(port, token="another")
    with pytest.raises(InvalidSettings, match="BARTLEBY_SINK_NO_SUCH"):
        await publish(port, token="env:BARTLEBY_SINK_NO_SUCH")


async def test_a_subject_that_we_may_not_publish_to(guarded: Guarded) -> None:
    port = await guarded(
        """authorization { users: [
            {user: bob, password: secret, permissions: {publish: "$JS.API.>", subscribe: ">"}}
        ] }"""
    )
    told = await publish(port, user="bob", password="secret", within=5)
    assert "Failed not confirmed" in told
    assert "permissions violation for publish" in told.lower()


async def test_a_server_without_jetstream(guarded: Guarded, tmp_path: Path) -> None:
    port = await guarded("jetstream: disabled")
    assert "Failed" in await publish(port)
    assert "no stream takes subject" in await publish(port, create=False)


async def test_credentials_of_an_account(guarded: Guarded, tmp_path: Path) -> None:
    operator, system, account, user = (Key(prefix) for prefix in (OPERATOR, ACCOUNT, ACCOUNT, USER))
    unlimited = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    stored = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
    permitted = {"subs": -1, "data": -1, "payload": 4000, "pub": {}, "sub": {}}
    port = await guarded(
        f"""
        operator: {operator.signs(operator, "operator", {})}
        resolver: MEMORY
        system_account: {system.public}
        resolver_preload: {{
            {system.public}: {operator.signs(system, "account", {"limits": unlimited})}
            {account.public}: {operator.signs(account, "account", {"limits": {**unlimited, **stored}})}
        }}
        """
    )
    file = tmp_path / "user.creds"
    file.write_text(
        f"-----BEGIN NATS USER JWT-----\n{account.signs(user, 'user', permitted)}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )
    assert "Published" in await publish(port, credentials=str(file))
    assert "Authorization Violation" in await publish(port)
    # what the account may send is less than what the server takes
    publisher = open_publisher("nats", {"url": f"nats://127.0.0.1:{port}", "credentials": str(file)}, PATIENT)
    outcomes = await publisher.publish([event(2), event(3, data_bytes=4000), event(4)])
    assert named(outcomes) == ["Published", "Refused", "Published"]
    await publisher.close()


def test_credentials_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "user.creds"
    file.write_text("hello\n")
    with pytest.raises(InvalidSettings, match="'credentials' of a nats sink"):
        open_publisher("nats", {"url": "nats://127.0.0.1", "credentials": str(file)}, TIMEOUT)


async def test_credentials_that_vanish_are_a_failure(guarded: Guarded, tmp_path: Path) -> None:
    file = tmp_path / "user.creds"
    file.write_text("-----BEGIN NATS USER JWT-----\nx\n-----BEGIN USER NKEY SEED-----\ny\n")
    options = {"url": f"nats://127.0.0.1:{await guarded('')}", "credentials": str(file)}
    publisher = open_publisher("nats", options, TIMEOUT)
    file.unlink()
    (outcome,) = await publisher.publish([event(1)])
    assert isinstance(outcome, Failed)
    assert "No such file" in outcome.why
    await publisher.close()


async def test_tls(guarded: Guarded, tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    certificate, key, ca, other = (tmp_path / name for name in ("server.pem", "server.key", "ca.pem", "other.pem"))
    issued = authority.issue_cert("127.0.0.1", "localhost")
    certificate.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(key))
    authority.cert_pem.write_to_path(str(ca))
    stranger.cert_pem.write_to_path(str(other))
    port = await guarded(f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}')
    assert "Published" in await publish(port, scheme="tls", tls_ca=str(ca))
    assert "Failed" in await publish(port, scheme="tls", tls_ca=str(other))
    told = await publish(port, scheme="tls")
    assert "certificate verify failed" in told
    picky = await guarded(
        f'tls {{ cert_file: "{certificate}", key_file: "{key}", ca_file: "{ca}", verify: true, handshake_first: true }}'
    )
    ours: dict[str, Any] = {"tls_ca": str(ca), "tls_certificate": str(certificate), "tls_key": str(key)}
    assert "Published" in await publish(picky, scheme="tls", tls_first=True, **ours)
    assert "Failed" in await publish(picky, scheme="tls", tls_first=True, tls_ca=str(ca))
    assert "Failed" in await publish(picky, scheme="tls", **ours)


async def test_a_server_that_offers_no_tls_gets_no_events(guarded: Guarded) -> None:
    assert "the server offers no TLS" in await publish(await guarded(""), scheme="tls")


OPERATOR, ACCOUNT, USER = nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_USER


class Key:
    """A pair of keys, and the tokens that it signs."""

    def __init__(self, prefix: int) -> None:
        seed = nkeys.encode_seed(os.urandom(32), prefix)
        self.seed = seed.decode()
        self._pair = nkeys.from_seed(bytearray(seed))
        self.public = self._pair.public_key.decode()

    def signs(self, subject: "Key", kind: str, more: dict[str, Any]) -> str:
        """Return a token that says what another key may do."""
        claims = {
            "jti": f"{kind}-{subject.public}",
            "iat": int(time.time()),
            "iss": self.public,
            "sub": subject.public,
            "name": kind,
            "nats": {**more, "type": kind, "version": 2},
        }
        signed = ".".join(_packed(each) for each in ({"typ": "JWT", "alg": "ed25519-nkey"}, claims))
        return f"{signed}.{_based(self._pair.sign(signed.encode()))}"


def _packed(value: object) -> str:
    return _based(json.dumps(value).encode())


def _based(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()
