"""Reaping: a worker that died charges nobody by mistake, and what is settled is forgotten at a constant cost."""

import pytest

from tests.kit.clock import Clock
from tests.kit.sql import (
    Connect,
    Connection,
    ack,
    claim,
    column,
    create,
    drain,
    fail_all,
    pages_read,
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


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn)
    return conn


def lose(conn: Connection, clock: Clock, count: int = 1) -> None:
    """Claim, and never come back."""
    claim(conn, count)
    clock.advance(61)


def suspect(conn: Connection, clock: Clock) -> None:
    """Send one message and let its first worker die, so that it runs alone from now on."""
    send(conn, "poison")
    lose(conn, clock)
    assert [found["outcome"] for found in reap(conn)] == ["released"]
    clock.advance(1)


def test_a_lapsed_batch_comes_back_alone_each_and_uncharged(conn: Connection, clock: Clock) -> None:
    ids = send_count(conn, 3)
    lease = claim(conn, 3, worker="host").lease
    clock.advance(61)
    assert reap(conn) == [{"queue": "q", "lease_id": lease, "worker": "host", "messages": 3, "outcome": "released"}]
    clock.advance(1)
    back = [claim(conn, 10).one for _ in range(3)]
    assert [message["message_id"] for message in back] == ids
    assert {(message["attempt"], message["solo"]) for message in back} == {(1, True)}
    ledger = rows(conn, "select message_id, attempt, outcome, verdict, worker, lease_id from bartleby.attempts")
    lost = {"attempt": 1, "outcome": "lost", "verdict": "retry", "worker": "host", "lease_id": lease}
    assert ledger == [{"message_id": message_id, **lost} for message_id in ids]


def test_only_what_was_not_settled_comes_back(conn: Connection, clock: Clock) -> None:
    send_count(conn, 5)
    claimed = claim(conn, 5)
    ack(conn, claimed.lease, claimed.positions[1:4])
    clock.advance(61)
    assert [found["messages"] for found in reap(conn)] == [2]
    clock.advance(1)
    assert sorted(drain(conn)) == [1, 5]


def test_one_that_ran_alone_is_charged(conn: Connection, clock: Clock) -> None:
    suspect(conn, clock)
    claimed = claim(conn, worker="host")
    clock.advance(61)
    assert [found["outcome"] for found in reap(conn)] == ["retry"]
    found = row(conn, "select * from bartleby.attempts where outcome <> 'lost'")
    assert (found["outcome"], found["verdict"], found["attempt"], found["worker"]) == ("crashed", "retry", 1, "host")
    assert (found["lease_id"], found["error_type"]) == (claimed.lease, "WorkerLost")
    clock.advance(400)
    again = claim(conn).one
    assert (again["attempt"], again["solo"]) == (2, True)


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_it_dies_after_the_crash_budget(conn: Connection, clock: Clock, budget: int) -> None:
    create(conn, "q", crash_budget=budget, max_attempts=100)
    suspect(conn, clock)
    outcomes = []
    for _ in range(budget):
        lose(conn, clock)
        outcomes += [found["outcome"] for found in reap(conn)]
        clock.advance(400)
    assert outcomes == ["retry"] * (budget - 1) + ["dead"]
    assert claim(conn).messages == []
    assert row(conn, "select reason, crashes, attempts from bartleby.dead_letters") == {
        "reason": "crashed",
        "crashes": budget,
        "attempts": budget,
    }


def test_crashes_never_exceed_the_attempts_of_the_message(conn: Connection, clock: Clock) -> None:
    create(conn, "q", crash_budget=10, max_attempts=2)
    suspect(conn, clock)
    for _ in range(2):
        lose(conn, clock)
        reap(conn)
        clock.advance(400)
    assert row(conn, "select reason, attempts from bartleby.dead_letters") == {"reason": "crashed", "attempts": 2}


def test_a_neighbour_is_untouched(conn: Connection, clock: Clock) -> None:
    """A process-killing message costs its workers, and no innocent message an attempt."""
    create(conn, "q", crash_budget=2)
    send_count(conn, 5)
    deaths = 0
    done = []
    for _ in range(40):
        claimed = claim(conn, 10)
        if 3 in claimed.payloads:
            deaths += 1
            clock.advance(61)
        elif claimed.messages:
            assert {message["attempt"] for message in claimed.messages} == {1}
            done += claimed.payloads
            ack(conn, claimed.lease)
        reap(conn)
        clock.advance(10)
    assert sorted(done) == [1, 2, 4, 5]
    assert deaths == 1 + 2
    assert column(conn, "select payload from bartleby.dead_letters") == [3]
    assert set(column(conn, "select message_id from bartleby.attempts where outcome <> 'lost'")) == set(
        column(conn, "select message_id from bartleby.dead_letters")
    )


