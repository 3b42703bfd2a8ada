"""What is RabbitMQ's own; what all sinks share is in test_conformance.py."""

import asyncio
import json
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiormq
import pytest
import trustme

from bartleby.sinks import open_publisher
from bartleby.sinks.publisher import Failed, Outcome, Publisher, Refused
from tests.kit.sinks import rabbit_server
from tests.kit.sinks.conformance import PATIENCE, PATIENT, TIMEOUT, event, events, named, publish_all
from tests.kit.sinks.rabbit_server import Gate, Server

BUSY = 3.0  # seconds: a connection is made within it on a machine that is busy
LOW = "0.0000001"
HIGH = "0.4"

pytestmark = pytest.mark.skipif(rabbit_server.missing() is not None, reason=rabbit_server.missing() or "")


@pytest.fixture
def server() -> Server:
    """The shared server, running."""
    found = rabbit_server.shared()
    found.start()
    return found


@pytest.fixture
def name() -> str:
    """A name that is not in use."""
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
async def channel(server: Server) -> AsyncIterator[aiormq.abc.AbstractChannel]:
    """A channel of somebody who looks after queues."""
    connection = await aiormq.connect(server.url())
    yield await connection.channel()
    await connection.close()


@contextmanager
def short_of_memory(server: Server) -> Iterator[None]:
    server.control("set_vm_memory_high_watermark", LOW)
    try:
        yield
    finally:
        server.control("set_vm_memory_high_watermark", HIGH)


def why(outcome: Outcome) -> str:
    assert isinstance(outcome, Failed | Refused)
    return outcome.why


async def ids_in(server: Server, queue: str) -> list[str]:
    return [str(each.header.properties.message_id) for each in await server.read(queue)]


async def test_a_message_says_what_it_is(server: Server, opened: Callable[..., Publisher], name: str) -> None:
    sent = event(7)
    assert named(await opened(routing_key=name, declare=True).publish([sent])) == ["Published"]
    (found,) = await server.read(name)
    assert json.loads(found.body) == sent
    properties = found.header.properties
    assert properties.message_id == sent["id"]
    assert properties.content_type == "application/cloudevents+json"
    assert properties.message_type == sent["type"]
    assert properties.delivery_mode == 2


async def test_what_reaches_no_queue_waits_for_one(
    server: Server, opened: Callable[..., Publisher], channel: aiormq.abc.AbstractChannel, name: str
) -> None:
    publisher = opened(routing_key=name)
    outcomes = await publisher.publish(events(3))
    assert named(outcomes) == ["Failed"] * 3
    assert name in why(outcomes[0])
    await channel.queue_declare(name, durable=True)
    assert named(await publisher.publish(events(3))) == ["Published"] * 3
    assert await ids_in(server, name) == [each["id"] for each in events(3)]


async def test_one_that_is_returned_does_not_take_others_along(
    opened: Callable[..., Publisher], channel: aiormq.abc.AbstractChannel, name: str
) -> None:
    await channel.queue_declare(f"{name}.orders")
    lost = event(2)
    lost["data"]["queue"] = "nobody"
    outcomes = await opened(routing_key=f"{name}.{{queue}}").publish([event(1), lost, event(3)])
    assert named(outcomes) == ["Published", "Failed", "Published"]
    assert f"{name}.nobody" in why(outcomes[1])


async def test_a_topic_exchange_routes_by_type(
    server: Server, opened: Callable[..., Publisher], channel: aiormq.abc.AbstractChannel, name: str
) -> None:
    publisher = opened(exchange=name, declare=True)
    assert named(await publisher.publish([event(1)])) == ["Failed"], "nobody listens yet"
    await channel.queue_declare(name)
    await channel.queue_bind(name, name, "bartleby.dead_letter.#")
    opening = {**event(2), "type": "io.bartleby.group.opened"}
    assert named(await publisher.publish([event(1), opening])) == ["Published", "Failed"]
    assert await ids_in(server, name) == [event(1)["id"]]


async def test_an_exchange_that_is_missing_is_named_and_may_come(
    opened: Callable[..., Publisher], channel: aiormq.abc.AbstractChannel, name: str
) -> None:
    publisher = opened(exchange=name, routing_key="all")
    for _ in range(2):
        outcomes = await publisher.publish(events(5))
        assert named(outcomes) == ["Failed"] * 5
        assert name in why(outcomes[0])
    await channel.exchange_declare(name, exchange_type="fanout")
    await channel.queue_declare(name)
    await channel.queue_bind(name, name)
    assert named(await publisher.publish(events(5))) == ["Published"] * 5


async def test_declaring_leaves_what_is_there_as_it_is(
    opened: Callable[..., Publisher], channel: aiormq.abc.AbstractChannel, name: str
) -> None:
    await channel.queue_declare(name, arguments={"x-max-length": 1000})
    await channel.exchange_declare(name, exchange_type="fanout")
    await channel.queue_bind(name, name)
    assert named(await opened(routing_key=name, declare=True).publish(events(2))) == ["Published"] * 2
    assert named(await opened(exchange=name, declare=True).publish(events(2))) == ["Published"] * 2


async def test_a_queue_that_was_deleted_is_declared_again(
    opened: Callable[..., Publisher], channel: aiormq.abc.AbstractChannel, name: str
) -> None:
    publisher = opened(routing_key=name, declare=True)
    assert named(await publisher.publish(events(2))) == ["Published"] * 2
    await channel.queue_delete(name)
    assert named(await publisher.publish(events(2))) == ["Failed"] * 2
    assert named(await publisher.publish(events(2))) == ["Published"] * 2


