"""The dispatch boundary: pgmq_read() returns no message that was read more often than the policy allows."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest

from tests.kit.commands import Done
from tests.kit.pgmq import QUEUE, SIBLING, agrees, attach, fail, inside, letters, made, put, read, watch
from tests.kit.refusals import check_refusals
from tests.kit.sql import Connect, Connection, Row, refused, row, rows, value


@pytest.mark.seed("pgmq-1", "pgmq-2", "pgmq-3", "pgmq-6", "pgmq-7", "pgmq-8", "pgmq-9", "pgmq-11", "pgmq-20", "pgmq-21")
@pytest.mark.seed("pgmq-22", "pgmq-24", "pgmq-25", "pgmq-27", "pgmq-28", "pgmq-29", "pgmq-30", "pgmq-31", "pgmq-32")
@pytest.mark.seed("pgmq-33", "pgmq-36", "pgmq-38", "pgmq-39", "pgmq-42", "pgmq-45", "pgmq-52", "pgmq-53", "pgmq-65")
@pytest.mark.seed("pgmq-68", "pgmq-69", "pgmq-70")
def test_letter_has_the_evidence_and_an_unreported_attempt_is_lost(conn: Connection) -> None:
    made(conn, max_attempts=2)
    reported, silent = put(conn, 1, 2)
    enqueued = value(conn, "select min(enqueued_at) from pgmq.q_jobs")
    details = {"traceback": "here", "fingerprint": "f", "worker": "me", "handler": "charge"}
    read(conn)
    assert fail(conn, reported, "no 1", "KeyError", **details)
    assert fail(conn, silent, "the only word", "KeyError", **details)
    read(conn)
    assert fail(conn, reported, "no 2", "KeyError", **details)
    put(conn, 3)
    assert letters(conn) == []
    assert [each["message"] for each in read(conn, qty=1)] == [3], "live ones behind dead ones are found"
    assert (inside(conn), inside(conn, SIBLING)) == ([3], [1, 2])
    letter, other = letters(conn)
    assert (letter["error"], letter["error_type"], letter["traceback"], letter["fingerprint"], letter["worker"]) == (
        "no 2", "KeyError", "here", "f", "me",
    )  # fmt: skip
    assert (other["error"], other["attempts"]) == ("the only word", 2)
    attempts = rows(conn, "select * from bartleby.attempts order by message_id, attempt")
    assert [(each["attempt"], each["outcome"], each["verdict"], each["error"], each["rule"]) for each in attempts] == [
        (1, "failed", "retry", "no 1", "attempt 1 of 2"), (2, "failed", "dead", "no 2", "attempt 2 of 2"),
        (1, "failed", "retry", "the only word", "attempt 1 of 2"),
        (2, "lost", "dead", None, "nobody told what became of it"),
    ]  # fmt: skip
    assert letter["first_failed_at"] == attempts[0]["failed_at"]
    group = row(conn, "select * from bartleby.groups")
    assert (group["title"], group["dead"]) == ("KeyError: no 2", 2)
    shown = row(conn, "select * from bartleby.pgmq_letters where original_msg_id = %s", reported)
    assert (shown["queue_name"], shown["sibling"], shown["payload"]) == (QUEUE, SIBLING, 1)
    assert (shown["read_ct"], shown["last_error"]) == (3, "no 2")
    assert enqueued == shown["first_seen"] < shown["dead_at"]
    copies = rows(conn, "select headers, read_ct from pgmq.q_jobs_dlq order by msg_id")
    assert copies == [
        {"headers": {"x-bartleby-message-id": each["message_id"]}, "read_ct": 0} for each in letters(conn)
    ]
    assert (watch(conn), letters(conn), rows(conn, "select * from pgmq.a_jobs")) == (0, [letter, other], [])
    agrees(conn)


@pytest.mark.seed("pgmq-43")
def test_rejected_message_is_dead_at_once_and_late_reports_are_refused(conn: Connection) -> None:
    made(conn)
    (msg_id,) = put(conn, 1)
    read(conn)
    read(conn)
    with refused("ZB006", "read again since"):
        fail(conn, msg_id, read_ct=1)
    assert fail(conn, msg_id, read_ct=2)
    conn.execute("select bartleby.pgmq_reject(%s, %s, 'unacceptable', 'no such country')", [QUEUE, msg_id])
    (letter,) = letters(conn)
    assert (letter["reason"], letter["error"], letter["attempts"]) == ("unacceptable", "no such country", 2)
    assert (inside(conn), inside(conn, SIBLING)) == ([], [1])
    with refused("ZB006", "no message"):
        fail(conn, msg_id)


class TestAttach:
    def test_bad_attachments_are_refused(self, conn: Connection) -> None:
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
        conn.execute("select pgmq.create('jobs_dlq_dlq'), pgmq.create('mail'), pgmq.create('mail_dlq')")
        attach(conn, "mail_dlq", sibling=False)
        many = """select bartleby.send_many('jobs', '[{"payload": 1}]')"""
        check_refusals(
            [
                ("our name", partial(attach, conn, "ours"), "ZB009", "called 'ours' already"),
                ("sent", partial(conn.execute, "select bartleby.send('jobs', '1')"), "ZB009", "one of pgmq"),
                ("sent many", partial(conn.execute, many.encode()), "ZB009", "one of pgmq"),
                ("long name", partial(attach, conn, long), "ZB008", "cannot make the sibling"),
                ("attached", partial(attach, conn, "mail"), "ZB009", "is one of 'mail_dlq'"),
                ("a sibling", partial(attach, conn, SIBLING, sibling=False), "ZB009", "is one of 'jobs'"),
            ]
        )
        attach(conn, long, sibling=False)
        assert inside(conn, SIBLING) == [1]

    @pytest.mark.seed("pgmq-73")
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
        attach(conn)
        assert [(each["payload"], each["status"]) for each in letters(conn)] == [(1, "dead"), (2, "dead")]
        assert rows(conn, "select * from bartleby.drift()") == []
        agrees(conn)

    def test_capitals_make_no_difference(self, conn: Connection) -> None:
        conn.execute("select pgmq.create('Jobs')")
        attach(conn, "Jobs", max_attempts=1)
        put(conn, 1, queue="Jobs")
        assert len(read(conn, queue="Jobs")) == 1
        assert read(conn, queue="jobs") == []
        agrees(conn)

    @pytest.mark.seed("pgmq-17")
    def test_queue_works_without_a_sibling(self, conn: Connection) -> None:
        conn.execute("select pgmq.create('jobs')")
        attach(conn, sibling=False, max_attempts=1)
        put(conn, 1)
        conn.execute("select pgmq.send(%s, null)", [QUEUE])
        read(conn)
        read(conn)
        assert [each["payload"] for each in letters(conn)] == [1, None]
        assert value(conn, "select to_regclass('pgmq.q_jobs_dlq')") is None
        assert (watch(conn), [each["status"] for each in letters(conn)]) == (0, ["dead", "dead"])


@pytest.mark.seed("pgmq-16", "pgmq-40", "pgmq-64", "pgmq-66", "pgmq-67", "pgmq-71")
def test_failed_message_is_hidden_for_the_backoff_and_leaves_no_trace_when_it_is_done(conn: Connection) -> None:
    made(conn, backoff="fixed", base=60, jitter="none")
    (msg_id,) = put(conn, 1)
    read(conn)
    for table in ("pgmq_message", "dead_letter", "attempt", "event"):
        assert rows(conn, f"select * from bartleby.{table}") == [], table
    until = fail(conn, msg_id)
    assert value(conn, "select retry_at - failed_at from bartleby.attempts") == timedelta(seconds=60)
    assert read(conn) == []
    assert value(conn, "select vt from pgmq.q_jobs") == until
    conn.execute("select pgmq.delete(%s, %s::bigint)", [QUEUE, msg_id])
    watch(conn)
    assert rows(conn, "select * from bartleby.pgmq_message") == letters(conn) == []


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.seed("pgmq-34", "pgmq-35")
def test_two_readers_never_promote_the_same_message(conn: Connection, connect: Connect, end: str) -> None:
    made(conn, max_attempts=1)
    put(conn, 1, 2)
    read(conn)
    one, two = connect(autocommit=False), connect()
    two.execute("set statement_timeout = '60s'")
    assert read(one) == []  # buries both, and has not committed yet
    assert read(two) == []  # does not wait, and finds nothing
    assert letters(two) == []
    getattr(one, end)()
    assert read(two) == []
    assert [each["payload"] for each in letters(conn)] == [1, 2]
    agrees(conn)


@pytest.mark.seed("pgmq-50", "pgmq-51")
def test_reading_is_unchanged_while_nothing_is_stuck(conn: Connection) -> None:
    made(conn)
    put(conn, *range(20))
    written = "select sum(n_tup_ins + n_tup_upd + n_tup_del) from pg_stat_xact_user_tables where schemaname = %s"
    read_by, columns = {}, {}
    for function in ("pgmq.read", "bartleby.pgmq_read"):
        with conn.transaction(force_rollback=True):
            before = value(conn, written, "bartleby")
            read_by[function] = rows(conn, f"select * from {function}(%s, 60, 20)", QUEUE)
            assert value(conn, written, "bartleby") == before
            found = conn.execute(f"select * from {function}(%s, 60, 20)".encode(), [QUEUE]).description
        columns[function] = {each.name: each.type_code for each in found or ()}
    theirs, ours = columns.values()
    assert {name: theirs.get(name) for name in ours} == ours
    assert theirs.keys() - ours.keys() == {"last_read_at"}
    same = ("msg_id", "read_ct", "enqueued_at", "message", "headers")
    first, second = ([[each[name] for name in same] for each in found] for found in read_by.values())
    assert first == second
    assert [each["message"] for each in read_by["bartleby.pgmq_read"]] == list(range(20))
