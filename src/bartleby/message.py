"""The nouns of a message's life: values that come out of the database and never change."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NewType

from bartleby.errors import InvalidMessage, UndecodablePayload

_fast_loads: Callable[[str], Any]
try:
    from orjson import loads as _fast_loads
except ImportError:  # the extra "speed" is optional
    _fast_loads = json.loads

MessageId = NewType("MessageId", int)
LeaseId = NewType("LeaseId", int)
Position = NewType("Position", int)

_UNREAD: Any = object()
_LONG_NUMBER = re.compile(r"\d{16}")
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


@dataclass(frozen=True, slots=True)
class Message:
    """A message in the hands of a worker."""

    id: MessageId
    queue: str
    lease_id: LeaseId
    position: Position
    attempt: int
    raw: str = field(repr=False)
    raw_headers: str | None = field(repr=False)
    key: str | None
    generation: int | None
    created_at: datetime
    solo: bool
    start_first: bool = False
    """Whether its start has to be recorded before it runs."""
    _payload: Any = field(default=_UNREAD, init=False, repr=False, compare=False)

    @property
    def payload(self) -> Any:  # noqa: ANN401 - a payload is any JSON value
        """The payload, decoded at the first look: one that cannot be decoded spoils no other message."""
        if self._payload is _UNREAD:
            object.__setattr__(self, "_payload", decode(self.raw))
        return self._payload

    @property
    def headers(self) -> dict[str, Any]:
        """The headers, empty if it has none."""
        return {} if self.raw_headers is None else decode(self.raw_headers)


@dataclass(frozen=True, slots=True)
class Lease:
    """What one claim handed out. Settle it by its id and the positions of its messages."""

    id: LeaseId
    messages: tuple[Message, ...]

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self.messages)


@dataclass(frozen=True, slots=True)
class Failure:
    """How the attempt at one position failed. What is None is left to the policy of the queue.

    With a `reason`, unacceptable or delivery_error, the message is rejected: dead whatever its attempts.
    """

    position: int
    error_type: str
    error: str
    traceback: str | None = None
    fingerprint: str | None = None
    verdict: str | None = None
    delay: float | None = None
    rule: str | None = None
    worker_version: str | None = None
    handler: str | None = None
    max_attempts: int | None = None
    give_up_after: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of a failure: verdict `retry` with the time, or `dead`."""

    position: Position
    message_id: MessageId
    verdict: str
    retry_at: datetime | None


@dataclass(frozen=True, slots=True)
class Reaped:
    """Messages of a lapsed lease that were taken back: they were `released`, charged (`retry`) or are `dead`."""

    queue: str
    lease_id: LeaseId
    worker: str
    messages: int
    outcome: str


@dataclass(frozen=True, slots=True)
class LivingMessage:
    """A message that is neither done nor dead, and where it is: `ready`, `leased` or `deferred` until `run_at`."""

    message_id: MessageId
    queue: str
    state: str
    position: Position | None
    attempts: int
    crashes: int
    cycle: int
    solo: bool
    max_attempts: int | None
    generation: int | None
    key: str | None
    raw_headers: str | None = field(repr=False)
    raw: str = field(repr=False)
    created_at: datetime
    run_at: datetime | None
    worker: str | None
    leased_until: datetime | None


@dataclass(frozen=True, slots=True)
class Pruned:
    """What upkeep has forgotten because it was old, and how many."""

    what: str
    rows: int


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue and how many of its messages are where; a pause with an end is over by itself then."""

    name: str
    ready: int
    leased: int
    deferred: int
    dead: int
    oldest_ready_at: datetime | None
    next_due_at: datetime | None
    paused: bool
    breaker: str
    breaker_since: datetime | None
    breaker_cause: str | None
    next_probe_at: datetime | None
    paused_until: datetime | None


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a queue that has nothing to hand out is waiting for; `due_in` is the time to its next deferred message."""

    due_in: timedelta | None
    breaker: str
    paused: bool


def encode(value: object, *, index: int | None = None) -> str:
    """Return a value as JSON that PostgreSQL takes, or say what is wrong with it."""
    where = "" if index is None else f"message {index}: "
    detail = None if index is None else f"index {index}"
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except RecursionError:
        raise InvalidMessage(f"{where}invalid message: nested too deep, or it contains itself", detail=detail) from None
    except UnicodeEncodeError:
        raise InvalidMessage(f"{where}invalid message: a text has a lone surrogate", detail=detail) from None
    except (TypeError, ValueError) as error:
        raise InvalidMessage(
            f"{where}invalid message: not JSON: {error}",
            detail=detail,
            hint="dictionaries with text keys, lists, texts, finite numbers, true, false and null",
        ) from None
    if "\\u0000" in text and _NUL.search(text):
        raise InvalidMessage(f"{where}invalid message: a text has a NUL character", detail=detail)
    return text


def checked_key(key: object) -> str:
    """Return a key that PostgreSQL can store as it is."""
    if not isinstance(key, str):
        raise InvalidMessage(f"invalid message: a key is a text, not {key!r}")
    if "\0" in key or key.encode(errors="replace") != key.encode(errors="surrogatepass"):
        raise InvalidMessage("invalid message: the key has a NUL character or a lone surrogate")
    return key


def storable(text: str) -> str:
    """Return a text with what PostgreSQL cannot store replaced: a failure must be recorded whatever it is made of."""
    return str(text).encode(errors="replace").decode().replace("\0", "\ufffd")


def stated(text: str | None) -> str | None:
    """Return a text with what PostgreSQL cannot store replaced, and None as it is."""
    return None if text is None else storable(text)


def decode(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value of a JSON text; integers keep every digit they had."""
    try:
        # orjson turns integers beyond 64 bits into floats
        return json.loads(text) if _LONG_NUMBER.search(text) else _fast_loads(text)
    except (ValueError, RecursionError) as error:
        raise UndecodablePayload(f"a payload of {len(text)} characters cannot be decoded: {error}") from error
