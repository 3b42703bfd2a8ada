"""The ring of segments: what is settled goes, everything else stays, and nobody waits for it."""

import time

import pytest

from tests.kit.clock import move_clock
from tests.kit.sql import (
    Connect,
    Connection,
    ack,
    claim,
    column,
    create,
    drain,
    fail_all,
    refused,
    release,
    rows,
    send,
    send_count,
    stats,
    value,
)


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn)
    return conn


def turn(conn: Connection, size: int | None = None) -> str:
    """One step: with 0 the next segment is written from now on, else only what is settled is emptied."""
    if size is None:
        return str(value(conn, "select bartleby.turn()"))
    return str(value(conn, "select bartleby.turn(%s)", size))


def turn_until_empty(conn: Connection, slot: int) -> None:
    for _ in range(10):
        if f"{slot} emptied" in turn(conn):
            return
    pytest.fail(f"segment {slot} was not emptied: {turn(conn)}")


def current(conn: Connection) -> int:
    return int(value(conn, "select slot from bartleby.segment where current"))


def counts(conn: Connection) -> list[int]:
    """Rows in each segment."""
    return [value(conn, f"select count(*) from bartleby.log_{slot}") for slot in range(3)]


def test_turning_moves_on_to_an_empty_segment(conn: Connection) -> None:
    send_count(conn, 3)
    assert current(conn) == 0
    assert "writing to 1" in turn(conn, 0)
    assert current(conn) == 1
    send(conn, 4)
    assert counts(conn)[1] >= 1
    assert drain(conn) == [1, 2, 3, 4]


def test_a_small_segment_is_written_on(conn: Connection) -> None:
    send_count(conn, 3)
    assert turn(conn) == "nothing to do"
    assert current(conn) == 0


def test_an_empty_log_is_not_turned(conn: Connection) -> None:
    assert turn(conn, 0) == "nothing to do"
    assert current(conn) == 0


def test_what_is_settled_is_truncated(conn: Connection) -> None:
    send_count(conn, 100)
    drain(conn)
    turn(conn, 0)
    turn_until_empty(conn, 0)
    assert counts(conn) == [0, 0, 0]
    assert value(conn, "select pg_relation_size('bartleby.log_0')") == 0
    send_count(conn, 3)
    assert drain(conn) == [1, 2, 3]


def test_the_ring_can_be_turned_for_ever(conn: Connection) -> None:
    seen = []
    for n in range(12):
        send(conn, n)
        assert drain(conn) == [n]
        turn(conn, 0)
        seen.append(current(conn))
        turn_until_empty(conn, (seen[-2] if n else 0))
    assert set(seen) == {0, 1, 2}
    assert rows(conn, "select * from bartleby.drift()") == []


def test_stragglers_are_carried_over_under_their_own_positions(connect: Connect, conn: Connection) -> None:
    """Ready, leased, passed and put aside: whatever is not settled is still there afterwards."""
    clock = move_clock(conn)
    create(conn, "slow")
    create(conn, "paused")
    send_count(conn, 5, "paused")
    conn.execute("select bartleby.pause_queue('paused')")
    send_count(conn, 5, "slow")
    held = claim(conn, 2, "slow")
    parked, passed = connect(autocommit=False), connect(autocommit=False)
    send(parked, "parked")
    send_count(conn, 20)
    assert len(drain(conn)) == 20
    for _ in range(3):
        clock.advance(2)
        claim(conn)
    send(passed, "passed")
    send_count(conn, 20)
    assert len(drain(conn)) == 20
    for sender in (parked, passed):
        sender.commit()
    before = rows(conn, "select queue, position, message_id, state, payload from bartleby.messages order by 1, 2")
    assert len(before) == 12
    turn(conn, 0)
    turn_until_empty(conn, 0)
    assert counts(conn)[0] == 0
    after = rows(conn, "select queue, position, message_id, state, payload from bartleby.messages order by 1, 2")
    assert after == before
    assert ack(conn, held.lease) == 2
    conn.execute("select bartleby.resume_queue('paused')")
    assert drain(conn, "slow") == [3, 4, 5]
    assert drain(conn, "paused") == [1, 2, 3, 4, 5]
    assert sorted(drain(conn)) == ["parked", "passed"]


