"""What tools answer, as declared schemas. Whatever a stranger may have written is `Untrusted`; the rest is ours."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field

from bartleby.surfaces.mcp.untrusted import Untrusted


class LetterLine(BaseModel):
    """A dead letter in short."""

    message_id: int
    queue: str
    status: str = Field(description="dead, replayed, resolved or discarded")
    group_id: int | None
    reason: str = Field(description="why it is dead: exhausted, terminal, unacceptable, crashed, expired …")
    attempts: int
    cycle: int = Field(description="1 for its first life; more if it was replayed and died again")
    on_hold: bool
    dead_at: datetime
    key: Untrusted | None
    error_type: Untrusted | None
    error: Untrusted | None


class Letters(BaseModel):
    """A page of dead letters."""

    letters: list[LetterLine]
    cursor: str | None = Field(description="hand it in again for the next page; null: this was the last")
    note: str | None = Field(description="what the list leaves out")


class Counted(BaseModel):
    """How many dead letters a filter finds."""

    letters: int
    exact: bool = Field(description="false: there are at least so many")


class Letter(LetterLine):
    """A dead letter with its evidence; secrets are hidden as ***."""

    crashes: int
    generation: int | None
    created_at: datetime
    first_failed_at: datetime
    replayed_at: datetime | None
    resolved_at: datetime | None
    erased: bool = Field(description="true: its payload is gone for ever, and it cannot be replayed")
    replay_id: int | None = Field(description="the plan that replayed it last")
    payload: Untrusted | None
    edited_payload: Untrusted | None
    headers: Untrusted | None
    traceback: Untrusted | None
    worker: Untrusted | None
    worker_version: Untrusted | None
    replayed_by: Untrusted | None
    replay_reason: Untrusted | None
    hold_reason: Untrusted | None
    discard_reason: Untrusted | None


class GroupLine(BaseModel):
    """Letters that died of the same."""

    group_id: int
    queue: str
    state: str = Field(description="open, acknowledged, muted, resolved or regressed")
    dead: int
    replayed: int
    resolved: int
    discarded: int
    deaths_last_hour: int
    first_dead_at: datetime | None
    last_dead_at: datetime | None
    error_type: Untrusted | None
    title: Untrusted | None
    error: Untrusted | None = Field(description="of its newest letter")
    owner: Untrusted | None
    note: Untrusted | None


class Groups(BaseModel):
    """Groups, those with most dead letters first."""

    groups: list[GroupLine]
    note: str | None = Field(description="what the list leaves out")


class Shared(BaseModel):
    """A value that many letters of a group have at one place."""

    path: Untrusted
    value: Untrusted
    letters: int
    of: int


class Version(BaseModel):
    """A version of workers that letters of a group came from; its newest are looked at, 250 of each status."""

    version: Untrusted | None
    letters: int
    first_dead_at: datetime
    last_dead_at: datetime


class Tried(BaseModel):
    """A replay of letters of a group, and what came of it."""

    replay_id: int | None
    status: str | None
    at: datetime
    letters: int
    waiting: int
    done: int
    died_again: int
    skipped: int
    actor: Untrusted
    reason: Untrusted


class Group(GroupLine):
    """A group with what helps to find its cause."""

    deaths_by_hour: list[int] = Field(description="the last 24 hours, the oldest first")
    filter: str = Field(description="finds its letters")
    shared: list[Shared]
    versions: list[Version]
    tried: list[Tried]


class QueueLine(BaseModel):
    """A queue and how many of its messages are where."""

    name: str
    ready: int
    leased: int
    deferred: int
    dead: int
    oldest_ready_at: datetime | None
    next_due_at: datetime | None
    paused: bool
    paused_until: datetime | None = Field(description="when a pause ends by itself; null: when somebody ends it")
    breaker: str = Field(description="closed, open (probes only), forced or off")
    breaker_since: datetime | None
    breaker_cause: Untrusted | None


class Queues(BaseModel):
    """All queues."""

    queues: list[QueueLine]
    note: str | None = Field(description="what the list leaves out")


class Moment(BaseModel):
    """A point of a timeline."""

    at: datetime | None = Field(description="null: now")
    told: Untrusted


class Story(BaseModel):
    """What happened to a message."""

    message_id: int
    state: str = Field(description="ready, leased, deferred, dead, discarded, done, elsewhere or untraced")
    queue: str | None
    facts: list[Untrusted]
    timeline: list[Moment]
    last_words: Untrusted | None = Field(description="the end of the traceback")
    for_a_person: list[str] = Field(description="commands for a person, not for you")
    note: str | None = Field(description="what the timeline leaves out")


class Share(BaseModel):
    """Letters of a plan with one queue and one prediction."""

    queue: str | None
    prediction: str
    letters: int
    first_dead_at: datetime | None
    last_dead_at: datetime | None


class Obstacle(BaseModel):
    """Why letters of a plan are or will be skipped."""

    kind: str
    letters: int
    told: Untrusted


class Relapse(BaseModel):
    """What letters of a plan died of again."""

    group_id: int | None
    letters: int
    error_type: Untrusted | None
    error: Untrusted | None


class Risk(BaseModel):
    """What can go wrong when a plan runs; show it to the person who decides."""

    level: Literal["low", "medium", "high"]
    why: list[str]


class Plan(BaseModel):
    """A replay plan: frozen letters that are to live again, and how far that has come."""

    replay_id: int
    hash: str = Field(description="of exactly these letters and terms; run_replay wants it")
    status: str = Field(description="draft, running, paused, settling, finished, cancelled or aborted")
    yours: bool
    letters: int
    will_run: int = Field(description="how many are predicted to run; the rest is skipped")
    predictions: dict[str, int]
    target: str | None = Field(description="another queue that they go to")
    edits_payloads: bool
    canary: int | None
    tolerance: float
    rate: float | None
    window: int | None
    approved: bool = Field(description="a person has approved it, and that has not lapsed")
    approved_until: datetime | None
    approved_by: Untrusted | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    waiting: int
    alive: int = Field(description="replayed, without an outcome yet")
    done: int
    already_handled: int
    died_again: int
    gone: int
    skipped: int
    actor: Untrusted
    reason: Untrusted
    filter: Untrusted | None
    cause: Untrusted | None
    obstacles: list[Obstacle]
    relapses: list[Relapse]
    next: str = Field(description="what to do now")


class Proposal(Plan):
    """A plan that was just proposed, with what a person needs to decide."""

    shares: list[Share]
    sample: list[LetterLine]
    risk: Risk
