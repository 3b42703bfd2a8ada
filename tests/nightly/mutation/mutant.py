"""A mutant: one deliberate bug in the package, and the test that must fail because of it.

The files in `mutants/` list them, separated by blank lines:

    sql/claim.sql: a claim has no bound of bytes
    tests/sql/test_claim.py::test_one_claim_has_at_most_32_mebibytes_or_one_message
    - and coalesce(sum(b.big), 0) <= 33554432
    + and true

The lines with a minus occur exactly once in the file (below src/bartleby); those with a plus replace them. A mutant may
change several places.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

FOLDER = Path(__file__).parent / "mutants"


@dataclass(frozen=True, slots=True)
class Mutant:
    """`killed_by` is the id of the test that fails, as pytest prints it."""

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    killed_by: str

    def text(self, package: Path) -> str:
        """Return the file with the bug."""
        found = (package / self.file).read_text()
        for old, new in self.changes:
            assert found.count(old) == 1, f"{self.file} must contain exactly once: {old}"
            found = found.replace(old, new)
        return found


def mutants() -> Iterator[Mutant]:
    for path in sorted(FOLDER.glob("*.txt")):
        for block in path.read_text().strip().split("\n\n"):
            if not block.startswith("#"):
                yield parse(path.stem, block)


def parse(group: str, block: str) -> Mutant:
    head, test, *lines = block.splitlines()
    file, _, name = head.partition(": ")
    parts = [(sign, "\n".join(line[2:] for line in found)) for sign, found in groupby(lines, lambda line: line[0])]
    parts += [("+", "")] * (len(parts) % 2)
    assert [sign for sign, _ in parts] == ["-", "+"] * (len(parts) // 2), block
    pieces = [text for _, text in parts]
    return Mutant(f"{group}: {name}", file, tuple(zip(pieces[::2], pieces[1::2], strict=True)), test)
