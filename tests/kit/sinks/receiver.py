"""A small real HTTP(S) server that answers as the test sets it: well, late, never, too much, or with an error.

In a test it runs in the test's own loop. As a program (`python -m tests.kit.sinks.receiver PORT FILE`) it is a process
that can be killed and frozen; what it confirmed is in FILE first, one JSON line a request.
"""

import asyncio
import base64
import contextlib
import itertools
import json
import socket
import ssl
import struct
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

LARGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    headers: Mapping[str, str]
    body: bytes
    connection: int


@dataclass(frozen=True, slots=True)
class Reply:
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b"ok"
    raw: bytes | None = None  # sent instead of all that
    pause: float = 0  # before each byte
    wait: asyncio.Event | None = None  # nothing is sent before this
    body_wait: asyncio.Event | None = None  # the body is not sent before this
    last: bool = False  # the connection is closed then

    def parts(self) -> tuple[bytes, bytes]:
        if self.raw is not None:
            return self.raw, b""
        headers = {"Content-Length": str(len(self.body)), **self.headers}
        lines = [f"HTTP/1.1 {self.status} Whatever", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        return "\r\n".join(lines).encode("latin-1"), self.body


class Receiver:
    """Listens on a loopback port, remembers requests and answers each by `answer`.

    With `reset` it resets connections instead of closing them.
    """

    def __init__(self, answer: Callable[[Request], Reply] | None = None, *, port: int = 0, reset: bool = False) -> None:
        self.answer = answer or (lambda _: Reply())
        self.requests: list[Request] = []
        self.port = port
        self.sent = 0
        self.early = 0  # bytes of a next request that came before the answer
        self._reset = reset
        self._connections = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, answer: Callable[[Request], Reply] | None = None, context: ssl.SSLContext | None = None, **options: bool
    ) -> AsyncIterator[Self]:
        receiver = cls(answer, **options)
        await receiver.start(context)
        try:
            yield receiver
        finally:
            await receiver.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def connections(self) -> int:
        """How many connections carried a request."""
        return len({each.connection for each in self.requests})

    @property
    def connected(self) -> int:
        return len(self._tasks)

    @property
    def ids(self) -> list[str]:
        """The ids of the events that arrived by webhook, as often as they did."""
        return [each.headers["webhook-id"] for each in self.requests]

    async def start(self, context: ssl.SSLContext | None = None) -> None:
        """Listen, on the same port each time."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, ssl=context)
        listener = self._server.sockets[0]
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # what is not read is not sent either
        self.port = int(listener.getsockname()[1])

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        number = next(self._connections)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._exchange(reader, writer, number):
                    pass
        finally:
            self._tasks.discard(task)
            if self._reset:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.requests.append(Request(head[0].split(" ")[1], headers, body, number))
        reply = self.answer(self.requests[-1])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0):
                self.early += len(await reader.read(1))
        for wait, content in zip((reply.wait, reply.body_wait), reply.parts(), strict=True):
            if wait is not None:
                await wait.wait()
            size = 1 if reply.pause else 65536
            for at in range(0, len(content), size):
                await asyncio.sleep(reply.pause)
                writer.write(content[at : at + size])
                await writer.drain()
                self.sent += size
        return not reply.last


async def _serve(port: int, file: Path) -> None:
    def answer(request: Request) -> Reply:
        if len(request.body) > LARGEST:
            return Reply(413, body=b"too large")
        kept = {"headers": dict(request.headers), "body": base64.b64encode(request.body).decode()}
        output.write(json.dumps(kept).encode() + b"\n")
        return Reply(200, body=b'{"id": "0"}')

    with file.open("ab", buffering=0) as output:
        await Receiver(answer, port=port).start()
        await asyncio.Event().wait()


def recorded(file: Path) -> Iterator[tuple[dict[str, str], bytes]]:
    """Return what a receiver that ran as a program was sent: headers and bodies."""
    with file.open("rb") as lines:
        for each in map(json.loads, lines):
            yield each["headers"], base64.b64decode(each["body"])


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), Path(sys.argv[2])))
