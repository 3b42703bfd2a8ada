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


@pytest.mark.seed("pulse-1")
def test_retries_are_bounded(q: Connection, clock: Clock) -> None:
    sent = send(q)
    assert len(fail_until_dead(q, clock)) == 2
    assert places(q, sent) == ["dead"]


@pytest.mark.seed("pulse-2")
def test_a_failure_backs_off(q: Connection) -> None:
    sent = send(q)
    found = fail_one(q)
    assert found["retry_at"] > found["failed_at"]
    assert (places(q, sent), claim(q).messages) == (["deferred"], [])


@pytest.mark.seed("pulse-3")
def test_the_first_failure_drops_nothing(q: Connection, clock: Clock) -> None:
    sent = send(q)
    fail_one(q)
    clock.advance(1)
    assert claim(q).ids == [sent]


@pytest.mark.seed("pulse-4")
def test_what_has_failed_for_good_stays_parked(q: Connection, clock: Clock) -> None:
    sent = send(q)
    fail_until_dead(q, clock)
    clock.advance(86_400)
    reap(q)
    assert (claim(q).messages, places(q, sent)) == ([], ["dead"])


@pytest.mark.seed("pulse-5")
def test_the_row_says_attempts_limit_error_and_next_run(q: Connection, clock: Clock) -> None:
    sent = send(q, max_attempts=3)
    fail_one(q, error="downstream said no")
    found = row(q, "select attempts, max_attempts, run_at - bartleby.clock() as due_in from bartleby.messages")
    assert found == {"attempts": 1, "max_attempts": 3, "due_in": SECOND}
    assert ledger(q, sent)[-1]["error"] == "downstream said no"


@pytest.mark.seed("pulse-6")
def test_three_attempts_are_the_limit(q: Connection, clock: Clock) -> None:
    create(q, "usual")
    assert (stats(q)["max_attempts"], stats(q, "usual")["max_attempts"]) == (3, 5)
    sent = send(q)
    fail_until_dead(q, clock)
    assert letter(q, sent)["attempts"] == 3


@pytest.mark.seed("pulse-7")
def test_an_attempt_counts_from_its_claim_on(q: Connection, clock: Clock) -> None:
    sent = send(q)
    lose(q, clock)
    assert lose(q, clock).one["attempt"] == 1
    assert "failed" not in {each["outcome"] for each in ledger(q, sent)}
    clock.advance(1)
    assert claim(q).one["attempt"] == 2
    assert row(q, "select attempts from bartleby.messages")["attempts"] == 1


@pytest.mark.seed("pulse-8")
def test_counting_and_marking_as_running_are_one_statement(q: Connection, clock: Clock) -> None:
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


@pytest.mark.seed("pulse-9")
def test_a_worker_that_dies_silently_has_used_an_attempt(q: Connection, clock: Clock) -> None:
    sent = send(q)
    lose(q, clock)
    assert [(each["outcome"], each["attempt"]) for each in ledger(q, sent)] == [("lost", 1)]
    assert lose(q, clock).one["solo"] is True
    assert row(q, "select attempts, crashes from bartleby.messages") == {"attempts": 1, "crashes": 1}
    assert ledger(q, sent)[-1]["outcome"] == "crashed"


@pytest.mark.seed("pulse-10")
def test_what_is_given_back_has_used_no_attempt(q: Connection, clock: Clock) -> None:
    sent = send(q)
    for _ in range(5):
        work = claim(q)
        assert (work.ids, work.one["attempt"]) == ([sent], 1)
        assert release(q, work.lease) == 1
        clock.advance(0)
    assert (ledger(q, sent), row(q, "select attempts from bartleby.messages")["attempts"]) == ([], 0)
    assert len(fail_until_dead(q, clock)) == 2


@pytest.mark.seed("pulse-11")
def test_a_crash_looping_poison_message_cannot_go_on_for_ever(q: Connection, clock: Clock) -> None:
    sent = send(q, max_attempts=10)
    losses = 0
    while places(q, sent) != ["dead"]:
        assert lose(q, clock).ids == [sent]
        losses += 1
        clock.advance(10)
    assert (losses, stats(q)["crash_budget"]) == (4, 3)
    assert letter(q, sent)["reason"] == "crashed"


