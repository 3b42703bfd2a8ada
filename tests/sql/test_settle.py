"""Settling: only who holds the lease may, all or nothing, and a message is in one place afterwards."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.clock import Clock, move_clock
from tests.sql.support import (
    Claim,
    Connect,
    Connection,
    ack,
    claim,
    column,
    create,
    drain,
    fail,
    fail_all,
    reap,
    refused,
    reject,
    release,
    row,
    rows,
    send,
    send_count,
    snapshot_of_everything,
    stats,
    value,
    waiting,
)

Settle = Callable[[Connection, Claim], object]
SETTLEMENTS: dict[str, Settle] = {
    "ack all": lambda conn, claimed: ack(conn, claimed.lease),
    "ack one": lambda conn, claimed: ack(conn, claimed.lease, claimed.positions[:1]),
    "ack each": lambda conn, claimed: ack(conn, claimed.lease, claimed.positions),
    "fail": fail_all,
    "fail for good": lambda conn, claimed: fail_all(conn, claimed, verdict="dead"),
    "extend": lambda conn, claimed: extend(conn, claimed.lease),
    "release all": lambda conn, claimed: release(conn, claimed.lease),
    "release one": lambda conn, claimed: release(conn, claimed.lease, claimed.positions[:1]),
    "reject": lambda conn, claimed: reject(conn, claimed.lease, claimed.positions[0], "unacceptable"),
}


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn)
    return conn


@pytest.fixture
def clock(conn: Connection) -> Clock:
    return move_clock(conn)


def extend(conn: Connection, *leases: int, lease: str = "1 minute") -> None:
    conn.execute("select bartleby.extend(%s, %s)", [list(leases), lease])


def claimed(conn: Connection, count: int = 3) -> Claim:
    send_count(conn, count)
    return claim(conn, count)


class TestStaleLease:
    """The worker was too slow: its lease was taken back, and the messages are somebody else's."""

    @pytest.mark.parametrize("settlement", SETTLEMENTS)
    def test_a_lease_that_was_reaped_changes_nothing(self, conn: Connection, clock: Clock, settlement: str) -> None:
        stale = claimed(conn)
        clock.advance(61)
        assert len(reap(conn)) == 1
        before = snapshot_of_everything(conn)
        with refused("ZB006", str(stale.lease)) as caught:
            SETTLEMENTS[settlement](conn, stale)
        assert caught.value.diag.message_detail == str(stale.lease)
        assert snapshot_of_everything(conn) == before

    @pytest.mark.parametrize("settlement", SETTLEMENTS)
    def test_messages_that_were_claimed_again_stay_with_the_new_worker(
        self, conn: Connection, clock: Clock, settlement: str
    ) -> None:
        stale = claimed(conn, 1)
        clock.advance(61)
        reap(conn)
        clock.advance(1)
        fresh = claim(conn)
        assert fresh.ids == stale.ids
        before = snapshot_of_everything(conn)
        with refused("ZB006"):
            SETTLEMENTS[settlement](conn, stale)
        assert snapshot_of_everything(conn) == before
        assert ack(conn, fresh.lease) == 1

    @pytest.mark.parametrize("settlement", SETTLEMENTS)
    def test_a_lease_that_is_settled_cannot_be_settled_again(self, conn: Connection, settlement: str) -> None:
        done = claimed(conn)
        ack(conn, done.lease)
        before = snapshot_of_everything(conn)
        with refused("ZB006"):
            SETTLEMENTS[settlement](conn, done)
        assert snapshot_of_everything(conn) == before

    @pytest.mark.parametrize("settlement", SETTLEMENTS)
    def test_a_lease_that_never_was_is_refused(self, conn: Connection, settlement: str) -> None:
        real = claimed(conn)
        before = snapshot_of_everything(conn)
        for lease in (0, -1, 1, 2**63 - 1):
            forged = Claim([{**message, "lease_id": lease} for message in real.messages])
            with refused("ZB006"):
                SETTLEMENTS[settlement](conn, forged)
        assert snapshot_of_everything(conn) == before

    def test_a_lapsed_lease_that_nobody_took_back_is_still_good(self, conn: Connection, clock: Clock) -> None:
        slow = claimed(conn)
        clock.advance(3600)
        assert ack(conn, slow.lease) == 3


