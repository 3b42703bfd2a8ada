"""Proxies between processes and the server.

Proxy    cuts connections, or lets them hang as in a dead network
Trap     kills the process behind it at a chosen boundary of its statements
"""

import contextlib
import os
import selectors
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TypeVar

PLAIN = "?sslmode=disable&gssencmode=disable"


class Proxy:
    """Passes bytes in a thread. A hanging connection is not read from any more; both ends believe that it lives."""

    def __init__(self, port: int) -> None:
        self._server = ("127.0.0.1", port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._peers: dict[socket.socket, socket.socket] = {}
        self._clients: dict[socket.socket, int] = {}
        """Each client with the port that the server sees."""
        self._hanging: set[socket.socket] = set()
        self._new_hang: bool | None = None
        """Whether new connections hang, and then whether their requests still get through."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def dsn(self, direct: str) -> str:
        """Return a connection string through this proxy."""
        before, _, after = direct.rpartition("@")
        return f"{before}@127.0.0.1:{self.port}/{after.partition('/')[2]}{PLAIN}"

    def cut(self, ports: set[int] | None = None) -> int:
        """Cut connections: all, or those that the server sees coming from these ports; return how many."""
        with self._lock:
            chosen = self._chosen(ports)
            for client in chosen:
                self._close(client)
            return len(chosen)

    def hang(self, ports: set[int] | None = None, *, mute: bool = False) -> int:
        """Let connections hang, without ports the new ones too; if `mute`, requests still get through."""
        with self._lock:
            chosen = self._chosen(ports)
            for client in chosen:
                self._stall(client, mute=mute)
            self._new_hang = mute if ports is None else None
            return len(chosen)

    def heal(self) -> None:
        """Let new connections work again, and cut those that hang."""
        with self._lock:
            self._new_hang = None
            for client in self._hanging & self._clients.keys():
                self._close(client)

    def let_through(self) -> None:
        """Let new connections work again; those that hang stay as they are."""
        with self._lock:
            self._new_hang = None

    def close(self) -> None:
        self._closing = True
        self._thread.join(10)
        self.cut()
        self._listening.close()
        self._selector.close()

    def _chosen(self, ports: set[int] | None) -> list[socket.socket]:
        return [client for client, port in self._clients.items() if ports is None or port in ports]

    def _run(self) -> None:
        while not self._closing:
            ready = self._selector.select(0.01)
            with self._lock:
                for key, _ in ready:
                    end = key.fileobj
                    assert isinstance(end, socket.socket)
                    if end is self._listening:
                        self._accept()
                    elif end in self._peers:
                        self._pass_on(end)

    def _accept(self) -> None:
        client, _ = self._listening.accept()
        try:
            server = socket.create_connection(self._server)
        except OSError:
            client.close()
            return
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(end, selectors.EVENT_READ)
        self._peers[client], self._peers[server] = server, client
        self._clients[client] = server.getsockname()[1]
        if self._new_hang is not None:
            self._stall(client, mute=self._new_hang)

    def _stall(self, client: socket.socket, *, mute: bool) -> None:
        self._hanging.add(client)
        for end in [self._peers[client], *([] if mute else [client])]:
            with contextlib.suppress(KeyError):  # it hangs already
                self._selector.unregister(end)

    def _pass_on(self, end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if some := end.recv(1 << 20):
                self._deliver(end, some)
                return
        self._close(end)

    def _deliver(self, end: socket.socket, some: bytes) -> None:
        self._peers[end].sendall(some)

    def _close(self, end: socket.socket) -> None:
        other = self._peers.pop(end, None)
        if other is None:
            return
        del self._peers[other]
        for each in (end, other):
            self._clients.pop(each, None)
            self._hanging.discard(each)
            with contextlib.suppress(KeyError):
                self._selector.unregister(each)
            each.close()


class Trap(Proxy):
    """Kills the victim at a boundary.

    Every statement has three: before it is sent, after it was sent (the server runs it, its result is not read), and
    before its result is delivered. They are counted from the first connection on.
    """

    def __init__(self, port: int, boundary: int | None) -> None:
        self.victim: Future[int] = Future()
        self.boundaries = 0
        self._boundary = boundary
        super().__init__(port)

    def _deliver(self, end: socket.socket, some: bytes) -> None:
        sent = end in self._clients
        if self._reached():
            return
        super()._deliver(end, some)
        if sent:
            self._reached()

    def _reached(self) -> bool:
        self.boundaries += 1
        if self.boundaries != self._boundary:
            return False
        os.kill(self.victim.result(10), signal.SIGKILL)
        for client in list(self._clients):
            self._close(client)
        return True


P = TypeVar("P", bound=Proxy)


@contextlib.contextmanager
def opened(proxy: P) -> Iterator[P]:
    try:
        yield proxy
    finally:
        proxy.close()
