"""Races with the ring of segments: a turn truncates, and truncation ignores snapshots."""

from typing import LiteralString

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.property.sessions import Sessions, claim, drain, fill, payloads, send, sqlstate, turn, turn_often


def test_unsettled_messages_are_carried_over(s: Sessions) -> None:
    fill(s.main)
    send(s.main, 1, 2, 3)
    ((lease, position, *_),) = claim(s.main, 1)
    turn(s.main)
    answer = s.main.execute("select verdict from bartleby.fail(%s, %s)", [lease, Jsonb([{"position": position}])])
    assert answer.fetchall() == [("retry",)]
    assert sorted(drain(s.main)) == [1, 2, 3]


# like a send() that read the current segment just before the turn
LATE_SENDER: LiteralString = """
insert into bartleby.log (position, id, created_at, queue, slot, payload)
select nextval(q.positions), nextval('bartleby.message_id'), bartleby.clock(), q.id, 0, '1' from bartleby.queue q"""


@pytest.mark.own_database
def test_message_committed_while_the_turn_waits_is_not_truncated(s: Sessions) -> None:
    s.main.execute("alter function bartleby.clear_segment(smallint) set lock_timeout = '10s'")
    fill(s.main)
    turn(s.main, "0 is settled")
    slow, turner = s.begin(), s.open()
    slow.execute("select pg_current_xact_id()")
    slow.execute(LATE_SENDER)
    s.blocked(turner, lambda: turn(turner), slow.commit)
    assert drain(s.main) == [1]


def test_holes_and_parked_holes_are_carried_over(s: Sessions) -> None:
    fill(s.main)
    slow, slower = s.begin(), s.begin()
    send(slow, 1)
    send(s.main, 2)
    assert payloads(s.main) == [2]
    assert payloads(s.main) == []
    s.clock.advance(5)
    assert payloads(s.main) == []
    send(slower, 3)
    send(s.main, 4)
    assert payloads(s.main) == [4]
    slow.commit()
    slower.commit()
    turn(s.main)
    assert sorted(drain(s.main)) == [1, 3]


def test_turn_with_an_old_snapshot_loses_no_message(s: Sessions) -> None:
    fill(s.main)
    turner = s.begin("isolation level repeatable read")
    turner.execute("select 1 from bartleby.queue")
    send(s.main, 1)
    try:
        turn_often(turner)
        turner.commit()
    except psycopg.Error:
        turner.rollback()
    assert drain(s.main) == [1]


VERBS: list[LiteralString] = [
    "fail(%s, jsonb_build_array(jsonb_build_object('position', %s)))",
    "release(%s, array[%s::bigint])",
]


@pytest.mark.parametrize("verb", VERBS, ids=["fail", "release"])
def test_settlement_with_an_old_snapshot_loses_no_message(s: Sessions, verb: LiteralString) -> None:
    fill(s.main)
    send(s.main, 1)
    ((lease, position, *_),) = claim(s.main)
    worker = s.begin("isolation level repeatable read")
    worker.execute("select 1 from bartleby.queue")
    turn_often(s.main)
    try:
        worker.execute(f"select bartleby.{verb}".encode(), [lease, position])
        worker.commit()
    except psycopg.Error:
        worker.rollback()
        s.main.execute("select bartleby.release(%s)", [lease])
    assert drain(s.main) == [1]


@pytest.mark.own_database
@pytest.mark.parametrize("verb", VERBS, ids=["fail", "release"])
def test_settlement_whose_snapshot_was_overlooked_is_refused(s: Sessions, verb: LiteralString) -> None:
    # as for an owner of the schema who may not see the sessions of other users
    s.main.execute(
        "create or replace function bartleby.has_snapshot_before(p_time timestamptz) returns boolean"
        " language sql as 'select false'"
    )
    fill(s.main)
    send(s.main, 1)
    ((lease, position, *_),) = claim(s.main)
    worker = s.begin("isolation level repeatable read")
    worker.execute("select 1 from bartleby.queue")
    turn(s.main)
    assert sqlstate(lambda: worker.execute(f"select bartleby.{verb}".encode(), [lease, position])) == "ZB007"
    worker.rollback()
    assert s.main.execute("select bartleby.ack(%s)", [lease]).fetchone() == (1,)


def test_reap_with_an_old_snapshot_loses_no_message(s: Sessions) -> None:
    fill(s.main)
    send(s.main, 1)
    claim(s.main)
    s.clock.advance(61)
    reaper = s.begin("isolation level repeatable read")
    reaper.execute("select 1 from bartleby.queue")
    turn_often(s.main)
    try:
        reaper.execute("select bartleby.reap()")
        reaper.commit()
    except psycopg.Error:
        reaper.rollback()
    s.main.execute("select bartleby.reap()")
    assert drain(s.main) == [1]


def test_dump_that_began_before_a_turn_sees_every_message(s: Sessions) -> None:
    fill(s.main)
    send(s.main, 1, 2)
    dump = s.begin("isolation level repeatable read read only")
    dump.execute("select 1 from bartleby.queue")
    turn_often(s.main)
    assert dump.execute("select payload from bartleby.messages order by position").fetchall() == [(1,), (2,)]
    dump.commit()
    turn(s.main)
    assert drain(s.main) == [1, 2]


def test_ring_settled_in_the_future_turns(s: Sessions) -> None:
    fill(s.main)
    turn(s.main, "0 is settled")
    # as a restored dump has it, or a server whose clock was set back
    s.main.execute("update bartleby.segment set settled_at = '3000-01-01' where settled_at is not null")
    older = s.begin("isolation level repeatable read")
    older.execute("select 1 from bartleby.queue")
    s.main.execute("select bartleby.turn(0)")
    older.commit()
    younger = s.begin("isolation level repeatable read")
    younger.execute("select 1 from bartleby.queue")
    turn(s.main)
    assert s.main.execute("select from bartleby.log").rowcount == 0
