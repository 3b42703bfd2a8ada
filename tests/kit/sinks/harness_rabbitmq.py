"""RabbitMQ in the conformance suite: one node for all tests, each with a queue of its own behind a gate of its own."""

import asyncio
import uuid
from pathlib import Path
from typing import Any

from tests.kit.sinks import rabbit_server
from tests.kit.sinks.conformance import Arrival, Sink, from_body
from tests.kit.sinks.rabbit_server import Gate


class Harness(Sink):
    """stop() shuts the gate; kill() and hang() are for the node itself. test_rabbitmq.py stops that too."""

    kind = "rabbitmq"
    too_large = rabbit_server.LARGEST + 1

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._queue = f"events-{uuid.uuid4().hex[:12]}"
        self._gate = Gate(rabbit_server.shared().port) if self.missing() is None else Gate(0)

    @classmethod
    def missing(cls) -> str | None:
        return rabbit_server.missing()

    def options(self) -> dict[str, Any]:
        """Return options by which the queue is made when it is first used."""
        return {
            "url": f"amqp://guest:guest@127.0.0.1:{self._gate.port}/",
            "routing_key": self._queue,
            "declare": True,
        }

    async def start(self) -> None:
        rabbit_server.shared().start()
        await self._gate.open()

    async def stop(self) -> None:
        rabbit_server.shared().thaw()
        await self._gate.shut()

    async def outlast(self) -> None:
        """A node that is killed right after it declared a queue does not have it any more, whatever it confirmed."""
        await asyncio.to_thread(rabbit_server.shared().write_definitions)

    async def kill(self) -> None:
        """Kill the node; that takes a moment, which must not be counted against who publishes meanwhile."""
        await asyncio.to_thread(rabbit_server.shared().kill)

    async def hang(self) -> None:
        rabbit_server.shared().freeze()

    async def wake(self) -> None:
        rabbit_server.shared().thaw()

    async def arrived(self) -> list[Arrival]:
        found = await rabbit_server.shared().read(self._queue)
        return [from_body(each.body, str(each.header.properties.message_id)) for each in found]
