"""Log lines: one line an event, whatever it contains, and a limit for events of one kind."""

import contextlib
import io
import itertools
import json
import logging
import sys
import time
from collections.abc import Iterator

import pytest

from bartleby import telemetry
from bartleby.telemetry import JsonLines, Lines, Spare


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The library's logger, restored afterwards."""
    found = logging.getLogger("bartleby")
    before = found.level, found.propagate, list(found.handlers)
    yield found
    found.level, found.propagate, found.handlers = before[0], before[1], before[2]


@pytest.fixture
def written(logger: logging.Logger) -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield stream
    logger.removeHandler(handler)


def record(text: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("bartleby", logging.WARNING, __file__, 1, text, None, None)
    made.event, made.fields = "message.dead", fields
    return made


def test_event_has_name_text_and_fields(written: io.StringIO) -> None:
    telemetry.event("queue.created", "there was no queue orders: created", queue="orders", count=3)
    telemetry.warning("database.away", "100% gone: %s %d", connection="claims")
    telemetry.error("settlement.impossible", "no")
    first, second, third = (json.loads(line) for line in written.getvalue().splitlines())
    assert (first["event"], first["level"], first["queue"], first["count"]) == ("queue.created", "info", "orders", 3)
    assert (second["text"], second["level"]) == ("100% gone: %s %d", "warning")
    assert third["level"] == "error"
    assert first["time"].endswith("+00:00")


HOSTILE = ["two\nlines", "a\rb", "\x1b[31mred", "nul\0", "\u2028\u2029", "\ud800", "\x9b2J", "\u202eevil"]


FORMATTERS = (JsonLines(), Lines())


def test_event_is_one_printable_line() -> None:
    for formatter, text in itertools.product(FORMATTERS, HOSTILE):
        line = formatter.format(record(f"it said {text}", error=text, number=1))
        assert len(line.splitlines()) == 1, ascii(text)
        assert line.isprintable(), ascii(text)
        line.encode()


def test_line_has_time_level_name_text_and_fields() -> None:
    line = Lines().format(record("ValueError: no", queue="orders", note="two words"))
    assert line[2] == line[5] == ":"
    assert line[13:] == 'warning message.dead: ValueError: no  queue=orders note="two words"'
    found = json.loads(JsonLines().format(record("x", path=HOSTILE, kind=KeyError, raw=b"ab")))
    assert (found["kind"], found["raw"]) == ("<class 'KeyError'>", "b'ab'")


def test_exceptions_and_records_of_other_loggers_are_formatted() -> None:
    made = record("x")
    with contextlib.suppress(ValueError):
        try:
            int("here")
        finally:
            made.exc_info = sys.exc_info()
    other = logging.LogRecord("other", logging.INFO, __file__, 1, "%s and %s", ("one", "two"), None)
    for formatter in FORMATTERS:
        assert "ValueError" in formatter.format(made)
        assert "Traceback" in formatter.format(made)
        assert "one and two" in formatter.format(other)
        assert "other" in formatter.format(other)


def test_configured_logger_writes_to_standard_error(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logger.handlers = []
    telemetry.configure(as_json=True, level=logging.WARNING)
    telemetry.event("quiet", "not shown")
    telemetry.warning("loud", "shown")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [json.loads(line)["event"] for line in captured.err.splitlines()] == ["loud"]


def test_events_above_the_limit_are_counted(written: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    spare = Spare("messages.failed", "more messages failed", a_second=20)
    assert sum(spare.take() for _ in range(5000)) == 20
    now = 101.0
    assert spare.take()
    (line,) = written.getvalue().splitlines()
    assert json.loads(line)["text"] == "4,980 more messages failed"
    now = 102.0
    assert spare.take()
    assert len(written.getvalue().splitlines()) == 1
