"""What can go wrong. Every error of the SQL core has a SQLSTATE of class ZB and arrives as its own class.

BartlebyError
├── UnknownQueue            ZB001
├── InvalidQueueName        ZB002
├── InvalidPolicy           ZB003
├── InvalidMessage          ZB004   `index` says which one of a bulk
│   └── PayloadTooLarge     ZB005
├── LeaseLost               ZB006   `lease_ids` says which
├── WrongIsolation          ZB007
├── InvalidArgument         ZB008
├── QueueInUse              ZB009
├── VersionMismatch         ZB010
├── InvalidFilter           ZB011   `position` says where, `pointed` shows it
├── InvalidPatch            ZB012
├── PlanDrifted             ZB013
├── NeedsApproval           ZB014
├── WrongState              ZB015
├── UnknownReplay           ZB016
├── UnknownGroup            ZB017
├── InvalidSink             ZB018
├── UnknownSink             ZB019
├── KeyReused               ZB020
├── UnknownToken            ZB021
├── UnknownWorker           ZB022
├── Forbidden
├── UnknownMessage
├── NotInstalled
├── InvalidSettings
├── NoConnection            also a psycopg.OperationalError
├── InvalidHandler
├── NoHandler
├── NoApp
├── UndecodablePayload
├── InvalidPayload
└── NoPostgres              (bartleby.dev)
"""

import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import psycopg


