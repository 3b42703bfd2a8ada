"""Transactional outbox.

A message is written in the producer's transaction. Failures are retried with jitter, classified, kept as dead letters,
and replayed in place under the same identity, with the earlier cycle in `failure_history`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pydantic
import pytest
from psycopg.types.json import Jsonb

from bartleby import Bartleby, Client, Message, Retry, RetryPolicy, Terminal
from bartleby.testing import Clock, assert_dead, drain
from tests.kit.agent import Agent, as_seen
from tests.kit.commands import Done
from tests.kit.sql import ack, claim, column, create, fail_all, psql, refused, row, rows, send, send_count, stats, value
from tests.kit.worker import Told, working
from tests.stories.kit import ANA, SECOND, Connection, bury, fail_one, fail_until_dead, ledger, letter, places, until

ON_CALL = Path(__file__).parents[3] / "docs" / "howto" / "on-call.md"
ENTRY = {
    "cycle": int, "reason": str, "attempts": int, "crashes": int, "first_failed_at": str, "dead_at": str,
    "error_type": str, "error": str, "traceback": str, "fingerprint": str, "worker": str, "worker_version": str,
    "group_id": int, "generation": int, "queue": str, "replayed_at": str, "replayed_by": str, "replay_reason": str,
}  # fmt: skip
DEAD = "select * from bartleby.dead_letters where status = 'dead'"
REPLAYS = "select actor, reason from bartleby.audit_log where action = 'letter.replay' order by id"
WHY = "the cause is fixed"
Run = Callable[..., Done]


@pytest.fixture
def q(conn: Connection, clock: Clock) -> Connection:
    """A queue with the default policy."""
    create(conn)
    return conn


class Shop:
    """An application whose handlers raise `error`; `runs` are the messages they were given."""

    def __init__(self, app: Bartleby, conn: Connection) -> None:
        self.app = app
        self.conn = conn
        self.error: BaseException | None = None
        self.runs: list[Message] = []

    def open(self, queue: str = "q", **options: Any) -> "Shop":
        def handle(message: Message) -> None:
            self.runs.append(message)
            if self.error is not None:
                raise self.error

        self.app.handler(queue, **options)(handle)
        return self

    def fail(self, error: BaseException, queue: str = "q") -> list[dict[str, Any]]:
        """Return the attempts at a message whose handler raises this."""
        self.error = error
        sent = send(self.conn, queue=queue)
        drain(self.app)
        return ledger(self.conn, sent)


@pytest.fixture
def shop(app: Bartleby, conn: Connection, clock: Clock) -> Shop:
    create(conn, max_attempts=2, breaker="off")
    return Shop(app, conn)


def replay(conn: Connection, message_id: int, generation: int | None = None, by: str = "ana") -> list[int]:
    return column(conn, "select bartleby.replay(array[%s::bigint], %s, %s, %s)", message_id, by, WHY, generation)


def attempts(conn: Connection) -> int:
    return int(value(conn, "select attempts from bartleby.messages"))


def dead(conn: Connection) -> list[int]:
    return [each["message_id"] for each in rows(conn, DEAD)]


@pytest.mark.seed("outbox-1", "outbox-2", "outbox-4", "outbox-5")
def test_message_is_committed_with_its_producer_and_is_in_one_place(q: Connection) -> None:
    with q.transaction(force_rollback=True):
        send(q, "never")
    with q.transaction():
        done, *lost, living = [send(q, n) for n in range(4)]
        assert places(q, done) == ["ready"]
    sent = [done, *lost, living]
    work = claim(q, 10)
    assert (work.payloads, [places(q, each) for each in sent]) == ([0, 1, 2, 3], [["leased"]] * 4)
    ack(q, work.lease, work.positions[:1])
    verdicts = [{"position": each, "verdict": "dead"} for each in work.positions[1:3]]
    q.execute("select bartleby.fail(%s, %s)", [work.lease, Jsonb(verdicts)])
    assert [places(q, each) for each in sent] == [[], ["dead"], ["dead"], ["leased"]]
    assert dead(q) == lost
    q.execute("select * from bartleby.discard(array[%s::bigint], 'ana', 'spam')", [lost[0]])
    assert dead(q) == lost[1:]
    assert (letter(q, lost[0])["payload"], letter(q, lost[0])["discarded_by"]) == (1, "ana")


@pytest.mark.seed("outbox-3")
def test_polling_finds_messages_without_notifications(
    q: Connection, app: Bartleby, connect: Callable[[], Connection]
) -> None:
    shop = Shop(app, q).open()
    listener = connect()
    channel = value(q, "select bartleby.channel('q')")
    with working(app):
        send(q)
        until(lambda: len(shop.runs) == 1)
        listener.execute(f'listen "{channel}"'.encode())
        q.execute("set bartleby.notify = off")
        send(q)
        until(lambda: len(shop.runs) == 2)
    assert list(listener.notifies(timeout=0)) == []


@pytest.mark.seed("outbox-6")
def test_producer_fixes_its_data_and_replays_in_one_transaction(
    q: Connection, connect: Callable[[], Connection]
) -> None:
    worker = connect()
    q.execute("create table orders (id int primary key, country text)")
    q.execute("insert into orders values (42, '??'), (43, '??')")
    sent = bury(q, {"order": 42}, key="order-42")
    joined = f"update orders o set country = 'AT' from ({DEAD}) d where o.id = (d.payload ->> 'order')::int"
    for undone in (True, False):
        with q.transaction(force_rollback=undone):
            assert q.execute(joined.encode()).rowcount == 1
            assert replay(q, sent) == [sent]
            assert claim(worker).messages == []
        assert places(q, sent) == (["dead"] if undone else ["ready"])
        assert column(q, "select country from orders order by id") == ["??" if undone else "AT", "??"]
    assert claim(worker).ids == [sent]


@pytest.mark.seed("outbox-7", "outbox-8", "outbox-11", "outbox-13")
def test_default_policy_is_five_attempts_on_an_exponential_curve(q: Connection, clock: Clock) -> None:
    found = stats(q)
    assert (found["backoff"], found["base"], found["factor"]) == ("exponential", SECOND, 2)
    assert (found["cap"], found["jitter"]) == (timedelta(minutes=5), "full")
    create(q, "even", jitter="none")
    sent = send(q, queue="even")
    assert [each.total_seconds() for each in fail_until_dead(q, clock, "even")] == [1, 2, 4, 8]
    found = letter(q, sent)
    assert (found["attempts"], found["reason"]) == (5, "exhausted")
    assert 15 * SECOND <= found["dead_at"] - found["first_failed_at"] < 16 * SECOND
    send(q, queue="even", max_attempts=12)
    waits = [each.total_seconds() for each in fail_until_dead(q, clock, "even")]
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


@pytest.mark.seed("outbox-9", "outbox-10")
def test_full_jitter_is_drawn_for_every_attempt_of_every_message(q: Connection, clock: Clock) -> None:
    send_count(q, 300)
    failed_at = value(q, "select bartleby.clock()")
    waits = [(each["retry_at"] - failed_at).total_seconds() for each in fail_all(q, claim(q, 300))]
    assert 0 <= min(waits) < 0.1
    assert 0.9 < max(waits) <= 1
    assert 0.4 < sum(waits) / 300 < 0.6
    create(q, "single")
    send(q, queue="single", max_attempts=9)
    shares = [each.total_seconds() / 2**n for n, each in enumerate(fail_until_dead(q, clock, "single"))]
    assert max(shares) <= 1
    assert len({round(each, 3) for each in shares}) > 4


@pytest.mark.seed("outbox-12", "outbox-14", "outbox-17", "outbox-18", "outbox-19", "outbox-20", "outbox-21")
@pytest.mark.seed("outbox-22", "outbox-62", "outbox-66", "outbox-67")
def test_error_class_decides_between_retry_and_death(shop: Shop, bartleby: Run) -> None:
    class NotPaid(Terminal):
        pass

    shop.conn.execute("create table seen (id int primary key)")
    with pytest.raises(psycopg.IntegrityError) as duplicate:
        shop.conn.execute("insert into seen values (1), (1)")
    with pytest.raises(psycopg.OperationalError) as unreachable:
        psycopg.connect("postgresql://nobody@127.0.0.1:1/nothing", connect_timeout=2)
    again = Retry("another worker has it")
    again.__cause__ = duplicate.value
    create(shop.conn, "listed", max_attempts=2, breaker="off")
    create(shop.conn, "patient", jitter="none", breaker="off")
    shop.open().open("listed", terminal=[LookupError]).open("patient", retry=RetryPolicy(max_attempts=3))
    for queue, error, verdicts, rule, seconds in (
        ("q", duplicate.value, ["dead"], "psycopg.errors.UniqueViolation", None),
        ("q", NotPaid("order 42"), ["dead"], "NotPaid is a Terminal", None),
        ("q", ConnectionResetError(), ["retry", "dead"], "ConnectionResetError is transient; attempt 1 of 2", None),
        ("q", TimeoutError(), ["retry", "dead"], "TimeoutError is transient; attempt 1 of 2", None),
        ("q", unreachable.value, ["retry", "dead"], "psycopg.OperationalError is transient; attempt 1 of 2", None),
        ("q", KeyError("AT"), ["retry", "dead"], "KeyError: transient by default; attempt 1 of 2", None),
        ("listed", KeyError("AT"), ["dead"], "KeyError is a LookupError, listed by the handler", None),
        ("listed", again, ["retry", "dead"], "", None),
        ("patient", Terminal("not paid"), ["dead"], "Terminal", 0),
        ("patient", ConnectionError(), ["retry", "retry", "dead"], "attempt 1 of 3", 3),
    ):
        shop.runs.clear()
        found = shop.fail(error, queue)
        assert ([each["verdict"] for each in found], len(shop.runs)) == (verdicts, len(verdicts)), error
        assert rule in found[0]["rule"], error
        last = letter(shop.conn, found[0]["message_id"])
        assert (last["attempts"], last["reason"] == "terminal") == (len(verdicts), verdicts == ["dead"]), error
        assert rule in bartleby("explain", str(last["message_id"])).out.replace("\n", " "), error
        if seconds is not None:
            assert round((last["dead_at"] - last["created_at"]).total_seconds()) == seconds, error
    shop.error = psycopg.errors.AdminShutdown("terminating connection")
    send(shop.conn)
    assert drain(shop.app) == {"released": 1}
    assert row(shop.conn, "select state, attempts from bartleby.messages") == {"state": "deferred", "attempts": 0}


class Model(pydantic.BaseModel):
    id: int


@dataclass
class Order:
    id: int

    def __post_init__(self) -> None:
        if self.id < 0:
            raise ValueError("negative")


@pytest.mark.seed("outbox-15", "outbox-16")
def test_invalid_payload_is_not_retried(shop: Shop) -> None:
    ran: list[object] = []

    def checks(message: Message) -> None:
        ran.append(Model.model_validate(message.payload))

    def takes_model(order: Model) -> None:
        ran.append(order)

    def takes_order(order: Order) -> None:
        raise ValueError("not of the payload")

    for queue, handler in (("checks", checks), ("model", takes_model), ("order", takes_order)):
        create(shop.conn, queue, max_attempts=2, breaker="off")
        shop.app.handler(queue)(handler)
    for queue, payload, reason, word in (
        ("checks", "x", "terminal", "valid integer"),
        ("model", "x", "unacceptable", "valid integer"),
        ("order", "many", "unacceptable", ""),
        ("order", -1, "unacceptable", "negative"),
    ):
        sent = send(shop.conn, {"id": payload}, queue)
        assert drain(shop.app) == {"dead": 1}, queue
        found = letter(shop.conn, sent)
        assert (found["reason"], found["attempts"], word in found["error"]) == (reason, 1, True), queue
    assert ran == []
    for queue in ("checks", "model", "order"):
        send(shop.conn, {"id": 1}, queue)
    assert drain(shop.app) == {"done": 2, "retried": 1, "dead": 1}
    assert (ran, assert_dead(shop.app, "order", reason="exhausted")[0].attempts) == ([Model(id=1)] * 2, 2)


@pytest.mark.seed("outbox-23", "outbox-24", "outbox-25", "outbox-26", "outbox-27", "outbox-28", "outbox-29")
@pytest.mark.seed("outbox-33", "outbox-52", "outbox-55", "outbox-56", "outbox-57", "outbox-58", "outbox-61", "pulse-44")
def test_replay_begins_a_cycle_and_keeps_identity_and_history(
    q: Connection, clock: Clock, connect: Callable[[], Connection]
) -> None:
    sent = send(q, {"order": 42}, key="order-42")
    created, last_id = q.execute("select created_at, bartleby.last_message_id() from bartleby.messages").fetchall()[0]
    for cycle, error in ((1, "first"), (2, "second"), (3, None)):
        assert (places(q, sent), attempts(q)) == (["ready"], 0)
        assert row(q, "select message_id, crashes, cycle from bartleby.messages") == {
            "message_id": sent, "crashes": 0, "cycle": cycle,
        }  # fmt: skip
        assert rows(q, "select * from bartleby.attempts where cycle = %s", cycle) == []
        began = value(q, "select bartleby.clock()")
        first = fail_one(q, error_type="KeyError", error=error)
        assert (first["attempt"], first["cycle"], first["error"], attempts(q)) == (1, cycle, error, 1)
        clock.advance(first["retry_at"] - first["failed_at"])
        assert len(fail_until_dead(q, clock, error_type="IndexError", error=error)) == 3
        found = letter(q, sent)
        assert (found["error_type"], found["error"], found["attempts"]) == ("IndexError", error, 5)
        assert (found["first_failed_at"], found["cycle"]) == (began, cycle)
        clock.advance(3600)
        assert replay(q, sent) == [sent]
        replayed = letter(q, sent)
        assert (replayed["status"], replayed["error"], replayed["cycle"]) == ("replayed", error, cycle)
        assert [each["error"] for each in replayed["failure_history"]] == ["first", "second"][: cycle - 1]
    again = claim(q)
    assert (again.one["message_id"], again.one["key"]) == (sent, "order-42")
    assert (again.one["created_at"], dead(q)) == (created, [])
    ack(q, again.lease)
    assert value(q, "select bartleby.last_message_id()") == last_id
    found = row(connect(), "select * from bartleby.dead_letters")
    assert (found["status"], found["replayed_by"], found["cycle"]) == ("resolved", "ana", 3)
    assert found["resolved_at"] >= found["replayed_at"] >= found["dead_at"]
    kept = ("cycle", "error", "attempts", "replayed_by", "replay_reason")
    assert [tuple(each[name] for name in kept) for each in found["failure_history"]] == [
        (1, "first", 5, "ana", WHY), (2, "second", 5, "ana", WHY),
    ]  # fmt: skip
    assert rows(q, REPLAYS) == [{"actor": "ana", "reason": WHY}] * 3
    assert [(each["cycle"], each["attempt"]) for each in ledger(q, sent)] == [
        (cycle, attempt) for cycle in (1, 2, 3) for attempt in range(1, 6)
    ]


@pytest.mark.seed("outbox-37", "outbox-64")
def test_history_entry_has_a_fixed_shape_and_a_bounded_size(q: Connection, client: Client) -> None:
    full = {
        "error_type": "KeyError", "error": "x" * 100_000, "traceback": "File …", "fingerprint": "f1",
        "worker_version": "2.4.0",
    }  # fmt: skip
    bare = send(q)
    fail_one(q, verdict="dead")
    sent = send(q, generation=3)
    fail_one(q, verdict="dead", **{**full, "error": "x" * 200_000})
    for each in (bare, sent, sent):
        replay(q, each, generation=4)
        fail_one(q, verdict="dead")
    assert [each.message_id for each in client.dead_letters("cycle:>2")] == [sent]
    found = client.dead_letter(sent)
    assert found is not None
    entry, _ = found.failure_history
    assert {name: type(entry.get(name)) for name in ENTRY} == ENTRY
    assert {name: entry[name] for name in full} == full
    assert (entry["cycle"], entry["attempts"], entry["crashes"], entry["generation"]) == (1, 1, 0, 3)
    assert (entry["reason"], entry["queue"], entry["worker"]) == ("terminal", "q", "w")
    assert (entry["replayed_by"], entry["replay_reason"]) == ("ana", WHY)
    assert (entry["edited"], entry["replay_id"]) == (None, None)
    times = [datetime.fromisoformat(entry[each]) for each in ("first_failed_at", "dead_at", "replayed_at")]
    assert (times, all(each.tzinfo for each in times)) == (sorted(times), True)
    [other] = letter(q, bare)["failure_history"]
    assert other.keys() == entry.keys()
    assert [name for name in full if other[name] is not None] == []


@pytest.mark.seed("outbox-30", "outbox-31", "outbox-34", "outbox-35", "outbox-36")
def test_replay_is_atomic_and_takes_its_values_from_the_caller(q: Connection) -> None:
    sent = bury(q, generation=3)
    before = letter(q, sent)
    for who, why in ((None, WHY), ("ana", None), ("", WHY), ("ana", " ")):
        with refused("ZB008"):
            q.execute("select bartleby.replay(array[%s::bigint], %s, %s)", [sent, who, why])
    with q.transaction(force_rollback=True):
        replay(q, sent, generation=7)
        assert places(q, sent) == ["ready"]
    assert (places(q, sent), letter(q, sent), rows(q, REPLAYS)) == (["dead"], before, [])
    for by, generation, expected in (("ana@example.com", None, 3), ("sql-direct", 7, 7)):
        replay(q, sent, generation, by)
        assert (letter(q, sent)["replayed_by"], rows(q, REPLAYS)[-1]["actor"]) == (by, by)
        assert value(q, "select generation from bartleby.messages") == expected
        fail_one(q, verdict="dead")


@pytest.mark.seed("outbox-32")
def test_generation_runs_on_its_own_or_newer_workers(q: Connection, dsn: str, clock: Clock) -> None:
    old, new = (Shop(Bartleby(dsn, generation=each), q).open() for each in (1, 2))
    ahead = send(q, generation=2)
    drain(old.app)
    assert (old.runs, attempts(q), ledger(q, ahead)) == ([], 0, [])
    clock.advance(3600)
    behind = send(q, generation=1)
    drain(new.app)
    assert {each.id for each in new.runs} == {ahead, behind}
    for generation, shop in ((1, old), (2, new)):
        sent = bury(q, generation=3 - generation)
        replay(q, sent, generation=generation)
        drain(old.app)
        clock.advance(3600)
        drain(new.app)
        assert (shop.runs[-1].id, shop.runs[-1].generation) == (sent, generation)
    assert (len(old.runs), len(new.runs)) == (1, 3)
    for each in (old, new):
        each.app.client.close()


@pytest.mark.seed("outbox-38", "outbox-39", "outbox-40", "outbox-59", "outbox-63")
def test_operator_needs_nothing_but_psql(q: Connection, dsn: str) -> None:
    bury(q)
    send(q)
    fail_one(q, verdict="dead", error_type="IndexError")
    runbook = re.search(r"## With psql alone.*?```sql\n(.*?)```", ON_CALL.read_text(), re.DOTALL)
    assert runbook
    q.execute(runbook[1].encode())
    assert row(q, "select state, note from bartleby.groups where id = 2")["state"] == "resolved"
    assert value(q, "select status from bartleby.replays where id = 1") == "running"
    create(q, "orders")
    sent = bury(q, {"order": 42}, "orders", error="no such customer")
    found = "select queue, payload ->> 'order', error from bartleby.dead_letters where queue = 'orders'"
    call = f"select bartleby.replay(array[{sent}], 'ana@example.com', '{WHY}')"
    for query, out in ((found, "orders|42|no such customer\n"), (call, f"{sent}\n")):
        done = psql(dsn, "-At", "-c", query)
        assert (done.returncode, done.stdout) == (0, out)
    assert places(q, sent) == ["ready"]
    fail_one(q, "orders", verdict="dead")
    q.execute("set role bartleby_reader")
    with refused("42501"):
        replay(q, sent)
    q.execute("set role bartleby_operator")
    assert sent in dead(q)
    for verb, status in (("discard", "discarded"), ("restore", "dead")):
        q.execute(f"select bartleby.{verb}(array[%s::bigint], 'ana', 'spam')".encode(), [sent])
        assert letter(q, sent)["status"] == status
    assert replay(q, sent) == [sent]
    assert places(q, sent) == ["ready"]


@pytest.mark.seed("outbox-65", "outbox-68")
def test_commands_do_what_the_sql_does(q: Connection, bartleby: Run) -> None:
    austria, germany, france = (bury(q, {"country": each}) for each in ("AT", "DE", "FR"))

    def run(*words: str) -> str:
        done = bartleby(*words)
        assert done.code == 0, done.err
        return done.out + done.err

    def statuses() -> list[str]:
        return [letter(q, each)["status"] for each in (austria, germany)]

    why = ("--reason", "spam", "--yes")
    [group] = bartleby("groups", "--json").document
    assert f"bartleby replay group:{group['id']}" in run("groups", str(group["id"]))
    assert [line.split()[0] for line in run("dead", "payload.country:DE").splitlines()] == ["message", str(germany)]
    assert f"bartleby replay {austria} --reason" in run("explain", str(austria))
    shown = run("replay", "queue:q payload.country:AT", *why[:2], "--dry-run")
    assert ("1: q 1" in shown, statuses()) == (True, ["dead", "dead"])
    run("discard", "queue:q payload.country:DE", *why, "--actor", "ana")
    q.execute("select bartleby.discard(array[%s::bigint], 'ana', 'spam')", [france])
    discarded = "select status, discarded_by, discard_reason from bartleby.dead_letters where message_id = %s"
    assert row(q, discarded, germany) == row(q, discarded, france)
    audited = "select actor, reason from bartleby.audit_log where action = 'letter.discard'"
    assert rows(q, audited) == [{"actor": "ana", "reason": "spam"}] * 2
    assert statuses() == ["dead", "discarded"]
    run("restore", str(germany), *why)
    run("hold", str(germany), *why)
    assert (statuses(), letter(q, germany)["held_at"] is None) == (["dead", "dead"], False)
    run("replay", "queue:q payload.country:AT", *why, "--detach")
    q.execute("select count(*) from bartleby.advance_replays()")
    assert (statuses(), claim(q, 10).ids) == (["replayed", "dead"], [austria])


@pytest.mark.seed("outbox-41", "outbox-42")
def test_agent_lists_and_reads_dead_letters(q: Connection, client: Client) -> None:
    agent = Agent(client)
    died = [bury(q, {"n": n, "password": "hunter2"}, error="no such customer") for n in range(3)]
    listed = agent.call("list_dead_letters").document["letters"]
    assert [each["message_id"] for each in listed] == died[::-1]
    [found] = agent.call("list_dead_letters", filter="queue:q payload.n:1").document["letters"]
    assert (found["message_id"], found["status"]) == (died[1], "dead")
    assert found["error"] == {"untrusted": True, "text": "no such customer", "cut": None}
    shown = agent.call("get_dead_letter", message_id=died[1]).document
    assert (shown["payload"]["text"], shown["error"]["text"]) == ('{"n": 1, "password": "***"}', "no such customer")
    story = agent.call("explain", message_id=died[1]).document
    assert any("no such customer" in each["told"]["text"] for each in story["timeline"])
    called = ["list_dead_letters", "list_dead_letters", "get_dead_letter", "explain"]
    assert sorted(each.subject["tool"] for each in agent.audited("agent.call")) == sorted(called)


@pytest.mark.seed("outbox-43")
def test_agent_replays_what_a_person_has_approved(conn: Connection, app: Bartleby, client: Client) -> None:
    create(conn)
    agent = Agent(client)
    sent, again = bury(conn, "fixed"), bury(conn, "not yet")
    shop = Shop(app, conn).open(terminal=[KeyError])

    def replayed(one: int) -> tuple[int, int]:
        plan = agent.plan(ids=[one])
        assert agent.run(plan).failed
        client.approve_replay(plan["replay_id"], plan["hash"], **ANA)
        assert not agent.call("run_replay", **as_seen(plan)).failed
        until(lambda: agent.call("replay_status", replay_id=plan["replay_id"]).document["status"] == "finished")
        over = agent.call("replay_status", replay_id=plan["replay_id"]).document
        return over["done"], over["died_again"]

    with working(app):
        assert replayed(sent) == (1, 0)
        shop.error = KeyError("AT")
        assert replayed(again) == (0, 1)
    assert [each.id for each in shop.runs] == [sent, again]
    assert (letter(conn, sent)["status"], letter(conn, again)["status"]) == ("resolved", "dead")
    assert len(agent.audited("access.refuse")) == 2


@pytest.mark.seed("outbox-44")
def test_ten_failures_of_one_group_are_escalated(q: Connection) -> None:
    escalated = "select data from bartleby.events where type = 'io.bartleby.group.escalated'"
    for n in range(9):
        bury(q, n)
    q.execute("select bartleby.tally()")
    assert rows(q, escalated) == []
    bury(q, 9)
    q.execute("select bartleby.tally()")
    assert rows(q, "select dead, error_type from bartleby.groups") == [{"dead": 10, "error_type": "KeyError"}]
    assert row(q, escalated)["data"]["dead"] == 10


@pytest.mark.seed("outbox-49", "outbox-50")
def test_log_has_every_failure_and_every_death(shop: Shop) -> None:
    shop.open()
    for error, failed, attempt in ((KeyError("AT"), ["KeyError: 'AT'"], 2), (Terminal("not paid"), [], 1)):
        with Told.listening() as log:
            sent = shop.fail(error)[0]["message_id"]
        assert [each.getMessage() for each in log.of("message.failed")] == failed
        [died] = log.of("message.dead")
        assert (died.levelname, str(error) in died.getMessage()) == ("WARNING", True)
        handler = shop.app.handlers["q"].name
        assert vars(died)["fields"] == {"queue": "q", "message_id": sent, "handler": handler, "attempt": attempt}


@pytest.mark.seed("outbox-51", "outbox-53", "outbox-54")
def test_effect_that_is_marked_as_handled_happens_once(shop: Shop, dsn: str) -> None:
    shop.conn.execute("create table effect (message bigint)")
    begun: list[int] = []
    effects = "select message from effect order by 1"

    def open_queue(queue: str, after: BaseException, *, once: bool | str = True) -> None:
        """Open a queue whose handler commits an effect that must not happen twice, and then fails."""

        def handle(message: Message) -> None:
            begun.append(message.id)
            with psycopg.connect(dsn) as connection:
                shop.app.mark_handled(message, connection)
                connection.execute("insert into effect values (%s)", [message.id])
            raise after

        create(shop.conn, queue, max_attempts=2, breaker="off")
        shop.app.handler(queue, once=once)(handle)

    open_queue("retried", Retry("the answer was lost"))
    open_queue("dead", Terminal("after the effect"))
    open_queue("keyed", Terminal("after the effect"), once="key")
    first = send(shop.conn, queue="retried")
    assert (drain(shop.app), column(shop.conn, effects)) == ({"retried": 1, "done": 1}, [first])
    second = send(shop.conn, queue="dead")
    assert drain(shop.app) == {"dead": 1}
    assert (replay(shop.conn, second), drain(shop.app), column(shop.conn, effects)) == (
        [second],
        {"done": 1},
        [first, second],
    )
    assert letter(shop.conn, second)["status"] == "resolved"
    third = send(shop.conn, queue="keyed", key="order-42")
    assert drain(shop.app) == {"dead": 1}
    replay(shop.conn, third)
    send(shop.conn, queue="keyed", key="order-42")
    assert (drain(shop.app), column(shop.conn, effects)) == ({"done": 2}, [first, second, third])
    other = send(shop.conn, queue="keyed", key="order-43")
    assert (drain(shop.app), column(shop.conn, effects)) == ({"dead": 1}, [first, second, third, other])
    assert begun == [first, second, third, other]
