"""The mutants that `make nightly` runs keep up with the code: each names code and a test that exist."""

import re

from tests.nightly.mutation.mutant import Mutant
from tests.nightly.mutation.test_mutants import ROOT, mutants

IMPORT = re.compile(r"^from (tests\.[\w.]+\.test_\w+) import", re.MULTILINE)


def test_every_mutant_changes_code_and_names_a_test_that_exist() -> None:
    stale = [name for name, mutant in mutants() if not _has_test(mutant.killed_by) or not _has_code(mutant)]
    assert stale == [], "correct `file`, `old` or `killed_by` of these mutants"


def _has_code(mutant: Mutant) -> bool:
    return (ROOT / "src" / "bartleby" / mutant.file).read_text().count(mutant.old) == 1


def _has_test(test: str) -> bool:
    file, *names = test.partition("[")[0].split("::")
    if not (ROOT / file).is_file():
        return False
    text = (ROOT / file).read_text()
    # a class may inherit its tests
    text += "".join((ROOT / f"{name.replace('.', '/')}.py").read_text() for name in IMPORT.findall(text))
    return all(re.search(rf"(class|def) {name}\b", text) for name in names)
