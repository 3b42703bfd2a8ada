"""An HTTP server that takes events by webhook or as a Sentry, and is down, hung or failing as the test says."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from tests.kit.sinks.harness_webhook import SECRET
from tests.kit.sinks.receiver import Receiver, Reply, Request


class Bus:
    """`down` answers 503, `hung` does not answer; each event fails `failing` times."""

    def __init__(self) -> None:
        self.down = False
        self.hung = False
        self.failing = 0
        self.arrived: Callable[[dict[str, Any]], None] = lambda _: None
        self.tried: list[tuple[float, str]] = []
        self.events: list[dict[str, Any]] = []
        self._receiver = Receiver(self._answer)
        self._never = asyncio.Event()

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[Self]:
        """Start one in a thread of its own."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="a bus")
        thread.start()
        bus = cls()
        try:
            asyncio.run_coroutine_threadsafe(bus._receiver.start(), loop).result(30)
            yield bus
        finally:
            asyncio.run_coroutine_threadsafe(bus._receiver.stop(), loop).result(30)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(30)
            loop.close()

    @property
    def options(self) -> dict[str, Any]:
        return {"url": self._receiver.url, "secret": SECRET, "allow_private": True}

    @property
    def sentry(self) -> dict[str, Any]:
        """The options of a Sentry sink that reaches this server."""
        return {"dsn": f"http://abc123@127.0.0.1:{self._receiver.port}/42", "allow_private": True}

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in list(self.events) if each["type"] == f"io.bartleby.{kind}"]

    def names_tried(self) -> list[str]:
        """The event id of every request, in order."""
        return [name for _, name in list(self.tried)]

    def _answer(self, request: Request) -> Reply:
        if "x-sentry-auth" in request.headers:
            self.events.append(json.loads(request.body.splitlines()[2]))
            return Reply(200, body=b'{"id": "0"}')
        name = request.headers["webhook-id"]
        self.tried.append((time.monotonic(), name))
        if self.hung:
            return Reply(wait=self._never)
        if self.down or self.names_tried().count(name) <= self.failing:
            return Reply(503)
        event = json.loads(request.body)
        self.arrived(event)
        self.events.append(event)
        return Reply(200)
