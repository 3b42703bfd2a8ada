"""The nats sink with servers that require a login or TLS, and with a cluster whose servers die and freeze."""

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

from bartleby.sinks import open_publisher
from bartleby.sinks.publisher import Publisher
from tests.kit.sinks.conformance import PATIENT, TIMEOUT, event, events, named, publish_all, why
from tests.kit.sinks.harness_nats import Harness, server, stored
from tests.kit.sinks.nats_cluster import NAMES, Cluster
from tests.kit.sinks.servers import free_port, until

Guarded: TypeAlias = Callable[[str], Awaitable[int]]
pytestmark = pytest.mark.skipif(Harness.missing() is not None, reason=str(Harness.missing()))


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    """Starts a server with additional configuration, and returns its port."""
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
    """Publish an event; return the name of its outcome and the reason."""
    publisher = open_publisher("nats", {"url": f"{scheme}://{host}:{port}", "create": True, **options}, within)
    (outcome,) = await publisher.publish([event(1)])
    await publisher.close()
    return f"{named([outcome])[0]} {getattr(outcome, 'why', '')}"


async def test_password_token_and_permissions(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    port = await guarded("authorization { user: bob, password: secret }")
    assert "Published" in await publish(port, user="bob", password="secret")
    assert "Published" in await publish(port, host="bob:secret@127.0.0.1")
    reason = await publish(port, user="bob", password="wrong")
    assert "Authorization Violation" in reason
    assert "wrong" not in reason
    assert "Authorization Violation" in await publish(port)
    port = await guarded("authorization { token: s3cret }")
    monkeypatch.setenv("BARTLEBY_SINK_TOKEN", "s3cret")
    assert "Published" in await publish(port, token="env:BARTLEBY_SINK_TOKEN")
    assert "Authorization Violation" in await publish(port, token="another")
    permissions = '{publish: "$JS.API.>", subscribe: ">"}'
    port = await guarded(f"authorization {{ users: [{{user: bob, password: secret, permissions: {permissions}}}] }}")
    reason = await publish(port, user="bob", password="secret", within=5)
    assert "Failed not confirmed" in reason
    assert "permissions violation for publish" in reason.lower()
    port = await guarded("jetstream: disabled")
    assert "Failed" in await publish(port)
    assert "no stream takes subject" in await publish(port, create=False)


async def test_credentials_and_limits_of_an_account(guarded: Guarded, tmp_path: Path) -> None:
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
    vanishing = open_publisher("nats", {"url": f"nats://127.0.0.1:{port}", "credentials": str(file)}, TIMEOUT)
    file.unlink()
    (outcome,) = await vanishing.publish([event(1)])
    assert "No such file" in why(outcome)
    await vanishing.close()


async def test_tls_is_used_and_checked(guarded: Guarded, tmp_path: Path) -> None:
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
    assert "certificate verify failed" in await publish(port, scheme="tls")
    assert "the server offers no TLS" in await publish(await guarded(""), scheme="tls")
    picky = await guarded(
        f'tls {{ cert_file: "{certificate}", key_file: "{key}", ca_file: "{ca}", verify: true, handshake_first: true }}'
    )
    ours: dict[str, Any] = {"tls_ca": str(ca), "tls_certificate": str(certificate), "tls_key": str(key)}
    assert "Published" in await publish(picky, scheme="tls", tls_first=True, **ours)
    assert "Failed" in await publish(picky, scheme="tls", tls_first=True, tls_ca=str(ca))
    assert "Failed" in await publish(picky, scheme="tls", **ours)


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


# Cluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


@pytest.fixture
async def publisher(cluster: Cluster) -> AsyncIterator[Publisher]:
    """A publisher whose stream has a leader and three replicas."""
    made = open_publisher("nats", cluster.options(), TIMEOUT)

    async def works() -> bool:
        return named(await made.publish([event(0)])) == ["Published"]

    await until(works)
    await until(cluster.complete)
    yield made
    await made.close()


async def test_cluster_needs_a_majority_and_another_server_is_used_when_one_freezes(
    cluster: Cluster, publisher: Publisher
) -> None:
    """That the death of the leader loses nothing is shown by test_bus_faults.py."""
    await publish_all(publisher, events(100))
    for name in NAMES[:2]:
        await cluster.servers[name].kill()
    for _ in range(3):
        assert set(named(await publisher.publish(events(20, first=101)))) == {"Failed"}
    await cluster.start()
    await publish_all(publisher, events(20, first=101))
    await until(cluster.complete)
    for number, name in enumerate(NAMES, 121):
        cluster.servers[name].freeze()
        await publish_all(publisher, events(1, first=number))
        cluster.servers[name].thaw()
        await until(cluster.complete)
    found = [each.id for each in await stored(cluster.running(), "bartleby")]
    assert set(found) >= {each["id"] for each in events(123)}
    assert len(found) == len(set(found)), "the stream drops duplicates"
