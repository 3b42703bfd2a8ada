"""Nouns as JSON and as CSV: the command line, the HTTP API and agents get the same text.

What a noun has as the text of the database (`raw…`) is written as the document that it is, digit by digit: a number may
have more digits than Python would give back.
"""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timedelta
from typing import Any

from bartleby.evidence import DeadLetter
from bartleby.replays import Replay
from bartleby.surfaces.cycles import Story
from bartleby.surfaces.story import advice
from bartleby.surfaces.words import printable

_PLACE = re.compile(r'"\\u0000(\d+)"')
# What a spreadsheet takes for a formula, whatever the width of its letters.
_FORMULA = re.compile(r"[=+\-@\t\r\n＝＋－＠]")  # noqa: RUF001 - meant
_COLUMNS = [each.name for each in fields(DeadLetter)]


@dataclass(frozen=True, slots=True)
class Document:
    """JSON text that is written as it is."""

    text: str


def shown(name: str, names: Sequence[str]) -> str:
    """Return what a field of a noun with these fields is called in JSON."""
    if name == "raw":
        return "payload" if "raw_headers" in names else "value"
    return "failure_history" if name == "raw_history" else name.removeprefix("raw_")


def members(noun: Any) -> dict[str, object]:  # noqa: ANN401 - a dataclass
    """Return a noun as what its JSON has."""
    names = [each.name for each in fields(noun)]
    values = {name: getattr(noun, name) for name in names}
    return {
        shown(name, names): Document(value) if name.startswith("raw") and isinstance(value, str) else value
        for name, value in values.items()
    }


def text(value: object, indent: int | None = None) -> str:
    """Return nouns, and what they are put into, as one JSON document; nothing in it can steer a terminal."""
    documents: list[str] = []

    def plain(value: Any) -> object:  # noqa: ANN401 - whatever json does not know
        match value:
            case Document():
                documents.append(value.text)
                return f"\0{len(documents) - 1}"
            case datetime():
                return value.isoformat()
            case timedelta():
                return value.total_seconds()
            case _ if is_dataclass(value) and not isinstance(value, type):
                return members(value)
            case Mapping():
                return dict(value)
            case _:
                return str(value)

    try:
        made = json.dumps(value, default=plain, indent=indent, ensure_ascii=False, allow_nan=False)
    except ValueError:  # what the audit has of a number that no float can hold
        documents.clear()
        made = json.dumps(_finite(value), default=plain, indent=indent, ensure_ascii=False)
    # PostgreSQL stores no NUL, so nothing else can look like a place for a document
    return _still(_PLACE.sub(lambda found: documents[int(found[1])], made))


def plan(plan: Replay) -> dict[str, object]:
    """Return a plan, with how many of its items will run and how many have their outcome."""
    return {**members(plan), "will_run": plan.will_run, "settled": plan.settled}


def story(story: Story) -> dict[str, object]:
    """Return the story of a message."""
    return {
        "message_id": story.message_id,
        "state": story.state,
        "message": story.message,
        "dead_letter": story.letter,
        "attempts": list(story.attempts),
        "queue": story.queue,
        "replay_items": list(story.items),
        "replays": list(story.plans.values()),
        "deeds": list(story.deeds),
        "next": " ".join(advice(story)),
    }


def csv_head() -> list[str]:
    """Return what the columns of letters are called."""
    return [shown(name, _COLUMNS) for name in _COLUMNS]


def csv_cells(letter: DeadLetter) -> list[str]:
    """Return a letter as cells, none of which a spreadsheet takes for a formula."""
    return [_cell(getattr(letter, name)) for name in _COLUMNS]


def csv_line(cells: Iterable[str]) -> str:
    """Return cells as a line of a CSV file."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\r\n").writerow(cells)
    return file.getvalue()


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, int):
        return str(value)
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return ("'" if _FORMULA.match(shown) else "") + printable(shown)


def _still(made: str) -> str:
    if made.isprintable():
        return made
    lines = made.split("\n")
    return "\n".join(each if each.isprintable() else "".join(map(_escaped, each)) for each in lines)


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    return json.dumps(character)[1:-1] if character > "\x7f" else f"\\u{ord(character):04x}"


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type | Document):
        return _finite(members(value))
    return value
