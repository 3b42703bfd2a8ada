"""Decisions of the design for dead letters in pgmq that need a story of their own. tests/pgmq proves the others."""

from datetime import timedelta

import pytest

from tests.kit.pgmq import QUEUE, SIBLING, attach, fail, inside, made, put, read, watch
from tests.kit.sql import Connection, claim, column, row, rows, value

JOB = {"step": "diarize", "recording_id": 7}
DIAGNOSTICS = "select * from bartleby.pgmq_letters order by dead_at desc"
IN_SIGHT = "update pgmq.q_jobs set vt = clock_timestamp()"


@pytest.fixture(scope="session")
def template(pgmq_template: str) -> str:
    return pgmq_template


def delete(conn: Connection, msg_id: int, queue: str = QUEUE) -> None:
    assert value(conn, "select pgmq.delete(%s, %s::bigint)", queue, msg_id) is True


@pytest.mark.seed("pgmq-3", "pgmq-7", "pgmq-8", "pgmq-9", "pgmq-20", "pgmq-24", "pgmq-25", "pgmq-27", "pgmq-28")
@pytest.mark.seed("pgmq-29", "pgmq-32", "pgmq-36", "pgmq-38", "pgmq-39", "pgmq-42", "pgmq-45", "pgmq-52", "pgmq-53")
@pytest.mark.seed("pgmq-68", "pgmq-69")
def test_sixth_read_promotes_what_failed_five_times(conn: Connection) -> None:
    conn.execute("create table recordings as values (7, 'melville'), (9, 'hawthorne')")
    made(conn, backoff="exponential")
    [msg_id] = put(conn, JOB)
    enqueued = value(conn, "select enqueued_at from pgmq.q_jobs")
    for attempt in range(1, 6):
        conn.execute(IN_SIGHT)
        assert [each["read_ct"] for each in read(conn, vt=60)] == [attempt]
        assert fail(conn, msg_id, "the recording is deleted") is not None
        assert (inside(conn), rows(conn, DIAGNOSTICS)) == ([JOB], [])
    watch(conn)
    conn.execute("select count(*) from bartleby.prune()")
    with conn.transaction(force_rollback=True):
        assert column(conn, "select read_ct from pgmq.read(%s, 0, 10)", QUEUE) == [6]
    assert rows(conn, DIAGNOSTICS) == []
    assert read(conn) == []
    found = row(conn, DIAGNOSTICS)
    assert (found["queue_name"], found["original_msg_id"], found["payload"]) == (QUEUE, msg_id, JOB)
    assert (found["read_ct"], found["last_error"]) == (6, "the recording is deleted")
    assert found["first_seen"] == enqueued < found["dead_at"]
    assert row(conn, "select attempts, reason from bartleby.dead_letters") == {"attempts": 5, "reason": "exhausted"}
    assert (inside(conn), rows(conn, "select * from pgmq.a_jobs")) == ([], [])
    copied = "select message, headers, read_ct, ctid::text from pgmq.q_jobs_dlq"
    copy = row(conn, copied)
    assert (copy["message"], copy["read_ct"]) == (JOB, 0)
    assert copy["headers"] == {"x-bartleby-message-id": found["message_id"]}
    assert (read(conn), watch(conn)) == ([], 0)
    assert (row(conn, copied), row(conn, DIAGNOSTICS)) == (copy, found)
    joined = "bartleby.pgmq_letters l join recordings r on r.column1 = (l.payload ->> 'recording_id')::bigint"
    assert column(conn, f"select r.column2 from {joined} where l.payload ->> 'step' = 'diarize'") == ["melville"]


@pytest.mark.seed("pgmq-2", "pgmq-6", "pgmq-26", "pgmq-31", "pgmq-41", "pgmq-65")
def test_unreported_failure_comes_back_every_minute_and_is_not_run_by_a_worker_after_the_fifth(
    conn: Connection,
) -> None:
    made(conn)
    put(conn, JOB)
    for _ in range(5):
        before = value(conn, "select clock_timestamp()")
        [job] = read(conn, vt=60)
        assert before + timedelta(minutes=1) <= job["vt"]
        assert read(conn) == rows(conn, "select * from bartleby.pgmq_message") == rows(conn, DIAGNOSTICS) == []
        conn.execute(IN_SIGHT)
    assert claim(conn, queue=QUEUE).messages == []
    found = row(conn, DIAGNOSTICS)
    assert (inside(conn), inside(conn, SIBLING), found["read_ct"], found["last_error"]) == ([], [JOB], 6, None)
    last = row(conn, "select outcome, rule from bartleby.attempts")
    assert last == {"outcome": "lost", "rule": "nobody told what became of it"}


