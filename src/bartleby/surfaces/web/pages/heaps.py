"""Groups in heaps: an outage shows as one error in many queues, and a bad release as many errors of one version."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import zip_longest

from bartleby.evidence import Group

BY: dict[str, tuple[str, Callable[[Group], str]]] = {
    "bug": ("bug", lambda each: str(each.id)),
    "type": ("type of error", lambda each: each.error_type or "no type"),
    "queue": ("queue", lambda each: each.queue),
    "version": ("version of workers", lambda each: each.versions[-1] if each.versions else "not named"),
    "owner": ("who is at it", lambda each: each.owner or "nobody"),
}


@dataclass(frozen=True, slots=True)
class Heap:
    """Groups that have one thing in common, and what they come to together."""

    name: str
    groups: Sequence[Group]
    dead: int
    deaths_last_hour: int
    deaths_by_hour: list[int]
    last_dead_at: datetime | None
    queues: list[str]


def heaps(groups: Sequence[Group], by: str, order: str) -> list[Heap]:
    """Return the groups in heaps; those that matter most are at the top."""
    found: dict[str, list[Group]] = {}
    for each in groups:
        found.setdefault(BY[by][1](each), []).append(each)
    made = [_heap(name, some) for name, some in found.items()]
    if order in {"last", "first"}:
        return sorted(made, key=lambda each: -(each.last_dead_at.timestamp() if each.last_dead_at else 0))
    return sorted(made, key=lambda each: (-(each.deaths_last_hour if order == "hour" else each.dead), each.name))


def _heap(name: str, groups: Sequence[Group]) -> Heap:
    return Heap(
        name,
        sorted(groups, key=lambda each: (-each.dead, each.id)),
        sum(each.dead for each in groups),
        sum(each.deaths_last_hour for each in groups),
        [sum(each) for each in zip_longest(*(group.deaths_by_hour for group in groups), fillvalue=0)],
        max((each.last_dead_at for each in groups if each.last_dead_at), default=None),
        sorted({each.queue for each in groups}),
    )
