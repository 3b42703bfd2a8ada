"""Calls of an operator that are about replay plans: select and freeze, look, start, steer, and see what it came to."""

from collections.abc import Mapping, Sequence
from typing import Any, LiteralString

from bartleby.answers import every, first, nothing, scalar
from bartleby.calls import Call
from bartleby.errors import InvalidMessage, InvalidPatch
from bartleby.evidence import ReplayId
from bartleby.message import encode, stated, storable
from bartleby.replays import Advance, Change, Obstacle, Relapse, Replay, ReplayItem, Share

Patch = Sequence[Mapping[str, Any]]

_REPLAY: LiteralString = """
select id, status, actor, reason, filter, target, patch::text, generation, rate, window_size, canary, tolerance,
  items, waiting, replayed, done, already_handled, died_again, gone, skipped, predictions, cause, hash, needs_approval,
  approved_by, approved_until, created_at, started_at, finished_at, request_id
from bartleby.replays"""

_NEWEST: LiteralString = """
where (status = any(%s::text[]) or %s::text[] is null and status <> 'preview')
  and (id < %s::bigint or %s::bigint is null)
order by id desc limit %s::integer"""

_ITEMS: LiteralString = """
select replay_id, message_id, queue, cycle, prediction, problem, state, replayed_at, settled_at
from bartleby.replay_items
where replay_id = %s::bigint and message_id > %s::bigint and (state = any(%s::text[]) or %s::text[] is null)
  and (prediction = any(%s::text[]) or %s::text[] is null)
order by message_id limit %s::integer"""

_CHANGES: LiteralString = """
select m.id, c.before::text, c.after::text, c.problem
from unnest(%s::bigint[]) with ordinality as m (id, place)
cross join lateral bartleby.replay_change(%s::bigint, m.id) c order by m.place"""

# When letters died is asked before they run: later they may have died again, and a plan that runs is looked at often.
_SHARES: LiteralString = """
select s.queue, s.prediction, sum(s.items)::bigint, min(s.first), max(s.last) from (
  select i.queue, i.prediction, count(*) as items, null::timestamptz as first, null::timestamptz as last
  from bartleby.replay_items i where i.replay_id = %s::bigint group by i.queue, i.prediction
  union all
  select i.queue, i.prediction, 0, min(d.dead_at), max(d.dead_at)
  from bartleby.replay_items i join bartleby.dead_letters d on d.message_id = i.message_id
  where i.replay_id = %s::bigint
    and (select r.status in ('draft', 'preview') from bartleby.replays r where r.id = %s::bigint)
  group by i.queue, i.prediction) s
group by s.queue, s.prediction order by 3 desc, s.queue, s.prediction"""

_OBSTACLES: LiteralString = """
select problem, count(*) from bartleby.replay_items
where replay_id = %s::bigint and problem is not null and (state = any(%s::text[]) or %s::text[] is null)
group by problem order by count(*) desc, problem limit %s::integer"""

_RELAPSES: LiteralString = """
select d.group_id, max(d.error_type), max(d.error), count(*)
from bartleby.replay_items i join bartleby.dead_letters d on d.message_id = i.message_id
where i.replay_id = %s::bigint and i.state = 'died_again'
group by d.group_id order by count(*) desc, d.group_id limit %s::integer"""


def plan_replay(
    filter: str | None = None,
    *,
    ids: Sequence[int] | None = None,
    everything: bool = False,
    actor: str,
    reason: str,
    to: str | None = None,
    patch: Patch | None = None,
    generation: int | None = None,
    rate: float | None = None,
    window: int | None = None,
    canary: int | None = None,
    tolerance: float | None = None,
    preview: bool = False,
    request_id: str | None = None,
) -> Call[ReplayId]:
    """Freeze the letters that a filter finds, or these ids, into a draft; return its id. Nothing is replayed yet.

    An empty filter is refused unless `everything` is said. `to` is another queue; `patch` a JSON Patch of every payload
    (the originals are kept). `rate` bounds items a second, `window` how many are alive at once. With `canary`, so many
    go first, and if more than `tolerance` of them (0 to 1) die again, the rest is left alone. A `preview` can be looked
    at for an hour, is not audited, and never runs.
    """
    options = {
        "to": stated(to),
        "patch": patch,
        "generation": generation,
        "rate": rate,
        "window": window,
        "canary": canary,
        "tolerance": tolerance,
        "preview": preview or None,
    }
    parameters = (
        stated(filter),
        *_by(actor, reason),
        None if ids is None else list(ids),
        everything,
        _json({name: value for name, value in options.items() if value is not None}),
        stated(request_id),
    )
    text: LiteralString = "select bartleby.plan_replay(%s, %s, %s, %s::bigint[], %s, %s::jsonb, %s)"
    return Call(text, parameters, scalar)


def drop_preview(replay_id: int) -> Call[None]:
    """Forget a preview before its hour is over."""
    return Call("select bartleby.drop_preview(%s::bigint)", (replay_id,), nothing)


def start_replay(
    replay_id: int,
    *,
    actor: str,
    reason: str,
    hash: str | None = None,
    accept_drift: bool = False,
    request_id: str | None = None,
) -> Call[None]:
    """Let a draft run. With `hash`, only if it is the plan that was looked at."""
    parameters = (replay_id, *_by(actor, reason), stated(hash), accept_drift, stated(request_id))
    return Call("select bartleby.start_replay(%s::bigint, %s, %s, %s, %s, %s)", parameters, nothing)


