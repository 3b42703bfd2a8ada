"""Every mutant is killed: the named test fails with exit code 1 on a copy of the package that has the bug.

Each module in `mutants/` has a list MUTANTS. Run those of one module, or one mutant, with -k and a piece of the id.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.nightly.mutation.mutant import Mutant

ROOT = Path(__file__).parents[3]
TESTS_FAILED = 1


def mutants() -> Iterator[tuple[str, Mutant]]:
    for file in sorted((Path(__file__).parent / "mutants").glob("[a-z]*.py")):
        module = import_module(f"tests.nightly.mutation.mutants.{file.stem}")
        for mutant in module.MUTANTS:
            yield f"{file.stem}: {mutant.name}", mutant


@pytest.mark.parametrize("mutant", [pytest.param(mutant, id=name) for name, mutant in mutants()])
def test_mutant_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    copy = tmp_path / "src"
    shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
    changed = copy / "bartleby" / mutant.file
    text = changed.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} must contain exactly once: {mutant.old}"
    changed.write_text(text.replace(mutant.old, mutant.new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", mutant.killed_by]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=ROOT, env={**environment, "PYTHONPATH": str(copy)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == TESTS_FAILED, f"exit {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"
