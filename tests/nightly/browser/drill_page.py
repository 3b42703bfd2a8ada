"""Run the drills three times and write what came of them into docs/concepts/on-call-drills.md, with pictures.

python -m tests.nightly.browser.drill_page            runs them
python -m tests.nightly.browser.drill_page --tests    only writes which test shows what, from the tests' own words
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

from playwright.sync_api import sync_playwright

from tests.kit.browser import CHROMIUM, FLAGS
from tests.nightly.browser.pictures import shrink
from tests.nightly.browser.stopwatch import Drill

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "concepts" / "on-call-drills.md"
PICTURES = ROOT / "docs" / "images" / "console"
RUNS = 3
_SHOWN = re.compile(r"(Drill [a-h]|Interaction \d+): (.+)")


def shown() -> Iterator[tuple[str, str, str]]:
    """Every drill and every interaction that a test says it shows: which, in what words, and by what name."""
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        for test in ast.parse(file.read_text()).body:
            found = _SHOWN.match(ast.get_docstring(test) or "") if isinstance(test, ast.FunctionDef) else None
            if found:
                assert isinstance(test, ast.FunctionDef)
                yield found[1], found[2], f"`{file.stem}.{test.name}`"


def shown_table() -> str:
    """Which test shows what."""
    rows = sorted(shown(), key=lambda each: (each[0][0] == "D", each[0].partition(" ")[2].rjust(2)))
    return table(("", "shown is", "by"), rows)


def times_table(drills: list[Drill]) -> str:
    """The slowest of each."""
    rows = []
    for name in sorted({each.name for each in drills}):
        slowest = max((each for each in drills if each.name == name), key=lambda each: each.console)
        bound = f"{slowest.bound:.0f} s"
        hands = f"{slowest.hands:.0f} s" if slowest.hands else "none"
        rows.append((name, bound, f"{slowest.console:.1f} s", str(slowest.clicks), str(slowest.keys), hands))
    return table(("drill", "at most", "the console took", "clicks", "keys", "hands need about"), rows)


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(each)} |" for each in lines)


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
            with sync_playwright() as playwright:
                shrink(playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS), pictures)
            for each in pictures:
                shutil.copy(each, PICTURES)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
