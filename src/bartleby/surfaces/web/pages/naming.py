"""How things are named: a group by what it died of and where it goes, a deed by what it was done to."""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from bartleby.evidence import Group
from bartleby.surfaces.words import line

_RANGE = re.compile(r"\[(\d+),(\d+)\)")
_MOST_IDS = 100
_FRESH = timedelta(minutes=10)
_ONE = {
    "replay_id": ("replay", "/operations/"),
    "group_id": ("group", "/groups/"),
    "message_id": ("letter", "/letters/"),
}
_ALL = {"sink": "/sinks", "token": "/tokens", "worker": "/workers"}


class Named(NamedTuple):
    """What a deed was done to: in words, and where it is shown."""

    text: str
    path: str | None = None
    filter: str = ""


def many(count: int, noun: str) -> str:
    """Return how many there are of something."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def headline(group: Group) -> str:
    """Return what a group died of, the type without the modules that it comes from."""
    title, kind = group.title or group.error_type, group.error_type or ""
    if title is None:
        return "no error was given"
    return f"{kind.rpartition('.')[2]}{title.removeprefix(kind)}" if title.startswith(kind) else title


def before(hours: Sequence[int]) -> int:
    """Return the most of an hour that is over: the last hour may overlap with two of the hours of the clock."""
    return max(hours[-5:-2], default=0)


def trend(group: Group, now: datetime | None = None) -> str:
    """Return where it goes with a group: `growing`, `calming`, `steady` or `quiet`. What grows has grown just now."""
    last, most = group.deaths_last_hour, before(group.deaths_by_hour)
    if last == 0 or group.last_dead_at is None:
        return "quiet"
    fresh = (now or datetime.now(UTC)) - group.last_dead_at < _FRESH
    if fresh and last > 2 * max(most, 1):
        return "growing"
    return "steady" if fresh and most <= 2 * last else "calming"


def subjects(subject: Mapping[str, object]) -> Iterator[Named]:
    """Yield what a deed was done to."""
    for name, value in subject.items():
        if name in _ONE and isinstance(value, int):
            noun, path = _ONE[name]
            yield Named(f"{noun} {value}", f"{path}{value}")
        elif name in _ALL:
            yield Named(f"{name} {line(str(value), 60)}", _ALL[name])
        elif name == "queue":
            yield Named(f"queue {line(str(value), 60)}", f"/queues/{value}")
        elif name == "message_ids":
            yield _letters(str(value))
        else:
            yield Named(f"{name} {line(str(value), 60)}")


def _letters(ranges: str) -> Named:
    spans = [(int(first), int(end)) for first, end in _RANGE.findall(ranges)]
    count = sum(end - first for first, end in spans)
    if count == 1:
        return Named(f"letter {spans[0][0]}", f"/letters/{spans[0][0]}")
    if not 0 < count <= _MOST_IDS:
        return Named(f"{count:,} letters" if count else line(ranges, 60))
    ids = ",".join(str(each) for first, end in spans for each in range(first, end))
    return Named(f"{count} letters", "/letters", f"status:any id:{ids}")


FILTERS = {"many": many, "headline": headline, "before": before, "trend": trend, "subjects": subjects}
