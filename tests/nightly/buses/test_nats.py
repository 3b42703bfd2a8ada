"""The nats sink with real servers: streams, subjects, limits, logins, TLS, and a cluster that is not complete."""

import asyncio
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
from nats.aio.msg import Msg
from nats.js.api import DiscardPolicy, StreamConfig

from bartleby.sinks import open_publisher
from bartleby.sinks.nats import NatsPublisher
from bartleby.sinks.publisher import Published, Publisher
from tests.kit.sinks.conformance import (
    PATIENT,
    TIMEOUT,
    Open,
    event,
    events,
    ids_of,
    named,
    publish_all,
    stored_ids,
    why,
)
from tests.kit.sinks.harness_nats import NAMES, Cluster, Harness, connected, server
from tests.kit.sinks.servers import eventually, free_port

Guarded: TypeAlias = Callable[[str], Awaitable[int]]
pytestmark = pytest.mark.skipif(Harness.missing() is not None, reason=str(Harness.missing()))


async def reason(publisher: Publisher) -> str:
    (outcome,) = await publisher.publish([event(1)])
    return why(outcome)


async def add_stream(sink: Harness, **settings: Any) -> None:
    async with connected([sink.port]) as client:
        await client.jetstream().add_stream(StreamConfig(**settings))


async def test_missing_stream_is_a_failure_or_created(sink: Harness, opened: Open) -> None:
    strict, publisher = opened(create=False), opened(subjects=["bartleby.>", "more.>"])
    assert "no stream takes subject bartleby.dead_letter.created" in await reason(strict)
    assert await stored_ids(publisher) == []
    assert named(await publisher.publish(events(3))) == ["Published"] * 3
    assert named(await strict.publish([event(4)])) == ["Published"]
    async with connected([sink.port]) as client:
        config = (await client.jetstream().stream_info("bartleby")).config
        assert (config.subjects, config.num_replicas, config.storage) == (["bartleby.>", "more.>"], 1, "file")
        await client.jetstream().delete_stream("bartleby")
    assert "no stream takes subject" in await reason(publisher)
    assert named(await publisher.publish([event(4)])) == ["Published"], "it is created again"
    assert await stored_ids(publisher) == [event(4)["id"]]


async def test_limits_of_server_and_stream_refuse_one_event_alone(sink: Harness, opened: Open) -> None:
    publisher = opened()
    await publisher.publish([event(1)])
    assert isinstance(publisher, NatsPublisher)
    fixed = publisher._message(event(2, data_bytes=1)).size - 1
    outcomes = await publisher.publish([event(2, data_bytes=65536 - fixed), event(3, data_bytes=65537 - fixed)])
    assert named(outcomes) == ["Published", "Refused"]
    assert why(outcomes[1]) == "65537 bytes with its headers; the server takes 65536"
    full = {"max_msgs": 2, "discard": DiscardPolicy.NEW}
    await add_stream(sink, name="small", subjects=["small.>"], max_msg_size=2000, **full)
    small = opened(stream="small", subject="small.{event}")
    outcomes = await small.publish([event(1), event(2, data_bytes=3000), event(3)])
    assert named(outcomes) == ["Published", "Refused", "Published"]
    assert "message size exceeds maximum allowed" in why(outcomes[1])
    (outcome,) = await small.publish([event(4)])
    assert named([outcome]) == ["Failed"], "a full stream is waited for"
    assert "maximum messages exceeded" in why(outcome)
    async with connected([sink.port]) as client:
        await client.jetstream().purge_stream("small")
    assert named(await small.publish([event(4)])) == ["Published"]


async def test_answer_that_is_not_from_the_stream_is_a_failure(sink: Harness, opened: Open) -> None:
    async def answer(message: Msg) -> None:
        await message.respond(b"42")

    await add_stream(sink, name="another", subjects=["bartleby.>"])
    strict = opened(create=False)
    assert "expected stream does not match: another stream has this subject" in await reason(strict)
    assert "overlap" in await reason(opened())
    async with connected([sink.port]) as client:
        await client.subscribe("questions.>", cb=answer)
        await client.subscribe("silence.>")
        await client.flush()
        answered = opened(create=False, subject="questions.{type}")
        assert "something that is no stream" in await reason(answered)
        silent = opened(TIMEOUT, create=False, subject="silence.{type}")
        assert f"not confirmed within {TIMEOUT:g} s" in await reason(silent)


async def test_event_is_stored_once_and_messages_of_others_have_no_id(sink: Harness, opened: Open) -> None:
    publisher = opened()
    await publish_all(publisher, events(1200))
    assert await publisher.publish([event(1)]) == [Published("bartleby 1 (had it)")]
    async with connected([sink.port]) as client:
        await client.jetstream().publish("bartleby.by.another.client", b"{}")
    batch = [event(number, data_bytes=30_000) for number in range(1201, 1501)]  # larger than the buffers
    await publish_all(publisher, batch)
    assert await stored_ids(publisher) == ids_of(events(1500))


