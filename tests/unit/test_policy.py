"""Retry policies, and how an error decides whether its message is retried, released or dead."""

import asyncio
import importlib
import json
import math
import socket
import sqlite3
import ssl
import urllib.error
from datetime import UTC, datetime, timedelta
from email.message import Message as Headers
from types import SimpleNamespace
from typing import Any

import django.core.exceptions
import django.db
import psycopg
import psycopg_pool
import pydantic
import pytest
import sqlalchemy.exc
from psycopg import errors as pg

from bartleby import Message
from bartleby.errors import InvalidPayload, InvalidPolicy, NoConnection, UndecodablePayload
from bartleby.execute import Executor, Failed, Settlement
from bartleby.failure import Recorder
from bartleby.handlers import handler
from bartleby.message import LeaseId, MessageId, Position
from bartleby.outcomes import AlreadyHandled, Retry, Snooze, Terminal
from bartleby.policy import RetryPolicy, Ruling, classify
from tests.kit import poison

UNUSABLE: list[tuple[Any, str]] = [
    ({"max_attempts": 0}, '"max_attempts": 0'), ({"base": math.nan}, "base"), ({"base": "5 min"}, "base"),
    ({"base": timedelta(seconds=-1)}, "base"), ({"factor": math.nan}, "factor"), ({"schedule": "1,2"}, "schedule"),
    ({"schedule": [1, None]}, "schedule"), ({"schedule": [1] * 1001}, "schedule"), ({"tries": 3}, "'tries'"),
    ({"backoff": "schedule"}, '"schedule"'), ({5: 5}, "5"), ("fixed", "mapping"), ({"base": "x" * 500}, "x…"),
]  # fmt: skip


def test_unusable_policy_is_refused_by_name() -> None:
    """tests/property/test_policy_curves.py has the values that Python and SQL refuse alike, and all curves."""
    for given_policy, named_value in UNUSABLE:
        with pytest.raises(InvalidPolicy) as found:
            RetryPolicy.of(given_policy)
        assert named_value in str(found.value), given_policy
        assert found.value.hint or given_policy == {"backoff": "schedule"}, given_policy


def test_delay_follows_the_curve_and_the_rest_is_left_to_the_queue() -> None:
    assert RetryPolicy.of(None) == RetryPolicy()
    assert RetryPolicy(max_attempts=3, give_up_after=60).delay(3) is None
    policy = RetryPolicy.of({"max_attempts": 3, "backoff": "fixed", "base": timedelta(minutes=1), "give_up_after": 90})
    assert (policy.max_attempts, policy.backoff, policy.base, policy.give_up_after) == (3, "fixed", 60.0, 90.0)
    assert RetryPolicy.of(policy) is policy
    schedule = RetryPolicy(schedule=[1, timedelta(minutes=1), 3600])
    assert [schedule.delay(attempt) for attempt in (1, 2, 3, 900)] == [1, 60, 3600, 3600]
    assert RetryPolicy(base=5e-324, cap=2).delay(1025, lambda: 0.5) == 0
    assert RetryPolicy(base=1e-6, cap=86400 * 36000, factor=1.0001, jitter="none").delay(32_000) is not None


def error(kind: type[BaseException], *arguments: object, cause: BaseException | None = None) -> BaseException:
    made = kind(*arguments)
    made.__cause__ = cause
    return made


def named(module: str, name: str, *bases: type[BaseException], **attributes: object) -> BaseException:
    """An error of a library that is not installed here."""
    return type(name, bases or (Exception,), {"__module__": module, **attributes})("from elsewhere")  # type: ignore[no-any-return]


class Model(pydantic.BaseModel):
    id: int


def sqlalchemys(kind: type[sqlalchemy.exc.DBAPIError], original: BaseException) -> BaseException:
    return kind("select 1", {}, original)


def answered(status: int) -> BaseException:
    return named("httpx", "HTTPStatusError", response=SimpleNamespace(status_code=status))


class OutOfStock(Terminal):
    pass


