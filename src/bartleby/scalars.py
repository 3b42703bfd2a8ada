"""Single values of a payload: each converter takes a decoded JSON value and returns it typed, or raises Misfit."""

import re
from collections.abc import Callable, Iterable
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from typing import Any, Never
from uuid import UUID

Convert = Callable[[Any], Any]

_LONGEST_SHOWN = 60
_MANY = 10
_NUMBER = re.compile(r"[-+]?\d{1,400}(?:\.\d{1,400})?(?:[eE][-+]?\d{1,4})?", re.ASCII)
_UUID = re.compile(r"[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}")


class Misfit(Exception):
    """A value is not what was expected; its path grows on the way out."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.steps: list[str] = []

    @property
    def path(self) -> str:
        """Where the value is, from the outside."""
        return "".join(reversed(self.steps))

    def inside(self, step: int | str) -> "Misfit":
        """Return this error as seen from the container."""
        if isinstance(step, str) and step.isidentifier() and len(step) <= _LONGEST_SHOWN:
            self.steps.append(f".{step}")
        else:
            self.steps.append(f"[{shown(step)}]")
        return self


def misfit(expected: str, value: object) -> Never:
    """Raise the error of a value that is not what was expected."""
    raise Misfit(f"expected {expected}, not {shown(value)}")


def shown(value: object) -> str:
    """Return a JSON value for an error message: short, and without what is in it if it is a container."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, str):
        return repr(value if len(value) <= _LONGEST_SHOWN else value[:_LONGEST_SHOWN] + "…")
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a very large number"
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"


def one_of(choices: Iterable[Any], meaning: Callable[[Any], Any] = lambda choice: choice) -> Convert:
    """Return a converter for one of these values, of which 1 is not true."""
    known = {(type(meaning(choice)), meaning(choice)): choice for choice in choices}
    names = [shown(value) for _, value in known]
    listed = ", ".join(names[:_MANY]) + (", …" if len(names) > _MANY else "")

    def convert(value: Any) -> Any:  # noqa: ANN401 - any JSON value
        try:
            return known[type(value), value]
        except (KeyError, TypeError):  # a list or an object is no key
            misfit(f"one of {listed}" if len(names) > 1 else listed, value)

    return convert


def enum(kind: type[Enum]) -> Convert:
    """Return a converter for the values of an enum."""
    return one_of(kind, lambda member: member.value)


def _anything(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    return value


def _null(value: Any) -> None:  # noqa: ANN401 - any JSON value
    if value is not None:
        misfit("null", value)


def _exactly(kind: type, name: str) -> Convert:
    def convert(value: Any) -> Any:  # noqa: ANN401 - any JSON value
        if type(value) is not kind:
            misfit(name, value)
        return value

    return convert


def _float(value: Any) -> float:  # noqa: ANN401 - any JSON value
    if type(value) is float:
        return value
    if type(value) is not int:
        misfit("float", value)
    try:
        return float(value)
    except OverflowError:
        misfit("float", value)


def _decimal(value: Any) -> Decimal:  # noqa: ANN401 - any JSON value
    # The shortest text of a float is what stood in the JSON.
    text = repr(value) if type(value) in {int, float} else value
    if type(text) is not str or not _NUMBER.fullmatch(text):
        misfit("Decimal", value)
    return Decimal(text)


def _read(kind: type, read: Callable[[str], Any]) -> Convert:
    def convert(value: Any) -> Any:  # noqa: ANN401 - any JSON value
        if type(value) is str:
            try:
                return read(value)
            except ValueError:
                pass
        misfit(kind.__name__, value)

    return convert


def _uuid(text: str) -> UUID:
    if not _UUID.fullmatch(text):
        raise ValueError(text)
    return UUID(text)


SCALARS: dict[Any, Convert] = {
    Any: _anything,
    object: _anything,
    None: _null,
    type(None): _null,
    str: _exactly(str, "str"),
    int: _exactly(int, "int"),
    bool: _exactly(bool, "bool"),
    float: _float,
    Decimal: _decimal,
    UUID: _read(UUID, _uuid),
    datetime: _read(datetime, datetime.fromisoformat),
    date: _read(date, date.fromisoformat),
    time: _read(time, time.fromisoformat),
}
"""The types of single values; an exact match, never a subclass."""
