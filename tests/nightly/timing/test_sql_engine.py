"""The cost of claims, reaping and lookups does not grow with what there is or has been: pages, scans and waits."""

import time
from collections import defaultdict
from typing import LiteralString

import pytest
from psycopg.types.json import Jsonb

from tests.kit import sql
from tests.kit.clock import Clock, move_clock
from tests.kit.sql import Connect, Connection, claim, create, drain, fail_all, pages_read, reap, send, send_count, value


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn)
    return conn


@pytest.fixture
def clock(conn: Connection) -> Clock:
    return move_clock(conn)


@pytest.mark.seed("pulse-27")
def test_claims_settlements_and_reaping_read_few_pages_beside_many_messages(conn: Connection, clock: Clock) -> None:
    """Beside many that are pending, and many whose retry is not due yet."""
    clock.stop()
    create(conn, backoff="quadratic", breaker="off")
    read: dict[str, list[int]] = defaultdict(list)
    for count in (100, 100, 10_000):  # the first one warms up
        send_count(conn, count)
        fail_all(conn, claim(conn, count))
        read["a claim of nothing"].append(pages_read(conn, "select * from bartleby.claim('q', 'w', 20)"))
        send_count(conn, 10 * count)
        conn.execute("analyze")
        read["claim"].append(pages_of_a_claim(conn))
        claimed = claim(conn, 20)
        failures = [{"position": each} for each in claimed.positions]
        read["fail"].append(pages_read(conn, "select bartleby.fail(%s, %s)", claimed.lease, Jsonb(failures)))
        read["release"].append(pages_read(conn, "select bartleby.release(%s)", claimed.lease))
        reject: LiteralString = "select bartleby.reject(%s, %s, 'unacceptable')"
        read["reject"].append(pages_read(conn, reject, claimed.lease, claimed.positions[0]))
        read["ack"].append(pages_read(conn, "select bartleby.ack(%s)", claimed.lease))
        read["reap"].append(pages_read(conn, "select bartleby.reap()"))
        drain(conn)
    grown = {name: pages for name, (_, few, many) in read.items() if many > (pages := 2 * few + 50)}
    assert grown == {}, dict(read)
    clock.advance(2)
    assert len(claim(conn, 1000).messages) == 1000


@pytest.mark.seed("brighter-49")
def test_unused_channels_cost_an_acknowledgement_nothing(conn: Connection) -> None:
    for queue in ("my-dlq", "plain"):
        create(conn, queue)
    create(conn, "routed", dead_letter_to="my-dlq", invalid_to="my-dlq")
    read = {}
    for name in ("plain", "routed"):
        send(conn, queue=name)
        read[name] = pages_read(conn, "select bartleby.ack(%s)", claim(conn, queue=name).lease)
    assert abs(read["routed"] - read["plain"]) <= 3


def pages_of_a_claim(conn: Connection) -> int:
    pages = pages_read(conn, "select * from bartleby.claim('q', 'w', 20)")
    assert len(claim(conn, 20).messages) == 20
    return pages


@pytest.mark.parametrize("statistics", ["", "analyze", "vacuum"])
def test_cost_of_claims_and_reaping_does_not_grow_with_rows_that_cannot_be_removed(
    connect: Connect, conn: Connection, clock: Clock, statistics: str
) -> None:
    """Also with misleading statistics: where nothing can be removed, a vacuum counts only the few rows left."""
    create(conn, "quiet")
    send(conn, 1, queue="quiet")
    claim(conn, queue="quiet", lease="1 hour")
    reader = connect()
    reader.execute("begin isolation level repeatable read")
    reader.execute("select 1")
    read = []
    for rounds in (200, 400):
        for _ in range(rounds):
            send_count(conn, 3)
            fail_all(conn, claim(conn, 3), delay=0)
            clock.advance(0.01)
            sql.release(conn, claim(conn, 3).lease, delay="1 hour")
            reap(conn)
        worker = connect()
        if statistics:
            worker.execute(f"{statistics} bartleby.lease, bartleby.sweep".encode())
        worker.execute("set plan_cache_mode = force_generic_plan")
        send_count(conn, 20)
        read.append((pages_read(worker, "select * from bartleby.reap()"), pages_of_a_claim(worker)))
    # the rows of the tests' own clock cannot be removed either: some 15 pages
    (reaping, claiming), (reaping_later, claiming_later) = read
    assert reaping_later < reaping + 30
    assert claiming_later < claiming + 50


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
    assert len(sql.column(conn, lookup)) == 2
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
    sql.ack(conn, claim(conn, 10).lease)
    conn.execute("select bartleby.turn(0)")
    answers = []
    for _ in range(12):
        began = time.monotonic()
        answers.append((value(conn, "select bartleby.turn()"), time.monotonic() - began))
    assert {answer for answer, _ in answers[2:]} == {"0 is locked"}
    assert min(seconds for _, seconds in answers[2:]) < 0.09, "it waited 0.1 s for the lock, and every claim behind it"
    conn.execute("commit prepared 'slow'")
    assert drain(conn) == [2]
