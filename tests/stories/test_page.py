"""The page of decisions is what the marks on the tests say."""

import tomllib
from pathlib import Path

import pytest

from tools import seeds

DESIGN = {"title": "T", "about": "A.", "decision": [{"id": "a-1", "text": "one | two", "here": "so"}]}


def test_page_is_up_to_date_and_lists_every_decision() -> None:
    designs = tomllib.loads(seeds.DECISIONS.read_text())
    assert seeds.PAGE.read_text() == seeds.page(designs, seeds.proofs(seeds.TESTS)), "run: python tools/seeds.py"
    assert sum(len(design["decision"]) for design in designs.values()) == 289


def test_decision_without_a_test_and_mark_without_a_decision_are_refused() -> None:
    proof = seeds.Proof(seeds.PAGE, "test_it")
    with pytest.raises(seeds.Unwritable, match="decisions without a test: a-1"):
        seeds.page({"a": DESIGN}, {})
    with pytest.raises(seeds.Unwritable, match="marks without a decision: a-2"):
        seeds.page({"a": DESIGN}, {"a-1": [proof], "a-2": [proof]})
    assert r"| one \| two | so | [test_it](" in seeds.page({"a": DESIGN}, {"a-1": [proof]})


def test_marks_of_methods_and_of_several_decisions_are_found(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text('class T:\n    @pytest.mark.seed("a-1", "a-2")\n    def test_it(self): ...\n')
    assert {seed: found[0].test for seed, found in seeds.proofs(tmp_path).items()} == {
        "a-1": "test_it",
        "a-2": "test_it",
    }
