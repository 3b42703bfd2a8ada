"""How times and durations are written for people: in their time zone, and no finer than they need."""

from datetime import datetime, timedelta

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_MANY_SECONDS = 10


def when(moment: datetime | None) -> str:
    """Return date and time, to the second; nothing for None."""
    return "" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def clock(moment: datetime) -> str:
    """Return the time of day, to the millisecond."""
    return moment.astimezone().strftime("%H:%M:%S.%f")[:-3]


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
