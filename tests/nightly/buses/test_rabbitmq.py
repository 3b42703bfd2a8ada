"""The rabbitmq sink with a real node: routing, declaring, blocked connections, addresses and TLS."""

import asyncio
import json
import ssl
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiormq
import pytest
import trustme

from bartleby.sinks import open_publisher
from bartleby.sinks.publisher import Publisher
from tests.kit.sinks import rabbit_server
from tests.kit.sinks.conformance import PATIENCE, PATIENT, TIMEOUT, event, events, named, publish_all, why
from tests.kit.sinks.rabbit_server import Gate, Server

BUSY = 3.0  # seconds in which a busy machine makes a connection
LOW, HIGH = "0.0000001", "0.4"  # shares of the memory
pytestmark = pytest.mark.skipif(rabbit_server.missing() is not None, reason=rabbit_server.missing() or "")
Channel = aiormq.abc.AbstractChannel


@pytest.fixture
def server() -> Server:
    found = rabbit_server.shared()
    found.start()
    return found


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def opened(server: Server) -> AsyncIterator[Callable[..., Publisher]]:
    """Opens publishers, and closes them at the end."""
    made: list[Publisher] = []

    def open_one(timeout: float = PATIENT, **options: Any) -> Publisher:
        made.append(open_publisher("rabbitmq", {"url": server.url(), **options}, timeout))
        return made[-1]

    yield open_one
    for each in made:
        await each.close()


@pytest.fixture
async def channel(server: Server) -> AsyncIterator[Channel]:
    connection = await aiormq.connect(server.url())
    yield await connection.channel()
    await connection.close()


async def ids_in(server: Server, queue: str) -> list[str]:
    return [str(each.header.properties.message_id) for each in await server.read(queue)]


async def test_message_has_properties_and_its_queue_is_declared_again(
    server: Server, opened: Callable[..., Publisher], channel: Channel, name: str
) -> None:
    sent = event(7)
    publisher = opened(routing_key=name, declare=True)
    assert named(await publisher.publish([sent])) == ["Published"]
    (found,) = await server.read(name)
    assert json.loads(found.body) == sent
    properties = found.header.properties
    assert (properties.message_id, properties.message_type) == (sent["id"], sent["type"])
    assert (properties.content_type, properties.delivery_mode) == ("application/cloudevents+json", 2)
    await channel.queue_delete(name)
    assert named(await publisher.publish(events(2))) == ["Failed"] * 2
    assert named(await publisher.publish(events(2))) == ["Published"] * 2


