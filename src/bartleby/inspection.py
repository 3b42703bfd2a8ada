"""Calls that only look: at the server and the schema in it, and at what was done with groups and messages."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import LiteralString

from bartleby.answers import column, every, scalar
from bartleby.calls import Call
from bartleby.evidence import AuditLine, GroupId, ReplayId
from bartleby.message import storable
from bartleby.replays import ReplayItem

_FACTS: LiteralString = """
select current_setting('server_version'), current_setting('fsync') = 'on', current_setting('full_page_writes') = 'on',
  current_setting('synchronous_commit'), current_setting('synchronous_standby_names'), pg_is_in_recovery(),
  pg_backend_pid(), pg_notification_queue_usage(), (select setting from pg_settings where name = 'data_directory'),
  case when set_config('jit', (select reset_val from pg_settings where name = 'jit'), true) = 'on' then
    case when pg_jit_available() then nullif(current_setting('jit_above_cost')::double precision, -1) end end"""

_XMIN_HOLDER: LiteralString = """
select h.kind, h.who, h.age, h.since from (
  select 'session' as kind, greatest(age(a.backend_xmin), age(a.backend_xid)) as age, a.xact_start as since,
    'pid ' || a.pid || ' (' || concat_ws(', ', a.usename, nullif(a.application_name, ''), a.state) || ')' as who
  from pg_stat_activity a where num_nonnulls(a.backend_xmin, a.backend_xid) > 0 and a.pid <> pg_backend_pid()
  union all
  select 'replication slot', greatest(age(s.xmin), age(s.catalog_xmin)), null, s.slot_name::text
  from pg_replication_slots s where num_nonnulls(s.xmin, s.catalog_xmin) > 0
  union all
  select 'prepared transaction', age(p.transaction), p.prepared, p.gid from pg_prepared_xacts p
) h order by h.age desc, h.kind = 'session', h.since limit 1"""

# The newest letters of a group, of each status some: the index has them in this order, however many there are.
_MEMBERS: LiteralString = """
with member as materialized (
  select d.* from unnest('{dead,replayed,resolved,discarded}'::text[]) as s (status), lateral (
    select l.message_id, l.status, l.status_at, l.dead_at, l.worker_version, l.replay_id, l.replayed_at, l.replayed_by,
      l.replay_reason, l.failure_history
    from bartleby.dead_letters l where l.group_id = %s::bigint and l.status = s.status
    order by l.status_at desc, l.message_id desc limit %s::integer) d)"""

_VERSIONS: LiteralString = """
select m.worker_version, count(*), min(m.dead_at), max(m.dead_at) from member m
group by m.worker_version order by max(m.dead_at) desc, m.worker_version"""

_TRIES: LiteralString = """
, tried as (
  select m.replay_id, m.replayed_by as actor, m.replay_reason as reason, m.replayed_at as at,
    case m.status when 'replayed' then 'replayed' else 'done' end as state
  from member m where m.replayed_at is not null
  union all
  select (h ->> 'replay_id')::bigint, h ->> 'replayed_by', h ->> 'replay_reason', (h ->> 'replayed_at')::timestamptz,
    'died_again'
  from member m, jsonb_array_elements(m.failure_history) h where h ->> 'replayed_at' is not null
)
select * from (
  select null::bigint, null::text, t.actor, t.reason, min(t.at) as at, count(*), 0::bigint,
    count(*) filter (where t.state = 'replayed'), count(*) filter (where t.state = 'done'),
    count(*) filter (where t.state = 'died_again'), 0::bigint, null::text
  from tried t where t.replay_id is null group by t.actor, t.reason
  union all
  select r.id, r.status, r.actor, r.reason, coalesce(r.started_at, r.created_at), r.items, r.waiting, r.replayed,
    r.done + r.already_handled, r.died_again + r.gone, r.skipped, r.cause
  from bartleby.replays r
  where r.status <> 'preview' and r.id = any (array(
    select i.replay_id from member m join bartleby.replay_items i on i.message_id = m.message_id
    union select t.replay_id from tried t where t.replay_id is not null))
) o order by o.at desc limit 10"""

_PLANS: LiteralString = """
select i.replay_id, i.message_id, i.queue, i.cycle, i.prediction, i.problem, i.state, i.replayed_at, i.settled_at
from bartleby.replay_items i join bartleby.replays r on r.id = i.replay_id
where i.message_id = %s::bigint and r.status <> 'preview' order by i.replay_id"""

# The ids of a line are ranges.
_DEEDS: LiteralString = """
select a.id, a.at, a.actor, a.db_user, a.action, a.subject, a.reason, a.request_id, a.before, a.after, a.hash
from (select * from bartleby.audit_log l order by l.id desc limit %s::integer) a
where a.at >= %s::timestamptz and a.action like 'letter.%%'
  and case when a.subject ->> 'message_ids' like '{%%}' then (a.subject ->> 'message_ids')::int8multirange end
    @> %s::bigint
order by a.id"""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the server says about itself; it compiles no plan where `jit_above_cost` is None."""

    version: str
    fsync: bool
    full_page_writes: bool
    synchronous_commit: str
    synchronous_standby_names: str
    in_recovery: bool
    backend_pid: int
    notify_queue_usage: float
    data_directory: str | None
    jit_above_cost: float | None


@dataclass(frozen=True, slots=True)
class XminHolder:
    """Whoever keeps vacuum from removing old rows."""

    kind: str
    who: str
    age: int
    since: datetime | None


