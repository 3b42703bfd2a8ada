"""The nouns of replay: plans, their items, and their steps. Values that come out of the database and never change."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from bartleby.evidence import GroupId, ReplayId
from bartleby.message import MessageId, decode

OVER = frozenset({"finished", "cancelled", "aborted"})
WILL_RUN = frozenset({"run", "again"})


@dataclass(frozen=True, slots=True)
class Replay:
    """A plan: a frozen set of letters that is to live again, and how far that has come.

    It is a draft, running, paused, settling (all were replayed, some outcomes are missing), finished, cancelled or
    aborted. Of its `items`, `replayed` are alive at the moment, and `gone` went with their queue. `predictions` says
    how many items have which.
    """

    id: ReplayId
    status: str
    actor: str
    reason: str
    filter: str | None
    target: str | None
    raw_patch: str | None = field(repr=False)
    generation: int | None
    rate: float | None
    window: int | None
    canary: int | None
    tolerance: float
    items: int
    waiting: int
    replayed: int
    done: int
    already_handled: int
    died_again: int
    gone: int
    skipped: int
    predictions: dict[str, int]
    cause: str | None
    hash: str
    needs_approval: bool
    approved_by: str | None
    approved_until: datetime | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    request_id: str | None

    @property
    def patch(self) -> list[dict[str, Any]] | None:
        """The operations of its JSON Patch, if it has one."""
        return None if self.raw_patch is None else decode(self.raw_patch)

    @property
    def settled(self) -> int:
        """How many items have their outcome."""
        return self.items - self.waiting - self.replayed

    @property
    def will_run(self) -> int:
        """How many items are predicted to run."""
        return sum(self.predictions.get(each, 0) for each in WILL_RUN)

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.status in OVER


@dataclass(frozen=True, slots=True)
class ReplayItem:
    """One letter of a plan: what was predicted (and the problem, if it will not run), and what it came to.

    The queue is the one that it will run in; an id without a letter has none.
    """

    replay_id: ReplayId
    message_id: MessageId
    queue: str | None
    cycle: int | None
    prediction: str
    problem: str | None
    state: str
    replayed_at: datetime | None
    settled_at: datetime | None


@dataclass(frozen=True, slots=True)
class Change:
    """The payload of one item before and after the patch of its plan; or the problem why it does not apply."""

    message_id: MessageId
    raw_before: str | None = field(repr=False)
    raw_after: str | None = field(repr=False)
    problem: str | None = None

    @property
    def before(self) -> Any:  # noqa: ANN401 - a payload is any JSON value
        """The payload as it is; None if it was erased."""
        return None if self.raw_before is None else decode(self.raw_before)

    @property
    def after(self) -> Any:  # noqa: ANN401 - a payload is any JSON value
        """The payload as it will be."""
        return None if self.raw_after is None else decode(self.raw_after)


@dataclass(frozen=True, slots=True)
class Advance:
    """One step of a plan: how many items it moved, and how long the next need not be tried."""

    replay_id: ReplayId
    status: str
    moved: int
    wait: timedelta | None
    note: str | None


@dataclass(frozen=True, slots=True)
class Share:
    """The items of a plan that have one queue and one prediction: how many, and (of a draft) when they died."""

    queue: str | None
    prediction: str
    items: int
    first_dead_at: datetime | None
    last_dead_at: datetime | None


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why so many items of a plan are or will be skipped; the problem begins with the class."""

    problem: str
    items: int


@dataclass(frozen=True, slots=True)
class Relapse:
    """What so many items of a plan, of one group, died of again."""

    group_id: GroupId | None
    error_type: str | None
    error: str | None
    items: int
