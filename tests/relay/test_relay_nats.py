"""The relay and a real NATS server that stops, is killed and hangs: every event is in the stream in the end, once."""

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
from tests.kit.relay import ANA, die, sink
from tests.kit.sinks.harness_nats import Harness
from tests.kit.worker import Running, until


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
def test_an_outage_costs_no_event(
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


def test_a_server_that_is_killed_again_and_again(client: Client, nats: Harness, relay: Running) -> None:
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