@pytest.mark.seed("pgmq-6", "pgmq-16", "pgmq-40", "pgmq-66", "pgmq-71")
def test_message_that_succeeds_leaves_no_trace(conn: Connection) -> None:
    made(conn)
    first, second = put(conn, JOB, "fails for a short time")
    read(conn, qty=1)
    assert {each["msg_id"]: each["read_ct"] for each in read(conn)} == {first: 2, second: 1}
    delete(conn, first)
    for table in ("pgmq_message", "dead_letter", "attempt", "event"):
        assert rows(conn, f"select * from bartleby.{table}") == [], table
    fail(conn, second, "timeout")
    assert [each["msg_id"] for each in read(conn)] == [second]
    delete(conn, second)
    watch(conn)
    assert (read(conn), inside(conn, SIBLING), rows(conn, DIAGNOSTICS)) == ([], [], [])
    assert rows(conn, "select * from bartleby.pgmq_message") == []


@pytest.mark.seed("pgmq-10", "pgmq-12", "pgmq-19", "pgmq-54", "pgmq-72")
def test_replay_with_the_functions_of_pgmq_is_noticed(conn: Connection) -> None:
    made(conn, max_attempts=1)
    sent = put(conn, "again", "done")
    read(conn)
    for msg_id in sent:
        fail(conn, msg_id, "bad audio")
    assert read(conn) == []
    metrics = "select queue_name, queue_length, total_messages from pgmq.metrics_all() order by queue_name"
    assert [tuple(each.values()) for each in rows(conn, metrics)] == [(QUEUE, 0, 2), (SIBLING, 2, 2)]
    for each in rows(conn, "select * from pgmq.read(%s, 30, 100)", SIBLING):
        put(conn, each["message"])
        delete(conn, each["msg_id"], SIBLING)
    put(conn, "mine", queue=SIBLING)
    assert (inside(conn), inside(conn, SIBLING), watch(conn)) == (["again", "done"], ["mine"], 2)
    for found in rows(conn, "select status, replayed_by, replay_reason from bartleby.dead_letters"):
        assert (found["status"], found["replayed_by"]) == ("replayed", "pgmq")
        assert "by hand" in found["replay_reason"]
    _, done = read(conn)
    delete(conn, done["msg_id"])
    watch(conn)
    assert read(conn) == []
    again, resolved = rows(conn, "select status, cycle, failure_history from bartleby.dead_letters order by message_id")
    assert (again["status"], again["cycle"], resolved["status"], resolved["cycle"]) == ("dead", 2, "resolved", 1)
    [history] = again["failure_history"]
    assert (history["error"], history["replayed_by"]) == ("bad audio", "pgmq")
    assert inside(conn, SIBLING) == ["mine", "again"]


@pytest.mark.seed("pgmq-13", "pgmq-14", "pgmq-49")
def test_each_queue_has_its_own_sibling(conn: Connection) -> None:
    schema = "select relname from pg_class where relnamespace = 'bartleby'::regnamespace and relkind in ('r', 'p', 'v')"
    before = column(conn, f"{schema} order by 1")
    for name in (QUEUE, "mail"):
        conn.execute("select pgmq.create(%s)", [name])
        attach(conn, name, max_attempts=1)
        put(conn, f"of {name}", queue=name)
        assert [len(read(conn, queue=name)) for _ in range(2)] == [1, 0]
    queues = column(conn, "select queue_name::text from pgmq.list_queues() order by 1")
    assert (queues, column(conn, f"{schema} order by 1")) == ([QUEUE, SIBLING, "mail", "mail_dlq"], before)
    assert (inside(conn, SIBLING), inside(conn, "mail_dlq")) == (["of jobs"], ["of mail"])
    found = [(each["queue_name"], each["sibling"], each["payload"]) for each in rows(conn, DIAGNOSTICS)]
    assert found == [("mail", "mail_dlq", "of mail"), (QUEUE, SIBLING, "of jobs")]


@pytest.mark.seed("pgmq-23")
def test_message_of_a_new_queue_is_another_one_though_it_has_the_same_id(conn: Connection) -> None:
    made(conn, max_attempts=2)
    [old] = put(conn, "old")
    read(conn)
    fail(conn, old, "bad audio")
    conn.execute("select pgmq.drop_queue(%s)", [QUEUE])
    conn.execute("select pgmq.create(%s)", [QUEUE])
    assert put(conn, "new") == [old]
    assert [len(read(conn)) for _ in range(3)] == [1, 1, 0]
    found = rows(conn, "select original_msg_id, payload, last_error from bartleby.pgmq_letters")
    assert found == [{"original_msg_id": old, "payload": "new", "last_error": None}]


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
