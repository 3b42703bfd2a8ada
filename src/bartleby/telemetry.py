"""What a worker tells about itself: named events with fields, through the standard logging of Python.

This is the only seam: programs that want metrics or traces attach a handler to the logger `bartleby` and read
`record.event` and `record.fields`.
"""

import json
import logging
from datetime import UTC, datetime
from typing import Any

_LOGGER = logging.getLogger("bartleby")


def event(name: str, text: str, *, level: int = logging.INFO, **fields: Any) -> None:  # noqa: ANN401 - whatever tells
    """Tell that something happened: its name for programs, a sentence for people, and the facts."""
    if _LOGGER.isEnabledFor(level):
        _LOGGER.log(level, text, extra={"event": name, "fields": fields})


def warning(name: str, text: str, **fields: Any) -> None:  # noqa: ANN401 - whatever tells
    """Tell of something that somebody should look at."""
    event(name, text, level=logging.WARNING, **fields)


def error(name: str, text: str, **fields: Any) -> None:  # noqa: ANN401 - whatever tells
    """Tell of something that went wrong for good."""
    event(name, text, level=logging.ERROR, **fields)


class Lines(logging.Formatter):
    """One line an event, for people."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.fromtimestamp(record.created, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
        fields = " ".join(f"{name}={_short(value)}" for name, value in getattr(record, "fields", {}).items())
        name = getattr(record, "event", record.name)
        text = f"{time} {record.levelname.lower():7} {name}: {record.getMessage()}"
        text = f"{text}  {fields}" if fields else text
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


def configure(*, as_json: bool, level: int = logging.INFO) -> None:
    """Send events to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if as_json else Lines())
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(level)
    _LOGGER.propagate = False


def _short(value: object) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if " " in text or not text.isprintable() else text
