"""Every operation as a value: the SQL, its parameters, and how to read the answer.

These are the calls of senders and workers. No other module names SQL, but for those of operators (operating.py: queues
and the audit, triage.py: dead letters, grouping.py: their groups, plans.py: replay plans), inspection.py (the server
and the schema) and schema.py, which runs the scripts.

A `Call` is run by whoever has a connection: `Client`, `AsyncClient`, or a caller's own transaction. Claim, ack and
extend need not wait for the disk: what a crash of the server can undo there is a redelivery, never a loss. So when
they run in a transaction of their own, `relaxed` runs instead of `text`; inside a caller's transaction it would
make the whole of that asynchronous.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Generic, LiteralString, TypedDict, TypeVar

from bartleby.answers import Row, column, every, nothing, scalar
from bartleby.message import (
    Decision,
    Failure,
    Lease,
    LeaseId,
    Message,
    MessageId,
    Outlook,
    Pruned,
    Reaped,
    checked_key,
    encode,
    stated,
    storable,
)
from bartleby.plain import plain

T = TypeVar("T")
Duration = float | timedelta

_REPORTED = tuple(field.name for field in fields(Failure))

_RELAXED: LiteralString = " from (select set_config('synchronous_commit', 'off', true) offset 0) relaxed"

_CLAIM: LiteralString = """
select message_id, lease_id, position, attempt, payload::text, headers::text, key, generation, created_at, solo,
  start_first
from bartleby.claim(%s, %s, %s::integer, make_interval(secs => %s::float8), %s::boolean, %s::integer, %s::boolean,
  %s::bigint[])"""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One statement, its parameters, and the parser of its rows."""

    text: LiteralString
    parameters: tuple[object, ...]
    parse: Callable[[Sequence[Row]], T]
    relaxed: LiteralString | None = None


class SendOptions(TypedDict, total=False):
    """What may be said of a message beside its payload."""

    headers: Mapping[str, Any] | None
    key: str | None
    delay: Duration | None
    max_attempts: int | None
    generation: int | None
    unique_for: Duration | None


def send(
    queue: str,
    payload: object,
    *,
    headers: Mapping[str, Any] | None = None,
    key: str | None = None,
    delay: Duration | None = None,
    max_attempts: int | None = None,
    generation: int | None = None,
    unique_for: Duration | None = None,
) -> Call[MessageId]:
    """Send one message; return its id.

    With `unique_for`, a second send of the same key within that time sends nothing and returns the id of the
    first.
    """
    fields = (
        None if key is None else checked_key(key),
        _seconds(delay),
        max_attempts,
        generation,
        _seconds(unique_for),
    )
    encoded = (
        encode(plain(payload)),
        None if headers is None else encode(_plain(headers)),
    )
    return Call(
        "select bartleby.send(%s, %s::jsonb, %s::jsonb, %s, make_interval(secs => %s::float8),"
        " %s::integer, %s::bigint, make_interval(secs => %s::float8))",
        (storable(queue), *encoded, *fields),
        scalar,
    )


def send_many(queue: str, messages: Sequence[Mapping[str, Any]]) -> Call[list[MessageId]]:
    """Send many messages at once; return their ids in order.

    Each is a dictionary with `payload`, and if wanted the other names that `send` knows. If one of them is bad,
    the error names its index and nothing is sent.
    """
    texts = [encode(_seconds_of(message), index=index) for index, message in enumerate(messages)]
    parameters = (storable(queue), f"[{','.join(texts)}]")
    return Call("select bartleby.send_many(%s, %s::jsonb)", parameters, column)