class TestAck:
    def test_all(self, conn: Connection) -> None:
        work = claimed(conn)
        assert ack(conn, work.lease) == 3
        assert column(conn, "select * from bartleby.messages") == []

    def test_part_and_then_the_rest(self, conn: Connection) -> None:
        work = claimed(conn, 5)
        assert ack(conn, work.lease, [work.positions[1], work.positions[3]]) == 2
        assert column(conn, "select payload from bartleby.messages order by position") == [1, 3, 5]
        assert ack(conn, work.lease) == 3
        assert stats(conn)["leased"] == 0

    def test_none(self, conn: Connection) -> None:
        work = claimed(conn)
        assert ack(conn, work.lease, []) == 0
        assert stats(conn)["leased"] == 3

    @pytest.mark.parametrize("foreign", [0, 4, 99, -1, 2**62])
    def test_a_position_that_is_not_in_the_lease_spoils_the_call(self, conn: Connection, foreign: int) -> None:
        work = claimed(conn)
        send(conn, 4)
        with refused("ZB006"):
            ack(conn, work.lease, [*work.positions, foreign])
        assert stats(conn)["leased"] == 3

    def test_a_position_named_twice_counts_once(self, conn: Connection) -> None:
        work = claimed(conn)
        assert ack(conn, work.lease, [work.positions[0]] * 3) == 1
        assert stats(conn)["leased"] == 2

    def test_a_position_settled_before_spoils_the_call(self, conn: Connection) -> None:
        work = claimed(conn)
        ack(conn, work.lease, work.positions[:1])
        with refused("ZB006"):
            ack(conn, work.lease, work.positions)
        assert stats(conn)["leased"] == 2

    def test_null_among_the_positions_is_refused(self, conn: Connection) -> None:
        work = claimed(conn)
        with refused("ZB006"):
            conn.execute("select bartleby.ack(%s, array[%s, null]::bigint[])", [work.lease, work.positions[0]])
        assert stats(conn)["leased"] == 3

    def test_it_belongs_to_the_callers_transaction(self, conn: Connection) -> None:
        work = claimed(conn)
        with conn.transaction(force_rollback=True):
            ack(conn, work.lease)
        assert stats(conn)["leased"] == 3

    def test_two_who_settle_parts_of_one_lease_at_once_both_succeed(self, connect: Connect, conn: Connection) -> None:
        work = claimed(conn)
        one, two = connect(autocommit=False), connect()
        ack(one, work.lease, work.positions[:1])
        with waiting(conn, two, lambda conn: ack(conn, work.lease), for_whom=one) as second:
            one.commit()
            assert second.result() == 2
        assert stats(conn)["leased"] == 0

    def test_two_who_ack_the_same_position_at_once_ack_it_once(self, connect: Connect, conn: Connection) -> None:
        work = claimed(conn)
        one, two = connect(autocommit=False), connect()
        ack(one, work.lease, work.positions[:1])
        with waiting(conn, two, lambda conn: ack(conn, work.lease, work.positions[:2]), for_whom=one) as second:
            one.commit()
            with refused("ZB006"):
                second.result()
        assert stats(conn)["leased"] == 2


