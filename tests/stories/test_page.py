"""The page of decisions is what the tests say."""

import ast

import pytest

from tools import seeds


def test_the_page_is_up_to_date() -> None:
    assert seeds.PAGE.read_text() == seeds.page(), "run: python tools/seeds.py"


def test_every_test_is_on_the_page_once() -> None:
    text = seeds.PAGE.read_text()
    files = sorted(seeds.TESTS.glob("test_*.py"))
    names = [each.name for file in files for each in seeds.tests(ast.parse(file.read_text()))]
    assert len(names) > 150
    assert [each for each in names if text.count(f"`{each}`") != 1] == []


@pytest.mark.parametrize(
    "docstring",
    ["", '"""One.\n\n    Two.\n    """', '"""One.\n\n    Here: two.\n\n    Here: three.\n    """'],
)
def test_a_test_that_does_not_say_its_decision_is_refused(docstring: str) -> None:
    module = ast.parse(f"def test_it():\n    {docstring or 'pass'}\n")
    [test] = seeds.tests(module)
    with pytest.raises(seeds.Unwritable, match="test_it needs a docstring"):
        seeds.Decision.of(test, seeds.PAGE)


def test_a_bar_does_not_end_a_cell() -> None:
    module = ast.parse('def test_it():\n    """a | b.\n\n    Here: c.\n    """\n')
    [test] = seeds.tests(module)
    assert str(seeds.Decision.of(test, seeds.PAGE)) == r"| a \| b. | c. | `test_it` |"


def test_what_is_expected_to_fail_is_shown_as_missing() -> None:
    module = ast.parse('@pytest.mark.xfail(reason="a gap", strict=True)\ndef test_it():\n    """a."""\n')
    [test] = seeds.tests(module)
    assert str(seeds.Decision.of(test, seeds.PAGE)) == "| a. | **Not yet:** a gap. | `test_it` |"
