"""A PostgreSQL server of one test, which may crash and is started again."""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Self

import psycopg

from bartleby import dev
from tests.kit.database import install
from tests.kit.sql import Connection
from tests.kit.worker import until


class OwnServer:
    """Starts with Bartleby installed; at the end it is stopped and removed."""

    def __init__(self, scratch: Path, settings: dict[str, str] | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="bartleby-own-", dir=scratch))
        self._settings = settings or {}

    def __enter__(self) -> Self:
        self.running = dev.start(self._folder, settings=self._settings)
        self.dsn = self.running.dsn
        install(self.dsn)
        return self

    def __exit__(self, *_: object) -> None:
        if dev.running(self._folder) is not None:
            self.running.stop("immediate")
        shutil.rmtree(self._folder, ignore_errors=True)

    def connect(self) -> Connection:
        return psycopg.connect(self.dsn, autocommit=True)

    def stop_alone(self) -> None:
        """Stop as a crash does: without a checkpoint, and without waiting for sessions."""
        self.running.stop("immediate")

    def kill(self) -> None:
        os.kill(self.running.pid, signal.SIGKILL)
        if self.running._process is not None:
            self.running._process.wait()

    def kill_a_backend(self) -> None:
        """Kill a backend that settles, or any: the server cuts all sessions and restarts by itself."""
        with self.connect() as conn:
            query = "select pid from pg_stat_activity where application_name = 'bartleby settles' order by random()"
            pid = conn.execute(query).fetchone() or (conn.info.backend_pid,)
            os.kill(pid[0], signal.SIGKILL)
            until(lambda: not works(lambda: conn.execute("select")), what="a crash")

    def start_again(self) -> None:
        again = dev.start(self._folder, settings=self._settings)
        if again.started:
            self.running = again
        until(lambda: works(lambda: self.connect().close()))


def works(call: Callable[[], object]) -> bool:
    try:
        call()
    except psycopg.OperationalError:
        return False
    return True
