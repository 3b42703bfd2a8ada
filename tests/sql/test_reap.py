"""Reaping: a lost worker charges only a message that ran alone and had started; settled leases are deleted."""

from functools import partial
from typing import Any

import pytest

from tests.kit import sql
from tests.kit.clock import Clock
from tests.kit.sql import Claim, Connect, Connection

pytestmark = pytest.mark.usefixtures("q")


def lapse(conn: Connection, clock: Clock) -> list[str]:
    """Let every lease lapse; return what the reaper did with each, once its messages are back."""
    clock.advance(61)
    outcomes = [found["outcome"] for found in sql.reap(conn)]
    clock.advance(400)
    return outcomes


@pytest.fixture
def suspect(conn: Connection, clock: Clock, q: None) -> int:
    """A message whose first worker died, so that it runs alone from now on."""
    sent, other = sql.send(conn, "poison"), sql.send(conn, "innocent")
    work = sql.claim(conn, 2)
    sql.ack(conn, work.lease, [found["position"] for found in work.messages if found["message_id"] == other])
    assert lapse(conn, clock) == ["released"]
    return sent


@pytest.mark.seed("brighter-55")
def test_messages_of_a_lapsed_batch_come_back_alone_and_uncharged(
    conn: Connection, clock: Clock, connect: Connect
) -> None:
    ids = sql.send_count(conn, 3)
    work = sql.claim(conn, 3, worker="host")
    clock.advance(61)
    found = {"queue": "q", "lease_id": work.lease, "worker": "host", "messages": 3, "outcome": "released"}
    reaper = connect(autocommit=False)
    assert (sql.reap(reaper), sql.reap(conn)) == ([found], []), "a second reaper has nothing to do"
    reaper.commit()
    clock.advance(1)
    back = [sql.claim(conn, 10).one for _ in range(3)]
    assert [message["message_id"] for message in back] == ids
    assert {(message["attempt"], message["solo"]) for message in back} == {(1, True)}
    ledger = sql.rows(conn, "select message_id, attempt, outcome, verdict, worker, lease_id from bartleby.attempts")
    lost = {"attempt": 1, "outcome": "lost", "verdict": "retry", "worker": "host", "lease_id": work.lease}
    assert ledger == [{"message_id": message_id, **lost} for message_id in ids]


@pytest.mark.seed("outbox-60", "pulse-7", "pulse-9", "pulse-11", "pulse-28", "pulse-30", "pulse-31", "pulse-40")
def test_message_dies_after_its_crash_budget_or_its_attempts(conn: Connection, clock: Clock, suspect: int) -> None:
    for crash_budget, max_attempts in ((1, 100), (3, 100), (10, 2)):
        lives = min(crash_budget, max_attempts)
        rules = [f"crash {n} of {crash_budget}" for n in range(1, lives + 1)]
        if max_attempts < crash_budget:
            rules[-1] = f"attempt {lives} of {max_attempts}"
        with conn.transaction(force_rollback=True):
            sql.create(conn, "q", crash_budget=crash_budget, max_attempts=max_attempts, backoff="quadratic")
            outcomes = []
            for _ in rules:
                sql.claim(conn, worker="host")
                outcomes += lapse(conn, clock)
            assert (outcomes, sql.claim(conn).messages) == (["retry"] * (lives - 1) + ["dead"], [])
            wait = "extract(epoch from retry_at - failed_at)::int as wait"
            query = (
                f"select rule, outcome, error_type, worker, attempt, {wait} from bartleby.attempts order by failed_at"
            )
            charged = {"outcome": "crashed", "error_type": "WorkerLost", "worker": "host"}
            assert sql.rows(conn, query)[1:] == [
                {"rule": rule, **charged, "attempt": n, "wait": n**2 if n < lives else None}
                for n, rule in enumerate(rules, 1)
            ]
            letter = {"message_id": suspect, "reason": "crashed", "crashes": lives, "attempts": lives}
            assert sql.row(conn, "select message_id, reason, crashes, attempts from bartleby.dead_letters") == letter


@pytest.mark.usefixtures("suspect")
def test_suspect_that_ran_to_its_end_runs_with_others_again(conn: Connection, clock: Clock) -> None:
    for ran in (False, True):
        work = sql.claim(conn)
        assert work.one["solo"]
        assert sql.value(conn, "select bartleby.release(%s, null, '0', %s)", work.lease, ran) == 1
        clock.advance(1)
    again = sql.claim(conn)
    assert not again.one["solo"]
    assert sql.ack(conn, again.lease) == 1
    assert sql.column(conn, "select outcome from bartleby.attempts") == ["lost"]


def test_every_queue_is_reaped_paused_or_not_and_keeps_its_newest_lease(conn: Connection, clock: Clock) -> None:
    sql.create(conn, "other")
    for name in ("q", "other"):
        sql.send_count(conn, 20, name)
        for _ in range(10):
            sql.ack(conn, sql.claim(conn, 1, name).lease)
    held = sql.claim(conn)
    sql.ack(conn, sql.claim(conn).lease)
    newest = sql.column(conn, "select (bartleby.reader(id)).id from bartleby.queue order by id")
    for _ in range(2):
        sql.reap(conn)
        assert sql.column(conn, "select id from bartleby.lease order by id") == sorted([*newest, held.lease])
    assert sql.claim(conn).payloads == [13]
    assert sql.claim(conn, queue="other").payloads == [11]
    conn.execute("select bartleby.pause_queue('other')")
    clock.advance(61)
    assert [found["queue"] for found in sql.reap(conn)] == ["q", "q", "other"]


