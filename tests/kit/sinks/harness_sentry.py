"""A real HTTP server, as a process, for the Sentry sink."""

import json
from typing import Any, ClassVar

from tests.kit.sinks import harness_webhook, receiver
from tests.kit.sinks.conformance import Arrival


class Harness(harness_webhook.Harness):
    kind = "sentry"
    too_large: ClassVar[int | None] = None  # payloads are not sent

    def options(self) -> dict[str, Any]:
        return {"dsn": f"http://abc123@127.0.0.1:{self.port}/42", "allow_private": ["127.0.0.0/8"]}

    async def arrived(self) -> list[Arrival]:
        documents = [[json.loads(line) for line in body.splitlines()] for _, body in receiver.recorded(self.file)]
        found = [Arrival(event["extra"]["event"], head["event_id"], None) for head, _, event in documents]
        return sorted(found, key=lambda each: int(each.id.split(".")[1]))