class BartlebyError(Exception):
    """The root of every error Bartleby raises; `hint` says what helps."""

    def __init__(self, message: str, *, hint: str | None = None, detail: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.detail = detail

    @classmethod
    def from_database(cls, error: Exception) -> Self:
        """Return this error as the database worded it, whichever library brought it."""
        diagnosis = getattr(error, "diag", None)
        if diagnosis is None:  # asyncpg has it on the error itself
            hint, detail = getattr(error, "hint", None), getattr(error, "detail", None)
            return cls(getattr(error, "message", None) or str(error), hint=hint, detail=detail)
        return cls(
            diagnosis.message_primary or str(error),
            hint=diagnosis.message_hint,
            detail=diagnosis.message_detail,
        )


class UnknownQueue(BartlebyError):
    """There is no queue of this name."""


class InvalidQueueName(BartlebyError):
    """A queue cannot be called this."""


class InvalidPolicy(BartlebyError):
    """A policy key is unknown, or its value cannot be used."""


class InvalidMessage(BartlebyError):
    """A message cannot be sent as it is; nothing was sent."""

    @property
    def index(self) -> int | None:
        """The place of the bad message in a bulk, counted from 0."""
        found = re.fullmatch(r"index (\d+)", self.detail or "")
        return int(found[1]) if found else None


class PayloadTooLarge(InvalidMessage):
    """Payload and headers together are larger than the queue allows."""


class LeaseLost(BartlebyError):
    """The lease lapsed and was taken back, or the positions were settled before; nothing was changed."""

    @property
    def lease_ids(self) -> tuple[int, ...]:
        """The leases that are not held any more."""
        return tuple(int(part) for part in (self.detail or "").split(",") if part.isdecimal())


class WrongIsolation(BartlebyError):
    """This was tried in a transaction that is not READ COMMITTED, where an old snapshot would be used."""


class InvalidArgument(BartlebyError):
    """An argument is missing or out of its range."""


class QueueInUse(BartlebyError):
    """A queue that has messages, or that another queue routes to, is not dropped."""


class VersionMismatch(BartlebyError):
    """The schema in the database belongs to another version of Bartleby."""


class InvalidFilter(BartlebyError):
    """A filter of dead letters cannot be understood; nothing was looked for."""

    @property
    def position(self) -> int | None:
        """The character at which it is wrong, counted from 1; one past the end if something is missing there."""
        found = re.fullmatch(r"position (\d+)", self.detail or "")
        return int(found[1]) if found else None

    def pointed(self, filter: str) -> str:
        """Return the filter in one line, and under the place that is wrong a caret."""
        line = "".join(each if each.isprintable() else " " for each in filter)
        if self.position is None:
            return line
        return f"{line}\n{' ' * sum(map(_columns, line[: self.position - 1]))}^"


class InvalidPatch(BartlebyError):
    """A JSON Patch is none, or cannot be applied; the text says which operation and why."""


class PlanDrifted(BartlebyError):
    """A plan is not any more what was looked at; nothing was started."""


class NeedsApproval(BartlebyError):
    """A plan of this size is started only after another person has approved it."""


class WrongState(BartlebyError):
    """This cannot be done to a plan or a group in the state that it is in."""


class UnknownReplay(BartlebyError):
    """There is no replay of this id."""


class UnknownGroup(BartlebyError):
    """There is no group of this id."""


class InvalidSink(BartlebyError):
    """The name, the kind or a setting of a sink cannot be used."""


class UnknownSink(BartlebyError):
    """There is no sink of this name."""


class Forbidden(BartlebyError):
    """Whoever asks may not do this; nothing was done."""


class KeyReused(BartlebyError):
    """The key of a request was used for another one before."""


class UnknownToken(BartlebyError):
    """There is no token, password or session of this id; it may have expired."""


class UnknownMessage(BartlebyError):
    """There is no message, or no dead letter, of this id."""


class UnknownWorker(BartlebyError):
    """No worker of this name has reported, or it has stopped since."""


class NotInstalled(BartlebyError):
    """The database has no schema of Bartleby."""


class InvalidSettings(BartlebyError):
    """A setting is unknown or its value cannot be used."""


class NoConnection(BartlebyError, psycopg.OperationalError):
    """No connection could be had in time: the server cannot be reached, or the client's connections are all in use."""

    @classmethod
    def because(cls, error: psycopg.Error) -> Self:
        """Return this error for a server that cannot be reached."""
        hint = "check the DSN, and that the server is running"
        return cls(f"no connection to the database: {error}", hint=hint)

    @classmethod
    def all_in_use(cls, connections: int, seconds: float) -> Self:
        """Return this error for a pool whose connections were all in use for so long."""
        return cls(
            f"no connection for {seconds:g} s: all {connections} of this client are in use",
            hint="raise max_connections (BARTLEBY_MAX_CONNECTIONS), or look for calls that wait for a lock",
        )


class InvalidHandler(BartlebyError):
    """A function cannot be a handler, or not as it was declared."""


class NoHandler(BartlebyError):
    """The application has no handler for a queue."""


class NoApp(BartlebyError):
    """There is no application where one was said to be."""


class UndecodablePayload(BartlebyError):
    """A payload is valid in PostgreSQL and cannot be decoded in Python; its text is `Message.raw`."""

    __module__ = "bartleby"  # by which name it is imported, and stands in a dead letter


class InvalidPayload(BartlebyError):
    """A payload is not what its handler expects; the text says where: `payload.customer.id: expected int, not 'x'`."""

    __module__ = "bartleby"


BY_SQLSTATE: dict[str, type[BartlebyError]] = {
    "ZB001": UnknownQueue,
    "ZB002": InvalidQueueName,
    "ZB003": InvalidPolicy,
    "ZB004": InvalidMessage,
    "ZB005": PayloadTooLarge,
    "ZB006": LeaseLost,
    "ZB007": WrongIsolation,
    "ZB008": InvalidArgument,
    "ZB009": QueueInUse,
    "ZB010": VersionMismatch,
    "ZB011": InvalidFilter,
    "ZB012": InvalidPatch,
    "ZB013": PlanDrifted,
    "ZB014": NeedsApproval,
    "ZB015": WrongState,
    "ZB016": UnknownReplay,
    "ZB017": UnknownGroup,
    "ZB018": InvalidSink,
    "ZB019": UnknownSink,
    "ZB020": KeyReused,
    "ZB021": UnknownToken,
    "ZB022": UnknownWorker,
}


@contextmanager
def translated() -> Iterator[None]:
    """Turn errors of the SQL core, and of input it cannot take, into classes of ours."""
    try:
        yield
    except psycopg.Error as error:
        ours = translation(error, error.sqlstate)
        if ours is None:
            raise
        raise ours from error


def translation(error: Exception, sqlstate: str | None) -> BartlebyError | None:
    """Return the error of ours that a database error of this SQLSTATE is; None if it is none of ours."""
    state = sqlstate or ""
    if state in BY_SQLSTATE:
        return BY_SQLSTATE[state].from_database(error)
    if state in {"3F000", "42883", "42P01"}:
        said = BartlebyError.from_database(error)
        if "pgmq" in str(said):
            return NotInstalled(
                f"this database has no pgmq, or it came after Bartleby: {said}",
                hint="install pgmq, then run once more: bartleby install",
            )
        return NotInstalled(
            f"this database has no schema of Bartleby, or an older one: {said}",
            hint="run: bartleby install",
        )
    return InvalidArgument.from_database(error) if state.startswith("22") else None


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in {"F", "W"} else 1
