"""Which errors are worth another attempt: pure, and the rule that decided is told in words.

Other libraries are known by the full names of their classes, so none of them is imported.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bartleby.anatomy import ancestry, bases, before, chain, is_group, leaves, type_name
from bartleby.errors import InvalidPayload, UndecodablePayload
from bartleby.outcomes import Retry, Snooze, Terminal

_OUTAGE = 5
_DOUBT = 1
_LINKS = 8
_LEAVES = 100

_INTEGRITY = frozenset({
    "psycopg.IntegrityError", "psycopg2.IntegrityError", "psycopg2._psycopg.IntegrityError",
    "asyncpg.exceptions.IntegrityConstraintViolationError", "asyncpg.IntegrityConstraintViolationError",
    "sqlalchemy.exc.IntegrityError", "django.db.utils.IntegrityError", "sqlite3.IntegrityError",
    "pymysql.err.IntegrityError", "MySQLdb.IntegrityError", "MySQLdb._exceptions.IntegrityError",
    "mysql.connector.errors.IntegrityError", "peewee.IntegrityError", "tortoise.exceptions.IntegrityError",
})  # fmt: skip
_INVALID = frozenset({
    "pydantic_core._pydantic_core.ValidationError", "pydantic.error_wrappers.ValidationError",
    "pydantic.ValidationError",
})  # fmt: skip
# What is wrong with one message's file is not wrong with the world.
_LOCAL = frozenset({
    "FileNotFoundError", "FileExistsError", "IsADirectoryError", "NotADirectoryError", "PermissionError",
})  # fmt: skip
_OUTSIDE = frozenset({
    "ConnectionError", "TimeoutError", "OSError", "EOFError",
    "psycopg.OperationalError", "psycopg.InterfaceError", "psycopg2.OperationalError", "psycopg2.InterfaceError",
    "psycopg2._psycopg.OperationalError", "psycopg2._psycopg.InterfaceError",
    "asyncpg.exceptions.PostgresConnectionError", "asyncpg.exceptions._base.InterfaceError",
    "asyncpg.exceptions.OperatorInterventionError", "asyncpg.exceptions.InsufficientResourcesError",
    "sqlalchemy.exc.OperationalError", "sqlalchemy.exc.InterfaceError", "sqlalchemy.exc.TimeoutError",
    "django.db.utils.OperationalError", "django.db.utils.InterfaceError",
    "pymysql.err.OperationalError", "MySQLdb.OperationalError", "MySQLdb._exceptions.OperationalError",
    "mysql.connector.errors.OperationalError",
    "httpx.TransportError", "urllib3.exceptions.HTTPError", "aiohttp.client_exceptions.ClientConnectionError",
    "botocore.exceptions.HTTPClientError", "redis.exceptions.ConnectionError", "redis.exceptions.TimeoutError",
    "pymongo.errors.ConnectionFailure", "pika.exceptions.AMQPConnectionError", "kafka.errors.KafkaConnectionError",
})  # fmt: skip
_ANSWERS = frozenset({
    "requests.exceptions.HTTPError", "httpx.HTTPStatusError", "urllib.error.HTTPError",
    "aiohttp.client_exceptions.ClientResponseError",
})  # fmt: skip
_SERVER_TROUBLE = frozenset({"25006", "53100", "53300", "57P01", "57P02", "57P03"})
_BUSY = frozenset({408, 425, 429})


@dataclass(frozen=True, slots=True)
class Ruling:
    """What an error means for its message.

    `verdict` is `retry`, `dead` or `release` (not the message's fault, no charge). `suspicion` says how much it looks
    like an outage: 5 for errors that speak of the outside world, 1 for others, 0 if it proves nothing.
    """

    verdict: str
    rule: str
    delay: float | None = None
    suspicion: int = 0
    sqlstate: str | None = None
    """Of the trouble of a database server, if that is the reason: it is one only if our own server confirms it."""


def classify(error: BaseException, terminal: Sequence[type[BaseException]] = ()) -> Ruling:
    """Return what an error means for its message, and which rule says so."""
    ruling = _asked_for(error) or _listed(error, terminal) or _known(error)
    if ruling is None and is_group(error):
        ruling = _group(error, terminal)
    return ruling or _server_trouble(error) or _transient(error)


def _asked_for(error: BaseException) -> Ruling | None:
    kind = type(error)
    if issubclass(kind, Snooze):
        delay = _seconds(error, "delay") or 0.0
        return Ruling("release", f"the handler asked for a delay of {delay:g} s", delay)
    if issubclass(kind, Retry):
        after = _seconds(error, "after")
        if after is None:
            return Ruling("retry", "the handler asked for a retry", None, _DOUBT)
        return Ruling("retry", f"the handler asked for a retry after {after:g} s", after)
    if issubclass(kind, Terminal):
        return Ruling("dead", "the handler said Terminal" if kind is Terminal else f"{type_name(kind)} is a Terminal")
    return None


def _listed(error: BaseException, terminal: Sequence[type[BaseException]]) -> Ruling | None:
    kinds = bases(type(error))
    for listed in terminal:
        if any(kind is listed for kind in kinds):
            name, by = type_name(type(error)), type_name(listed)
            return Ruling(
                "dead", f"{name} is listed by the handler" if name == by else f"{name} is a {by}, listed by the handler"
            )
    return None


def _known(error: BaseException) -> Ruling | None:
    kind = type(error)
    names, name = ancestry(kind), type_name(kind)
    if not names.isdisjoint(_INTEGRITY):
        article = "is an IntegrityError: terminal" if not name.endswith("IntegrityError") else "is terminal"
        return Ruling("dead", f"{name} {article}")
    if issubclass(kind, InvalidPayload | UndecodablePayload) or not names.isdisjoint(_INVALID):
        return Ruling("dead", f"{name} is terminal: what does not validate will not later")
    return None


def _group(error: BaseException, terminal: Sequence[type[BaseException]]) -> Ruling | None:
    # A group is as hopeful as the most hopeful of its members: it is dead only if all of them are.
    rulings = [classify(leaf, terminal) for leaf, _ in zip(leaves(error), range(_LEAVES), strict=False)]
    if not rulings:
        return None
    chosen = max(rulings, key=lambda ruling: (("dead", "retry", "release").index(ruling.verdict), ruling.suspicion))
    return replace(chosen, rule=f"in {type_name(type(error))}: {chosen.rule}")


def _server_trouble(error: BaseException) -> Ruling | None:
    for link in _database_errors(error):
        state = _sqlstate(link)
        if state in _SERVER_TROUBLE:
            rule = f"{type_name(type(link))} (SQLSTATE {state}) is trouble of a database server"
            return Ruling("release", rule, None, _OUTAGE, state)
    return None


def _transient(error: BaseException) -> Ruling:
    name = type_name(type(error))
    for link in chain(error, _LINKS):
        suspicion = _suspicion(link)
        if suspicion:
            cause = "" if link is error else f" comes from {type_name(type(link))}:"
            return Ruling("retry", f"{name}{cause or ' is'} transient", None, suspicion)
    return Ruling("retry", f"{name}: transient by default", None, _DOUBT)


def _suspicion(error: BaseException) -> int:
    names = ancestry(type(error))
    if not names.isdisjoint(_ANSWERS):
        status = _status(error)
        return _OUTAGE if status is not None and (status >= 500 or status in _BUSY) else _DOUBT  # noqa: PLR2004 - HTTP
    if names.isdisjoint(_OUTSIDE):
        return 0
    # Deadlocks and serialization failures come with load, not with an outage.
    contention = (_sqlstate(error) or "").startswith("40")
    return _DOUBT if contention or not names.isdisjoint(_LOCAL) else _OUTAGE


def _database_errors(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    for _ in range(_LINKS):
        if current is None:
            return
        yield current
        original = _attribute(current, "orig")
        current = original if issubclass(type(original), BaseException) else before(current)[0]


def _sqlstate(error: BaseException) -> str | None:
    for name in ("sqlstate", "pgcode"):
        value = _attribute(error, name)
        if type(value) is str and len(value) == 5:  # noqa: PLR2004 - what a SQLSTATE is
            return value
    return None


def _status(error: BaseException) -> int | None:
    for holder in (_attribute(error, "response"), error):
        for name in ("status_code", "status", "code"):
            value = _attribute(holder, name)
            if type(value) is int:
                return value
    return None


def _seconds(error: BaseException, name: str) -> float | None:
    value = _attribute(error, name)
    return float(value) if type(value) in {int, float} and 0 <= value < math.inf else None


def _attribute(holder: object, name: str) -> Any:  # noqa: ANN401 - whatever it holds
    try:
        return getattr(holder, name, None)
    except BaseException:  # noqa: BLE001 - a property is foreign code
        return None
