"""The dispatch boundary: who reads by pgmq_read() gets no message that was read more often than the policy allows."""

import pytest

from tests.kit.pgmq import QUEUE, SIBLING, agrees, attach, fail, inside, letters, made, put, read
from tests.kit.sql import Connect, Connection, Row, refused, row, rows, value


def test_what_succeeds_is_read_like_by_pgmq(conn: Connection) -> None:
    made(conn)
    first, second = put(conn, {"n": 1}, {"n": 2}, headers={"trace": "x"})
    got = read(conn, qty=1, vt=30)
    assert [(each["msg_id"], each["read_ct"], each["message"], each["headers"]) for each in got] == [
        (first, 1, {"n": 1}, {"trace": "x"})
    ]
    assert got[0]["vt"] > got[0]["enqueued_at"]
    assert [each["msg_id"] for each in read(conn, vt=30)] == [second]
    assert read(conn) == []
    conn.execute("select pgmq.delete(%s, %s)", [QUEUE, first])
    assert letters(conn) == []


def test_five_honest_tries_and_then_the_letter(conn: Connection) -> None:
    made(conn)
    (msg_id,) = put(conn, {"n": 1})
    for expected in range(1, 6):
        assert [each["read_ct"] for each in read(conn)] == [expected]
    assert letters(conn) == []
    assert read(conn) == []
    (letter,) = letters(conn)
    assert (letter["payload"], letter["attempts"], letter["reason"], letter["status"]) == (
        {"n": 1},
        5,
        "exhausted",
        "dead",
    )
    assert (inside(conn), inside(conn, SIBLING)) == ([], [{"n": 1}])
    shown = row(conn, "select * from bartleby.pgmq_letters")
    assert (shown["queue_name"], shown["original_msg_id"], shown["read_ct"], shown["last_error"]) == (
        QUEUE,
        msg_id,
        6,
        None,
    )
    assert shown["first_seen"] == letter["created_at"] < letter["dead_at"]
    agrees(conn)


def test_it_has_the_evidence(conn: Connection) -> None:
    made(conn, max_attempts=2)
    (msg_id,) = put(conn, 1)
    for number in (1, 2):
        read(conn)
        assert fail(
            conn, msg_id, f"no {number}", "KeyError", traceback="here", fingerprint="f", worker="me", handler="charge"
        )
    assert read(conn) == []
    (letter,) = letters(conn)
    assert (letter["error"], letter["error_type"], letter["traceback"], letter["fingerprint"], letter["worker"]) == (
        "no 2", "KeyError", "here", "f", "me",
    )  # fmt: skip
    attempts = rows(conn, "select * from bartleby.attempts order by attempt")
    assert [(each["attempt"], each["outcome"], each["verdict"], each["error"]) for each in attempts] == [
        (1, "failed", "retry", "no 1"), (2, "failed", "dead", "no 2"),
    ]  # fmt: skip
    assert letter["first_failed_at"] == attempts[0]["failed_at"]
    group = row(conn, "select * from bartleby.groups")
    assert (group["title"], group["dead"]) == ("KeyError: no 2", 1)
    assert value(conn, "select count(*) from bartleby.events where type = 'io.bartleby.dead_letter.created'") == 1
    agrees(conn)


def test_what_nobody_told_of_the_last_try(conn: Connection) -> None:
    made(conn, max_attempts=2)
    (msg_id,) = put(conn, 1)
    read(conn)
    fail(conn, msg_id, "the only word")
    read(conn)
    read(conn)
    (letter,) = letters(conn)
    assert (letter["error"], letter["attempts"]) == ("the only word", 2)
    attempts = rows(conn, "select attempt, outcome, verdict, rule from bartleby.attempts order by attempt")
    assert [tuple(each.values()) for each in attempts] == [
        (1, "failed", "retry", "attempt 1 of 2"), (2, "lost", "dead", "nobody told what became of it"),
    ]  # fmt: skip


def test_a_failure_is_hidden_as_the_policy_says(conn: Connection) -> None:
    made(conn, backoff="fixed", base=60, jitter="none")
    (msg_id,) = put(conn, 1)
    read(conn)
    until = fail(conn, msg_id)
    assert 50 < value(conn, "select extract(epoch from %s - clock_timestamp())", until) < 61
    assert read(conn) == []
    assert value(conn, "select vt from pgmq.q_jobs") == until


def test_live_messages_behind_dead_ones_are_found(conn: Connection) -> None:
    made(conn, max_attempts=1)
    put(conn, 1, 2, 3)
    read(conn)
    put(conn, 4)
    assert [each["message"] for each in read(conn, qty=3)] == [4]
    assert sorted(each["payload"] for each in letters(conn)) == [1, 2, 3]
    agrees(conn)


