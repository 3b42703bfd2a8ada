"""The exception tree is what its docstring draws, and every SQLSTATE of the SQL core has a class in it."""

import re
from importlib.resources import files

import psycopg
import pytest

import bartleby
from bartleby import dev, errors
from bartleby.errors import (
    BY_SQLSTATE,
    BartlebyError,
    InvalidArgument,
    InvalidFilter,
    LeaseLost,
    NotInstalled,
    translated,
)

SQL = "\n".join(entry.read_text() for entry in (files("bartleby") / "sql").iterdir() if entry.name.endswith(".sql"))
LINE = re.compile(r"^(?P<bars>[│ ]*)[├└]── (?P<name>\w+)\s*(?P<code>ZB\d{3})?", re.MULTILINE)


def drawn() -> dict[str, tuple[str, str | None]]:
    """Class → its base and its SQLSTATE, as the docstring of errors draws them."""
    path = ["BartlebyError"]
    found = {}
    for line in LINE.finditer(errors.__doc__ or ""):
        depth = len(line["bars"]) // 4 + 1
        path[depth:] = [line["name"]]
        found[line["name"]] = path[depth - 1], line["code"]
    return found


def every_class(root: type[BartlebyError] = BartlebyError) -> set[type[BartlebyError]]:
    found = {each for child in root.__subclasses__() for each in (child, *every_class(child))}
    # a surface may say more to its own users
    return {each for each in found if not each.__module__.startswith("bartleby.surfaces")}


def named(name: str) -> type[BartlebyError]:
    found: type[BartlebyError] = getattr(errors, name, None) or getattr(dev, name)
    assert issubclass(found, BartlebyError)
    return found


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert {kind.__name__ for kind in every_class()} == set(drawn())
    for name, (parent, _) in drawn().items():
        assert named(parent) in named(name).__bases__, name


def test_the_codes_in_the_docstring_are_the_codes() -> None:
    assert {code: named(name) for name, (_, code) in drawn().items() if code} == BY_SQLSTATE


def test_every_code_of_the_sql_core_has_a_class_and_every_class_with_a_code_is_raised() -> None:
    assert set(re.findall(r"errcode = '(ZB\w+)'", SQL)) == set(BY_SQLSTATE)
    assert not re.findall(r"errcode = '(?!ZB\d{3}')", SQL)


def test_every_error_has_a_sentence_and_those_of_the_sql_core_are_public() -> None:
    assert all(kind.__doc__ for kind in every_class())
    assert {kind.__name__ for kind in BY_SQLSTATE.values()} <= set(bartleby.__all__)


def failed(kind: type[psycopg.Error], sqlstate: str | None = None) -> psycopg.Error:
    error = kind("it says bartleby")
    error.sqlstate = sqlstate
    return error


@pytest.mark.parametrize(("code", "kind"), BY_SQLSTATE.items())
def test_a_code_becomes_its_class_with_the_cause_kept(code: str, kind: type[BartlebyError]) -> None:
    with pytest.raises(kind) as caught, translated():
        raise failed(psycopg.DatabaseError, code)
    assert type(caught.value) is kind
    assert isinstance(caught.value.__cause__, psycopg.DatabaseError)


@pytest.mark.parametrize(
    "error", [psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedFunction, psycopg.errors.UndefinedTable]
)
def test_a_missing_schema_is_recognised_and_the_remedy_is_named(error: type[psycopg.Error]) -> None:
    with pytest.raises(NotInstalled) as caught, translated():
        raise error('"bartleby.queues" does not exist')
    assert caught.value.hint == "run: bartleby install"


@pytest.mark.parametrize("error", [psycopg.errors.NumericValueOutOfRange, psycopg.errors.InvalidTextRepresentation])
def test_bad_input_is_an_invalid_argument(error: type[psycopg.Error]) -> None:
    with pytest.raises(InvalidArgument, match="too much"), translated():
        raise error("too much")


@pytest.mark.parametrize(
    "error", [psycopg.OperationalError, psycopg.errors.InsufficientPrivilege, psycopg.errors.SerializationFailure]
)
def test_what_is_not_ours_stays_what_it_is(error: type[psycopg.Error]) -> None:
    with pytest.raises(error) as caught, translated():
        raise error("something else about bartleby")
    assert not isinstance(caught.value, BartlebyError)


@pytest.mark.parametrize(
    ("detail", "ids"), [(None, ()), ("", ()), ("5", (5,)), ("5,8796093022209", (5, 8796093022209)), ("null", ())]
)
def test_a_lost_lease_says_which(detail: str | None, ids: tuple[int, ...]) -> None:
    assert LeaseLost("lease lost", detail=detail).lease_ids == ids


@pytest.mark.parametrize(
    ("detail", "position"), [(None, None), ("", None), ("position 1", 1), ("position 17", 17), ("position x", None)]
)
def test_a_bad_filter_says_where(detail: str | None, position: int | None) -> None:
    assert InvalidFilter("unknown field", detail=detail).position == position


@pytest.mark.parametrize(
    ("filter", "position", "shown"),
    [
        ("que:x", 1, "que:x\n^"),
        ("queue:a age:>x", 14, "queue:a age:>x\n             ^"),
        ('"open', 6, '"open\n     ^'),
        ("a\tb\nc:d", 5, "a b c:d\n    ^"),
        ("\u65e5\u672c x:", 4, "\u65e5\u672c x:\n     ^"),
        ("e\u0301 x:", 4, "e\u0301 x:\n  ^"),
        ("\x1b[2J x:1", 6, " [2J x:1\n     ^"),
        ("", 1, "\n^"),
        ("x:1", None, "x:1"),
    ],
)
def test_a_bad_filter_is_shown_with_a_caret_under_the_place(filter: str, position: int | None, shown: str) -> None:
    detail = None if position is None else f"position {position}"
    assert InvalidFilter("bad", detail=detail).pointed(filter) == shown
