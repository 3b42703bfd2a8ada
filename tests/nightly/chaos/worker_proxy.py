"""A proxy between workers and the server, in a thread: it cuts connections, or lets them hang as a dead net does."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Wire:
    """One connection; while it does not flow, both ends believe that it stands."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.ends = (client, server)
        self.port = server.get_extra_info("sockname")[1]
        """The port that the server sees."""
        self.requests = asyncio.Event()
        self.answers = asyncio.Event()
        self.flow()

    def flow(self) -> None:
        self.requests.set()
        self.answers.set()

    def hang(self, *, mute: bool) -> None:
        self.answers.clear()
        if not mute:
            self.requests.clear()

    def cut(self) -> None:
        for end in self.ends:
            end.transport.abort()
        self.flow()  # what hung in between goes nowhere


class Proxy:
    """Listens on a port of its own."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._wires: set[Wire] = set()
        self._dark: bool | None = None
        self.port = 0

    async def _serve(self) -> None:
        self._listening = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._listening.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._listening.close()
        for wire in list(self._wires):
            wire.cut()
        while self._wires:  # noqa: ASYNC110 - a moment
            await asyncio.sleep(0.01)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, upstream = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        wire = Wire(writer, upstream)
        if self._dark is not None:
            wire.hang(mute=self._dark)
        self._wires.add(wire)
        try:
            await asyncio.gather(self._pump(wire.requests, reader, upstream), self._pump(wire.answers, answers, writer))
        finally:
            wire.cut()
            self._wires.discard(wire)

    @staticmethod
    async def _pump(flows: asyncio.Event, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await flows.wait()
                writer.write(data)
                await writer.drain()
        await flows.wait()
        writer.close()

    def _do(self, action: Callable[[], T]) -> T:
        async def run() -> T:
            return action()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def cut(self, ports: set[int] | None = None) -> int:
        """Cut connections: all, or those that the server sees coming from these ports."""

        def action() -> int:
            chosen = [wire for wire in self._wires if ports is None or wire.port in ports]
            for wire in chosen:
                wire.cut()
            return len(chosen)

        return self._do(action)

    def hang(self, ports: set[int] | None = None, *, mute: bool = False) -> int:
        """Let connections hang, with no ports given the new ones too; if `mute`, requests still get through."""

        def action() -> int:
            chosen = [wire for wire in self._wires if ports is None or wire.port in ports]
            for wire in chosen:
                wire.hang(mute=mute)
            self._dark = mute if ports is None else None
            return len(chosen)

        return self._do(action)

    def heal(self) -> None:
        """New connections work again; those that hung never will."""

        def action() -> None:
            self._dark = None
            for wire in list(self._wires):
                if not wire.answers.is_set():
                    wire.cut()

        self._do(action)

    def let_through(self) -> None:
        """New connections work again; those that hung go on hanging."""

        def action() -> None:
            self._dark = None

        self._do(action)


@contextlib.contextmanager
def proxy(target: int) -> Iterator[Proxy]:
    """Open a proxy to a port of this machine."""
    opened = Proxy(target)
    loop = opened._loop
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(opened._serve(), loop).result(10)
    try:
        yield opened
    finally:
        asyncio.run_coroutine_threadsafe(opened._close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