def test_a_message_keeps_all_its_columns_when_carried_over(conn: Connection) -> None:
    clock = move_clock(conn)
    send(conn, 1, headers={"h": 1}, key="k", generation=3, max_attempts=9)
    send(conn, 2)
    fail_all(conn, claim(conn, 2), verdict="dead")
    conn.execute("select bartleby.replay(array(select message_id from bartleby.dead_letters), 'a', 'b')")
    fail_all(conn, claim(conn, 2), delay=0)
    clock.advance(1)
    release(conn, claim(conn, 2).lease)
    clock.advance(1)
    claim(conn, 2)
    columns = (
        "queue, position, id, created_at, attempts, crashes, max_attempts, cycle, big, solo, generation,"
        " first_failed_at, key, headers, payload"
    )
    living = f"select {columns} from bartleby.log where position in (select position from bartleby.messages) order by 2"
    before = rows(conn, living)
    assert [found["cycle"] for found in before] == [2, 2]
    turn(conn, 0)
    turn_until_empty(conn, 0)
    assert rows(conn, living) == before


def test_a_settlement_after_the_carry_over_finds_its_message(conn: Connection) -> None:
    clock = move_clock(conn)
    send_count(conn, 4)
    claimed = claim(conn, 4)
    turn(conn, 0)
    turn_until_empty(conn, 0)
    first, second, third, fourth = claimed.positions
    ack(conn, claimed.lease, [first])
    release(conn, claimed.lease, [second])
    conn.execute("select bartleby.reject(%s, %s, 'unacceptable')", [claimed.lease, third])
    conn.execute("select bartleby.fail(%s, %s)", [claimed.lease, f'[{{"position": {fourth}, "delay": 0}}]'])
    clock.advance(1)
    assert sorted(drain(conn)) == [2, 4]
    assert column(conn, "select payload from bartleby.dead_letters") == [3]


def test_too_many_stragglers_are_left_where_they_are(conn: Connection) -> None:
    conn.execute(
        "select count(*) from bartleby.send_many('q',"
        " (select jsonb_agg(jsonb_build_object('payload', n)) from generate_series(1, 5000) n))"
    )
    assert "0 is in use" in turn(conn, 0)
    assert counts(conn) == [5000, 0, 0]
    assert len(drain(conn)) == 5000
    turn_until_empty(conn, 0)


def test_an_open_sender_delays_it_and_loses_nothing(connect: Connect, conn: Connection) -> None:
    sender = connect(autocommit=False)
    send(sender, "late")
    send_count(conn, 10)
    drain(conn)
    turn(conn, 0)
    assert_it_gives_way(conn, "0 is locked", "0 waits")
    sender.commit()
    turn_until_empty(conn, 0)
    assert drain(conn) == ["late"]


def test_a_reader_of_the_log_delays_it(connect: Connect, conn: Connection) -> None:
    send_count(conn, 10)
    drain(conn)
    turn(conn, 0)
    dump = connect(autocommit=False)
    dump.execute("lock table bartleby.log in access share mode")
    assert_it_gives_way(conn, "0 is locked")
    send(conn, 11)
    assert drain(conn) == [11]
    dump.rollback()
    turn_until_empty(conn, 0)


def assert_it_gives_way(conn: Connection, *words: str) -> None:
    began = time.monotonic()
    answers = [turn(conn) for _ in range(4)]
    assert time.monotonic() - began < 10
    assert any(word in answers[-1] for word in words), answers