async def test_servers_are_tried_in_turn_and_named_without_password(sink: Harness) -> None:
    accepted: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
    ports = [free_port(), silent.sockets[0].getsockname()[1], sink.port]
    servers = [f"nats://bob:hush@127.0.0.1:{port}" for port in ports]
    publisher = open_publisher("nats", {"servers": servers, "create": True}, 5.0)
    outcomes = await asyncio.wait_for(publisher.publish(events(10)), PATIENT)
    assert named(outcomes) == ["Published"] * 10
    await publisher.close()
    await sink.stop()
    found = await reason(publisher)
    assert [f"127.0.0.1:{port}: " in found for port in ports] == [True] * 3
    assert "hush" not in found
    silent.close()
    assert accepted
    for writer in accepted:
        writer.close()


# Logins and TLS.


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


async def test_password_token_and_permissions_are_enforced(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    port = await guarded("authorization { user: bob, password: secret }")
    assert "Published" in await publish(port, user="bob", password="secret")
    assert "Published" in await publish(port, host="bob:secret@127.0.0.1")
    refused = await publish(port, user="bob", password="wrong")
    assert "Authorization Violation" in refused
    assert "wrong" not in refused
    port = await guarded("authorization { token: s3cret }")
    monkeypatch.setenv("BARTLEBY_SINK_TOKEN", "s3cret")
    assert "Published" in await publish(port, token="env:BARTLEBY_SINK_TOKEN")
    assert "Authorization Violation" in await publish(port, token="another")
    permissions = '{publish: "$JS.API.>", subscribe: ">"}'
    port = await guarded(f"authorization {{ users: [{{user: bob, password: secret, permissions: {permissions}}}] }}")
    refused = await publish(port, user="bob", password="secret", within=5)
    assert "Failed not confirmed" in refused
    assert "permissions violation for publish" in refused.lower()
    port = await guarded("jetstream: disabled")
    assert "Failed" in await publish(port)
    assert "no stream takes subject" in await publish(port, create=False)


async def test_credentials_and_limits_of_an_account_are_enforced(guarded: Guarded, tmp_path: Path) -> None:
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
    assert "Authorization Violation" in await publish(port)
    options = {"url": f"nats://127.0.0.1:{port}", "credentials": str(file), "create": True}
    publisher, vanishing = (open_publisher("nats", options, PATIENT) for _ in range(2))
    # what the account may send is less than what the server takes
    outcomes = await publisher.publish([event(2), event(3, data_bytes=4000), event(4)])
    assert named(outcomes) == ["Published", "Refused", "Published"]
    file.unlink()
    assert "No such file" in await reason(vanishing)
    for each in (publisher, vanishing):
        await each.close()


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
    def __init__(self, prefix: int) -> None:
        seed = nkeys.encode_seed(os.urandom(32), prefix)
        self.seed = seed.decode()
        self._pair = nkeys.from_seed(bytearray(seed))
        self.public = self._pair.public_key.decode()

    def signs(self, subject: "Key", kind: str, more: dict[str, Any]) -> str:
        """Return a token that says what another key may do."""

        def based(value: bytes) -> str:
            return base64.urlsafe_b64encode(value).rstrip(b"=").decode()

        names = {"jti": f"{kind}-{subject.public}", "iss": self.public, "sub": subject.public, "name": kind}
        claims = {**names, "iat": int(time.time()), "nats": {**more, "type": kind, "version": 2}}
        head = {"typ": "JWT", "alg": "ed25519-nkey"}
        signed = ".".join(based(json.dumps(each).encode()) for each in (head, claims))
        return f"{signed}.{based(self._pair.sign(signed.encode()))}"


async def test_cluster_needs_a_majority_and_another_server_is_used_when_one_freezes(tmp_path: Path) -> None:
    """That the death of the leader loses nothing is shown by test_bus_faults.py."""
    cluster = Cluster(tmp_path)
    try:
        await cluster.start()
        publisher = open_publisher("nats", cluster.options(), TIMEOUT)
        await publish_all(publisher, events(100))
        await eventually(cluster.leader)
        for name in NAMES[:2]:
            await cluster.servers[name].kill()
        for _ in range(3):
            assert set(named(await publisher.publish(events(20, first=101)))) == {"Failed"}
        await cluster.start()
        await publish_all(publisher, events(20, first=101))
        await eventually(cluster.leader)
        for number, name in enumerate(NAMES, 121):
            cluster.servers[name].freeze()
            await publish_all(publisher, events(1, first=number))
            cluster.servers[name].thaw()
            await eventually(cluster.leader)
        await publisher.close()
        found = [each.id for each in await cluster.arrived()]
        assert sorted(found) == sorted(ids_of(events(123))), "the stream drops duplicates"
    finally:
        await cluster.stop()