DEAD = {
    "the handler said Terminal": Terminal("no"),
    "tests.unit.test_policy.OutOfStock is a Terminal": OutOfStock("no"),
    "psycopg.errors.UniqueViolation is an IntegrityError: terminal": pg.UniqueViolation("x"),
    "sqlalchemy.exc.IntegrityError is terminal": sqlalchemys(sqlalchemy.exc.IntegrityError, pg.UniqueViolation("x")),
    "django.db.utils.IntegrityError is terminal": error(django.db.IntegrityError, cause=pg.UniqueViolation("x")),
    "sqlite3.IntegrityError is terminal": sqlite3.IntegrityError("x"),
    "asyncpg.exceptions.UniqueViolationError is an IntegrityError: terminal": named(
        "asyncpg.exceptions", "UniqueViolationError",
        type(named("asyncpg.exceptions", "IntegrityConstraintViolationError")), sqlstate="23505",
    ),
    "pydantic_core._pydantic_core.ValidationError is terminal: what does not validate will not later": poison.raised(
        Model.model_validate, {},
    ),
    "bartleby.InvalidPayload is terminal: what does not validate will not later": InvalidPayload("x"),
    "bartleby.UndecodablePayload is terminal: what does not validate will not later": UndecodablePayload("x"),
}  # fmt: skip
OUTAGES: list[BaseException] = [
    ConnectionRefusedError(111, "refused"), TimeoutError(), OSError(28, "x"), socket.gaierror(-2, "unknown"),
    ssl.SSLError("x"), asyncio.IncompleteReadError(b"", 5), urllib.error.URLError("x"),
    urllib.error.HTTPError("http://x", 503, "busy", Headers(), None), NoConnection("x"), pg.OutOfMemory("x"),
    psycopg.OperationalError("x"), psycopg.InterfaceError("closed"), psycopg_pool.PoolTimeout("x"),
    pg.QueryCanceled("x"), pg.ConnectionException("x"), django.db.OperationalError("x"), django.db.InterfaceError("x"),
    sqlalchemys(sqlalchemy.exc.OperationalError, psycopg.OperationalError("x")), sqlalchemy.exc.TimeoutError("pool"),
    named("psycopg2", "OperationalError"), named("asyncpg.exceptions", "PostgresConnectionError"),
    named("httpx", "TransportError"), named("requests.exceptions", "ConnectionError", OSError),
    named("aiohttp.client_exceptions", "ClientConnectionError"), named("redis.exceptions", "ConnectionError"),
    answered(500), answered(429),
    named("requests.exceptions", "HTTPError", OSError, response=SimpleNamespace(status_code=502)),
    named("aiohttp.client_exceptions", "ClientResponseError", status=503),
    error(ValueError, "could not charge", cause=ConnectionError("x")),
]  # fmt: skip
DOUBTFUL: list[BaseException] = [
    KeyError("x"), MemoryError(), json.JSONDecodeError("x", "", 0), Exception(), asyncio.CancelledError(),
    FileNotFoundError(2, "x"), PermissionError(13, "x"), AlreadyHandled(), Retry(), pg.DeadlockDetected("x"),
    pg.SerializationFailure("x"), pg.UndefinedTable("x"), psycopg.DataError("x"), django.db.DataError("x"),
    django.core.exceptions.ValidationError("x"), answered(404),
    named("requests.exceptions", "HTTPError", OSError, response=SimpleNamespace(status_code=404)),
    urllib.error.HTTPError("http://x", 404, "gone", Headers(), None),
]  # fmt: skip
SERVER_TROUBLE: list[tuple[str, BaseException]] = [
    ("53100", pg.DiskFull("x")), ("53300", pg.TooManyConnections("x")),
    ("57P01", pg.AdminShutdown("x")), ("57P02", pg.CrashShutdown("x")), ("57P03", pg.CannotConnectNow("x")),
    ("25006", pg.ReadOnlySqlTransaction("x")),
    ("53100", sqlalchemys(sqlalchemy.exc.OperationalError, pg.DiskFull("x"))),
    ("57P01", error(django.db.OperationalError, "x", cause=pg.AdminShutdown("x"))),
    ("53300", named("psycopg2", "OperationalError", pgcode="53300")),
    ("57P03", named("asyncpg.exceptions", "CannotConnectNowError", sqlstate="57P03")),
    ("25006", error(RuntimeError, "could not save", cause=pg.ReadOnlySqlTransaction("x"))),
]  # fmt: skip


