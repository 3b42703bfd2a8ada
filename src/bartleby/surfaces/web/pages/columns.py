"""Columns of the list of letters that somebody has chosen: facts of a letter, or a value of what it carries."""

from collections.abc import Callable, Mapping, Sequence

from bartleby.documents import HIDDEN, parsed, written
from bartleby.evidence import DeadLetter
from bartleby.surfaces.web.pages.showing import utc
from bartleby.surfaces.web.pages.words import paths_in
from bartleby.surfaces.words import line

FACTS: dict[str, tuple[str, Callable[[DeadLetter], object]]] = {
    "reason": ("Why it died", lambda each: each.reason),
    "version": ("Version", lambda each: each.worker_version),
    "worker": ("Worker", lambda each: each.worker),
    "sent": ("Sent", lambda each: utc(each.created_at)),
    "group": ("Group", lambda each: each.group_id),
}
_MOST = 8
_OFFERED = 24
_LONGEST = 60
_SAMPLE, _LARGE = 10, 20_000


def chosen(names: Sequence[str]) -> list[str]:
    """Return the columns that there are of those that are asked for."""
    known = (each for each in dict.fromkeys(names) if each in FACTS or each.startswith(("payload.", "headers.")))
    return [each for each in known if len(each) <= _LONGEST * 2][:_MOST]


def offered(letters: Sequence[DeadLetter], columns: Sequence[str]) -> list[str]:
    """Return the columns that can be chosen: facts, and the paths that these letters have."""
    some = [each for each in letters if len(each.raw or "") < _LARGE][:_SAMPLE]
    paths = paths_in([each.raw for each in some]) + paths_in([each.raw_headers for each in some], "headers")
    return list(dict.fromkeys([*FACTS, *columns, *paths]))[:_OFFERED]


def cells(letter: DeadLetter, columns: Sequence[str]) -> list[str]:
    """Return what a letter has in each column."""
    roots = {"payload": letter.raw, "headers": letter.raw_headers}
    known = {
        name: _document(raw) for name, raw in roots.items() if any(each.startswith(f"{name}.") for each in columns)
    }
    return [_fact(letter, each) if each in FACTS else _value(known, each) for each in columns]


def _fact(letter: DeadLetter, column: str) -> str:
    value = FACTS[column][1](letter)
    return "" if value is None else str(value)


def _document(raw: str | None) -> object:
    try:
        return parsed(raw or "null")
    except (ValueError, RecursionError):
        return None


def _value(documents: Mapping[str, object], column: str) -> str:
    root, *names = column.split(".")
    node = documents[root]
    for name in names:
        node = node.get(name) if isinstance(node, dict) else None
    if node is None:
        return ""
    return "hidden" if node == HIDDEN else line(node if type(node) is str else written(node), _LONGEST)
