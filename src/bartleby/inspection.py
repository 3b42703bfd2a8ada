"""Calls that look at the server and at the schema in it, for doctor, upgrades and connections."""

from dataclasses import dataclass
from datetime import datetime
from typing import LiteralString

from bartleby.calls import Call

_FACTS: LiteralString = """
select current_setting('server_version'), current_setting('fsync') = 'on', current_setting('full_page_writes') = 'on',
  current_setting('synchronous_commit'), current_setting('synchronous_standby_names'), pg_is_in_recovery(),
  pg_backend_pid(), pg_notification_queue_usage(), (select setting from pg_settings where name = 'data_directory')"""

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


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the server says about itself."""

    version: str
    fsync: bool
    full_page_writes: bool
    synchronous_commit: str
    synchronous_standby_names: str
    in_recovery: bool
    backend_pid: int
    notify_queue_usage: float
    data_directory: str | None


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


def version() -> Call[str]:
    """Return the version of the schema in the database."""
    return Call("select bartleby.version()", (), lambda rows: str(rows[0][0]))


def drift() -> Call[list[tuple[str, str]]]:
    """Return what differs from what was installed: object, and changed, missing or added."""
    return Call("select object, change from bartleby.drift()", (), lambda rows: [(row[0], row[1]) for row in rows])


def facts() -> Call[ServerFacts]:
    """Return what the server says about durability and itself."""
    return Call(_FACTS, (), lambda rows: ServerFacts(*rows[0]))


def oldest_xmin_holder() -> Call[XminHolder | None]:
    """Return what holds back vacuum the most, if anything does."""
    return Call(_XMIN_HOLDER, (), lambda rows: XminHolder(*rows[0]) if rows else None)


def segments() -> Call[list[Segment]]:
    """Return the segments of the log."""
    text: LiteralString = "select slot, current, bytes from bartleby.segments() order by slot"
    return Call(text, (), lambda rows: [Segment(*row) for row in rows])


def session() -> Call[tuple[int, str]]:
    """Return the server's process of this session, and the isolation level that its transactions begin with."""
    text: LiteralString = "select pg_backend_pid(), current_setting('default_transaction_isolation')"
    return Call(text, (), lambda rows: (rows[0][0], rows[0][1]))
