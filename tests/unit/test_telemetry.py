"""Log lines: one line an event, whatever it contains, and a limit for events of one kind."""

import itertools
import json
import logging
import time
from collections.abc import Iterator

import pytest

from bartleby import telemetry
from bartleby.telemetry import JsonLines, Lines, Spare
from tests.kit.poison import raised

HOSTILE = ["two\nlines", "a\rb", "\x1b[31mred", "nul\0", "\u2028\u2029", "\ud800", "\x9b2J", "\u202eevil"]


@pytest.fixture
def _logger() -> Iterator[None]:
    """The library's logger without handlers, restored afterwards."""
    found = logging.getLogger("bartleby")
    before = found.level, found.propagate, list(found.handlers)
    found.handlers = []
    yield
    found.level, found.propagate, found.handlers = before[0], before[1], before[2]


def record(text: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("bartleby", logging.WARNING, __file__, 1, text, None, None)
    made.event, made.fields = "message.dead", fields
    return made


@pytest.mark.usefixtures("_logger")
def test_event_has_name_text_and_fields_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.configure(as_json=True, level=logging.INFO)
    telemetry.event("queue.created", "there was no queue orders: created", queue="orders", count=3)
    telemetry.warning("database.away", "100% gone: %s %d", connection="claims")
    telemetry.configure(as_json=True, level=logging.WARNING)
    telemetry.event("quiet", "not shown")
    captured = capsys.readouterr()
    assert captured.out == ""
    first, second = (json.loads(line) for line in captured.err.splitlines())
    assert (first["event"], first["level"], first["queue"], first["count"]) == ("queue.created", "info", "orders", 3)
    assert (second["text"], second["level"]) == ("100% gone: %s %d", "warning")


def test_event_is_one_printable_line_of_time_level_name_text_and_fields() -> None:
    for formatter, text in itertools.product((JsonLines(), Lines()), HOSTILE):
        line = formatter.format(record(f"it said {text}", error=text, number=1))
        assert len(line.splitlines()) == 1, ascii(text)
        assert line.isprintable(), ascii(text)
        line.encode()
    line = Lines().format(record("ValueError: no", queue="orders", note="two words"))
    assert line[2] == line[5] == ":"
    assert line[13:] == 'warning message.dead: ValueError: no  queue=orders note="two words"'
    assert json.loads(JsonLines().format(record("x", kind=KeyError)))["kind"] == "<class 'KeyError'>"
    error = raised(int, "here")
    failed = logging.LogRecord("other", 20, __file__, 1, "%s and %s", ("one", "two"), (ValueError, error, None))
    for text in (JsonLines().format(failed), Lines().format(failed)):
        assert "ValueError" in text
        assert "one and two" in text


@pytest.mark.usefixtures("_logger")
def test_events_above_the_limit_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    telemetry.configure(as_json=True, level=logging.INFO)
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    spare = Spare("messages.failed", "more messages failed", a_second=20)
    assert sum(spare.take() for _ in range(5000)) == 20
    for now in (101.0, 102.0):  # noqa: B007 - the clock
        assert spare.take()
    assert [json.loads(line)["text"] for line in capsys.readouterr().err.splitlines()] == ["4,980 more messages failed"]
