"""The storm breaker: when it opens, what it hands out, what it charges, and how it closes."""

from datetime import timedelta
from itertools import product

import pytest

from tests.kit import sql
from tests.kit.clock import Clock
from tests.kit.refusals import assert_refused, refused_row
from tests.kit.sql import Claim, Connect, Connection


@pytest.fixture
def conn(conn: Connection) -> Connection:
    sql.create(conn, "q", backoff="none")
    return conn


@pytest.fixture
def clock(clock: Clock) -> Clock:
    clock.stop()
    return clock


def open_breaker(conn: Connection, cause: str | None = "ConnectionError", over: str | None = "1 minute") -> bool:
    return bool(sql.value(conn, "select bartleby.open_breaker('q', %s, %s)", cause, over))


def close_breaker(conn: Connection) -> bool:
    return bool(sql.value(conn, "select bartleby.close_breaker('q', 'me', 'fixed')"))


def force_breaker(conn: Connection) -> bool:
    return bool(sql.value(conn, "select bartleby.force_breaker('q', 'me', 'migration')"))


def state(conn: Connection) -> str:
    return str(sql.stats(conn)["breaker"])


def events(conn: Connection) -> list[str]:
    query = "select type from bartleby.events where type like 'io.bartleby.breaker.%%' order by id"
    return [kind.rpartition(".")[2] for kind in sql.column(conn, query)]


def idle(conn: Connection) -> float:
    """How many seconds a worker that found nothing may sleep."""
    return float(sql.value(conn, "select extract(epoch from bartleby.idle('q', '1 minute'))"))


def until_probe(conn: Connection) -> float:
    return float(sql.value(conn, "select extract(epoch from next_probe_at - bartleby.clock()) from bartleby.queues"))


@pytest.fixture
def sleeper(connect: Connect) -> Connection:
    """A session that is notified as a worker is."""
    listening = connect()
    listening.execute("listen " + sql.value(listening, "select bartleby.channel('q')"))
    return listening


def notified(conn: Connection) -> list[str]:
    return [note.payload for note in conn.notifies(timeout=60, stop_after=1)]


def probe(conn: Connection, clock: Clock) -> Claim:
    """Go to the time of the next probe, and claim it."""
    clock.advance(max(0.0, until_probe(conn)) + 0.001)
    claimed = sql.claim(conn, 100)
    assert len(claimed.messages) == 1
    return claimed


def settle(conn: Connection, clock: Clock, work: Claim, outcome: str) -> None:
    if outcome == "ack":
        sql.ack(conn, work.lease)
    elif outcome == "release":
        sql.release(conn, work.lease)
    elif outcome == "reject":
        sql.reject(conn, work.lease, work.positions[0], "unacceptable")
    elif outcome == "lapse":
        clock.advance(61)
        assert len(sql.reap(conn)) == 1
    else:
        failures = {"fail": {}, "dead": {"verdict": "dead"}, "bad": {"reason": "unacceptable", "verdict": "retry"}}
        sql.fail_all(conn, work, **failures[outcome])


def stormy(conn: Connection, count: int = 20) -> None:
    sql.send_count(conn, count)
    assert open_breaker(conn)


