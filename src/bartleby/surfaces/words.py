"""How things are written for people: times no finer than they need, errors and breakers in lines that fit.

None of it can steer a terminal.
"""

from contextvars import ContextVar
from datetime import UTC, datetime, timedelta, tzinfo

from bartleby.message import Queue

LONGEST_ERROR = 240
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_MANY_SECONDS = 10

_ZONE: ContextVar[tzinfo | None] = ContextVar("bartleby_zone", default=None)


def speak_utc() -> None:
    """Write times in UTC, and say so, in the rest of this task, which answers a request.

    Who looks at a page is anywhere. A terminal has the clock of its machine.
    """
    _ZONE.set(UTC)


def when(moment: datetime | None) -> str:
    """Return date and time, to the second; nothing for None."""
    return "" if moment is None else _written(moment, "%Y-%m-%d %H:%M:%S")


def here(moment: datetime) -> datetime:
    """Return a moment in the zone in which times are written."""
    return moment.astimezone(_ZONE.get())


def clock(moment: datetime) -> str:
    """Return the time of day, to the millisecond."""
    thousandths = moment.microsecond // 1000
    return _written(moment, f"%H:%M:%S.{thousandths:03d}")


def _written(moment: datetime, form: str) -> str:
    return here(moment).strftime(form if _ZONE.get() is None else f"{form} %Z")


def length(duration: timedelta) -> str:
    """Return a duration as `0.3 s`, `12 s`, `3 min`, `5 h` or `2 days`; no sign."""
    seconds = abs(duration.total_seconds())
    if seconds < _MANY_SECONDS:
        return f"{seconds:.1f} s"
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    if seconds < 2 * _DAY:
        return f"{seconds / _HOUR:.0f} h"
    return f"{seconds / _DAY:.0f} days"


def relative(moment: datetime, now: datetime) -> str:
    """Return how far away a moment is: `in 12 s`, or `3 min ago`."""
    away = moment - now
    return f"in {length(away)}" if away > timedelta(0) else f"{length(away)} ago"


def line(text: str | None, limit: int) -> str:
    """Return the beginning of a text as one line: 100,000 characters are possible."""
    found = " ".join(printable((text or "")[: 4 * limit]).split())
    return found if len(found) <= limit else f"{found[:limit]}…"


def error_line(error_type: str | None, error: str | None) -> str:
    """Return an error as one line that fits into a table."""
    return line(": ".join(filter(None, (error_type, error))) or "no error was given", LONGEST_ERROR)


def traceback_end(traceback: str | None, most: int | None) -> list[str]:
    """Return the last lines of a traceback, all of them for None."""
    lines = printable((traceback or "").rstrip()).splitlines()
    if most is not None and len(lines) > most:
        lines = [f"… {len(lines) - most} more lines (--all)", *lines[-most:]]
    return [each if len(each) <= LONGEST_ERROR else f"{each[:LONGEST_ERROR]}…" for each in lines]


def breaker(queue: Queue, now: datetime) -> str:
    """Return a sentence about a breaker that is not closed, else nothing."""
    if queue.breaker in {"closed", "off"}:
        return "breaker off" if queue.breaker == "off" else ""
    since = f" since {when(queue.breaker_since)} ({relative(queue.breaker_since, now)})" if queue.breaker_since else ""
    probe = ""
    if queue.breaker == "open":
        probe = "; a probe is out"
        if queue.next_probe_at is not None:
            due = queue.next_probe_at <= now
            probe = "; the next probe is due" if due else f"; next probe {relative(queue.next_probe_at, now)}"
    cause = f": {line(queue.breaker_cause, LONGEST_ERROR)}" if queue.breaker_cause else ""
    return f"breaker {queue.breaker}{since}{cause}{probe}"


def pause(queue: Queue, now: datetime) -> str:
    """Return that a queue is paused, and until when if that is known; else nothing."""
    if not queue.paused or queue.paused_until is None:
        return "paused" if queue.paused else ""
    if queue.paused_until <= now:
        return "paused; the end of the pause is due"
    return f"paused until {when(queue.paused_until)} ({relative(queue.paused_until, now)})"


def printable(text: str) -> str:
    """Return a text that cannot steer a terminal."""
    text = text.replace("\t", "    ")
    return "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in text)
