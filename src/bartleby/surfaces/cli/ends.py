"""When something ends that is done for a time: `--for 30m` or `--until 08:00`."""

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar

import click

from bartleby.surfaces.cli.confirming import NotUnderstood

F = TypeVar("F", bound=Callable[..., Any])

_CENTURY = 100 * 365 * 86400
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:s|m|h|d|w))+")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def for_a_time(function: F) -> F:
    """Add the options that say when it ends, `length` and `until`."""
    until = click.option("--until", metavar="TIME", help="Until when: 08:00, 2026-11-16, 2026-11-16T08:00.")(function)
    return click.option("--for", "length", metavar="2h", help="How long: 30m, 2h, 1d, 1h30m.")(until)


def end_of(length: str | None, until: str | None, now: datetime) -> datetime:
    """Return the end that one of the two says."""
    if (length is None) == (until is None):
        raise NotUnderstood("say for how long, or until when", "--for 2h or --until 08:00")
    if length is not None:
        text = length.replace(" ", "").lower()
        if not _DURATION.fullmatch(text):
            raise NotUnderstood(f"{length!r} is no length of time", "--for 30m, 2h, 1d or 1h30m")
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in re.findall(r"([\d.]+)([smhdw])", text))
        return now + timedelta(seconds=min(seconds, _CENTURY))
    return _moment(until or "", now)


def _moment(text: str, now: datetime) -> datetime:
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}", text):
            hour, minute = map(int, text.split(":"))
            here = now.astimezone().replace(tzinfo=None)  # tomorrow's offset may be another
            today = here.replace(hour=hour, minute=minute, second=0, microsecond=0)
            return (today if today > here else today + timedelta(days=1)).astimezone()
        # one without a time zone is in that of whoever types it
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise NotUnderstood(f"{text!r} is no time", "--until 08:00, 2026-11-16 or 2026-11-16T08:00") from None
