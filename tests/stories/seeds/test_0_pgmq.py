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


def test_failure_is_neither_silent_nor_invisible(q: Connection) -> None:
    """Context: failure was silent, and nobody saw it who did not read the logs.

    Here: it is counted, listed, grouped, and told as an event.
    """
    die(q, error="bad audio")
    assert stats(q, JOBS)["dead"] == 1
    assert column(q, "select title from bartleby.groups") == ["ValueError: bad audio"]
    assert "io.bartleby.dead_letter.created" in column(q, "select type from bartleby.events")


def test_poison_is_not_retried_for_ever(q: Connection) -> None:
    """Context: poison came back every 60 seconds without end and took capacity from the others."""
    put(q, "poison")
    tries(q, 20)
    assert (inside(q), len(rows(q, DIAGNOSTICS))) == ([], 1)


def test_need_1_a_ceiling_for_retries(q: Connection) -> None:
    """Need 1: a ceiling for retries."""
    put(q)
    assert [len(tick_and_wait(q)) for _ in range(8)] == [1, 1, 1, 1, 1, 0, 0, 0]


def tick_and_wait(conn: Connection) -> list[Row]:
    found = tick(conn)
    later(conn)
    return found


def test_need_2_a_place_that_can_be_queried(q: Connection, bartleby: Run) -> None:
    """Need 2: what is stuck goes to a place that can be queried.

    Here: by SQL, and by the commands that there are for every queue.
    """
    die(q)
    assert value(q, "select count(*) from bartleby.pgmq_letters where payload ->> 'step' = 'diarize'") == 1
    assert [each["payload"] for each in bartleby("dead", "--json").document] == [JOB]


def test_need_3_manual_replay_after_the_fix(q: Connection) -> None:
    """Need 3: a way to replay by hand when the cause is mended."""
    die(q)
    replay(q)
    [again] = tick(q)
    assert (again["message"], again["read_ct"]) == (JOB, 1)
    delete(q, again["msg_id"])
    watch(q)
    assert (status(q), inside(q), inside(q, DLQ)) == (["resolved"], [], [])


def test_read_ct_is_the_only_counter(q: Connection) -> None:
    """Context: `read_ct` of pgmq is enough to know what is stuck; there is no counter beside it."""
    put(q)
    tries(q)
    assert value(q, "select count(*) from bartleby.pgmq_message") == 0
    q.execute("update pgmq.q_pipeline_jobs set read_ct = 3")
    assert [each["read_ct"] for each in tick(q)] == [4]


def test_the_original_payload_goes_to_the_sibling_and_leaves_the_live_queue(q: Connection) -> None:
    """A: a stuck message is sent to `pipeline_jobs_dlq` with its payload, and deleted from `pipeline_jobs`."""
    die(q)
    assert (inside(q), inside(q, DLQ)) == ([], [JOB])


def test_diagnostics_have_error_step_recording_read_ct_and_times(q: Connection) -> None:
    """A: a row of diagnostics has the error, the step, the recording, `read_ct` and the times.

    Here: step and recording are in the payload, and the filter finds them there.
    """
    die(q, error="bad audio")
    found = diagnostics(q)
    assert (found["last_error"], found["payload"], found["read_ct"]) == ("bad audio", JOB, 6)
    assert found["first_seen"] < found["dead_at"]


def test_the_payload_in_the_sibling_is_identical(q: Connection) -> None:
    """A: the payload in the sibling is that of the live queue: no error text in it, nothing added, nothing twice.

    Here: one header, with the id of the dead letter, so that both can be told to belong together.
    """
    die(q, error="bad audio")
    copy = row(q, "select message, headers from pgmq.q_pipeline_jobs_dlq")
    assert copy == {"message": JOB, "headers": {"x-bartleby-message-id": diagnostics(q)["message_id"]}}


def test_the_sibling_is_a_queue_of_pgmq_like_the_live_one(q: Connection) -> None:
    """A: send, read and delete work on the sibling as on the live queue."""
    die(q)
    [copy] = rows(q, "select * from pgmq.read(%s, 30, 10)", DLQ)
    assert copy["message"] == JOB
    delete(q, copy["msg_id"], DLQ)
    put(q, "mine", DLQ)
    watch(q)
    assert inside(q, DLQ) == ["mine"]


