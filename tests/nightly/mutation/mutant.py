"""A mutant: one deliberate bug in the package, and the test that must fail because of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """Replace `old`, which occurs exactly once in `file` (below src/bartleby), by `new`.

    `killed_by` is the id of the test that fails then, as pytest prints it.
    """

    name: str
    file: str
    old: str
    new: str
    killed_by: str
