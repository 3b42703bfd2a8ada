"""The options of a sink, read with care: an option that nobody knows is a mistake, and a secret may stay outside."""

import difflib
import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from bartleby.errors import InvalidSettings

_ENVIRONMENT = "env:"
VARIABLES = "BARTLEBY_SINK_"
"""How every variable begins that "env:NAME" may name. Whoever may set up a sink says where the value is sent, and is
not meant to learn the other secrets of the machine that the relay runs on."""
Chosen = TypeVar("Chosen", bound=str)


class Options:
    """What was said about a sink of some kind. Every option is asked for once; `done` complains about the others."""

    def __init__(self, kind: str, given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> None:
        self.kind = kind
        self._given = dict(given)
        self._environment = environment
        self._known: list[str] = []

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text; "env:BARTLEBY_SINK_NAME" means the value of that variable."""
        value = self._take(name, default)
        return self._resolved(name, value, "expected a text")

    def optional(self, name: str) -> str | None:
        """Return a text, or None where it is not given."""
        self._known.append(name)
        return None if self._given.get(name) is None else self.text(name)

    def choice(self, name: str, among: Iterable[Chosen], default: Chosen) -> Chosen:
        """Return one of these words."""
        words = list(among)
        value = self._take(name, default)
        if value not in words:
            raise self.bad(name, f"expected {' or '.join(words)}")
        return words[words.index(value)]

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return true or false."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self.bad(name, "expected true or false")
        return value

    def number(self, name: str, default: float, *, least: float, most: float) -> float:
        """Return a number within bounds."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.bad(name, f"expected a number from {least:g} to {most:g}")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of texts, empty where it is not given; one text stands for a list of one."""
        value = self._take(name, [])
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list):
            raise self.bad(name, "expected a list of texts")
        return [self._resolved(name, each, "expected a list of texts") for each in texts]

    def mapping(self, name: str) -> dict[str, str]:
        """Return texts by their names, none where it is not given."""
        value = self._take(name, {})
        if not isinstance(value, dict):
            raise self.bad(name, "expected an object of texts")
        return {key: self._resolved(name, text, "expected an object of texts") for key, text in value.items()}

    def done(self) -> None:
        """Complain about options that nobody asked for."""
        if unknown := sorted(set(self._given) - set(self._known)):
            meant = f"{guess}; " if (guess := self._guess()) else ""
            raise InvalidSettings(
                f"unknown option {unknown[0]!r} of a {self.kind} sink",
                hint=f"{meant}known options: {', '.join(sorted(set(self._known)))}",
            )

    def bad(self, name: str, expected: str, hint: str | None = None) -> InvalidSettings:
        """Return the error for an option that cannot be used."""
        value = self._given.get(name)
        said = "is missing" if value is None else "cannot be used"  # the value itself may be a secret
        hint = self._guess() if value is None else hint
        return InvalidSettings(f"option {name!r} of a {self.kind} sink {said}: {expected}", hint=hint)

    def _guess(self) -> str | None:
        """Return what is meant by an option that nobody has asked for, if it is called like one that is not given."""
        absent = sorted(set(self._known) - set(self._given))
        for given in sorted(set(self._given) - set(self._known)):
            if alike := difflib.get_close_matches(given, absent, 1):
                return f"{given!r} is given: is {alike[0]!r} meant?"
        return None

    def _resolved(self, name: str, value: object, expected: str) -> str:
        if not isinstance(value, str) or not value:
            raise self.bad(name, expected)
        if (variable := _variable(self.kind, name, value)) is None:
            return value
        if not (found := self._environment.get(variable)):
            raise InvalidSettings(
                f"option {name!r} of a {self.kind} sink is in the environment variable {variable}, which is not set",
                hint="set it where the relay runs, and where `bartleby sinks test` does",
            )
        return found

    def _take(self, name: str, default: object) -> Any:  # noqa: ANN401 - whatever JSON holds
        self._known.append(name)
        value = self._given.get(name)
        return default if value is None else value


def variables(kind: str, given: Mapping[str, Any]) -> list[str]:
    """Return the environment variables that options are in, or raise InvalidSettings for one that may not be read."""
    texts = [(name, text) for name, value in given.items() for text in _parts(value) if isinstance(text, str)]
    found = [_variable(kind, name, text) for name, text in texts]
    return list(dict.fromkeys(each for each in found if each is not None))


def _variable(kind: str, option: str, text: str) -> str | None:
    if not text.startswith(_ENVIRONMENT):
        return None
    variable = text.removeprefix(_ENVIRONMENT)
    if not variable.startswith(VARIABLES):
        better = VARIABLES + (variable.removeprefix("BARTLEBY_").removeprefix("SINK_").upper() or "NAME")
        raise InvalidSettings(
            f"option {option!r} of a {kind} sink may not read the environment variable {variable!r}",
            hint=f"a sink may read only variables that begin with {VARIABLES}: name it {better},"
            f" and write {_ENVIRONMENT}{better}",
        )
    return variable


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else [value]