def test_work_the_dead_and_the_narrative_are_apart(q: Connection) -> None:
    """A: the live queue has work, the sibling has the dead, and the diagnostics have the story of the errors."""
    put(q, "poison")
    tries(q, 4, error="bad audio")
    put(q, "good")
    tries(q, 2, error="bad audio")
    assert (inside(q), inside(q, DLQ)) == (["good"], ["poison"])
    assert diagnostics(q)["last_error"] == "bad audio"
    assert [each["error"] for each in ledger(q, diagnostics(q)["message_id"])] == ["bad audio"] * 5


def test_replay_is_read_send_and_delete(q: Connection) -> None:
    """A: a manual replay reads from the sibling, sends to the live queue, deletes the row, and needs no tool.

    Here: the row is not deleted. The janitor sees what was done, and the letter says that it is replayed, and how.
    """
    die(q)
    by_hand(q)
    assert watch(q) == 1
    found = row(q, "select status, replayed_by, replay_reason from bartleby.dead_letters")
    assert (found["status"], found["replayed_by"]) == ("replayed", "pgmq")
    assert "by hand" in found["replay_reason"]


def test_each_queue_has_its_own_sibling(q: Connection) -> None:
    """A: it scales one to one: each queue that is added gets a sibling of its own."""
    for name in ("billing", "mail"):
        q.execute("select pgmq.create(%s)", [name])
        attach(q, name)
    assert queues(q) == ["billing", "billing_dlq", "mail", "mail_dlq", JOBS, DLQ]


def test_it_is_obvious_which_dead_belong_to_which_queue(q: Connection) -> None:
    """A: one sibling for each queue makes it obvious what died where.

    Here: the diagnostics are one table for all queues, and name queue and sibling.
    """
    q.execute("select pgmq.create('mail')")
    attach(q, "mail", max_attempts=1)
    put(q, "a letter", "mail")
    assert len(tick(q, 0, queue="mail")) == 1
    assert tick(q, 0, queue="mail") == []
    die(q)
    assert (inside(q, "mail_dlq"), inside(q, DLQ)) == (["a letter"], [JOB])
    found = [(each["queue_name"], each["sibling"], each["payload"]) for each in rows(q, DIAGNOSTICS)]
    assert sorted(found, key=str) == [("mail", "mail_dlq", "a letter"), (JOBS, DLQ, JOB)]


def test_two_queues_are_no_more_to_operate_than_one(q: Connection) -> None:
    """A, its price: two queues to operate.

    Here: the sibling follows the letters by itself: discarded, restored or replayed, it has what is dead and no more.
    """
    die(q)
    ids = column(q, "select message_id from bartleby.dead_letters")
    for verb, left in (("discard", []), ("restore", [JOB])):
        q.execute(f"select bartleby.{verb}(%s, 'ana', 'so it is')".encode(), [ids])
        assert inside(q, DLQ) == left
    replay(q)
    assert (inside(q), inside(q, DLQ)) == ([JOB], [])


def test_only_the_dead_are_moved(q: Connection) -> None:
    """A, its price: one send and one delete more for each dead message, at its end only.

    Here: what succeeds, also after failures that nobody told of, leaves no trace in any table of ours.
    """
    put(q)
    tries(q, 4)
    [last] = tick(q)
    delete(q, last["msg_id"])
    for table in ("pgmq_message", "dead_letter", "attempt", "event"):
        assert rows(q, f"select * from bartleby.{table}") == [], table
    assert value(q, "select total_messages from pgmq.metrics(%s)", DLQ) == 0


def test_one_artifact_is_enough_if_wanted(conn: Connection) -> None:
    """Refused, B, a table only: one thing less, and a simpler migration.

    Here: to be had by `p_sibling => false`; the letter is the whole of it, and is replayed in the same way.
    """
    conn.execute("select pgmq.create(%s)", [JOBS])
    attach(conn, sibling=False)
    die(conn)
    assert (queues(conn), diagnostics(conn)["sibling"]) == ([JOBS], None)
    replay(conn)
    assert inside(conn) == [JOB]


def test_no_script_is_needed_to_replay_from_a_row(q: Connection, bartleby: Run) -> None:
    """Refused, B: there is no send from a row, so a replay would need SQL or a script made for it.

    Here: there is one, the same from every surface.
    """
    die(q, JOB, "other")
    done = bartleby("replay", f"queue:{JOBS} payload.step:diarize", "--reason", "mended", "--yes", "--detach")
    assert done.code == 0, done.err
    q.execute("select count(*) from bartleby.advance_replays()")
    assert (inside(q), inside(q, DLQ)) == ([JOB], ["other"])


