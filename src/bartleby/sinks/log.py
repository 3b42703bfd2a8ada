"""Events as a log: through the logger of this program, or one JSON line each in a file that is safe on its disk."""

import asyncio
import fcntl
import json
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from bartleby import telemetry
from bartleby.sinks.alert import sentence, severity
from bartleby.sinks.options import Options
from bartleby.sinks.publisher import Event, Failed, Outcome, Published

_MODE = 0o640
_SUFFIXES = (".log", ".jsonl")


class LogPublisher:
    """Tells the logger `bartleby`: `event.published` with the event in the field `cloudevent`."""

    @classmethod
    def open(cls, options: Options, timeout: float) -> "LogPublisher":
        """Return one for these options, or raise InvalidSettings."""
        path = options.optional("path")
        if path is None:
            return LogPublisher()
        # who may set up a sink is not meant to write into any file of the machine that the relay runs on
        if not Path(path).is_absolute() or Path(path).suffix not in _SUFFIXES:
            raise options.bad("path", f"expected an absolute path that ends in {' or '.join(_SUFFIXES)}")
        return FilePublisher(Path(path), timeout)

    async def publish(self, events: Sequence[Event]) -> list[Outcome]:
        """Log events; one that the logger would not let pass has failed, for it would be lost."""
        return [_logged(event) for event in events]

    async def close(self) -> None:
        """Nothing is kept open."""


class FilePublisher(LogPublisher):
    """Appends to a file, which others may move away and cut at any time between two calls."""

    def __init__(self, path: Path, timeout: float) -> None:
        self._path = path
        self._timeout = timeout
        self._writing: asyncio.Future[None] | None = None

    async def publish(self, events: Sequence[Event]) -> list[Outcome]:
        """Append events and have them written to the disk."""
        if not events:
            return []
        lines = b"".join(json.dumps(event, ensure_ascii=True).encode() + b"\n" for event in events)
        try:
            async with asyncio.timeout(self._timeout):
                await self._write(lines)
        except TimeoutError:
            return [Failed(f"{self._path}: not written within {self._timeout:g} s")] * len(events)
        except OSError as error:
            return [Failed(f"{self._path}: {error.strerror}")] * len(events)
        return [Published(str(self._path))] * len(events)

    async def _write(self, lines: bytes) -> None:
        if self._writing is not None:  # one that was given up: a thread cannot be stopped, and there is to be one
            await asyncio.wait([self._writing])
        self._writing = asyncio.ensure_future(asyncio.to_thread(_append, self._path, lines))
        await asyncio.shield(self._writing)

    async def ids(self, since: datetime, until: datetime) -> AsyncIterator[str]:
        """Return the ids of the events in the file that happened in this time."""
        for event_id in await asyncio.to_thread(_ids, self._path, since, until):
            yield event_id


def _logged(event: Event) -> Outcome:
    level = logging.INFO if severity(event) == "info" else logging.WARNING
    if not logging.getLogger("bartleby").isEnabledFor(level):
        return Failed(f"the logger bartleby does not let {logging.getLevelName(level)} pass")
    telemetry.event("event.published", sentence(event), level=level, cloudevent=dict(event))
    return Published("logged")


def _append(path: Path, lines: bytes) -> None:
    new = not path.exists()
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            lines = b"\n" + lines  # a write was cut short here: its events come again, and it must not spoil the next
        rest = memoryview(lines)
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
    finally:
        os.close(file)
    if new:
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _ids(path: Path, since: datetime, until: datetime) -> list[str]:
    found: list[str] = []
    if not path.exists():
        return found
    with path.open("rb") as file:
        for line in file:
            with suppress(ValueError, KeyError, TypeError):  # a line that was cut short, or is not ours
                event = json.loads(line)
                if since <= datetime.fromisoformat(event["time"]) <= until:
                    found.append(str(event["id"]))
    return found
