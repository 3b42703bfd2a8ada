"""Dead letters for pgmq.

A check at the dispatch boundary ends the retries of a pgmq queue. A message that was read too often goes to a sibling
queue, a row of diagnostics describes it, and an operator replays it. Bartleby is attached to that queue; messages,
producers and steps stay as they are.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from bartleby import Client, dev
from bartleby.testing import Clock
from tests.kit.commands import Done
from tests.kit.database import database_dsn, install
from tests.kit.pgmq import QUEUE as JOBS
from tests.kit.pgmq import SIBLING as DLQ
from tests.kit.pgmq import attach, fail, inside, watch
from tests.kit.sql import Row, claim, column, create, refused, row, rows, send, stats, value
from tests.pgmq.conftest import SCRIPT
from tests.stories.kit import Connection, fail_one, ledger

JOB = {"step": "diarize", "recording_id": 7}
DIAGNOSTICS = "select * from bartleby.pgmq_letters order by dead_at desc"
EVENTS = "select type from bartleby.events"
COUNTED = "select total_messages from pgmq.metrics(%s)"
MONTH, MINUTE = timedelta(days=30), timedelta(minutes=1)
APP = f"""
from bartleby import Bartleby, Message, Terminal

app = Bartleby()


@app.handler("{JOBS}")
def step(message: Message) -> None:
    print("ran", message.payload, message.attempt, flush=True)
    if message.payload == "deleted":
        raise Terminal("the recording is deleted")
    raise ValueError("bad audio")
"""
Run = Callable[..., Done]


@pytest.fixture(scope="session")  # once in a process, which may come back to these tests
def template(server: dev.Server, admin: Connection) -> str:
    """Databases with pgmq, by the SQL that its Python package ships."""
    name = "bartleby_seed_template"
    admin.execute(f"create database {name}".encode())
    with psycopg.connect(database_dsn(server, name), autocommit=True) as conn:
        conn.execute(SCRIPT.read_bytes())
    install(database_dsn(server, name))
    return name


@pytest.fixture
def q(conn: Connection) -> Connection:
    """The queue of the design, attached with the default policy."""
    conn.execute("select pgmq.create(%s)", [JOBS])
    attach(conn)
    return conn


def put(conn: Connection, payload: Any = JOB, queue: str = JOBS) -> int:
    return int(value(conn, "select pgmq.send(%s, %s::jsonb)", queue, Jsonb(payload)))


def tick(conn: Connection, vt: int = 60, qty: int = 10, queue: str = JOBS) -> list[Row]:
    """Read as the dispatcher does."""
    return rows(conn, "select * from bartleby.pgmq_read(%s, %s, %s)", queue, vt, qty)


def later(conn: Connection, seconds: float = 3600) -> None:
    """Let time pass for the hidden messages of the queue."""
    conn.execute("update pgmq.q_jobs set vt = vt - make_interval(secs => %s)", [seconds])


def tries(conn: Connection, times: int = 5, error: str | None = None) -> None:
    """Dispatch every visible message that many times; no step deletes it."""
    for _ in range(times):
        for each in tick(conn):
            if error is not None:
                fail(conn, each["msg_id"], error)
        later(conn)


def die(conn: Connection, *payloads: Any, error: str | None = None) -> list[int]:
    """Let messages fail until they are dead; return their ids in pgmq."""
    sent = [put(conn, each) for each in payloads or (JOB,)]
    tries(conn, error=error)
    assert tick(conn) == []
    return sent


def delete(conn: Connection, msg_id: int, queue: str = JOBS) -> None:
    assert value(conn, "select pgmq.delete(%s, %s::bigint)", queue, msg_id) is True


def diagnostics(conn: Connection) -> Row:
    return row(conn, DIAGNOSTICS)


def status(conn: Connection) -> list[str]:
    return column(conn, "select status from bartleby.dead_letters order by message_id")


def act(conn: Connection, verb: str) -> list[Any]:
    """Run an operator's verb on every letter."""
    ids = "array(select message_id from bartleby.dead_letters)"
    return column(conn, f"select bartleby.{verb}({ids}, 'ana', 'the cause is fixed')")


def prune(conn: Connection) -> None:
    conn.execute("select bartleby.prune()")


