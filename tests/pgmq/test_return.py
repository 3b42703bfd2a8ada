"""Letters go back into pgmq by a replay, a plan or by hand; and changes made in pgmq itself."""

from tests.kit import sql
from tests.kit.pgmq import (
    QUEUE,
    SIBLING,
    agrees,
    attach,
    change,
    dead,
    fail,
    inside,
    letters,
    made,
    put,
    read,
    replay,
    replay_by_plan,
    statuses,
    step,
    watch,
)
from tests.kit.sql import Connection, refused, row, rows, value


class TestReplay:
    def test_message_returns_with_its_lineage_and_dies_into_the_same_letter(self, conn: Connection) -> None:
        (sent,) = dead(conn, {"n": 1})
        replay(conn, sent)
        assert (inside(conn), inside(conn, SIBLING)) == ([{"n": 1}], [])
        (got,) = read(conn)
        assert got["headers"] == {"x-bartleby-message-id": sent, "x-bartleby-cycle": 2}
        assert got["read_ct"] == 1
        fail(conn, got["msg_id"], "again", fingerprint="f", traceback="second")
        assert read(conn) == []
        (letter,) = letters(conn)
        known = {"message_id": sent, "cycle": 2, "error": "again", "traceback": "second", "headers": None}
        assert {name: letter[name] for name in known} == known
        history = [(each["cycle"], each["error"], each["traceback"]) for each in letter["failure_history"]]
        assert history == [(1, "boom", None)]
        assert value(conn, "select original_msg_id from bartleby.pgmq_letters") == 1
        agrees(conn)

    def test_plan_gets_its_outcomes(self, conn: Connection) -> None:
        replay_by_plan(conn, *dead(conn, 1, 2, 3))
        for got in read(conn, vt=30):
            if got["message"] == 2:
                fail(conn, got["msg_id"], delay=0)
            else:
                conn.execute("select pgmq.archive(%s, %s)", [QUEUE, got["msg_id"]])
        assert read(conn) == []
        assert watch(conn) == 2
        step(conn)
        found = row(conn, "select status, done, died_again from bartleby.replays")
        assert found == {"status": "finished", "done": 2, "died_again": 1}
        agrees(conn)

    def test_canary_has_one_attempt(self, conn: Connection) -> None:
        ids = dead(conn, 1, 2)
        conn.execute("select bartleby.configure_queue('jobs', '{\"max_attempts\": 5}')")
        replay_by_plan(conn, *ids, canary=1)
        assert [got["message"] for got in read(conn)] == [1]
        assert read(conn) == []
        assert statuses(conn) == {"1": "dead", "2": "dead"}
        step(conn)
        assert value(conn, "select status from bartleby.replays") == "aborted"
        agrees(conn)

    def test_patched_payload_returns(self, conn: Connection) -> None:
        replay_by_plan(conn, *dead(conn, {"n": 1}), patch=[{"op": "replace", "path": "/n", "value": 2}])
        assert inside(conn) == [{"n": 2}]
        read(conn)
        read(conn)
        (letter,) = letters(conn)
        assert (letter["payload"], letter["edited"], inside(conn, SIBLING)) == ({"n": 1}, {"n": 2}, [{"n": 2}])

    def test_letter_goes_to_another_queue_and_back(self, conn: Connection) -> None:
        (sent,) = dead(conn, 1)
        conn.execute("select bartleby.create_queue('ours')")
        replay_by_plan(conn, sent, to="ours")
        assert (inside(conn), inside(conn, SIBLING)) == ([], [])
        claimed = sql.claim(conn, queue="ours")
        assert claimed.ids == [sent]
        sql.fail_all(conn, claimed, verdict="dead")
        assert value(conn, "select queue from bartleby.dead_letters") == "ours"
        assert inside(conn, SIBLING) == []
        replay_by_plan(conn, sent, to="jobs")
        assert inside(conn) == [1]


class TestTheSibling:
    def test_sibling_follows_erasure_and_retention(self, conn: Connection) -> None:
        dead(conn, 1, 2)
        conn.execute("select bartleby.configure_queue('jobs', '{\"payload_retention\": 0}')")
        conn.execute("select count(*) from bartleby.prune()")
        assert ([each["payload"] for each in letters(conn)], inside(conn, SIBLING)) == ([None, None], [])
        conn.execute("select bartleby.configure_queue('jobs', '{\"retention\": 0}')")
        conn.execute("select count(*) from bartleby.prune()")
        assert (letters(conn), rows(conn, "select * from bartleby.pgmq_message")) == ([], [])


class TestByHand:
    def test_letter_that_left_the_sibling_is_discarded(self, conn: Connection) -> None:
        dead(conn, 1)
        conn.execute("select pgmq.delete('jobs_dlq', msg_id) from pgmq.q_jobs_dlq")
        assert watch(conn) == 1
        (letter,) = letters(conn)
        assert (letter["status"], letter["discarded_by"]) == ("discarded", "pgmq")
        assert "no longer in jobs_dlq" in letter["discard_reason"]
        agrees(conn)
        assert change(conn, "restore", letter["message_id"]) == ["restored"]
        agrees(conn)

    def test_completed_messages_are_forgotten(self, conn: Connection) -> None:
        made(conn)
        one, two = put(conn, 1, 2)
        read(conn)
        fail(conn, one)
        fail(conn, two)
        conn.execute("select pgmq.delete('jobs', %s::bigint)", [one])
        conn.execute("select pgmq.archive('jobs', %s::bigint)", [two])
        assert watch(conn) == 2
        assert rows(conn, "select * from bartleby.pgmq_message") == []
        assert value(conn, "select count(*) from bartleby.attempts") == 2

    def test_letters_survive_a_dropped_queue(self, conn: Connection) -> None:
        first, second = dead(conn, 1, 2)
        replay(conn, first)
        conn.execute("select pgmq.drop_queue('jobs')")
        watch(conn)
        assert statuses(conn) == {"1": "dead", "2": "dead"}
        assert rows(conn, "select * from bartleby.pgmq_message where msg_id is not null") == []
        for refuses in (lambda: replay(conn, first), lambda: read(conn)):
            with refused("ZB009", "pgmq has it no more"):
                refuses()
        conn.execute("select pgmq.create('jobs')")
        attach(conn, max_attempts=1)
        replay(conn, first, second)
        assert sorted(inside(conn)) == [1, 2]
        agrees(conn)