@dataclass(frozen=True, slots=True)
class Segment:
    """One of the three segments of the log."""

    slot: int
    current: bool
    bytes: int


@dataclass(frozen=True, slots=True)
class Expiring:
    """Unresolved letters of a queue that its retention is about to take; at most 10,000 are counted.

    `what` it takes of them: the `letters`, or their `payloads`, without which they cannot be replayed.
    """

    queue: str
    letters: int
    first_at: datetime
    what: str


@dataclass(frozen=True, slots=True)
class GroupVersion:
    """A version of workers from which newest letters of a group came; None is a worker that named none."""

    version: str | None
    letters: int
    first_dead_at: datetime
    last_dead_at: datetime


@dataclass(frozen=True, slots=True)
class GroupReplay:
    """A replay of letters of a group and what it came to: a plan as a whole, or (no id) letters by their ids.

    Of its `items`, `replayed` are alive at the moment, and `waiting` are yet to be.
    """

    replay_id: ReplayId | None
    status: str | None
    actor: str
    reason: str
    at: datetime
    items: int
    waiting: int
    replayed: int
    done: int
    died_again: int
    skipped: int
    cause: str | None


def version() -> Call[str]:
    """Return the version of the schema in the database."""
    return Call("select bartleby.version()", (), lambda rows: str(rows[0][0]))


def drift() -> Call[list[tuple[str, str]]]:
    """Return what differs from what was installed: object, and changed, missing or added."""
    return Call("select object, change from bartleby.drift()", (), lambda rows: [(row[0], row[1]) for row in rows])


def facts() -> Call[ServerFacts]:
    """Return what the server says about durability and itself."""
    return Call(_FACTS, (), lambda rows: ServerFacts(*rows[0]))


def server_is_young() -> Call[bool]:
    """Return whether the server was started, or started anew after a crash, less than a minute ago."""
    text: LiteralString = "select bartleby.server_started_at() > now() - interval '1 minute'"
    return Call(text, (), scalar)


def cost_of_queues() -> Call[float]:
    """Return what PostgreSQL expects a look at all queues to cost, in its own units."""
    text: LiteralString = "explain (format json) select * from bartleby.queues"
    return Call(text, (), lambda rows: float(rows[0][0][0]["Plan"]["Total Cost"]))


def server_trouble(lease_id: int, sqlstate: str) -> Call[bool]:
    """Return whether the server has the trouble that a handler's error spoke of, or had it since the lease began."""
    text: LiteralString = "select bartleby.server_trouble(%s::bigint, %s)"
    return Call(text, (lease_id, sqlstate), scalar)


def oldest_xmin_holder() -> Call[XminHolder | None]:
    """Return what holds back vacuum the most, if anything does."""
    return Call(_XMIN_HOLDER, (), lambda rows: XminHolder(*rows[0]) if rows else None)


def segments() -> Call[list[Segment]]:
    """Return the segments of the log."""
    text: LiteralString = "select slot, current, bytes from bartleby.segments() order by slot"
    return Call(text, (), lambda rows: [Segment(*row) for row in rows])


def on_duty(duty: str) -> Call[str | None]:
    """Return who has a duty (`janitor`, `replays`) at the moment; None if nobody has."""
    return Call("select bartleby.on_duty(%s)", (storable(duty),), lambda rows: rows[0][0])


def session(pid: int) -> Call[tuple[int, str]]:
    """Return the server's process of this session, and the isolation level that its transactions begin with.

    Where that process is `pid`, nothing is compiled from now on: no answer of ours takes long enough. Through a pooler
    the setting would reach somebody else.
    """
    text: LiteralString = (
        "select pg_backend_pid(), current_setting('default_transaction_isolation'),"
        " case pg_backend_pid() when %s then set_config('jit', 'off', false) end"
    )
    return Call(text, (pid,), lambda rows: (rows[0][0], rows[0][1]))


def expiring(within: timedelta) -> Call[list[Expiring]]:
    """Return the queues whose retention will take unresolved letters within this time, the most urgent first."""
    text: LiteralString = "select queue, letters, first_at, what from bartleby.expiring(%s::interval)"
    return Call(text, (within,), every(Expiring))


def group_versions(group_id: int, *, sample: int = 250) -> Call[list[GroupVersion]]:
    """Return from which versions of workers a group came last; looks at `sample` letters of each status."""
    return Call(_MEMBERS + _VERSIONS, (group_id, sample), every(GroupVersion))


def group_replays(group_id: int, *, sample: int = 250) -> Call[list[GroupReplay]]:
    """Return what was tried with a group, the newest first; looks at `sample` letters of each status."""
    return Call(_MEMBERS + _TRIES, (group_id, sample), every(GroupReplay))


def restless_groups() -> Call[list[GroupId]]:
    """Return the groups that have letters which rules want elsewhere, and which were not moved yet."""
    return Call("select id from bartleby.group_heads where restless order by id limit 1000", (), column)


def message_replays(message_id: int) -> Call[list[ReplayItem]]:
    """Return the plans that a message is or was an item of, the oldest first."""
    return Call(_PLANS, (message_id,), every(ReplayItem))


def message_deeds(message_id: int, since: datetime, *, lines: int = 10_000) -> Call[list[AuditLine]]:
    """Return what operators did to the letter of a message, the oldest first; looks at so many lines of the audit."""
    return Call(_DEEDS, (lines, since, message_id), every(AuditLine))
