"""Write docs/concepts/seeds.md: `python tools/seeds.py`, or `--check` to compare only.

tests/stories/seeds.toml lists every decision of the designs that Bartleby unites. A test that proves one is marked
with its id, `@pytest.mark.seed("pgmq-3")`; a test may prove several. A decision without a test is an error, and so is a
mark without a decision.
"""

import argparse
import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
DECISIONS = TESTS / "stories" / "seeds.toml"
PAGE = ROOT / "docs" / "concepts" / "seeds.md"
HEAD = """\
# Where the ideas come from

Bartleby unites designs by which others handle failed messages on PostgreSQL. Every decision of theirs is listed here in
their order, with what Bartleby does differently, and the tests that prove it.

`python tools/seeds.py` writes this page from tests/stories/seeds.toml and the marks on the tests.
"""


class Unwritable(Exception):
    """Decisions and marks do not fit together."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A marked test."""

    file: Path
    test: str

    def __str__(self) -> str:
        return f"[{self.test}](../../{self.file.relative_to(ROOT)})"


def main() -> int:
    """Write the page, or say whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not up to date")
    checking = parser.parse_args().check
    try:
        text = page(tomllib.loads(DECISIONS.read_text()), proofs(TESTS))
    except Unwritable as error:
        print(error, file=sys.stderr)
        return 1
    if not checking:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print(f"{PAGE.relative_to(ROOT)} is not up to date: python tools/seeds.py", file=sys.stderr)
        return 1
    return 0


def page(designs: dict[str, Any], found: dict[str, list[Proof]]) -> str:
    """Return the text of the page."""
    known = [decision["id"] for design in designs.values() for decision in design["decision"]]
    if unproven := [each for each in known if each not in found]:
        raise Unwritable(f"decisions without a test: {', '.join(unproven)}")
    if unknown := sorted(found.keys() - set(known)):
        raise Unwritable(f"marks without a decision: {', '.join(unknown)}")
    return "\n".join([HEAD, *(chapter(design, found) for design in designs.values())])


def chapter(design: dict[str, Any], found: dict[str, list[Proof]]) -> str:
    """Return what the page says about one design."""
    rows = [
        "| "
        + " | ".join(
            cell.replace("|", r"\|")
            for cell in (each["text"], each.get("here", ""), ", ".join(str(proof) for proof in found[each["id"]]))
        )
        + " |"
        for each in design["decision"]
    ]
    intro = f"{design['about']} {len(rows)} decisions."
    return "\n".join([f"## {design['title']}", "", intro, "", "| decision | here | test |", "|---|---|---|", *rows, ""])


def proofs(folder: Path) -> dict[str, list[Proof]]:
    """Return the marked tests by the id of the decision."""
    found: dict[str, list[Proof]] = defaultdict(list)
    for file in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for seed in marks(node):
                    found[seed].append(Proof(file, node.name))
    return dict(found)


def marks(test: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Return the ids in the marks of a test."""
    for each in test.decorator_list:
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "pytest.mark.seed":
            yield from (str(ast.literal_eval(argument)) for argument in each.args)


if __name__ == "__main__":
    sys.exit(main())