@pytest.mark.seed("pulse-12")
def test_a_failure_is_one_guarded_statement(q: Connection) -> None:
    kept, done = send(q), send(q)
    work = claim(q, 2)
    ack(q, work.lease, work.positions[1:])
    with refused("ZB006"):
        fail_all(q, work)
    assert (places(q, kept), places(q, done)) == (["leased"], [])
    [decided] = fail(q, work.lease, {"position": work.positions[0]})
    assert (decided["message_id"], decided["verdict"], places(q, kept)) == (kept, "retry", ["deferred"])


@pytest.mark.seed("pulse-13")
def test_zero_rows_are_an_error_of_our_own(q: Connection, client: Client) -> None:
    sent = send(q)
    work = claim(q)
    ack(q, work.lease)
    with refused("ZB006", "lease lost"):
        fail_all(q, work)
    with pytest.raises(LeaseLost):
        client.fail(work.lease, [Failure(work.positions[0], "KeyError", "'x'")])
    assert (ledger(q, sent), places(q, sent)) == ([], [])


@pytest.mark.seed("pulse-14")
def test_what_does_not_run_cannot_fail(q: Connection, clock: Clock) -> None:
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


@pytest.mark.seed("pulse-15")
def test_below_the_limit_it_is_retrying(q: Connection) -> None:
    sent = send(q)
    found = fail_one(q)
    assert (found["verdict"], found["rule"]) == ("retry", "attempt 1 of 3")
    assert places(q, sent) == ["deferred"]


@pytest.mark.seed("pulse-16")
def test_the_next_run_is_after_attempts_squared_seconds(q: Connection, clock: Clock) -> None:
    send(q, max_attempts=20)
    waits = fail_until_dead(q, clock)
    assert waits[:4] == [SECOND, 4 * SECOND, 9 * SECOND, 16 * SECOND]
    assert waits[16:] == [289 * SECOND, 300 * SECOND, 300 * SECOND]


@pytest.mark.seed("pulse-17")
def test_lease_and_worker_are_cleared(q: Connection) -> None:
    send(q)
    work = claim(q, worker="w-1")
    held = row(q, "select worker, leased_until from bartleby.messages")
    assert (held["worker"], held["leased_until"]) == ("w-1", value(q, "select bartleby.clock() + interval '60 s'"))
    fail_all(q, work)
    assert row(q, "select worker, leased_until from bartleby.messages") == {"worker": None, "leased_until": None}


@pytest.mark.seed("pulse-18")
def test_the_error_is_recorded(q: Connection) -> None:
    sent = send(q)
    fail_one(q, error_type="Timeout", error="after 30 s")
    assert (ledger(q, sent)[0]["error_type"], ledger(q, sent)[0]["error"]) == ("Timeout", "after 30 s")


@pytest.mark.seed("pulse-19")
def test_at_the_limit_it_is_dead_lettered(q: Connection, clock: Clock) -> None:
    sent = send(q)
    fail_until_dead(q, clock)
    assert (letter(q, sent)["status"], letter(q, sent)["reason"]) == ("dead", "exhausted")
    assert [each["verdict"] for each in ledger(q, sent)] == ["retry", "retry", "dead"]


@pytest.mark.seed("pulse-20")
def test_above_the_limit_it_is_dead_lettered_too(q: Connection, clock: Clock) -> None:
    sent = send(q)
    for wait in (1, 4):
        assert fail_one(q)["verdict"] == "retry"
        clock.advance(wait)
    q.execute("select bartleby.configure_queue('q', '{\"max_attempts\": 1}')")
    found = fail_one(q)
    assert (found["verdict"], found["rule"], found["retry_at"]) == ("dead", "attempt 3 of 1", None)
    assert (letter(q, sent)["reason"], letter(q, sent)["attempts"]) == ("exhausted", 3)


@pytest.mark.seed("pulse-21")
def test_the_time_of_its_end_is_stamped(q: Connection, clock: Clock) -> None:
    sent = send(q)
    fail_until_dead(q, clock)
    assert letter(q, sent)["dead_at"] == value(q, "select bartleby.clock()")
    assert letter(q, sent)["dead_at"] - letter(q, sent)["first_failed_at"] == timedelta(seconds=5, microseconds=2)


@pytest.mark.seed("pulse-22")
def test_the_last_error_is_kept_for_the_post_mortem(q: Connection, clock: Clock) -> None:
    sent = send(q)
    fail_until_dead(q, clock, error_type="KeyError", error="'AT'", traceback="shop.py, line 24")
    found = letter(q, sent)
    assert (found["error_type"], found["error"], found["traceback"]) == ("KeyError", "'AT'", "shop.py, line 24")