def test_reaping_needs_no_advisory_lock(connect: Connect, conn: Connection, clock: Clock) -> None:
    """Every role can take any advisory lock, so upkeep must not depend on one that can be guessed."""
    sql.send(conn, 1)
    sql.claim(conn)
    clock.advance(61)
    connect().execute(
        "select pg_advisory_lock(hashtextextended('bartleby.' || duty, 0)) from"
        " unnest('{reap,turn,reaping,turning}'::text[]) duty"
    )
    assert len(sql.reap(conn)) == 1
    assert "writing to" in sql.value(conn, "select bartleby.turn(0)")


def confirmed_claim(conn: Connection, limit: int = 1) -> Claim:
    """Claim with p_confirm: a suspect is charged for the death of its worker only after start()."""
    return Claim(sql.rows(conn, "select * from bartleby.claim('q', 'w', %s, p_confirm => true)", limit))


def start(conn: Connection, lease: int | None) -> None:
    conn.execute("select bartleby.start(%s)", [lease])


def test_suspect_is_charged_only_if_it_had_started(conn: Connection, clock: Clock, suspect: int) -> None:
    for _ in range(10):
        work = confirmed_claim(conn)
        assert (work.one["solo"], work.one["attempt"]) == (True, 1)
        assert lapse(conn, clock) == ["released"]
    uncharged = {"message_id": suspect, "attempts": 0, "crashes": 0, "solo": True}
    assert sql.row(conn, "select message_id, attempts, crashes, solo from bartleby.messages") == uncharged
    assert sql.rows(conn, "select distinct outcome, verdict, rule from bartleby.attempts where rule like 'it %%'") == [
        {"outcome": "lost", "verdict": "retry", "rule": "it never began to run"}
    ]
    verdicts = []
    for _ in range(3):
        start(conn, confirmed_claim(conn).lease)
        verdicts += lapse(conn, clock)
    assert verdicts == ["retry", "retry", "dead"]


def test_only_a_lease_of_a_suspect_awaits_its_start(conn: Connection, clock: Clock) -> None:
    sql.send_count(conn, 3)
    batch = confirmed_claim(conn, 3)
    begun = "select id from bartleby.lease where not isempty(started)"
    assert sql.column(conn, begun) == []
    assert [message["start_first"] for message in batch.messages] == [False] * 3
    assert lapse(conn, clock) == ["released"]
    assert sql.value(conn, "select bartleby.open_breaker('q', 'storm', '0')")
    clock.advance(2)
    work = confirmed_claim(conn)
    assert sql.column(conn, begun) == []
    for _ in range(2):
        start(conn, work.lease)
        assert sql.column(conn, begun + " and probe") == [work.lease]
    sql.ack(conn, work.lease)
    assert sql.value(conn, "select passed from bartleby.breaker") == 1, "and it is a probe of the breaker"


@pytest.mark.usefixtures("suspect")
def test_lapsed_lease_can_start_only_after_it_is_extended(conn: Connection, clock: Clock) -> None:
    """Its worker may have given it up: the message would be charged for a run that did not happen."""
    work = confirmed_claim(conn)
    for started in (False, True):
        clock.advance(61)
        with sql.refused("ZB006"):
            start(conn, work.lease)
        with conn.transaction(force_rollback=True):
            assert [found["outcome"] for found in sql.reap(conn)] == ["retry" if started else "released"]
            assert sql.value(conn, "select attempts from bartleby.messages") == int(started)
        conn.execute("select bartleby.extend(%s, '1 minute')", [[work.lease]])
        start(conn, work.lease)
    assert lapse(conn, clock) == ["retry"]


@pytest.mark.seed("pulse-23")
@pytest.mark.usefixtures("suspect")
def test_second_settlement_waits_while_its_lease_is_settled_or_reaped(
    conn: Connection, clock: Clock, connect: Connect
) -> None:
    other, worker = connect(autocommit=False), connect()
    for how in ("released", "failed", "reaped"):
        work = confirmed_claim(conn)
        if how == "released":
            assert sql.release(other, work.lease) == 1
        elif how == "failed":
            sql.fail_all(other, work, delay=0)
        else:
            clock.advance(61)
            assert len(sql.reap(other)) == 1
            with sql.refused("ZB006"):
                start(worker, work.lease)
        late: dict[str, partial[Any]] = {
            "released": partial(start, lease=work.lease),
            "failed": partial(sql.fail_all, claimed=work, delay=0),
            "reaped": partial(sql.ack, lease=work.lease),
        }
        with sql.waiting(conn, worker, late[how], for_whom=other) as settling:
            other.commit()
            with sql.refused("ZB006"):
                settling.result()
        clock.advance(1)


def test_reaper_skips_a_lease_that_is_being_settled_or_started(
    conn: Connection, clock: Clock, connect: Connect, suspect: int
) -> None:
    clock.stop()
    alone = confirmed_claim(conn)
    sql.send_count(conn, 2)
    batch = sql.claim(conn, 2)
    worker = connect(autocommit=False)
    clock.advance(59)
    start(worker, alone.lease)
    sql.ack(worker, batch.lease, batch.positions[:1])
    clock.advance(2)
    conn.execute("set lock_timeout = '30s'")
    assert sql.reap(conn) == []
    worker.commit()
    assert [(found["messages"], found["outcome"]) for found in sql.reap(conn)] == [(1, "retry"), (1, "released")]
