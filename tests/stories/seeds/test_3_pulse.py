"""Retries on the jobs table (pulse).

The claim counts attempts, a failure is one guarded statement, a timestamp is the whole scheduler, and a job that has
used up its attempts is parked, not deleted.
"""

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest

from bartleby import Client, Failure, LeaseLost
from bartleby.testing import Clock
from tests.kit.sql import (
    ack,
    await_true,
    claim,
    create,
    fail,
    fail_all,
    reap,
    refused,
    release,
    row,
    rows,
    send,
    send_count,
    stats,
    value,
    waiting,
)
from tests.stories.kit import SECOND, Connection, bury, fail_one, fail_until_dead, ledger, letter, lose, places

PULSE: dict[str, Any] = {"max_attempts": 3, "backoff": "quadratic"}
LEASED = "select state, worker, leased_until - bartleby.clock() as hidden from bartleby.messages"


@pytest.fixture
def q(conn: Connection, clock: Clock) -> Connection:
    """A queue with the policy of the design."""
    create(conn, **PULSE)
    return conn


def attempts(conn: Connection) -> int:
    return int(value(conn, "select attempts from bartleby.messages"))


@pytest.mark.seed("pulse-1", "pulse-2", "pulse-3", "pulse-5", "pulse-6", "pulse-15", "pulse-16", "pulse-17", "pulse-18")
@pytest.mark.seed("pulse-19", "pulse-21", "pulse-22", "pulse-35", "pulse-38", "pulse-41")
def test_failed_message_backs_off_is_retried_and_is_parked_after_the_third_attempt(q: Connection, clock: Clock) -> None:
    create(q, "usual")
    assert (stats(q)["max_attempts"], stats(q, "usual")["max_attempts"]) == (3, 5)
    sent = send(q, {"order": 42}, headers={"tenant": "acme"}, key="order-42", max_attempts=3)
    assert places(q, sent) == ["ready"]
    began = clock.now()
    for attempt, wait in ((1, SECOND), (2, 4 * SECOND), (3, None)):
        work = claim(q, worker="w-1")
        assert (work.ids, work.one["attempt"], places(q, sent)) == ([sent], attempt, ["leased"])
        assert tuple(row(q, LEASED).values()) == ("leased", "w-1", 60 * SECOND)
        error = {"error_type": "Timeout", "error": f"failure {attempt}", "traceback": "shop.py, line 24"}
        fail_all(q, work, **error)
        found = ledger(q, sent)[-1]
        assert (found["verdict"], found["rule"]) == ("retry" if wait else "dead", f"attempt {attempt} of 3")
        assert found["retry_at"] == (found["failed_at"] + wait if wait else None)
        assert (found["error_type"], found["error"]) == ("Timeout", f"failure {attempt}")
        assert claim(q).messages == []
        if wait:
            assert (places(q, sent), tuple(row(q, LEASED).values())) == (["deferred"], ("deferred", None, None))
            limits = row(q, "select attempts, max_attempts, run_at - bartleby.clock() as due_in from bartleby.messages")
            assert limits == {"attempts": attempt, "max_attempts": 3, "due_in": wait}
            clock.advance(wait)
    assert places(q, sent) == ["dead"]
    found = letter(q, sent)
    assert (found["status"], found["reason"], found["attempts"]) == ("dead", "exhausted", 3)
    assert (found["error_type"], found["error"], found["traceback"]) == ("Timeout", "failure 3", "shop.py, line 24")
    assert (found["payload"], found["headers"], found["key"]) == ({"order": 42}, {"tenant": "acme"}, "order-42")
    assert (found["first_failed_at"], found["dead_at"]) == (began, clock.now())
    assert clock.now() - began == timedelta(seconds=5, microseconds=2)
    assert [each["error"] for each in ledger(q, sent)] == ["failure 1", "failure 2", "failure 3"]


@pytest.mark.seed("pulse-4", "pulse-32", "pulse-33", "pulse-34")
def test_dead_letter_is_listed_and_not_dispatched_again(q: Connection, clock: Clock, client: Client) -> None:
    sent = [bury(q, {"id": 1}, error="no such customer"), send(q, {"id": 2})]
    fail_until_dead(q, clock)
    clock.advance(86_400)
    reap(q)
    assert (claim(q, 100).messages, [places(q, each) for each in sent]) == ([], [["dead"]] * 2)
    assert [each.message_id for each in client.dead_letters(sort="oldest")] == sent
    found = client.dead_letter(sent[0])
    assert found is not None
    assert (found.payload, found.error, found.status) == ({"id": 1}, "no such customer", "dead")


