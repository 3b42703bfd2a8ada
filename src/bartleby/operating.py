"""Calls of an operator that are about queues and their breakers, about messages, and about the audit."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, LiteralString

from bartleby.answers import every, first, nothing, scalar
from bartleby.calls import Call
from bartleby.errors import InvalidMessage, InvalidPolicy
from bartleby.evidence import Attempt, AuditLine, AuditProblem
from bartleby.message import LivingMessage, Queue, encode, stated, storable

_QUEUES: LiteralString = """
select name, ready, leased, deferred, dead, oldest_ready_at, next_due_at, paused, breaker, breaker_since, breaker_cause,
  next_probe_at, paused_until
from bartleby.queues order by name"""

_ATTEMPTS: LiteralString = """
select message_id, queue, cycle, attempt, outcome, verdict, rule, handler, error_type, error, traceback, fingerprint,
  worker, worker_version, lease_id, failed_at, retry_at
from bartleby.attempts where message_id = %s::bigint order by failed_at, lease_id"""

_MESSAGE: LiteralString = """
select message_id, queue, state, position, attempts, crashes, cycle, solo, max_attempts, generation, key, headers::text,
  payload::text, created_at, run_at, worker, leased_until
from bartleby.messages where message_id = %s::bigint limit 1"""

_AUDIT: LiteralString = """
select id, at, actor, db_user, action, subject, reason, request_id, before, after, hash
from bartleby.audit_log
where (id < %s::bigint or %s::bigint is null) and (actor = %s::text or %s::text is null)
  and (action = %s::text or %s::text is null) and (request_id = %s::text or %s::text is null)
order by id desc limit %s::integer"""


def create_queue(
    queue: str,
    policy: Mapping[str, Any] | None = None,
    *,
    actor: str | None = None,
    reason: str | None = None,
    request_id: str | None = None,
) -> Call[None]:
    """Create a queue, or change the policy of the one there is."""
    parameters = (storable(queue), _policy(policy or {}), *_by(actor, reason, request_id))
    return Call("select bartleby.create_queue(%s, %s::jsonb, %s, %s, %s)", parameters, nothing)


def attach_pgmq(
    queue: str,
    policy: Mapping[str, Any] | None = None,
    *,
    sibling: bool = True,
    actor: str | None = None,
    reason: str | None = None,
    request_id: str | None = None,
) -> Call[None]:
    """Give a queue of pgmq our dead letters, or change its policy; its messages stay where they are."""
    parameters = (storable(queue), _policy(policy or {}), sibling, *_by(actor, reason, request_id))
    return Call("select bartleby.pgmq_attach(%s, %s::jsonb, %s, %s, %s, %s)", parameters, nothing)


def configure_queue(
    queue: str,
    policy: Mapping[str, Any],
    *,
    actor: str | None = None,
    reason: str | None = None,
    request_id: str | None = None,
) -> Call[None]:
    """Change the policy keys that are given."""
    parameters = (storable(queue), _policy(policy), *_by(actor, reason, request_id))
    return Call("select bartleby.configure_queue(%s, %s::jsonb, %s, %s, %s)", parameters, nothing)


def drop_queue(
    queue: str,
    *,
    force: bool = False,
    actor: str | None = None,
    reason: str | None = None,
    request_id: str | None = None,
) -> Call[None]:
    """Remove an empty queue, or with `force` any queue."""
    parameters = (storable(queue), force, *_by(actor, reason, request_id))
    return Call("select bartleby.drop_queue(%s, %s, %s, %s, %s)", parameters, nothing)


def pause_queue(
    queue: str,
    *,
    actor: str | None = None,
    reason: str | None = None,
    request_id: str | None = None,
    until: datetime | None = None,
) -> Call[None]:
    """Hand out nothing until then, or until resumed; sending goes on. Pausing again replaces the end."""
    parameters = (storable(queue), *_by(actor, reason, request_id), until)
    return Call("select bartleby.pause_queue(%s, %s, %s, %s, %s::timestamptz)", parameters, nothing)


def resume_queue(
    queue: str, *, actor: str | None = None, reason: str | None = None, request_id: str | None = None
) -> Call[None]:
    """Hand out messages again."""
    parameters = (storable(queue), *_by(actor, reason, request_id))
    return Call("select bartleby.resume_queue(%s, %s, %s, %s)", parameters, nothing)


def close_breaker(queue: str, *, actor: str, reason: str, request_id: str | None = None) -> Call[bool]:
    """Hand out messages again whatever the breaker found; return whether it was open or forced."""
    parameters = (storable(queue), *_by(actor, reason, request_id))
    return Call("select bartleby.close_breaker(%s, %s, %s, %s)", parameters, scalar)


def force_breaker(queue: str, *, actor: str, reason: str, request_id: str | None = None) -> Call[bool]:
    """Hand out nothing, not even probes, until the breaker is closed; return whether it was not forced before."""
    parameters = (storable(queue), *_by(actor, reason, request_id))
    return Call("select bartleby.force_breaker(%s, %s, %s, %s)", parameters, scalar)


def queues() -> Call[list[Queue]]:
    """Return every queue, how many of its messages are where, and its breaker."""
    return Call(_QUEUES, (), every(Queue))


def attempts(message_id: int) -> Call[list[Attempt]]:
    """Return what the ledger says about a message, oldest first."""
    return Call(_ATTEMPTS, (message_id,), every(Attempt))


def find_message(message_id: int) -> Call[LivingMessage | None]:
    """Return a message that is neither done nor dead, and where it is."""
    return Call(_MESSAGE, (message_id,), first(LivingMessage))


def last_message_id() -> Call[int]:
    """Return the highest id that a message was ever given; 0 if none was."""
    return Call("select bartleby.last_message_id()", (), scalar)


def audit_log(
    *,
    limit: int = 50,
    before_id: int | None = None,
    actor: str | None = None,
    action: str | None = None,
    request_id: str | None = None,
) -> Call[list[AuditLine]]:
    """Return what operators did, the newest first; `before_id` is the last line of the page before."""
    wanted = [stated(each) for each in (actor, action, request_id)]
    parameters = (before_id, before_id, *(each for one in wanted for each in (one, one)), limit)
    return Call(_AUDIT, parameters, every(AuditLine))


def verify_audit(anchor: str | None = None) -> Call[list[AuditProblem]]:
    """Return where the audit was tampered with; an `anchor` of before also finds a tail that was cut off."""
    text: LiteralString = "select id, problem from bartleby.verify_audit(%s)"
    return Call(text, (stated(anchor),), every(AuditProblem))


def audit_anchor() -> Call[str]:
    """Return where the audit ends now, to be kept outside of the database and given to `verify_audit`."""
    return Call("select bartleby.audit_anchor()", (), scalar)


def _by(actor: str | None, reason: str | None, request_id: str | None) -> tuple[str | None, ...]:
    return tuple(stated(each) for each in (actor, reason, request_id))


def _policy(policy: Mapping[str, Any]) -> str:
    try:
        return encode(policy)
    except InvalidMessage as error:
        raise InvalidPolicy(str(error).replace("message", "policy"), hint=error.hint) from None