def test_the_dead_can_be_drained_like_a_queue(q: Connection) -> None:
    """Refused, B: without a queue the dead could not be drained like one."""
    die(q, 1, 2, 3)
    by_hand(q)
    assert (inside(q), inside(q, DLQ), watch(q)) == ([1, 2, 3], [], 3)
    assert status(q) == ["replayed"] * 3


def test_the_dead_are_moved_once(q: Connection) -> None:
    """Refused, C, marks in place: it would move no data at all.

    Here: a message is moved once in its life, when it dies, and no read touches it after that.
    """
    die(q)
    place = value(q, "select ctid::text from pgmq.q_pipeline_jobs_dlq")
    for _ in range(3):
        assert tick(q) == []
        watch(q)
    assert value(q, "select total_messages from pgmq.metrics(%s)", DLQ) == 1
    assert value(q, "select ctid::text from pgmq.q_pipeline_jobs_dlq") == place


def test_dead_and_live_do_not_mix(q: Connection) -> None:
    """Refused, C, marks in place: the dead would be among the living in the live queue."""
    die(q, "poison")
    put(q, "good")
    assert [each["message"] for each in tick(q)] == ["good"]
    assert value(q, "select queue_length from pgmq.metrics(%s)", JOBS) == 1


def test_the_dead_waste_no_slots(q: Connection) -> None:
    """Refused, C: every batch would waste slots on the dead.

    Here: not even in the read that finds them: where all of a batch is dead, the next is read at once.
    """
    for each in ("a", "b", "c"):
        put(q, each)
    tries(q)
    for each in ("d", "e", "f"):
        put(q, each)
    assert [each["message"] for each in tick(q, qty=3)] == ["d", "e", "f"]
    assert len(rows(q, DIAGNOSTICS)) == 3


def test_a_queue_that_is_made_anew_confuses_nothing(q: Connection) -> None:
    """Refused, C: marks would go by `msg_id`, which begins again when the queue is made anew.

    Here: a dead letter has an id of its own; a new message with the old `msg_id` is another one, also where the old one
    had only failed.
    """
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


def test_the_counter_of_the_dead_stands_still(q: Connection) -> None:
    """Refused, C: the counter of the dead would go on for ever, and that defeats the ceiling."""
    die(q)
    for _ in range(5):
        assert tick(q) == []
    assert (diagnostics(q)["read_ct"], value(q, "select read_ct from pgmq.q_pipeline_jobs_dlq")) == (6, 0)


def test_the_dispatch_boundary_decides_and_nobody_else(q: Connection) -> None:
    """Decision: the check is at the dispatch boundary, one place and one rule, so that no step drifts from it.

    Here: whoever reads by `pgmq_read`, whatever step it is. The janitor decides nothing, nor does `pgmq.read`.
    """
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


def test_a_worker_comes_through_the_same_boundary(q: Connection, bartleby: Run, tmp_path: Path) -> None:
    """Decision: one place and one rule.

    Here: also for the worker of Bartleby: what others have tried five times it does not run, and it is the same letter.
    """
    put(q, "poison")
    tries(q, error="bad audio")
    put(q, "deleted")
    assert working(bartleby, tmp_path) == ["ran deleted 1"]
    found = row(q, "select reason, attempts, error from bartleby.dead_letters where payload = '\"poison\"'")
    assert found == {"reason": "exhausted", "attempts": 5, "error": "bad audio"}
    assert inside(q, DLQ) == ["poison", "deleted"]


def test_step_1_the_payload_is_sent_to_the_sibling(q: Connection) -> None:
    """Decision, step 1: the payload is sent to `pipeline_jobs_dlq`."""
    die(q)
    assert value(q, "select total_messages from pgmq.metrics(%s)", DLQ) == 1


def test_step_2_a_row_of_diagnostics(q: Connection, clock: Clock) -> None:
    """Decision, step 2: a row tells `queue_name` and `original_msg_id`, has the `payload` with its `step` and its
    `recording_id`, the count `read_ct`, the text `last_error`, and the times `first_seen` and `dead_at`.

    Here: the view `pgmq_letters` has them. Step and recording are what they were, a part of the payload.
    """
    msg_id = put(q, JOB)
    enqueued = value(q, "select enqueued_at from pgmq.q_pipeline_jobs")
    tries(q, error="bad audio")
    assert tick(q) == []
    found = diagnostics(q)
    assert (found["queue_name"], found["original_msg_id"], found["payload"]) == (JOBS, msg_id, JOB)
    assert (found["read_ct"], found["last_error"], found["dead_at"]) == (6, "bad audio", clock.now())
    assert found["first_seen"] == enqueued


