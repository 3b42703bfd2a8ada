"""The storm breaker: when it opens, what it hands out meanwhile, what it charges, and how it closes."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tests.kit.clock import Clock
from tests.kit.sql import (
    Claim,
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
    stats,
    value,
)


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, "q", backoff="none")
    return conn


@pytest.fixture
def clock(clock: Clock) -> Clock:
    clock.stop()
    return clock


def open_breaker(conn: Connection, cause: str | None = "ConnectionError", over: str | None = "1 minute") -> bool:
    return bool(value(conn, "select bartleby.open_breaker('q', %s, %s)", cause, over))


def close_breaker(conn: Connection, actor: str | None = "me", reason: str | None = "fixed") -> bool:
    return bool(value(conn, "select bartleby.close_breaker('q', %s, %s)", actor, reason))


def force_breaker(conn: Connection, actor: str | None = "me", reason: str | None = "migration") -> bool:
    return bool(value(conn, "select bartleby.force_breaker('q', %s, %s)", actor, reason))


def state(conn: Connection) -> str:
    return str(stats(conn)["breaker"])


def events(conn: Connection) -> list[str]:
    query = "select type from bartleby.events where type like 'io.bartleby.breaker.%%' order by id"
    return [kind.rpartition(".")[2] for kind in column(conn, query)]


def wait(conn: Connection) -> float:
    """How long a worker that found nothing may sleep."""
    found: timedelta = value(conn, "select bartleby.idle('q', '1 minute')")
    return found.total_seconds()


def probe(conn: Connection, clock: Clock) -> Claim:
    """Go to the time of the next probe, and claim it."""
    pause = stats(conn)["next_probe_at"] - value(conn, "select bartleby.clock()")
    clock.advance(max(0.0, pause.total_seconds()) + 0.001)
    claimed = claim(conn, 100)
    assert len(claimed.messages) == 1
    return claimed


def stormy(conn: Connection, count: int = 20) -> None:
    send_count(conn, count)
    assert open_breaker(conn)


class TestOpening:
    def test_a_new_queue_is_closed(self, conn: Connection) -> None:
        assert row(conn, "select breaker, breaker_since, breaker_cause, next_probe_at from bartleby.queues") == {
            "breaker": "closed",
            "breaker_since": None,
            "breaker_cause": None,
            "next_probe_at": None,
        }

    def test_it_opens_once_and_says_why(self, conn: Connection) -> None:
        assert open_breaker(conn, "ConnectionRefusedError: 10.0.0.1")
        assert not open_breaker(conn, "another")
        found = stats(conn)
        assert (found["breaker"], found["breaker_cause"]) == ("open", "ConnectionRefusedError: 10.0.0.1")
        assert found["next_probe_at"] - found["breaker_since"] == timedelta(seconds=1)
        assert rows(conn, "select type, queue, data from bartleby.events") == [
            {
                "type": "io.bartleby.breaker.opened",
                "queue": "q",
                "data": {"cause": "ConnectionRefusedError: 10.0.0.1"},
            }
        ]

    def test_what_is_rolled_back_was_never_told(self, conn: Connection) -> None:
        with conn.transaction(force_rollback=True):
            assert open_breaker(conn)
        assert (state(conn), events(conn)) == ("closed", [])
        assert open_breaker(conn)

    def test_an_endless_cause_is_cut(self, conn: Connection) -> None:
        open_breaker(conn, "x" * 1_000_000)
        assert len(stats(conn)["breaker_cause"]) == 1000
        assert value(conn, "select length(data ->> 'cause') from bartleby.events") == 1000

    @pytest.mark.parametrize(("cause", "over"), [(None, "1 s"), ("", "1 s"), ("  ", "1 s"), ("c", None), ("c", "-1 s")])
    def test_what_makes_no_sense_is_refused(self, conn: Connection, cause: str | None, over: str | None) -> None:
        with refused("ZB008", "evidence"):
            open_breaker(conn, cause, over)
        assert state(conn) == "closed"

    def test_the_breakers_of_two_queues_know_nothing_of_each_other(self, conn: Connection) -> None:
        create(conn, "other")
        send(conn, 1, "other")
        stormy(conn)
        assert claim(conn, queue="other").payloads == [1]
        assert stats(conn, "other")["breaker"] == "closed"

    def test_evidence_from_before_the_last_closing_proves_nothing(self, conn: Connection, clock: Clock) -> None:
        stormy(conn)
        close_breaker(conn)
        assert not open_breaker(conn, over="30 s")
        clock.advance(29)
        assert not open_breaker(conn, over="30 s")
        assert open_breaker(conn, over="20 s")

    def test_evidence_of_no_length_is_believed_right_after_closing(self, conn: Connection) -> None:
        stormy(conn)
        close_breaker(conn)
        assert open_breaker(conn, over="0")

    def test_a_clock_set_back_after_closing_keeps_it_from_nothing(self, conn: Connection, clock: Clock) -> None:
        stormy(conn)
        close_breaker(conn)
        clock.advance(-3600)
        assert open_breaker(conn)

    def test_it_can_be_disabled(self, conn: Connection) -> None:
        create(conn, "q", breaker="off")
        assert state(conn) == "off"
        assert not open_breaker(conn)
        assert events(conn) == []
        create(conn, "q", breaker="auto")
        assert state(conn) == "closed"
        assert open_breaker(conn)

    def test_disabling_an_open_one_closes_it(self, conn: Connection) -> None:
        stormy(conn)
        create(conn, "q", breaker="off")
        assert state(conn) == "off"
        assert len(claim(conn, 100).messages) == 20
        assert events(conn) == ["opened", "closed"]
        assert (
            value(conn, "select data ->> 'reason' from bartleby.events where data ? 'reason'") == "the policy says off"
        )

    def test_a_policy_that_says_nothing_of_it_leaves_it_open(self, conn: Connection) -> None:
        stormy(conn)
        create(conn, "q", max_attempts=3)
        assert (state(conn), stats(conn)["max_attempts"]) == ("open", 3)

    @pytest.mark.parametrize("bad", ["on", "AUTO", None, True, 1, []])
    def test_a_bad_mode_is_refused_by_its_name(self, conn: Connection, bad: Any) -> None:
        with refused("ZB003", "breaker"):
            create(conn, "q", breaker=bad)


class TestProbes:
    def test_nothing_is_handed_out_before_the_first_is_due(self, conn: Connection, clock: Clock) -> None:
        stormy(conn)
        assert claim(conn, 100).messages == []
        clock.advance(0.8)
        assert claim(conn, 100).messages == []
        clock.advance(0.3)
        assert len(claim(conn, 100).messages) == 1

    def test_there_is_one_at_a_time(self, conn: Connection, clock: Clock) -> None:
        stormy(conn)
        probe(conn, clock)
        clock.advance(59)
        assert claim(conn, 100).messages == []
        found = stats(conn)
        assert (found["leased"], found["next_probe_at"]) == (1, None)

    def test_only_the_probe_is_marked(self, conn: Connection, clock: Clock) -> None:
        send_count(conn, 3)
        before = claim(conn)
        open_breaker(conn)
        during = probe(conn, clock)
        close_breaker(conn)
        after = claim(conn)
        assert column(conn, "select id from bartleby.lease where probe") == [during.lease]
        for work in (before, during, after):
            ack(conn, work.lease)

    def test_waits_double_while_probes_fail(self, conn: Connection, clock: Clock) -> None:
        stormy(conn)
        waits = []
        for _ in range(8):
            waits.append(stats(conn)["next_probe_at"] - value(conn, "select bartleby.clock()"))
            fail_all(conn, probe(conn, clock))
        assert [found.total_seconds() for found in waits] == [1, 2, 4, 8, 16, 30, 30, 30]

    def test_one_that_succeeds_makes_the_waits_short_again(self, conn: Connection, clock: Clock) -> None:
        stormy(conn)
        for _ in range(5):
            fail_all(conn, probe(conn, clock))
        ack(conn, probe(conn, clock).lease)
        fail_all(conn, claim(conn))
        pause = stats(conn)["next_probe_at"] - value(conn, "select bartleby.clock()")
        assert pause.total_seconds() == 2

    def test_three_in_a_row_close_it(self, conn: Connection, clock: Clock) -> None:
        stormy(conn)
        for number in range(3):
            assert state(conn) == "open"
            work = probe(conn, clock) if number == 0 else claim(conn, 100)
            assert len(work.messages) == 1
            ack(conn, work.lease)
        found = stats(conn)
        assert (found["breaker"], found["breaker_cause"], found["next_probe_at"]) == ("closed", None, None)
        assert len(claim(conn, 100).messages) == 17
        assert events(conn) == ["opened", "closed"]
        data = value(conn, "select data from bartleby.events order by id desc limit 1")
        assert (data["cause"], set(data)) == ("ConnectionError", {"cause", "opened_at"})

    def test_an_ack_by_position_counts_too(self, conn: Connection, clock: Clock) -> None:
        stormy(conn)
        for number in range(3):
            work = probe(conn, clock) if number == 0 else claim(conn)
            ack(conn, work.lease, work.positions)
        assert state(conn) == "closed"

    def test_an_ack_of_nothing_does_not_count(self, conn: Connection, clock: Clock) -> None:
        stormy(conn)
        work = probe(conn, clock)
        for _ in range(3):
            ack(conn, work.lease, [])
        assert (state(conn), claim(conn).messages) == ("open", [])

    @pytest.mark.parametrize("how", ["fail", "release", "lapse"])
    def test_one_that_does_not_succeed_starts_the_row_anew(self, conn: Connection, clock: Clock, how: str) -> None:
        stormy(conn)
        ack(conn, probe(conn, clock).lease)
        ack(conn, claim(conn).lease)
        work = claim(conn)
        if how == "fail":
            fail_all(conn, work)
        elif how == "release":
            release(conn, work.lease)
        else:
            clock.advance(61)
            assert [found["outcome"] for found in reap(conn)] == ["released"]
        pause = stats(conn)["next_probe_at"] - value(conn, "select bartleby.clock()")
        assert pause.total_seconds() == 2
        assert claim(conn, 100).messages == []
        for _ in range(2):
            ack(conn, probe(conn, clock).lease)
            assert state(conn) == "open"
        ack(conn, claim(conn).lease)
        assert state(conn) == "closed"

    @pytest.mark.parametrize("how", ["verdict", "reason", "reject"])
    def test_a_message_that_is_bad_in_itself_proves_nothing(self, conn: Connection, clock: Clock, how: str) -> None:
        stormy(conn)
        ack(conn, probe(conn, clock).lease)
        ack(conn, claim(conn).lease)
        work = claim(conn)
        if how == "reject":
            reject(conn, work.lease, work.positions[0], "unacceptable")
        elif how == "verdict":
            fail_all(conn, work, verdict="dead")
        else:
            fail_all(conn, work, reason="unacceptable", verdict="retry")
        pause = stats(conn)["next_probe_at"] - value(conn, "select bartleby.clock()")
        assert (state(conn), pause.total_seconds(), stats(conn)["dead"]) == ("open", 1, 1)
        ack(conn, probe(conn, clock).lease)
        assert state(conn) == "closed"

    def test_a_suspect_that_crashes_as_a_probe_is_charged(self, conn: Connection, clock: Clock) -> None:
        send(conn, 1)
        claim(conn)
        clock.advance(61)
        reap(conn)
        open_breaker(conn)
        work = probe(conn, clock)
        assert work.one["solo"]
        clock.advance(61)
        assert [found["outcome"] for found in reap(conn)] == ["retry"]
        assert row(conn, "select attempts, crashes, solo from bartleby.messages") == {
            "attempts": 1,
            "crashes": 1,
            "solo": True,
        }
        assert value(conn, "select rule from bartleby.attempts where outcome = 'crashed'") == "crash 1 of 3"
        pause = stats(conn)["next_probe_at"] - value(conn, "select bartleby.clock()")
        assert pause.total_seconds() == 2

    def test_one_that_is_extended_stays_the_only_one(self, conn: Connection, clock: Clock) -> None:
        stormy(conn)
        work = probe(conn, clock)
        for _ in range(5):
            clock.advance(50)
            conn.execute("select bartleby.extend(%s, '1 minute')", [[work.lease]])
            assert reap(conn) == []
            assert claim(conn).messages == []
        ack(conn, work.lease)
        assert len(claim(conn).messages) == 1

    def test_an_empty_queue_has_no_probes_and_keeps_them_due(self, conn: Connection, clock: Clock) -> None:
        open_breaker(conn)
        clock.advance(100)
        for _ in range(3):
            assert claim(conn).messages == []
        send_count(conn, 5)
        assert len(claim(conn, 5).messages) == 1

    def test_an_idle_claim_burns_no_xid(self, conn: Connection, clock: Clock) -> None:
        open_breaker(conn)
        clock.advance(100)
        claim(conn)
        wait(conn)  # gives its word, for longer than it sleeps
        for _ in range(5):
            with conn.transaction():
                claim(conn)
                wait(conn)
                assert value(conn, "select pg_current_xact_id_if_assigned() is null")

    def test_what_is_due_is_probed_as_well(self, conn: Connection, clock: Clock) -> None:
        send(conn, 1, delay="1 s")
        open_breaker(conn)
        clock.advance(2)
        assert probe(conn, clock).payloads == [1]

    def test_a_probe_past_a_hole(self, conn: Connection, clock: Clock, connect: Callable[..., Connection]) -> None:
        slow = connect(autocommit=False)
        send(slow, 1)
        send_count(conn, 3)
        open_breaker(conn)
        work = probe(conn, clock)
        assert column(conn, "select id from bartleby.lease where probe") == [work.lease]
        slow.commit()
        assert claim(conn).messages == []
        ack(conn, work.lease)
        assert len(claim(conn, 9).messages) == 1

    def test_a_probe_that_had_been_dead_resolves_its_letter(self, conn: Connection, clock: Clock) -> None:
        sent = send(conn, 1)
        fail_all(conn, claim(conn), verdict="dead")
        conn.execute("select bartleby.replay(%s, 'me', 'again')", [[sent]])
        open_breaker(conn)
        ack(conn, probe(conn, clock).lease)
        assert value(conn, "select status from bartleby.dead_letters") == "resolved"
        assert value(conn, "select passed from bartleby.breaker") == 1

    def test_a_clock_set_back_does_not_put_off_the_next(self, conn: Connection, clock: Clock) -> None:
        stormy(conn)
        clock.advance(-3600)
        assert len(claim(conn, 9).messages) == 1

    def test_a_paused_queue_has_no_probes(self, conn: Connection, clock: Clock) -> None:
        stormy(conn)
        conn.execute("select bartleby.pause_queue('q')")
        clock.advance(100)
        assert claim(conn).messages == []
        assert state(conn) == "open"
        conn.execute("select bartleby.resume_queue('q')")
        assert len(claim(conn, 100).messages) == 1

    def test_a_lost_probe_of_a_worker_that_comes_back_is_refused(self, conn: Connection, clock: Clock) -> None:
        stormy(conn)
        work = probe(conn, clock)
        clock.advance(61)
        reap(conn)
        with refused("ZB006"):
            ack(conn, work.lease)
        assert value(conn, "select passed from bartleby.breaker") == 0


class TestSleeping:
    def test_a_worker_sleeps_until_the_next_probe(self, conn: Connection, clock: Clock) -> None:
        stormy(conn)
        for expected in (1, 2, 4, 8, 16, 30):
            assert wait(conn) == pytest.approx(expected)
            fail_all(conn, probe(conn, clock))
        assert value(conn, "select bartleby.idle('q', '5 s')") == timedelta(seconds=5)

    def test_not_at_all_if_it_is_due_and_there_is_something(self, conn: Connection, clock: Clock) -> None:
        stormy(conn)
        clock.advance(2)
        assert wait(conn) == pytest.approx(0.01)

    def test_as_usual_if_there_is_nothing_to_probe_with(self, conn: Connection, clock: Clock) -> None:
        open_breaker(conn)
        clock.advance(2)
        wait(conn)
        assert wait(conn) == 60

    def test_a_second_while_a_probe_is_out(self, conn: Connection, clock: Clock) -> None:
        stormy(conn)
        probe(conn, clock)
        assert wait(conn) == 1

    def test_a_second_while_it_is_forced(self, conn: Connection) -> None:
        send_count(conn, 2)
        force_breaker(conn)
        assert wait(conn) == 1

    @pytest.mark.parametrize("how", ["third probe", "by hand", "by policy"])
    def test_whoever_waits_for_it_is_roused(
        self, conn: Connection, clock: Clock, connect: Callable[..., Connection], how: str
    ) -> None:
        sleeper = connect()
        stormy(conn)
        work = probe(conn, clock)
        if how == "third probe":
            for _ in range(2):
                ack(conn, work.lease)
                work = claim(conn)
        sleeper.execute("listen " + value(conn, "select bartleby.channel('q')"))
        wait(sleeper)
        if how == "by hand":
            close_breaker(conn)
        elif how == "by policy":
            create(conn, "q", breaker="off")
        else:
            ack(conn, work.lease)
        assert state(conn) == ("off" if how == "by policy" else "closed")
        assert len(list(sleeper.notifies(timeout=20, stop_after=1))) == 1

    def test_a_closing_under_way_rouses_whoever_fell_asleep_meanwhile(
        self, conn: Connection, clock: Clock, connect: Callable[..., Connection]
    ) -> None:
        stormy(conn)
        for _ in range(5):
            fail_all(conn, probe(conn, clock))
        closing, sleeper = connect(autocommit=False), connect()
        close_breaker(closing)
        sleeper.execute("listen " + value(conn, "select bartleby.channel('q')"))
        assert wait(sleeper) > 20
        closing.commit()
        assert len(list(sleeper.notifies(timeout=20, stop_after=1))) == 1

    @pytest.mark.usefixtures("clock")
    @pytest.mark.parametrize("how", ["open", "forced", "paused"])
    def test_senders_need_not_tell_who_is_handed_nothing_anyway(
        self, conn: Connection, connect: Callable[..., Connection], how: str
    ) -> None:
        if how == "open":
            open_breaker(conn)
        elif how == "forced":
            force_breaker(conn)
        else:
            conn.execute("select bartleby.pause_queue('q')")
        sleeper = connect()
        sleeper.execute("listen " + value(conn, "select bartleby.channel('q')"))
        assert 0 < wait(sleeper) <= 1
        send_count(conn, 3)
        send(conn, 4)
        assert list(sleeper.notifies(timeout=0.2, stop_after=1)) == []
        conn.execute("select bartleby.resume_queue('q')")
        assert len(list(sleeper.notifies(timeout=20, stop_after=1))) == 1


class TestCharging:
    @pytest.mark.parametrize("verdict", [None, "retry"])
    @pytest.mark.parametrize("force", [False, True])
    def test_what_fails_while_it_is_open_goes_back_as_it_was(
        self, conn: Connection, clock: Clock, verdict: str | None, force: bool
    ) -> None:
        """Messages that were out when it opened, of which one has failed before."""
        create(conn, "q", max_attempts=2, backoff="fixed", base=10)
        send_count(conn, 2)
        work = claim(conn, 2)
        fail(conn, work.lease, {"position": work.positions[0]})
        before = row(conn, "select attempts, first_failed_at from bartleby.deferred")
        clock.advance(11)
        again = claim(conn)
        (force_breaker if force else open_breaker)(conn)
        for lease, position in ((again.lease, again.positions[0]), (work.lease, work.positions[1])):
            (answer,) = fail(conn, lease, {"position": position, "verdict": verdict, "rule": "KeyError is transient"})
            assert answer["verdict"] == "retry"
            assert answer["retry_at"] is not None
        assert rows(conn, "select attempts, first_failed_at from bartleby.deferred order by id") == [
            before,
            {"attempts": None, "first_failed_at": None},
        ]
        assert rows(
            conn, "select attempt, outcome, verdict, rule from bartleby.attempts order by failed_at, message_id"
        )[1:] == [
            {
                "attempt": number,
                "outcome": "failed",
                "verdict": "retry",
                "rule": f"KeyError is transient; attempt {number} of 2; not charged: the breaker is open",
            }
            for number in (2, 1)
        ]
        assert stats(conn)["dead"] == 0

    def test_a_probe_that_fails_is_not_charged(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", max_attempts=1)
        send(conn, 1)
        open_breaker(conn)
        for _ in range(10):
            clock.advance(400)
            (answer,) = fail_all(conn, probe(conn, clock))
            assert answer["verdict"] == "retry"
        assert value(conn, "select attempts from bartleby.messages") == 0
        assert value(conn, "select count(*) from bartleby.attempts where attempt = 1") == 10

    @pytest.mark.parametrize("failure", [{"verdict": "dead"}, {"reason": "delivery_error"}, {"reason": "unacceptable"}])
    def test_what_must_die_dies(self, conn: Connection, failure: dict[str, str]) -> None:
        send(conn, 1)
        work = claim(conn)
        open_breaker(conn)
        assert fail_all(conn, work, **failure)[0]["verdict"] == "dead"
        assert value(conn, "select attempts from bartleby.dead_letters") == 1
        assert "not charged" not in value(conn, "select rule from bartleby.attempts")

    def test_time_is_not_up_while_it_is_open(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", give_up_after=10, backoff="fixed", base=5)
        send(conn, 1)
        fail_all(conn, claim(conn))
        clock.advance(60)
        work = claim(conn)
        open_breaker(conn)
        assert fail_all(conn, work)[0]["verdict"] == "retry"

    def test_a_release_is_as_free_as_ever(self, conn: Connection) -> None:
        send(conn, 1)
        work = claim(conn)
        open_breaker(conn)
        release(conn, work.lease)
        assert value(conn, "select attempts from bartleby.messages") == 0
        assert rows(conn, "select * from bartleby.attempts") == []

    def test_a_success_that_was_out_when_it_opened_is_no_probe(self, conn: Connection) -> None:
        send_count(conn, 30)
        work = [claim(conn) for _ in range(5)]
        open_breaker(conn)
        for claimed in work:
            ack(conn, claimed.lease)
        assert (state(conn), value(conn, "select passed from bartleby.breaker")) == ("open", 0)

    def test_after_closing_it_charges_again(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", max_attempts=1)
        stormy(conn)
        work = probe(conn, clock)
        close_breaker(conn)
        assert fail_all(conn, work)[0]["verdict"] == "dead"

    def test_an_outage_costs_nobody_an_attempt(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", max_attempts=5, backoff="exponential")
        send_count(conn, 200)
        fail_all(conn, claim(conn, 10))
        assert open_breaker(conn)
        for _ in range(10):
            fail_all(conn, probe(conn, clock))
        for _ in range(3):
            ack(conn, probe(conn, clock).lease)
        clock.advance(400)
        assert len(drain(conn)) == 197
        assert stats(conn)["dead"] == 0
        assert value(conn, "select count(*) from bartleby.attempts where rule like '%%not charged%%'") == 10


class TestByHand:
    def test_it_can_be_closed(self, conn: Connection) -> None:
        stormy(conn)
        assert close_breaker(conn, "ada", "the API is back")
        assert not close_breaker(conn)
        assert len(claim(conn, 100).messages) == 20
        assert events(conn) == ["opened", "closed"]
        data = value(conn, "select data from bartleby.events order by id desc limit 1")
        assert (data["actor"], data["reason"], data["cause"]) == ("ada", "the API is back", "ConnectionError")

    def test_closing_what_was_never_open(self, conn: Connection) -> None:
        assert not close_breaker(conn)
        assert events(conn) == []

    def test_forced_it_hands_out_nothing_until_it_is_closed(self, conn: Connection, clock: Clock) -> None:
        send_count(conn, 3)
        assert force_breaker(conn, "ada", "migration")
        assert not force_breaker(conn)
        found = stats(conn)
        assert (found["breaker"], found["breaker_cause"], found["next_probe_at"]) == (
            "forced",
            "forced by ada: migration",
            None,
        )
        for _ in range(5):
            clock.advance(1000)
            assert claim(conn).messages == []
        assert not open_breaker(conn)
        assert close_breaker(conn)
        assert len(claim(conn, 9).messages) == 3
        assert events(conn) == ["opened", "closed"]

    def test_an_open_one_can_be_forced_and_that_is_no_second_opening(self, conn: Connection, clock: Clock) -> None:
        stormy(conn)
        assert force_breaker(conn)
        clock.advance(100)
        assert (state(conn), claim(conn).messages, events(conn)) == ("forced", [], ["opened"])
        close_breaker(conn)
        assert events(conn) == ["opened", "closed"]

    def test_a_disabled_one_can_be_forced_and_stays_so(self, conn: Connection) -> None:
        create(conn, "q", breaker="off")
        force_breaker(conn)
        create(conn, "q", breaker="off")
        assert state(conn) == "forced"
        close_breaker(conn)
        assert state(conn) == "off"

    @pytest.mark.parametrize("how", [close_breaker, force_breaker])
    @pytest.mark.parametrize("words", [(None, "r"), ("a", None), (" ", "r"), ("a", "")])
    def test_who_and_why_are_asked(
        self, conn: Connection, how: Callable[..., bool], words: tuple[str | None, str | None]
    ) -> None:
        stormy(conn)
        with refused("ZB008", "needs an actor and a reason"):
            how(conn, *words)
        assert state(conn) == "open"

    @pytest.mark.parametrize("settle", ["ack", "fail", "release", "lapse"])
    @pytest.mark.parametrize("how", ["close", "force", "close and open"])
    def test_a_probe_that_is_out_then_is_a_lease_like_any_other(
        self, conn: Connection, clock: Clock, how: str, settle: str
    ) -> None:
        stormy(conn)
        work = probe(conn, clock)
        if how == "force":
            force_breaker(conn)
        else:
            close_breaker(conn)
        if how == "close and open":
            clock.advance(0.001)
            assert open_breaker(conn, over="0")
        before = row(conn, "select * from bartleby.breaker")
        if settle == "ack":
            ack(conn, work.lease)
        elif settle == "fail":
            fail_all(conn, work)
        elif settle == "release":
            release(conn, work.lease)
        else:
            clock.advance(61)
            assert len(reap(conn)) == 1
        assert row(conn, "select * from bartleby.breaker") == before
        if how == "close and open":
            for number in range(3):
                ack(conn, (probe(conn, clock) if number == 0 else claim(conn)).lease)
            assert state(conn) == "closed"

    def test_its_whole_life_again_and_again(self, conn: Connection, clock: Clock) -> None:
        send_count(conn, 100)
        for _ in range(5):
            clock.advance(120)
            assert open_breaker(conn)
            fail_all(conn, probe(conn, clock))
            for number in range(3):
                ack(conn, (probe(conn, clock) if number == 0 else claim(conn)).lease)
        assert events(conn) == ["opened", "closed"] * 5
        assert value(conn, "select count(*) from bartleby.breaker") == 1


def test_an_old_snapshot_may_settle_a_probe(conn: Connection, clock: Clock, connect: Callable[..., Connection]) -> None:
    stormy(conn)
    ack(conn, probe(conn, clock).lease)
    ack(conn, claim(conn).lease)
    work = claim(conn)
    worker = connect(autocommit=False)
    worker.execute("set transaction isolation level repeatable read")
    ack(worker, work.lease)
    worker.commit()
    assert state(conn) == "closed"


def test_an_old_snapshot_that_missed_a_change_closes_nothing_and_harms_nothing(
    conn: Connection, clock: Clock, connect: Callable[..., Connection]
) -> None:
    """The queue's row has changed since; the ack counts, and the next probe closes."""
    stormy(conn)
    ack(conn, probe(conn, clock).lease)
    ack(conn, claim(conn).lease)
    work = claim(conn)
    worker = connect(autocommit=False)
    worker.execute("set transaction isolation level repeatable read")
    worker.execute("select 1 from bartleby.queue")
    create(conn, "q", max_attempts=7)
    ack(worker, work.lease)
    worker.commit()
    assert (state(conn), value(conn, "select passed from bartleby.breaker")) == ("open", 3)
    ack(conn, claim(conn).lease)
    assert state(conn) == "closed"


def test_an_old_snapshot_that_missed_a_closing_is_told_to_try_again(
    conn: Connection, clock: Clock, connect: Callable[..., Connection]
) -> None:
    stormy(conn)
    work = probe(conn, clock)
    worker = connect(autocommit=False)
    worker.execute("set transaction isolation level repeatable read")
    worker.execute("select 1 from bartleby.queue")
    close_breaker(conn)
    with pytest.raises(psycopg.errors.SerializationFailure):
        ack(worker, work.lease)
    worker.rollback()
    assert ack(conn, work.lease) == 1
