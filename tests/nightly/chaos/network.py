"""Wires between processes and the server.

Network  its connections can be stranded as in a dead network: both ends believe that they live
Trap     kills the process behind it at a chosen boundary of its statements
"""

import os
import signal
import socket
from concurrent.futures import Future
from contextlib import suppress

from tests.kit.proxy import Proxy


class Network(Proxy):
    def dsn(self, direct: str) -> str:
        return f"{super().dsn(direct)}?sslmode=disable&gssencmode=disable"

    def strand(self) -> None:
        """Read nothing more from the connections there are. New ones work."""
        with self._lock:
            for end in self._ends:
                with suppress(KeyError):  # it is stranded
                    self._selector.unregister(end)

    def heal(self) -> None:
        """Let new connections work again, and cut those that hang."""
        self.mode = "pass"
        self.cut()


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