@pytest.mark.seed("outbox-14", "outbox-16", "outbox-17", "outbox-18", "outbox-19", "outbox-20", "outbox-21")
def test_errors_are_classified() -> None:
    for rule, found in DEAD.items():
        assert classify(found) == Ruling("dead", rule, None, 0)
    rows = [
        *((found, ("retry", None, 5), "transient") for found in OUTAGES),
        *((found, ("retry", None, 1), "") for found in DOUBTFUL),
        *((found, ("release", None, 5), f"SQLSTATE {state}") for state, found in SERVER_TROUBLE),
    ]
    for found, expected, rule in rows:
        ruling = classify(found)
        assert (ruling.verdict, ruling.delay, ruling.suspicion) == expected, found
        assert rule in ruling.rule, found
    assert classify(KeyError("x")).rule == "KeyError: transient by default"
    cause = error(ValueError, cause=ConnectionResetError())
    assert classify(cause).rule == "ValueError comes from ConnectionResetError: transient"
    modules = vars(importlib.import_module("bartleby.classifier"))
    assert not {"psycopg", "sqlalchemy", "django", "pydantic"} & set(modules), "it compares full names"
    assert classify(named("shop.errors", "IntegrityError")).verdict == "retry"
    assert classify(named("shop.errors", "OperationalError")).suspicion == 1


@pytest.mark.seed("outbox-22")
def test_errors_that_the_handler_lists_are_terminal() -> None:
    assert classify(KeyError("x"), [KeyError]) == Ruling("dead", "KeyError is listed by the handler")
    listed = classify(KeyError("x"), (ValueError, LookupError))
    assert listed.rule == "KeyError is a LookupError, listed by the handler"
    assert classify(ConnectionError("x"), [OSError]).verdict == "dead"
    assert classify(pg.DiskFull("x"), [psycopg.Error]).verdict == "dead"
    assert classify(ValueError("x"), [KeyError]).verdict == "retry"


@pytest.mark.seed("outbox-67")
def test_outcomes_of_the_handler_take_precedence_over_its_list() -> None:
    assert classify(Snooze(30), [Exception]) == Ruling("release", "the handler asked for a delay of 30 s", 30.0)
    asked = Ruling("retry", "the handler asked for a retry after 120 s", 120.0)
    assert classify(Retry(after=timedelta(minutes=2)), [Exception]) == asked
    assert classify(error(Retry, cause=pg.UniqueViolation("x")), [Exception]).verdict == "retry"
    for wrong in (-1, math.inf, math.nan, "5", None, True):
        snooze, retry = Snooze(1), Retry(after=1)
        snooze.delay, retry.after = wrong, wrong  # type: ignore[assignment]
        assert classify(snooze).delay == 0, wrong
        assert classify(retry).delay is None, wrong


def test_group_is_classified_by_its_most_hopeful_member() -> None:
    dead, doubtful, outage = pg.UniqueViolation("x"), KeyError("x"), ConnectionError("x")
    assert classify(ExceptionGroup("g", [dead, ExceptionGroup("h", [dead])])).verdict == "dead"
    assert classify(ExceptionGroup("g", [dead, doubtful])).verdict == "retry"
    assert classify(ExceptionGroup("g", [doubtful, outage])).suspicion == 5
    assert classify(ExceptionGroup("g", [doubtful, pg.DiskFull("x")])).verdict == "release"
    assert classify(ExceptionGroup("g", [Snooze(9)])).delay == 9
    assert classify(ExceptionGroup("g", [outage])).rule == "in ExceptionGroup: ConnectionError is transient"
    assert classify(ExceptionGroup("g", [outage]), [ExceptionGroup]).verdict == "dead"


def test_failure_has_the_delay_of_its_attempt_and_trouble_of_a_server_its_sqlstate() -> None:
    executor = Executor(handler("orders", print, retry={"schedule": [1, 10, 100]}), Recorder(), "1.0")

    def judged(error: Exception, attempt: int) -> Settlement:
        ids, at = (MessageId(1), "orders", LeaseId(7), Position(10)), datetime(2024, 1, 1, tzinfo=UTC)
        return executor.judge(Message(*ids, attempt, "{}", None, None, None, at, solo=False), error)

    failed = [judged(ValueError("x"), attempt) for attempt in (1, 2, 3, 9)]
    assert [each.report.delay for each in failed if isinstance(each, Failed)] == [1, 10, 100, 100]
    full = judged(pg.DiskFull("x"), 2)
    assert isinstance(full, Failed)
    assert (full.sqlstate, full.suspicion, full.report.verdict, full.report.delay) == ("53100", 5, None, 10)


def test_every_poisonous_exception_is_classified() -> None:
    for name in poison.EXCEPTIONS:
        ruling = classify(poison.raised(poison.strike, name), [OSError])
        assert ruling.verdict in {"retry", "dead"}, name
        ruling.rule.encode()
        assert len(ruling.rule) < 1000, name