def test_reject_promotes_now(conn: Connection) -> None:
    made(conn)
    (msg_id,) = put(conn, 1)
    read(conn)
    conn.execute("select bartleby.pgmq_reject(%s, %s, 'unacceptable', 'no such country')", [QUEUE, msg_id])
    (letter,) = letters(conn)
    assert (letter["reason"], letter["error"], letter["attempts"]) == ("unacceptable", "no such country", 1)
    assert (inside(conn), inside(conn, SIBLING)) == ([], [1])
    with refused("ZB006", "no message"):
        fail(conn, msg_id)


def test_who_is_late_is_told(conn: Connection) -> None:
    made(conn)
    (msg_id,) = put(conn, 1)
    read(conn)
    read(conn)
    with refused("ZB006", "read again since"):
        fail(conn, msg_id, read_ct=1)
    assert fail(conn, msg_id, read_ct=2)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_two_readers_never_promote_the_same_message(conn: Connection, connect: Connect, end: str) -> None:
    made(conn, max_attempts=1)
    put(conn, 1, 2)
    read(conn)
    one, two = connect(autocommit=False), connect()
    two.execute("set statement_timeout = '20s'")
    assert read(one) == []  # buries both, and has not said so yet
    assert read(two) == []  # waits for nobody, and finds nothing
    assert letters(two) == []
    getattr(one, end)()
    assert read(two) == []
    assert [each["payload"] for each in letters(conn)] == [1, 2]
    agrees(conn)


def test_a_message_without_a_payload(conn: Connection) -> None:
    made(conn, max_attempts=1)
    conn.execute("select pgmq.send(%s, null)", [QUEUE])
    read(conn)
    read(conn)
    assert [each["payload"] for each in letters(conn)] == [None]
    assert value(conn, "select payload = 'null' from bartleby.dead_letters") is True


class TestAttach:
    def test_a_queue_that_is_not_there(self, conn: Connection) -> None:
        with refused("ZB008", "pgmq has no queue 'jobs'"):
            attach(conn)
        with refused("ZB001", "no queue of pgmq is attached"):
            read(conn)

    def test_a_queue_of_our_own(self, conn: Connection) -> None:
        conn.execute("select bartleby.create_queue('jobs')")
        conn.execute("select pgmq.create('jobs')")
        with refused("ZB009", "called 'jobs' already"):
            attach(conn)

    def test_it_is_not_sent_to_by_us(self, conn: Connection) -> None:
        made(conn)
        with refused("ZB009", "one of pgmq"):
            conn.execute("select bartleby.send('jobs', '1')")
        with refused("ZB009", "one of pgmq"):
            conn.execute("""select bartleby.send_many('jobs', '[{"payload": 1}]')""")

    @pytest.mark.parametrize("policy", [{"dead_letter_to": "x"}, {"max_attempts": 0}, {"nonsense": 1}])
    def test_a_bad_policy(self, conn: Connection, policy: Row) -> None:
        conn.execute("select pgmq.create('jobs')")
        with refused("ZB003"):
            attach(conn, **policy)
        assert rows(conn, "select * from bartleby.queues") == []

    def test_without_a_sibling(self, conn: Connection) -> None:
        conn.execute("select pgmq.create('jobs')")
        attach(conn, sibling=False, max_attempts=1)
        put(conn, 1)
        read(conn)
        read(conn)
        assert len(letters(conn)) == 1
        assert value(conn, "select to_regclass('pgmq.q_jobs_dlq')") is None

    def test_what_is_in_the_sibling_already(self, conn: Connection) -> None:
        for queue in (QUEUE, SIBLING):
            conn.execute("select pgmq.create(%s)", [queue])
        put(conn, {"n": 1}, {"n": 2}, queue=SIBLING)
        attach(conn)
        assert [(each["payload"], each["status"]) for each in letters(conn)] == [({"n": 1}, "dead"), ({"n": 2}, "dead")]
        attach(conn)
        assert len(letters(conn)) == 2
        agrees(conn)

    def test_a_paused_queue_is_not_read(self, conn: Connection) -> None:
        made(conn)
        put(conn, 1)
        conn.execute("select bartleby.pause_queue('jobs')")
        assert read(conn) == []
        conn.execute("select bartleby.resume_queue('jobs')")
        assert len(read(conn)) == 1

    def test_detached_it_is_as_it_was(self, conn: Connection) -> None:
        made(conn, max_attempts=1)
        put(conn, 1, 2)
        read(conn, qty=1)
        read(conn, qty=1)
        assert (inside(conn), inside(conn, SIBLING)) == ([2], [1])
        conn.execute("select bartleby.drop_queue('jobs', true)")
        assert (inside(conn), inside(conn, SIBLING)) == ([2], [1])
        for table in ("pgmq_queue", "pgmq_message", "dead_letter", "queue"):
            assert rows(conn, f"select * from bartleby.{table}") == [], table