async def test_event_that_reaches_no_queue_fails_alone_until_there_is_one(
    server: Server, opened: Callable[..., Publisher], channel: Channel, name: str
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
    server: Server, opened: Callable[..., Publisher], channel: Channel, name: str
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


async def test_declaring_changes_nothing_that_exists(
    opened: Callable[..., Publisher], channel: Channel, name: str
) -> None:
    await channel.queue_declare(name, arguments={"x-max-length": 1000})
    await channel.exchange_declare(name, exchange_type="fanout")
    await channel.queue_bind(name, name)
    assert named(await opened(routing_key=name, declare=True).publish(events(2))) == ["Published"] * 2
    assert named(await opened(exchange=name, declare=True).publish(events(2))) == ["Published"] * 2


async def test_full_queue_is_waited_for(opened: Callable[..., Publisher], channel: Channel, name: str) -> None:
    await channel.queue_declare(name, arguments={"x-max-length": 2, "x-overflow": "reject-publish"})
    publisher = opened(routing_key=name)
    assert named(await publisher.publish(events(2))) == ["Published"] * 2
    outcomes = await publisher.publish([event(3)])
    assert named(outcomes) == ["Failed"]
    assert "nack" in why(outcomes[0])
    await channel.queue_purge(name)
    assert named(await publisher.publish([event(3)])) == ["Published"]


async def test_blocked_connection_fails_in_time_and_continues_later(
    server: Server, opened: Callable[..., Publisher], name: str
) -> None:
    publisher, late = opened(BUSY, routing_key=name, declare=True), opened(BUSY, routing_key=name)
    await publish_all(publisher, [event(1)])
    server.control("set_vm_memory_high_watermark", LOW)
    try:
        for each in (publisher, publisher, late, late):
            outcomes = await asyncio.wait_for(each.publish(events(5, first=2)), PATIENCE)
            assert named(outcomes) == ["Failed"] * 5
            assert "short of memory" in why(outcomes[0])
    finally:
        server.control("set_vm_memory_high_watermark", HIGH)
    for each in (publisher, late):
        await publish_all(each, events(5, first=2))
    assert set(await ids_in(server, name)) == {each["id"] for each in events(6)}


async def test_closing_does_not_wait_for_a_server_that_hangs_and_leaves_no_task(
    server: Server, opened: Callable[..., Publisher], name: str
) -> None:
    before = asyncio.all_tasks()
    publisher = opened(TIMEOUT, routing_key=name, declare=True)
    await publish_all(publisher, events(10))
    server.freeze()
    try:
        assert set(named(await publisher.publish(events(100)))) == {"Failed"}
        await asyncio.wait_for(publisher.close(), PATIENCE)
    finally:
        server.thaw()
    if left := asyncio.all_tasks() - before:
        _, pending = await asyncio.wait(left, timeout=30)
        assert not pending


async def test_stopped_node_is_a_failure_until_it_is_started(
    server: Server, opened: Callable[..., Publisher], name: str
) -> None:
    publisher = opened(TIMEOUT, routing_key=name, declare=True)
    await publish_all(publisher, events(3))
    server.stop()
    for _ in range(2):
        outcomes = await publisher.publish(events(3, first=4))
        assert named(outcomes) == ["Failed"] * 3
        assert str(server.port) in why(outcomes[0])
    server.start()
    await publish_all(publisher, events(3, first=4))
    assert list(dict.fromkeys(await ids_in(server, name))) == [each["id"] for each in events(6)]


async def test_wrong_address_is_a_failure_with_its_reason(server: Server, opened: Callable[..., Publisher]) -> None:
    for old, new, reason in (
        ("guest:guest", "guest:hunter2", "ACCESS_REFUSED"),
        ("guest:guest", "unknown:hunter2", "ACCESS_REFUSED"),
        ("127.0.0.1", "bus.invalid", "bus.invalid"),
        ("amqp://", "amqps://", "SSL"),
        (f"{server.port}/", f"{server.port}/elsewhere", "vhost"),
    ):
        outcomes = await opened(url=server.url().replace(old, new)).publish(events(2))
        assert named(outcomes) == ["Failed"] * 2, new
        assert reason in why(outcomes[0]), new
        assert "hunter2" not in why(outcomes[0])


async def test_tls_is_used_and_the_certificate_checked(
    server: Server, opened: Callable[..., Publisher], name: str, tmp_path: Path
) -> None:
    authority, trusted = trustme.CA(), tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(str(trusted))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    gate = Gate(server.port, context)
    await gate.open()
    try:
        url = f"amqps://guest:guest@127.0.0.1:{gate.port}/"
        publisher = opened(url=f"{url}?cafile={trusted}", routing_key=name, declare=True)
        assert named(await publisher.publish(events(3))) == ["Published"] * 3
        await publisher.close()
        outcomes = await opened(url=url, routing_key=name).publish(events(3))
        assert named(outcomes) == ["Failed"] * 3
        assert "CERTIFICATE_VERIFY_FAILED" in why(outcomes[0])
    finally:
        await gate.shut()


async def test_event_that_is_too_large_is_found_among_the_others(
    server: Server, opened: Callable[..., Publisher], name: str
) -> None:
    publisher = opened(routing_key=name, declare=True)
    batch = [*events(10), event(11, data_bytes=8000), *events(10, first=12)]
    server.control("eval", "application:set_env(rabbit, max_message_size, 4000).")
    try:
        outcomes = await publisher.publish(batch)
    finally:
        server.control("eval", f"application:set_env(rabbit, max_message_size, {rabbit_server.LARGEST}).")
    assert named(outcomes) == ["Published"] * 10 + ["Refused"] + ["Published"] * 10
    assert "4000" in why(outcomes[10])
    assert set(await ids_in(server, name)) == {each["id"] for each in batch if each["id"] != event(11)["id"]}