class TestFail:
    def test_it_says_what_became_of_each(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", backoff="fixed", base=10)
        work = claimed(conn)
        first, second, third = work.positions
        verdicts = fail(conn, work.lease, {"position": third, "verdict": "dead"}, {"position": first})
        by_position = {found["position"]: found for found in verdicts}
        assert by_position[first]["verdict"] == "retry"
        assert by_position[third] == {
            "position": third,
            "message_id": work.ids[2],
            "verdict": "dead",
            "retry_at": None,
        }
        assert stats(conn)["leased"] == 1
        clock.advance(11)
        again = claim(conn, 9).one
        assert (again["message_id"], again["attempt"], again["payload"]) == (work.ids[0], 2, 1)
        assert ack(conn, work.lease) == 1
        assert second not in by_position

    def test_a_position_named_twice_is_refused(self, conn: Connection) -> None:
        work = claimed(conn)
        with refused("ZB008", "twice"):
            fail(conn, work.lease, {"position": work.positions[0]}, {"position": work.positions[0]})
        assert stats(conn)["leased"] == 3

    def test_a_foreign_position_spoils_the_call(self, conn: Connection) -> None:
        work = claimed(conn)
        with refused("ZB006"):
            fail(conn, work.lease, {"position": work.positions[0]}, {"position": 99})
        assert stats(conn)["leased"] == 3
        assert rows(conn, "select * from bartleby.attempts") == []

    def test_none_fail(self, conn: Connection) -> None:
        assert fail(conn, claimed(conn).lease) == []

    @pytest.mark.parametrize(
        "bad",
        [
            1,
            None,
            [],
            {},
            {"position": None},
            {"position": "1"},
            {"position": 1, "verdict": "maybe"},
            {"position": 1, "verdict": 1},
            {"position": 1, "delay": -1},
            {"position": 1, "delay": "soon"},
            {"position": 1, "delay": 1e300},
            {"position": 1, "delay": []},
            {"position": 1.5},
            {"position": 1e300},
        ],
    )
    def test_what_makes_no_sense_is_refused(self, conn: Connection, bad: Any) -> None:
        work = claimed(conn)
        with refused("ZB008"):
            fail(conn, work.lease, bad)
        assert stats(conn)["leased"] == 3

    @pytest.mark.parametrize("bad", [None, "{}", "null", '{"position": 1}'])
    def test_what_is_no_array_is_refused(self, conn: Connection, bad: str | None) -> None:
        with refused("ZB008"):
            conn.execute("select bartleby.fail(%s, %s)", [claimed(conn).lease, bad])

    @pytest.mark.parametrize("truncated", [False, True])
    def test_an_old_snapshot_loses_no_message(self, connect: Connect, conn: Connection, truncated: bool) -> None:
        """The messages are carried over to another segment, where the old snapshot does not see them."""
        work = claimed(conn)
        worker = connect(autocommit=False)
        worker.execute("set transaction isolation level repeatable read")
        worker.execute("select 1 from bartleby.queue")
        assert "3 carried over" in value(conn, "select bartleby.turn(0)")
        if truncated:
            conn.execute("truncate bartleby.log_0")
            with refused("ZB007"):
                fail_all(worker, work)
            worker.rollback()
            assert stats(conn)["leased"] == 3
        else:
            fail_all(worker, work)
            worker.commit()
            assert stats(conn)["deferred"] == 3


class TestVerdict:
    def live(self, conn: Connection, clock: Clock, **failure: Any) -> list[str]:
        """Fail one message until it is dead; return the verdicts."""
        verdicts: list[str] = []
        while "dead" not in verdicts:
            clock.advance(400)
            work = claim(conn)
            assert work.one["attempt"] == len(verdicts) + 1
            verdicts += [found["verdict"] for found in fail_all(conn, work, **failure)]
            assert len(verdicts) < 20
        return verdicts

    def test_the_queues_budget(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", max_attempts=3)
        send(conn, 1)
        assert self.live(conn, clock) == ["retry", "retry", "dead"]
        assert row(conn, "select reason, attempts from bartleby.dead_letters") == {
            "reason": "exhausted",
            "attempts": 3,
        }

    @pytest.mark.parametrize("own", [1, 2, 4])
    def test_the_messages_own_budget_comes_first(self, conn: Connection, clock: Clock, own: int) -> None:
        create(conn, "q", max_attempts=3)
        send(conn, 1, max_attempts=own)
        assert self.live(conn, clock) == ["retry"] * (own - 1) + ["dead"]

    def test_asking_for_a_retry_does_not_raise_the_budget(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", max_attempts=3)
        send(conn, 1)
        assert self.live(conn, clock, verdict="retry") == ["retry", "retry", "dead"]

    def test_a_terminal_failure_dies_at_once(self, conn: Connection, clock: Clock) -> None:
        send(conn, 1)
        assert self.live(conn, clock, verdict="dead") == ["dead"]
        assert row(conn, "select reason, attempts from bartleby.dead_letters") == {
            "reason": "terminal",
            "attempts": 1,
        }

    def test_it_gives_up_after_a_time(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", max_attempts=100, backoff="fixed", base=100, give_up_after=1000)
        send(conn, 1)
        assert self.live(conn, clock) == ["retry", "retry", "retry", "dead"]
        assert value(conn, "select reason from bartleby.dead_letters") == "expired"

    def test_a_lowered_budget_holds_for_messages_under_way(self, conn: Connection, clock: Clock) -> None:
        send(conn, 1)
        for _ in range(2):
            fail_all(conn, claim(conn))
            clock.advance(400)
        create(conn, "q", max_attempts=1)
        assert self.verdict_of(conn) == "dead"

    def verdict_of(self, conn: Connection) -> str:
        return str(fail_all(conn, claim(conn))[0]["verdict"])

    def test_the_ledger_has_one_row_for_each_attempt(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", max_attempts=2, backoff="fixed", base=10)
        sent = send(conn, 1)
        first = claim(conn, worker="host-1")
        fail_all(
            conn,
            first,
            error_type="KeyError",
            error="'a'",
            traceback="File …",
            fingerprint="f1",
            rule="handler",
            worker_version="1.2",
        )
        clock.advance(11)
        second = claim(conn, worker="host-2")
        fail_all(conn, second, error_type="OSError")
        ledger = rows(conn, "select * from bartleby.attempts order by attempt")
        retry_at, none = ledger[0].pop("retry_at"), ledger[1].pop("retry_at")
        failed_at, _ = ledger[0].pop("failed_at"), ledger[1].pop("failed_at")
        assert (retry_at - failed_at, none) == (timedelta(seconds=10), None)
        common = {"message_id": sent, "queue": "q", "cycle": 1, "outcome": "failed"}
        assert ledger == [
            common
            | {
                "attempt": 1,
                "verdict": "retry",
                "rule": "handler",
                "error_type": "KeyError",
                "error": "'a'",
                "traceback": "File …",
                "fingerprint": "f1",
                "worker": "host-1",
                "worker_version": "1.2",
                "lease_id": first.lease,
            },
            common
            | {
                "attempt": 2,
                "verdict": "dead",
                "rule": "exhausted",
                "error_type": "OSError",
                "error": None,
                "traceback": None,
                "fingerprint": None,
                "worker": "host-2",
                "worker_version": None,
                "lease_id": second.lease,
            },
        ]

    def test_a_dead_letter_has_all_the_evidence(self, conn: Connection, clock: Clock) -> None:
        sent = send(conn, {"a": 1}, headers={"type": "t"}, key="k", generation=7, max_attempts=2)
        first = claim(conn)
        created_at = first.one["created_at"]
        fail_all(conn, first, error_type="First")
        first_failed_at = value(conn, "select failed_at from bartleby.attempts")
        clock.advance(400)
        failure = {"error_type": "Second", "error": "e", "traceback": "t", "fingerprint": "f", "worker_version": "1"}
        fail_all(conn, claim(conn, worker="host"), **failure)
        dead_at = value(conn, "select max(failed_at) from bartleby.attempts")
        assert row(conn, "select * from bartleby.dead_letters") == failure | {
            "message_id": sent,
            "queue": "q",
            "status": "dead",
            "reason": "exhausted",
            "attempts": 2,
            "crashes": 0,
            "cycle": 1,
            "key": "k",
            "headers": {"type": "t"},
            "payload": {"a": 1},
            "generation": 7,
            "worker": "host",
            "created_at": created_at,
            "first_failed_at": first_failed_at,
            "dead_at": dead_at,
            "replayed_at": None,
            "replayed_by": None,
            "replay_reason": None,
            "resolved_at": None,
            "failure_history": [],
        }
        assert dead_at - first_failed_at > timedelta(seconds=399)

    def test_endless_error_texts_are_cut(self, conn: Connection) -> None:
        fail_all(conn, claimed(conn, 1), verdict="dead", error="e" * 1_000_000, traceback="t" * 1_000_000)
        assert row(conn, "select length(error) as e, length(traceback) as t from bartleby.dead_letters") == {
            "e": 100_000,
            "t": 100_000,
        }


class TestDelay:
    def delays(self, conn: Connection, clock: Clock, count: int, **failure: Any) -> list[float]:
        """The delays after the first attempts of one message."""
        send(conn, 1, max_attempts=32000)
        for _ in range(count):
            fail_all(conn, claim(conn), **failure)
            clock.advance(1_000_000)
        return [
            delay.total_seconds()
            for delay in column(conn, "select retry_at - failed_at from bartleby.attempt order by id")
        ]

    @pytest.mark.parametrize(
        ("policy", "expected"),
        [
            ({"jitter": "none"}, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]),
            ({"jitter": "none", "base": 3, "factor": 3, "cap": 50}, [3, 9, 27, 50, 50]),
            ({"jitter": "none", "factor": 1}, [1, 1, 1]),
            ({"jitter": "none", "base": 0}, [0, 0, 0]),
            ({"jitter": "none", "base": 10, "cap": 5}, [5, 5]),
            ({"backoff": "quadratic"}, [1, 4, 9, 16, 25]),
            ({"backoff": "quadratic", "base": 2, "cap": 20}, [2, 8, 18, 20]),
            ({"backoff": "fixed", "base": 7}, [7, 7, 7]),
            ({"backoff": "schedule", "schedule": [5, 1, "2 minutes"]}, [5, 1, 120, 120, 120]),
            ({"backoff": "none"}, [0, 0, 0]),
        ],
    )
    def test_each_curve(self, conn: Connection, clock: Clock, policy: dict[str, Any], expected: list[float]) -> None:
        create(conn, "q", **policy)
        assert self.delays(conn, clock, len(expected)) == pytest.approx(expected)

    @pytest.mark.parametrize("policy", [{"base": 100}, {"backoff": "fixed", "base": 100, "jitter": "full"}])
    def test_full_jitter_is_anywhere_up_to_the_curve(
        self, conn: Connection, clock: Clock, policy: dict[str, Any]
    ) -> None:
        create(conn, "q", cap=100, **policy)
        delays = self.delays(conn, clock, 40)
        assert all(0 <= delay <= 100 for delay in delays)
        assert min(delays) < 40
        assert max(delays) > 60
        assert len(set(delays)) > 30

    def test_the_worker_may_name_the_delay(self, conn: Connection, clock: Clock) -> None:
        assert self.delays(conn, clock, 2, delay=12.5) == pytest.approx([12.5, 12.5])

    def test_no_attempt_is_too_high_for_the_curve(self, conn: Connection) -> None:
        for backoff in ("exponential", "quadratic", "fixed", "schedule", "none"):
            create(conn, "q", backoff=backoff, schedule=[1], factor=1000, cap="100 years")
            longest = value(conn, "select bartleby.retry_delay(q, 32000) from bartleby.queue q")
            assert longest <= timedelta(days=365.25 * 100)


ROUTES = ["dead", "invalid"]
ENRICHED = {"original_queue", "original_message_id", "rejection_reason", "rejection_timestamp", "rejection_message"}


class TestReject:
    @pytest.mark.parametrize(
        ("reason", "routes", "target"),
        [
            ("delivery_error", {}, None),
            ("delivery_error", {"dead_letter_to": "dead"}, "dead"),
            ("delivery_error", {"invalid_to": "invalid"}, None),
            ("delivery_error", {"dead_letter_to": "dead", "invalid_to": "invalid"}, "dead"),
            ("unacceptable", {}, None),
            ("unacceptable", {"dead_letter_to": "dead"}, "dead"),
            ("unacceptable", {"invalid_to": "invalid"}, "invalid"),
            ("unacceptable", {"dead_letter_to": "dead", "invalid_to": "invalid"}, "invalid"),
        ],
    )
    def test_the_routing_tree(self, conn: Connection, reason: str, routes: dict[str, str], target: str | None) -> None:
        for name in ROUTES:
            create(conn, name)
        create(conn, "q", **routes)
        sent = send(conn, {"a": 1}, headers={"type": "order", "x": 1}, key="k", generation=3)
        work = claim(conn)
        reject(conn, work.lease, work.positions[0], reason, "no such street")
        letter = row(conn, "select * from bartleby.dead_letters")
        assert letter["message_id"] == sent
        assert letter["reason"] == ("unacceptable" if reason == "unacceptable" else "terminal")
        assert letter["headers"] == {"type": "order", "x": 1}
        assert {name for name in ROUTES if stats(conn, name)["ready"]} == ({target} if target else set())
        if target is None:
            return
        copy = claim(conn, queue=target).one
        assert (copy["payload"], copy["key"], copy["generation"], copy["attempt"]) == ({"a": 1}, "k", 3, 1)
        assert copy["message_id"] != sent
        timestamp = copy["headers"].pop("rejection_timestamp")
        assert copy["headers"] == {
            "type": "order",
            "x": 1,
            "original_queue": "q",
            "original_message_id": sent,
            "original_type": "order",
            "rejection_reason": reason,
            "rejection_message": "no such street",
        }
        assert timestamp.endswith("Z")
        assert datetime.fromisoformat(timestamp) == letter["dead_at"].astimezone(UTC)

    def test_a_message_without_headers_or_description_is_enriched_too(self, conn: Connection) -> None:
        create(conn, "dead")
        create(conn, "q", dead_letter_to="dead")
        work = claimed(conn, 1)
        reject(conn, work.lease, work.positions[0], "unacceptable")
        headers = claim(conn, queue="dead").one["headers"]
        assert set(headers) == ENRICHED
        assert headers["rejection_reason"] == "unacceptable"

    def test_one_that_is_exhausted_follows_the_route_too(self, conn: Connection) -> None:
        create(conn, "dead")
        create(conn, "q", dead_letter_to="dead", max_attempts=1)
        fail_all(conn, claimed(conn, 2), error_type="KeyError", error="'a'")
        copies = claim(conn, 5, "dead")
        assert sorted(copies.payloads) == [1, 2]
        assert copies.messages[0]["headers"]["rejection_reason"] == "delivery_error"
        assert copies.messages[0]["headers"]["rejection_message"] == "KeyError: 'a'"

    def test_one_that_is_retried_follows_no_route(self, conn: Connection) -> None:
        create(conn, "dead")
        create(conn, "q", dead_letter_to="dead")
        fail_all(conn, claimed(conn, 2))
        assert stats(conn, "dead")["ready"] == 0

    def test_a_copy_that_dies_in_turn_goes_on_along_its_own_route(self, conn: Connection) -> None:
        create(conn, "last")
        create(conn, "dead", dead_letter_to="last")
        create(conn, "q", dead_letter_to="dead")
        send(conn, 1)
        for name in ("q", "dead"):
            work = claim(conn, queue=name)
            reject(conn, work.lease, work.positions[0], "delivery_error")
        assert claim(conn, queue="last").one["headers"]["original_queue"] == "dead"
        assert stats(conn)["dead"] == stats(conn, "dead")["dead"] == 1

    def test_it_is_in_the_ledger(self, conn: Connection) -> None:
        work = claimed(conn, 1)
        reject(conn, work.lease, work.positions[0], "unacceptable", "why")
        assert row(conn, "select outcome, verdict, rule, error_type, error, attempt from bartleby.attempts") == {
            "outcome": "rejected",
            "verdict": "dead",
            "rule": "rejected",
            "error_type": "unacceptable",
            "error": "why",
            "attempt": 1,
        }

    @pytest.mark.parametrize("reason", [None, "", "bad", "Unacceptable", "x" * 10_000])
    def test_an_unknown_reason_is_refused(self, conn: Connection, reason: str | None) -> None:
        work = claimed(conn, 1)
        with refused("ZB008"):
            conn.execute("select bartleby.reject(%s, %s, %s)", [work.lease, work.positions[0], reason])
        assert stats(conn)["leased"] == 1

    def test_a_missing_position_is_refused(self, conn: Connection) -> None:
        with refused("ZB008", "position"):
            conn.execute("select bartleby.reject(%s, null, 'unacceptable')", [claimed(conn).lease])


class TestRelease:
    def test_it_charges_nothing(self, conn: Connection, clock: Clock) -> None:
        work = claimed(conn)
        assert release(conn, work.lease, work.positions[:2]) == 2
        clock.advance(0.001)
        again = claim(conn, 9)
        assert [(message["payload"], message["attempt"], message["solo"]) for message in again.messages] == [
            (1, 1, False),
            (2, 1, False),
        ]
        assert again.ids == work.ids[:2]
        assert rows(conn, "select * from bartleby.attempts") == []

    def test_it_keeps_what_was_charged_before(self, conn: Connection, clock: Clock) -> None:
        fail_all(conn, claimed(conn, 1))
        clock.advance(400)
        release(conn, claim(conn).lease)
        clock.advance(1)
        assert claim(conn).one["attempt"] == 2

    def test_it_may_wait(self, conn: Connection, clock: Clock) -> None:
        release(conn, claimed(conn, 2).lease, delay="1 hour")
        clock.advance(3599)
        assert claim(conn, 9).messages == []
        clock.advance(2)
        assert claim(conn, 9).payloads == [1, 2]

    def test_it_may_be_for_ever(self, conn: Connection, clock: Clock) -> None:
        send(conn, 1, max_attempts=1)
        for _ in range(20):
            release(conn, claim(conn).lease)
            clock.advance(1)
        assert claim(conn).one["attempt"] == 1

    def test_a_delay_out_of_bounds_is_refused(self, conn: Connection) -> None:
        work = claimed(conn)
        for bad in ("-1 second", "101 years", None):
            with refused("ZB008", "delay"):
                conn.execute("select bartleby.release(%s, null, %s)", [work.lease, bad])
        assert stats(conn)["leased"] == 3

    def test_none(self, conn: Connection) -> None:
        assert release(conn, claimed(conn).lease, []) == 0


class TestExtend:
    def test_it_keeps_a_lease_from_being_taken_back(self, conn: Connection, clock: Clock) -> None:
        work = claimed(conn)
        for _ in range(5):
            clock.advance(50)
            extend(conn, work.lease)
            assert reap(conn) == []
        clock.advance(61)
        assert len(reap(conn)) == 1

    def test_it_counts_from_now(self, conn: Connection, clock: Clock) -> None:
        work = claimed(conn)
        extend(conn, work.lease, lease="1 hour")
        extend(conn, work.lease, lease="10 seconds")
        clock.advance(11)
        assert len(reap(conn)) == 1

    def test_it_is_all_or_nothing_and_names_the_lost(self, conn: Connection, clock: Clock) -> None:
        send_count(conn, 3)
        leases = [claim(conn).lease for _ in range(3)]
        ack(conn, leases[1])
        before = column(conn, "select until from bartleby.lease order by id")
        with refused("ZB006") as caught:
            extend(conn, *leases, lease="1 hour")
        assert caught.value.diag.message_detail == str(leases[1])
        assert column(conn, "select until from bartleby.lease order by id") == before
        extend(conn, leases[0], leases[2], lease="1 hour")
        clock.advance(61)
        assert reap(conn) == []

    def test_none(self, conn: Connection) -> None:
        extend(conn)
        assert reap(conn) == []

    def test_a_lease_out_of_bounds_is_refused(self, conn: Connection) -> None:
        work = claimed(conn)
        for bad in ("0 seconds", "-1 second", "101 years", None):
            with refused("ZB008"):
                conn.execute("select bartleby.extend(%s, %s)", [[work.lease], bad])
        with refused("ZB006"):
            conn.execute("select bartleby.extend(null, '1 minute')")
        with refused("ZB006"):
            conn.execute("select bartleby.extend(array[%s, null]::bigint[], '1 minute')", [work.lease])


def test_a_message_is_always_in_exactly_one_place(conn: Connection, clock: Clock) -> None:
    create(conn, "q", max_attempts=2, backoff="none")
    ids = send_count(conn, 60)
    done: list[int] = []
    for turn in range(200):
        clock.advance(1)
        work = claim(conn, 7)
        for n, (position, message) in enumerate(zip(work.positions, work.ids, strict=True)):
            match (turn + n) % 5:
                case 0:
                    release(conn, work.lease, [position])
                case 1:
                    fail(conn, work.lease, {"position": position})
                case 2:
                    reject(conn, work.lease, position, "unacceptable")
                case _:
                    ack(conn, work.lease, [position])
                    done.append(message)
            living = column(conn, "select message_id from bartleby.messages")
            dead = column(conn, "select message_id from bartleby.dead_letters")
            assert sorted(living + dead + done) == ids
        if not work.messages:
            break
    assert drain(conn) == []
    assert len(done) + stats(conn)["dead"] == 60
