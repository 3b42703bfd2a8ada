"""Write docs/concepts/seeds.md from the tests that prove it: `python tools/seeds.py`, or `--check` to compare only.

A file in tests/acceptance/seeds is one design, in the order of the names: the first line of its docstring is the
heading, the rest says what it is about. A test in it is one decision: the first paragraph of its docstring is the
decision, a second one that begins with "Here:" says how Bartleby does it where it differs. What is marked as expected
to fail is shown as missing.
"""

import argparse
import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "acceptance" / "seeds"
PAGE = ROOT / "docs" / "concepts" / "seeds.md"
HERE = "Here: "
HEAD = """\
# Where the ideas come from

Bartleby unites designs by which others handle failed messages on PostgreSQL. Every decision that they took is listed
here in their order, with what Bartleby does where it does otherwise, and the name of the test that proves it.

`python tools/seeds.py` writes this page from the tests; change it there.
"""


class Unwritable(Exception):
    """A test says too little or too much to be a line of the page."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A line of the page."""

    test: str
    decision: str
    here: str

    @classmethod
    def of(cls, test: ast.FunctionDef | ast.AsyncFunctionDef, file: Path) -> "Decision":
        """Return what a test proves."""
        said, *more = paragraphs(test)
        if not said or len(more) > 1 or not all(each.startswith(HERE) for each in more):
            raise Unwritable(f'{file.name}: {test.name} needs a docstring of one paragraph, and if need be "{HERE}…"')
        return cls(test.name, said, " ".join([*missing(test), *(each.removeprefix(HERE) for each in more)]))

    def __str__(self) -> str:
        cells = (self.decision, self.here, f"`{self.test}`")
        return f"| {' | '.join(each.replace('|', chr(92) + '|') for each in cells)} |"


def main() -> int:
    """Write the page, or say whether it is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not up to date")
    checking = parser.parse_args().check
    try:
        text = page()
    except Unwritable as error:
        print(error, file=sys.stderr)
        return 1
    if not checking:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print(f"{PAGE.relative_to(ROOT)} is not up to date: python tools/seeds.py", file=sys.stderr)
        return 1
    return 0


def page() -> str:
    """Return what the page says when it is up to date."""
    return "\n".join([HEAD, *(chapter(file) for file in sorted(TESTS.glob("test_*.py")))])


def chapter(file: Path) -> str:
    """Return what the page says of one design."""
    module = ast.parse(file.read_text())
    title, *about = paragraphs(module)
    if not title or not about:
        raise Unwritable(f"{file.name} needs a docstring of two paragraphs: a heading, and what it is about")
    lines = [str(Decision.of(test, file)) for test in tests(module)]
    link = f"[{file.name}](../../{file.relative_to(ROOT)})"
    intro = f"{' '.join(about)} {len(lines)} decisions, in {link}."
    return "\n".join([
        f"## {title.rstrip('.')}", "", intro, "", "| decision | here | test |", "|---|---|---|", *lines, "",
    ])  # fmt: skip


def tests(module: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the tests of a module, in their order."""
    for each in module.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name.startswith("test_"):
            yield each


def missing(test: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return what a test that is expected to fail says is missing."""
    marks = [each for each in test.decorator_list if isinstance(each, ast.Call) and "xfail" in ast.unparse(each.func)]
    reasons = [word.value for mark in marks for word in mark.keywords if word.arg == "reason"]
    return [
        f"**Not yet:** {each.value}."
        for each in reasons
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]


def paragraphs(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the paragraphs of a docstring, each in one line; one empty paragraph if there is none."""
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    return [" ".join(each.split()) for each in text.split("\n\n")]


if __name__ == "__main__":
    sys.exit(main())
