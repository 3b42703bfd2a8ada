"""What a worker tells about itself: named events with fields, through the standard logging of Python.

This is the only seam: programs that want metrics or traces attach a handler to the logger `bartleby` and read
`record.event` and `record.fields`.
"""

import json
import logging
import time
from datetime import UTC, datetime
from typing import Any

_LOGGER = logging.getLogger("bartleby")


def event(name: str, text: str, *, level: int = logging.INFO, **fields: Any) -> None:  # noqa: ANN401 - whatever tells
    """Tell that something happened: its name for programs, a sentence for people, and the facts."""
    if _LOGGER.isEnabledFor(level):
        # cleaned here: the user's own formatter may not do so
        _LOGGER.log(level, "%s", _one_line(text), extra={"event": name, "fields": fields})


def warning(name: str, text: str, **fields: Any) -> None:  # noqa: ANN401 - whatever tells
    """Tell of something that somebody should look at."""
    event(name, text, level=logging.WARNING, **fields)


def error(name: str, text: str, **fields: Any) -> None:  # noqa: ANN401 - whatever tells
    """Tell of something that went wrong for good."""
    event(name, text, level=logging.ERROR, **fields)


class Spare:
    """A few events a second one by one, and the rest as a number: a storm must not drown its own news."""

    def __init__(self, name: str, text: str, *, a_second: int = 20) -> None:
        self._name = name
        self._text = text
        self._most = a_second
        self._second = 0
        self._count = 0

    def take(self) -> bool:
        """Return whether to tell this one."""
        second = int(time.monotonic())
        if second != self._second:
            if self._count > self._most:
                warning(self._name, f"{self._count - self._most:,} {self._text}")
            self._second, self._count = second, 0
        self._count += 1
        return self._count <= self._most


class Lines(logging.Formatter):
    """One line an event, for people."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.fromtimestamp(record.created, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
        fields = " ".join(f"{name}={_short(value)}" for name, value in getattr(record, "fields", {}).items())
        name = getattr(record, "event", record.name)
        text = f"{time} {record.levelname.lower():7} {name}: {record.getMessage()}"
        text = _one_line(f"{text}  {fields}" if fields else text)
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return text


class JsonLines(logging.Formatter):
    """One JSON object a line, for programs."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", record.name),
            "text": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=True)


def configure(*, as_json: bool, level: int = logging.INFO, handler: logging.Handler | None = None) -> None:
    """Send events to standard error, or to a handler."""
    if handler is None:
        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines() if as_json else Lines())
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(level)
    _LOGGER.propagate = False


def _one_line(text: str) -> str:
    # what an exception says must not look like a line of ours, or steer a terminal
    return text if text.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _short(value: object) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if " " in text or not text.isprintable() else text
