"""All rows, and the bare names in them: what a surface calls a verb, without its arguments."""

import re
from collections.abc import Mapping

from tests.stories.parity.actions import ACTIONS
from tests.stories.parity.reads import READS
from tests.stories.parity.row import Row, Why

ROWS: Mapping[str, Row] = {**ACTIONS, **READS}


def bare(surface: str, name: str, row: Row) -> set[str]:
    """Return the names of a verb on a surface; none if it does not have the verb."""
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
    """Return all names of a surface in the table."""
    return {each for name, row in ROWS.items() for each in bare(surface, name, row)}
