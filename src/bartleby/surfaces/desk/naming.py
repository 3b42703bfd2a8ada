"""What a filter names. Whoever is held to some queues is told of all others that there is no such queue."""

import re
from collections.abc import Callable

from bartleby.errors import InvalidFilter

_TERM = re.compile(r'(?:[^\s"]|"(?:[^"\\]|\\.)*"?)+')
_VALUE = re.compile(r'"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<plain>[^,"]+)')
_ESCAPED = re.compile(r"\\(.)")
_FIELD = "queue:"
_LONGEST = 80


def says_status(filter: str) -> bool:
    """Return whether a filter says which status letters are to have."""
    return any(each.removeprefix("-").lower().startswith("status:") for each in _TERM.findall(filter))


def foreign_queue(filter: str, sees: Callable[[str], bool]) -> InvalidFilter | None:
    """Return an error for the first queue in a filter that they do not see, as if it did not exist."""
    for term in _TERM.finditer(filter):
        at = term.start() + term[0].startswith("-")
        if filter[at : at + len(_FIELD)].lower() != _FIELD:
            continue
        for value in _VALUE.finditer(filter, at + len(_FIELD), term.end()):
            quoted = value["quoted"]
            name = value["plain"] if quoted is None else _ESCAPED.sub(r"\1", quoted)
            if not sees(name) and (quoted is not None or "*" not in name):
                return no_queue(name, value.start() + 1)
    return None


def no_queue(name: str, position: int) -> InvalidFilter:
    """Return the error for a queue that is not there."""
    return InvalidFilter(f"invalid filter: there is no queue {name[:_LONGEST]}", detail=f"position {position}")
