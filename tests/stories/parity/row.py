"""The row of the table of verbs.

A name is written as it is used, with arguments in braces: `queues pause {queue}`, `POST /queues/{queue}/pause`. After
a bar stand the fields of a request or the arguments of a tool, `field=argument` where the names differ.
"""

from dataclasses import dataclass


class Why(str):
    """Why a surface has no such verb."""

    __slots__ = ()


@dataclass(frozen=True)
class Row:
    """One verb. `python` is its name in both clients, `more` are further names on HTTP.

    `pick` makes it a read: these members of its answer are compared. `untested` says why the story cannot do it.
    """

    sql: str
    cli: str
    http: str
    mcp: str
    python: str = ""
    more: tuple[str, ...] = ()
    pick: tuple[str, ...] = ()
    signed: bool = True
    untested: str = ""
