"""Calls of an operator that are about groups of dead letters: their life, and the rules that make them."""

from collections.abc import Sequence
from datetime import datetime
from typing import LiteralString

from bartleby.answers import every, first, nothing, scalar
from bartleby.calls import Call
from bartleby.evidence import Group, GroupId, GroupRule, SharedValue
from bartleby.message import encode, stated, storable
from bartleby.plain import plain

_GROUP: LiteralString = """
select id, queue, fingerprint, error_type, title, error, state, owner, note, link, muted_until, resolved_version, dead,
  replayed, resolved, discarded, deaths_last_hour, deaths_by_hour, first_dead_at, last_dead_at, state_at, state_by,
  regressions, versions, error_types, restless
from bartleby.groups"""

# Chosen by what is quickly said of all of them: when letters of a group died is asked for each of those that are shown.
_LARGEST: LiteralString = """
where id = any (array(
  select h.id from bartleby.group_heads h
  where (h.queue = %s::text or %s::text is null) and (h.state = any(%s::text[]) or %s::text[] is null)
    and (h.dead > 0 or %s) and ((h.dead, h.id) < (%s::bigint, %s::bigint) or %s::bigint is null)
  order by h.dead desc, h.id desc limit %s::integer))
order by dead desc, id desc"""

_RULES: LiteralString = """
select id, queue, fingerprint, error_type, from_group, path, value::text, to_group, created_by, created_at
from bartleby.group_rules where queue = %s::text or %s::text is null order by queue, id"""

_SHARED: LiteralString = """
select path, value::text, letters, "of" from bartleby.shared_values(%s::bigint, %s::integer)"""


def groups(
    queue: str | None = None,
    *,
    limit: int = 100,
    states: Sequence[str] | None = None,
    everything: bool = False,
    after: tuple[int, int] | None = None,
) -> Call[list[Group]]:
    """Return what the letters died of, the groups with most dead letters first, of one queue or of all.

    Those without dead letters are left out, unless `states` or `everything` asks for them. `after` is what the last
    group of the page before had: its dead letters and its id.
    """
    dead, last = after or (None, None)
    queue = stated(queue)
    wanted = None if states is None else [storable(state) for state in states]
    parameters = (queue, queue, wanted, wanted, everything or states is not None, dead, last, last, limit)
    return Call(_GROUP + _LARGEST, parameters, every(Group))


def group(group_id: int) -> Call[Group | None]:
    """Return one group."""
    text = _GROUP + " where id = %s::bigint"
    return Call(text, (group_id,), first(Group))


def shared_values(group_id: int, *, sample: int = 1000) -> Call[list[SharedValue]]:
    """Return which values the newest letters of a group share at which paths; looks at `sample` of them."""
    return Call(_SHARED, (group_id, sample), every(SharedValue))


def acknowledge_group(
    group_id: int,
    *,
    actor: str,
    reason: str,
    owner: str | None = None,
    link: str | None = None,
    request_id: str | None = None,
) -> Call[None]:
    """Say that somebody is at it; the reason becomes the note of the group."""
    parameters = (group_id, storable(actor), storable(reason), stated(owner), stated(link), stated(request_id))
    return Call("select bartleby.acknowledge_group(%s::bigint, %s, %s, %s, %s, %s)", parameters, nothing)


def mute_group(group_id: int, until: datetime, *, actor: str, reason: str, request_id: str | None = None) -> Call[None]:
    """Do not be told of a group until then; its letters are kept as ever."""
    parameters = (group_id, until, storable(actor), storable(reason), stated(request_id))
    return Call("select bartleby.mute_group(%s::bigint, %s::timestamptz, %s, %s, %s)", parameters, nothing)


def resolve_group(
    group_id: int, *, actor: str, reason: str, version: str | None = None, request_id: str | None = None
) -> Call[None]:
    """Say that the bug is fixed, if wanted in which version: seen from there on again, the group has regressed."""
    parameters = (group_id, storable(actor), storable(reason), stated(version), stated(request_id))
    return Call("select bartleby.resolve_group(%s::bigint, %s, %s, %s, %s)", parameters, nothing)


def reopen_group(group_id: int, *, actor: str, reason: str, request_id: str | None = None) -> Call[None]:
    """Make a group open again, whatever was said of it."""
    parameters = (group_id, storable(actor), storable(reason), stated(request_id))
    return Call("select bartleby.reopen_group(%s::bigint, %s, %s, %s)", parameters, nothing)


def merge_groups(
    group_ids: Sequence[int], *, into: int, actor: str, reason: str, request_id: str | None = None
) -> Call[int]:
    """Make several groups one, now and for what comes; return how many letters moved."""
    parameters = (list(group_ids), into, storable(actor), storable(reason), stated(request_id))
    return Call("select bartleby.merge_groups(%s::bigint[], %s::bigint, %s, %s, %s)", parameters, scalar)


def split_group(
    group_id: int,
    path: str,
    value: object,
    *,
    actor: str,
    reason: str,
    title: str | None = None,
    request_id: str | None = None,
) -> Call[GroupId]:
    """Give letters with this value at this path (`payload.customer.country`) their own group; return its id."""
    says = (storable(actor), storable(reason), stated(title), stated(request_id))
    parameters = (group_id, storable(path), encode(plain(value)), *says)
    return Call("select bartleby.split_group(%s::bigint, %s, %s::jsonb, %s, %s, %s, %s)", parameters, scalar)


def group_rules(queue: str | None = None) -> Call[list[GroupRule]]:
    """Return the rules that merges and splits have made, of one queue or of all."""
    queue = stated(queue)
    return Call(_RULES, (queue, queue), every(GroupRule))


def remove_rule(rule_id: int, *, actor: str, reason: str, request_id: str | None = None) -> Call[None]:
    """Take back a merge or a split: its letters return to where they would be without it."""
    parameters = (rule_id, storable(actor), storable(reason), stated(request_id))
    return Call("select bartleby.remove_rule(%s::bigint, %s, %s, %s)", parameters, nothing)


def regroup(limit: int = 10_000) -> Call[int]:
    """Move letters to the groups that changed rules say; return how many. To be called by upkeep."""
    return Call("select bartleby.regroup(%s::integer)", (limit,), scalar)


def tally(limit: int = 10_000) -> Call[int]:
    """Add up the counts of letters; return how many changes there were. To be called by upkeep."""
    return Call("select bartleby.tally(%s::integer)", (limit,), scalar)