@pytest.mark.seed("pulse-16", "pulse-20", "pulse-36", "pulse-42", "pulse-43")
def test_curve_and_limit_are_of_the_queue_or_of_the_message(q: Connection, clock: Clock) -> None:
    send(q, max_attempts=20)
    waits = fail_until_dead(q, clock)
    assert waits[:4] == [SECOND, 4 * SECOND, 9 * SECOND, 16 * SECOND]
    assert waits[16:] == [289 * SECOND, 300 * SECOND, 300 * SECOND]
    sent = send(q, max_attempts=1)
    fail_one(q)
    assert (letter(q, sent)["attempts"], letter(q, sent)["reason"]) == (1, "exhausted")
    sent = send(q)
    for wait in (1, 4):
        assert fail_one(q)["verdict"] == "retry"
        clock.advance(wait)
    q.execute("select bartleby.configure_queue('q', '{\"max_attempts\": 1}')")
    found = fail_one(q)
    assert (found["verdict"], found["rule"], found["retry_at"]) == ("dead", "attempt 3 of 1", None)
    assert (letter(q, sent)["reason"], letter(q, sent)["attempts"]) == ("exhausted", 3)
    create(q, "other", max_attempts=2, backoff="fixed", base=7)
    for base in (7, 9):
        q.execute("select bartleby.configure_queue('other', jsonb_build_object('base', %s::int))", [base])
        send(q, queue="other")
        assert fail_until_dead(q, clock, "other") == [base * SECOND]
    for name, jitter, times in (("even", {}, 1), ("smooth", {"jitter": "full"}, 20)):
        create(q, name, **PULSE, **jitter)
        send_count(q, 20, name)
        assert len({each["retry_at"] for each in fail_all(q, claim(q, 20, name))}) == times, name


@pytest.mark.seed("pulse-7", "pulse-8", "pulse-9", "pulse-10", "pulse-30", "pulse-31")
def test_claim_counts_the_attempt_of_a_message_that_runs_alone(q: Connection, clock: Clock) -> None:
    sent = send(q)
    for _ in range(5):
        work = claim(q)
        assert (work.ids, work.one["attempt"]) == ([sent], 1)
        assert release(q, work.lease) == 1
        clock.advance(0)
    assert (ledger(q, sent), attempts(q)) == ([], 0)
    lose(q, clock)  # charged to no message: a neighbour in the batch may have killed the worker
    assert attempts(q) == 0
    with q.transaction(force_rollback=True):
        assert claim(q, worker="w-1").one["attempt"] == 1
        assert tuple(row(q, LEASED).values())[:2] == ("leased", "w-1")
    clock.advance(61)
    assert reap(q) == []
    alone = lose(q, clock)
    assert (alone.one["attempt"], alone.one["solo"]) == (1, True)
    assert row(q, "select attempts, crashes from bartleby.messages") == {"attempts": 1, "crashes": 1}
    assert [(each["outcome"], each["attempt"], each["error_type"], each["error"]) for each in ledger(q, sent)] == [
        ("lost", 1, "WorkerLost", "the lease lapsed"),
        ("crashed", 1, "WorkerLost", "worker w stopped answering while it ran this message alone"),
    ]
    clock.advance(1)
    found = fail_one(q)
    assert (found["attempt"], found["verdict"]) == (2, "retry")
    clock.advance(4)
    assert fail_one(q)["rule"] == "attempt 3 of 3"
    assert (letter(q, sent)["attempts"], letter(q, sent)["crashes"]) == (3, 1)