def test_step_and_recording_are_found(q: Connection, client: Client) -> None:
    """Decision, step 2: the row has columns for step and recording.

    Here: they are in the payload, and the filter finds what is there, of whatever pipeline.
    """
    die(q, JOB, {"step": "diarize", "recording_id": 8}, {"step": "mail"})
    [found] = client.dead_letters(f"queue:{JOBS} payload.step:diarize payload.recording_id:7")
    assert found.payload == JOB
    assert column(
        q, "select payload ->> 'recording_id' from bartleby.pgmq_letters where payload ->> 'step' = 'mail'"
    ) == [None]


def test_the_last_error_is_the_newest_that_was_told(q: Connection) -> None:
    """Decision, step 2: `last_error` is what a step told last, be it of an earlier try."""
    put(q)
    tries(q, 2, error="first")
    tries(q, 1, error="newest")
    tries(q, 2)
    assert tick(q) == []
    assert diagnostics(q)["last_error"] == "newest"


def test_without_a_word_the_last_error_is_null(q: Connection) -> None:
    """Decision, step 2: null is acceptable, where no step told anything.

    Here: the ledger says that nobody told what became of it.
    """
    die(q)
    assert diagnostics(q)["last_error"] is None
    told = ledger(q, diagnostics(q)["message_id"])[-1]
    assert (told["outcome"], told["rule"]) == ("lost", "nobody told what became of it")


def test_step_3_it_is_deleted_from_the_live_queue(q: Connection) -> None:
    """Decision, step 3: it is deleted from `pipeline_jobs`; not archived either."""
    die(q)
    assert (inside(q), rows(q, "select * from pgmq.a_pipeline_jobs")) == ([], [])


def test_step_4_it_is_not_dispatched(q: Connection) -> None:
    """Decision, step 4: dispatch is skipped, for that message only."""
    put(q, "poison")
    tries(q)
    put(q, "good")
    assert [each["message"] for each in tick(q)] == ["good"]


def test_nothing_is_deleted_before_it_is_stored(q: Connection) -> None:
    """Decision: sent and written down first, deleted last, so that nothing is lost on the way.

    Here: all of it is one transaction. If the sibling does not take it, or the diagnostics do not, it is still in the
    live queue and was not read.
    """
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


def test_the_four_steps_are_one_transaction(q: Connection, connect: Callable[..., Connection]) -> None:
    """Decision: four steps, one after the other.

    Here: nobody ever sees some of them: before the commit none, after it all, and of two readers one promotes.
    """
    put(q)
    tries(q)
    reader = connect(autocommit=False)
    assert tick(reader) == []
    assert (inside(q), inside(q, DLQ), rows(q, DIAGNOSTICS)) == ([JOB], [], [])
    assert tick(q) == []
    reader.commit()
    assert (inside(q), inside(q, DLQ), len(rows(q, DIAGNOSTICS))) == ([], [JOB], 1)


def test_five_is_the_default(q: Connection) -> None:
    """Decision: the ceiling is 5 by default."""
    assert stats(q, JOBS)["max_attempts"] == 5


