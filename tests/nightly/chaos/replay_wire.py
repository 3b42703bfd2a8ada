"""A wire between a runner and the server that kills the runner at a chosen boundary of what they say to each other.

Every statement has three: before it is sent, after it was sent (the server runs it, nobody waits for the answer), and
before its answer is delivered. They are counted from the first connection on, so a test that takes 1, 2, 3 … until the
runner ends by itself has been at all of them.
"""

import contextlib
import os
import selectors
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future

PLAIN = "?sslmode=disable&gssencmode=disable"


class Wire:
    """Passes bytes on in a thread until the boundary is reached; then the victim is dead and its connections closed."""

    def __init__(self, port: int, boundary: int | None) -> None:
        self._server = ("127.0.0.1", port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.victim: Future[int] = Future()
        self.boundaries = 0
        self._boundary = boundary
        self._ends: dict[socket.socket, socket.socket] = {}
        self._clients: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def dsn(self, direct: str) -> str:
        """Return a connection string through this wire."""
        before, _, after = direct.rpartition("@")
        return f"{before}@127.0.0.1:{self.port}/{after.partition('/')[2]}{PLAIN}"

    def close(self) -> None:
        self._closing = True
        self._thread.join(10)
        for wire in list(self._clients):
            self._close(wire)
        self._listening.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(0.01):
                wire = key.fileobj
                assert isinstance(wire, socket.socket)
                if wire is self._listening:
                    self._accept()
                elif wire in self._ends:
                    self._pass_on(wire)

    def _accept(self) -> None:
        client, _ = self._listening.accept()
        try:
            server = socket.create_connection(self._server)
        except OSError:
            client.close()
            return
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(each, selectors.EVENT_READ)
        self._ends[client], self._ends[server] = server, client
        self._clients.add(client)

    def _pass_on(self, wire: socket.socket) -> None:
        sent = wire in self._clients
        with contextlib.suppress(OSError):
            if some := wire.recv(1 << 20):
                if self._reached():
                    return
                self._ends[wire].sendall(some)
                if sent:
                    self._reached()
                return
        self._close(wire)

    def _reached(self) -> bool:
        self.boundaries += 1
        if self.boundaries != self._boundary:
            return False
        os.kill(self.victim.result(10), signal.SIGKILL)
        for client in list(self._clients):
            self._close(client)
        return True

    def _close(self, wire: socket.socket) -> None:
        other = self._ends.pop(wire, None)
        if other is None:
            return
        self._ends.pop(other)
        for each in (wire, other):
            self._clients.discard(each)
            self._selector.unregister(each)
            each.close()


@contextlib.contextmanager
def wired(port: int, boundary: int | None) -> Iterator[Wire]:
    """Open a wire; without a boundary nobody is killed."""
    wire = Wire(port, boundary)
    try:
        yield wire
    finally:
        wire.close()