@pytest.mark.seed("pulse-11", "pulse-28", "pulse-40", "outbox-60")
def test_lapsed_lease_leads_to_the_same_decision_as_a_failure(q: Connection, clock: Clock) -> None:
    poison = send(q, max_attempts=10)
    losses = 0
    while places(q, poison) != ["dead"]:
        assert lose(q, clock).ids == [poison]
        losses += 1
        clock.advance(10)
    assert (losses, stats(q)["crash_budget"], letter(q, poison)["reason"]) == (4, 3, "crashed")
    assert (letter(q, poison)["attempts"], letter(q, poison)["crashes"]) == (3, 3)
    outcomes = [(each["outcome"], each["verdict"]) for each in ledger(q, poison)]
    assert outcomes == [("lost", "retry"), ("crashed", "retry"), ("crashed", "retry"), ("crashed", "dead")]
    create(q, "other", **PULSE)
    q.execute("select bartleby.configure_queue('q', '{\"crash_budget\": 10}')")
    same = (
        "select attempt, verdict, rule from bartleby.attempts where message_id = %s and outcome = %s order by attempt"
    )
    for limit, expected in ((3, [SECOND, 4 * SECOND, None]), (1, [None])):
        lost, reported = send(q, max_attempts=limit), send(q, queue="other", max_attempts=limit)
        lose(q, clock)
        waits = []
        for _ in range(limit):
            lose(q, clock)
            found = ledger(q, lost)[-1]
            waits.append(found["retry_at"] and found["retry_at"] - found["failed_at"])
            clock.advance(waits[-1] or 0)
        assert waits == [*fail_until_dead(q, clock, "other"), None] == expected
        crashed, failed = rows(q, same, lost, "crashed"), rows(q, same, reported, "failed")
        final = {"attempt": limit, "verdict": "dead", "rule": f"attempt {limit} of {limit}"}
        assert crashed[-1] == failed[-1] == final
        assert [(each["attempt"], each["verdict"]) for each in crashed] == [
            (each["attempt"], each["verdict"]) for each in failed
        ]
        assert (letter(q, lost)["attempts"], letter(q, lost)["reason"]) == (limit, "crashed")
        assert (letter(q, reported)["attempts"], letter(q, reported)["reason"]) == (limit, "exhausted")


@pytest.mark.seed("pulse-29")
def test_sweep_takes_back_all_lapsed_leases_at_once(q: Connection, clock: Clock) -> None:
    send_count(q, 6)
    for _ in range(5):
        claim(q, lease="10 s")
    held = claim(q, lease="1 h")
    clock.advance(9)
    assert reap(q) == []
    clock.advance(2)
    assert [each["messages"] for each in reap(q)] == [1] * 5
    assert (stats(q)["leased"], stats(q)["deferred"]) == (1, 5)
    assert ack(q, held.lease) == 1


@pytest.mark.seed("pulse-12", "pulse-13", "pulse-14")
def test_only_a_running_message_can_fail(q: Connection, clock: Clock, client: Client) -> None:
    kept, done = send(q, max_attempts=2), send(q)
    with refused("ZB006"):
        fail(q, 1, {"position": 1})
    assert places(q, kept) == ["ready"]
    work = claim(q, 2)
    ack(q, work.lease, work.positions[1:])
    with refused("ZB006", "lease lost"):
        fail_all(q, work)
    with pytest.raises(LeaseLost):
        client.fail(work.lease, [Failure(work.positions[1], "KeyError", "'x'")])
    assert (places(q, kept), places(q, done), ledger(q, kept), ledger(q, done)) == (["leased"], [], [], [])
    for state, verdict in (("deferred", "retry"), ("dead", "dead")):
        failure = {"position": work.positions[0]}
        [decided] = fail(q, work.lease, failure)
        assert (decided["message_id"], decided["verdict"], places(q, kept)) == (kept, verdict, [state])
        with refused("ZB006"):
            fail(q, work.lease, failure)
        assert places(q, kept) == [state]
        clock.advance(1)
        work = claim(q) if state == "deferred" else work
    assert [each["attempt"] for each in ledger(q, kept)] == [1, 2]


@pytest.mark.seed("pulse-23")
def test_second_report_of_a_failure_waits_and_is_refused(q: Connection, connect: Callable[[], Connection]) -> None:
    sent = send(q)
    work = claim(q)
    failure = {"position": work.positions[0]}
    first, second = connect(), connect()
    with ExitStack() as race:
        with first.transaction():
            fail(first, work.lease, failure)
            late = race.enter_context(waiting(q, second, lambda conn: fail(conn, work.lease, failure), for_whom=first))
        with refused("ZB006"):
            late.result()
    assert len(ledger(q, sent)) == 1


@pytest.mark.seed("pulse-24", "pulse-25", "pulse-26", "pulse-39")
def test_claim_alone_brings_retries_back_when_they_are_due(q: Connection, clock: Clock) -> None:
    failed = send_count(q, 20)
    fail_all(q, claim(q, 20))
    delayed = send(q, "later", delay="1 s")
    fresh = send(q, "fresh")
    assert claim(q, 30).ids == [fresh]
    clock.advance(0.99)
    assert claim(q, 30).messages == []
    clock.advance(0.01)
    assert sorted(claim(q, 30).ids) == [*failed, delayed]
    sessions = "select count(*) from pg_stat_activity where datname = current_database() and backend_type like %s"
    await_true(lambda: value(q, sessions, "client%") == 1)  # one that was closed a moment ago may still be listed
