"""The page of decisions matches the marks on the tests."""

import tomllib

import pytest

from tools import seeds


def test_page_is_up_to_date_and_lists_every_decision() -> None:
    designs = tomllib.loads(seeds.DECISIONS.read_text())
    found = seeds.proofs(seeds.TESTS)
    assert seeds.PAGE.read_text() == seeds.page(designs, found), "run: python tools/seeds.py"
    assert sum(len(design["decision"]) for design in designs.values()) == 289
    with pytest.raises(seeds.Unwritable, match="marks without a decision: pgmq-0"):
        seeds.page(designs, {**found, "pgmq-0": found["pgmq-1"]})
    with pytest.raises(seeds.Unwritable, match="decisions without a test: pgmq-1"):
        seeds.page(designs, {seed: proofs for seed, proofs in found.items() if seed != "pgmq-1"})