@pytest.mark.parametrize("ran", [False, True])
def test_one_that_ran_alone_to_its_end_need_not_do_so_again(conn: Connection, clock: Clock, ran: bool) -> None:
    suspect(conn, clock)
    claimed = claim(conn)
    assert claimed.one["solo"]
    assert value(conn, "select bartleby.release(%s, null, '0', %s)", claimed.lease, ran) == 1
    clock.advance(1)
    assert claim(conn).one["solo"] is not ran


def test_one_that_survives_alone_is_no_longer_charged_for_it(conn: Connection, clock: Clock) -> None:
    suspect(conn, clock)
    claimed = claim(conn)
    assert claimed.one["solo"]
    assert ack(conn, claimed.lease) == 1
    assert column(conn, "select outcome from bartleby.attempts") == ["lost"]


def test_what_has_not_lapsed_is_untouched(conn: Connection, clock: Clock) -> None:
    send_count(conn, 3)
    claimed = claim(conn, 3)
    clock.stop()
    clock.advance(59)
    assert reap(conn) == []
    assert ack(conn, claimed.lease) == 3


def test_each_lease_lapses_at_its_own_time(conn: Connection, clock: Clock) -> None:
    send_count(conn, 3)
    claim(conn, lease="10 seconds")
    claim(conn, lease="1 hour")
    claim(conn, lease="100 seconds")
    reaped = []
    for _ in range(5):
        clock.advance(30)
        reaped.append(len(reap(conn)))
    assert reaped == [1, 0, 0, 1, 0]


def test_a_lease_granted_before_the_server_started_charges_nobody(conn: Connection, clock: Clock) -> None:
    suspect(conn, clock)
    send(conn, "batch")
    lose(conn, clock)
    claim(conn)
    clock.advance(61)
    conn.execute("update bartleby.lease set granted_at = '2000-01-01'")
    assert [found["outcome"] for found in reap(conn)] == ["released", "released"]
    assert set(column(conn, "select outcome from bartleby.attempts")) == {"lost"}
    assert column(conn, "select rule from bartleby.attempts")[-2:] == ["the server was restarted"] * 2
    assert rows(conn, "select payload, solo, attempts from bartleby.messages order by payload") == [
        {"payload": "batch", "solo": False, "attempts": 0},
        {"payload": "poison", "solo": True, "attempts": 0},
    ]


def test_a_paused_queue_is_reaped_too(conn: Connection, clock: Clock) -> None:
    send(conn, 1)
    lose(conn, clock)
    conn.execute("select bartleby.pause_queue('q')")
    assert len(reap(conn)) == 1


def test_every_queue_is_reaped(conn: Connection, clock: Clock) -> None:
    for name in ("a", "b"):
        create(conn, name)
        send(conn, 1, name)
        claim(conn, queue=name)
    clock.advance(61)
    assert [found["queue"] for found in reap(conn)] == ["a", "b"]


def test_of_two_reapers_the_second_has_nothing_to_do(connect: Connect, conn: Connection, clock: Clock) -> None:
    send_count(conn, 3)
    lose(conn, clock, 3)
    first = connect(autocommit=False)
    assert len(reap(first)) == 1
    assert reap(conn) == []
    first.commit()
    assert reap(conn) == []
    clock.advance(1)
    assert sorted(drain(conn)) == [1, 2, 3]


def test_a_stranger_cannot_stop_it(connect: Connect, conn: Connection, clock: Clock) -> None:
    """Anybody may take any advisory lock, so it must not depend on one that can be guessed."""
    send(conn, 1)
    lose(conn, clock)
    connect().execute(
        "select pg_advisory_lock(hashtextextended('bartleby.' || duty, 0)) from"
        " unnest('{reap,turn,reaping,turning}'::text[]) duty"
    )
    assert len(reap(conn)) == 1
    assert "writing to" in value(conn, "select bartleby.turn(0)")


def test_an_ack_that_comes_while_its_lease_is_reaped_waits_and_is_refused(
    connect: Connect, conn: Connection, clock: Clock
) -> None:
    send_count(conn, 2)
    claimed = claim(conn, 2)
    clock.advance(61)
    reaper, worker = connect(autocommit=False), connect()
    assert len(reap(reaper)) == 1
    with waiting(conn, worker, lambda conn: ack(conn, claimed.lease), for_whom=reaper) as late:
        reaper.commit()
        with refused("ZB006"):
            late.result()
    assert stats(conn)["deferred"] == 2


def test_an_ack_succeeds_if_the_reaper_rolls_back(connect: Connect, conn: Connection, clock: Clock) -> None:
    send_count(conn, 2)
    claimed = claim(conn, 2)
    clock.advance(61)
    reaper, worker = connect(autocommit=False), connect()
    reap(reaper)
    with waiting(conn, worker, lambda conn: ack(conn, claimed.lease), for_whom=reaper) as late:
        reaper.rollback()
        assert late.result() == 2
    assert column(conn, "select * from bartleby.messages") == []


