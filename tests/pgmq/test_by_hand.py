"""Replays by hand in pgmq while readers, workers and operators work on the same messages."""

import pytest

from tests.kit import pgmq
from tests.kit.sql import Connect, Connection, column, rows, value
from tests.kit.sql import fail as fail_ours


def replay_by_hand(conn: Connection) -> None:
    (found,) = rows(conn, "select * from pgmq.read('jobs_dlq', 30, 1)")
    pgmq.put(conn, found["message"])
    conn.execute("select pgmq.delete('jobs_dlq', %s::bigint)", [found["msg_id"]])


@pytest.mark.seed("pgmq-10", "pgmq-12", "pgmq-19", "pgmq-54", "pgmq-72")
def test_message_replayed_by_hand_is_not_discarded_and_watched_after_its_reader(
    conn: Connection, connect: Connect
) -> None:
    """Discarded, restored and replayed later it would live twice."""
    (sent,) = pgmq.dead(conn, 1)
    replay_by_hand(conn)
    assert "discarded" not in pgmq.change(conn, "discard", sent)
    reader = connect(autocommit=False)
    assert len(pgmq.read(reader, vt=30)) == 1
    assert pgmq.watch(conn) == 0
    assert pgmq.statuses(conn) == {"1": "dead"}
    reader.commit()
    assert pgmq.watch(conn) == 1
    (letter,) = pgmq.letters(conn)
    assert (letter["status"], letter["replayed_by"], "by hand" in letter["replay_reason"]) == ("replayed", "pgmq", True)


def test_worker_that_was_faster_uses_the_same_letter(conn: Connection) -> None:
    (sent,) = pgmq.dead(conn, 1)
    replay_by_hand(conn)
    claimed = pgmq.claim(conn)
    fail_ours(conn, claimed.lease, {"position": claimed.positions[0], "error": "again"})
    assert pgmq.watch(conn) == 1
    assert pgmq.statuses(conn) == {"1": "replayed"}
    assert pgmq.claim(conn).messages == []
    (letter,) = pgmq.letters(conn)
    assert (letter["message_id"], letter["status"], letter["cycle"], letter["error"]) == (sent, "dead", 2, "again")
    pgmq.agrees(conn)


@pytest.mark.parametrize("planned", [True, False])
def test_message_replayed_by_hand_and_by_bartleby_exists_once(conn: Connection, planned: bool) -> None:
    """The queue is not watched between the two."""
    first, second = pgmq.dead(conn, 1, 2)
    replay_by_hand(conn)
    if planned:
        pgmq.replay_by_plan(conn, first, second)
    else:
        assert column(conn, "select bartleby.replay(%s, 'ann', 'x')", [first, second]) == [second]
    assert pgmq.inside(conn) == [1, 2]
    assert pgmq.watch(conn) == 1
    assert pgmq.statuses(conn) == {"1": "replayed", "2": "replayed"}
    if planned:
        pgmq.step(conn)
        assert value(conn, "select skipped from bartleby.replays") == 1
    pgmq.agrees(conn)


def test_new_queue_is_not_mistaken_for_the_old_one(conn: Connection) -> None:
    """The queue was not watched before the drop, and the new message has the id that the replayed one had."""
    (sent,) = pgmq.dead(conn, 1)
    pgmq.replay(conn, sent)
    conn.execute("select pgmq.drop_queue('jobs')")
    conn.execute("select pgmq.create('jobs')")
    pgmq.put(conn, 0, "new")
    pgmq.read(conn)
    pgmq.fail(conn, 2, "another")
    pgmq.read(conn)
    assert pgmq.statuses(conn) == {"0": "dead", "1": "dead", "new": "dead"}
    pgmq.agrees(conn)


def test_replay_skips_a_letter_locked_by_a_manual_replay(conn: Connection, connect: Connect) -> None:
    (sent,) = pgmq.dead(conn, 1)
    hand = connect(autocommit=False)
    replay_by_hand(hand)
    conn.execute("set statement_timeout = '60s'")
    assert column(conn, "select bartleby.replay(%s, 'ann', 'x')", [sent]) == []
    hand.commit()
    assert pgmq.watch(conn) == 1
    assert (pgmq.inside(conn), pgmq.statuses(conn)) == ([1], {"1": "replayed"})
    pgmq.agrees(conn)


@pytest.mark.seed("pgmq-23")
def test_message_of_a_new_queue_is_another_one_though_it_has_the_same_id(conn: Connection) -> None:
    pgmq.made(conn, max_attempts=2)
    [old] = pgmq.put(conn, "old")
    pgmq.read(conn)
    pgmq.fail(conn, old, "bad audio")
    conn.execute("select pgmq.drop_queue(%s)", [pgmq.QUEUE])
    conn.execute("select pgmq.create(%s)", [pgmq.QUEUE])
    assert pgmq.put(conn, "new") == [old]
    assert [len(pgmq.read(conn)) for _ in range(3)] == [1, 1, 0]
    found = rows(conn, "select original_msg_id, payload, last_error from bartleby.pgmq_letters")
    assert found == [{"original_msg_id": old, "payload": "new", "last_error": None}]
