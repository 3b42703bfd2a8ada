"""JSON and CSV shown to people: every digit kept, secrets hidden, no terminal escapes, no formulas, differences."""

import csv
import io
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from bartleby.documents import HIDDEN, Difference, Number, Redaction, differences, parsed, written
from bartleby.evidence import AuditLine
from bartleby.surfaces import shapes
from bartleby.surfaces.desk.hiding import filter_text, secret_in_filter, secret_in_patch

NUMBERS = ["0", "-0", "1e400", "1E-400", "0.1000000000000000000000000001", "9" * 5000, "-1.50"]
TREES = st.recursive(
    st.none() | st.booleans() | st.text() | st.sampled_from(NUMBERS).map(Number),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
SECRET_NAMES = (
    "password", "passwd", "Passphrase", "api_key", "apiKey", "x-api-key", "token", "access_token", "refreshToken",
    "client_secret", "credentials", "private_key", "Authorization", "Cookie", "set-cookie", "jwt", "auth", "pin", "ssn",
    "iban", "card_number", "cvv", "cvc",
)  # fmt: skip
AT = datetime(2026, 11, 14, 3, 0, tzinfo=UTC)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(TREES)
def test_written_documents_are_read_again_and_hide_secrets(tree: object) -> None:
    for text in (written(tree), written(tree, 2)):
        assert written(parsed(text)) == written(tree)
        json.loads(text, parse_int=str, parse_float=str)
    raw = written({"x": tree, "password": {"deep": tree}, "list": [{"token": "swordfish"}]})
    found = Redaction().document(raw)
    assert "swordfish" not in found.text
    assert json.loads(found.text, parse_int=str, parse_float=str)["password"] == HIDDEN


def test_secrets_are_hidden_and_their_paths_listed() -> None:
    assert [name for name in SECRET_NAMES if HIDDEN not in Redaction().document(json.dumps({name: "x"})).text] == []
    for raw, text, hidden in (
        ('{"a": [{"api_key": 12}]}', '{"a": [{"api_key": "***"}]}', ["a[0].api_key"]),
        ('{"Authorization": {"a": 1}}', '{"Authorization": "***"}', ["Authorization"]),
        ('{"password": null, "token": ""}', '{"password": null, "token": ""}', []),
        ('{"note": "password=x y"}', '{"note": "password=*** y"}', ["note"]),
        ('["Bearer abcdef123456"]', '["Bearer ***"]', ["[0]"]),
        ('"postgresql://ana:x@host/db"', '"postgresql://ana:***@host/db"', [""]),
        ('{"n": [4111111111111111]}', '{"n": ["***"]}', ["n[0]"]),
        ('{"n": -5500005555555559}', '{"n": "***"}', ["n"]),
        ("[4111111111111112, 4111111111111111.0]", "[4111111111111112, 4111111111111111.0]", []),
    ):
        found = Redaction().document(raw)
        assert (found.text, list(found.hidden)) == (text, hidden), raw
    assert "swordfish" not in Redaction().document('{"password=swordfish": 1}').text
    found = Redaction(["e-mail", "Home Address"]).document('{"EMail": "a@b", "home_address": [1], "emails": "c"}')
    assert found.text == '{"EMail": "***", "home_address": "***", "emails": "c"}'
    assert Redaction(patterns=[r"cust-\d+"]).document('["of cust-17"]').text == '["of ***"]'
    assert Redaction(patterns=[r"^77\d+$"]).document("[7712, 12]").text == '["***", 12]'
    for number in NUMBERS:
        assert Redaction().document(f"[{number}]").text == f"[{number}]"
    for raw in ("[" * 100_000 + "]" * 100_000, "{", ""):
        unreadable = Redaction().document(raw)
        assert json.loads(unreadable.text).startswith(HIDDEN)
        assert unreadable.hidden == ("",)


def test_filter_or_patch_that_would_show_a_secret_is_recognised() -> None:
    redaction = Redaction(["home address"])
    for filter, name in (
        ("PAYLOAD.a.password:>1", "password"), ('payload."pass\\word":x', "password"),
        ('payload."home.address":x', "home.address"), ('headers."home\\"address":x', 'home"address'),
        ("payload.name:x type:password", None),
    ):  # fmt: skip
        assert secret_in_filter(redaction, filter) == name, filter
        assert filter_text(redaction, filter) == (HIDDEN if name else filter), filter
    for operation, name in (
        ({"op": "copy", "from": "/password", "path": "/x"}, "password"),
        ({"op": "move", "from": "/a/home~1address", "path": "/x"}, "home/address"),
        ({"op": "test", "path": "/password", "value": "x"}, "password"),
        ({"op": "test", "path": "/a", "value": {"password": "x"}}, "/a"),
        ({"op": "replace", "path": "/password", "value": "x"}, None),
    ):
        assert secret_in_patch(redaction, json.dumps([operation])) == name, operation


def test_differences_name_each_path_with_both_values() -> None:
    for before, after, found in (
        ('{"a": 1}', '{"a": 1}', []),
        ('{"a": 1}', '{"a": 1.0}', [Difference("a", "1", "1.0")]),
        ('{"a": 1}', '{"a": "1"}', [Difference("a", "1", '"1"')]),
        ('{"a": 1}', '{"b": 1}', [Difference("a", "1", None), Difference("b", None, "1")]),
        ('{"a": [1, 2]}', '{"a": [1]}', [Difference("a[1]", "2", None)]),
        ("[1]", '{"a": 1}', [Difference("", "[1]", '{"a": 1}')]),
        ('{"a": {"b": null}}', '{"a": {"b": false}}', [Difference("a.b", "null", "false")]),
        (None, "1", []), ("1", None, []), ("{", "1", []),
    ):  # fmt: skip
        assert differences(before, after) == found, (before, after)


@dataclass(frozen=True, slots=True)
class Record:
    raw: str | None = field(repr=False)
    name: str = "x"
    raw_headers: str | None = None
    raw_history: str = "[]"
    at: datetime = AT
    wait: timedelta = timedelta(seconds=1.5)


def test_record_as_json_has_public_names_and_documents_as_they_are() -> None:
    assert json.loads(shapes.text(Record('{"a": 1}'))) == {
        "name": "x", "payload": {"a": 1}, "headers": None, "failure_history": [], "at": "2026-11-14T03:00:00+00:00",
        "wait": 1.5,
    }  # fmt: skip
    for number in NUMBERS:
        assert f'"payload": {number},' in shapes.text([Record(number), Record("2")])
        assert f'"payload": {number},' in shapes.text({"deep": [Record(number)]}, indent=2)
    assert json.loads(shapes.text(Record("1", name="\\u00000")))["name"] == "\\u00000", "it looks like a placeholder"
    line = AuditLine(1, AT, "a", "b", "c", {"n": float("inf")}, None, None, None, [float("-inf")], "0")
    infinite = json.loads(shapes.text(line))
    assert (infinite["subject"], infinite["after"]) == ({"n": "inf"}, ["-inf"])


def test_json_contains_no_terminal_escapes_and_loses_nothing() -> None:
    for hostile in ("\x1b[2J", "\x9b2J", "\u202eevil", "\u2028", "\x7f", "\U000e0001", "\r\n"):
        document = json.dumps({"a": hostile}, ensure_ascii=False)
        for indent in (None, 2):
            made = shapes.text(Record(document, name=hostile), indent)
            assert made.replace("\n", "").isprintable(), ascii(hostile)
            assert (json.loads(made)["name"], json.loads(made)["payload"]) == (hostile, {"a": hostile})


def test_csv_cell_is_never_a_formula() -> None:
    for text in ("=1+1", "+1", "-1", "@x", "\tx", "\rx", "＝1", "－1"):  # noqa: RUF001 - spreadsheets take these too
        cell = shapes._cell(text)
        assert cell.startswith("'"), text
        (row,) = csv.reader(io.StringIO(shapes.csv_line([cell, "b"]), newline=""))
        assert row == [cell, "b"]
    assert shapes._cell(-1) == "-1"
