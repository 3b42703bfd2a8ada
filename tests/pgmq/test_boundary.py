"""The dispatch boundary: pgmq_read() returns no message that was read more often than the policy allows."""

from collections.abc import Callable
from functools import partial

from tests.kit.commands import Done
from tests.kit.pgmq import QUEUE, SIBLING, agrees, attach, fail, inside, letters, made, put, read
from tests.kit.refusals import check_refusals
from tests.kit.sql import Connection, Row, refused, row, rows, value


def test_letter_has_the_evidence(conn: Connection) -> None:
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


def test_late_report_of_a_failure_is_refused(conn: Connection) -> None:
    made(conn)
    (msg_id,) = put(conn, 1)
    read(conn)
    read(conn)
    with refused("ZB006", "read again since"):
        fail(conn, msg_id, read_ct=1)
    assert fail(conn, msg_id, read_ct=2)
    conn.execute("select bartleby.pgmq_reject(%s, %s, 'unacceptable')", [QUEUE, msg_id])
    with refused("ZB006", "no message"):
        fail(conn, msg_id)


def test_message_without_a_payload_dies(conn: Connection) -> None:
    made(conn, max_attempts=1)
    conn.execute("select pgmq.send(%s, null)", [QUEUE])
    read(conn)
    read(conn)
    assert [each["payload"] for each in letters(conn)] == [None]
    assert value(conn, "select payload = 'null' from bartleby.dead_letters") is True


class TestAttach:
    def test_refused_attachments(self, conn: Connection) -> None:
        check_refusals(
            [
                ("no queue", partial(attach, conn), "ZB008", "pgmq has no queue 'jobs'"),
                ("not attached", partial(read, conn), "ZB001", "no queue of pgmq is attached"),
                ("null", partial(conn.execute, "select bartleby.pgmq_attach(null)"), "ZB008", "no queue null"),
                ("read null", partial(conn.execute, "select * from bartleby.pgmq_read(null, 1, 1)"), "ZB001", ""),
            ]
        )
        conn.execute("select pgmq.create('jobs')")
        bad: list[Row] = [{"dead_letter_to": "x"}, {"max_attempts": 0}, {"nonsense": 1}]
        check_refusals((str(policy), partial(attach, conn, **policy), "ZB003", "") for policy in bad)
        assert rows(conn, "select * from bartleby.queues") == []
        conn.execute("select pgmq.create('ours')")
        conn.execute("select bartleby.create_queue('ours')")
        long = "q" * 46
        conn.execute("select pgmq.create(%s)", [long])
        attach(conn)
        put(conn, 1, queue=SIBLING)
        conn.execute("select pgmq.create('jobs_dlq_dlq')")
        many = """select bartleby.send_many('jobs', '[{"payload": 1}]')"""
        check_refusals(
            [
                ("our name", partial(attach, conn, "ours"), "ZB009", "called 'ours' already"),
                ("sent", partial(conn.execute, "select bartleby.send('jobs', '1')"), "ZB009", "one of pgmq"),
                ("sent many", partial(conn.execute, many.encode()), "ZB009", "one of pgmq"),
                ("long name", partial(attach, conn, long), "ZB008", "cannot make the sibling"),
                ("a sibling", partial(attach, conn, SIBLING, sibling=False), "ZB009", "is one of 'jobs'"),
            ]
        )
        attach(conn, long, sibling=False)
        assert inside(conn, SIBLING) == [1]

    def test_queue_is_attached_by_command(self, conn: Connection, bartleby: Callable[..., Done]) -> None:
        missing = bartleby("queues", "attach", QUEUE)
        assert (missing.code != 0, "pgmq has no queue 'jobs'" in missing.err, "pgmq.create" in missing.err) == (
            True,
        ) * 3
        for queue in (QUEUE, SIBLING):
            conn.execute("select pgmq.create(%s)", [queue])
        put(conn, 1, 2, queue=SIBLING)
        done = bartleby("queues", "attach", QUEUE, "--policy", '{"max_attempts": 7}')
        assert done.out == "queue jobs of pgmq is attached; dead letters: 2\n", done.err
        assert value(conn, "select max_attempts from bartleby.queues") == 7
        assert rows(conn, "select * from bartleby.drift()") == []
        agrees(conn)

    def test_attached_queue_is_no_sibling(self, conn: Connection) -> None:
        for name in (SIBLING, QUEUE):
            conn.execute("select pgmq.create(%s)", [name])
        attach(conn, SIBLING)
        put(conn, 1, queue=SIBLING)
        with refused("ZB009", "is one of 'jobs_dlq'"):
            attach(conn)
        assert letters(conn) == []
        attach(conn, sibling=False)

    def test_capitals_make_no_difference(self, conn: Connection) -> None:
        conn.execute("select pgmq.create('Jobs')")
        attach(conn, "Jobs", max_attempts=1)
        put(conn, 1, queue="Jobs")
        assert len(read(conn, queue="Jobs")) == 1
        assert read(conn, queue="jobs") == []
        agrees(conn)

    def test_paused_queue_is_not_read(self, conn: Connection) -> None:
        made(conn)
        put(conn, 1)
        conn.execute("select bartleby.pause_queue('jobs')")
        assert read(conn) == []
        conn.execute("select bartleby.resume_queue('jobs')")
        assert len(read(conn)) == 1

    def test_detached_queue_is_as_it_was(self, conn: Connection) -> None:
        made(conn, max_attempts=1)
        put(conn, 1, 2)
        read(conn, qty=1)
        read(conn, qty=1)
        assert (inside(conn), inside(conn, SIBLING)) == ([2], [1])
        conn.execute("select bartleby.drop_queue('jobs', true)")
        assert (inside(conn), inside(conn, SIBLING)) == ([2], [1])
        for table in ("pgmq_queue", "pgmq_message", "dead_letter", "queue"):
            assert rows(conn, f"select * from bartleby.{table}") == [], table
