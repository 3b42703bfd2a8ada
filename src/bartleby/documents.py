"""Payloads as people look at them: every digit as it was sent, secrets hidden, and what differs between two of them.

What the database has as text is taken apart here, not by the decoder of messages: a number stays the digits that it
was, however many, and a document that Python cannot take apart is hidden whole rather than shown with its secrets.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bartleby.redaction import SECRET_NAME, Redactor

HIDDEN = "***"
_SHORTEST_CARD = 13
_TOO_DEEP = "***: nested too deeply to be shown without its secrets"


class Number(str):
    """A number of a document, as the digits that it was written with."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Redacted:
    """A document without its secrets, and the paths at which something was hidden."""

    text: str
    hidden: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs between two documents at one path; None: it is not there."""

    path: str
    before: str | None
    after: str | None


class Redaction:
    """Hides the values of secret names, wherever they stand, and what looks like a secret in texts and numbers.

    `names` are further names, such as "email", of which case and punctuation do not matter.
    """

    def __init__(self, names: Sequence[str] = (), patterns: Sequence[str] = ()) -> None:
        self._names = frozenset(_bare(name) for name in names)
        self._redactor = Redactor(patterns)
        self._shortest_number = 0 if patterns else _SHORTEST_CARD

    def secret(self, name: str) -> bool:
        """Return whether the value of this name is hidden."""
        return _bare(name) in self._names or SECRET_NAME.search(name) is not None

    def words(self, text: str) -> str:
        """Return a text without what looks like a secret in it."""
        return self._redactor.clean(text, len(text) + 1)

    def tells(self, number: str) -> bool:
        """Return whether the digits of a number look like a secret, as those of a card do."""
        return len(number) >= self._shortest_number and self.words(number) != number

    def _leaf(self, node: str) -> str:
        if isinstance(node, Number):
            return HIDDEN if self.tells(node) else node
        return self.words(node)

    def document(self, raw: str) -> Redacted:
        """Return a document without its secrets."""
        hidden: list[str] = []

        def clean(node: object, path: str) -> object:
            match node:
                case str():
                    cleaned = self._leaf(node)
                    if cleaned != node:
                        hidden.append(path)
                    return cleaned
                case list():
                    return [clean(each, f"{path}[{place}]") for place, each in enumerate(node)]
                case dict():
                    return {self.words(name): entry(name, each, path) for name, each in node.items()}
                case _:
                    return node

        def entry(name: str, node: object, path: str) -> object:
            place = _below(path, name)
            if self.secret(name) and node is not None and node != "":
                hidden.append(place)
                return HIDDEN
            return clean(node, place)

        try:
            return Redacted(written(clean(parsed(raw), "")), tuple(hidden))
        except (ValueError, RecursionError):
            return Redacted(json.dumps(_TOO_DEEP), ("",))


def parsed(raw: str) -> Any:  # noqa: ANN401 - a document is any JSON value
    """Return a document with its numbers as they were written; ValueError or RecursionError if that cannot be."""
    return json.loads(raw, parse_int=Number, parse_float=Number, parse_constant=Number)


def written(node: object, indent: int | None = None, line: str = "\n") -> str:
    """Return the text of a document, its numbers as they are; indented it has a line for each value."""
    inner = line + " " * (indent or 0)
    match node:
        case Number():
            return node
        case list() if node:
            return _bracketed("[]", [written(each, indent, inner) for each in node], indent, line)
        case dict() if node:
            pairs = [f"{_quoted(name)}: {written(each, indent, inner)}" for name, each in node.items()]
            return _bracketed("{}", pairs, indent, line)
        case _:
            return _quoted(node)


def differences(before: str | None, after: str | None) -> list[Difference]:
    """Return what differs between two documents; nothing if one is missing or cannot be taken apart."""
    if before is None or after is None:
        return []
    try:
        return list(_different(parsed(before), parsed(after), ""))
    except (ValueError, RecursionError):
        return []


def _bracketed(brackets: str, parts: Sequence[str], indent: int | None, line: str) -> str:
    if indent is None:
        return f"{brackets[0]}{', '.join(parts)}{brackets[1]}"
    inner = line + " " * indent
    return f"{brackets[0]}{inner}{f',{inner}'.join(parts)}{line}{brackets[1]}"


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _different(before: object, after: object, path: str) -> Iterator[Difference]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in [*before, *(each for each in after if each not in before)]:
            yield from _entry(before, after, name, _below(path, name))
    elif isinstance(before, list) and isinstance(after, list):
        ours, theirs = dict(enumerate(before)), dict(enumerate(after))
        for place in range(max(len(before), len(after))):
            yield from _entry(ours, theirs, place, f"{path}[{place}]")
    elif type(before) is not type(after) or before != after:
        yield Difference(path, written(before), written(after))


def _entry(before: dict[Any, Any], after: dict[Any, Any], name: object, path: str) -> Iterator[Difference]:
    if name not in after:
        yield Difference(path, written(before[name]), None)
    elif name not in before:
        yield Difference(path, None, written(after[name]))
    else:
        yield from _different(before[name], after[name], path)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _bare(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).lower()
