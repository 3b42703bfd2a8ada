"""Callers whose snapshot is older than a change: each is refused, so that a retry sees the change."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.kit import sql
from tests.kit.clock import Clock
from tests.kit.plans import adds_up, change, die, kill, plan, start, tally
from tests.kit.sql import Connect, Connection

pytestmark = pytest.mark.usefixtures("q")


def call(statement: str) -> Callable[[Connection], object]:
    return lambda conn: conn.execute(f"select bartleby.{statement}".encode())


OPEN = call("open_breaker('q', 'storm', '0')")
ANSWER = call("take_answer('ana', 'k', 'POST'), bartleby.keep_answer('ana', 'k', 200, 'done')")
MARK = call("mark_handled('q', 'c', 'id:1')")
Work = Callable[[Connection], object]


def prepared(conn: Connection, clock: Clock) -> Iterator[tuple[str, Work, Work]]:
    """What is called, the change that it does not see, and the call."""
    yield "tally", tally, tally
    yield "duty", call("take_duty('upkeep', 'a', '10 s')"), call("take_duty('upkeep', 'b', '10 s')")
    yield "handled mark", MARK, MARK
    yield "audited action", call("pause_queue('q')"), call("force_breaker('q', 'bob', 'x')")
    yield "repeated request", ANSWER, call("take_answer('ana', 'k', 'POST')")
    conn.execute("select bartleby.resume_queue('q')")
    number = plan(conn, die(conn))
    yield "start of a plan", partial(start, replay=number), partial(start, replay=number)
    (sent,) = die(conn)
    change(conn, "replay", sent)
    claimed = sql.claim(conn)
    yield "burial", lambda conn: change(conn, "hold", sent), partial(kill, claimed=claimed)
    sql.send_count(conn, 3)
    OPEN(conn)
    clock.advance(2)
    for _ in range(2):
        sql.ack(conn, sql.claim(conn).lease)
    third = sql.claim(conn).lease
    yield "third probe", call("close_breaker('q', 'me', 'fixed')"), partial(sql.ack, lease=third)


def begin_with_snapshot(conn: Connection) -> None:
    conn.execute("set transaction isolation level repeatable read")
    conn.execute("select 1 from bartleby.queue")


def test_call_that_does_not_see_a_change_must_be_repeated(conn: Connection, connect: Connect, clock: Clock) -> None:
    late = connect(autocommit=False)
    die(conn)
    for name, changing, calling in prepared(conn, clock):
        begin_with_snapshot(late)
        changing(conn)
        with sql.refused("40001", row=name):
            calling(late)
        late.rollback()
    adds_up(conn)
    assert sql.rows(conn, "select * from bartleby.verify_audit()") == []


def test_maintenance_and_claims_need_read_committed(conn: Connection) -> None:
    sql.send(conn, 1)
    before = sql.snapshot_of_everything(conn)
    for level in ("repeatable read", "serializable"):
        for statement in ("claim('q', 'w')", "reap()", "turn()", "advance_replays()"):
            with sql.refused("ZB007", level.upper(), row=statement), conn.transaction():
                conn.execute(f"set transaction isolation level {level}")
                conn.execute(f"select bartleby.{statement}".encode())
    assert sql.snapshot_of_everything(conn) == before


def test_third_probe_that_does_not_see_a_new_policy_leaves_the_closing_to_the_next(
    conn: Connection, connect: Connect, clock: Clock
) -> None:
    sql.send_count(conn, 4)
    OPEN(conn)
    clock.advance(2)
    for _ in range(2):
        sql.ack(conn, sql.claim(conn).lease)
    third, worker = sql.claim(conn).lease, connect(autocommit=False)
    begin_with_snapshot(worker)
    sql.create(conn, "q", max_attempts=7)
    sql.ack(worker, third)
    worker.commit()
    assert sql.row(conn, "select passed from bartleby.breaker") == {"passed": 3}
    assert sql.stats(conn)["breaker"] == "open"
    sql.ack(conn, sql.claim(conn).lease)
    assert sql.stats(conn)["breaker"] == "closed"
