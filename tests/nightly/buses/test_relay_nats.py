"""The relay and a real NATS server that stops, is killed, hangs or loses its stream: no event is lost."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bartleby import Client
from bartleby.config import Settings
from bartleby.relay import Relay
from bartleby.sinks import open_publisher
from tests.kit.relay import ANA, die, relaying, sink
from tests.kit.sinks.harness_nats import Harness, connected
from tests.kit.worker import Running, until
from tests.relay.test_reconciling import look


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        opened.create_queue("orders")
        yield opened


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[Harness]:
    if missing := Harness.missing():
        pytest.skip(missing)
    server = Harness(tmp_path)
    asyncio.run(server.start())
    yield server
    asyncio.run(server.wake())
    asyncio.run(server.stop())


@pytest.fixture
def relay(dsn: str, client: Client, nats: Harness) -> Iterator[Running]:
    settings = {"options": nats.options(), "types": ["dead_letter.*"], "delay": 0.05, "timeout": 0.5}
    client.put_sink("bus", "nats", settings, **ANA)
    made: Any = Relay(Settings(dsn=dsn, spool="off"), look=0.1, poll=0.05)
    running = Running(made)
    yield running
    running.stop()
    running.thread.join(30)
    assert not running.thread.is_alive()
    assert running.error is None


def arrived(nats: Harness) -> list[dict[str, Any]]:
    return [json.loads(each.body or b"") for each in asyncio.run(nats.arrived())]


def stop(nats: Harness) -> Awaitable[None]:
    return nats.stop()


def kill(nats: Harness) -> Awaitable[None]:
    return nats.kill()


def hang(nats: Harness) -> Awaitable[None]:
    return nats.hang()


@pytest.mark.parametrize("trouble", [stop, kill, hang])
def test_outage_loses_no_event(
    client: Client, nats: Harness, relay: Running, trouble: Callable[[Harness], Awaitable[None]]
) -> None:
    died = die(client, 20)
    until(lambda: sink(client).published == 20)
    asyncio.run(_do(trouble, nats))
    died += die(client, 100)
    until(lambda: sink(client).state == "degraded")
    client.discard(died, **ANA)
    assert client.count_letters("queue:orders status:discarded").letters == 120
    asyncio.run(nats.wake() if trouble is hang else nats.start())
    until(lambda: sink(client).waiting == 0 and sink(client).state == "working", 45)
    found = arrived(nats)
    assert len(found) == len({each["id"] for each in found}) == 240
    for message in died:
        assert [each["sequence"] for each in found if each["data"]["message_id"] == message] == ["1", "2"]


def test_server_that_is_killed_repeatedly_loses_no_event(client: Client, nats: Harness, relay: Running) -> None:
    died: list[int] = []
    enough = threading.Event()

    def load() -> None:
        while not enough.is_set():
            died.extend(die(client, 10))

    loading = threading.Thread(target=load)
    loading.start()
    try:
        for _ in range(4):
            before = sink(client).published
            until(lambda before=before: sink(client).published > before + 20, 45)  # type: ignore[misc]
            asyncio.run(nats.kill())
            asyncio.run(nats.start())
    finally:
        enough.set()
        loading.join(30)
    until(lambda: sink(client).waiting == 0, 45)
    found = arrived(nats)
    assert {each["data"]["message_id"] for each in found} == set(died)
    assert len({each["id"] for each in found}) == len(died)


async def _do(trouble: Callable[[Harness], Awaitable[None]], nats: Harness) -> None:
    await trouble(nats)


async def delete_stream(port: int) -> None:
    async with connected([port]) as opened:
        await opened.jetstream().delete_stream("bartleby")


def test_events_of_a_deleted_stream_are_sent_again(client: Client, dsn: str, nats: Harness) -> None:
    client.put_sink("bus", "nats", {"options": nats.options(), "types": ["dead_letter.*"]}, **ANA)
    publisher = open_publisher("nats", nats.options(), 2.0)
    client.put_sink("bus", "nats", {"options": {"name": "bus"}}, **ANA)
    with relaying(dsn, {"bus": publisher}):
        died = die(client, 50)
        until(lambda: sink(client).published == 50)
        asyncio.run(delete_stream(nats.port))
        reader = open_publisher("nats", nats.options(), 2.0)
        client.pause_sink("bus", **ANA)
        die(client, 1)
        client.resume_sink("bus", **ANA)
        until(lambda: sink(client).waiting == 0, 30)
        found = asyncio.run(look(dsn, reader, again=True))
        assert found.events == 50
        until(lambda: sink(client).waiting == 0, 30)
        assert asyncio.run(look(dsn, reader)).events == 0
    arrived = asyncio.run(nats.arrived())
    assert set(died) <= {json.loads(each.body or b"")["data"]["message_id"] for each in arrived}
