"""Nouns as JSON and CSV: every digit, nothing that steers a terminal, no formula."""

import csv
import io
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from bartleby.evidence import AuditLine
from bartleby.surfaces import shapes


@dataclass(frozen=True, slots=True)
class Noun:
    name: str
    raw: str | None = field(repr=False)
    raw_headers: str | None
    raw_history: str
    at: datetime
    wait: timedelta


AT = datetime(2026, 11, 14, 3, 0, tzinfo=UTC)


def noun(raw: str | None, name: str = "x") -> Noun:
    return Noun(name, raw, None, "[]", AT, timedelta(seconds=1.5))


def test_a_noun_has_the_names_of_its_documents() -> None:
    assert json.loads(shapes.text(noun('{"a": 1}'))) == {
        "name": "x", "payload": {"a": 1}, "headers": None, "failure_history": [], "at": "2026-11-14T03:00:00+00:00",
        "wait": 1.5,
    }  # fmt: skip


@pytest.mark.parametrize("number", ["1e400", "9" * 5000, "0.10000000000000000000001", "-0.0"])
def test_a_document_is_written_as_it_is(number: str) -> None:
    assert f'"payload": {number},' in shapes.text([noun(number), noun("2")])
    assert f'"payload": {number},' in shapes.text({"deep": [noun(number)]}, indent=2)


def test_a_text_that_looks_like_a_place_is_a_text() -> None:
    assert json.loads(shapes.text(noun("1", name="\\u00000")))["name"] == "\\u00000"


@pytest.mark.parametrize("hostile", ["\x1b[2J", "\x9b2J", "\u202eevil", "\u2028", "\x7f", "\U000e0001", "\r\n"])
def test_nothing_steers_a_terminal_and_nothing_is_lost(hostile: str) -> None:
    document = json.dumps({"a": hostile}, ensure_ascii=False)
    for indent in (None, 2):
        made = shapes.text(noun(document, name=hostile), indent)
        assert made.replace("\n", "").isprintable()
        assert (json.loads(made)["name"], json.loads(made)["payload"]) == (hostile, {"a": hostile})


def test_what_no_json_can_hold_is_a_text() -> None:
    line = AuditLine(
        1, AT, "ana", "postgres", "group.split", {"n": float("inf")}, None, None, None, [float("-inf")], "0"
    )
    told = json.loads(shapes.text({"line": line, "noun": noun("1e400")}), parse_float=str)
    assert (told["line"]["subject"], told["line"]["after"], told["noun"]["payload"]) == (
        {"n": "inf"},
        ["-inf"],
        "1e400",
    )


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "\tx", "\rx", "＝1", "－1"])  # noqa: RUF001 - meant
def test_no_cell_is_a_formula(text: str) -> None:
    cell = shapes._cell(text)
    assert cell.startswith("'")
    assert shapes._cell(-1) == "-1"
    (row,) = csv.reader(io.StringIO(shapes.csv_line([cell, "b"]), newline=""))
    assert row == [cell, "b"]
