"""A real HTTP server, as a process, for the webhook sink."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

from bartleby.sinks import open_publisher
from bartleby.sinks.publisher import Publisher
from tests.kit.sinks import receiver
from tests.kit.sinks.conformance import PATIENT, Arrival, Sink
from tests.kit.sinks.servers import Process, free_port

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def webhook(url: str, timeout: float = PATIENT, **options: Any) -> Publisher:
    return open_publisher("webhook", {"url": url, "secret": SECRET, "allow_private": True, **options}, timeout)


class Harness(Sink):
    kind = "webhook"
    too_large: ClassVar[int | None] = receiver.LARGEST

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = free_port()
        self.file = folder / "arrived"
        command = [sys.executable, "-m", "tests.kit.sinks.receiver", str(self.port), str(self.file)]
        self.process = Process("receiver", command, self.port, folder)

    def options(self) -> dict[str, Any]:
        return {"url": f"http://127.0.0.1:{self.port}/hook", "secret": SECRET, "allow_private": True}

    async def records(self) -> AsyncIterator[tuple[str, bytes]]:
        for headers, body in receiver.recorded(self.file):
            yield headers["webhook-id"], body

    async def count(self) -> int:
        return self.file.read_bytes().count(b"\n") if self.file.exists() else 0

    async def arrived(self) -> list[Arrival]:
        """Return the arrivals by number: several are sent at once, and only events of one subject have an order."""
        return sorted(await super().arrived(), key=lambda each: int(each.id.split(".")[1]))
