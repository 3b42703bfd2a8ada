"""Calls of surfaces: who comes in, notes in the audit about what changed nothing, and answers that are kept.

A secret never gets here: tokens and sessions are known by `hashing.digest`, passwords by `hashing.slow_digest`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, LiteralString

from bartleby.answers import every, first, nothing, scalar
from bartleby.calls import Call
from bartleby.message import encode, stated, storable

_COLUMNS: LiteralString = "select id, kind, name, role, queues, created_at, created_by, expires_at, used_at from "


@dataclass(frozen=True, slots=True)
class Token:
    """Who may come in: a `token` of a program, a `password`, or a `session`. `queues` is None for all of them."""

    id: int
    kind: str
    name: str
    role: str
    """reader, agent, operator or admin"""
    queues: list[str] | None
    created_at: datetime
    created_by: str
    expires_at: datetime | None
    used_at: datetime | None
    """before this look, and to the minute"""


@dataclass(frozen=True, slots=True)
class Password:
    """What the password of a name is compared with, and what it opens."""

    id: int
    name: str
    hash: str = field(repr=False)
    role: str
    queues: list[str] | None
    expires_at: datetime | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request was answered the first time."""

    status: int
    body: str | None = field(repr=False)


def tokens() -> Call[list[Token]]:
    """Return who may come in: tokens, passwords and sessions that have not expired, without any hash."""
    return Call(_COLUMNS + "bartleby.tokens order by id", (), every(Token))


def find_token(hash: str) -> Call[Token | None]:
    """Return the token or session with this digest, unless it was revoked or has expired; note that it is used."""
    return Call(_COLUMNS + "bartleby.find_token(%s)", (storable(hash),), first(Token))


def find_password(name: str) -> Call[Password | None]:
    """Return what a password of this name is compared with; None if there is none."""
    text: LiteralString = "select id, name, hash, role, queues, expires_at from bartleby.find_password(%s)"
    return Call(text, (storable(name),), first(Password))


def add_token(
    kind: str,
    name: str,
    hash: str,
    role: str,
    *,
    actor: str,
    reason: str,
    queues: Sequence[str] | None = None,
    expires: datetime | None = None,
    request_id: str | None = None,
) -> Call[int]:
    """Let a `token` or a `password` in, known by its hash, for some queues or all (None); return its id."""
    text: LiteralString = "select bartleby.add_token(%s, %s, %s, %s, %s::text[], %s::timestamptz, %s, %s, %s)"
    values = (storable(kind), storable(name), storable(hash), storable(role), _list(queues), expires)
    return Call(text, (*values, storable(actor), storable(reason), stated(request_id)), scalar)


def revoke_token(token_id: int, *, actor: str, reason: str, request_id: str | None = None) -> Call[None]:
    """Let a token, a password or a session in no more; the sessions that it opened end with it."""
    text: LiteralString = "select bartleby.revoke_token(%s::bigint, %s, %s, %s)"
    return Call(text, (token_id, storable(actor), storable(reason), stated(request_id)), nothing)


def open_session(
    hash: str,
    *,
    name: str,
    role: str,
    queues: Sequence[str] | None,
    until: datetime | None,
    from_token: int | None = None,
    request_id: str | None = None,
) -> Call[int]:
    """Open a session, known by the digest of its id; return the id of its row.

    With `from_token`, a token or password, it ends with that, and has its name, role and queues; UnknownToken if that
    is gone.
    """
    text: LiteralString = "select bartleby.open_session(%s, %s::bigint, %s, %s, %s::text[], %s::timestamptz, %s)"
    values = (storable(hash), from_token, storable(name), storable(role), _list(queues), until, stated(request_id))
    return Call(text, values, scalar)


def close_session(hash: str, *, request_id: str | None = None) -> Call[bool]:
    """End a session; return whether there was one."""
    return Call("select bartleby.close_session(%s, %s)", (storable(hash), stated(request_id)), scalar)


def note(
    action: str,
    subject: Mapping[str, Any],
    *,
    actor: str,
    reason: str | None = None,
    request_id: str | None = None,
) -> Call[int]:
    """Write a line of the audit about something that changed nothing; return its id.

    The action is payload.reveal, agent.call, access.refuse, session.open or session.close.
    """
    text: LiteralString = "select bartleby.note(%s, %s::jsonb, %s, %s, %s)"
    values = (storable(action), encode(dict(subject)), storable(actor), stated(reason), stated(request_id))
    return Call(text, values, scalar)


def take_answer(principal: str, key: str, request: str) -> Call[Answer | None]:
    """Return the answer that this request has got before; None if it is yours to do, in the same transaction.

    Of two at once, the second waits for the transaction of the first. KeyReused if the key was another request's.
    """
    text: LiteralString = "select status, body from bartleby.take_answer(%s, %s, %s)"
    return Call(text, (storable(principal), storable(key), storable(request)), first(Answer))


def keep_answer(principal: str, key: str, status: int, body: str | None) -> Call[None]:
    """Keep the answer to a request that was taken, for whoever asks the same again within a day."""
    text: LiteralString = "select bartleby.keep_answer(%s, %s, %s::integer, %s)"
    return Call(text, (storable(principal), storable(key), status, stated(body)), nothing)


def _list(queues: Sequence[str] | None) -> list[str] | None:
    return None if queues is None else [storable(each) for each in queues]
