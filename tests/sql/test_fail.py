"""Failing: what becomes of a message whose attempt failed, when it comes again, and what is kept of it."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.kit.clock import Clock
from tests.kit.sql import (
    Claim,
    Connect,
    Connection,
    ack,
    claim,
    column,
    create,
    fail,
    fail_all,
    refused,
    row,
    rows,
    send,
    send_count,
    stats,
    value,
)

Settle = Callable[[Connection, Claim], object]


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn)
    return conn


def claimed(conn: Connection, count: int = 3) -> Claim:
    send_count(conn, count)
    return claim(conn, count)


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
            {"position": 1, "max_attempts": 0},
            {"position": 1, "max_attempts": 32001},
            {"position": 1, "max_attempts": 1.5},
            {"position": 1, "max_attempts": "3"},
            {"position": 1, "give_up_after": -1},
            {"position": 1, "give_up_after": 1e300},
            {"position": 1, "give_up_after": "1 hour"},
            {"position": 1, "reason": "bad"},
            {"position": 1, "reason": 1},
            {"position": 1, "reason": ""},
        ],
    )
    def test_what_makes_no_sense_is_refused(self, conn: Connection, bad: Any) -> None:
        work = claimed(conn)
        with refused("ZB008"):
            fail(conn, work.lease, bad)
        assert stats(conn)["leased"] == 3

    def test_the_bad_one_is_named_by_its_index(self, conn: Connection) -> None:
        work = claimed(conn)
        first, second, _ = work.positions
        with refused("ZB008", "failure 1: max_attempts"):
            fail(conn, work.lease, {"position": first, "max_attempts": 1}, {"position": second, "max_attempts": 0})

    def test_what_is_null_is_not_given(self, conn: Connection) -> None:
        nothing = dict.fromkeys(["verdict", "delay", "rule", "max_attempts", "give_up_after", "reason", "error"])
        assert fail_all(conn, claimed(conn, 1), **nothing)[0]["verdict"] == "retry"
        assert value(conn, "select rule from bartleby.attempts") == "attempt 1 of 5"

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

    @pytest.mark.parametrize("handlers", [1, 2, 4])
    def test_the_handlers_budget_comes_before_the_queues(self, conn: Connection, clock: Clock, handlers: int) -> None:
        create(conn, "q", max_attempts=3)
        send(conn, 1)
        assert self.live(conn, clock, max_attempts=handlers) == ["retry"] * (handlers - 1) + ["dead"]
        assert value(conn, "select reason from bartleby.dead_letters") == "exhausted"

    def test_the_messages_own_budget_comes_before_the_handlers(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", max_attempts=3)
        send(conn, 1, max_attempts=2)
        assert self.live(conn, clock, max_attempts=4) == ["retry", "dead"]

    def test_the_handlers_budget_is_not_the_messages_own_from_then_on(self, conn: Connection, clock: Clock) -> None:
        send(conn, 1)
        fail_all(conn, claim(conn), max_attempts=9)
        assert value(conn, "select max_attempts from bartleby.messages") is None
        clock.advance(400)
        fail_all(conn, claim(conn), verdict="dead", max_attempts=9)
        assert value(conn, "select max_attempts from bartleby.dead_letter") is None

    def test_the_handlers_patience_comes_before_the_queues(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", max_attempts=100, backoff="fixed", base=100, give_up_after=10)
        send(conn, 1)
        assert self.live(conn, clock, give_up_after=1000) == ["retry", "retry", "retry", "dead"]
        assert value(conn, "select reason from bartleby.dead_letters") == "expired"

    @pytest.mark.parametrize("style", ["postgres", "iso_8601", "sql_standard"])
    def test_the_rule_tells_the_whole_story(self, conn: Connection, style: str) -> None:
        conn.execute(f"set intervalstyle = '{style}'".encode())
        create(conn, "q", max_attempts=2)
        send_count(conn, 8)
        work = claim(conn, 8)
        stories: list[tuple[dict[str, Any], str]] = [
            ({}, "attempt 1 of 2"),
            ({"rule": "KeyError: transient by default"}, "KeyError: transient by default; attempt 1 of 2"),
            ({"max_attempts": 7}, "attempt 1 of 7"),
            ({"max_attempts": 1, "rule": "r"}, "r; attempt 1 of 1"),
            ({"verdict": "dead"}, "the verdict was dead"),
            ({"verdict": "dead", "rule": "KeyError is listed by the handler"}, "KeyError is listed by the handler"),
            ({"give_up_after": 3600, "delay": 4000}, "give_up_after 01:00:00 is over"),
            ({"reason": "unacceptable", "rule": "payload.a: expected int"},
             "payload.a: expected int; rejected as unacceptable"),
        ]  # fmt: skip
        fail(conn, work.lease, *({"position": p, **s[0]} for p, s in zip(work.positions, stories, strict=True)))
        assert column(conn, "select rule from bartleby.attempts order by message_id") == [story for _, story in stories]

    def test_the_rule_of_a_crash_counts_crashes(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", crash_budget=2, max_attempts=3, backoff="none")
        send(conn, 1)
        for _ in range(3):
            claim(conn)
            clock.advance(400)
            conn.execute("select bartleby.reap()")
        assert column(conn, "select rule from bartleby.attempts order by failed_at") == [
            "nobody is charged before it ran alone",
            "crash 1 of 2",
            "crash 2 of 2",
        ]

    def test_a_crash_beyond_the_attempts_counts_attempts(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", crash_budget=9, max_attempts=1)
        send(conn, 1)
        for _ in range(2):
            claim(conn)
            clock.advance(400)
            conn.execute("select bartleby.reap()")
        assert column(conn, "select rule from bartleby.attempts where verdict = 'dead'") == ["attempt 1 of 1"]
        assert value(conn, "select reason from bartleby.dead_letters") == "crashed"

    @pytest.mark.parametrize(("reason", "dies_of"), [("unacceptable", "unacceptable"), ("delivery_error", "terminal")])
    def test_a_failure_with_a_reason_is_a_rejection(self, conn: Connection, reason: str, dies_of: str) -> None:
        """With the evidence of a failure; whatever the verdict says."""
        work = claimed(conn, 1)
        said = {"error_type": "ValidationError", "error": "e", "traceback": "t", "fingerprint": "f"}
        assert fail_all(conn, work, reason=reason, verdict="retry", **said)[0]["verdict"] == "dead"
        letter = row(conn, "select reason, error_type, error, traceback, fingerprint from bartleby.dead_letters")
        assert letter == {**said, "reason": dies_of}
        assert row(conn, "select outcome, verdict from bartleby.attempts") == {"outcome": "rejected", "verdict": "dead"}

    def test_failures_and_rejections_in_one_call(self, conn: Connection) -> None:
        create(conn, "invalid")
        create(conn, "dead")
        create(conn, "q", invalid_to="invalid", dead_letter_to="dead")
        work = claimed(conn, 4)
        fields: list[dict[str, Any]] = [
            {"reason": "unacceptable", "error_type": "E", "error": "e"},
            {"reason": "delivery_error"},
            {"verdict": "dead"},
            {},
        ]
        answers = fail(conn, work.lease, *({"position": p, **f} for p, f in zip(work.positions, fields, strict=True)))
        assert sorted(answer["verdict"] for answer in answers) == ["dead", "dead", "dead", "retry"]
        (copy,) = claim(conn, 9, "invalid").messages
        assert (copy["payload"], copy["headers"]["rejection_reason"]) == (1, "unacceptable")
        assert copy["headers"]["rejection_message"] == "E: e"
        assert sorted(claim(conn, 9, "dead").payloads) == [2, 3]
        assert column(conn, "select outcome from bartleby.attempts order by message_id") == [
            "rejected",
            "rejected",
            "failed",
            "failed",
        ]

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
            handler="shop.fulfil",
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
                "rule": "handler; attempt 1 of 2",
                "handler": "shop.fulfil",
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
                "rule": "attempt 2 of 2",
                "handler": None,
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
            "group_id": value(conn, "select id from bartleby.groups where fingerprint = 'f'"),
            "status": "dead",
            "status_at": dead_at,
            "reason": "exhausted",
            "attempts": 2,
            "crashes": 0,
            "cycle": 1,
            "key": "k",
            "headers": {"type": "t"},
            "payload": {"a": 1},
            "edited": None,
            "generation": 7,
            "worker": "host",
            "created_at": created_at,
            "first_failed_at": first_failed_at,
            "dead_at": dead_at,
            "held_at": None,
            "held_by": None,
            "hold_reason": None,
            "replay_id": None,
            "replayed_at": None,
            "replayed_by": None,
            "replay_reason": None,
            "resolved_at": None,
            "discarded_by": None,
            "discard_reason": None,
            "erased_at": None,
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
