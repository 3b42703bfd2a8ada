"""Every verb of an operator and what it is called on each surface; where a surface has none, why.

A name is written as it is used, with arguments in braces: `queues pause {queue}`, `POST /queues/{queue}/pause`. After
a bar stand the fields of a request or the arguments of a tool, `field=argument` where they are called differently.
"""

from dataclasses import dataclass


class Why(str):
    """Why a surface has no such verb."""

    __slots__ = ()


@dataclass(frozen=True)
class Row:
    """One verb. `python` is the verb of both clients; `more` are further names of the same on HTTP.

    `pick` makes it a look: these members of its answer are compared. What the story cannot do says why in `untold`.
    """

    sql: str
    cli: str
    http: str
    mcp: str
    python: str = ""
    more: tuple[str, ...] = ()
    pick: tuple[str, ...] = ()
    signed: bool = True
    untold: str = ""
