"""Dead letters for pgmq.

A check at the dispatch boundary ends the retries of a queue of pgmq: what was read too often goes to a sibling queue, a
row of diagnostics says what it was, and it is replayed by hand. Bartleby is attached to that queue, and messages,
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
from tests.kit.sql import Row, claim, column, create, refused, row, rows, send, stats, value
from tests.pgmq.conftest import SCRIPT
from tests.stories.kit import ANA, Bus, Connection, fail_one, ledger, relaying, until

JOBS, DLQ = "pipeline_jobs", "pipeline_jobs_dlq"
JOB = {"step": "diarize", "recording_id": 7}
DIAGNOSTICS = "select * from bartleby.pgmq_letters order by dead_at desc"
MONTH = timedelta(days=30)
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
    """The queue of the design, attached with the policy as it comes."""
    conn.execute("select pgmq.create(%s)", [JOBS])
    attach(conn)
    return conn


def attach(conn: Connection, queue: str = JOBS, *, sibling: bool = True, **policy: Any) -> None:
    conn.execute("select bartleby.pgmq_attach(%s, %s, %s)", [queue, Jsonb(policy), sibling])


def put(conn: Connection, payload: Any = JOB, queue: str = JOBS) -> int:
    return int(value(conn, "select pgmq.send(%s, %s::jsonb)", queue, Jsonb(payload)))


def tick(conn: Connection, vt: int = 60, qty: int = 10, queue: str = JOBS) -> list[Row]:
    """What the dispatcher gets."""
    return rows(conn, "select * from bartleby.pgmq_read(%s, %s, %s)", queue, vt, qty)


def later(conn: Connection, seconds: float = 3600) -> None:
    """Let time go by for what is out of sight in the queue."""
    conn.execute("update pgmq.q_pipeline_jobs set vt = vt - make_interval(secs => %s)", [seconds])


def tries(conn: Connection, times: int = 5, error: str | None = None) -> None:
    """Each message in sight is tried so often, and nobody deletes it."""
    for _ in range(times):
        for each in tick(conn):
            if error is not None:
                fail(conn, each["msg_id"], error)
        later(conn)


def die(conn: Connection, *payloads: Any, error: str | None = None) -> list[int]:
    """Messages that fail every time, until they are dead; the ids of pgmq."""
    sent = [put(conn, each) for each in payloads or (JOB,)]
    tries(conn, error=error)
    assert tick(conn) == []
    return sent


def fail(conn: Connection, msg_id: int, error: str = "bad audio") -> Any:
    return value(conn, "select bartleby.pgmq_fail(%s, %s, %s, 'ValueError')", JOBS, msg_id, error)


def delete(conn: Connection, msg_id: int, queue: str = JOBS) -> None:
    assert value(conn, "select pgmq.delete(%s, %s::bigint)", queue, msg_id) is True


def inside(conn: Connection, queue: str = JOBS) -> list[Any]:
    """The payloads in a queue of pgmq, in sight or not."""
    return column(conn, f"select message from pgmq.q_{queue} order by msg_id")


def diagnostics(conn: Connection) -> Row:
    return row(conn, DIAGNOSTICS)


def status(conn: Connection) -> list[str]:
    return column(conn, "select status from bartleby.dead_letters order by message_id")


def replay(conn: Connection) -> list[int]:
    return column(
        conn, "select bartleby.replay(array(select message_id from bartleby.dead_letters), 'ana', 'it is mended')"
    )


def by_hand(conn: Connection) -> None:
    """A replay as the design has it, up to the row of diagnostics."""
    for each in rows(conn, "select * from pgmq.read(%s, 30, 100)", DLQ):
        put(conn, each["message"])
        delete(conn, each["msg_id"], DLQ)


def watch(conn: Connection) -> int:
    """What the janitor does once a second."""
    return int(value(conn, "select bartleby.watch()"))


def queues(conn: Connection) -> list[str]:
    return column(conn, "select queue_name::text from pgmq.list_queues() order by 1")


def working(bartleby: Run, folder: Path, *words: str) -> list[str]:
    """Run the worker until nothing is left to do; what its handler printed."""
    (folder / "pipeline.py").write_text(APP)
    done = bartleby("work", "pipeline:app", "--pgmq", JOBS, "--until-idle", *words)
    assert done.code == 0, done.err
    return [each for each in done.out.splitlines() if each.startswith("ran")]


@pytest.mark.seed("pgmq-1")
def test_failure_is_neither_silent_nor_invisible(q: Connection) -> None:
    die(q, error="bad audio")
    assert stats(q, JOBS)["dead"] == 1
    assert column(q, "select title from bartleby.groups") == ["ValueError: bad audio"]
    assert "io.bartleby.dead_letter.created" in column(q, "select type from bartleby.events")


@pytest.mark.seed("pgmq-2")
def test_poison_is_not_retried_for_ever(q: Connection) -> None:
    put(q, "poison")
    tries(q, 20)
    assert (inside(q), len(rows(q, DIAGNOSTICS))) == ([], 1)


@pytest.mark.seed("pgmq-3")
def test_need_1_a_ceiling_for_retries(q: Connection) -> None:
    put(q)
    assert [len(tick_and_wait(q)) for _ in range(8)] == [1, 1, 1, 1, 1, 0, 0, 0]


def tick_and_wait(conn: Connection) -> list[Row]:
    found = tick(conn)
    later(conn)
    return found


@pytest.mark.seed("pgmq-4")
def test_need_2_a_place_that_can_be_queried(q: Connection, bartleby: Run) -> None:
    die(q)
    assert value(q, "select count(*) from bartleby.pgmq_letters where payload ->> 'step' = 'diarize'") == 1
    assert [each["payload"] for each in bartleby("dead", "--json").document] == [JOB]


@pytest.mark.seed("pgmq-5")
def test_need_3_manual_replay_after_the_fix(q: Connection) -> None:
    die(q)
    replay(q)
    [again] = tick(q)
    assert (again["message"], again["read_ct"]) == (JOB, 1)
    delete(q, again["msg_id"])
    watch(q)
    assert (status(q), inside(q), inside(q, DLQ)) == (["resolved"], [], [])


@pytest.mark.seed("pgmq-6")
def test_read_ct_is_the_only_counter(q: Connection) -> None:
    put(q)
    tries(q)
    assert value(q, "select count(*) from bartleby.pgmq_message") == 0
    q.execute("update pgmq.q_pipeline_jobs set read_ct = 3")
    assert [each["read_ct"] for each in tick(q)] == [4]


@pytest.mark.seed("pgmq-7")
def test_the_original_payload_goes_to_the_sibling_and_leaves_the_live_queue(q: Connection) -> None:
    die(q)
    assert (inside(q), inside(q, DLQ)) == ([], [JOB])


@pytest.mark.seed("pgmq-8")
def test_diagnostics_have_error_step_recording_read_ct_and_times(q: Connection) -> None:
    die(q, error="bad audio")
    found = diagnostics(q)
    assert (found["last_error"], found["payload"], found["read_ct"]) == ("bad audio", JOB, 6)
    assert found["first_seen"] < found["dead_at"]


@pytest.mark.seed("pgmq-9")
def test_the_payload_in_the_sibling_is_identical(q: Connection) -> None:
    die(q, error="bad audio")
    copy = row(q, "select message, headers from pgmq.q_pipeline_jobs_dlq")
    assert copy == {"message": JOB, "headers": {"x-bartleby-message-id": diagnostics(q)["message_id"]}}


@pytest.mark.seed("pgmq-10")
def test_the_sibling_is_a_queue_of_pgmq_like_the_live_one(q: Connection) -> None:
    die(q)
    [copy] = rows(q, "select * from pgmq.read(%s, 30, 10)", DLQ)
    assert copy["message"] == JOB
    delete(q, copy["msg_id"], DLQ)
    put(q, "mine", DLQ)
    watch(q)
    assert inside(q, DLQ) == ["mine"]


@pytest.mark.seed("pgmq-11")
def test_work_the_dead_and_the_narrative_are_apart(q: Connection) -> None:
    put(q, "poison")
    tries(q, 4, error="bad audio")
    put(q, "good")
    tries(q, 2, error="bad audio")
    assert (inside(q), inside(q, DLQ)) == (["good"], ["poison"])
    assert diagnostics(q)["last_error"] == "bad audio"
    assert [each["error"] for each in ledger(q, diagnostics(q)["message_id"])] == ["bad audio"] * 5


@pytest.mark.seed("pgmq-12")
def test_replay_is_read_send_and_delete(q: Connection) -> None:
    die(q)
    by_hand(q)
    assert watch(q) == 1
    found = row(q, "select status, replayed_by, replay_reason from bartleby.dead_letters")
    assert (found["status"], found["replayed_by"]) == ("replayed", "pgmq")
    assert "by hand" in found["replay_reason"]


@pytest.mark.seed("pgmq-13")
def test_each_queue_has_its_own_sibling(q: Connection) -> None:
    for name in ("billing", "mail"):
        q.execute("select pgmq.create(%s)", [name])
        attach(q, name)
    assert queues(q) == ["billing", "billing_dlq", "mail", "mail_dlq", JOBS, DLQ]


@pytest.mark.seed("pgmq-14")
def test_it_is_obvious_which_dead_belong_to_which_queue(q: Connection) -> None:
    q.execute("select pgmq.create('mail')")
    attach(q, "mail", max_attempts=1)
    put(q, "a letter", "mail")
    assert len(tick(q, 0, queue="mail")) == 1
    assert tick(q, 0, queue="mail") == []
    die(q)
    assert (inside(q, "mail_dlq"), inside(q, DLQ)) == (["a letter"], [JOB])
    found = [(each["queue_name"], each["sibling"], each["payload"]) for each in rows(q, DIAGNOSTICS)]
    assert sorted(found, key=str) == [("mail", "mail_dlq", "a letter"), (JOBS, DLQ, JOB)]


@pytest.mark.seed("pgmq-15")
def test_two_queues_are_no_more_to_operate_than_one(q: Connection) -> None:
    die(q)
    ids = column(q, "select message_id from bartleby.dead_letters")
    for verb, left in (("discard", []), ("restore", [JOB])):
        q.execute(f"select bartleby.{verb}(%s, 'ana', 'so it is')".encode(), [ids])
        assert inside(q, DLQ) == left
    replay(q)
    assert (inside(q), inside(q, DLQ)) == ([JOB], [])


@pytest.mark.seed("pgmq-16")
def test_only_the_dead_are_moved(q: Connection) -> None:
    put(q)
    tries(q, 4)
    [last] = tick(q)
    delete(q, last["msg_id"])
    for table in ("pgmq_message", "dead_letter", "attempt", "event"):
        assert rows(q, f"select * from bartleby.{table}") == [], table
    assert value(q, "select total_messages from pgmq.metrics(%s)", DLQ) == 0


@pytest.mark.seed("pgmq-17")
def test_one_artifact_is_enough_if_wanted(conn: Connection) -> None:
    conn.execute("select pgmq.create(%s)", [JOBS])
    attach(conn, sibling=False)
    die(conn)
    assert (queues(conn), diagnostics(conn)["sibling"]) == ([JOBS], None)
    replay(conn)
    assert inside(conn) == [JOB]


@pytest.mark.seed("pgmq-18")
def test_no_script_is_needed_to_replay_from_a_row(q: Connection, bartleby: Run) -> None:
    die(q, JOB, "other")
    done = bartleby("replay", f"queue:{JOBS} payload.step:diarize", "--reason", "mended", "--yes", "--detach")
    assert done.code == 0, done.err
    q.execute("select count(*) from bartleby.advance_replays()")
    assert (inside(q), inside(q, DLQ)) == ([JOB], ["other"])


@pytest.mark.seed("pgmq-19")
def test_the_dead_can_be_drained_like_a_queue(q: Connection) -> None:
    die(q, 1, 2, 3)
    by_hand(q)
    assert (inside(q), inside(q, DLQ), watch(q)) == ([1, 2, 3], [], 3)
    assert status(q) == ["replayed"] * 3


@pytest.mark.seed("pgmq-20")
def test_the_dead_are_moved_once(q: Connection) -> None:
    die(q)
    place = value(q, "select ctid::text from pgmq.q_pipeline_jobs_dlq")
    for _ in range(3):
        assert tick(q) == []
        watch(q)
    assert value(q, "select total_messages from pgmq.metrics(%s)", DLQ) == 1
    assert value(q, "select ctid::text from pgmq.q_pipeline_jobs_dlq") == place


@pytest.mark.seed("pgmq-21")
def test_dead_and_live_do_not_mix(q: Connection) -> None:
    die(q, "poison")
    put(q, "good")
    assert [each["message"] for each in tick(q)] == ["good"]
    assert value(q, "select queue_length from pgmq.metrics(%s)", JOBS) == 1


@pytest.mark.seed("pgmq-22")
def test_the_dead_waste_no_slots(q: Connection) -> None:
    for each in ("a", "b", "c"):
        put(q, each)
    tries(q)
    for each in ("d", "e", "f"):
        put(q, each)
    assert [each["message"] for each in tick(q, qty=3)] == ["d", "e", "f"]
    assert len(rows(q, DIAGNOSTICS)) == 3


@pytest.mark.seed("pgmq-23")
def test_a_queue_that_is_made_anew_confuses_nothing(q: Connection) -> None:
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


@pytest.mark.seed("pgmq-24")
def test_the_counter_of_the_dead_stands_still(q: Connection) -> None:
    die(q)
    for _ in range(5):
        assert tick(q) == []
    assert (diagnostics(q)["read_ct"], value(q, "select read_ct from pgmq.q_pipeline_jobs_dlq")) == (6, 0)


@pytest.mark.seed("pgmq-25")
def test_the_dispatch_boundary_decides_and_nobody_else(q: Connection) -> None:
    for step in ("transcribe", "diarize", "summarise"):
        put(q, {"step": step})
    tries(q)
    watch(q)
    q.execute("select count(*) from bartleby.prune()")
    with q.transaction(force_rollback=True):
        assert [each["read_ct"] for each in rows(q, "select * from pgmq.read(%s, 0, 10)", JOBS)] == [6, 6, 6]
        assert rows(q, DIAGNOSTICS) == []
    assert rows(q, DIAGNOSTICS) == []
    assert tick(q) == []
    assert {(each["payload"]["step"], each["read_ct"]) for each in rows(q, DIAGNOSTICS)} == {
        ("transcribe", 6), ("diarize", 6), ("summarise", 6),
    }  # fmt: skip


@pytest.mark.seed("pgmq-26")
def test_a_worker_comes_through_the_same_boundary(q: Connection, bartleby: Run, tmp_path: Path) -> None:
    put(q, "poison")
    tries(q, error="bad audio")
    put(q, "deleted")
    assert working(bartleby, tmp_path) == ["ran deleted 1"]
    found = row(q, "select reason, attempts, error from bartleby.dead_letters where payload = '\"poison\"'")
    assert found == {"reason": "exhausted", "attempts": 5, "error": "bad audio"}
    assert inside(q, DLQ) == ["poison", "deleted"]


@pytest.mark.seed("pgmq-27")
def test_step_1_the_payload_is_sent_to_the_sibling(q: Connection) -> None:
    die(q)
    assert value(q, "select total_messages from pgmq.metrics(%s)", DLQ) == 1


@pytest.mark.seed("pgmq-28")
def test_step_2_a_row_of_diagnostics(q: Connection, clock: Clock) -> None:
    msg_id = put(q, JOB)
    enqueued = value(q, "select enqueued_at from pgmq.q_pipeline_jobs")
    tries(q, error="bad audio")
    assert tick(q) == []
    found = diagnostics(q)
    assert (found["queue_name"], found["original_msg_id"], found["payload"]) == (JOBS, msg_id, JOB)
    assert (found["read_ct"], found["last_error"], found["dead_at"]) == (6, "bad audio", clock.now())
    assert found["first_seen"] == enqueued


@pytest.mark.seed("pgmq-29")
def test_step_and_recording_are_found(q: Connection, client: Client) -> None:
    die(q, JOB, {"step": "diarize", "recording_id": 8}, {"step": "mail"})
    [found] = client.dead_letters(f"queue:{JOBS} payload.step:diarize payload.recording_id:7")
    assert found.payload == JOB
    assert column(
        q, "select payload ->> 'recording_id' from bartleby.pgmq_letters where payload ->> 'step' = 'mail'"
    ) == [None]


@pytest.mark.seed("pgmq-30")
def test_the_last_error_is_the_newest_that_was_told(q: Connection) -> None:
    put(q)
    tries(q, 2, error="first")
    tries(q, 1, error="newest")
    tries(q, 2)
    assert tick(q) == []
    assert diagnostics(q)["last_error"] == "newest"


@pytest.mark.seed("pgmq-31")
def test_without_a_word_the_last_error_is_null(q: Connection) -> None:
    die(q)
    assert diagnostics(q)["last_error"] is None
    told = ledger(q, diagnostics(q)["message_id"])[-1]
    assert (told["outcome"], told["rule"]) == ("lost", "nobody told what became of it")


@pytest.mark.seed("pgmq-32")
def test_step_3_it_is_deleted_from_the_live_queue(q: Connection) -> None:
    die(q)
    assert (inside(q), rows(q, "select * from pgmq.a_pipeline_jobs")) == ([], [])


@pytest.mark.seed("pgmq-33")
def test_step_4_it_is_not_dispatched(q: Connection) -> None:
    put(q, "poison")
    tries(q)
    put(q, "good")
    assert [each["message"] for each in tick(q)] == ["good"]


@pytest.mark.seed("pgmq-34")
def test_nothing_is_deleted_before_it_is_stored(q: Connection) -> None:
    put(q)
    tries(q)
    for table in ("pgmq.q_pipeline_jobs_dlq", "bartleby.dead_letter"):
        q.execute(f"alter table {table} add constraint full_up check (false)".encode())
        with refused("23514", "full_up"):
            tick(q)
        assert (inside(q), inside(q, DLQ), rows(q, DIAGNOSTICS)) == ([JOB], [], [])
        assert value(q, "select read_ct from pgmq.q_pipeline_jobs") == 5
        q.execute(f"alter table {table} drop constraint full_up".encode())
    assert (tick(q), inside(q), inside(q, DLQ)) == ([], [], [JOB])


@pytest.mark.seed("pgmq-35")
def test_the_four_steps_are_one_transaction(q: Connection, connect: Callable[..., Connection]) -> None:
    put(q)
    tries(q)
    reader = connect(autocommit=False)
    assert tick(reader) == []
    assert (inside(q), inside(q, DLQ), rows(q, DIAGNOSTICS)) == ([JOB], [], [])
    assert tick(q) == []
    reader.commit()
    assert (inside(q), inside(q, DLQ), len(rows(q, DIAGNOSTICS))) == ([], [JOB], 1)


@pytest.mark.seed("pgmq-36")
def test_five_is_the_default(q: Connection) -> None:
    assert stats(q, JOBS)["max_attempts"] == 5


@pytest.mark.seed("pgmq-37")
def test_the_ceiling_is_set_by_an_environment_variable(
    conn: Connection, bartleby: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conn.execute("select pgmq.create(%s)", [JOBS])
    attach(conn, backoff="none", breaker="off")
    put(conn, "poison")
    monkeypatch.setenv("BARTLEBY_PGMQ_MAX_ATTEMPTS", "2")
    assert working(bartleby, tmp_path) == ["ran poison 1", "ran poison 2"]
    assert stats(conn, JOBS)["max_attempts"] == 2


@pytest.mark.seed("pgmq-38")
def test_read_ct_begins_at_one(q: Connection) -> None:
    put(q)
    assert [each["read_ct"] for each in tick(q)] == [1]


@pytest.mark.seed("pgmq-39")
def test_five_tries_are_made_and_no_sixth(q: Connection) -> None:
    put(q)
    given = [each["read_ct"] for _ in range(6) for each in tick_and_wait(q)]
    assert given == [1, 2, 3, 4, 5]
    letter = row(q, "select attempts, reason from bartleby.dead_letters")
    assert letter == {"attempts": 5, "reason": "exhausted"}


@pytest.mark.seed("pgmq-40")
def test_a_step_that_succeeds_deletes(q: Connection) -> None:
    put(q)
    [job] = tick(q)
    delete(q, job["msg_id"])
    later(q)
    assert (tick(q), rows(q, DIAGNOSTICS)) == ([], [])


@pytest.mark.seed("pgmq-41")
def test_a_step_that_fails_does_nothing(q: Connection) -> None:
    put(q)
    [job] = tick(q, vt=60)
    later(q, 50)
    assert tick(q) == []
    later(q, 10)
    assert [each["msg_id"] for each in tick(q)] == [job["msg_id"]]


@pytest.mark.seed("pgmq-42")
def test_steps_do_not_decide_what_is_dead(q: Connection) -> None:
    msg_id = put(q)
    tries(q, 4, error="bad audio")
    tick(q)
    assert fail(q, msg_id) is not None
    assert (inside(q), rows(q, DIAGNOSTICS)) == ([JOB], [])


@pytest.mark.seed("pgmq-43")
def test_terminal_errors_are_promoted_now(q: Connection) -> None:
    msg_id = put(q)
    tick(q)
    q.execute("select bartleby.pgmq_reject(%s, %s, 'unacceptable', 'the recording is deleted')", [JOBS, msg_id])
    found = diagnostics(q)
    assert (found["read_ct"], found["last_error"]) == (1, "the recording is deleted")
    assert (inside(q), inside(q, DLQ)) == ([], [JOB])


@pytest.mark.seed("pgmq-44")
def test_a_handler_promotes_now_by_raising_terminal(q: Connection, bartleby: Run, tmp_path: Path) -> None:
    put(q, "deleted")
    assert working(bartleby, tmp_path) == ["ran deleted 1"]
    assert row(q, "select reason, error from bartleby.dead_letters") == {
        "reason": "terminal",
        "error": "the recording is deleted",
    }


@pytest.mark.seed("pgmq-45")
def test_the_retry_ceiling_alone_is_sufficient(q: Connection) -> None:
    die(q, error="the recording is deleted")
    assert row(q, "select reason, attempts from bartleby.dead_letters") == {"reason": "exhausted", "attempts": 5}


@pytest.mark.seed("pgmq-46")
def test_diagnostics_are_kept_for_30_days(q: Connection, clock: Clock) -> None:
    assert stats(q, JOBS)["retention"] == MONTH
    die(q)
    clock.advance(MONTH - timedelta(minutes=1))
    q.execute("select bartleby.prune()")
    assert len(rows(q, DIAGNOSTICS)) == 1
    clock.advance(60)
    q.execute("select bartleby.prune()")
    assert rows(q, DIAGNOSTICS) == []


@pytest.mark.seed("pgmq-47")
def test_pruning_needs_no_job_of_its_own(q: Connection, clock: Clock, bartleby: Run) -> None:
    die(q)
    clock.advance(MONTH + timedelta(days=1))
    done = bartleby("janitor", "--once")
    assert done.code == 0, done.err
    assert rows(q, DIAGNOSTICS) == []


@pytest.mark.seed("pgmq-48")
def test_the_table_does_not_grow_without_bound(q: Connection, clock: Clock) -> None:
    die(q, 1, 2, 3, error="bad audio")
    clock.advance(MONTH + timedelta(days=1))
    q.execute("select bartleby.prune()")
    for table in ("dead_letter", "attempt", "pgmq_message"):
        assert rows(q, f"select * from bartleby.{table}") == [], table
    assert inside(q, DLQ) == []
    assert "io.bartleby.dead_letter.expired" in column(q, "select type from bartleby.events")


@pytest.mark.seed("pgmq-49")
def test_the_new_surface_is_one_queue(conn: Connection) -> None:
    schema = "select relname from pg_class where relnamespace = 'bartleby'::regnamespace and relkind in ('r', 'p', 'v')"
    before = set(column(conn, schema))
    conn.execute("select pgmq.create(%s)", [JOBS])
    attach(conn)
    assert (queues(conn), set(column(conn, schema))) == ([JOBS, DLQ], before)


@pytest.mark.seed("pgmq-50")
def test_the_dispatcher_reads_by_another_function(q: Connection) -> None:
    put(q)
    with q.transaction(force_rollback=True):
        theirs = q.execute("select * from pgmq.read(%s, 60, 10)", [JOBS]).description
    ours = q.execute("select * from bartleby.pgmq_read(%s, 60, 10)", [JOBS]).description
    types = {each.name: each.type_code for each in theirs or ()}
    assert {each.name: types.get(each.name) for each in ours or ()} == {
        each.name: each.type_code for each in ours or ()
    }
    assert types.keys() - {each.name for each in ours or ()} == {"last_read_at"}


@pytest.mark.seed("pgmq-51")
def test_reading_is_as_it_was_while_nothing_is_stuck(q: Connection) -> None:
    for n in range(20):
        put(q, n)
    written = (
        "select sum(n_tup_ins + n_tup_upd + n_tup_del) from pg_stat_xact_user_tables where schemaname = 'bartleby'"
    )
    with q.transaction(force_rollback=True):
        before = value(q, written)
        ours = tick(q, qty=20)
        assert value(q, written) == before
    with q.transaction(force_rollback=True):
        theirs = rows(q, "select * from pgmq.read(%s, 60, 20)", JOBS)
    assert [each["message"] for each in ours] == list(range(20))
    same = ("msg_id", "read_ct", "enqueued_at", "message", "headers")
    assert [[each[name] for name in same] for each in ours] == [[each[name] for name in same] for each in theirs]


@pytest.mark.seed("pgmq-52")
def test_the_operators_query(q: Connection) -> None:
    for n in (1, 2, 3):
        die(q, n)
    assert [each["payload"] for each in rows(q, DIAGNOSTICS)] == [3, 2, 1]


@pytest.mark.seed("pgmq-53")
def test_a_join_tells_who_is_affected(q: Connection) -> None:
    q.execute("create table recordings (id bigint, owner text)")
    q.execute("insert into recordings values (7, 'melville'), (8, 'hawthorne')")
    die(q)
    query = (
        "select r.owner from bartleby.pgmq_letters l join recordings r on r.id = (l.payload ->> 'recording_id')::bigint"
    )
    assert column(q, query) == ["melville"]


@pytest.mark.seed("pgmq-54")
def test_replay_is_native_to_the_queue(q: Connection) -> None:
    die(q, "again", "done", error="bad audio")
    first = column(q, "select message_id from bartleby.dead_letters order by 1")
    by_hand(q)
    watch(q)
    for each in tick(q):
        if each["message"] == "done":
            delete(q, each["msg_id"])
    later(q)
    watch(q)
    tries(q, 4)
    assert tick(q) == []
    found = rows(q, "select message_id, status, cycle, error from bartleby.dead_letters order by 1")
    assert [tuple(each.values()) for each in found] == [
        (first[0], "dead", 2, None), (first[1], "resolved", 1, "bad audio"),
    ]  # fmt: skip
    history = value(q, "select failure_history from bartleby.dead_letters order by message_id limit 1")
    assert [(each["error"], each["attempts"], each["replayed_by"]) for each in history] == [("bad audio", 5, "pgmq")]
    assert inside(q, DLQ) == ["again"]


@pytest.mark.seed("pgmq-55")
def test_deleting_the_row_is_a_discard(q: Connection, client: Client) -> None:
    die(q)
    q.execute("set role bartleby_operator")
    with refused("42501"):
        q.execute("delete from bartleby.dead_letter")
    q.execute("reset role")
    q.execute("select bartleby.discard(array(select message_id from bartleby.dead_letters), 'ana', 'not needed')")
    assert (list(client.dead_letters("status:dead")), status(q), inside(q, DLQ)) == ([], ["discarded"], [])


@pytest.mark.seed("pgmq-56")
def test_an_operator_needs_no_new_code(q: Connection) -> None:
    die(q)
    q.execute("set role bartleby_operator")
    assert len(replay(q)) == 1
    q.execute("reset role")
    assert inside(q) == [JOB]
    assert row(q, "select actor, reason from bartleby.audit_log where action = 'letter.replay'") == {
        "actor": "ana",
        "reason": "it is mended",
    }


@pytest.mark.seed("pgmq-57")
def test_replay_has_a_surface(q: Connection, bartleby: Run) -> None:
    die(q)
    [found] = bartleby("dead", "--json").document
    shown = bartleby("replay", str(found["message_id"]), "--reason", "mended", "--dry-run")
    assert (shown.code, inside(q)) == (0, [])
    done = bartleby("replay", str(found["message_id"]), "--reason", "mended", "--yes", "--detach")
    assert done.code == 0, done.err
    q.execute("select bartleby.advance_replays()")
    assert inside(q) == [JOB]


@pytest.mark.seed("pgmq-58")
def test_whoever_reads_knows_that_rows_are_ephemeral(q: Connection, clock: Clock) -> None:
    q.execute('select bartleby.configure_queue(%s, \'{"retention": "7 days"}\')', [JOBS])
    assert stats(q, JOBS)["retention"] == timedelta(days=7)
    die(q)
    clock.advance(timedelta(days=7, minutes=1))
    q.execute("select bartleby.prune()")
    assert rows(q, DIAGNOSTICS) == []
    assert "io.bartleby.dead_letter.expired" in column(q, "select type from bartleby.events")


@pytest.mark.seed("pgmq-59")
def test_what_is_kept_longer_goes_elsewhere(q: Connection, client: Client, bus: Bus, dsn: str) -> None:
    client.put_sink("bus", "sentry", {"options": bus.sentry, "types": ["dead_letter.*"]}, **ANA)
    with relaying(dsn):
        die(q, error="bad audio")
        until(lambda: bus.events)
    assert bus.events[0]["exception"]["values"][0] == {"type": "ValueError", "value": "bad audio"}
    assert bus.events[0]["tags"]["queue"] == JOBS


@pytest.mark.seed("pgmq-60")
def test_a_row_can_be_held(q: Connection, clock: Clock) -> None:
    die(q)
    q.execute("select bartleby.hold(array(select message_id from bartleby.dead_letters), 'ana', 'for the lawyers')")
    clock.advance(2 * MONTH)
    q.execute("select bartleby.prune()")
    assert (len(rows(q, DIAGNOSTICS)), inside(q, DLQ)) == (1, [JOB])


@pytest.mark.seed("pgmq-61")
def test_a_few_hundred_dead_are_fine(q: Connection) -> None:
    q.execute("select pgmq.send_batch(%s, array(select to_jsonb(n) from generate_series(1, 500) n))", [JOBS])
    q.execute("update pgmq.q_pipeline_jobs set read_ct = 5")
    assert tick(q, qty=500) == []
    assert (inside(q), inside(q, DLQ)) == ([], list(range(1, 501)))
    assert value(q, "select count(*) from bartleby.pgmq_letters") == 500


@pytest.mark.seed("pgmq-62")
def test_the_sibling_can_be_archived(q: Connection) -> None:
    die(q, error="bad audio")
    q.execute("select pgmq.archive(%s, msg_id) from pgmq.q_pipeline_jobs_dlq", [DLQ])
    assert watch(q) == 1
    found = row(q, "select message_id, status, discarded_by, error, payload from bartleby.dead_letters")
    letter = found.pop("message_id")
    assert found == {"status": "discarded", "discarded_by": "pgmq", "error": "bad audio", "payload": JOB}
    q.execute("select bartleby.restore(array[%s::bigint], 'ana', 'still needed')", [letter])
    assert (status(q), inside(q, DLQ)) == (["dead"], [JOB])


@pytest.mark.seed("pgmq-63")
def test_the_end_of_the_row_is_the_safety_valve(q: Connection, clock: Clock) -> None:
    die(q, "old")
    clock.advance(timedelta(days=20))
    die(q, "young")
    clock.advance(timedelta(days=11))
    q.execute("select bartleby.prune()")
    assert ([each["payload"] for each in rows(q, DIAGNOSTICS)], inside(q, DLQ)) == (["young"], ["young"])


@pytest.mark.seed("pgmq-64")
def test_the_time_out_of_sight_is_the_whole_backoff(q: Connection, clock: Clock) -> None:
    msg_id = put(q)
    before = value(q, "select clock_timestamp()")
    [job] = tick(q, vt=60)
    minute = timedelta(seconds=60)
    assert before + minute <= job["vt"] <= value(q, "select clock_timestamp()") + minute
    attach(q, backoff="fixed", base="60 s", jitter="none")
    for _ in range(3):
        assert fail(q, msg_id) - clock.now() == minute
        later(q)
        tick(q)


@pytest.mark.seed("pgmq-65")
def test_five_minutes_from_the_first_failure_to_the_letter(q: Connection) -> None:
    put(q)
    waited = 0
    while tick(q, vt=60):
        later(q, 50)
        assert tick(q, vt=60) == []
        later(q, 10)
        waited += 60
    assert (waited, len(rows(q, DIAGNOSTICS))) == (300, 1)


@pytest.mark.seed("pgmq-66")
def test_what_fails_for_a_short_time_recovers_by_itself(q: Connection) -> None:
    put(q)
    tries(q, 2, error="timeout")
    [job] = tick(q)
    delete(q, job["msg_id"])
    watch(q)
    assert (inside(q), inside(q, DLQ), rows(q, DIAGNOSTICS)) == ([], [], [])


@pytest.mark.seed("pgmq-67")
def test_backoff_is_exponential_by_default(q: Connection, clock: Clock) -> None:
    policy = row(q, "select backoff, jitter from bartleby.queues")
    assert policy == {"backoff": "exponential", "jitter": "full"}
    attach(q, jitter="none")
    msg_id = put(q)
    waits = []
    for _ in range(4):
        tick(q)
        waits.append((fail(q, msg_id) - clock.now()).total_seconds())
        later(q)
    assert waits == [1, 2, 4, 8]


@pytest.mark.seed("pgmq-68")
def test_the_fifth_failure_itself_buries_nothing(q: Connection) -> None:
    put(q)
    tries(q, 5, error="bad audio")
    assert (inside(q), rows(q, DIAGNOSTICS)) == ([JOB], [])
    assert tick(q) == []
    assert (inside(q), len(rows(q, DIAGNOSTICS))) == ([], 1)


@pytest.mark.seed("pgmq-69")
def test_nobody_works_on_it_while_it_is_out_of_sight(q: Connection) -> None:
    silent = put(q, "silent")
    tries(q, 4)
    assert [each["msg_id"] for each in tick(q, vt=60)] == [silent]
    told = put(q, "told")
    for _ in range(5):
        assert [each["msg_id"] for each in tick(q)] == [told]
        fail(q, told)
        q.execute("update pgmq.q_pipeline_jobs set vt = clock_timestamp() where msg_id = %s and read_ct < 5", [told])
    assert (tick(q), value(q, "select read_ct from pgmq.q_pipeline_jobs")) == ([], 5)
    assert diagnostics(q)["payload"] == "told"
    later(q, 60)
    assert (tick(q), len(rows(q, DIAGNOSTICS))) == ([], 2)


@pytest.mark.seed("pgmq-70")
def test_steps_share_no_state_to_count(q: Connection, connect: Callable[..., Connection]) -> None:
    msg_id = put(q)
    for n in range(5):
        reader = connect()
        [job] = tick(reader)
        assert job["read_ct"] == n + 1
        if n % 2:
            fail(reader, msg_id, f"failure {n + 1}")
        reader.close()
        later(q)
    assert tick(q) == []
    assert row(q, "select attempts, error from bartleby.dead_letters") == {"attempts": 5, "error": "failure 4"}


@pytest.mark.seed("pgmq-71")
def test_read_ct_is_shown_with_every_message(q: Connection) -> None:
    first, second = put(q), put(q)
    tick(q, qty=1)
    later(q)
    assert {each["msg_id"]: each["read_ct"] for each in tick(q)} == {first: 2, second: 1}


@pytest.mark.seed("pgmq-72")
def test_promotion_uses_what_pgmq_has(q: Connection) -> None:
    die(q, 1, 2)
    put(q, 3)
    metrics = "select queue_name, queue_length, total_messages from pgmq.metrics_all() order by queue_name"
    assert [tuple(each.values()) for each in rows(q, metrics)] == [(JOBS, 1, 3), (DLQ, 2, 2)]


@pytest.mark.seed("pgmq-73")
def test_the_sibling_is_made_defensively(q: Connection) -> None:
    q.execute("select pgmq.create('mail'), pgmq.create('mail_dlq')")
    put(q, "made by hand", "mail_dlq")
    for _ in range(2):
        attach(q, "mail")
        attach(q)
    assert queues(q) == ["mail", "mail_dlq", JOBS, DLQ]
    assert [(each["queue_name"], each["payload"]) for each in rows(q, DIAGNOSTICS)] == [("mail", "made by hand")]


@pytest.fixture
def without_pgmq(server: dev.Server, admin: Connection) -> Iterator[str]:
    """A database that never had pgmq."""
    admin.execute("create database bartleby_without_pgmq template template0")
    yield database_dsn(server, "bartleby_without_pgmq")
    admin.execute("drop database bartleby_without_pgmq with (force)")


@pytest.mark.seed("pgmq-74")
def test_a_missing_extension_breaks_no_migration(without_pgmq: str, bartleby: Run) -> None:
    for _ in range(2):
        assert bartleby("install", address=without_pgmq).code == 0
    told = bartleby("queues", "attach", JOBS, address=without_pgmq)
    assert told.code != 0
    assert "no pgmq" in told.err
    with psycopg.connect(without_pgmq, autocommit=True) as conn:
        conn.execute(SCRIPT.read_bytes())
        conn.execute("select pgmq.create(%s)", [JOBS])
    assert bartleby("install", address=without_pgmq).code == 0
    assert bartleby("queues", "attach", JOBS, address=without_pgmq).code == 0


@pytest.mark.seed("pgmq-75")
def test_the_fallback_needs_no_pgmq(without_pgmq: str, bartleby: Run) -> None:
    assert bartleby("install", address=without_pgmq).code == 0
    with psycopg.connect(without_pgmq, autocommit=True) as conn:
        create(conn, JOBS, backoff="none")
        sent = send(conn, JOB, JOBS)
        told = [fail_one(conn, JOBS, error_type="ValueError", error="bad audio") for _ in range(5)]
        assert [(each["attempt"], each["verdict"]) for each in told] == [
            (1, "retry"), (2, "retry"), (3, "retry"), (4, "retry"), (5, "dead"),
        ]  # fmt: skip
        assert claim(conn, queue=JOBS).messages == []
        [found] = bartleby("dead", "--json", address=without_pgmq).document
        assert (found["message_id"], found["payload"], found["error"]) == (sent, JOB, "bad audio")
        done = bartleby("replay", str(sent), "--reason", "mended", "--yes", "--detach", address=without_pgmq)
        assert done.code == 0, done.err
        conn.execute("select count(*) from bartleby.advance_replays()")
        assert (claim(conn, queue=JOBS).ids, bartleby("dead", "--json", address=without_pgmq).document) == ([sent], [])


@pytest.mark.seed("pgmq-76")
def test_the_diagnostics_outlive_the_queue(q: Connection) -> None:
    die(q, error="bad audio")
    letter = diagnostics(q)["message_id"]
    for name in (JOBS, DLQ):
        q.execute("select pgmq.drop_queue(%s)", [name])
    watch(q)
    found = row(q, "select status, error, payload from bartleby.dead_letters")
    assert found == {"status": "dead", "error": "bad audio", "payload": JOB}
    create(q, "engine")
    plan = "select bartleby.plan_replay(null, 'ana', 'we moved', p_ids => %s, p_options => '{\"to\": \"engine\"}')"
    q.execute("select bartleby.start_replay(%s, 'ana', 'we moved')", [value(q, plan, [letter])])
    q.execute("select bartleby.advance_replays()")
    again = claim(q, queue="engine").one
    assert (again["message_id"], again["payload"]) == (letter, JOB)
