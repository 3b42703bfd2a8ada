"""Calls that are about workers themselves: who is there, what each holds, and which of them is to stop."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import LiteralString

from bartleby.answers import every, nothing, scalar
from bartleby.calls import Call
from bartleby.message import stated, storable

DRAIN = "drain"
"""What is wanted of a worker that is to stop."""

_WORKERS: LiteralString = """
select name, kind, state, version, queues, host, pid, concurrency, running, leases, messages, oldest_lease_at,
  started_at, seen_at, wanted
from bartleby.workers order by started_at, name"""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker as it last reported, and what it holds."""

    name: str
    kind: str
    """worker, or relay: one that publishes events to a sink"""
    state: str
    """working, draining, or silent: not heard of for half a minute"""
    version: str | None
    queues: list[str]
    host: str
    pid: int
    concurrency: int
    running: int
    """messages with handlers, when it last reported"""
    leases: int
    messages: int
    """messages of its leases that are not settled, now"""
    oldest_lease_at: datetime | None
    started_at: datetime
    seen_at: datetime
    wanted: str
    """run or drain"""


def workers() -> Call[list[WorkerReport]]:
    """Return who works, those that began first at the top."""
    return Call(_WORKERS, (), every(WorkerReport))


def report_worker(
    name: str,
    *,
    kind: str = "worker",
    version: str | None = None,
    queues: Sequence[str] = (),
    host: str = "",
    pid: int = 0,
    concurrency: int = 0,
    running: int = 0,
) -> Call[str]:
    """Say that a worker is there and how much it does; return what is wanted of it: run or drain. Never waits."""
    text: LiteralString = """
        select bartleby.report_worker(%s, %s, %s, %s::text[], %s, %s::integer, %s::integer, %s::integer)"""
    names = [storable(each) for each in queues]
    values = (storable(name), storable(kind), stated(version), names, storable(host), pid, concurrency, running)
    return Call(text, values, scalar)


def leave_worker(name: str) -> Call[None]:
    """Say that a worker has stopped."""
    return Call("select bartleby.leave_worker(%s)", (storable(name),), nothing)


def drain_worker(name: str, *, actor: str, reason: str, request_id: str | None = None) -> Call[bool]:
    """Have a worker stop when what it runs is finished; return whether that is new. It hears of it within 10 s."""
    values = (storable(name), storable(actor), storable(reason), stated(request_id))
    return Call("select bartleby.drain_worker(%s, %s, %s, %s)", values, scalar)


def give_back(queue: str, worker: str, known: Sequence[int]) -> Call[int]:
    """Give back what a worker holds of a queue without knowing, since the answer to a claim was lost."""
    return Call("select bartleby.give_back(%s, %s, %s::bigint[])", (storable(queue), worker, list(known)), scalar)
