"""Documents as people look at them: every digit, no secrets, and what differs."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bartleby.documents import HIDDEN, Difference, Number, Redaction, differences, parsed, written

NUMBERS = ["0", "-0", "1e400", "1E-400", "0.1000000000000000000000000001", "9" * 5000, "-1.50"]
TREES = st.recursive(
    st.none() | st.booleans() | st.text() | st.sampled_from(NUMBERS).map(Number),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_keeps_its_digits(number: str) -> None:
    assert written(parsed(f'{{"a": [{number}]}}')) == f'{{"a": [{number}]}}'
    assert Redaction().document(f"[{number}]").text == f"[{number}]"


@given(TREES)
def test_what_is_written_is_read_again(tree: object) -> None:
    for text in (written(tree), written(tree, 2)):
        assert written(parsed(text)) == written(tree)
        json.loads(text, parse_int=str, parse_float=str)


def test_a_document_is_indented_with_a_line_for_each_value() -> None:
    assert written(parsed('{"a": [1, {}], "b": []}'), 2) == '{\n  "a": [\n    1,\n    {}\n  ],\n  "b": []\n}'


class TestRedaction:
    @pytest.mark.parametrize(
        ("raw", "text", "hidden"),
        [
            ('{"password": "x"}', '{"password": "***"}', ["password"]),
            ('{"a": [{"api_key": 12}]}', '{"a": [{"api_key": "***"}]}', ["a[0].api_key"]),
            ('{"Authorization": {"a": 1}}', '{"Authorization": "***"}', ["Authorization"]),
            ('{"password": null, "token": ""}', '{"password": null, "token": ""}', []),
            ('{"note": "password=x y"}', '{"note": "password=*** y"}', ["note"]),
            ('["Bearer abcdef123456"]', '["Bearer ***"]', ["[0]"]),
            ('"postgresql://ana:x@host/db"', '"postgresql://ana:***@host/db"', [""]),
            ('{"n": [4111111111111111]}', '{"n": ["***"]}', ["n[0]"]),
            ('{"n": -5500005555555559}', '{"n": "***"}', ["n"]),
            ("[4111111111111112, 4111111111111111.0]", "[4111111111111112, 4111111111111111.0]", []),
            ('{"n": 1, "t": true, "v": null}', '{"n": 1, "t": true, "v": null}', []),
        ],
    )
    def test_secrets_are_hidden_where_they_stand(self, raw: str, text: str, hidden: list[str]) -> None:
        found = Redaction().document(raw)
        assert (found.text, list(found.hidden)) == (text, hidden)

    def test_a_name_that_has_a_secret_in_it_does_not_tell_it(self) -> None:
        assert "swordfish" not in Redaction().document('{"password=swordfish": 1}').text

    def test_further_names_are_hidden_whatever_their_case_and_punctuation(self) -> None:
        redaction = Redaction(["e-mail", "Home Address"])
        found = redaction.document('{"EMail": "a@b", "home_address": [1], "emails": "c"}')
        assert found.text == '{"EMail": "***", "home_address": "***", "emails": "c"}'

    def test_further_patterns_are_hidden_inside_of_texts(self) -> None:
        assert Redaction(patterns=[r"cust-\d+"]).document('["of cust-17"]').text == '["of ***"]'
        assert Redaction(patterns=[r"^77\d+$"]).document("[7712, 12]").text == '["***", 12]'

    @pytest.mark.parametrize("raw", ["[" * 100_000 + "]" * 100_000, "{", ""])
    def test_what_cannot_be_taken_apart_is_hidden_whole(self, raw: str) -> None:
        found = Redaction().document(raw)
        assert json.loads(found.text).startswith(HIDDEN)
        assert found.hidden == ("",)

    @given(TREES)
    def test_no_value_of_a_secret_name_stays(self, tree: object) -> None:
        raw = written({"x": tree, "password": {"deep": tree}, "list": [{"token": "swordfish"}]})
        found = Redaction().document(raw)
        assert "swordfish" not in found.text
        assert json.loads(found.text, parse_int=str, parse_float=str)["password"] == HIDDEN


class TestDifferences:
    @pytest.mark.parametrize(
        ("before", "after", "found"),
        [
            ('{"a": 1}', '{"a": 1}', []),
            ('{"a": 1}', '{"a": 1.0}', [Difference("a", "1", "1.0")]),
            ('{"a": 1}', '{"a": "1"}', [Difference("a", "1", '"1"')]),
            ('{"a": 1}', '{"b": 1}', [Difference("a", "1", None), Difference("b", None, "1")]),
            ('{"a": [1, 2]}', '{"a": [1]}', [Difference("a[1]", "2", None)]),
            ("[1]", '{"a": 1}', [Difference("", "[1]", '{"a": 1}')]),
            ('{"a": {"b": null}}', '{"a": {"b": false}}', [Difference("a.b", "null", "false")]),
        ],
    )
    def test_each_place_that_differs_is_told(self, before: str, after: str, found: list[Difference]) -> None:
        assert differences(before, after) == found

    def test_what_is_missing_or_cannot_be_taken_apart_differs_in_nothing(self) -> None:
        assert differences(None, "1") == differences("1", None) == differences("{", "1") == []
