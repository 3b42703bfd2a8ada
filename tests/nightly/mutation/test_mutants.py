"""Every mutant is killed: the named test fails on a copy of the package that has the bug.

A test whose set-up fails, because the bug cannot even be installed, has shown nothing.

Run those of one file in `mutants/`, or one mutant, with -k and a piece of the id.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nightly.mutation.mutant import Mutant, mutants

ROOT = Path(__file__).parents[3]
TESTS_FAILED = 1


@pytest.mark.parametrize("mutant", [pytest.param(mutant, id=mutant.name) for mutant in mutants()])
def test_mutant_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    copy = tmp_path / "src"
    shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "bartleby" / mutant.file).write_text(mutant.text(ROOT / "src" / "bartleby"))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", mutant.killed_by]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=ROOT, env={**environment, "PYTHONPATH": str(copy)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == TESTS_FAILED, f"exit {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"
    assert re.search(r"^\d+ failed", done.stdout.splitlines()[-1]), done.stdout[-3000:]
