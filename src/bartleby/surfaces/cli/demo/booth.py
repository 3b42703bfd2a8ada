"""The console of the demo: a process of its own, on this machine alone, gone when the show is over."""

import contextlib
import os
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from bartleby.surfaces.cli.demo.shield import uninterrupted

_PACKAGES = ("fastapi", "jinja2", "python_multipart", "uvicorn")
_WAIT_SECONDS = 30.0
_REMEMBERED = 20


@dataclass(slots=True)
class Booth:
    """Started with the server, so that it is there when the curtain rises."""

    directory: Path
    dsn: str
    said: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _process: subprocess.Popen[str] | None = None
    _address: str | None = None
    _heard: threading.Event = field(default_factory=threading.Event)

    def open(self, *port: str) -> None:
        """Start it; at its usual port if none is given."""
        self._heard = threading.Event()
        # what is set for another console, such as an address for everybody, is not meant for this one
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BARTLEBY_CONSOLE_")}
        words = ["console", "--host", "127.0.0.1", "--no-auth", "--environment", "demo", *port]
        with uninterrupted():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bartleby", *words],
                cwd=self.directory,
                env={**kept, "BARTLEBY_DSN": self.dsn, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                # Ctrl-C is for the demo alone
                start_new_session=True,
            )
        assert self._process.stdout is not None  # noqa: S101 - it was asked for
        threading.Thread(target=self._listen, args=(self._process.stdout, self._heard), daemon=True).start()

    def address(self) -> str | None:
        """Return where it is, as soon as it is known; None if it could not start."""
        if self._process is None:
            return None
        if self._heard.wait(_WAIT_SECONDS) and self._address is None and any("cannot listen" in x for x in self.said):
            self.kill()
            self.open("--port", "0")
            self._heard.wait(_WAIT_SECONDS)
        return self._address

    def kill(self) -> None:
        """End it, now: there is nothing that it would have to finish."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _listen(self, told: IO[str], heard: threading.Event) -> None:
        with told, contextlib.suppress(ValueError):
            for line in told:
                if line.startswith("http://"):
                    self._address = line.strip()
                    heard.set()
                else:
                    self.said.append(line.rstrip())
        heard.set()


def missing() -> list[str]:
    """Return the packages that the console would need."""
    return [name for name in _PACKAGES if find_spec(name) is None]
