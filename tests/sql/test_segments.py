"""The ring of segments: settled messages are removed, all others stay, and upkeep gives way to open transactions."""

import pytest

from tests.kit import sql
from tests.kit.clock import Clock
from tests.kit.sql import Connect, Connection

LARGE = 67108864
pytestmark = pytest.mark.usefixtures("q")


def turn(conn: Connection, size: int = LARGE) -> str:
    """One step: with size 0 the next segment becomes current, else only settled segments are emptied."""
    return str(sql.value(conn, "select bartleby.turn(%s)", size))


def turn_until_empty(conn: Connection, slot: int = 0) -> None:
    for _ in range(10):
        if f"{slot} emptied" in turn(conn):
            assert sql.value(conn, f"select pg_relation_size('bartleby.log_{slot}')") == 0
            return
    pytest.fail(f"segment {slot} was not emptied: {turn(conn)}")


def current(conn: Connection) -> int:
    return int(sql.value(conn, "select slot from bartleby.segment where current"))


def test_only_a_large_segment_is_turned_and_a_turn_can_be_rolled_back(conn: Connection, connect: Connect) -> None:
    assert turn(conn, 0) == "nothing to do"
    sql.send_count(conn, 3)
    assert turn(conn) == "nothing to do"
    other = connect(autocommit=False)
    assert "writing to 1" in turn(other, 0)
    other.rollback()
    assert current(conn) == 0
    assert "writing to" in turn(other, 0)
    assert turn(conn, 0) == "busy"
    other.commit()
    assert (slot := current(conn)) > 0
    sql.send(conn, 4)
    assert sql.column(conn, f"select payload from bartleby.log_{slot} where payload = '4'") == [4]
    assert sql.drain(conn) == [1, 2, 3, 4]


def test_message_keeps_all_its_columns_when_carried_over(conn: Connection, clock: Clock) -> None:
    sql.send(conn, 1, headers={"h": 1}, key="k", generation=3, max_attempts=9)
    sql.send(conn, "x" * 5000)
    sql.fail_all(conn, sql.claim(conn, 2), verdict="dead")
    conn.execute("select bartleby.replay(array(select message_id from bartleby.dead_letters), 'a', 'b')")
    sql.fail_all(conn, sql.claim(conn, 2), delay=0, give_up_after=9999)
    for _ in range(2):
        clock.advance(61)
        conn.execute("select bartleby.reap()")
        clock.advance(1)
        sql.claim(conn, 2), sql.claim(conn)
    living = (
        "select to_jsonb(l) - 'slot' from bartleby.log l where position in (select position from bartleby.messages)"
    )
    before = sql.column(conn, living + " order by position")
    assert [(found["cycle"], found["solo"], found["patience"]) for found in before] == [(2, True, "02:46:39")] * 2
    turn(conn, 0)
    turn_until_empty(conn)
    assert sql.column(conn, living) == before


def test_long_backlog_is_not_copied_round_and_round(conn: Connection) -> None:
    for _ in range(8):
        sql.send(conn, "x" * 300_000)
    turn(conn, 0)
    for _ in range(6):
        assert "carried over" not in turn(conn, 0)
    assert len(sql.drain(conn)) == 8
    turn_until_empty(conn, 0)
    slot = current(conn)
    sql.send_count(conn, 5000)
    assert f"{slot} is in use" in turn(conn, 0)
    assert sql.value(conn, f"select count(*) from bartleby.log_{slot}") == 5000
    assert len(sql.drain(conn)) == 5000
    turn_until_empty(conn, slot)


def test_reader_of_the_log_delays_only_the_truncation(connect: Connect, conn: Connection) -> None:
    sql.send_count(conn, 10)
    sql.drain(conn)
    turn(conn, 0)
    dump = connect(autocommit=False)
    dump.execute("lock table bartleby.log in access share mode")
    assert "0 is locked" in [turn(conn) for _ in range(4)][-1]
    sql.send(conn, 11)
    assert sql.drain(conn) == [11]
    dump.rollback()
    turn_until_empty(conn)


@pytest.mark.own_database
def test_nothing_is_carried_over_while_an_old_snapshot_is_open(conn: Connection, connect: Connect) -> None:
    sql.send_count(conn, 3)
    reader = connect(autocommit=False)
    reader.execute("set transaction isolation level repeatable read")
    reader.execute("select 1")
    conn.execute("create or replace function bartleby.server_clock() returns timestamptz language sql"
                 " as $$ select pg_catalog.clock_timestamp() + interval '1 minute' $$")  # fmt: skip
    turn(conn, 0)
    assert turn(conn) == "0 waits for an older snapshot"
    reader.rollback()
    assert turn(conn) == "0: 3 carried over"
    assert sql.drain(conn) == [1, 2, 3]