class TestOpening:
    def test_breaker_opens_once_and_reports_the_cause(self, conn: Connection) -> None:
        sql.create(conn, "other")
        sql.send(conn, 1, "other")
        assert open_breaker(conn, "ConnectionRefusedError: 10.0.0.1")
        assert not open_breaker(conn, "another")
        found = sql.stats(conn)
        assert (found["breaker"], found["breaker_cause"]) == ("open", "ConnectionRefusedError: 10.0.0.1")
        assert found["next_probe_at"] - found["breaker_since"] == timedelta(seconds=1)
        opened = {"type": "io.bartleby.breaker.opened", "queue": "q"}
        assert sql.rows(conn, "select type, queue, data from bartleby.events") == [
            opened | {"data": {"cause": "ConnectionRefusedError: 10.0.0.1"}}
        ]
        assert sql.claim(conn, queue="other").payloads == [1], "each queue has its own breaker"
        conn.execute("select bartleby.open_breaker('other', %s, '0')", ["x" * 1_000_000])
        assert len(sql.stats(conn, "other")["breaker_cause"]) == 1000
        assert sql.value(conn, "select length(data ->> 'cause') from bartleby.events where queue = 'other'") == 1000

    def test_bad_evidence_is_refused(self, conn: Connection) -> None:
        for cause, over in ((None, "1 s"), ("", "1 s"), ("  ", "1 s"), ("c", None), ("c", "-1 s")):
            assert_refused(conn, "ZB008", "evidence", "select bartleby.open_breaker('q', %s, %s)", cause, over)
        assert state(conn) == "closed"

    def test_evidence_from_before_the_last_closing_is_ignored(self, conn: Connection, clock: Clock) -> None:
        def reset() -> None:
            close_breaker(conn)
            assert state(conn) == "closed"

        stormy(conn)
        reset()
        assert not open_breaker(conn, over="30 s")
        clock.advance(29)
        assert not open_breaker(conn, over="30 s")
        assert open_breaker(conn, over="20 s")
        reset()
        clock.advance(0.001)
        assert open_breaker(conn, over="0"), "evidence of no length is of now"
        reset()
        clock.advance(-3600)
        assert open_breaker(conn), "a clock set back hides no evidence"

    def test_policy_off_closes_it_and_keeps_it_closed(self, conn: Connection) -> None:
        stormy(conn)
        sql.create(conn, "q", max_attempts=3)
        assert state(conn) == "open", "a policy without it leaves it open"
        sql.create(conn, "q", breaker="off")
        assert (state(conn), len(sql.claim(conn, 100).messages), open_breaker(conn)) == ("off", 20, False)
        assert events(conn) == ["opened", "closed"]
        reason = "select data ->> 'reason' from bartleby.events where data ? 'reason'"
        assert sql.value(conn, reason) == "the policy says off"
        sql.create(conn, "q", breaker="auto")
        assert (state(conn), open_breaker(conn, over="0")) == ("closed", True)


class TestProbes:
    def test_waits_double_while_probes_fail(self, conn: Connection, clock: Clock) -> None:
        stormy(conn)
        for expected in (1, 2, 4, 8, 16, 30, 30, 30):
            assert until_probe(conn) == expected
            assert idle(conn) == pytest.approx(expected)
            clock.advance(expected - 0.01)
            assert sql.claim(conn, 100).messages == [], "none before it is due"
            work = probe(conn, clock)
            assert (sql.stats(conn)["leased"], sql.stats(conn)["next_probe_at"]) == (1, None)
            sql.fail_all(conn, work)
        assert sql.value(conn, "select bartleby.idle('q', '5 s')") == timedelta(seconds=5)
        sql.ack(conn, probe(conn, clock).lease)
        sql.fail_all(conn, sql.claim(conn))
        assert until_probe(conn) == 2, "a success makes the waits short again"
        clock.advance(-3600)
        assert len(sql.claim(conn, 9).messages) == 1, "a clock set back delays no probe"

    def test_three_successes_in_a_row_close_it(self, conn: Connection, clock: Clock) -> None:
        sql.send_count(conn, 4)
        before = [sql.claim(conn) for _ in range(4)]
        stormy(conn)
        for claimed in before:
            sql.ack(conn, claimed.lease)
        assert (state(conn), sql.value(conn, "select passed from bartleby.breaker")) == ("open", 0), (
            "they are no probes"
        )
        work = probe(conn, clock)
        for _ in range(5):
            clock.advance(50)
            conn.execute("select bartleby.extend(%s, '1 minute')", [[work.lease]])
            assert sql.reap(conn) == sql.claim(conn).messages == [], "one at a time"
        sql.ack(conn, work.lease, [])
        assert (sql.claim(conn).messages, sql.value(conn, "select passed from bartleby.breaker")) == ([], 0)
        for number in range(3):
            assert (state(conn), len(work.messages)) == ("open", 1)
            sql.ack(conn, work.lease, work.positions if number else None)
            work = sql.claim(conn, 100)
        found = sql.stats(conn)
        assert (found["breaker"], found["breaker_cause"], found["next_probe_at"]) == ("closed", None, None)
        assert (len(work.messages), events(conn)) == (17, ["opened", "closed"])
        data = sql.value(conn, "select data from bartleby.events order by id desc limit 1")
        assert (data["cause"], set(data)) == ("ConnectionError", {"cause", "opened_at"})

    def test_failed_probe_starts_again_and_bad_message_is_ignored(self, conn: Connection, clock: Clock) -> None:
        sql.create(conn, "q", max_attempts=1)  # a probe that fails is not charged
        stormy(conn)
        sql.ack(conn, probe(conn, clock).lease)
        sql.ack(conn, sql.claim(conn).lease)
        for outcome in ("fail", "release", "lapse", "dead", "bad", "reject"):
            with conn.transaction(force_rollback=True):
                work = sql.claim(conn)
                settle(conn, clock, work, outcome)
                with refused_row(outcome, "ZB006"), conn.transaction():
                    sql.ack(conn, work.lease)
                bad = outcome in {"dead", "bad", "reject"}
                passed = sql.value(conn, "select passed from bartleby.breaker")
                # with a limit of 1 its start was recorded: what is lost then is not started again
                expected = [1, 2, 1] if bad else [2, 0, int(outcome == "lapse")]
                assert [until_probe(conn), passed, sql.stats(conn)["dead"]] == expected, outcome
                assert sql.claim(conn, 100).messages == [], outcome
                for _ in range(0 if bad else 2):
                    sql.ack(conn, probe(conn, clock).lease)
                    assert state(conn) == "open", outcome
                sql.ack(conn, (probe(conn, clock) if bad else sql.claim(conn)).lease)
                assert state(conn) == "closed", outcome

    def test_suspect_that_crashes_as_a_probe_is_charged(self, conn: Connection, clock: Clock) -> None:
        sql.send_count(conn, 2)
        work = sql.claim(conn, 2)
        sql.ack(conn, work.lease, work.positions[:1])
        clock.advance(61)
        sql.reap(conn)
        open_breaker(conn)
        assert probe(conn, clock).one["solo"]
        clock.advance(61)
        assert [found["outcome"] for found in sql.reap(conn)] == ["retry"]
        charged = {"attempts": 1, "crashes": 1, "solo": True}
        assert sql.row(conn, "select attempts, crashes, solo from bartleby.messages") == charged
        assert sql.value(conn, "select rule from bartleby.attempts where outcome = 'crashed'") == "crash 1 of 3"
        assert until_probe(conn) == 2

    def test_empty_queue_keeps_the_probe_due_without_writing(self, conn: Connection, clock: Clock) -> None:
        open_breaker(conn)
        clock.advance(100)
        sql.claim(conn)
        idle(conn)  # writes that a worker sleeps, for longer than it sleeps
        for _ in range(5):
            with conn.transaction():
                assert sql.claim(conn).messages == []
                assert idle(conn) == 60
                assert sql.value(conn, "select pg_current_xact_id_if_assigned() is null")
        sql.send_count(conn, 5)
        assert idle(conn) == pytest.approx(0.01)
        assert len(sql.claim(conn, 5).messages) == 1
        assert idle(conn) == 1, "while a probe is out"


