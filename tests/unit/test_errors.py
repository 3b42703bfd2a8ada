"""Errors: the class tree is what the docstring shows, and every SQLSTATE of the SQL core has a class."""

import re
from importlib.resources import files

import psycopg
import pytest
from psycopg import errors as pg

import bartleby
from bartleby import dev, errors  # noqa: F401 - dev has classes of its own
from bartleby.errors import BY_SQLSTATE, BartlebyError, InvalidArgument, InvalidFilter, LeaseLost, NotInstalled

SQL = "\n".join(entry.read_text() for entry in (files("bartleby") / "sql").iterdir() if entry.name.endswith(".sql"))
LINE = re.compile(r"^(?P<bars>[│ ]*)[├└]── (?P<name>\w+)\s*(?P<code>ZB\d{3})?", re.MULTILINE)


def drawn() -> dict[str, tuple[str, str | None]]:
    """Return each class with its base and SQLSTATE as the docstring of errors shows them."""
    path = ["BartlebyError"]
    found = {}
    for line in LINE.finditer(errors.__doc__ or ""):
        depth = len(line["bars"]) // 4 + 1
        path[depth:] = [line["name"]]
        found[line["name"]] = path[depth - 1], line["code"]
    return found


def every_class(root: type[BartlebyError] = BartlebyError) -> set[type[BartlebyError]]:
    found = {each for child in root.__subclasses__() for each in (child, *every_class(child))}
    # surfaces have errors of their own, which are not public
    return {each for each in found if not each.__module__.startswith("bartleby.surfaces")}


def test_docstring_shows_the_classes_with_their_bases_and_the_codes_of_the_sql_core() -> None:
    named = {kind.__name__: kind for kind in every_class()}
    assert named.keys() == drawn().keys()
    bases = {name: [base.__name__ for base in kind.__bases__] for name, kind in named.items()}
    assert [name for name, (parent, _) in drawn().items() if parent not in bases[name]] == []
    assert {code: named[name] for name, (_, code) in drawn().items() if code} == BY_SQLSTATE
    assert set(re.findall(r"errcode = '(ZB\w+)'", SQL)) == set(BY_SQLSTATE)
    assert not re.findall(r"errcode = '(?!ZB\d{3}')", SQL)
    assert [kind for kind in every_class() if not kind.__doc__] == []
    assert {kind.__name__ for kind in BY_SQLSTATE.values()} - set(bartleby.__all__) == set()


def failed(kind: type[psycopg.Error], sqlstate: str | None = None) -> psycopg.Error:
    error = kind('"bartleby.queues" does not exist')
    error.sqlstate = sqlstate or error.sqlstate
    return error


def test_database_errors_are_translated_or_raised_unchanged() -> None:
    rows: list[tuple[psycopg.Error, type[Exception]]] = [
        *((failed(psycopg.DatabaseError, code), kind) for code, kind in BY_SQLSTATE.items()),
        *((failed(kind), NotInstalled) for kind in (pg.InvalidSchemaName, pg.UndefinedFunction, pg.UndefinedTable)),
        *((failed(kind), InvalidArgument) for kind in (pg.NumericValueOutOfRange, pg.InvalidTextRepresentation)),
        *((failed(kind), kind) for kind in (psycopg.OperationalError, pg.InsufficientPrivilege)),
    ]
    for error, kind in rows:
        with pytest.raises(Exception, match="bartleby") as caught, errors.translated():
            raise error
        assert type(caught.value) is kind, error.sqlstate
        if isinstance(caught.value, BartlebyError):
            assert caught.value.__cause__ is error, error.sqlstate
        if isinstance(caught.value, NotInstalled):
            assert caught.value.hint == "run: bartleby install", error.sqlstate


def test_bad_filter_has_its_position_and_a_lost_lease_its_id() -> None:
    rows: list[tuple[str, int | None, str]] = [
        ("queue:a age:>x", 14, "queue:a age:>x\n             ^"),
        ('"open', 6, '"open\n     ^'),
        ("a\tb\nc:d", 5, "a b c:d\n    ^"),
        ("\u65e5\u672c x:", 4, "\u65e5\u672c x:\n     ^"),
        ("e\u0301 x:", 4, "e\u0301 x:\n  ^"),
        ("\x1b[2J x:1", 6, " [2J x:1\n     ^"),
        ("", 1, "\n^"),
        ("x:1", None, "x:1"),
    ]
    for filter, position, shown in rows:
        error = InvalidFilter("bad", detail="" if position is None else f"position {position}")
        assert (error.position, error.pointed(filter)) == (position, shown), filter
    assert InvalidFilter("bad").position is InvalidFilter("bad", detail="position x").position is None
    for detail, ids in ((None, ()), ("", ()), ("5", (5,)), ("5,8796093022209", (5, 8796093022209)), ("null", ())):
        assert LeaseLost("lease lost", detail=detail).lease_ids == ids, detail
