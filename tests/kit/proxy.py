"""A wire between a worker and its server that a test can cut, block, or make one-sided.

pass       bytes go both ways
blackhole  nothing goes either way, and nothing is closed: a half-open connection
deaf       requests reach the server, its answers are dropped
"""

import contextlib
import selectors
import socket
import threading


class Proxy:
    def __init__(self, port: int) -> None:
        self._server = ("127.0.0.1", port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.mode = "pass"
        self._ends: dict[socket.socket, socket.socket] = {}
        self._clients: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def dsn(self, direct: str) -> str:
        before, _, after = direct.rpartition("@")
        return f"{before}@127.0.0.1:{self.port}/{after.partition('/')[2]}"

    def lead_to(self, port: int) -> None:
        """Lead new connections to this port; if nothing listens there, they are closed."""
        self._server = ("127.0.0.1", port)

    def cut(self) -> None:
        """Close every connection there is; new ones are made."""
        with self._lock:
            for end in list(self._clients):
                self._close(end)

    def close(self) -> None:
        self._closing = True
        self._thread.join(60)
        self.cut()
        self._listening.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._closing:
            # while nothing passes nothing is read either: what was sent waits in the kernel
            ready = self._selector.select(0.02)
            if self.mode == "blackhole":
                threading.Event().wait(0.02)
                continue
            with self._lock:
                for key, _ in ready:
                    wire = key.fileobj
                    assert isinstance(wire, socket.socket)
                    self._accept() if wire is self._listening else self._pass_on(wire)

    def _accept(self) -> None:
        client, _ = self._listening.accept()
        try:
            server = socket.create_connection(self._server)
        except OSError:
            client.close()
            return
        self._ends[client], self._ends[server] = server, client
        self._clients.add(client)
        for each in (client, server):
            self._selector.register(each, selectors.EVENT_READ)

    def _pass_on(self, wire: socket.socket) -> None:
        if wire not in self._ends:
            return
        try:
            some = wire.recv(65536)
            if some and not (self.mode == "deaf" and wire not in self._clients):
                self._ends[wire].sendall(some)
        except OSError:
            some = b""
        if not some:
            self._close(wire)

    def _close(self, wire: socket.socket) -> None:
        other = self._ends.pop(wire)
        self._ends.pop(other)
        for each in (wire, other):
            self._clients.discard(each)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(each)
            each.close()


def proxied(port: int) -> contextlib.closing[Proxy]:
    return contextlib.closing(Proxy(port))