async def test_a_full_queue_is_waited_for(
    opened: Callable[..., Publisher], channel: aiormq.abc.AbstractChannel, name: str
) -> None:
    await channel.queue_declare(name, arguments={"x-max-length": 2, "x-overflow": "reject-publish"})
    publisher = opened(routing_key=name)
    assert named(await publisher.publish(events(2))) == ["Published"] * 2
    outcomes = await publisher.publish([event(3)])
    assert named(outcomes) == ["Failed"]
    assert "nack" in why(outcomes[0])
    await channel.queue_purge(name)
    assert named(await publisher.publish([event(3)])) == ["Published"]


async def test_a_blocked_connection_fails_in_time_and_goes_on_later(
    server: Server, opened: Callable[..., Publisher], name: str
) -> None:
    publisher, late = opened(BUSY, routing_key=name, declare=True), opened(BUSY, routing_key=name)
    await publish_all(publisher, [event(1)])
    with short_of_memory(server):
        for each in (publisher, publisher, late, late):
            begun = time.monotonic()
            outcomes = await each.publish(events(5, first=2))
            assert time.monotonic() - begun < BUSY + PATIENCE
            assert named(outcomes) == ["Failed"] * 5
            assert "short of memory" in why(outcomes[0])
    for each in (publisher, late):
        await publish_all(each, events(5, first=2))
    assert set(await ids_in(server, name)) == {each["id"] for each in events(6)}


async def test_closing_does_not_wait_for_a_server_that_hangs(
    server: Server, opened: Callable[..., Publisher], name: str
) -> None:
    publisher = opened(TIMEOUT, routing_key=name, declare=True)
    await publish_all(publisher, events(1))
    server.freeze()
    try:
        begun = time.monotonic()
        await publisher.close()
        assert time.monotonic() - begun < TIMEOUT + PATIENCE
    finally:
        server.thaw()


async def test_nothing_goes_on_in_the_background(server: Server, opened: Callable[..., Publisher], name: str) -> None:
    before = asyncio.all_tasks()
    publisher = opened(TIMEOUT, routing_key=name, declare=True)
    await publish_all(publisher, events(10))
    server.freeze()
    try:
        assert set(named(await publisher.publish(events(100)))) == {"Failed"}
    finally:
        server.thaw()
    await publisher.close()
    if left := asyncio.all_tasks() - before:
        _, pending = await asyncio.wait(left, timeout=30)
        assert not pending


async def test_stopped_in_good_order_and_started_again(
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("guest:guest", "guest:hunter2"), "ACCESS_REFUSED"),
        (("guest:guest", "nobody:hunter2"), "ACCESS_REFUSED"),
        (("127.0.0.1", "bus.invalid"), "bus.invalid"),
        (("amqp://", "amqps://"), "SSL"),
    ],
)
async def test_an_address_that_is_wrong_is_a_failure_that_says_so(
    server: Server, opened: Callable[..., Publisher], change: tuple[str, str], said: str
) -> None:
    outcomes = await opened(url=server.url().replace(*change)).publish(events(2))
    assert named(outcomes) == ["Failed"] * 2
    assert said in why(outcomes[0])
    assert "hunter2" not in why(outcomes[0])


async def test_a_vhost_that_is_missing_is_a_failure_that_says_so(
    server: Server, opened: Callable[..., Publisher]
) -> None:
    assert "vhost" in why((await opened(url=f"{server.url()}elsewhere").publish([event(1)]))[0])


@asynccontextmanager
async def behind_tls(server: Server, authority: trustme.CA) -> AsyncIterator[Gate]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    gate = Gate(server.port, context)
    await gate.open()
    try:
        yield gate
    finally:
        await gate.shut()


async def test_tls_is_used_and_the_certificate_checked(
    server: Server, opened: Callable[..., Publisher], name: str, tmp_path: Path
) -> None:
    authority, trusted = trustme.CA(), tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(str(trusted))
    async with behind_tls(server, authority) as gate:
        url = f"amqps://guest:guest@127.0.0.1:{gate.port}/"
        publisher = opened(url=f"{url}?cafile={trusted}", routing_key=name, declare=True)
        assert named(await publisher.publish(events(3))) == ["Published"] * 3
        await publisher.close()
        outcomes = await opened(url=url, routing_key=name).publish(events(3))
        assert named(outcomes) == ["Failed"] * 3
        assert "CERTIFICATE_VERIFY_FAILED" in why(outcomes[0])


async def test_a_routing_key_that_is_too_long_is_refused_alone(opened: Callable[..., Publisher], name: str) -> None:
    long = event(2)
    long["data"]["queue"] = "q" * 250
    outcomes = await opened(routing_key=f"{name}{{queue}}").publish([event(1), long])
    assert named(outcomes) == ["Failed", "Refused"]


async def test_of_small_ones_together_the_too_large_is_found(
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


async def test_one_core_is_enough_for_two_thousand_a_second(server: Server, name: str) -> None:
    """Our own work is measured; how fast the broker is depends on its disk, and on what else the machine does."""
    publisher = open_publisher("rabbitmq", {"url": server.url(), "routing_key": name, "declare": True}, 30)
    await publisher.publish([event(1)])
    batches = [events(500, first=first) for first in range(0, 5000, 500)]
    begun = time.process_time()
    for batch in batches:
        assert set(named(await publisher.publish(batch))) == {"Published"}
    assert 5000 / (time.process_time() - begun) > 2000
    await publisher.close()