def test_the_ceiling_is_set_by_an_environment_variable(
    conn: Connection, bartleby: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decision: `PIPELINE_MAX_RETRIES` sets it.

    Here: `BARTLEBY_PGMQ_MAX_ATTEMPTS` for a worker, and the policy of the queue for whoever reads by SQL.
    """
    conn.execute("select pgmq.create(%s)", [JOBS])
    attach(conn, backoff="none", breaker="off")
    put(conn, "poison")
    monkeypatch.setenv("BARTLEBY_PGMQ_MAX_ATTEMPTS", "2")
    assert working(bartleby, tmp_path) == ["ran poison 1", "ran poison 2"]
    assert stats(conn, JOBS)["max_attempts"] == 2


def test_read_ct_begins_at_one(q: Connection) -> None:
    """Decision: the first delivery has `read_ct` 1."""
    put(q)
    assert [each["read_ct"] for each in tick(q)] == [1]


def test_five_tries_are_made_and_no_sixth(q: Connection) -> None:
    """Decision: a ceiling of 5 is five tries; a message with `read_ct` 5 is dispatched, and one with 6 is not."""
    put(q)
    given = [each["read_ct"] for _ in range(6) for each in tick_and_wait(q)]
    assert given == [1, 2, 3, 4, 5]
    letter = row(q, "select attempts, reason from bartleby.dead_letters")
    assert letter == {"attempts": 5, "reason": "exhausted"}


def test_a_step_that_succeeds_deletes(q: Connection) -> None:
    """Decision: a step that succeeds calls `pgmq.delete`, as ever."""
    put(q)
    [job] = tick(q)
    delete(q, job["msg_id"])
    later(q)
    assert (tick(q), rows(q, DIAGNOSTICS)) == ([], [])


def test_a_step_that_fails_does_nothing(q: Connection) -> None:
    """Decision: a step that fails does nothing, and the message comes back when its time out of sight is over."""
    put(q)
    [job] = tick(q, vt=60)
    later(q, 50)
    assert tick(q) == []
    later(q, 10)
    assert [each["msg_id"] for each in tick(q)] == [job["msg_id"]]


def test_steps_do_not_decide_what_is_dead(q: Connection) -> None:
    """Decision: a step does not decide when a message is dead; the last failure too leaves it where it is.

    Here: `pgmq_fail` tells what went wrong, if a step likes to, and decides as little.
    """
    msg_id = put(q)
    tries(q, 4, error="bad audio")
    tick(q)
    assert fail(q, msg_id) is not None
    assert (inside(q), rows(q, DIAGNOSTICS)) == ([JOB], [])


def test_terminal_errors_are_promoted_now(q: Connection) -> None:
    """Decision: for terminal errors, as a recording that is deleted, there may be an explicit way to promote now.

    Here: `pgmq_reject`.
    """
    msg_id = put(q)
    tick(q)
    q.execute("select bartleby.pgmq_reject(%s, %s, 'unacceptable', 'the recording is deleted')", [JOBS, msg_id])
    found = diagnostics(q)
    assert (found["read_ct"], found["last_error"]) == (1, "the recording is deleted")
    assert (inside(q), inside(q, DLQ)) == ([], [JOB])


def test_a_handler_promotes_now_by_raising_terminal(q: Connection, bartleby: Run, tmp_path: Path) -> None:
    """Decision: terminal errors are told apart in a later version.

    Here: a handler in Python raises `Terminal`, or what its policy knows to be terminal.
    """
    put(q, "deleted")
    assert working(bartleby, tmp_path) == ["ran deleted 1"]
    assert row(q, "select reason, error from bartleby.dead_letters") == {
        "reason": "terminal",
        "error": "the recording is deleted",
    }


def test_the_retry_ceiling_alone_is_sufficient(q: Connection) -> None:
    """Decision: the ceiling is enough for a first version: what is terminal and not said to be so ends as well."""
    die(q, error="the recording is deleted")
    assert row(q, "select reason, attempts from bartleby.dead_letters") == {"reason": "exhausted", "attempts": 5}


def test_diagnostics_are_kept_for_30_days(q: Connection, clock: Clock) -> None:
    """Decision: diagnostics are kept for 30 days after `dead_at`."""
    assert stats(q, JOBS)["retention"] == MONTH
    die(q)
    clock.advance(MONTH - timedelta(minutes=1))
    q.execute("select bartleby.prune()")
    assert len(rows(q, DIAGNOSTICS)) == 1
    clock.advance(60)
    q.execute("select bartleby.prune()")
    assert rows(q, DIAGNOSTICS) == []


def test_pruning_needs_no_job_of_its_own(q: Connection, clock: Clock, bartleby: Run) -> None:
    """Decision: a job of pg_cron deletes what is older; it may come in a follow-up.

    Here: the janitor does it, which every worker has; without workers, `bartleby janitor`.
    """
    die(q)
    clock.advance(MONTH + timedelta(days=1))
    done = bartleby("janitor", "--once")
    assert done.code == 0, done.err
    assert rows(q, DIAGNOSTICS) == []


def test_the_table_does_not_grow_without_bound(q: Connection, clock: Clock) -> None:
    """Decision: without an end the table grows for ever, and that is a bug.

    Here: with the row go its attempts, its copy in the sibling, and what pgmq calls it; an event tells of it.
    """
    die(q, 1, 2, 3, error="bad audio")
    clock.advance(MONTH + timedelta(days=1))
    q.execute("select bartleby.prune()")
    for table in ("dead_letter", "attempt", "pgmq_message"):
        assert rows(q, f"select * from bartleby.{table}") == [], table
    assert inside(q, DLQ) == []
    assert "io.bartleby.dead_letter.expired" in column(q, "select type from bartleby.events")


def test_the_new_surface_is_one_queue(conn: Connection) -> None:
    """Consequence: the new surface is one queue, one table and one environment variable.

    Here: in pgmq one queue; the rest is in the schema `bartleby`, and is the same for all queues.
    """
    schema = "select relname from pg_class where relnamespace = 'bartleby'::regnamespace and relkind in ('r', 'p', 'v')"
    before = set(column(conn, schema))
    conn.execute("select pgmq.create(%s)", [JOBS])
    attach(conn)
    assert (queues(conn), set(column(conn, schema))) == ([JOBS, DLQ], before)


def test_the_dispatcher_reads_by_another_function(q: Connection) -> None:
    """Consequence: the dispatcher checks every message before it does anything else with it.

    Here: it needs none of its own. It calls `pgmq_read` where it called `pgmq.read`, with the same three arguments, and
    gets the same columns but for the time of the last read, which not every version has.
    """
    put(q)
    with q.transaction(force_rollback=True):
        theirs = q.execute("select * from pgmq.read(%s, 60, 10)", [JOBS]).description
    ours = q.execute("select * from bartleby.pgmq_read(%s, 60, 10)", [JOBS]).description
    types = {each.name: each.type_code for each in theirs or ()}
    assert {each.name: types.get(each.name) for each in ours or ()} == {
        each.name: each.type_code for each in ours or ()
    }
    assert types.keys() - {each.name for each in ours or ()} == {"last_read_at"}


def test_reading_is_as_it_was_while_nothing_is_stuck(q: Connection) -> None:
    """Consequence: as long as no message is stuck, reading is what it was.

    Here: `pgmq_read` returns what `pgmq.read` returns, in its order, and writes to no table of ours;
    `python -m bench --only pgmq` measures what it costs.
    """
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


def test_the_operators_query(q: Connection) -> None:
    """Consequence: one query, the newest first, shows what is stuck."""
    for n in (1, 2, 3):
        die(q, n)
    assert [each["payload"] for each in rows(q, DIAGNOSTICS)] == [3, 2, 1]


def test_a_join_tells_who_is_affected(q: Connection) -> None:
    """Consequence: joined with the table of recordings, the diagnostics tell whose they are."""
    q.execute("create table recordings (id bigint, owner text)")
    q.execute("insert into recordings values (7, 'melville'), (8, 'hawthorne')")
    die(q)
    query = (
        "select r.owner from bartleby.pgmq_letters l join recordings r on r.id = (l.payload ->> 'recording_id')::bigint"
    )
    assert column(q, query) == ["melville"]


def test_replay_is_native_to_the_queue(q: Connection) -> None:
    """Consequence: a replay is read from the sibling, send to the live queue, delete from the sibling, delete the row.

    Here: the first three are enough, and nothing is lost by them: if the message dies again it is the same letter, in
    its second cycle; if it is done the letter is resolved.
    """
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


def test_deleting_the_row_is_a_discard(q: Connection, client: Client) -> None:
    """Consequence: the last step of a replay by hand deletes the row of diagnostics.

    Here: a row of evidence is not deleted by hand. Whoever wants it out of sight discards it, and can restore it.
    """
    die(q)
    q.execute("set role bartleby_operator")
    with refused("42501"):
        q.execute("delete from bartleby.dead_letter")
    q.execute("reset role")
    q.execute("select bartleby.discard(array(select message_id from bartleby.dead_letters), 'ana', 'not needed')")
    assert (list(client.dead_letters("status:dead")), status(q), inside(q, DLQ)) == ([], ["discarded"], [])


def test_an_operator_needs_no_new_code(q: Connection) -> None:
    """Consequence: no new path of code is needed: an operator does it in an SQL editor.

    Here: by hand as above, or in one statement, which says who and why.
    """
    die(q)
    q.execute("set role bartleby_operator")
    assert len(replay(q)) == 1
    q.execute("reset role")
    assert inside(q) == [JOB]
    assert row(q, "select actor, reason from bartleby.audit_log where action = 'letter.replay'") == {
        "actor": "ana",
        "reason": "it is mended",
    }


def test_replay_has_a_surface(q: Connection, bartleby: Run) -> None:
    """Consequence: a page for replays would be nice to have.

    Here: letters of pgmq are in every command, like all others; a plan is shown before it runs.
    """
    die(q)
    [found] = bartleby("dead", "--json").document
    shown = bartleby("replay", str(found["message_id"]), "--reason", "mended", "--dry-run")
    assert (shown.code, inside(q)) == (0, [])
    done = bartleby("replay", str(found["message_id"]), "--reason", "mended", "--yes", "--detach")
    assert done.code == 0, done.err
    q.execute("select bartleby.advance_replays()")
    assert inside(q) == [JOB]


def test_whoever_reads_knows_that_rows_are_ephemeral(q: Connection, clock: Clock) -> None:
    """Consequence: the 30 days are a contract, so that whoever reads a row knows that it does not stay.

    Here: the view `queues` says how long, the policy changes it, and an event tells of what went unresolved.
    """
    q.execute('select bartleby.configure_queue(%s, \'{"retention": "7 days"}\')', [JOBS])
    assert stats(q, JOBS)["retention"] == timedelta(days=7)
    die(q)
    clock.advance(timedelta(days=7, minutes=1))
    q.execute("select bartleby.prune()")
    assert rows(q, DIAGNOSTICS) == []
    assert "io.bartleby.dead_letter.expired" in column(q, "select type from bartleby.events")


def test_what_is_kept_longer_goes_elsewhere(q: Connection, client: Client, bus: Bus, dsn: str) -> None:
    """Consequence: what is to be kept longer goes to Sentry, or the like.

    Here: a sink takes it there.
    """
    client.put_sink("bus", "sentry", {"options": bus.sentry, "types": ["dead_letter.*"]}, **ANA)
    with relaying(dsn):
        die(q, error="bad audio")
        until(lambda: bus.events)
    assert bus.events[0]["exception"]["values"][0] == {"type": "ValueError", "value": "bad audio"}
    assert bus.events[0]["tags"]["queue"] == JOBS


def test_a_row_can_be_held(q: Connection, clock: Clock) -> None:
    """Consequence: this table is not the place to keep anything longer.

    Here: it can be: what is held stays, with its copy, until it is let go.
    """
    die(q)
    q.execute("select bartleby.hold(array(select message_id from bartleby.dead_letters), 'ana', 'for the lawyers')")
    clock.advance(2 * MONTH)
    q.execute("select bartleby.prune()")
    assert (len(rows(q, DIAGNOSTICS)), inside(q, DLQ)) == (1, [JOB])


def test_a_few_hundred_dead_are_fine(q: Connection) -> None:
    """Consequence: the sibling has no retention, and a few hundred rows in it are fine.

    Here: it has that of the letters, as above; 500 at once are promoted by one read.
    """
    q.execute("select pgmq.send_batch(%s, array(select to_jsonb(n) from generate_series(1, 500) n))", [JOBS])
    q.execute("update pgmq.q_pipeline_jobs set read_ct = 5")
    assert tick(q, qty=500) == []
    assert (inside(q), inside(q, DLQ)) == ([], list(range(1, 501)))
    assert value(q, "select count(*) from bartleby.pgmq_letters") == 500


def test_the_sibling_can_be_archived(q: Connection) -> None:
    """Consequence: if real volume gathers in the sibling, `pgmq.archive` may be used on it later.

    Here: that is noticed: the letter is discarded, says by what, keeps its evidence and can be restored.
    """
    die(q, error="bad audio")
    q.execute("select pgmq.archive(%s, msg_id) from pgmq.q_pipeline_jobs_dlq", [DLQ])
    assert watch(q) == 1
    found = row(q, "select message_id, status, discarded_by, error, payload from bartleby.dead_letters")
    letter = found.pop("message_id")
    assert found == {"status": "discarded", "discarded_by": "pgmq", "error": "bad audio", "payload": JOB}
    q.execute("select bartleby.restore(array[%s::bigint], 'ana', 'still needed')", [letter])
    assert (status(q), inside(q, DLQ)) == (["dead"], [JOB])


def test_the_end_of_the_row_is_the_safety_valve(q: Connection, clock: Clock) -> None:
    """Consequence: the 30 days of the diagnostics are the safety valve.

    Here: for the sibling too; what is younger stays in both.
    """
    die(q, "old")
    clock.advance(timedelta(days=20))
    die(q, "young")
    clock.advance(timedelta(days=11))
    q.execute("select bartleby.prune()")
    assert ([each["payload"] for each in rows(q, DIAGNOSTICS)], inside(q, DLQ)) == (["young"], ["young"])


def test_the_time_out_of_sight_is_the_whole_backoff(q: Connection, clock: Clock) -> None:
    """Consequence: no exponential backoff yet: the fixed 60 s out of sight are all there is.

    Here: so it is where no step tells its failure, or where the policy says `fixed` and 60 s.
    """
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


def test_five_minutes_from_the_first_failure_to_the_letter(q: Connection) -> None:
    """Consequence: five times 60 s are about five minutes from the first failure to the dead letter."""
    put(q)
    waited = 0
    while tick(q, vt=60):
        later(q, 50)
        assert tick(q, vt=60) == []
        later(q, 10)
        waited += 60
    assert (waited, len(rows(q, DIAGNOSTICS))) == (300, 1)


def test_what_fails_for_a_short_time_recovers_by_itself(q: Connection) -> None:
    """Consequence: the pace is slow enough that what fails for a short time recovers, and nobody has to do anything."""
    put(q)
    tries(q, 2, error="timeout")
    [job] = tick(q)
    delete(q, job["msg_id"])
    watch(q)
    assert (inside(q), inside(q, DLQ), rows(q, DIAGNOSTICS)) == ([], [], [])


def test_backoff_is_exponential_by_default(q: Connection, clock: Clock) -> None:
    """Consequence: exponential backoff is left for later.

    Here: it is the default for failures that are told: up to 1, 2, 4 and 8 seconds, at random, or exactly so.
    """
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


def test_the_fifth_failure_itself_buries_nothing(q: Connection) -> None:
    """Consequence: no dead letter is made by the fifth failure itself, but by the read that comes after it."""
    put(q)
    tries(q, 5, error="bad audio")
    assert (inside(q), rows(q, DIAGNOSTICS)) == ([JOB], [])
    assert tick(q) == []
    assert (inside(q), len(rows(q, DIAGNOSTICS))) == ([], 1)


def test_nobody_works_on_it_while_it_is_out_of_sight(q: Connection) -> None:
    """Consequence: that does no harm, for until then it is out of sight and nobody works on it in vain.

    Here: after a fifth failure that was told it is in sight at once, so that the next read finds the letter.
    """
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


def test_steps_share_no_state_to_count(q: Connection, connect: Callable[..., Connection]) -> None:
    """Consequence: a count by the steps would need state that they share, and they would drift apart again.

    Here: readers that know nothing of each other, some that tell and some that do not, come to five together.
    """
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


def test_read_ct_is_shown_with_every_message(q: Connection) -> None:
    """Notes: `read_ct` comes with every message that is read."""
    first, second = put(q), put(q)
    tick(q, qty=1)
    later(q)
    assert {each["msg_id"]: each["read_ct"] for each in tick(q)} == {first: 2, second: 1}


def test_promotion_uses_what_pgmq_has(q: Connection) -> None:
    """Notes: promotion is by the send and delete of pgmq that are used elsewhere, so its own figures agree."""
    die(q, 1, 2)
    put(q, 3)
    metrics = "select queue_name, queue_length, total_messages from pgmq.metrics_all() order by queue_name"
    assert [tuple(each.values()) for each in rows(q, metrics)] == [(JOBS, 1, 3), (DLQ, 2, 2)]


def test_the_sibling_is_made_defensively(q: Connection) -> None:
    """Notes: the sibling is created as defensively as the queue was: it may be there already, and nothing breaks.

    Here: attaching is repeatable, and what was in a sibling made by hand becomes dead letters.
    """
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


def test_a_missing_extension_breaks_no_migration(without_pgmq: str, bartleby: Run) -> None:
    """Notes: a missing extension never breaks the migrations.

    Here: without pgmq all the rest is installed, and whoever attaches a queue is told; when pgmq comes, install again.
    """
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


def test_the_fallback_needs_no_pgmq(without_pgmq: str, bartleby: Run) -> None:
    """Notes: the fallback, direct calls, does without the queue altogether.

    Here: a queue of Bartleby's own does what is said here where there is no pgmq: five tries, then a dead letter, which
    the same commands list and replay.
    """
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


def test_the_diagnostics_outlive_the_queue(q: Connection) -> None:
    """Notes: if another engine replaces pgmq one day, the diagnostics are the one piece worth keeping.

    Here: they stay when both queues are gone, and can be replayed into a queue that is not one of pgmq.
    """
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