def claim(
    queue: str,
    worker: str,
    *,
    limit: int = 1,
    lease: Duration | None = None,
    confirm: bool = False,
    max_attempts: int | None = None,
    alone: bool = True,
    beside: Sequence[int] = (),
) -> Call[Lease | None]:
    """Lease up to `limit` messages to a worker; None if there is nothing.

    With `confirm`, a message that is `solo` or `start_first` counts as begun only after `start`. `max_attempts` is the
    limit of the handler, which goes before that of the queue. A single message is charged if its lease
    lapses, unless the process had more to do: it is not `alone`, or no longer, since this claim is made `beside` it.
    """

    def parse(rows: Sequence[Row]) -> Lease | None:
        if not rows:
            return None
        return Lease(LeaseId(rows[0][1]), tuple(Message(row[0], queue, *row[1:]) for row in rows))

    relaxed = _CLAIM.replace("\nfrom", "\n" + _RELAXED + ",")
    wanted = (limit, _seconds(lease), confirm, max_attempts, alone, list(beside) or None)
    return Call(_CLAIM, (storable(queue), storable(worker), *wanted), parse, relaxed=relaxed)


def start(lease_id: int, positions: Sequence[int] | None = None) -> Call[None]:
    """Say that these positions of a lease, or all that are left, begin now; LeaseLost if they are not held any more.

    If the lease lapses from here on, they are charged, also if the server crashes: it waits for the disk.
    """
    return Call("select bartleby.start(%s::bigint, %s::bigint[])", (lease_id, _list(positions)), nothing)


def ack(lease_id: int, positions: Sequence[int] | None = None) -> Call[int]:
    """Settle these positions of a lease, or all that are left, as done; return how many."""
    text: LiteralString = "select bartleby.ack(%s::bigint, %s::bigint[])"
    return Call(text, (lease_id, _list(positions)), scalar, relaxed=text + _RELAXED)


def extend(lease_ids: Sequence[int], lease: Duration) -> Call[None]:
    """Let leases lapse `lease` from now on. If one is lost, nothing changes and LeaseLost names it."""
    text: LiteralString = "select bartleby.extend(%s::bigint[], make_interval(secs => %s::float8))"
    return Call(text, (list(lease_ids), _seconds(lease)), nothing, relaxed=text + _RELAXED)


def fail(lease_id: int, failures: Sequence[Failure]) -> Call[list[Decision]]:
    """Report failed attempts of a lease; each message is retried later or dies, as the policy says."""
    reports = [_reported(failure) for failure in failures]
    return Call(
        "select position, message_id, verdict, retry_at from bartleby.fail(%s::bigint, %s::jsonb)",
        (lease_id, encode(reports)),
        every(Decision),
    )


def reject(lease_id: int, position: int, reason: str, description: str | None = None) -> Call[None]:
    """Make a message a dead letter now; `reason` is delivery_error or unacceptable."""
    return Call(
        "select bartleby.reject(%s::bigint, %s::bigint, %s, %s)",
        (lease_id, position, storable(reason), stated(description)),
        nothing,
    )


def release(
    lease_id: int, positions: Sequence[int] | None = None, *, delay: Duration = 0, ran: bool = False
) -> Call[int]:
    """Give these positions of a lease back, or all that are left, at no charge; return how many.

    `ran` says that they ran to their end and did no harm: what had to run alone need not any more.
    """
    text: LiteralString = "select bartleby.release(%s::bigint, %s::bigint[], make_interval(secs => %s::float8), %s)"
    return Call(text, (lease_id, _list(positions), _seconds(delay), ran), scalar)


def idle(queue: str, how_long: Duration) -> Call[timedelta]:
    """Say that a worker found nothing; return how long it may sleep unless it is notified."""
    text: LiteralString = "select bartleby.idle(%s, make_interval(secs => %s::float8))"
    return Call(text, (storable(queue), _seconds(how_long)), scalar)


def channel(queue: str) -> Call[str]:
    """Return the channel on which an idle worker of a queue listens."""
    return Call("select bartleby.channel(%s)", (storable(queue),), scalar)


def reap() -> Call[list[Reaped]]:
    """Take back lapsed leases, and end pauses that are over. To be called every few seconds."""
    text: LiteralString = "select queue, lease_id, worker, messages, outcome from bartleby.reap()"
    return Call(text, (), every(Reaped))


