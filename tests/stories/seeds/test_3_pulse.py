"""Retries on the jobs table (pulse).

Attempts are counted by the claim, a failure is one guarded statement, a timestamp is the whole scheduler, and a job
that has used up its attempts is parked, not deleted.
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
    drain,
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
from tests.stories.kit import ANA, SECOND, Connection, bury, fail_one, fail_until_dead, ledger, letter, lose, places

PULSE: dict[str, Any] = {"max_attempts": 3, "backoff": "quadratic"}


@pytest.fixture
def q(conn: Connection, clock: Clock) -> Connection:
    """A queue with the policy of the design."""
    create(conn, **PULSE)
    return conn


def test_retries_are_bounded(q: Connection, clock: Clock) -> None:
    """Context: retries are bounded, so that no poison message goes round for ever."""
    sent = send(q)
    assert len(fail_until_dead(q, clock)) == 2
    assert places(q, sent) == ["dead"]


def test_a_failure_backs_off(q: Connection) -> None:
    """Context: a retry waits, so that a struggling downstream is not hit at once again."""
    sent = send(q)
    found = fail_one(q)
    assert found["retry_at"] > found["failed_at"]
    assert (places(q, sent), claim(q).messages) == (["deferred"], [])


def test_the_first_failure_drops_nothing(q: Connection, clock: Clock) -> None:
    """Context: a message that failed once is not dropped but tried again."""
    sent = send(q)
    fail_one(q)
    clock.advance(1)
    assert claim(q).ids == [sent]


def test_what_has_failed_for_good_stays_parked(q: Connection, clock: Clock) -> None:
    """Context: what has failed for good is parked in a state that nothing leads out of by itself."""
    sent = send(q)
    fail_until_dead(q, clock)
    clock.advance(86_400)
    reap(q)
    assert (claim(q).messages, places(q, sent)) == ([], ["dead"])


def test_the_row_says_attempts_limit_error_and_next_run(q: Connection, clock: Clock) -> None:
    """Context: a job's row has its attempts, its limit, its last error and when it may run again.

    Here: the view `messages` has all but the error, which is in the view `attempts` with those before it.
    """
    sent = send(q, max_attempts=3)
    fail_one(q, error="downstream said no")
    found = row(q, "select attempts, max_attempts, run_at - bartleby.clock() as due_in from bartleby.messages")
    assert found == {"attempts": 1, "max_attempts": 3, "due_in": SECOND}
    assert ledger(q, sent)[-1]["error"] == "downstream said no"


def test_three_attempts_are_the_limit(q: Connection, clock: Clock) -> None:
    """Context: the limit is three attempts.

    Here: five by default, and three where the policy of the queue says so, as in all tests of this file.
    """
    create(q, "usual")
    assert (stats(q)["max_attempts"], stats(q, "usual")["max_attempts"]) == (3, 5)
    sent = send(q)
    fail_until_dead(q, clock)
    assert letter(q, sent)["attempts"] == 3


def test_an_attempt_counts_from_its_claim_on(q: Connection, clock: Clock) -> None:
    """1: an attempt counts from the claim on, not from the failure: nothing is reported here, and it was one.

    Here: of a message that runs alone, as it does after its first loss, which charges nobody.
    """
    sent = send(q)
    lose(q, clock)
    assert lose(q, clock).one["attempt"] == 1
    assert "failed" not in {each["outcome"] for each in ledger(q, sent)}
    clock.advance(1)
    assert claim(q).one["attempt"] == 2
    assert row(q, "select attempts from bartleby.messages")["attempts"] == 1


def test_counting_and_marking_as_running_are_one_statement(q: Connection, clock: Clock) -> None:
    """1: one statement counts the attempt and marks the job as running; rolled back, neither has happened."""
    send(q)
    lose(q, clock)  # it runs alone from now on, so that what is claimed and lost is charged
    with q.transaction(force_rollback=True):
        assert claim(q, worker="w-1").one["attempt"] == 1
        assert row(q, "select state, worker from bartleby.messages") == {"state": "leased", "worker": "w-1"}
    clock.advance(61)
    assert reap(q) == []
    assert lose(q, clock).one["attempt"] == 1
    clock.advance(1)
    assert claim(q).one["attempt"] == 2


def test_a_worker_that_dies_silently_has_used_an_attempt(q: Connection, clock: Clock) -> None:
    """1: a worker that ends before it can report has used up an attempt.

    Here: only if its message ran alone, for a claim is a batch, and a neighbour may have been the killer. The first
    loss charges nobody and makes the message run alone from then on; the next one is charged to it.
    """
    sent = send(q)
    lose(q, clock)
    assert [(each["outcome"], each["attempt"]) for each in ledger(q, sent)] == [("lost", 1)]
    assert lose(q, clock).one["solo"] is True
    assert row(q, "select attempts, crashes from bartleby.messages") == {"attempts": 1, "crashes": 1}
    assert ledger(q, sent)[-1]["outcome"] == "crashed"


def test_what_is_given_back_has_used_no_attempt(q: Connection, clock: Clock) -> None:
    """1: what counts is that a run was started, whatever became of it.

    Here: unless the worker gives it back, as it does when it is told to stop; then nobody has tried anything.
    """
    sent = send(q)
    for _ in range(5):
        work = claim(q)
        assert (work.ids, work.one["attempt"]) == ([sent], 1)
        assert release(q, work.lease) == 1
        clock.advance(0)
    assert (ledger(q, sent), row(q, "select attempts from bartleby.messages")["attempts"]) == ([], 0)
    assert len(fail_until_dead(q, clock)) == 2


def test_a_crash_looping_poison_message_cannot_go_on_for_ever(q: Connection, clock: Clock) -> None:
    """1: a poison job that kills every worker before it can report still comes to an end.

    Here: after one loss that charges nobody and as many as the crash budget (3), however many attempts it has left.
    """
    sent = send(q, max_attempts=10)
    losses = 0
    while places(q, sent) != ["dead"]:
        assert lose(q, clock).ids == [sent]
        losses += 1
        clock.advance(10)
    assert (losses, stats(q)["crash_budget"]) == (4, 3)
    assert letter(q, sent)["reason"] == "crashed"


def test_a_failure_is_one_guarded_statement(q: Connection) -> None:
    """2: only a running job can fail, and the guard is in the statement itself.

    Here: it names a lease and positions. If one of them is not held any more, nothing happens to the others either.
    """
    kept, done = send(q), send(q)
    work = claim(q, 2)
    ack(q, work.lease, work.positions[1:])
    with refused("ZB006"):
        fail_all(q, work)
    assert (places(q, kept), places(q, done)) == (["leased"], [])
    [decided] = fail(q, work.lease, {"position": work.positions[0]})
    assert (decided["message_id"], decided["verdict"], places(q, kept)) == (kept, "retry", ["deferred"])


def test_zero_rows_are_an_error_of_our_own(q: Connection, client: Client) -> None:
    """2: a failure that meets no running job is an error of its own, which changes nothing.

    Here: SQLSTATE ZB006, in Python `LeaseLost`.
    """
    sent = send(q)
    work = claim(q)
    ack(q, work.lease)
    with refused("ZB006", "lease lost"):
        fail_all(q, work)
    with pytest.raises(LeaseLost):
        client.fail(work.lease, [Failure(work.positions[0], "KeyError", "'x'")])
    assert (ledger(q, sent), places(q, sent)) == ([], [])


def test_what_does_not_run_cannot_fail(q: Connection, clock: Clock) -> None:
    """2: the guard is the state: neither what is pending, nor what waits for its retry, nor what is dead can fail."""
    sent = send(q, max_attempts=2)
    with refused("ZB006"):
        fail(q, 1, {"position": 1})
    assert places(q, sent) == ["ready"]
    for state in ("deferred", "dead"):
        work = claim(q)
        fail_all(q, work)
        with refused("ZB006"):
            fail_all(q, work)
        assert places(q, sent) == [state]
        clock.advance(1)
    assert [each["attempt"] for each in ledger(q, sent)] == [1, 2]


def test_below_the_limit_it_is_retrying(q: Connection) -> None:
    """2, first branch: while attempts are left the job is to be tried again."""
    sent = send(q)
    found = fail_one(q)
    assert (found["verdict"], found["rule"]) == ("retry", "attempt 1 of 3")
    assert places(q, sent) == ["deferred"]


def test_the_next_run_is_after_attempts_squared_seconds(q: Connection, clock: Clock) -> None:
    """2, first branch: after attempt n it waits n² seconds: 1 s, 4 s, 9 s and so on.

    Here: the backoff `quadratic`; n² only, up to a cap of 300 s.
    """
    send(q, max_attempts=20)
    waits = fail_until_dead(q, clock)
    assert waits[:4] == [SECOND, 4 * SECOND, 9 * SECOND, 16 * SECOND]
    assert waits[16:] == [289 * SECOND, 300 * SECOND, 300 * SECOND]


def test_lease_and_worker_are_cleared(q: Connection) -> None:
    """2, first branch: the lease is cleared, and so is the name of whoever held it."""
    send(q)
    work = claim(q, worker="w-1")
    held = row(q, "select worker, leased_until from bartleby.messages")
    assert (held["worker"], held["leased_until"]) == ("w-1", value(q, "select bartleby.clock() + interval '60 s'"))
    fail_all(q, work)
    assert row(q, "select worker, leased_until from bartleby.messages") == {"worker": None, "leased_until": None}


def test_the_error_is_recorded(q: Connection) -> None:
    """2, first branch: the error is written down with the job."""
    sent = send(q)
    fail_one(q, error_type="Timeout", error="after 30 s")
    assert (ledger(q, sent)[0]["error_type"], ledger(q, sent)[0]["error"]) == ("Timeout", "after 30 s")


def test_at_the_limit_it_is_dead_lettered(q: Connection, clock: Clock) -> None:
    """2, second branch: the failure of the last attempt makes it a dead letter."""
    sent = send(q)
    fail_until_dead(q, clock)
    assert (letter(q, sent)["status"], letter(q, sent)["reason"]) == ("dead", "exhausted")
    assert [each["verdict"] for each in ledger(q, sent)] == ["retry", "retry", "dead"]


def test_above_the_limit_it_is_dead_lettered_too(q: Connection, clock: Clock) -> None:
    """2, second branch: not only at the limit but above it too, as when it was lowered while the job waited."""
    sent = send(q)
    for wait in (1, 4):
        assert fail_one(q)["verdict"] == "retry"
        clock.advance(wait)
    q.execute("select bartleby.configure_queue('q', '{\"max_attempts\": 1}')")
    found = fail_one(q)
    assert (found["verdict"], found["rule"], found["retry_at"]) == ("dead", "attempt 3 of 1", None)
    assert (letter(q, sent)["reason"], letter(q, sent)["attempts"]) == ("exhausted", 3)


def test_the_time_of_its_end_is_stamped(q: Connection, clock: Clock) -> None:
    """2, second branch: the time at which it ended is stamped on it."""
    sent = send(q)
    fail_until_dead(q, clock)
    assert letter(q, sent)["dead_at"] == value(q, "select bartleby.clock()")
    assert letter(q, sent)["dead_at"] - letter(q, sent)["first_failed_at"] == timedelta(seconds=5, microseconds=2)


def test_the_last_error_is_kept_for_the_post_mortem(q: Connection, clock: Clock) -> None:
    """2, second branch: the last error stays on it, for the post-mortem."""
    sent = send(q)
    fail_until_dead(q, clock, error_type="KeyError", error="'AT'", traceback="shop.py, line 24")
    found = letter(q, sent)
    assert (found["error_type"], found["error"], found["traceback"]) == ("KeyError", "'AT'", "shop.py, line 24")


def test_two_reporters_of_one_job_do_not_race(q: Connection, connect: Callable[[], Connection]) -> None:
    """2: the decision is atomic: of two who report one job the first is heard, and the other told that it is late."""
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


def test_the_claim_is_the_scheduler_of_retries(q: Connection, clock: Clock) -> None:
    """3: a claim takes what is pending, and what is to be retried and whose time has come, by one comparison."""
    failed = send(q)
    fail_one(q)
    fresh = send(q)
    assert claim(q, 10).ids == [fresh]
    clock.advance(1)
    assert claim(q, 10).ids == [failed]


def test_nothing_is_claimed_before_its_time(q: Connection, clock: Clock) -> None:
    """3: a retry is a pending job that is not yet eligible: before its time no claim takes it, nor any other job."""
    send(q, "again")
    fail_one(q)
    send(q, "later", delay="1 s")
    clock.advance(0.99)
    assert claim(q, 2).messages == []
    clock.advance(0.01)
    assert sorted(claim(q, 2).payloads) == ["again", "later"]


def test_no_promoter_runs_in_the_background(q: Connection, clock: Clock) -> None:
    """3: no queue of retries, no timer, nobody who brings jobs back: only claims are made here, and all come back."""
    sent = send_count(q, 20)
    fail_all(q, claim(q, 20))
    clock.advance(1)
    assert sorted(claim(q, 20).ids) == sorted(sent)
    sessions = (
        "select count(*) from pg_stat_activity where datname = current_database() and backend_type like 'client%'"
    )
    await_true(lambda: value(q, sessions) == 1)  # one that was closed a moment ago may still be seen


def test_a_claim_finds_both_by_an_index(q: Connection, clock: Clock) -> None:
    """3: what is pending and what is to be retried is found by an index, however much there is of either.

    Here: by two, of which each claim reads the stretch after what the last one has read.
    """
    _, few, many = (blocks_of_claims(q, count) for count in (1, 10, 10_000))  # the first one warms up
    assert many["nothing"] < few["nothing"] + 50
    assert many["pending"] < few["pending"] + 50
    clock.advance(1)
    [due] = value(q, LOOKED)
    assert due["Plan"]["Actual Rows"] == 1


LOOKED = "explain (analyze, buffers, format json) select * from bartleby.claim('q', 'w')"


def blocks_of_claims(q: Connection, count: int) -> dict[str, int]:
    """How many blocks a claim looks at that finds no retry due, and one with as many that are pending."""
    looked = {}
    send_count(q, count)
    fail_all(q, claim(q, count))
    for name, found in (("nothing", 0), ("pending", 1)):
        [plan] = value(q, LOOKED)
        assert plan["Plan"]["Actual Rows"] == found
        looked[name] = int(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"])
        send_count(q, count)
    drain(q)
    return looked


def test_crash_recovery_takes_the_same_branch(q: Connection, clock: Clock) -> None:
    """4: a lapsed lease leads to the same decision as a reported failure: retried after n², or dead at the limit.

    Here: the loss of a message that ran alone. Curve and limit are the same ones; the crash budget, which is apart, is
    set so high that it does not decide.
    """
    q.execute("select bartleby.configure_queue('q', '{\"crash_budget\": 10}')")
    lost, reported = send(q), send(q, queue=other(q))
    lose(q, clock)
    waits = []
    for _ in range(3):
        lose(q, clock)
        found = ledger(q, lost)[-1]
        waits.append(found["retry_at"] and found["retry_at"] - found["failed_at"])
        clock.advance(waits[-1] or 0)
    assert waits == [SECOND, 4 * SECOND, None]
    assert waits[:2] == fail_until_dead(q, clock, "other")
    same = "select attempt, verdict from bartleby.attempts where message_id = %s and outcome <> 'lost' order by attempt"
    assert rows(q, same, lost) == rows(q, same, reported)
    assert (letter(q, lost)["attempts"], ledger(q, lost)[-1]["rule"]) == (3, "attempt 3 of 3")


def other(q: Connection) -> str:
    """A second queue with the same policy."""
    create(q, "other", **PULSE)
    return "other"


def test_the_sweep_takes_all_lapsed_leases_at_once(q: Connection, clock: Clock) -> None:
    """4: the sweep is over all expired leases in one statement, and leaves those that are still held."""
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


def test_a_lapsed_lease_says_so_as_its_error(q: Connection, clock: Clock) -> None:
    """4: the error of such a job says that the lease of its worker expired.

    Here: its type is `WorkerLost`. The text says that the lease lapsed, and of a message that ran alone which worker
    it was that went silent.
    """
    sent = send(q)
    lose(q, clock)
    assert (ledger(q, sent)[0]["error_type"], ledger(q, sent)[0]["error"]) == ("WorkerLost", "the lease lapsed")
    lose(q, clock)
    assert (ledger(q, sent)[1]["error_type"], ledger(q, sent)[1]["error"]) == (
        "WorkerLost", "worker w stopped answering while it ran this message alone",
    )  # fmt: skip


def test_loud_and_silent_failures_add_up(q: Connection, clock: Clock) -> None:
    """4: limit, backoff and dead-lettering make no difference between a reported failure and a silent one.

    Here: from the second loss on, for the first charges nobody. A crash counts twice: as an attempt, of which both
    kinds share one limit, and against the crash budget, which is apart.
    """
    sent = send(q)
    lose(q, clock)  # charges nobody
    lose(q, clock)  # attempt 1
    clock.advance(1)
    assert fail_one(q)["retry_at"] is not None  # attempt 2
    clock.advance(4)
    assert fail_one(q)["rule"] == "attempt 3 of 3"
    assert (letter(q, sent)["attempts"], letter(q, sent)["crashes"]) == (3, 1)


def test_a_dead_letter_stays_queryable_by_id(q: Connection, client: Client) -> None:
    """5: what is dead-lettered can be fetched like any job, with its error.

    Here: not as the same row but from a table of its own, under the same id, until its retention is over.
    """
    sent = bury(q, {"id": 7}, error="no such customer")
    found = client.dead_letter(sent)
    assert found is not None
    assert (found.payload, found.error, found.status) == ({"id": 7}, "no such customer", "dead")


def test_dead_letters_are_listed(q: Connection, client: Client) -> None:
    """5: what is dead-lettered is in the list."""
    sent = [bury(q, n) for n in range(3)]
    assert [each.message_id for each in client.dead_letters(sort="oldest")] == sent


def test_nothing_dispatches_a_dead_letter(q: Connection, clock: Clock) -> None:
    """5: nothing hands it out again, for no claim ever matches it."""
    bury(q)
    clock.advance(86_400)
    reap(q)
    assert claim(q, 100).messages == []


def test_a_message_is_never_in_two_places_or_none(q: Connection, clock: Clock) -> None:
    """Refused, a table of retries: with a second table a job can be in both or in neither.

    Here: there are several tables, and every step between them is one transaction.
    """
    sent = send(q)
    seen = [places(q, sent)]
    for _ in range(3):
        work = claim(q)
        seen.append(places(q, sent))
        fail_all(q, work)
        seen.append(places(q, sent))
        clock.advance(9)
    assert seen == [["ready"], *[["leased"], ["deferred"]] * 2, ["leased"], ["dead"]]


def test_the_quadratic_curve_has_no_jitter_unless_asked_for(q: Connection) -> None:
    """Deferred, jitter: three attempts at 1, 4 and 9 s have nothing to smooth; the policy is the one place to change.

    Here: `quadratic` has none by default, and `jitter` adds it.
    """
    send_count(q, 20)
    decided = fail_all(q, claim(q, 20))
    assert len({each["retry_at"] for each in decided}) == 1
    create(q, "smooth", **PULSE, jitter="full")
    send_count(q, 20, "smooth")
    spread = fail_all(q, claim(q, 20, "smooth"))
    assert len({each["retry_at"] for each in spread}) == 20


def test_nothing_goes_stale_in_silence(q: Connection, clock: Clock) -> None:
    """Refused, expiry by age: a failure that just ages out makes evidence disappear.

    Here: unresolved letters are kept for 30 days, and when they go an event says how many.
    """
    sent = bury(q)
    clock.advance(29 * 86_400)
    q.execute("select bartleby.prune()")
    assert places(q, sent) == ["dead"]
    clock.advance(2 * 86_400)
    q.execute("select bartleby.prune()")
    assert places(q, sent) == []
    told = row(q, "select queue, data from bartleby.events where type = 'io.bartleby.dead_letter.expired'")
    assert (told["queue"], told["data"]["unresolved"]) == ("q", 1)


def test_nothing_is_dropped_when_attempts_are_used_up(q: Connection, clock: Clock) -> None:
    """Refused, drop on exhaustion: a limit is worth having for what is left when it is reached."""
    sent = send(q, {"order": 42}, headers={"tenant": "acme"}, key="order-42")
    fail_until_dead(q, clock)
    found = letter(q, sent)
    assert (found["payload"], found["headers"], found["key"]) == ({"order": 42}, {"tenant": "acme"}, "order-42")


def test_retries_need_no_machinery_of_their_own(q: Connection, clock: Clock) -> None:
    """Consequence: retries cost no table, loop or index that the claim does not have already.

    Here: deferred messages have a table, which delayed sends need anyway; there is no loop.
    """
    send(q, "later", delay="1 s")
    send(q, "again")
    fail_one(q)
    clock.advance(1)
    assert sorted(claim(q, 2).payloads) == ["again", "later"]


def test_retry_or_dead_is_decided_in_one_place(q: Connection, clock: Clock) -> None:
    """Consequence: reported failures and lost leases meet in one decision, so both leave the same kind of row."""
    lost = send(q, max_attempts=1)
    lose(q, clock)
    lose(q, clock)
    reported = send(q, max_attempts=1)
    fail_one(q)
    same = "select attempt, verdict, rule from bartleby.attempts where verdict = 'dead' and message_id = %s"
    assert row(q, same, lost) == row(q, same, reported) == {"attempt": 1, "verdict": "dead", "rule": "attempt 1 of 1"}
    assert (letter(q, lost)["reason"], letter(q, reported)["reason"]) == ("crashed", "exhausted")


def test_every_error_survives_not_only_the_last(q: Connection, clock: Clock) -> None:
    """Consequence: each failure overwrites the reason of the one before; a history would be a table of its own.

    Here: it is one, append-only: each attempt has its row.
    """
    sent = send(q)
    for error, wait in (("first", 1), ("second", 4), ("third", 0)):
        fail_one(q, error=error)
        clock.advance(wait)
    assert [each["error"] for each in ledger(q, sent)] == ["first", "second", "third"]
    assert letter(q, sent)["error"] == "third"


def test_a_job_can_bring_its_own_limit(q: Connection, clock: Clock) -> None:
    """Consequence: the limit can be set for a single job when it is submitted."""
    sent = send(q, max_attempts=1)
    fail_one(q)
    assert (letter(q, sent)["attempts"], letter(q, sent)["reason"]) == (1, "exhausted")


def test_a_topic_has_its_own_policy(q: Connection, clock: Clock) -> None:
    """Consequence: one policy for all topics, until a topic needs its own.

    Here: every queue has one, and it can be changed at any time.
    """
    create(q, "other", max_attempts=2, backoff="fixed", base=7)
    send(q, queue="other")
    assert fail_until_dead(q, clock, "other") == [7 * SECOND]
    q.execute("select bartleby.configure_queue('other', '{\"base\": 9}')")
    send(q, queue="other")
    assert fail_until_dead(q, clock, "other") == [9 * SECOND]


def test_un_dead_lettering_resets_to_pending_and_clears_attempts(q: Connection, clock: Clock, client: Client) -> None:
    """Consequence: bringing one back is an update by hand for now: pending again, attempts cleared.

    Here: `replay` does it, with a name and a reason, and keeps the evidence.
    """
    sent = send(q, {"order": 42})
    fail_until_dead(q, clock)
    assert client.replay([sent], **ANA) == [sent]
    assert rows(q, "select state, attempts, cycle from bartleby.messages") == [
        {"state": "ready", "attempts": 0, "cycle": 2}
    ]
    assert claim(q).one["attempt"] == 1
