"""For tests of replay by command: a shop whose bug can be mended, and a command that can be interrupted."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from bartleby import Bartleby, Client, Message, Replay
from tests.kit.commands import PROGRAM
from tests.kit.worker import LONG, Running, until, working


class Shop:
    """A queue `orders`, where everything dies until `mended` is set, and then only what has `poison` in it."""

    def __init__(self, app: Bartleby, client: Client) -> None:
        self.app = app
        self.client = client
        self.mended = threading.Event()

        @app.handler("orders")
        async def fulfil(message: Message) -> None:
            if not self.mended.is_set():
                raise KeyError("street")
            if isinstance(message.payload, dict) and message.payload.get("poison"):
                raise ValueError("poison")

        self.client.configure_queue("orders", {"max_attempts": 1, "breaker": "off"})

    @contextmanager
    def open(self) -> Iterator[Running]:
        """Let a worker work."""
        with working(self.app) as running:
            yield running

    def plan(self, replay_id: int = 1) -> Replay:
        """Return a plan."""
        found = self.client.find_replay(replay_id)
        assert found is not None
        return found


class Driver:
    """A command that runs beside the test; what it says is collected."""

    def __init__(self, dsn: str, *words: str, cwd: Path | None = None) -> None:
        environment = {**os.environ, "BARTLEBY_DSN": dsn}
        self.process = subprocess.Popen(
            [*PROGRAM, *words],
            env=environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.out = self.err = ""

    def interrupt(self, number: int = signal.SIGINT) -> None:
        self.process.send_signal(number)

    def end(self, seconds: float = LONG) -> int:
        self.out, self.err = self.process.communicate(timeout=seconds)
        assert "Traceback" not in self.err, self.err
        return self.process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def wait_for(client: Client, replay_id: int, *statuses: str, seconds: float = LONG) -> Replay:
    """Wait until a plan has one of these statuses; return it."""

    def found() -> Replay | None:
        plan = client.find_replay(replay_id)
        return plan if plan is not None and plan.status in statuses else None

    plan = until(found, seconds, f"replay {replay_id} to be {statuses}")
    assert plan is not None
    return plan
