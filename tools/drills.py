"""Run the drills three times and write their times into docs/concepts/on-call-drills.md, with pictures.

python -m tools.drills            runs them
python -m tools.drills --tests    only writes which test shows what, from the docstrings of the tests
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.nightly.browser.drill import Drill
from tools.shots import KEPT, shrink

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "concepts" / "on-call-drills.md"
RUNS = 3
_SHOWN = re.compile(r"(Drill [a-h]|Interaction \d+): (.+)")


def shown() -> Iterator[tuple[str, str, str]]:
    """Every drill and every interaction that a test says it shows: which, in what words, and by what name."""
    for file in sorted((ROOT / "tests" / "nightly" / "browser").glob("test_*.py")):
        for test in ast.parse(file.read_text()).body:
            if isinstance(test, ast.FunctionDef) and (found := _SHOWN.match(ast.get_docstring(test) or "")):
                yield found[1], found[2], f"`{file.stem}.{test.name}`"


def shown_table() -> str:
    """Which test shows what."""
    rows = sorted(shown(), key=lambda each: (each[0][0] == "D", each[0].partition(" ")[2].rjust(2)))
    return table(("", "shown is", "by"), rows)


def times_table(drills: list[Drill]) -> str:
    """The slowest of each."""
    slowest = {each.name: each for each in sorted(drills, key=lambda each: each.console)}
    rows = [
        (each.name, f"{each.bound:.0f} s", f"{each.console:.1f} s", str(each.clicks), str(each.keys),
         f"{each.hands:.0f} s" if each.hands else "none")
        for _, each in sorted(slowest.items())
    ]  # fmt: skip
    return table(("drill", "at most", "the console took", "clicks", "keys", "hands need about"), rows)


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(each)} |" for each in [head, ("---",) * len(head), *rows])


def written(page: str, name: str, text: str) -> str:
    """The page with this between its two marks."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"


def run(folder: Path) -> list[Drill]:
    """Run the drills; their pictures are in the folder then."""
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/nightly/browser/test_drills.py"]
    for _ in range(RUNS):
        subprocess.run(line, cwd=ROOT, env={**os.environ, "BARTLEBY_DRILLS": str(folder)}, check=True)
    return [Drill(**json.loads(each)) for each in (folder / "drills.jsonl").read_text().splitlines()]


def main() -> None:
    """Write the page."""
    page = written(PAGE.read_text(), "tests", shown_table())
    if "--tests" not in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            page = written(page, "times", times_table(run(Path(folder))))
            pictures = sorted(Path(folder).glob("*.png"))
            shrink(pictures)
            for each in pictures:
                shutil.copy(each, KEPT)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