class TestWaking:
    def test_closing_wakes_waiting_workers(self, conn: Connection, clock: Clock, sleeper: Connection) -> None:
        sql.send_count(conn, 20)
        for how in ("operator", "policy", "third probe"):
            sql.create(conn, "q", breaker="auto")
            clock.advance(1)
            assert open_breaker(conn, over="0")
            for _ in range(3 if how == "third probe" else 0):
                idle(sleeper)
                sql.ack(conn, (sql.claim(conn) if idle(conn) < 1 else probe(conn, clock)).lease)
            with conn.transaction():
                if how == "operator":
                    close_breaker(conn)
                elif how == "policy":
                    sql.create(conn, "q", breaker="off")
                idle(sleeper)  # goes to sleep while it is being closed
            assert state(conn) == ("off" if how == "policy" else "closed")
            assert notified(sleeper) == [""], how

    @pytest.mark.usefixtures("clock")
    def test_senders_wake_no_worker_in_vain(self, conn: Connection, sleeper: Connection) -> None:
        for stop, resume in (
            ("open_breaker('q', 'storm', '0')", "close_breaker('q', 'me', 'x')"),
            ("force_breaker('q', 'me', 'x')", "close_breaker('q', 'me', 'x')"),
            ("pause_queue('q')", "resume_queue('q')"),
        ):
            conn.execute(f"select bartleby.{stop}".encode())
            assert 0 < idle(sleeper) <= 1, stop
            sql.send_count(conn, 3)
            sql.send(conn, 4)
            conn.execute("select pg_notify(bartleby.channel('q'), 'after the messages')")
            assert notified(sleeper) == ["after the messages"], stop
            conn.execute(f"select bartleby.{resume}".encode())
            assert notified(sleeper) == [""], resume


