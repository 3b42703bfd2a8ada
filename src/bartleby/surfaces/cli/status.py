"""The status line of a worker on a terminal: always the last line, below what is logged."""

import asyncio
import logging
import shutil
import sys
import time
from typing import TYPE_CHECKING

from bartleby.telemetry import Lines

if TYPE_CHECKING:
    from bartleby.worker import Worker

_EVERY = 0.5


class StatusLine(logging.StreamHandler):  # type: ignore[type-arg] # generic only in the stubs
    """Writes log lines to standard error and keeps the status line below them."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(Lines())
        self._shown = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log line above the status line."""
        self.stream.write("\r\x1b[K")
        super().emit(record)
        self.stream.write(self._shown)
        self.stream.flush()

    async def follow(self, worker: "Worker") -> None:
        """Show how the worker is getting on, for ever."""
        before, since = worker.counts.total(), time.monotonic()
        try:
            while True:
                await asyncio.sleep(_EVERY)
                total, now = worker.counts.total(), time.monotonic()
                self._show(f"{_counts(worker)} · {(total - before) / (now - since):,.0f}/s")
                before, since = total, now
        finally:
            self._show("")

    def _show(self, text: str) -> None:
        self._shown = text[: shutil.get_terminal_size().columns - 1]
        self.stream.write(f"\r\x1b[K{self._shown}")
        self.stream.flush()


def _counts(worker: "Worker") -> str:
    counts = {"running": worker.running, **{name: worker.counts[name] for name in ("done", "retried", "dead")}}
    extra = {name: worker.counts[name] for name in ("released", "refused") if worker.counts[name]}
    return " · ".join(f"{name} {count:,}" for name, count in {**counts, **extra}.items())