def queues(conn: Connection) -> list[str]:
    return column(conn, "select queue_name::text from pgmq.list_queues() order by 1")


def run(bartleby: Run, *words: str) -> Done:
    done = bartleby(*words)
    assert done.code == 0, done.err
    return done


def working(bartleby: Run, folder: Path) -> list[str]:
    """Run the worker until nothing is left to do; return what its handler printed."""
    (folder / "pipeline.py").write_text(APP)
    done = run(bartleby, "work", "pipeline:app", "--pgmq", JOBS, "--until-idle")
    return [each for each in done.out.splitlines() if each.startswith("ran")]


@pytest.mark.seed("pgmq-2", "pgmq-3", "pgmq-7", "pgmq-8", "pgmq-9", "pgmq-20", "pgmq-24", "pgmq-27", "pgmq-28")
@pytest.mark.seed("pgmq-32", "pgmq-36", "pgmq-38", "pgmq-39", "pgmq-42", "pgmq-45", "pgmq-68")
def test_sixth_read_promotes_what_failed_five_times(q: Connection, clock: Clock) -> None:
    assert stats(q, JOBS)["max_attempts"] == 5
    msg_id = put(q)
    enqueued = value(q, "select enqueued_at from pgmq.q_jobs")
    for attempt in range(1, 6):
        assert [each["read_ct"] for each in tick(q)] == [attempt]
        assert fail(q, msg_id, "the recording is deleted") is not None
        assert (inside(q), rows(q, DIAGNOSTICS)) == ([JOB], [])
        later(q)
    clock.advance(60)
    assert tick(q) == []
    found = diagnostics(q)
    assert (found["queue_name"], found["original_msg_id"], found["payload"]) == (JOBS, msg_id, JOB)
    assert (found["read_ct"], found["last_error"]) == (6, "the recording is deleted")
    assert (found["first_seen"], found["dead_at"]) == (enqueued, clock.now())
    assert enqueued < clock.now()
    assert row(q, "select attempts, reason from bartleby.dead_letters") == {"attempts": 5, "reason": "exhausted"}
    assert (inside(q), rows(q, "select * from pgmq.a_jobs")) == ([], [])
    copied = "select message, headers, read_ct, ctid::text from pgmq.q_jobs_dlq"
    copy = row(q, copied)
    assert (copy["message"], copy["read_ct"]) == (JOB, 0)
    assert copy["headers"] == {"x-bartleby-message-id": found["message_id"]}
    for _ in range(5):
        assert tick(q) == []
        watch(q)
    assert (row(q, copied), diagnostics(q), value(q, COUNTED, DLQ)) == (copy, found, 1)


@pytest.mark.seed("pgmq-6", "pgmq-16", "pgmq-40", "pgmq-66", "pgmq-71")
def test_message_that_succeeds_leaves_no_trace(q: Connection) -> None:
    first, second = put(q), put(q)
    tick(q, qty=1)
    later(q)
    assert {each["msg_id"]: each["read_ct"] for each in tick(q)} == {first: 2, second: 1}
    q.execute("update pgmq.q_jobs set read_ct = 3, vt = clock_timestamp()")
    assert [each["read_ct"] for each in tick(q)] == [4, 4]
    later(q)
    for job in tick(q):
        delete(q, job["msg_id"])
    for table in ("pgmq_message", "dead_letter", "attempt", "event"):
        assert rows(q, f"select * from bartleby.{table}") == [], table
    later(q)
    assert (tick(q), value(q, COUNTED, DLQ)) == ([], 0)
    put(q, "fails for a short time")
    tries(q, 2, error="timeout")
    [job] = tick(q)
    delete(q, job["msg_id"])
    watch(q)
    assert (inside(q), inside(q, DLQ), rows(q, DIAGNOSTICS)) == ([], [], [])


@pytest.mark.seed("pgmq-2", "pgmq-6", "pgmq-31", "pgmq-41", "pgmq-64", "pgmq-65")
def test_unreported_failure_comes_back_every_minute_for_five_minutes(q: Connection) -> None:
    msg_id = put(q)
    for _ in range(5):
        before = value(q, "select clock_timestamp()")
        [job] = tick(q, vt=60)
        assert job["msg_id"] == msg_id
        assert before + MINUTE <= job["vt"] <= value(q, "select clock_timestamp()") + MINUTE
        later(q, 50)
        assert tick(q) == []
        later(q, 10)
        assert (rows(q, "select * from bartleby.pgmq_message"), rows(q, DIAGNOSTICS)) == ([], [])
    assert (tick(q), inside(q), diagnostics(q)["last_error"]) == ([], [], None)
    last = ledger(q, diagnostics(q)["message_id"])[-1]
    assert (last["outcome"], last["rule"]) == ("lost", "nobody told what became of it")