def test_message_that_fails_while_it_is_open_goes_back_uncharged(conn: Connection, clock: Clock) -> None:
    """Messages that were out when it opened, of which one has failed before."""
    sql.create(conn, "q", max_attempts=2, backoff="fixed", base=10, give_up_after=1000)
    sql.send_count(conn, 2)
    work = sql.claim(conn, 2)
    sql.fail(conn, work.lease, {"position": work.positions[0]})
    before = sql.row(conn, "select attempts, first_failed_at from bartleby.deferred")
    clock.advance(60)
    again = sql.claim(conn)
    clock.stop()
    for verdict, opens in (
        (None, open_breaker),
        ("retry", open_breaker),
        ("release", open_breaker),
        (None, force_breaker),
    ):
        with conn.transaction(force_rollback=True):
            opens(conn)
            for lease, position in ((again.lease, again.positions[0]), (work.lease, work.positions[1])):
                failure = {"position": position, "verdict": verdict, "rule": "KeyError is transient"}
                (answer,) = sql.fail(conn, lease, failure)
                assert (answer["verdict"], answer["retry_at"] is None) == ("retry", False)
            new = {"attempts": None, "first_failed_at": sql.value(conn, "select bartleby.clock()")}
            living = "select attempts, first_failed_at from bartleby.deferred order by id"
            assert sql.rows(conn, living) == [before, new]
            query = "select attempt, outcome, verdict, rule from bartleby.attempts order by failed_at, message_id"
            rule = "KeyError is transient; attempt {} of 2; not charged: the breaker is open"
            assert sql.rows(conn, query)[1:] == [
                {"attempt": number, "outcome": "failed", "verdict": "retry", "rule": rule.format(number)}
                for number in (2, 1)
            ]
            assert sql.stats(conn)["dead"] == 0


class TestOperators:
    def test_operator_closes_and_forces_it_whatever_its_state(self, conn: Connection, clock: Clock) -> None:
        assert (close_breaker(conn), events(conn)) == (False, [])
        stormy(conn)
        since = sql.stats(conn)["breaker_since"]
        clock.advance(5)
        assert [close_breaker(conn), close_breaker(conn)] == [True, False]
        data = sql.value(conn, "select data from bartleby.events where type like '%%closed'")
        opened_at = sql.value(conn, "select %s::timestamptz", data.pop("opened_at"))
        assert (opened_at, data) == (since, {"cause": "ConnectionError", "actor": "me", "reason": "fixed"})
        assert [force_breaker(conn), force_breaker(conn)] == [True, False]
        found = sql.stats(conn)
        assert (found["breaker_cause"], found["next_probe_at"], idle(conn)) == ("forced by me: migration", None, 1)
        for _ in range(5):
            clock.advance(1000)
            assert sql.claim(conn).messages == []
        assert not open_breaker(conn)
        assert close_breaker(conn)
        clock.advance(1)
        assert open_breaker(conn, over="0")
        assert force_breaker(conn)
        clock.advance(100)
        assert (state(conn), sql.claim(conn).messages, close_breaker(conn)) == ("forced", [], True)
        assert events(conn) == ["opened", "closed"] * 3, "forcing an open one is no second opening"
        sql.create(conn, "q", breaker="off")
        force_breaker(conn)
        sql.create(conn, "q", breaker="off")
        assert state(conn) == "forced"
        close_breaker(conn)
        assert state(conn) == "off"
        assert len(sql.claim(conn, 100).messages) == 20

    def test_probe_that_is_out_when_an_operator_decides_is_a_plain_lease(self, conn: Connection, clock: Clock) -> None:
        stormy(conn)
        work = probe(conn, clock)
        outcomes = ("ack", "fail", "release", "lapse")
        for decision, outcome in product(("close", "force", "close and open"), outcomes):
            with conn.transaction(force_rollback=True):
                (force_breaker if decision == "force" else close_breaker)(conn)
                if decision == "close and open":
                    clock.advance(0.001)
                    assert open_breaker(conn, over="0")
                before = sql.row(conn, "select * from bartleby.breaker")
                settle(conn, clock, work, outcome)
                assert sql.row(conn, "select * from bartleby.breaker") == before, (decision, outcome)
                if decision == "close and open":
                    for number in range(3):
                        sql.ack(conn, (probe(conn, clock) if number == 0 else sql.claim(conn)).lease)
                    assert state(conn) == "closed", outcome