def turn() -> Call[str]:
    """Turn the ring of log segments if it is time; return what was done."""
    return Call("select bartleby.turn()", (), scalar)


def lease_length(queue: str) -> Call[timedelta]:
    """Return how long a lease of this queue lasts unless the claim says otherwise."""
    return Call("select bartleby.lease_length(%s)", (storable(queue),), scalar)


def outlook(queue: str, generation: int | None = None) -> Call[Outlook]:
    """Return what a queue that has nothing to hand out is waiting for.

    With `generation`, newer messages do not count.
    """
    text: LiteralString = "select due_in, breaker, paused from bartleby.outlook(%s, %s::bigint)"
    return Call(text, (storable(queue), generation), lambda rows: Outlook(*rows[0]))


def open_breaker(queue: str, cause: str, over: Duration) -> Call[bool]:
    """Say that the failures of a queue are systemic; return whether this opened its breaker.

    It does not if the breaker was closed within `over`, the time that the evidence spans: then it proves nothing.
    """
    text: LiteralString = "select bartleby.open_breaker(%s, %s, make_interval(secs => %s::float8))"
    return Call(text, (storable(queue), storable(cause), _seconds(over)), scalar)


def mark_handled(queue: str, consumer: str, key: str) -> Call[bool]:
    """Write down that a consumer has handled this; return whether it is the first time.

    To be called in the transaction of the effect: of two at once, the second waits for the first.
    """
    parameters = (storable(queue), storable(consumer), checked_key(key))
    return Call("select bartleby.mark_handled(%s, %s, %s)", parameters, scalar)


def handled_keys(consumer: str, keys: Sequence[str]) -> Call[set[str]]:
    """Return which of these a consumer has handled before."""
    parameters = (storable(consumer), [storable(key) for key in keys])
    return Call("select bartleby.handled_keys(%s, %s::text[])", parameters, lambda rows: {row[0] for row in rows})


def take_duty(duty: str, holder: str, how_long: Duration) -> Call[bool]:
    """Take a duty for so long if it is free, lapsed or already yours; return whether it is yours. Never waits."""
    text: LiteralString = "select bartleby.take_duty(%s, %s, make_interval(secs => %s::float8))"
    return Call(text, (storable(duty), storable(holder), _seconds(how_long)), scalar)


def leave_duty(duty: str, holder: str) -> Call[None]:
    """Leave a duty to others before its time."""
    return Call("select bartleby.leave_duty(%s, %s)", (storable(duty), storable(holder)), nothing)


def prune(limit: int = 10_000) -> Call[list[Pruned]]:
    """Forget what is old; return what, and how many. At most `limit` of a kind at once."""
    text: LiteralString = "select what, rows from bartleby.prune(%s::integer)"
    return Call(text, (limit,), every(Pruned))


def watch() -> Call[int]:
    """Find out what was done to messages of pgmq without us; return to how many."""
    return Call("select bartleby.watch()", (), scalar)


def _reported(failure: Failure) -> dict[str, Any]:
    """Return a failure as `fail` sends it."""
    known = {name: value for name in _REPORTED if (value := getattr(failure, name)) is not None}
    return {name: storable(value) if isinstance(value, str) else value for name, value in known.items()}


def _list(positions: Sequence[int] | None) -> list[int] | None:
    return None if positions is None else list(positions)


def _seconds(duration: Duration | None) -> float | None:
    return duration.total_seconds() if isinstance(duration, timedelta) else duration


def _plain(value: object) -> object:
    # A mapping of any kind is as good as a dictionary; what is none is refused by its name in SQL.
    return dict(value) if isinstance(value, Mapping) else value


def _seconds_of(message: object) -> object:
    if not isinstance(message, Mapping):
        return message
    return {name: _seconds(value) if isinstance(value, timedelta) else plain(value) for name, value in message.items()}