@pytest.mark.seed("pgmq-64", "pgmq-67")
def test_reported_failures_back_off_by_the_policy(q: Connection, clock: Clock) -> None:
    assert row(q, "select backoff, jitter from bartleby.queues") == {"backoff": "exponential", "jitter": "full"}
    fixed: dict[str, Any] = {"backoff": "fixed", "base": "60 s"}
    for policy, expected in (({}, [1, 2, 4, 8]), (fixed, [60, 60, 60, 60])):
        attach(q, jitter="none", **policy)
        msg_id = put(q)
        waits = []
        for _ in expected:
            tick(q)
            waits.append((fail(q, msg_id) - clock.now()).total_seconds())
            later(q)
        assert waits == expected
        delete(q, msg_id)


@pytest.mark.seed("pgmq-30", "pgmq-70")
def test_readers_without_shared_state_count_to_five_together(q: Connection, connect: Callable[..., Connection]) -> None:
    msg_id = put(q)
    for n in range(5):
        reader = connect()
        assert [each["read_ct"] for each in tick(reader)] == [n + 1]
        if n % 2:
            fail(reader, msg_id, f"failure {n + 1}")
        reader.close()
        later(q)
    assert tick(q) == []
    assert row(q, "select attempts, error from bartleby.dead_letters") == {"attempts": 5, "error": "failure 4"}
    assert diagnostics(q)["last_error"] == "failure 4"


@pytest.mark.seed("pgmq-69")
def test_message_is_hidden_between_its_last_failure_and_its_promotion(q: Connection) -> None:
    silent = put(q, "silent")
    tries(q, 4)
    assert [each["msg_id"] for each in tick(q, vt=60)] == [silent]
    reported = put(q, "reported")
    for _ in range(5):
        assert [each["msg_id"] for each in tick(q)] == [reported]
        fail(q, reported)
        q.execute("update pgmq.q_jobs set vt = clock_timestamp() where msg_id = %s and read_ct < 5", [reported])
    assert (tick(q), value(q, "select read_ct from pgmq.q_jobs")) == ([], 5)
    assert diagnostics(q)["payload"] == "reported"
    later(q, 60)
    assert (tick(q), len(rows(q, DIAGNOSTICS))) == ([], 2)


