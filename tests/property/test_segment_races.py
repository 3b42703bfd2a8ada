"""Races with the ring of segments: a turn truncates, and truncation ignores snapshots."""

from typing import LiteralString

import pytest

from tests.kit.sql import ack, claim, column, fail_all, value
from tests.property.sessions import Sessions, drain, fill, hole, send, sqlstate, turn, turn_often


def test_unsettled_messages_are_carried_over(s: Sessions) -> None:
    fill(s.main)
    send(s.main, 1, 2, 3)
    claimed = claim(s.main)
    turn(s.main)
    assert [each["verdict"] for each in fail_all(s.main, claimed)] == ["retry"]
    assert sorted(drain(s.main)) == [1, 2, 3]


@pytest.mark.own_database
def test_message_committed_while_the_turn_waits_is_not_truncated(s: Sessions) -> None:
    s.main.execute("alter function bartleby.clear_segment(smallint) set lock_timeout = '10min'")
    fill(s.main)
    turn(s.main, "0 is settled")
    slow, turner = s.begin(), s.open()
    slow.execute("select pg_current_xact_id()")
    # like a send() that read the current segment just before the turn
    slow.execute(
        "insert into bartleby.log (position, id, created_at, queue, slot, payload) select nextval(q.positions),"
        " nextval('bartleby.message_id'), bartleby.clock(), q.id, 0, '1' from bartleby.queue q"
    )
    s.blocked(turner, slow.commit, turn)
    assert drain(s.main) == [1]


def test_holes_and_parked_holes_are_carried_over(s: Sessions) -> None:
    fill(s.main)
    for slow in (hole(s, 1, parked=True), hole(s, 3)):
        slow.commit()
    turn(s.main)
    assert sorted(drain(s.main)) == [1, 3]


VERBS: list[LiteralString] = [
    "select bartleby.fail(%s, jsonb_build_array(jsonb_build_object('position', %s)))",
    "select bartleby.release(%s, array[%s::bigint])",
]


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
    claimed = claim(s.main)
    worker = s.begin_with_snapshot()
    turn(s.main)
    assert sqlstate(worker, value, verb, claimed.lease, *claimed.positions) == "ZB007"
    worker.rollback()
    assert ack(s.main, claimed.lease) == 1


def test_dump_that_began_before_a_turn_sees_every_message(s: Sessions) -> None:
    fill(s.main)
    send(s.main, 1, 2)
    dump = s.begin_with_snapshot("read only")
    turn_often(s.main)
    assert column(dump, "select payload from bartleby.messages order by position") == [1, 2]
    dump.commit()
    turn(s.main)
    assert drain(s.main) == [1, 2]


def test_ring_settled_in_the_future_turns(s: Sessions) -> None:
    fill(s.main)
    turn(s.main, "0 is settled")
    # as a restored dump has it, or a server whose clock was set back
    s.main.execute("update bartleby.segment set settled_at = '3000-01-01' where settled_at is not null")
    older = s.begin_with_snapshot()
    s.main.execute("select bartleby.turn(0)")
    older.commit()
    s.begin_with_snapshot()
    turn(s.main)
    assert value(s.main, "select count(*) from bartleby.log") == 0
