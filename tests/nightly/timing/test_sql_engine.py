"""The cost of claims, reaping and lookups does not grow with what there is or has been: pages, scans and waits."""

import time

import pytest
from psycopg.types.json import Jsonb

from tests.kit.clock import Clock, move_clock
from tests.kit.sql import (
    Connect,
    Connection,
    ack,
    await_true,
    claim,
    column,
    create,
    drain,
    fail_all,
    pages_read,
    reap,
    reject,
    release,
    send,
    send_count,
    stats,
    value,
)  # fmt: skip


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn)
    return conn


@pytest.fixture
def clock(conn: Connection) -> Clock:
    return move_clock(conn)


def test_claims_settlements_and_reaping_never_scan_the_log(conn: Connection) -> None:
    create(conn, "small")
    send_count(conn, 100_000)
    send_count(conn, 200, "small")
    conn.execute("analyze")
    before = scans(conn)
    for queue in ("q", "small"):
        for _ in range(5):
            claimed = claim(conn, 20, queue)
            first, second, third, *others = claimed.positions
            conn.execute("select bartleby.fail(%s, %s)", [claimed.lease, Jsonb([{"position": first}])])
            reject(conn, claimed.lease, second, "unacceptable")
            release(conn, claimed.lease, [third])
            ack(conn, claimed.lease, others)
    reap(conn)
    conn.execute("select bartleby.replay(array(select message_id from bartleby.dead_letters limit 3), 'a', 'b')")
    claim(conn, 20)
    assert stats(conn)["ready"] > 99000
    assert scans(conn) == before


def scans(conn: Connection) -> dict[str, int]:
    """Sequential scans of the log so far. Counters arrive late but in order: a scan of our own marks the end."""
    conn.execute("create table if not exists public.mark ()")
    seen = counted(conn).get("mark", 0)
    conn.execute("select from public.mark")
    await_true(lambda: counted(conn).get("mark", 0) > seen)
    return {table: count for table, count in counted(conn).items() if table.startswith("log_")}


def counted(conn: Connection) -> dict[str, int]:
    if conn.info.server_version >= 150000:
        conn.execute("select pg_stat_force_next_flush()")
    conn.execute("select pg_stat_clear_snapshot()")
    return dict(conn.execute("select relname, seq_scan from pg_stat_user_tables").fetchall())


def test_claim_reads_as_few_pages_from_a_long_queue_as_from_a_short_one(conn: Connection) -> None:
    send_count(conn, 1000)
    short = pages_of_a_claim(conn)
    send_count(conn, 100_000)
    conn.execute("analyze")
    assert pages_of_a_claim(conn) < 2 * short + 50


def test_claim_reads_as_few_pages_with_history_that_cannot_be_removed(connect: Connect, conn: Connection) -> None:
    pin_a_snapshot(connect())
    send_count(conn, 200)
    fresh = pages_of_a_claim(conn)
    for _ in range(150):
        send_count(conn, 20)
        fail_all(conn, claim(conn, 20), delay=0)
    drain(conn)
    reap(conn)
    send_count(conn, 200)
    assert pages_of_a_claim(conn) < 2 * fresh + 50


def pages_of_a_claim(conn: Connection) -> int:
    pages = pages_read(conn, "select * from bartleby.claim('q', 'w', 20)")
    assert len(claim(conn, 20).messages) == 20
    return pages


def pin_a_snapshot(conn: Connection) -> None:
    conn.execute("begin isolation level repeatable read")
    conn.execute("select 1")


@pytest.mark.parametrize("statistics", ["", "analyze", "vacuum"])
def test_cost_of_reaping_does_not_grow_with_rows_that_cannot_be_removed(
    connect: Connect, conn: Connection, clock: Clock, statistics: str
) -> None:
    """Also with misleading statistics: where nothing can be removed, a vacuum counts only the few rows left."""
    create(conn, "quiet")
    send(conn, 1, queue="quiet")
    claim(conn, queue="quiet", lease="1 hour")
    pin_a_snapshot(connect())
    read = []
    for rounds in (200, 400):
        for _ in range(rounds):
            send_count(conn, 3)
            fail_all(conn, claim(conn, 3), delay=0)
            clock.advance(0.01)
            release(conn, claim(conn, 3).lease, delay="1 hour")
            reap(conn)
        worker = connect()
        if statistics:
            worker.execute(f"{statistics} bartleby.lease, bartleby.sweep".encode())
        worker.execute("set plan_cache_mode = force_generic_plan")
        read.append(pages_read(worker, "select * from bartleby.reap()"))
    # the rows of the tests' own clock cannot be removed either: some 15 pages
    assert read[1] < read[0] + 30


def test_lookup_and_end_of_a_key_cost_the_same_beside_many(connect: Connect, conn: Connection, clock: Clock) -> None:
    conn.execute(
        "insert into bartleby.unique_key (queue, key, message_id, until)"
        " select q.id, n::text, n, bartleby.clock() + interval '1 day'"
        " from bartleby.queue q, generate_series(1, 30000) n"
    )
    conn.execute(
        "insert into bartleby.handled (consumer, key, queue, handled_at)"
        " select 'c', 'id:' || n, q.id, now() from bartleby.queue q, generate_series(1, 20000) n"
    )
    conn.execute("analyze bartleby.unique_key, bartleby.handled")
    lookup = "select bartleby.handled_keys('c', array['id:1', 'id:2', 'none'])"
    assert len(column(conn, lookup)) == 2
    assert pages_read(conn, lookup) < 40
    worker = connect()
    worker.execute("set plan_cache_mode = force_generic_plan")
    before = pages_read(worker, "select * from bartleby.reap()")
    send(conn, 0, key="short", unique_for="1 second")
    clock.advance(2)
    assert pages_read(worker, "select * from bartleby.reap()") < before + 30
    reap(worker)
    assert value(conn, "select count(*) from bartleby.unique_key") == 30000


def test_prepared_sender_does_not_make_claims_wait_for_the_turn(conn: Connection, connect: Connect) -> None:
    send(conn, 1)
    prepared = connect(autocommit=False)
    send(prepared, 2)
    prepared.execute("prepare transaction 'slow'")
    ack(conn, claim(conn, 10).lease)
    conn.execute("select bartleby.turn(0)")
    answers = []
    for _ in range(12):
        began = time.monotonic()
        answers.append((value(conn, "select bartleby.turn()"), time.monotonic() - began))
    assert {answer for answer, _ in answers[2:]} == {"0 is locked"}
    assert min(seconds for _, seconds in answers[2:]) < 0.09, "it waited 0.1 s for the lock, and every claim behind it"
    conn.execute("commit prepared 'slow'")
    assert drain(conn) == [2]
