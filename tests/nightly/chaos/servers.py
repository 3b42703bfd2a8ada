"""A PostgreSQL server of one test, which may crash and is started again."""

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any, Self

import psycopg

from bartleby import dev
from tests.kit.database import install

Connection = psycopg.Connection[tuple[Any, ...]]


class OwnServer:
    """Starts with Bartleby installed; at the end it is stopped and removed."""

    def __init__(self, scratch: Path, settings: dict[str, str] | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="bartleby-own-", dir=scratch))
        self._settings = settings

    def __enter__(self) -> Self:
        self.running = dev.start(self._folder, settings=self._settings or {})
        install(self.dsn)
        return self

    def __exit__(self, *_: object) -> None:
        if dev.running(self._folder) is not None:
            self.running.stop("immediate")
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def dsn(self) -> str:
        return self.running.dsn

    def connect(self) -> Connection:
        return psycopg.connect(self.dsn, autocommit=True)

    def stop_at_once(self) -> None:
        """Stop as a crash does: without a checkpoint, and without waiting for sessions."""
        self.running.stop("immediate")

    def kill(self) -> None:
        """Kill the first process of the server."""
        os.kill(self.running.pid, signal.SIGKILL)
        if self.running._process is not None:
            self.running._process.wait()

    def start_again(self) -> None:
        again = dev.start(self._folder, settings=self._settings or {})
        if again.started:
            self.running = again
