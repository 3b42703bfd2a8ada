"""Calls of an operator: queues and their breakers, dead letters and the evidence, replay."""

from collections.abc import Mapping, Sequence
from typing import Any, LiteralString

from bartleby.calls import Call
from bartleby.errors import InvalidMessage, InvalidPolicy
from bartleby.message import (
    Attempt,
    DeadLetter,
    Group,
    LivingMessage,
    MessageId,
    Queue,
    encode,
    storable,
)

_QUEUES: LiteralString = """
select name, ready, leased, deferred, dead, oldest_ready_at, next_due_at, paused, breaker, breaker_since, breaker_cause,
  next_probe_at
from bartleby.queues order by name"""

_DEAD_LETTER: LiteralString = """
select message_id, queue, status, reason, error_type, error, traceback, attempts, crashes, cycle, key, payload::text,
  worker, created_at, first_failed_at, dead_at, fingerprint, worker_version, generation, headers::text, replayed_at,
  replayed_by, replay_reason, resolved_at, failure_history
from bartleby.dead_letters"""

_NEWEST: LiteralString = """
where status = 'dead' and (queue = %s or %s::text is null) order by dead_at desc, message_id desc limit %s::integer"""

_ATTEMPTS: LiteralString = """
select message_id, queue, cycle, attempt, outcome, verdict, rule, error_type, error, traceback, fingerprint, worker,
  worker_version, lease_id, failed_at, retry_at
from bartleby.attempts where message_id = %s::bigint order by failed_at, lease_id"""

_MESSAGE: LiteralString = """
select message_id, queue, state, position, attempts, crashes, cycle, solo, max_attempts, generation, key, headers::text,
  payload::text, created_at, run_at, worker, leased_until
from bartleby.messages where message_id = %s::bigint limit 1"""

_GROUPS: LiteralString = """
select fingerprint, queue, error_type, error, dead, first_dead_at, last_dead_at
from bartleby.groups where queue = %s or %s::text is null
order by dead desc, last_dead_at desc, queue, fingerprint limit %s::integer"""


def create_queue(queue: str, policy: Mapping[str, Any] | None = None) -> Call[None]:
    """Create a queue, or change the policy of the one there is."""
    return Call("select bartleby.create_queue(%s, %s::jsonb)", (storable(queue), _policy(policy or {})), _nothing)


def configure_queue(queue: str, policy: Mapping[str, Any]) -> Call[None]:
    """Change the policy keys that are given."""
    return Call("select bartleby.configure_queue(%s, %s::jsonb)", (storable(queue), _policy(policy)), _nothing)


def drop_queue(queue: str, *, force: bool = False) -> Call[None]:
    """Remove an empty queue, or with `force` any queue."""
    return Call("select bartleby.drop_queue(%s, %s)", (storable(queue), force), _nothing)


def pause_queue(queue: str) -> Call[None]:
    """Hand out nothing until resumed; sending goes on."""
    return Call("select bartleby.pause_queue(%s)", (storable(queue),), _nothing)


def resume_queue(queue: str) -> Call[None]:
    """Hand out messages again."""
    return Call("select bartleby.resume_queue(%s)", (storable(queue),), _nothing)


def close_breaker(queue: str, *, actor: str, reason: str) -> Call[bool]:
    """Hand out messages again whatever the breaker found; return whether it was open or forced."""
    parameters = (storable(queue), storable(actor), storable(reason))
    return Call("select bartleby.close_breaker(%s, %s, %s)", parameters, _flag)


def force_breaker(queue: str, *, actor: str, reason: str) -> Call[bool]:
    """Hand out nothing, not even probes, until the breaker is closed; return whether it was not forced before."""
    parameters = (storable(queue), storable(actor), storable(reason))
    return Call("select bartleby.force_breaker(%s, %s, %s)", parameters, _flag)


def queues() -> Call[list[Queue]]:
    """Return every queue, how many of its messages are where, and its breaker."""
    return Call(_QUEUES, (), lambda rows: [Queue(*row) for row in rows])


def dead_letters(queue: str | None = None, *, limit: int = 100) -> Call[list[DeadLetter]]:
    """Return the newest dead letters, of one queue or of all."""
    queue = None if queue is None else storable(queue)
    return Call(_DEAD_LETTER + _NEWEST, (queue, queue, limit), lambda rows: [DeadLetter(*row) for row in rows])


def dead_letter(message_id: int) -> Call[DeadLetter | None]:
    """Return the dead letter of a message, be it dead, replayed or resolved."""
    text = _DEAD_LETTER + " where message_id = %s::bigint"
    return Call(text, (message_id,), lambda rows: DeadLetter(*rows[0]) if rows else None)


def groups(queue: str | None = None, *, limit: int = 100) -> Call[list[Group]]:
    """Return what the dead letters died of, the largest groups first, of one queue or of all."""
    queue = None if queue is None else storable(queue)
    return Call(_GROUPS, (queue, queue, limit), lambda rows: [Group(*row) for row in rows])


def attempts(message_id: int) -> Call[list[Attempt]]:
    """Return what the ledger says about a message, oldest first."""
    return Call(_ATTEMPTS, (message_id,), lambda rows: [Attempt(*row) for row in rows])


def find_message(message_id: int) -> Call[LivingMessage | None]:
    """Return a message that is neither done nor dead, and where it is."""
    return Call(_MESSAGE, (message_id,), lambda rows: LivingMessage(*rows[0]) if rows else None)


def last_message_id() -> Call[int]:
    """Return the highest id that a message was ever given; 0 if none was."""
    return Call("select bartleby.last_message_id()", (), lambda rows: int(rows[0][0]))


def replay(
    message_ids: Sequence[int], *, actor: str, reason: str, generation: int | None = None
) -> Call[list[MessageId]]:
    """Let dead messages live again under their own ids, if wanted in a new generation; return those that were dead."""
    parameters = (list(message_ids), storable(actor), storable(reason), generation)
    text: LiteralString = "select bartleby.replay(%s::bigint[], %s, %s, %s::bigint)"
    return Call(text, parameters, lambda rows: [row[0] for row in rows])


def _nothing(_rows: Sequence[tuple[Any, ...]]) -> None:
    return None


def _flag(rows: Sequence[tuple[Any, ...]]) -> bool:
    return bool(rows[0][0])


def _policy(policy: Mapping[str, Any]) -> str:
    try:
        return encode(policy)
    except InvalidMessage as error:
        raise InvalidPolicy(str(error).replace("message", "policy"), hint=error.hint) from None
