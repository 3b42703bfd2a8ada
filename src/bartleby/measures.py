"""Calls of surfaces alone, that count, are about queues, or find what is new: cheap, however many there are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import LiteralString

from bartleby.answers import Row, every, first
from bartleby.calls import Call
from bartleby.evidence import Group
from bartleby.message import storable

_GROUPS: LiteralString = "select queue, state, count(*) from bartleby.group_heads group by 1, 2 order by 1, 2"
_OPEN: LiteralString = """
select queue, count(*) from bartleby.group_heads where dead > 0 and state in ('open', 'regressed') group by 1"""
_REPLAYS: LiteralString = "select status, count(*) from bartleby.replays group by 1 order by 1"
_ORIGINS: LiteralString = """
select distinct d.queue
from bartleby.replay_items i left join bartleby.dead_letters d on d.message_id = i.message_id
where i.replay_id = %s::bigint"""
_POLICY: LiteralString = """
select max_attempts, backoff, extract(epoch from base)::float8, factor, extract(epoch from cap)::float8, jitter, array(
    select extract(epoch from s.delay)::float8 from unnest(schedule) with ordinality s (delay, place) order by s.place),
  extract(epoch from lease)::float8, crash_budget, extract(epoch from give_up_after)::float8, dead_letter_to,
  invalid_to, extract(epoch from retention)::float8, payload_limit, extract(epoch from payload_retention)::float8,
  approve_above, record_starts
from bartleby.queues where name = %s"""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a queue does with messages that fail, and how long it keeps them; durations in seconds, None: no bound."""

    max_attempts: int
    backoff: str
    base: float
    factor: float
    cap: float
    jitter: str
    schedule: Sequence[float]
    lease: float
    crash_budget: int
    give_up_after: float | None
    dead_letter_to: str | None
    invalid_to: str | None
    retention: float
    payload_limit: int
    payload_retention: float | None
    approve_above: int | None
    record_starts: bool

    def delay(self, attempt: int) -> float:
        """Return how long is waited after a failed attempt; with full jitter that is the most."""
        match self.backoff:
            case "none":
                return 0.0
            case "fixed":
                return self.base
            case "quadratic":
                return min(self.cap, self.base * float(attempt) ** 2)
            case "schedule":
                return self.schedule[min(attempt, len(self.schedule)) - 1]
            case _:
                return self._grown(attempt)

    def _grown(self, attempt: int) -> float:
        delay = self.base
        for _ in range(attempt - 1):
            if not 0 < delay < self.cap:
                break
            delay *= self.factor
        return min(self.cap, delay)


# However few letters they have: a bug that began a minute ago is not among the largest.
_LATEST: LiteralString = """
select id, queue, fingerprint, error_type, title, error, state, owner, note, link, muted_until, resolved_version, dead,
  replayed, resolved, discarded, deaths_last_hour, deaths_by_hour, first_dead_at, last_dead_at, state_at, state_by,
  regressions, versions, error_types, restless
from bartleby.groups where id = any (array(
  (select h.id from bartleby.group_heads h where h.dead > 0 order by h.id desc limit 20)
  union
  select d.group_id from bartleby.find_letters(%s, 100) f join bartleby.dead_letters d on d.message_id = f.message_id))
order by dead desc, id desc"""


def group_states() -> Call[list[tuple[str, str, int]]]:
    """Return how many groups each queue has in each state."""
    return Call(_GROUPS, (), _triples)


def open_groups() -> Call[list[tuple[str, int]]]:
    """Return how many groups of each queue have dead letters and wait for somebody."""
    return Call(_OPEN, (), _pairs)


def latest_groups(filter: str = "") -> Call[list[Group]]:
    """Return the newest groups of all, and those of the newest letters that a filter finds."""
    return Call(_LATEST, (storable(filter),), every(Group))


def replay_statuses() -> Call[list[tuple[str, int]]]:
    """Return how many plans there are in each status."""
    return Call(_REPLAYS, (), _pairs)


def replay_origins(replay_id: int) -> Call[list[str | None]]:
    """Return in which queues the letters of a plan are, wherever they are to go; None for letters that are gone."""
    return Call(_ORIGINS, (replay_id,), lambda rows: [row[0] for row in rows])


def policy(queue: str) -> Call[Policy | None]:
    """Return the policy of a queue."""
    return Call(_POLICY, (storable(queue),), first(Policy))


def _triples(rows: Sequence[Row]) -> list[tuple[str, str, int]]:
    return [(queue, state, count) for queue, state, count in rows]


def _pairs(rows: Sequence[Row]) -> list[tuple[str, int]]:
    return [(status, count) for status, count in rows]