def pause_replay(replay_id: int, *, actor: str, reason: str, request_id: str | None = None) -> Call[None]:
    """Replay no more items until resumed."""
    parameters = (replay_id, *_by(actor, reason), stated(request_id))
    return Call("select bartleby.pause_replay(%s::bigint, %s, %s, %s)", parameters, nothing)


def resume_replay(replay_id: int, *, actor: str, reason: str, request_id: str | None = None) -> Call[None]:
    """Go on with a paused plan."""
    parameters = (replay_id, *_by(actor, reason), stated(request_id))
    return Call("select bartleby.resume_replay(%s::bigint, %s, %s, %s)", parameters, nothing)


def cancel_replay(replay_id: int, *, actor: str, reason: str, request_id: str | None = None) -> Call[None]:
    """Replay no more items of a plan, ever; what was replayed stays alive."""
    parameters = (replay_id, *_by(actor, reason), stated(request_id))
    return Call("select bartleby.cancel_replay(%s::bigint, %s, %s, %s)", parameters, nothing)


def approve_replay(replay_id: int, hash: str, *, actor: str, reason: str, request_id: str | None = None) -> Call[None]:
    """Approve somebody else's plan as it was looked at."""
    parameters = (replay_id, storable(hash), *_by(actor, reason), stated(request_id))
    return Call("select bartleby.approve_replay(%s::bigint, %s, %s, %s, %s)", parameters, nothing)


def exclude_items(
    replay_id: int, problems: Mapping[int, str], *, actor: str, reason: str, request_id: str | None = None
) -> Call[int]:
    """Take items out of a draft, each with the problem that it has; return how many."""
    items = [{"message_id": each, "problem": storable(problem)} for each, problem in problems.items()]
    parameters = (replay_id, encode(items), *_by(actor, reason), stated(request_id))
    return Call("select bartleby.exclude_items(%s::bigint, %s::jsonb, %s, %s, %s)", parameters, scalar)


def advance_replays(limit: int = 2000, *, replay_id: int | None = None) -> Call[list[Advance]]:
    """Take one step of every running plan, or of one. Whoever calls this runs them; several at once do not hurt."""
    text: LiteralString = (
        "select replay_id, status, moved, wait, note from bartleby.advance_replays(%s::integer, %s::bigint)"
    )
    return Call(text, (limit, replay_id), every(Advance))


def replays(
    *, limit: int = 50, statuses: Sequence[str] | None = None, before_id: int | None = None
) -> Call[list[Replay]]:
    """Return the plans, the newest first; previews only where that status is asked for.

    `before_id` is the last plan of the page before.
    """
    wanted = _texts(statuses)
    return Call(_REPLAY + _NEWEST, (wanted, wanted, before_id, before_id, limit), every(Replay))


def find_replay(replay_id: int) -> Call[Replay | None]:
    """Return one plan and how far it has come."""
    text = _REPLAY + " where id = %s::bigint"
    return Call(text, (replay_id,), first(Replay))


def replay_items(
    replay_id: int,
    *,
    states: Sequence[str] | None = None,
    predictions: Sequence[str] | None = None,
    after: int = 0,
    limit: int = 100,
) -> Call[list[ReplayItem]]:
    """Return items of a plan in the order of their ids; `after` is the last message id of the page before."""
    wanted, predicted = _texts(states), _texts(predictions)
    parameters = (replay_id, after, wanted, wanted, predicted, predicted, limit)
    return Call(_ITEMS, parameters, every(ReplayItem))


def replay_change(replay_id: int, message_id: int) -> Call[Change | None]:
    """Return the payload of an item before and after the patch of its plan."""
    return Call(_CHANGES, ([message_id], replay_id), first(Change))


def replay_changes(replay_id: int, message_ids: Sequence[int]) -> Call[list[Change]]:
    """Return the payloads of several items before and after the patch of their plan."""
    return Call(_CHANGES, (list(message_ids), replay_id), every(Change))


def replay_shares(replay_id: int) -> Call[list[Share]]:
    """Return how many items of a plan have which queue and prediction, the most first; when they died, of a draft."""
    return Call(_SHARES, (replay_id, replay_id, replay_id), every(Share))


def replay_obstacles(replay_id: int, *, states: Sequence[str] | None = None, limit: int = 20) -> Call[list[Obstacle]]:
    """Return why items of a plan are or will be skipped, the most frequent first."""
    wanted = _texts(states)
    return Call(_OBSTACLES, (replay_id, wanted, wanted, limit), every(Obstacle))


def replay_relapses(replay_id: int, *, limit: int = 20) -> Call[list[Relapse]]:
    """Return what items of a plan died of again, by group, the most frequent first."""
    return Call(_RELAPSES, (replay_id, limit), every(Relapse))


def _json(options: dict[str, Any]) -> str:
    try:
        return encode(options)
    except InvalidMessage as error:
        raise InvalidPatch(str(error).replace("invalid message", "invalid patch"), hint=error.hint) from None


def _by(actor: str, reason: str) -> tuple[str, str]:
    return storable(actor), storable(reason)


def _texts(values: Sequence[str] | None) -> list[str] | None:
    return None if values is None else [storable(each) for each in values]