@pytest.mark.seed("pulse-23")
def test_two_reporters_of_one_job_do_not_race(q: Connection, connect: Callable[[], Connection]) -> None:
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


@pytest.mark.seed("pulse-24")
def test_the_claim_is_the_scheduler_of_retries(q: Connection, clock: Clock) -> None:
    failed = send(q)
    fail_one(q)
    fresh = send(q)
    assert claim(q, 10).ids == [fresh]
    clock.advance(1)
    assert claim(q, 10).ids == [failed]


@pytest.mark.seed("pulse-25")
def test_nothing_is_claimed_before_its_time(q: Connection, clock: Clock) -> None:
    send(q, "again")
    fail_one(q)
    send(q, "later", delay="1 s")
    clock.advance(0.99)
    assert claim(q, 2).messages == []
    clock.advance(0.01)
    assert sorted(claim(q, 2).payloads) == ["again", "later"]


@pytest.mark.seed("pulse-26")
def test_no_promoter_runs_in_the_background(q: Connection, clock: Clock) -> None:
    sent = send_count(q, 20)
    fail_all(q, claim(q, 20))
    clock.advance(1)
    assert sorted(claim(q, 20).ids) == sorted(sent)
    sessions = (
        "select count(*) from pg_stat_activity where datname = current_database() and backend_type like 'client%'"
    )
    await_true(lambda: value(q, sessions) == 1)  # one that was closed a moment ago may still be seen


@pytest.mark.seed("pulse-27")
def test_a_claim_finds_both_by_an_index(q: Connection, clock: Clock) -> None:
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


@pytest.mark.seed("pulse-28")
def test_crash_recovery_takes_the_same_branch(q: Connection, clock: Clock) -> None:
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


@pytest.mark.seed("pulse-29")
def test_the_sweep_takes_all_lapsed_leases_at_once(q: Connection, clock: Clock) -> None:
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


@pytest.mark.seed("pulse-30")
def test_a_lapsed_lease_says_so_as_its_error(q: Connection, clock: Clock) -> None:
    sent = send(q)
    lose(q, clock)
    assert (ledger(q, sent)[0]["error_type"], ledger(q, sent)[0]["error"]) == ("WorkerLost", "the lease lapsed")
    lose(q, clock)
    assert (ledger(q, sent)[1]["error_type"], ledger(q, sent)[1]["error"]) == (
        "WorkerLost", "worker w stopped answering while it ran this message alone",
    )  # fmt: skip


@pytest.mark.seed("pulse-31")
def test_loud_and_silent_failures_add_up(q: Connection, clock: Clock) -> None:
    sent = send(q)
    lose(q, clock)  # charges nobody
    lose(q, clock)  # attempt 1
    clock.advance(1)
    assert fail_one(q)["retry_at"] is not None  # attempt 2
    clock.advance(4)
    assert fail_one(q)["rule"] == "attempt 3 of 3"
    assert (letter(q, sent)["attempts"], letter(q, sent)["crashes"]) == (3, 1)


@pytest.mark.seed("pulse-32")
def test_a_dead_letter_stays_queryable_by_id(q: Connection, client: Client) -> None:
    sent = bury(q, {"id": 7}, error="no such customer")
    found = client.dead_letter(sent)
    assert found is not None
    assert (found.payload, found.error, found.status) == ({"id": 7}, "no such customer", "dead")


@pytest.mark.seed("pulse-33")
def test_dead_letters_are_listed(q: Connection, client: Client) -> None:
    sent = [bury(q, n) for n in range(3)]
    assert [each.message_id for each in client.dead_letters(sort="oldest")] == sent


@pytest.mark.seed("pulse-34")
def test_nothing_dispatches_a_dead_letter(q: Connection, clock: Clock) -> None:
    bury(q)
    clock.advance(86_400)
    reap(q)
    assert claim(q, 100).messages == []


@pytest.mark.seed("pulse-35")
def test_a_message_is_never_in_two_places_or_none(q: Connection, clock: Clock) -> None:
    sent = send(q)
    seen = [places(q, sent)]
    for _ in range(3):
        work = claim(q)
        seen.append(places(q, sent))
        fail_all(q, work)
        seen.append(places(q, sent))
        clock.advance(9)
    assert seen == [["ready"], *[["leased"], ["deferred"]] * 2, ["leased"], ["dead"]]


