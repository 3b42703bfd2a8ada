"""Calls that are about events and sinks: set up, steer, and what the relay and the reconciler need."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, LiteralString

from bartleby.answers import Row, every, nothing, scalar
from bartleby.calls import Call
from bartleby.events import Emitted, Sink, SinkSettings
from bartleby.message import decode, encode, stated, storable

_SINKS: LiteralString = """
select name, kind, options, types, queues, attempts, delay, timeout, include_payload, link, state, waiting,
  oldest_waiting_at, refused, published, published_at, failures, degraded_at, error, error_at, created_at
from bartleby.sinks order by name"""


def sinks() -> Call[list[Sink]]:
    """Return all sinks and how each does, without secrets."""
    return Call(_SINKS, (), every(Sink))


def put_sink(
    name: str, kind: str, settings: Mapping[str, Any], *, actor: str, reason: str, request_id: str | None = None
) -> Call[None]:
    """Add a sink, or change what is named: options, types, queues, attempts, delay, timeout, include_payload, link."""
    text: LiteralString = "select bartleby.put_sink(%s, %s, %s::jsonb, %s, %s, %s)"
    values = (storable(name), storable(kind), encode(dict(settings)), *_said(actor, reason, request_id))
    return Call(text, values, nothing)


def pause_sink(name: str, *, actor: str, reason: str, request_id: str | None = None) -> Call[None]:
    """Send nothing to a sink for now; events wait for it."""
    values = (storable(name), *_said(actor, reason, request_id))
    return Call("select bartleby.pause_sink(%s, %s, %s, %s)", values, nothing)


def resume_sink(name: str, *, actor: str, reason: str, request_id: str | None = None) -> Call[None]:
    """Go on with a sink that was paused."""
    values = (storable(name), *_said(actor, reason, request_id))
    return Call("select bartleby.resume_sink(%s, %s, %s, %s)", values, nothing)


def remove_sink(
    name: str, *, actor: str, reason: str, force: bool = False, request_id: str | None = None
) -> Call[None]:
    """Forget a sink for which nothing waits, or with `force` any."""
    text: LiteralString = """
        select bartleby.remove_sink(%s, %s, %s, p_request_id => %s, p_force => %s::boolean)"""
    return Call(text, (storable(name), *_said(actor, reason, request_id), force), nothing)


def sink_settings() -> Call[list[SinkSettings]]:
    """Return all sinks with their secrets: for the relay."""
    text: LiteralString = """
        select name, kind, options, attempts, delay, timeout, link, queue from bartleby.sink_settings()"""
    return Call(text, (), every(SinkSettings))


def cloud_events(sink: str, references: Sequence[Mapping[str, Any]]) -> Call[list[dict[str, Any]]]:
    """Return the CloudEvents that references {"event", "ordinals"} stand for, in their order."""
    text: LiteralString = "select document::text from bartleby.cloud_events(%s, %s::jsonb)"
    return Call(text, (storable(sink), encode([dict(each) for each in references])), _documents)


def report_sink(sink: str, *, published: int = 0, failures: int = 0, error: str | None = None) -> Call[str | None]:
    """Tell how a sink does; return "degraded" or "recovered" if that is new."""
    text: LiteralString = "select bartleby.report_sink(%s, %s::bigint, %s::bigint, %s)"
    return Call(text, (storable(sink), published, failures, None if error is None else storable(error)), scalar)


def refuse_events(sink: str, refusals: Sequence[Mapping[str, Any]]) -> Call[int]:
    """Put events aside that a sink will never take: {"id", "error_type", "error", "worker"} each."""
    text: LiteralString = "select bartleby.refuse_events(%s, %s::jsonb)"
    return Call(text, (storable(sink), encode([dict(each) for each in refusals])), scalar)


def emitted(sink: str, since: datetime, until: datetime, *, after: int = 0, limit: int = 100) -> Call[list[Emitted]]:
    """Return the events of a time that a sink should have, of at most `limit` rows after one."""
    text: LiteralString = """
        select event_id, ordinal, id, created_at
        from bartleby.emitted(%s, %s::timestamptz, %s::timestamptz, %s::bigint, %s::integer)"""
    return Call(text, (storable(sink), since, until, after, limit), every(Emitted))


def emit_again(
    sink: str,
    references: Sequence[Mapping[str, Any]],
    *,
    actor: str,
    reason: str,
    request_id: str | None = None,
) -> Call[int]:
    """Send events to a sink once more, by references {"event", "ordinals": [] or all}."""
    text: LiteralString = "select bartleby.emit_again(%s, %s::jsonb, %s, %s, %s)"
    values = (storable(sink), encode([dict(each) for each in references]), *_said(actor, reason, request_id))
    return Call(text, values, scalar)


def _said(actor: str, reason: str, request_id: str | None) -> tuple[str, str, str | None]:
    return storable(actor), storable(reason), stated(request_id)


def _documents(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [decode(row[0]) for row in rows]
