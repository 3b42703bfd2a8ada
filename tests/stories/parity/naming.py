"""The bare names of the table: what a surface calls a verb, without its arguments."""

import re

from tests.stories.parity.row import Row, Why
from tests.stories.parity.table import ROWS


def bare(surface: str, name: str, row: Row) -> set[str]:
    """Return what a surface calls a verb; nothing if it has none."""
    value = getattr(row, surface)
    if isinstance(value, Why):
        return set()
    match surface:
        case "python":
            return {value or name}
        case "sql":
            return set(re.findall(r"bartleby\.(\w+)", value)) | {value.removeprefix("from ").split("(")[0].split()[0]}
        case "cli":
            return {value.partition(" --")[0].partition(" {")[0]}
        case "http":
            return {re.sub(r"\{\w+\}", "{}", each.partition(" |")[0]) for each in (value, *row.more)}
        case _:
            return {value.partition(" |")[0]}


def names(surface: str) -> set[str]:
    """Return all names of a surface that are in the table."""
    return {each for name, row in ROWS.items() for each in bare(surface, name, row)}
