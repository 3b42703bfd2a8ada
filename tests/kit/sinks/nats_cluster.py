"""Three nats-servers that are one JetStream cluster."""

from pathlib import Path
from typing import Any

import nats.errors
from nats.js.api import StreamInfo

from tests.kit.sinks.harness_nats import connected, server
from tests.kit.sinks.servers import Process, free_port

NAMES = ("one", "two", "three")


class Cluster:
    """Each server has a name, and can be killed by it."""

    def __init__(self, folder: Path) -> None:
        self.ports = {name: free_port() for name in NAMES}
        routes = {name: free_port() for name in NAMES}
        others = ", ".join(f"nats-route://127.0.0.1:{port}" for port in routes.values())
        self.servers: dict[str, Process] = {
            name: server(
                name,
                self.ports[name],
                folder,
                f"cluster {{ name: tests, listen: 127.0.0.1:{routes[name]}, routes: [{others}], no_advertise: true }}",
            )
            for name in NAMES
        }

    def options(self) -> dict[str, Any]:
        """Return the options of a publisher, whose stream has a replica on each server."""
        servers = [f"nats://127.0.0.1:{port}" for port in self.ports.values()]
        return {"servers": servers, "create": True, "replicas": 3}

    async def start(self) -> None:
        """Start those that are not running."""
        for each in self.servers.values():
            if not each.running:
                await each.start()

    async def stop(self) -> None:
        """End them all."""
        for each in self.servers.values():
            await each.stop()

    async def stream(self) -> StreamInfo | None:
        """Return what is known of the stream; None while no server answers for it."""
        try:
            async with connected(self.running()) as client:
                return await client.jetstream(timeout=2).stream_info("bartleby")
        except (OSError, nats.errors.Error):
            return None

    async def leader(self) -> str | None:
        """Return the name of the server that leads the stream."""
        found = await self.stream()
        return found.cluster.leader if found is not None and found.cluster is not None else None

    async def complete(self) -> bool:
        """Return whether the stream has a leader and both of the others have all of it."""
        found = await self.stream()
        if found is None or found.cluster is None or not found.cluster.leader:
            return False
        replicas = found.cluster.replicas or []
        return len(replicas) == len(NAMES) - 1 and all(each.current and not each.offline for each in replicas)

    def running(self) -> list[int]:
        """Return the ports of the servers that run."""
        return [self.ports[name] for name, each in self.servers.items() if each.running]