@pytest.mark.seed("pgmq-26", "pgmq-37", "pgmq-43", "pgmq-44")
def test_rejections_and_workers_use_the_same_boundary(
    q: Connection, bartleby: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    msg_id = put(q)
    tick(q)
    q.execute("select bartleby.pgmq_reject(%s, %s, 'unacceptable', 'the recording is deleted')", [JOBS, msg_id])
    found = diagnostics(q)
    assert (found["read_ct"], found["last_error"]) == (1, "the recording is deleted")
    assert (inside(q), inside(q, DLQ)) == ([], [JOB])
    put(q, "poison")
    tries(q, error="bad audio")
    put(q, "deleted")
    assert working(bartleby, tmp_path) == ["ran deleted 1"]
    letters = "select reason, attempts, error from bartleby.dead_letters where payload = to_jsonb(%s::text)"
    assert tuple(row(q, letters, "poison").values()) == ("exhausted", 5, "bad audio")
    assert tuple(row(q, letters, "deleted").values()) == ("terminal", 1, "the recording is deleted")
    assert inside(q, DLQ) == [JOB, "poison", "deleted"]
    attach(q, backoff="none", breaker="off")
    put(q, "noise")
    monkeypatch.setenv("BARTLEBY_PGMQ_MAX_ATTEMPTS", "2")
    assert working(bartleby, tmp_path) == ["ran noise 1", "ran noise 2"]
    assert stats(q, JOBS)["max_attempts"] == 2


@pytest.mark.seed("pgmq-1", "pgmq-4", "pgmq-18", "pgmq-29", "pgmq-52", "pgmq-53", "pgmq-57")
def test_dead_messages_are_found_and_replayed_by_what_is_in_them(q: Connection, client: Client, bartleby: Run) -> None:
    q.execute("create table recordings (id bigint, owner text)")
    q.execute("insert into recordings values (7, 'melville'), (9, 'hawthorne')")
    other, mail = {"step": "diarize", "recording_id": 8}, {"step": "mail"}
    for payload in (JOB, other, mail):
        die(q, payload, error="bad audio")
    assert (stats(q, JOBS)["dead"], column(q, "select title from bartleby.groups")) == (3, ["ValueError: bad audio"])
    assert column(q, EVENTS).count("io.bartleby.dead_letter.created") == 3
    assert [each["payload"] for each in rows(q, DIAGNOSTICS)] == [mail, other, JOB]
    by_sql = "select payload ->> 'recording_id' from bartleby.pgmq_letters where payload ->> 'step' = %s order by 1"
    assert (column(q, by_sql, "diarize"), column(q, by_sql, "mail")) == (["7", "8"], [None])
    joined = "bartleby.pgmq_letters l join recordings r on r.id = (l.payload ->> 'recording_id')::bigint"
    assert column(q, f"select r.owner from {joined}") == ["melville"]
    chosen = f"queue:{JOBS} payload.step:diarize payload.recording_id:7"
    assert [each.payload for each in client.dead_letters(chosen)] == [JOB]
    assert [each["payload"] for each in bartleby("dead", "--json").document] == [mail, other, JOB]
    why = ("--reason", "the cause is fixed")
    assert "1" in run(bartleby, "replay", chosen, *why, "--dry-run").out
    assert inside(q) == []
    [last] = [each.message_id for each in client.dead_letters("payload.step:mail")]
    for which, expected in ((chosen, ([JOB], [other, mail])), (str(last), ([JOB, mail], [other]))):
        run(bartleby, "replay", which, *why, "--yes", "--detach")
        q.execute("select count(*) from bartleby.advance_replays()")
        assert (inside(q), inside(q, DLQ)) == expected


@pytest.mark.seed("pgmq-5", "pgmq-15", "pgmq-55", "pgmq-56", "pgmq-62")
def test_sibling_follows_what_an_operator_does_with_the_letter(q: Connection, client: Client) -> None:
    die(q, error="bad audio")
    q.execute("select pgmq.archive(%s, msg_id) from pgmq.q_jobs_dlq", [DLQ])
    assert watch(q) == 1
    found = row(q, "select status, discarded_by, error, payload from bartleby.dead_letters")
    assert found == {"status": "discarded", "discarded_by": "pgmq", "error": "bad audio", "payload": JOB}
    act(q, "restore")
    assert (status(q), inside(q, DLQ)) == (["dead"], [JOB])
    q.execute("set role bartleby_operator")
    with refused("42501"):
        q.execute("delete from bartleby.dead_letter")
    act(q, "discard")
    q.execute("reset role")
    assert (list(client.dead_letters("status:dead")), status(q), inside(q, DLQ)) == ([], ["discarded"], [])
    q.execute("set role bartleby_operator")
    act(q, "restore")
    assert len(act(q, "replay")) == 1
    q.execute("reset role")
    assert (status(q), inside(q), inside(q, DLQ)) == (["replayed"], [JOB], [])
    audited = row(q, "select actor, reason from bartleby.audit_log where action = 'letter.replay'")
    assert audited == {"actor": "ana", "reason": "the cause is fixed"}
    [again] = tick(q)
    assert (again["message"], again["read_ct"]) == (JOB, 1)
    delete(q, again["msg_id"])
    watch(q)
    assert (status(q), inside(q), inside(q, DLQ)) == (["resolved"], [], [])


@pytest.mark.seed("pgmq-10", "pgmq-12", "pgmq-19", "pgmq-54", "pgmq-72")
def test_replay_with_the_functions_of_pgmq_is_noticed(q: Connection) -> None:
    die(q, "again", "done", error="bad audio")
    metrics = "select queue_name, queue_length, total_messages from pgmq.metrics_all() order by queue_name"
    assert [tuple(each.values()) for each in rows(q, metrics)] == [(JOBS, 0, 2), (DLQ, 2, 2)]
    for each in rows(q, "select * from pgmq.read(%s, 30, 100)", DLQ):
        put(q, each["message"])
        delete(q, each["msg_id"], DLQ)
    assert (inside(q), inside(q, DLQ), watch(q)) == (["again", "done"], [], 2)
    for found in rows(q, "select status, replayed_by, replay_reason from bartleby.dead_letters"):
        assert (found["status"], found["replayed_by"], "by hand" in found["replay_reason"]) == (
            "replayed",
            "pgmq",
            True,
        )
    first = column(q, "select message_id from bartleby.dead_letters order by 1")
    for each in tick(q):
        if each["message"] == "done":
            delete(q, each["msg_id"])
    later(q)
    watch(q)
    tries(q, 4)
    assert tick(q) == []
    letters = rows(q, "select message_id, status, cycle, error, failure_history from bartleby.dead_letters order by 1")
    [history] = letters[0].pop("failure_history")
    assert tuple(letters[0].values()) == (first[0], "dead", 2, None)
    assert tuple(letters[1].values()) == (first[1], "resolved", 1, "bad audio", [])
    assert (history["error"], history["attempts"], history["replayed_by"]) == ("bad audio", 5, "pgmq")
    put(q, "mine", DLQ)
    watch(q)
    assert inside(q, DLQ) == ["again", "mine"]


@pytest.mark.seed("pgmq-13", "pgmq-14", "pgmq-17", "pgmq-37", "pgmq-49", "pgmq-73")
def test_each_queue_has_its_own_sibling(conn: Connection) -> None:
    schema = "select relname from pg_class where relnamespace = 'bartleby'::regnamespace and relkind in ('r', 'p', 'v')"
    before = column(conn, f"{schema} order by 1")
    conn.execute("select pgmq.create(%s)", [JOBS])
    attach(conn, sibling=False)
    die(conn, "without a sibling")
    assert (queues(conn), diagnostics(conn)["sibling"]) == ([JOBS], None)
    act(conn, "replay")
    assert inside(conn) == ["without a sibling"]
    delete(conn, tick(conn)[0]["msg_id"])
    watch(conn)
    attach(conn)
    assert (queues(conn), column(conn, f"{schema} order by 1")) == ([JOBS, DLQ], before)
    conn.execute("select pgmq.create('billing'), pgmq.create('mail'), pgmq.create('mail_dlq')")
    put(conn, "sent by hand", "mail_dlq")
    for _ in range(2):
        for name, ceiling in ((JOBS, 5), ("billing", 5), ("mail", 1)):
            attach(conn, name, max_attempts=ceiling)
    assert queues(conn) == ["billing", "billing_dlq", JOBS, DLQ, "mail", "mail_dlq"]
    put(conn, "a letter", "mail")
    assert [len(tick(conn, 0, queue="mail")) for _ in range(2)] == [1, 0]
    die(conn)
    assert (inside(conn, "mail_dlq"), inside(conn, DLQ)) == (["sent by hand", "a letter"], [JOB])
    found = [(each["queue_name"], each["sibling"], each["payload"]) for each in rows(conn, DIAGNOSTICS)][:3]
    assert found == [(JOBS, DLQ, JOB), ("mail", "mail_dlq", "a letter"), ("mail", "mail_dlq", "sent by hand")]


@pytest.mark.seed("pgmq-11", "pgmq-21", "pgmq-22", "pgmq-25", "pgmq-33", "pgmq-61")
def test_only_the_dispatch_boundary_promotes_and_the_dead_take_no_slots(q: Connection) -> None:
    steps = [{"step": step} for step in ("transcribe", "diarize", "summarise")]
    for step in steps:
        put(q, step)
    tries(q, error="bad audio")
    watch(q)
    q.execute("select count(*) from bartleby.prune()")
    with q.transaction(force_rollback=True):
        assert [each["read_ct"] for each in rows(q, "select * from pgmq.read(%s, 0, 10)", JOBS)] == [6, 6, 6]
        assert rows(q, DIAGNOSTICS) == []
    assert rows(q, DIAGNOSTICS) == []
    for payload in ("d", "e", "f"):
        put(q, payload)
    assert [each["message"] for each in tick(q, qty=3)] == ["d", "e", "f"]
    assert (inside(q), inside(q, DLQ)) == (["d", "e", "f"], steps)
    assert value(q, "select queue_length from pgmq.metrics(%s)", JOBS) == 3
    for each in rows(q, DIAGNOSTICS):
        assert (each["payload"] in steps, each["read_ct"], each["last_error"]) == (True, 6, "bad audio")
        assert [attempt["error"] for attempt in ledger(q, each["message_id"])] == ["bad audio"] * 5
    q.execute("select pgmq.send_batch(%s, array(select to_jsonb(n) from generate_series(1, 500) n))", [JOBS])
    q.execute("update pgmq.q_jobs set read_ct = 5 where jsonb_typeof(message) = 'number'")
    assert tick(q, qty=500) == []
    assert (inside(q), inside(q, DLQ)) == (["d", "e", "f"], [*steps, *range(1, 501)])
    assert value(q, "select count(*) from bartleby.pgmq_letters") == 503


@pytest.mark.own_database
@pytest.mark.seed("pgmq-34", "pgmq-35")
def test_promotion_is_one_transaction(q: Connection, connect: Callable[..., Connection]) -> None:
    put(q)
    tries(q)
    for table in ("pgmq.q_jobs_dlq", "bartleby.dead_letter"):
        q.execute(f"alter table {table} add constraint full_up check (false)".encode())
        with refused("23514", "full_up"):
            tick(q)
        assert (inside(q), inside(q, DLQ), rows(q, DIAGNOSTICS)) == ([JOB], [], [])
        assert value(q, "select read_ct from pgmq.q_jobs") == 5
        q.execute(f"alter table {table} drop constraint full_up".encode())
    reader = connect(autocommit=False)
    assert tick(reader) == []
    assert (inside(q), inside(q, DLQ), rows(q, DIAGNOSTICS)) == ([JOB], [], [])
    assert tick(q) == []
    reader.commit()
    assert (inside(q), inside(q, DLQ), len(rows(q, DIAGNOSTICS))) == ([], [JOB], 1)


@pytest.mark.seed("pgmq-23", "pgmq-76")
def test_letters_outlive_their_queue_and_its_message_ids(q: Connection) -> None:
    [old] = die(q, "old", error="bad audio")
    living = put(q, "living")
    tries(q, 1, error="bad audio")
    q.execute("select pgmq.drop_queue(%s)", [JOBS])
    q.execute("select pgmq.create(%s)", [JOBS])
    assert [put(q, "new"), put(q, "newer")] == [old, living]
    assert [(each["msg_id"], each["message"]) for each in tick(q)] == [(old, "new"), (living, "newer")]
    watch(q)
    later(q)
    tries(q, 4)
    assert tick(q) == []
    found = rows(q, "select original_msg_id, payload, last_error from bartleby.pgmq_letters order by message_id")
    assert [tuple(each.values()) for each in found] == [
        (old, "old", "bad audio"), (old, "new", None), (living, "newer", None),
    ]  # fmt: skip
    for name in (JOBS, DLQ):
        q.execute("select pgmq.drop_queue(%s)", [name])
    watch(q)
    letters = rows(q, "select message_id, status, error, payload from bartleby.dead_letters order by message_id")
    assert [each["status"] for each in letters] == ["dead"] * 3
    assert (letters[0]["error"], letters[0]["payload"]) == ("bad audio", "old")
    create(q, "engine")
    plan = "select bartleby.plan_replay(null, 'ana', 'we moved', p_ids => %s, p_options => '{\"to\": \"engine\"}')"
    planned = value(q, plan, [letters[0]["message_id"]])
    q.execute("select bartleby.start_replay(%s, 'ana', 'we moved')", [planned])
    q.execute("select bartleby.advance_replays()")
    again = claim(q, queue="engine").one
    assert (again["message_id"], again["payload"]) == (letters[0]["message_id"], "old")


@pytest.mark.seed("pgmq-46", "pgmq-47", "pgmq-48", "pgmq-58", "pgmq-60", "pgmq-63")
def test_letters_expire_with_their_copies_unless_they_are_held(q: Connection, clock: Clock, bartleby: Run) -> None:
    assert stats(q, JOBS)["retention"] == MONTH
    die(q, "held")
    act(q, "hold")
    die(q, "old", error="bad audio")
    clock.advance(timedelta(days=20))
    die(q, "young")
    kept = "select payload from bartleby.pgmq_letters order by original_msg_id"
    for wait, left in ((timedelta(days=10) - MINUTE, ["held", "old", "young"]), (MINUTE, ["held", "young"])):
        clock.advance(wait)
        prune(q)
        assert column(q, kept) == inside(q, DLQ) == left
    assert column(q, EVENTS).count("io.bartleby.dead_letter.expired") == 1
    q.execute('select bartleby.configure_queue(%s, \'{"retention": "7 days"}\')', [JOBS])
    assert stats(q, JOBS)["retention"] == timedelta(days=7)
    run(bartleby, "janitor", "--once")
    assert column(q, kept) == inside(q, DLQ) == ["held"]
    q.execute("select bartleby.hold(array(select message_id from bartleby.dead_letters), 'ana', 'settled', false)")
    prune(q)
    for table in ("dead_letter", "attempt", "pgmq_message"):
        assert rows(q, f"select * from bartleby.{table}") == [], table
    assert inside(q, DLQ) == []


@pytest.mark.seed("pgmq-50", "pgmq-51")
def test_reading_is_unchanged_while_nothing_is_stuck(q: Connection) -> None:
    for n in range(20):
        put(q, n)
    written = "select sum(n_tup_ins + n_tup_upd + n_tup_del) from pg_stat_xact_user_tables where schemaname = %s"
    read, columns = {}, {}
    for function in ("pgmq.read", "bartleby.pgmq_read"):
        with q.transaction(force_rollback=True):
            before = value(q, written, "bartleby")
            read[function] = rows(q, f"select * from {function}(%s, 60, 20)", JOBS)
            assert value(q, written, "bartleby") == before
            found = q.execute(f"select * from {function}(%s, 60, 20)".encode(), [JOBS]).description
        columns[function] = {each.name: each.type_code for each in found or ()}
    theirs, ours = columns.values()
    assert {name: theirs.get(name) for name in ours} == ours
    assert theirs.keys() - ours.keys() == {"last_read_at"}
    same = ("msg_id", "read_ct", "enqueued_at", "message", "headers")
    first, second = ([[each[name] for name in same] for each in found] for found in read.values())
    assert first == second
    assert [each["message"] for each in read["bartleby.pgmq_read"]] == list(range(20))


@pytest.fixture
def without_pgmq(server: dev.Server, admin: Connection) -> Iterator[str]:
    """A database that never had pgmq."""
    admin.execute("create database bartleby_without_pgmq template template0")
    yield database_dsn(server, "bartleby_without_pgmq")
    admin.execute("drop database bartleby_without_pgmq with (force)")


@pytest.mark.seed("pgmq-74", "pgmq-75")
def test_missing_extension_breaks_neither_installation_nor_queues(without_pgmq: str, bartleby: Run) -> None:
    def call(*words: str) -> Done:
        return bartleby(*words, address=without_pgmq)

    assert [call("install").code for _ in range(2)] == [0, 0]
    refusal = call("queues", "attach", JOBS)
    assert (refusal.code != 0, "no pgmq" in refusal.err) == (True, True)
    with psycopg.connect(without_pgmq, autocommit=True) as conn:
        create(conn, "own", backoff="none")
        sent = send(conn, JOB, "own")
        decided = [fail_one(conn, "own", error_type="ValueError", error="bad audio") for _ in range(5)]
        assert [(each["attempt"], each["verdict"]) for each in decided] == [
            (1, "retry"), (2, "retry"), (3, "retry"), (4, "retry"), (5, "dead"),
        ]  # fmt: skip
        assert claim(conn, queue="own").messages == []
        [found] = call("dead", "--json").document
        assert (found["message_id"], found["payload"], found["error"]) == (sent, JOB, "bad audio")
        assert call("replay", str(sent), "--reason", "the cause is fixed", "--yes", "--detach").code == 0
        conn.execute("select count(*) from bartleby.advance_replays()")
        assert (claim(conn, queue="own").ids, call("dead", "--json").document) == ([sent], [])
        conn.execute(SCRIPT.read_bytes())
        conn.execute("select pgmq.create(%s)", [JOBS])
    assert [call("install").code, call("queues", "attach", JOBS).code] == [0, 0]
