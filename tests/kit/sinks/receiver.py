"""A small real HTTP(S) server that answers as the test wants: well, late, never, too much, or with an error.

In a test it runs in the test's own loop. As a program (`python -m tests.kit.sinks.receiver PORT FILE`) it is a process
that can be killed and frozen; what it confirmed is in FILE first, one JSON line a request.
"""

import asyncio
import base64
import contextlib
import itertools
import json
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

LARGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """What arrived."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    connection: int


@dataclass(frozen=True, slots=True)
class Reply:
    """What is answered, and how."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b"ok"
    pause: float = 0
    """before each byte of the body, or of everything if `slow_head`"""
    slow_head: bool = False
    cut: bool = False
    """nothing is answered, and the connection is closed"""
    wait: asyncio.Event | None = None
    """nothing is answered before this"""
    body_wait: asyncio.Event | None = None
    """the body is not sent before this"""


class Receiver:
    """Listens on a loopback port, remembers requests and answers each by `answer`."""

    def __init__(self, answer: Callable[[Request], Reply] | None = None, *, port: int = 0) -> None:
        self.answer = answer or (lambda _: Reply())
        self.requests: list[Request] = []
        self.port = port
        self._connections = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, answer: Callable[[Request], Reply] | None = None, context: ssl.SSLContext | None = None
    ) -> AsyncIterator[Self]:
        """A receiver for as long as it is needed."""
        receiver = cls(answer)
        await receiver.start(context)
        try:
            yield receiver
        finally:
            await receiver.stop()

    @property
    def url(self) -> str:
        """Where it is, without TLS."""
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def connections(self) -> int:
        """How many connections brought a request."""
        return len({each.connection for each in self.requests})

    @property
    def connected(self) -> int:
        """How many connections are open."""
        return len(self._tasks)

    async def start(self, context: ssl.SSLContext | None = None) -> None:
        """Listen, on the same port each time."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, ssl=context)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close the port and every connection."""
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
            with contextlib.suppress(
                ConnectionError, asyncio.IncompleteReadError, ssl.SSLError, asyncio.CancelledError
            ):
                while await self._exchange(reader, writer, number):
                    pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        request = Request(head[0].split(" ")[1], headers, body, number)
        self.requests.append(request)
        reply = self.answer(request)
        if reply.wait is not None:
            await reply.wait.wait()
        if reply.cut:
            return False
        await self._send(writer, reply)
        return True

    async def _send(self, writer: asyncio.StreamWriter, reply: Reply) -> None:
        headers = {"Content-Length": str(len(reply.body)), **reply.headers}
        lines = [f"HTTP/1.1 {reply.status} Whatever", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        await self._write(writer, "\r\n".join(lines).encode("latin-1"), reply.pause if reply.slow_head else 0)
        if reply.body_wait is not None:
            await reply.body_wait.wait()
        await self._write(writer, reply.body, reply.pause)

    async def _write(self, writer: asyncio.StreamWriter, content: bytes, pause: float) -> None:
        pieces = [content[at : at + 1] for at in range(len(content))] if pause else [content]
        for piece in pieces:
            await asyncio.sleep(pause)
            writer.write(piece)
            await writer.drain()


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
