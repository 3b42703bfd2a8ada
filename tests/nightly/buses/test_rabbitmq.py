"""The rabbitmq sink with a real node: routing, declaring, blocked connections, addresses and TLS."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiormq
import pytest

from tests.kit.sinks.conformance import PATIENCE, Open, event, events, ids_of, named, publish_all, why
from tests.kit.sinks.harness_rabbitmq import Harness, Server, shared

BUSY = 3.0  # seconds in which a busy machine makes a connection
LOW, HIGH = "0.0000001", "0.4"  # shares of the memory
pytestmark = pytest.mark.skipif(Harness.missing() is not None, reason=str(Harness.missing()))
Channel = aiormq.abc.AbstractChannel


@pytest.fixture
def server(sink: Harness) -> Server:
    return shared()


@pytest.fixture
def options(server: Server) -> dict[str, Any]:
    return {"url": server.url()}


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def channel(server: Server) -> AsyncIterator[Channel]:
    async with server.channel() as opened:
        yield opened


async def ids_in(server: Server, queue: str) -> list[str]:
    return [key async for key, _ in server.read(queue)]


async def test_event_that_reaches_no_queue_fails_alone_until_there_is_one(
    server: Server, opened: Open, channel: Channel, name: str
) -> None:
    await channel.queue_declare(f"{name}.orders")
    lost = event(2)
    lost["data"]["queue"] = "nowhere"
    publisher = opened(routing_key=f"{name}.{{queue}}")
    outcomes = await publisher.publish([event(1), lost, event(3)])
    assert named(outcomes) == ["Published", "Failed", "Published"]
    assert f"{name}.nowhere" in why(outcomes[1])
    await channel.queue_declare(f"{name}.nowhere", durable=True)
    assert named(await publisher.publish([lost])) == ["Published"]
    assert await ids_in(server, f"{name}.nowhere") == [lost["id"]]
    long = event(2)
    long["data"]["queue"] = "q" * 250
    assert named(await publisher.publish([event(4), long])) == ["Published", "Refused"], "its key is too long"


async def test_exchange_routes_by_type_and_a_missing_one_is_named(
    server: Server, opened: Open, channel: Channel, name: str
) -> None:
    missing = opened(exchange=name, routing_key="all")
    for _ in range(2):
        outcomes = await missing.publish(events(5))
        assert named(outcomes) == ["Failed"] * 5
        assert name in why(outcomes[0])
    publisher = opened(exchange=name, declare=True)
    assert named(await publisher.publish([event(1)])) == ["Failed"], "there is no queue yet"
    await channel.queue_declare(name)
    await channel.queue_bind(name, name, "bartleby.dead_letter.#")
    opening = {**event(2), "type": "io.bartleby.group.opened"}
    assert named(await publisher.publish([event(1), opening])) == ["Published", "Failed"]
    assert await ids_in(server, name) == [event(1)["id"]]
    await channel.queue_bind(name, name, "all")
    assert named(await missing.publish(events(5))) == ["Published"] * 5


async def test_queue_is_declared_again_and_one_that_exists_is_not_changed(
    opened: Open, channel: Channel, name: str
) -> None:
    publisher = opened(routing_key=name, declare=True)
    assert named(await publisher.publish(events(2))) == ["Published"] * 2
    await channel.queue_delete(name)
    assert named(await publisher.publish(events(2))) == ["Failed"] * 2
    assert named(await publisher.publish(events(2))) == ["Published"] * 2
    await channel.queue_delete(name)
    await channel.queue_declare(name, arguments={"x-max-length": 2, "x-overflow": "reject-publish"})
    await channel.exchange_declare(name, exchange_type="fanout")
    await channel.queue_bind(name, name)
    assert named(await opened(exchange=name, declare=True).publish([event(1)])) == ["Published"]
    full = opened(routing_key=name, declare=True)
    assert named(await full.publish([event(2)])) == ["Published"]
    outcomes = await full.publish([event(3)])
    assert named(outcomes) == ["Failed"], "a full queue is waited for"
    assert "nack" in why(outcomes[0])
    await channel.queue_purge(name)
    assert named(await full.publish([event(3)])) == ["Published"]


async def test_blocked_connection_fails_in_time_and_continues_later(server: Server, opened: Open, name: str) -> None:
    publisher, late = opened(BUSY, routing_key=name, declare=True), opened(BUSY, routing_key=name)
    await publish_all(publisher, [event(1)])
    await server.control("set_vm_memory_high_watermark", LOW)
    try:
        for each in (publisher, publisher, late, late):
            outcomes = await asyncio.wait_for(each.publish(events(5, first=2)), PATIENCE)
            assert named(outcomes) == ["Failed"] * 5
            assert "short of memory" in why(outcomes[0])
    finally:
        await server.control("set_vm_memory_high_watermark", HIGH)
    for each in (publisher, late):
        await publish_all(each, events(5, first=2))
    assert set(await ids_in(server, name)) == set(ids_of(events(6)))


async def test_address_login_and_certificate_are_checked(server: Server, opened: Open, name: str) -> None:
    secure = server.url(server.tls_port).replace("amqp:", "amqps:")
    publisher = opened(url=f"{secure}?cafile={server.authority}", routing_key=name, declare=True)
    assert named(await publisher.publish(events(3))) == ["Published"] * 3
    for url, reason in (
        (server.url().replace("guest:guest", "guest:hunter2"), "ACCESS_REFUSED"),
        (server.url().replace("guest:guest", "unknown:hunter2"), "ACCESS_REFUSED"),
        (server.url().replace("127.0.0.1", "bus.invalid"), "bus.invalid"),
        (server.url().replace("amqp:", "amqps:"), "SSL"),
        (f"{server.url()}elsewhere", "vhost"),
        (secure, "CERTIFICATE_VERIFY_FAILED"),
    ):
        outcomes = await opened(url=url, routing_key=name).publish(events(2))
        assert named(outcomes) == ["Failed"] * 2, url
        assert reason in why(outcomes[0]), url
        assert "hunter2" not in why(outcomes[0])
