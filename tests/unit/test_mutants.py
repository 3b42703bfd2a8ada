"""The mutants that `make nightly` runs keep up with the code: each names code and a test that exist."""

import re
from pathlib import Path

from tests.nightly.mutation.mutant import mutants

ROOT = Path(__file__).parents[2]
IMPORT = re.compile(r"^from (tests\.[\w.]+\.test_\w+) import", re.MULTILINE)


def test_every_mutant_changes_code_and_names_a_test_that_exist() -> None:
    for mutant in mutants():
        assert mutant.text(ROOT / "src" / "bartleby"), mutant.name
        assert _has_test(mutant.killed_by), f"{mutant.name}: there is no test {mutant.killed_by}"


def _has_test(test: str) -> bool:
    file, *names = test.partition("[")[0].split("::")
    if not (ROOT / file).is_file():
        return False
    text = (ROOT / file).read_text()
    # a class may inherit its tests
    text += "".join((ROOT / f"{name.replace('.', '/')}.py").read_text() for name in IMPORT.findall(text))
    return all(re.search(rf"(class|def) {name}\b", text) for name in names)
