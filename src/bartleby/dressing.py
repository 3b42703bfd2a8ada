"""Events on their way out: what a message of a sink's queue asks for, and how an event looks when it leaves.

Nothing here talks to anybody.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from bartleby.message import Message
from bartleby.outcomes import Terminal
from bartleby.redaction import SECRET_NAME, Redactor

_HIDDEN = "***"
_LONGEST_TEXT = 100_000
_MANY = 2**63
_PLACE = re.compile(r"\{(message_id|group_id|queue)\}")
_REDACTOR = Redactor()

Document = dict[str, Any]
Reference = dict[str, Any]


class NotAnEvent(Terminal):
    """A message in the queue of a sink that refers to no event."""


class Refusal(Terminal):
    """The sink will never take this event."""


@dataclass(slots=True, eq=False)
class Item:
    """One event, and how often it was tried; `letter` if it was put aside before, and comes of a replay."""

    document: Document
    letter: Message | None = None
    tries: int = field(default=0)
    counted: bool = field(default=False)
    """Whether it was reported that its attempts are used up."""
    settled: bool = field(default=False)
    size: int = field(default=0)
    """About how many bytes it has."""

    def dress(self, link: str | None) -> None:
        """Make the event what the sink gets."""
        self.document = dressed(self.document, link)
        self.size = size_of(self.document)


def reference_of(payload: object) -> Reference:
    """Return the reference that a payload is; anything else is an error."""
    match payload:
        case {"event": int(event), **rest} if type(event) is int and event < _MANY and rest.keys() <= {"ordinals"}:
            ordinals = rest.get("ordinals")
            if ordinals is None:
                return {"event": event}
            if isinstance(ordinals, list) and all(type(each) is int and 0 <= each < _MANY for each in ordinals):
                return {"event": event, "ordinals": ordinals}
    raise NotAnEvent('it is not {"event": number}, or {"event": number, "ordinals": [numbers]}')


def event_number(document: Mapping[str, Any]) -> int:
    """Return which row of the database an event is of: the middle of its id."""
    return int(document["id"].split(".")[1])


def chunk(items: Sequence[Item], most: int, bytes_: int) -> list[Item]:
    """Return the first of these, at most so many and so large, as far as no two are about the same thing.

    Those go one by one.
    """
    subjects: set[str] = set()
    taken: list[Item] = []
    for item in items[:most]:
        subject = item.document["subject"]
        bytes_ -= item.size
        if subject in subjects or (taken and bytes_ < 0):
            break
        subjects.add(subject)
        taken.append(item)
    return taken


def dressed(document: Document, link: str | None) -> Document:
    """Return an event as the sink gets it: with a link if it wants one, and a payload without secrets."""
    data = document.get("data")
    if not isinstance(data, dict):
        return document
    shown = {name: _safe(value) if name in {"payload", "headers"} else value for name, value in data.items()}
    if link is not None and "link" not in shown and (filled := _filled(link, shown)) is not None:
        shown["link"] = filled
    return {**document, "data": shown}


def redacted(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a value without what its names or its texts give away as secrets."""
    match value:
        case dict():
            return {
                name: _HIDDEN if SECRET_NAME.search(name) and each is not None else redacted(each)
                for name, each in value.items()
            }
        case list():
            return [redacted(each) for each in value]
        case str():
            return _REDACTOR.clean(value, _LONGEST_TEXT)
        case _:
            return value


def _safe(value: object) -> object:
    try:
        return redacted(value)
    except RecursionError:  # nobody can tell what is down there
        return _HIDDEN


def told(why: str) -> str:
    """Return what a sink said as it may be stored and shown."""
    return " ".join(_REDACTOR.clean(why, 1000).split())


def size_of(document: Document) -> int:
    """Return about how many bytes an event has."""
    data = document.get("data") or {}
    try:
        return 1000 + (len(json.dumps([data.get("payload"), data.get("headers")])) if "payload" in data else 0)
    except RecursionError:
        return 1000


def _filled(link: str, data: Mapping[str, Any]) -> str | None:
    if any(data.get(name) is None for name in _PLACE.findall(link)):
        return None  # a link to a letter says nothing about a replay
    return _PLACE.sub(lambda found: quote(str(data[found[1]]), safe=""), link)