def test_an_open_snapshot_sees_every_message_and_delays_only_the_truncation(connect: Connect, conn: Connection) -> None:
    send_count(conn, 10)
    ack(conn, claim(conn, 5).lease)
    dump = connect(autocommit=False)
    dump.execute("set transaction isolation level repeatable read")
    dump.execute("select 1 from bartleby.queue")
    turn(conn, 0)
    assert_it_gives_way(conn, "0 waits for an older snapshot")
    assert value(dump, "select count(*) from bartleby.log") == 10
    assert column(dump, "select payload from bartleby.messages order by position") == [6, 7, 8, 9, 10]
    send(conn, 11)
    assert drain(conn) == [6, 7, 8, 9, 10, 11]
    dump.rollback()
    turn_until_empty(conn, 0)
    assert counts(conn)[0] == 0


def test_a_second_turn_at_the_same_time_has_nothing_to_do(connect: Connect, conn: Connection) -> None:
    send_count(conn, 3)
    first = connect(autocommit=False)
    assert "writing to 1" in turn(first, 0)
    assert turn(conn, 0) == "busy"
    first.commit()
    assert current(conn) == 1


def test_a_turn_can_be_rolled_back(conn: Connection) -> None:
    send_count(conn, 3)
    with conn.transaction(force_rollback=True):
        turn(conn, 0)
    assert current(conn) == 0
    assert drain(conn) == [1, 2, 3]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_an_old_snapshot_is_refused(conn: Connection, level: str) -> None:
    conn.execute(f"set default_transaction_isolation = '{level}'")
    with refused("ZB007"):
        turn(conn, 0)


def test_turning_while_messages_come_and_go_loses_none(conn: Connection) -> None:
    clock = move_clock(conn)
    create(conn, "slow")
    sent: list[int] = []
    done: list[int] = []
    for n in range(60):
        sent += send_count(conn, 5, "q" if n % 3 else "slow")
        claimed = claim(conn, 4)
        if claimed.messages:
            if n % 4:
                done += claimed.ids
                ack(conn, claimed.lease)
            else:
                fail_all(conn, claimed, delay=3)
        turn(conn, 0 if n % 5 == 0 else None)
        clock.advance(1)
    clock.advance(100)
    for queue in ("q", "slow"):
        while (claimed := claim(conn, 100, queue)).messages:
            done += claimed.ids
            ack(conn, claimed.lease)
    assert sorted(done) == sent
    assert stats(conn)["ready"] == stats(conn, "slow")["ready"] == 0


def test_a_segment_that_is_mostly_backlog_is_not_copied_round_and_round(conn: Connection) -> None:
    for _ in range(8):
        send(conn, "x" * 300_000)
    turn(conn, 0)
    for _ in range(6):
        assert "carried over" not in turn(conn, 0)
    assert len(drain(conn)) == 8


def test_a_prepared_sender_does_not_make_claims_wait_for_the_turn(conn: Connection, connect: Connect) -> None:
    create(conn, "other")
    send(conn, 1)
    prepared = connect(autocommit=False)
    send(prepared, 2)
    prepared.execute("prepare transaction 'slow'")
    ack(conn, claim(conn, 10).lease)
    turn(conn, 0)
    answers = [turn(conn) for _ in range(3)]
    assert answers[-1] == "0 is locked"
    waits = []
    for _ in range(5):
        began = time.monotonic()
        turn(conn)
        waits.append(time.monotonic() - began)
    assert min(waits) < 0.09, "it waited for the lock, and every claim behind it"
    conn.execute("commit prepared 'slow'")
    assert drain(conn) == [2]


def test_while_an_old_snapshot_is_open_nothing_is_carried_over(conn: Connection, connect: Connect) -> None:
    send_count(conn, 3)
    reader = connect(autocommit=False)
    reader.execute("set transaction isolation level repeatable read")
    reader.execute("select 1")
    conn.execute("create or replace function bartleby.server_clock() returns timestamptz language sql"
                 " as $$ select pg_catalog.clock_timestamp() + interval '1 minute' $$")  # fmt: skip
    turn(conn, 0)
    assert turn(conn) == "0 waits for an older snapshot"
    reader.rollback()
    assert turn(conn) == "0: 3 carried over"
    assert drain(conn) == [1, 2, 3]
