"""Shuts a connection whose server does not answer: a proxy or a firewall in between may keep it open for ever.

The server stops a statement that takes too long; nobody stops one whose server has gone silent.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from bartleby.pooling import Pooled

_LOOK_SECONDS = 0.25
_IDLE_SECONDS = 30.0


class Watchdog:
    """Looks after connections while something is waited for; one thread for all of them, while there is something."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[int, tuple[float, Pooled]] = {}
        self._awake = False

    @contextmanager
    def within(self, connection: Pooled, seconds: float) -> Iterator[None]:
        """Shut a connection if what is done with it takes longer; then it fails."""
        with self._changed:
            outer = self._due.get(id(connection))
            self._due[id(connection)] = (time.monotonic() + seconds, connection)
            if not self._awake:
                self._awake = True
                threading.Thread(target=self._look, name="database watchdog", daemon=True).start()
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                del self._due[id(connection)]
                if outer is not None:
                    self._due[id(connection)] = outer

    def _look(self) -> None:
        while True:
            with self._changed:
                if not self._due and not self._changed.wait_for(lambda: self._due, _IDLE_SECONDS):
                    self._awake = False
                    return
                self._shut_late()
            time.sleep(_LOOK_SECONDS)

    # a method of its own, after which no variable of the thread keeps a connection
    def _shut_late(self) -> None:
        now = time.monotonic()
        for due, connection in self._due.values():
            if due < now:
                _shut(connection)


def _shut(connection: Pooled) -> None:
    with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)
