"""The status line of a worker on a terminal: always the last line, below what is logged."""

import asyncio
import contextlib
import logging
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO, cast

from bartleby.telemetry import Lines

if TYPE_CHECKING:
    from bartleby.worker import Worker

_EVERY = 0.5


class StatusLine(logging.StreamHandler):  # type: ignore[type-arg] # generic only in the stubs
    """Writes log lines to standard error and keeps the status line below them."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(Lines())
        self._text = ""
        self._drawn = False
        self.partial = False
        """Whether a handler has printed half a line: then there is no place for ours."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log line above the status line."""
        self.clear()
        super().emit(record)
        self.redraw()

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

    @contextlib.contextmanager
    def above(self) -> Iterator[None]:
        """Let what handlers print appear above the status line."""
        stdout, stderr = sys.stdout, sys.stderr
        if stdout.isatty():
            sys.stdout = cast("TextIO", _Above(stdout, self))
        sys.stderr = cast("TextIO", _Above(stderr, self))
        try:
            yield
        finally:
            sys.stdout, sys.stderr = stdout, stderr

    def clear(self) -> None:
        """Take the status line away."""
        if self._drawn:
            self._drawn = False
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def redraw(self) -> None:
        """Show it again."""
        if not self.partial and self._text:
            self._drawn = True
            self.stream.write(self._text)
            self.stream.flush()

    def _show(self, text: str) -> None:
        self.clear()
        self._text = text[: shutil.get_terminal_size().columns - 1]
        self.redraw()


class _Above:
    """A stream while there is a status line; the line comes back when a line was finished."""

    def __init__(self, stream: TextIO, status: StatusLine) -> None:
        self._stream = stream
        self._status = status

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a stream has
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write above the status line."""
        self._status.clear()
        written = self._stream.write(text)
        self._stream.flush()
        self._status.partial = not text.endswith("\n")
        self._status.redraw()
        return written

    def writelines(self, lines: Iterable[str]) -> None:
        """Write them above the status line."""
        self.write("".join(lines))


def _counts(worker: "Worker") -> str:
    counts = {"running": worker.running, **{name: worker.counts[name] for name in ("done", "retried", "dead")}}
    extra = {name: worker.counts[name] for name in ("released", "refused") if worker.counts[name]}
    return " · ".join(f"{name} {count:,}" for name, count in {**counts, **extra}.items())
