"""Start: a message that has to run alone is to blame for its worker's death only if it had begun."""

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
    fail_all,
    reap,
    refused,
    release,
    row,
    rows,
    send,
    send_count,
    value,
    waiting,
)


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, "q", backoff="none")
    return conn


def promise(conn: Connection, limit: int = 1) -> Claim:
    """Claim, and promise to say when a message that has to run alone begins."""
    return Claim(rows(conn, "select * from bartleby.claim('q', 'w', %s, p_confirm => true)", limit))


def start(conn: Connection, lease: int | None) -> None:
    conn.execute("select bartleby.start(%s)", [lease])


def lapse(conn: Connection, clock: Clock) -> list[str]:
    clock.advance(61)
    outcomes = [found["outcome"] for found in reap(conn)]
    clock.advance(1)
    return outcomes


@pytest.fixture
def sent(conn: Connection, clock: Clock) -> int:
    """A message that is under suspicion."""
    sent = send(conn, "poison")
    claim(conn)
    assert lapse(conn, clock) == ["released"]
    return sent


def test_one_that_never_began_is_not_charged(conn: Connection, clock: Clock, sent: int) -> None:
    for _ in range(10):
        work = promise(conn)
        assert (work.one["solo"], work.one["attempt"]) == (True, 1)
        assert lapse(conn, clock) == ["released"]
    assert row(conn, "select message_id, attempts, crashes, solo from bartleby.messages") == {
        "message_id": sent,
        "attempts": 0,
        "crashes": 0,
        "solo": True,
    }
    assert rows(conn, "select distinct outcome, verdict, rule from bartleby.attempts where rule like 'it %%'") == [
        {"outcome": "lost", "verdict": "retry", "rule": "it never began to run"}
    ]


def test_one_that_had_begun_is_charged(conn: Connection, clock: Clock, sent: int) -> None:
    verdicts = []
    for _ in range(3):
        start(conn, promise(conn).lease)
        verdicts += lapse(conn, clock)
    assert verdicts == ["retry", "retry", "dead"]
    assert row(conn, "select message_id, reason, crashes from bartleby.dead_letters") == {
        "message_id": sent,
        "reason": "crashed",
        "crashes": 3,
    }


def test_whoever_promised_nothing_has_begun(conn: Connection, clock: Clock, sent: int) -> None:
    claim(conn)
    assert lapse(conn, clock) == ["retry"]


def test_only_what_has_to_run_alone_is_waited_for(conn: Connection, clock: Clock) -> None:
    send_count(conn, 3)
    promise(conn, 3)
    assert column(conn, "select id from bartleby.lease where unconfirmed") == []
    assert lapse(conn, clock) == ["released"]
    assert column(conn, "select distinct rule from bartleby.attempts") == ["nobody is charged before it ran alone"]
    work = promise(conn)
    assert column(conn, "select id from bartleby.lease where unconfirmed") == [work.lease]


@pytest.mark.parametrize("how", ["ack", "fail", "release"])
def test_it_may_be_settled_without_having_begun(conn: Connection, sent: int, how: str) -> None:
    work = promise(conn)
    if how == "ack":
        assert ack(conn, work.lease) == 1
    elif how == "fail":
        assert fail_all(conn, work)[0]["message_id"] == sent
    else:
        assert release(conn, work.lease) == 1
    with refused("ZB006"):
        start(conn, work.lease)


def test_starting_twice_or_what_needs_no_start_is_no_error(conn: Connection, clock: Clock, sent: int) -> None:
    work = promise(conn)
    start(conn, work.lease)
    start(conn, work.lease)
    ack(conn, work.lease)
    send_count(conn, 2)
    batch = promise(conn, 2)
    start(conn, batch.lease)
    assert ack(conn, batch.lease) == 2


def test_a_lease_that_is_not_held_cannot_begin(conn: Connection, clock: Clock, sent: int) -> None:
    work = promise(conn)
    lapse(conn, clock)
    for lease in (work.lease, 99, None):
        with refused("ZB006"):
            start(conn, lease)


@pytest.mark.parametrize("begun", [False, True])
def test_a_lease_that_has_lapsed_cannot_begin_though_nobody_took_it_back(
    conn: Connection, clock: Clock, sent: int, begun: bool
) -> None:
    """Its worker has given it up, or is about to: the message would be charged for a run that never was."""
    work = promise(conn)
    if begun:
        start(conn, work.lease)
    clock.advance(61)
    with refused("ZB006"):
        start(conn, work.lease)
    assert [found["outcome"] for found in reap(conn)] == ["retry" if begun else "released"]
    assert value(conn, "select attempts from bartleby.messages where message_id = %s", sent) == int(begun)


def test_a_lease_that_has_lapsed_and_was_renewed_can_begin(conn: Connection, clock: Clock, sent: int) -> None:
    work = promise(conn)
    clock.advance(61)
    conn.execute("select bartleby.extend(%s, '1 minute')", [[work.lease]])
    start(conn, work.lease)
    assert lapse(conn, clock) == ["retry"]


def test_a_start_that_comes_while_its_lease_is_reaped_is_refused(
    conn: Connection, clock: Clock, connect: Connect, sent: int
) -> None:
    """Else a message would run that somebody else has already."""
    work = promise(conn)
    clock.advance(61)
    reaper, worker = connect(autocommit=False), connect()
    assert len(reap(reaper)) == 1
    with refused("ZB006"):
        start(worker, work.lease)
    reaper.commit()
    with refused("ZB006"):
        start(worker, work.lease)


def test_a_start_that_comes_while_its_lease_is_given_back_waits_and_is_refused(
    conn: Connection, connect: Connect, sent: int
) -> None:
    work = promise(conn)
    settler, worker = connect(autocommit=False), connect()
    assert release(settler, work.lease) == 1
    with waiting(conn, worker, lambda session: start(session, work.lease), for_whom=settler) as starting:
        settler.commit()
        with refused("ZB006"):
            starting.result()


def test_a_start_under_way_is_not_waited_for_and_its_lease_not_taken_back(
    conn: Connection, clock: Clock, connect: Connect, sent: int
) -> None:
    work = promise(conn)
    worker = connect(autocommit=False)
    start(worker, work.lease)
    clock.advance(61)
    conn.execute("set statement_timeout = '20s'")
    assert reap(conn) == []
    worker.commit()
    assert [found["outcome"] for found in reap(conn)] == ["retry"]


def test_a_probe_that_has_to_run_alone_is_both(conn: Connection, clock: Clock, sent: int) -> None:
    assert value(conn, "select bartleby.open_breaker('q', 'storm', '0')")
    clock.advance(2)
    work = promise(conn)
    assert rows(conn, "select id from bartleby.lease where unconfirmed and probe") == [{"id": work.lease}]
    start(conn, work.lease)
    ack(conn, work.lease)
    assert value(conn, "select passed from bartleby.breaker") == 1
