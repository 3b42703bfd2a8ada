"""The demo's worker processes: started as a user starts them, started again when they die, and gone at the end."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from bartleby.errors import BartlebyError
from bartleby.surfaces.cli.demo.shield import uninterrupted

_REMEMBERED = 50
_PAUSE_SECONDS = 0.5
_BROKEN_PAUSE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Setback:
    """A failed attempt that will be repeated."""

    queue: str
    message_id: int
    attempt: int
    error: str
    retry_at: datetime | None


@dataclass(slots=True)
class Crew:
    """So many workers of one application. What they tell is read from their logs."""

    directory: Path
    dsn: str
    size: int
    setbacks: deque[Setback] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    counts: Counter[str] = field(default_factory=Counter)
    failed_emails: Counter[int] = field(default_factory=Counter)
    said: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    news: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _code: bytes | None = None
    _edited: bool = False
    _dismissed: list[subprocess.Popen[str]] = field(default_factory=list)
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)
    _start_at: float = 0.0

    def look(self) -> list[str]:
        """Start who is missing; return how the others died since the last look."""
        deaths = []
        for process in [each for each in self._processes if each.poll() is not None]:
            self._processes.remove(process)
            if process.returncode == 0 or process in self._dismissed:
                continue
            self._start_at = time.monotonic() + _PAUSE_SECONDS
            if process.returncode < 0:
                deaths.append(f"Worker {process.pid} was killed by {signal.Signals(-process.returncode).name}")
                continue
            trouble = f"a worker ended with code {process.returncode}: {' | '.join(self.said)}"
            if not self._edited:
                raise BartlebyError(trouble)
            self.news.append(f"With the new shop.py {trouble}")
            self._start_at = time.monotonic() + _BROKEN_PAUSE_SECONDS
        while len(self._processes) < self.size and time.monotonic() >= self._start_at:
            self._start()
        self.counts["deaths"] += len(deaths)
        return deaths

    def deploy(self) -> None:
        """If somebody has changed the shop's code, start the workers again with it."""
        try:
            code = (self.directory / "shop.py").read_bytes()
        except OSError:  # an editor is about to write it
            return
        known, self._code = self._code, code
        if known is None or known == code:
            return
        try:
            compile(code, "shop.py", "exec")
        except (SyntaxError, ValueError) as error:
            self.news.append(f"shop.py is no Python ({error}): the workers go on with what they have.")
            return
        self._edited = True
        self._dismissed = self._processes.copy()
        for process in self._processes:
            process.terminate()
        self.news.append("shop.py has changed: the workers finish what they run, and start again with it.")

    def kill(self) -> None:
        """End them all, now: the database they work for is thrown away."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _start(self) -> None:
        with uninterrupted():
            process = subprocess.Popen(
                [sys.executable, "-m", "bartleby", "work", "shop:app", "--log", "json"],
                cwd=self.directory,
                env={**os.environ, "BARTLEBY_DSN": self.dsn},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                # Ctrl-C is for the demo alone
                start_new_session=True,
            )
            self._processes.append(process)
        assert process.stderr is not None  # noqa: S101 - it was asked for
        threading.Thread(target=self._listen, args=(process.stderr,), daemon=True).start()

    def _listen(self, log: IO[str]) -> None:
        with log:
            for line in log:
                try:
                    told = json.loads(line)
                except ValueError:
                    told = line
                if isinstance(told, dict):
                    self._hear(told)
                else:
                    self.said.append(line.rstrip())

    def _hear(self, told: dict[str, Any]) -> None:
        event = told.get("event")
        if event == "message.failed":
            retry_at = told.get("retry_at")
            moment = datetime.fromisoformat(retry_at) if retry_at else None
            setback = Setback(told["queue"], told["message_id"], told["attempt"], told["text"], moment)
            self.setbacks.appendleft(setback)
            self.counts["retries"] += 1
            if setback.queue == "emails":
                self.failed_emails[setback.message_id] += 1
        elif told.get("level") == "error":
            self.said.append(f"{event}: {told.get('text')}")