def test_a_settlement_under_way_is_not_waited_for_and_not_taken_back(
    connect: Connect, conn: Connection, clock: Clock
) -> None:
    send_count(conn, 2)
    claimed = claim(conn, 2)
    clock.advance(61)
    worker = connect(autocommit=False)
    ack(worker, claimed.lease, claimed.positions[:1])
    conn.execute("set statement_timeout = '10s'")
    assert reap(conn) == []
    worker.commit()
    assert [found["messages"] for found in reap(conn)] == [1]


def test_settled_leases_are_forgotten_and_the_newest_of_each_queue_stays(conn: Connection, clock: Clock) -> None:
    create(conn, "other")
    for name in ("q", "other"):
        send_count(conn, 20, name)
        for _ in range(10):
            ack(conn, claim(conn, 1, name).lease)
    held = claim(conn)
    ack(conn, claim(conn).lease)
    newest = column(
        conn,
        "select (bartleby.reader(id)).id from bartleby.queue order by id",
    )
    for _ in range(2):
        reap(conn)
        assert column(conn, "select id from bartleby.lease order by id") == sorted([*newest, held.lease])
    assert claim(conn).payloads == [13]
    assert claim(conn, queue="other").payloads == [11]


def test_a_lease_in_the_middle_is_found_long_after(conn: Connection, clock: Clock) -> None:
    send_count(conn, 10)
    claim(conn, lease="1 hour")
    for _ in range(9):
        ack(conn, claim(conn).lease)
        reap(conn)
    clock.advance(3601)
    assert [found["messages"] for found in reap(conn)] == [1]
    clock.advance(1)
    assert drain(conn) == [1]


def test_an_extended_lease_is_found_when_it_lapses_in_the_end(conn: Connection, clock: Clock) -> None:
    send(conn, 1)
    lease = claim(conn).lease
    for _ in range(10):
        clock.advance(50)
        conn.execute("select bartleby.extend(%s, '60 seconds')", [[lease]])
        assert reap(conn) == []
    clock.advance(61)
    assert [found["lease_id"] for found in reap(conn)] == [lease]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_an_old_snapshot_is_refused(conn: Connection, level: str) -> None:
    conn.execute(f"set default_transaction_isolation = '{level}'")
    with refused("ZB007"):
        reap(conn)


def test_it_can_be_rolled_back(conn: Connection, clock: Clock) -> None:
    send_count(conn, 2)
    claimed = claim(conn, 2)
    clock.advance(61)
    with conn.transaction(force_rollback=True):
        assert len(reap(conn)) == 1
    assert ack(conn, claimed.lease) == 2


@pytest.mark.parametrize("statistics", ["", "analyze", "vacuum"])
def test_its_cost_does_not_grow_with_what_cannot_be_removed(
    connect: Connect, conn: Connection, clock: Clock, statistics: str
) -> None:
    """Whatever the planner has heard: where nothing can be removed, a vacuum counts the few rows that are left."""
    create(conn, "quiet")
    send(conn, 1, queue="quiet")
    claim(conn, queue="quiet", lease="1 hour")
    pin = connect(autocommit=False)
    pin.execute("set transaction isolation level repeatable read")
    pin.execute("select 1")
    churn(conn, clock, 200)
    early = pages_of_reaping(connect(), statistics)
    churn(conn, clock, 400)
    late = pages_of_reaping(connect(), statistics)
    # the rows of the tests' own clock cannot be removed either: some 15 pages
    assert late < early + 30
    pin.rollback()


def test_forgetting_a_key_looks_at_no_other(connect: Connect, conn: Connection, clock: Clock) -> None:
    conn.execute(
        "insert into bartleby.unique_key (queue, key, message_id, until)"
        " select q.id, n::text, n, bartleby.clock() + interval '1 day'"
        " from bartleby.queue q, generate_series(1, 30000) n"
    )
    conn.execute("analyze bartleby.unique_key")
    worker = connect()
    before = pages_of_reaping(worker, "")
    send(conn, 0, key="short", unique_for="1 second")
    clock.advance(2)
    assert pages_read(worker, "select * from bartleby.reap()") < before + 30
    reap(worker)
    assert value(conn, "select count(*) from bartleby.unique_key") == 30000


def churn(conn: Connection, clock: Clock, rounds: int) -> None:
    for _ in range(rounds):
        send_count(conn, 3)
        claimed = claim(conn, 3)
        fail_all(conn, claimed, delay=0)
        clock.advance(0.01)
        release(conn, claim(conn, 3).lease, delay="1 hour")
        reap(conn)


def pages_of_reaping(conn: Connection, statistics: str) -> int:
    """Return how many pages a worker's reaping reads, once it has been planned."""
    if statistics:
        conn.execute(f"{statistics} bartleby.lease, bartleby.sweep")
    conn.execute("set plan_cache_mode = force_generic_plan")
    return pages_read(conn, "select * from bartleby.reap()")
