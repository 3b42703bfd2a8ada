"""Failing and rejecting: retry or dead letter, when the retry comes, what is recorded, and where a copy is routed."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.kit import sql
from tests.kit.clock import Clock
from tests.kit.sql import Claim, Connection

pytestmark = pytest.mark.usefixtures("q")


def claimed(conn: Connection, count: int = 3, queue: str = "q") -> Claim:
    sql.send_count(conn, count, queue)
    return sql.claim(conn, count, queue)


BAD_FAILURES: list[Any] = [
    *(1, None, [], {}),
    *({"position": position} for position in (None, "1", 1.5, 1e300, -1)),
    *({"position": 1, "verdict": verdict} for verdict in ("maybe", 1)),
    *({"position": 1, "delay": delay} for delay in (-1, "soon", 1e300, True)),
    *({"position": 1, "max_attempts": attempts} for attempts in (0, 32001, 1.5, "3")),
    *({"position": 1, "give_up_after": patience} for patience in (-1, 1e300, "1 hour")),
    *({"position": 1, "reason": reason} for reason in ("bad", 1, "")),
]


@pytest.mark.seed("brighter-18")
def test_bad_failures_and_rejections_are_refused(conn: Connection) -> None:
    work = claimed(conn)
    first, second, _ = work.positions
    assert first == 1
    before = sql.snapshot_of_everything(conn)
    for bad in BAD_FAILURES:
        with sql.refused("ZB008", row=bad):
            sql.fail(conn, work.lease, bad)
    for array in (None, "{}", "null", '{"position": 1}'):
        with sql.refused("ZB008", "array", row=array):
            conn.execute("select bartleby.fail(%s, %s)", [work.lease, array])
    with sql.refused("ZB008", "twice"):
        sql.fail(conn, work.lease, {"position": first}, {"position": first})
    with sql.refused("ZB008", "failure 1: max_attempts"):
        sql.fail(conn, work.lease, {"position": first, "max_attempts": 1}, {"position": second, "max_attempts": 0})
    for reason in (None, "", "bad", "Unacceptable", "x" * 10_000):
        with sql.refused("ZB008", "rejected", row=reason):
            conn.execute("select bartleby.reject(%s, %s, %s)", [work.lease, first, reason])
    with sql.refused("ZB008", "position"):
        conn.execute("select bartleby.reject(%s, null, 'unacceptable')", [work.lease])
    assert sql.snapshot_of_everything(conn) == before


def verdicts_until_dead(conn: Connection, clock: Clock, **failure: Any) -> str:
    """Fail one message every 400 seconds until it is dead; return the initials of the verdicts, and the reason."""
    verdicts = ""
    while "d" not in verdicts:
        clock.advance(400)
        work = sql.claim(conn)
        assert work.one["attempt"] == len(verdicts) + 1
        verdicts += sql.fail_all(conn, work, **failure)[0]["verdict"][0]
        assert len(verdicts) < 20
    letter = sql.row(conn, "select reason, attempts from bartleby.dead_letters order by message_id desc limit 1")
    assert letter["attempts"] == len(verdicts)
    return f"{verdicts} {letter['reason']}"


PATIENT = {"max_attempts": 100, "backoff": "fixed", "base": 100}
VERDICTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "the budget of the queue": ({}, {}, {}, "rrd exhausted"),
    "asking for a retry does not raise the budget": ({}, {}, {"verdict": "retry"}, "rrd exhausted"),
    "a message's budget of 1 overrides the queue": ({}, {"max_attempts": 1}, {}, "d exhausted"),
    "a message's budget of 4 overrides the queue": ({}, {"max_attempts": 4}, {}, "rrrd exhausted"),
    "a handler's budget of 1 overrides the queue": ({}, {}, {"max_attempts": 1}, "d exhausted"),
    "a handler's budget of 4 overrides the queue": ({}, {}, {"max_attempts": 4}, "rrrd exhausted"),
    "a message's budget overrides the handler": ({}, {"max_attempts": 2}, {"max_attempts": 4}, "rd exhausted"),
    "a terminal failure": ({}, {}, {"verdict": "dead"}, "d terminal"),
    "the queue gives up": (PATIENT | {"give_up_after": 1250}, {}, {}, "rrrd expired"),
    "the handler's patience overrides the queue": (
        PATIENT | {"give_up_after": 10}, {}, {"give_up_after": 1250}, "rrrd expired",
    ),
}  # fmt: skip


@pytest.mark.seed("brighter-59", "outbox-11", "outbox-12", "outbox-62", "pgmq-75")
@pytest.mark.seed("pulse-1", "pulse-6", "pulse-15", "pulse-19", "pulse-42")
def test_most_specific_budget_decides_when_a_message_dies(conn: Connection, clock: Clock) -> None:
    for name, (policy, options, failure, expected) in VERDICTS.items():
        sql.create(conn, "q", **({"max_attempts": 3, "give_up_after": None} | policy))
        sql.send(conn, 1, **options)
        assert verdicts_until_dead(conn, clock, **failure) == expected, name


@pytest.mark.seed("pulse-20")
def test_budget_of_the_handler_is_not_stored_and_a_lowered_budget_holds_at_once(conn: Connection, clock: Clock) -> None:
    sql.send(conn, 1)
    for _ in range(2):
        sql.fail_all(conn, sql.claim(conn), max_attempts=9)
        clock.advance(400)
    assert sql.value(conn, "select max_attempts from bartleby.messages") is None
    sql.create(conn, "q", max_attempts=1)
    assert sql.fail_all(conn, sql.claim(conn))[0]["verdict"] == "dead"
    assert sql.value(conn, "select max_attempts from bartleby.dead_letter") is None


def test_rule_explains_the_verdict_in_every_interval_style(conn: Connection) -> None:
    nothing = dict.fromkeys(["verdict", "delay", "rule", "max_attempts", "give_up_after", "reason", "error"])
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "attempt 1 of 2"),
        (nothing, "attempt 1 of 2"),
        ({"rule": "KeyError: transient by default"}, "KeyError: transient by default; attempt 1 of 2"),
        ({"max_attempts": 7}, "attempt 1 of 7"),
        ({"max_attempts": 1, "rule": "r"}, "r; attempt 1 of 1"),
        ({"verdict": "dead"}, "the verdict was dead"),
        ({"verdict": "dead", "rule": "KeyError is listed by the handler"}, "KeyError is listed by the handler"),
        ({"give_up_after": 3600, "delay": 4000}, "give_up_after 01:00:00 is over"),
        ({"reason": "unacceptable", "rule": "payload.a: expected int"},
         "payload.a: expected int; rejected as unacceptable"),
    ]  # fmt: skip
    sql.create(conn, "q", max_attempts=2, backoff="fixed", base=3600)
    for style in ("postgres", "iso_8601", "sql_standard"):
        conn.execute(f"set intervalstyle = '{style}'".encode())
        work = claimed(conn, len(cases))
        sql.fail(conn, work.lease, *({"position": p, **c[0]} for p, c in zip(work.positions, cases, strict=True)))
        recorded = "select rule from bartleby.attempts where lease_id = %s order by message_id"
        assert sql.column(conn, recorded, work.lease) == [rule for _, rule in cases], style


@pytest.mark.seed("pulse-2", "pulse-3", "pulse-17")
@pytest.mark.seed("outbox-26", "pulse-5", "pulse-18", "pulse-21", "pulse-22", "pulse-32", "pulse-38", "pulse-41")
def test_attempts_and_dead_letter_have_all_the_evidence(conn: Connection, clock: Clock) -> None:
    """Endless texts are cut."""
    sql.create(conn, "q", max_attempts=2, backoff="fixed", base=10)
    sent = sql.send(conn, {"a": 1}, headers={"type": "t"}, key="k", generation=7)
    first = sql.claim(conn, worker="host-1")
    words = ("error_type", "error", "traceback", "fingerprint", "worker_version")
    earlier, later = ({word: f"{word} {n}" for word in words} for n in (1, 2))
    sql.fail_all(conn, first, **earlier, rule="handler", handler="shop.fulfil")
    clock.advance(11)
    second = sql.claim(conn, worker="host-2")
    sql.fail_all(conn, second, **later | {"error": "e" * 1_000_000, "traceback": "t" * 1_000_000})
    later |= {"error": "e" * 100_000, "traceback": "t" * 100_000}
    ledger = sql.rows(conn, "select * from bartleby.attempts order by attempt")
    retry_at, none = (attempt.pop("retry_at") for attempt in ledger)
    failed_at, dead_at = (attempt.pop("failed_at") for attempt in ledger)
    assert (retry_at - failed_at, none) == (timedelta(seconds=10), None)
    common = {"message_id": sent, "queue": "q", "cycle": 1, "outcome": "failed"}
    one = {"attempt": 1, "verdict": "retry", "rule": "handler; attempt 1 of 2", "handler": "shop.fulfil"}
    two = {"attempt": 2, "verdict": "dead", "rule": "attempt 2 of 2", "handler": None}
    assert ledger == [
        common | earlier | one | {"worker": "host-1", "lease_id": first.lease},
        common | later | two | {"worker": "host-2", "lease_id": second.lease},
    ]
    known = later | {
        "message_id": sent, "queue": "q", "status": "dead", "status_at": dead_at, "reason": "exhausted", "attempts": 2,
        "crashes": 0, "cycle": 1, "key": "k", "headers": {"type": "t"}, "payload": {"a": 1}, "generation": 7,
        "group_id": sql.value(conn, "select id from bartleby.groups where fingerprint = 'fingerprint 2'"),
        "worker": "host-2", "created_at": first.one["created_at"], "first_failed_at": failed_at, "dead_at": dead_at,
        "failure_history": [],
    }  # fmt: skip
    letter = sql.row(conn, "select * from bartleby.dead_letters")
    assert {name: found for name, found in letter.items() if found is not None} == known


@pytest.mark.seed("brighter-12", "brighter-37")
def test_failures_of_one_call_follow_their_routes(conn: Connection) -> None:
    """Exhausted messages follow the route too; retried ones follow none; a copy that dies follows its own."""
    sql.create(conn, "last")
    sql.create(conn, "invalid")
    sql.create(conn, "dead", dead_letter_to="last", max_attempts=1)
    sql.create(conn, "q", invalid_to="invalid", dead_letter_to="dead")
    work = claimed(conn)
    error: dict[str, Any] = {"error_type": "KeyError", "error": "'a'"}
    failures = (error | {"reason": "unacceptable"}, error | {"max_attempts": 1}, error)
    sql.fail(conn, work.lease, *({"position": p, **f} for p, f in zip(work.positions, failures, strict=True)))
    copies = {name: sql.claim(conn, 9, name) for name in ("invalid", "dead")}
    found = [
        (copy.one["payload"], *(copy.one["headers"][word] for word in ("rejection_reason", "rejection_message")))
        for copy in copies.values()
    ]
    assert found == [(1, "unacceptable", "KeyError: 'a'"), (2, "delivery_error", "KeyError: 'a'")]
    sql.fail_all(conn, copies["dead"])
    assert sql.claim(conn, 9, "last").one["headers"]["original_queue"] == "dead"
    assert (sql.stats(conn)["dead"], sql.stats(conn, "dead")["dead"], sql.stats(conn, "last")["ready"]) == (2, 1, 0)


def delays(conn: Connection, clock: Clock, count: int, queue: str, **failure: Any) -> list[float]:
    """The delays after the first attempts of one message."""
    sent = sql.send(conn, 1, queue, max_attempts=32000)
    for _ in range(count):
        sql.fail_all(conn, sql.claim(conn, queue=queue), **failure)
        clock.advance(1_000_000)
    query = "select retry_at - failed_at from bartleby.attempt where message_id = %s order by id"
    return [delay.total_seconds() for delay in sql.column(conn, query, sent)]


@pytest.mark.seed("outbox-8", "outbox-9", "outbox-10", "outbox-13", "pgmq-67", "pulse-16", "pulse-36")
def test_retry_waits_as_the_policy_or_the_worker_says(conn: Connection, clock: Clock) -> None:
    """tests/property/test_policy_curves.py has all curves."""
    sql.create(conn, "exponential", jitter="none")
    sql.create(conn, "schedule", backoff="schedule", schedule=[5, 1, "2 minutes"])
    assert delays(conn, clock, 10, "exponential") == pytest.approx([1, 2, 4, 8, 16, 32, 64, 128, 256, 300])
    assert delays(conn, clock, 4, "schedule") == pytest.approx([5, 1, 120, 120])
    assert delays(conn, clock, 2, "q", delay=12.5) == pytest.approx([12.5, 12.5])
    sql.create(conn, "jitter", base=100, cap=100)
    conn.execute("select setseed(0.5)")
    found = delays(conn, clock, 40, "jitter")
    assert all(0 <= delay <= 100 for delay in found)
    assert (min(found) < 40, max(found) > 60, len(set(found)) > 30) == (True, True, True)


ROUTES: list[tuple[str, dict[str, str], str | None]] = [
    ("delivery_error", {}, None),
    ("delivery_error", {"dead_letter_to": "dead"}, "dead"),
    ("delivery_error", {"invalid_to": "invalid"}, None),
    ("delivery_error", {"dead_letter_to": "dead", "invalid_to": "invalid"}, "dead"),
    ("unacceptable", {}, None),
    ("unacceptable", {"dead_letter_to": "dead"}, "dead"),
    ("unacceptable", {"invalid_to": "invalid"}, "invalid"),
    ("unacceptable", {"dead_letter_to": "dead", "invalid_to": "invalid"}, "invalid"),
]


@pytest.mark.seed("brighter-1", "brighter-6", "brighter-13", "brighter-14", "brighter-15", "brighter-16", "brighter-21")
@pytest.mark.seed("brighter-23", "brighter-24", "brighter-26", "brighter-29", "brighter-30", "brighter-31")
@pytest.mark.seed("brighter-40", "brighter-41", "brighter-42", "brighter-43", "brighter-45", "brighter-46")
@pytest.mark.seed("brighter-47", "brighter-48", "brighter-58", "brighter-2", "brighter-7", "brighter-27", "brighter-28")
@pytest.mark.seed(
    "brighter-33", "brighter-34", "brighter-35", "brighter-38", "brighter-44", "brighter-50", "brighter-52"
)
@pytest.mark.seed("brighter-53", "brighter-57")
def test_rejected_message_is_kept_and_its_copy_follows_the_route(conn: Connection) -> None:
    for name in ("dead", "invalid"):
        sql.create(conn, name)
    conn.execute("set timezone = 'Asia/Kathmandu'")
    headers = {"type": "order", "x": 1, "original_queue": "elsewhere", "rejection_reason": "none"}  # misleading
    for reason, routes, target in ROUTES:
        how = "fail" if "dead_letter_to" in routes else "reject"
        case = f"{how} {reason} {routes}"
        sql.create(conn, "q", **{"dead_letter_to": None, "invalid_to": None, **routes})
        sent = sql.send(conn, {"a": 1}, headers=headers, key="k", generation=3)
        work = sql.claim(conn)
        if how == "reject":
            sql.reject(conn, work.lease, work.positions[0], reason, "no such street")
        else:
            sql.fail_all(conn, work, reason=reason, verdict="retry", error="no such street")
        recorded = "select outcome, verdict, rule, error_type, error, attempt from bartleby.attempts"
        assert sql.row(conn, recorded + " where message_id = %s", sent) == {
            "outcome": "rejected", "verdict": "dead", "rule": f"rejected as {reason}", "error": "no such street",
            "error_type": reason if how == "reject" else None, "attempt": 1,
        }, case  # fmt: skip
        letter = sql.row(conn, "select * from bartleby.dead_letters where message_id = %s", sent)
        assert letter["reason"] == ("unacceptable" if reason == "unacceptable" else "terminal"), case
        assert letter["headers"] == headers, case
        copies = {name: sql.claim(conn, 9, name).messages for name in ("dead", "invalid")}
        assert {name for name, messages in copies.items() if messages} == ({target} if target else set()), case
        if target is None:
            continue
        (copy,) = copies[target]
        assert (copy["payload"], copy["key"], copy["generation"], copy["attempt"]) == ({"a": 1}, "k", 3, 1), case
        assert copy["message_id"] != sent
        timestamp = copy["headers"].pop("rejection_timestamp")
        assert timestamp.endswith("Z")
        assert datetime.fromisoformat(timestamp) == letter["dead_at"].astimezone(UTC)
        origin = {"original_queue": "q", "original_message_id": sent, "original_type": "order"}
        rejection = {"rejection_reason": reason, "rejection_message": "no such street"}
        assert copy["headers"] == headers | origin | rejection, case