@pytest.mark.seed("pulse-36")
def test_the_quadratic_curve_has_no_jitter_unless_asked_for(q: Connection) -> None:
    send_count(q, 20)
    decided = fail_all(q, claim(q, 20))
    assert len({each["retry_at"] for each in decided}) == 1
    create(q, "smooth", **PULSE, jitter="full")
    send_count(q, 20, "smooth")
    spread = fail_all(q, claim(q, 20, "smooth"))
    assert len({each["retry_at"] for each in spread}) == 20


@pytest.mark.seed("pulse-37")
def test_nothing_goes_stale_in_silence(q: Connection, clock: Clock) -> None:
    sent = bury(q)
    clock.advance(29 * 86_400)
    q.execute("select bartleby.prune()")
    assert places(q, sent) == ["dead"]
    clock.advance(2 * 86_400)
    q.execute("select bartleby.prune()")
    assert places(q, sent) == []
    told = row(q, "select queue, data from bartleby.events where type = 'io.bartleby.dead_letter.expired'")
    assert (told["queue"], told["data"]["unresolved"]) == ("q", 1)


@pytest.mark.seed("pulse-38")
def test_nothing_is_dropped_when_attempts_are_used_up(q: Connection, clock: Clock) -> None:
    sent = send(q, {"order": 42}, headers={"tenant": "acme"}, key="order-42")
    fail_until_dead(q, clock)
    found = letter(q, sent)
    assert (found["payload"], found["headers"], found["key"]) == ({"order": 42}, {"tenant": "acme"}, "order-42")


@pytest.mark.seed("pulse-39")
def test_retries_need_no_machinery_of_their_own(q: Connection, clock: Clock) -> None:
    send(q, "later", delay="1 s")
    send(q, "again")
    fail_one(q)
    clock.advance(1)
    assert sorted(claim(q, 2).payloads) == ["again", "later"]


@pytest.mark.seed("pulse-40")
def test_retry_or_dead_is_decided_in_one_place(q: Connection, clock: Clock) -> None:
    lost = send(q, max_attempts=1)
    lose(q, clock)
    lose(q, clock)
    reported = send(q, max_attempts=1)
    fail_one(q)
    same = "select attempt, verdict, rule from bartleby.attempts where verdict = 'dead' and message_id = %s"
    assert row(q, same, lost) == row(q, same, reported) == {"attempt": 1, "verdict": "dead", "rule": "attempt 1 of 1"}
    assert (letter(q, lost)["reason"], letter(q, reported)["reason"]) == ("crashed", "exhausted")


@pytest.mark.seed("pulse-41")
def test_every_error_survives_not_only_the_last(q: Connection, clock: Clock) -> None:
    sent = send(q)
    for error, wait in (("first", 1), ("second", 4), ("third", 0)):
        fail_one(q, error=error)
        clock.advance(wait)
    assert [each["error"] for each in ledger(q, sent)] == ["first", "second", "third"]
    assert letter(q, sent)["error"] == "third"


@pytest.mark.seed("pulse-42")
def test_a_job_can_bring_its_own_limit(q: Connection, clock: Clock) -> None:
    sent = send(q, max_attempts=1)
    fail_one(q)
    assert (letter(q, sent)["attempts"], letter(q, sent)["reason"]) == (1, "exhausted")


@pytest.mark.seed("pulse-43")
def test_a_topic_has_its_own_policy(q: Connection, clock: Clock) -> None:
    create(q, "other", max_attempts=2, backoff="fixed", base=7)
    send(q, queue="other")
    assert fail_until_dead(q, clock, "other") == [7 * SECOND]
    q.execute("select bartleby.configure_queue('other', '{\"base\": 9}')")
    send(q, queue="other")
    assert fail_until_dead(q, clock, "other") == [9 * SECOND]


@pytest.mark.seed("pulse-44")
def test_un_dead_lettering_resets_to_pending_and_clears_attempts(q: Connection, clock: Clock, client: Client) -> None:
    sent = send(q, {"order": 42})
    fail_until_dead(q, clock)
    assert client.replay([sent], **ANA) == [sent]
    assert rows(q, "select state, attempts, cycle from bartleby.messages") == [
        {"state": "ready", "attempts": 0, "cycle": 2}
    ]
    assert claim(q).one["attempt"] == 1
