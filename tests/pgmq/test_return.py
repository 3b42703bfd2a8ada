"""Letters go back into pgmq by a replay, a plan or by hand; and changes made in pgmq itself."""

import pytest

from tests.kit import pgmq, sql
from tests.kit.sql import Connection, row, rows, value


class TestReplay:
    @pytest.mark.seed("pgmq-5", "pgmq-56")
    def test_replayed_message_keeps_its_id_and_dies_into_the_same_letter(self, conn: Connection) -> None:
        (sent,) = pgmq.dead(conn, {"n": 1})
        pgmq.replay(conn, sent)
        assert (pgmq.inside(conn), pgmq.inside(conn, pgmq.SIBLING)) == ([{"n": 1}], [])
        (got,) = pgmq.read(conn)
        assert got["headers"] == {"x-bartleby-message-id": sent, "x-bartleby-cycle": 2}
        assert got["read_ct"] == 1
        pgmq.fail(conn, got["msg_id"], "again", fingerprint="f", traceback="second")
        assert pgmq.read(conn) == []
        (letter,) = pgmq.letters(conn)
        known = {"message_id": sent, "cycle": 2, "error": "again", "traceback": "second", "headers": None}
        assert {name: letter[name] for name in known} == known
        history = [(each["cycle"], each["error"], each["traceback"]) for each in letter["failure_history"]]
        assert history == [(1, "boom", None)]
        assert value(conn, "select original_msg_id from bartleby.pgmq_letters") == 1
        pgmq.agrees(conn)

    def test_plan_gets_its_outcomes(self, conn: Connection) -> None:
        pgmq.replay_by_plan(conn, *pgmq.dead(conn, 1, 2, 3))
        for got in pgmq.read(conn, vt=30):
            if got["message"] == 2:
                pgmq.fail(conn, got["msg_id"], delay=0)
            else:
                conn.execute("select pgmq.archive(%s, %s)", [pgmq.QUEUE, got["msg_id"]])
        assert pgmq.read(conn) == []
        assert pgmq.watch(conn) == 2
        pgmq.step(conn)
        found = row(conn, "select status, done, died_again from bartleby.replays")
        assert found == {"status": "finished", "done": 2, "died_again": 1}
        pgmq.agrees(conn)

    def test_canary_has_one_attempt(self, conn: Connection) -> None:
        ids = pgmq.dead(conn, 1, 2)
        conn.execute("select bartleby.configure_queue('jobs', '{\"max_attempts\": 5}')")
        pgmq.replay_by_plan(conn, *ids, canary=1)
        assert [got["message"] for got in pgmq.read(conn)] == [1]
        assert pgmq.read(conn) == []
        assert pgmq.statuses(conn) == {"1": "dead", "2": "dead"}
        pgmq.step(conn)
        assert value(conn, "select status from bartleby.replays") == "aborted"
        pgmq.agrees(conn)

    def test_patched_payload_returns(self, conn: Connection) -> None:
        pgmq.replay_by_plan(conn, *pgmq.dead(conn, {"n": 1}), patch=[{"op": "replace", "path": "/n", "value": 2}])
        assert pgmq.inside(conn) == [{"n": 2}]
        pgmq.read(conn)
        pgmq.read(conn)
        (letter,) = pgmq.letters(conn)
        assert (letter["payload"], letter["edited"], pgmq.inside(conn, pgmq.SIBLING)) == (
            {"n": 1},
            {"n": 2},
            [{"n": 2}],
        )

    @pytest.mark.seed("pgmq-76")
    def test_letter_goes_to_another_queue_and_back(self, conn: Connection) -> None:
        (sent,) = pgmq.dead(conn, 1)
        conn.execute("select bartleby.create_queue('ours')")
        pgmq.replay_by_plan(conn, sent, to="ours")
        assert (pgmq.inside(conn), pgmq.inside(conn, pgmq.SIBLING)) == ([], [])
        claimed = sql.claim(conn, queue="ours")
        assert claimed.ids == [sent]
        sql.fail_all(conn, claimed, verdict="dead")
        assert value(conn, "select queue from bartleby.dead_letters") == "ours"
        assert pgmq.inside(conn, pgmq.SIBLING) == []
        pgmq.replay_by_plan(conn, sent, to="jobs")
        assert pgmq.inside(conn) == [1]


@pytest.mark.seed("pgmq-15", "pgmq-48", "pgmq-63")
def test_sibling_follows_discard_restore_erasure_and_retention(conn: Connection) -> None:
    first, _second = pgmq.dead(conn, 1, 2)
    pgmq.change(conn, "discard", first)
    assert pgmq.inside(conn, pgmq.SIBLING) == [2]
    pgmq.change(conn, "restore", first)
    assert pgmq.inside(conn, pgmq.SIBLING) == [2, 1]
    conn.execute("select bartleby.configure_queue('jobs', '{\"payload_retention\": 0}')")
    conn.execute("select count(*) from bartleby.prune()")
    assert ([each["payload"] for each in pgmq.letters(conn)], pgmq.inside(conn, pgmq.SIBLING)) == ([None, None], [])
    conn.execute("select bartleby.configure_queue('jobs', '{\"retention\": 0}')")
    conn.execute("select count(*) from bartleby.prune()")
    assert (pgmq.letters(conn), pgmq.inside(conn, pgmq.SIBLING)) == ([], [])
    assert rows(conn, "select * from bartleby.pgmq_message") == []


@pytest.mark.seed("pgmq-62")
def test_letter_that_left_the_sibling_is_discarded(conn: Connection) -> None:
    pgmq.dead(conn, 1)
    conn.execute("select pgmq.delete('jobs_dlq', msg_id) from pgmq.q_jobs_dlq")
    assert pgmq.watch(conn) == 1
    (letter,) = pgmq.letters(conn)
    assert (letter["status"], letter["discarded_by"]) == ("discarded", "pgmq")
    assert "no longer in jobs_dlq" in letter["discard_reason"]
    pgmq.agrees(conn)
    assert pgmq.change(conn, "restore", letter["message_id"]) == ["restored"]
    pgmq.agrees(conn)
