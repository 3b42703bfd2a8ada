"""Wires between processes and the server.

Network  chosen connections are cut, or stranded as in a dead network: both ends believe that they live
Trap     kills the process behind it at a chosen boundary of its statements
"""

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TypeVar

from tests.kit.proxy import Proxy


class Network(Proxy):
    def dsn(self, direct: str) -> str:
        return f"{super().dsn(direct)}?sslmode=disable&gssencmode=disable"

    def cut_from(self, ports: set[int]) -> int:
        """Cut the connections that the server sees coming from these ports; return how many."""
        with self._lock:
            chosen = self._chosen(ports)
            for client in chosen:
                self._close(client)
            return len(chosen)

    def strand(self, ports: set[int] | None = None) -> int:
        """Read nothing more from these connections, or from all there are; return how many. New ones work."""
        with self._lock:
            chosen = self._chosen(ports)
            for client in chosen:
                for end in (client, self._ends[client]):
                    with suppress(KeyError):  # it is stranded
                        self._selector.unregister(end)
            return len(chosen)

    def heal(self) -> None:
        """Let new connections work again, and cut those that hang."""
        self.mode = "pass"
        self.cut()

    def _chosen(self, ports: set[int] | None) -> list[socket.socket]:
        return [each for each in self._clients if ports is None or self._ends[each].getsockname()[1] in ports]


class Trap(Network):
    """Kills the victim at a boundary.

    Every statement has three: before it is sent, after it was sent (the server runs it, its result is not read), and
    before its result is delivered. They are counted from the first connection on.
    """

    def __init__(self, port: int, boundary: int) -> None:
        self.victim: Future[int] = Future()
        self._left = boundary
        super().__init__(port)

    def _pass_on(self, wire: socket.socket) -> None:
        if wire not in self._ends:
            return
        with suppress(OSError):
            sent = wire in self._clients
            if some := wire.recv(1 << 20):
                if not self._reached():
                    self._ends[wire].sendall(some)
                    if sent:
                        self._reached()
                return
        self._close(wire)

    def _reached(self) -> bool:
        self._left -= 1
        if self._left:
            return False
        os.kill(self.victim.result(10), signal.SIGKILL)
        for client in list(self._clients):
            self._close(client)
        return True


P = TypeVar("P", bound=Proxy)


@contextmanager
def opened(proxy: P) -> Iterator[P]:
    try:
        yield proxy
    finally:
        proxy.close()
