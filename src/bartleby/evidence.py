"""The nouns of failure: dead letters, their groups, and what the audit says. Values that never change.

What holds parts of a payload is kept as the text that the database has (`raw…`) and decoded when it is looked at: one
that Python cannot decode spoils no list of others.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, NewType, TypeVar

from bartleby.message import LeaseId, MessageId, decode

GroupId = NewType("GroupId", int)
ReplayId = NewType("ReplayId", int)
RuleId = NewType("RuleId", int)

T = TypeVar("T")

REFUSED = "refused"
_PLAIN_VALUE = re.compile(r"[A-Za-z0-9_]+(?:[.-][A-Za-z0-9_]+)*")


def term(name: str, value: object) -> str:
    r"""Return a term of a filter whose value is taken as it is: `term("key", 'a "b"')` is `key:"a \"b\""`."""
    if _PLAIN_VALUE.fullmatch(str(value)):
        return f"{name}:{value}"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}:"{text}"'


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A part of a list. `next` is where the following page begins; None if this was the last. It may be empty."""

    items: tuple[T, ...]
    next: str | None = None

    @property
    def complete(self) -> bool:
        """Whether nothing follows."""
        return self.next is None

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True, slots=True)
class Count:
    """How many letters a filter finds; if not `exact`, there are at least so many."""

    letters: int
    exact: bool

    def __str__(self) -> str:
        return f"{self.letters:,}" if self.exact else f"{self.letters:,}+"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that will not be tried again by itself: `dead`, `replayed`, `resolved` or `discarded`."""

    message_id: MessageId
    queue: str
    group_id: GroupId | None
    status: str
    status_at: datetime
    reason: str
    error_type: str | None
    error: str | None
    traceback: str | None
    fingerprint: str | None
    attempts: int
    crashes: int
    cycle: int
    key: str | None
    raw_headers: str | None = field(repr=False)
    raw: str | None = field(repr=False)
    raw_edited: str | None = field(repr=False)
    generation: int | None
    worker: str
    worker_version: str | None
    created_at: datetime
    first_failed_at: datetime
    dead_at: datetime
    held_at: datetime | None
    held_by: str | None
    hold_reason: str | None
    replay_id: ReplayId | None
    replayed_at: datetime | None
    replayed_by: str | None
    replay_reason: str | None
    resolved_at: datetime | None
    discarded_by: str | None
    discard_reason: str | None
    erased_at: datetime | None
    raw_history: str = field(repr=False)

    @property
    def payload(self) -> Any:  # noqa: ANN401 - a payload is any JSON value
        """The payload as it was sent; None if it was erased."""
        return None if self.raw is None else decode(self.raw)

    @property
    def edited(self) -> Any:  # noqa: ANN401 - a payload is any JSON value
        """The payload as a patch left it; None if there was none."""
        return None if self.raw_edited is None else decode(self.raw_edited)

    @property
    def headers(self) -> dict[str, Any]:
        """The headers, empty if it has none."""
        return {} if self.raw_headers is None else decode(self.raw_headers)

    @property
    def failure_history(self) -> list[dict[str, Any]]:
        """Its earlier cycles, the oldest first."""
        history: list[dict[str, Any]] = decode(self.raw_history)
        return history


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt that failed, was rejected, was lost or took its worker along; `rule` says what decided."""

    message_id: MessageId
    queue: str
    cycle: int
    attempt: int
    outcome: str
    verdict: str
    rule: str | None
    handler: str | None
    error_type: str | None
    error: str | None
    traceback: str | None
    fingerprint: str | None
    worker: str
    worker_version: str | None
    lease_id: LeaseId
    failed_at: datetime
    retry_at: datetime | None


@dataclass(frozen=True, slots=True)
class Fate:
    """What a letter is now and who made it so: `discarded by ana 20 s ago: spam`."""

    message_id: MessageId
    status: str
    told: str


@dataclass(frozen=True, slots=True)
class Deed:
    """What came of it for one letter: `discarded`, `restored`, `held`, `released` or `refused`; told is its fate."""

    message_id: MessageId
    outcome: str
    told: str

    @property
    def refused(self) -> bool:
        """Whether nothing was changed."""
        return self.outcome == REFUSED


@dataclass(frozen=True, slots=True)
class Group:
    """Letters that died of the same: open, acknowledged, muted, resolved or regressed. The error is the newest.

    `deaths_by_hour` are the last 24 hours, the oldest first. `versions` are those of the workers, the newest last. More
    than 50 `error_types` are None. While it is `restless`, letters have yet to move to where rules want them.
    """

    id: GroupId
    queue: str
    fingerprint: str | None
    error_type: str | None
    title: str | None
    error: str | None
    state: str
    owner: str | None
    note: str | None
    link: str | None
    muted_until: datetime | None
    resolved_version: str | None
    dead: int
    replayed: int
    resolved: int
    discarded: int
    deaths_last_hour: int
    deaths_by_hour: list[int]
    first_dead_at: datetime | None
    last_dead_at: datetime | None
    state_at: datetime | None
    state_by: str | None
    regressions: int
    versions: list[str]
    error_types: list[str] | None
    restless: bool


@dataclass(frozen=True, slots=True)
class SharedValue:
    """A value that `letters` of the `of` letters looked at have at one path (`payload.customer.country`)."""

    path: str
    raw: str = field(repr=False)
    letters: int
    of: int

    @property
    def value(self) -> Any:  # noqa: ANN401 - a payload is any JSON value
        """The value."""
        return decode(self.raw)


@dataclass(frozen=True, slots=True)
class GroupRule:
    """Letters of one group belong to another; with a path, only those that have the value there."""

    id: RuleId
    queue: str
    fingerprint: str | None
    error_type: str | None
    from_group: GroupId
    path: str | None
    raw: str | None = field(repr=False)
    to_group: GroupId
    created_by: str
    created_at: datetime

    @property
    def value(self) -> Any:  # noqa: ANN401 - a payload is any JSON value
        """The value; None if the rule has no path."""
        return None if self.raw is None else decode(self.raw)


@dataclass(frozen=True, slots=True)
class AuditLine:
    """Who did what to what, why, and how it was before and after; `hash` covers the line and all before it."""

    id: int
    at: datetime
    actor: str
    db_user: str
    action: str
    subject: dict[str, Any]
    reason: str | None
    request_id: str | None
    before: Any
    after: Any
    hash: str


@dataclass(frozen=True, slots=True)
class AuditProblem:
    """A place where the audit was tampered with."""

    id: int | None
    problem: str
