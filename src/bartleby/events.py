"""The nouns of events: a sink as it does, a sink as it is set up, and an event that one should have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any


@dataclass(frozen=True, slots=True)
class Sink:
    """Where events go, and how that does; `options` without their secrets."""

    name: str
    kind: str
    options: Mapping[str, Any]
    types: Sequence[str]
    queues: Sequence[str] | None
    attempts: int
    delay: timedelta
    timeout: timedelta
    include_payload: bool
    link: str | None
    state: str
    """working, degraded (it takes nothing now) or paused"""
    waiting: int
    """references to events, each to up to a hundred"""
    oldest_waiting_at: datetime | None
    refused: int
    """dead letters of its queue: events that it will never take"""
    published: int
    published_at: datetime | None
    failures: int
    """events for which the attempts were used up; they are kept and tried again"""
    degraded_at: datetime | None
    error: str | None
    error_at: datetime | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class SinkSettings:
    """A sink as the relay needs it: with its secrets."""

    name: str
    kind: str
    options: Mapping[str, Any]
    attempts: int
    delay: float
    timeout: float
    link: str | None
    queue: str


@dataclass(frozen=True, slots=True)
class Emitted:
    """An event that a sink should have: which row, which of its letters, and its id everywhere."""

    event_id: int
    ordinal: int
    id: str
    created_at: datetime
