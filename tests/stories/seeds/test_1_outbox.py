"""Transactional outbox.

What is sent is written in the producer's transaction. Failures are retried with jitter, classified, kept as dead
letters, and replayed in place under the same identity, with the earlier cycle in `failure_history`.
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

from bartleby import Bartleby, Client, Message, Retry, RetryPolicy, Terminal
from bartleby.testing import Clock, assert_dead, drain
from tests.kit.agent import Agent, as_seen
from tests.kit.commands import Done
from tests.kit.sql import ack, claim, column, create, fail_all, psql, refused, row, rows, send, send_count, stats, value
from tests.kit.worker import Told, working
from tests.stories.kit import (
    ANA,
    SECOND,
    Bus,
    Connection,
    add_bus,
    bury,
    fail_one,
    fail_until_dead,
    ledger,
    letter,
    lose,
    places,
    relaying,
    until,
)

ON_CALL = Path(__file__).parents[3] / "docs" / "howto" / "on-call.md"
ENTRY = {
    "cycle": int, "reason": str, "attempts": int, "crashes": int, "first_failed_at": str, "dead_at": str,
    "error_type": str, "error": str, "traceback": str, "fingerprint": str, "worker": str, "worker_version": str,
    "group_id": int, "generation": int, "queue": str, "replayed_at": str, "replayed_by": str, "replay_reason": str,
}  # fmt: skip
DEAD = "select * from bartleby.dead_letters where status = 'dead'"
Run = Callable[..., Done]


@pytest.fixture
def q(conn: Connection, clock: Clock) -> Connection:
    """A queue as it comes."""
    create(conn)
    return conn


class Shop:
    """An application whose handler raises what it is told to; `runs` are its messages."""

    def __init__(self, app: Bartleby, conn: Connection) -> None:
        self.app = app
        self.conn = conn
        self.error: BaseException | None = None
        self.runs: list[Message] = []

    def open(self, **options: Any) -> "Shop":
        def handle(message: Message) -> None:
            self.runs.append(message)
            if self.error is not None:
                raise self.error

        self.app.handler("q", **options)(handle)
        return self

    def ruling(self, error: BaseException) -> tuple[str, str]:
        """What becomes of a message whose handler raises this, and by which rule."""
        self.error = error
        sent = send(self.conn)
        drain(self.app)
        first = ledger(self.conn, sent)[0]
        return first["verdict"], first["rule"]


@pytest.fixture
def shop(app: Bartleby, conn: Connection, clock: Clock) -> Shop:
    create(conn, max_attempts=2, breaker="off")
    return Shop(app, conn)


def replay(conn: Connection, message_id: int, generation: int | None = None, by: str = "ana") -> list[int]:
    return column(conn, "select bartleby.replay(array[%s::bigint], %s, 'mended', %s)", message_id, by, generation)


@pytest.mark.seed("outbox-1")
def test_a_message_is_part_of_the_producers_transaction(q: Connection) -> None:
    with q.transaction(force_rollback=True):
        send(q, "never")
    with q.transaction():
        kept = send(q, "kept")
        assert places(q, kept) == ["ready"]
    assert claim(q, 10).payloads == ["kept"]


@pytest.mark.seed("outbox-2")
def test_a_message_has_one_of_four_states(q: Connection) -> None:
    done, dead = send(q), send(q)
    assert (places(q, done), places(q, dead)) == (["ready"], ["ready"])
    work = claim(q, 2)
    assert (places(q, done), places(q, dead)) == (["leased"], ["leased"])
    ack(q, work.lease, work.positions[:1])
    q.execute("select bartleby.fail(%s, %s)", [work.lease, f'[{{"position": {work.positions[1]}, "verdict": "dead"}}]'])
    assert (places(q, done), places(q, dead)) == ([], ["dead"])


@pytest.mark.seed("outbox-3")
def test_polling_is_the_fallback_for_notifications(
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


@pytest.mark.seed("outbox-4")
def test_dead_letters_are_found_by_their_status(q: Connection) -> None:
    living, dead = send(q, "alive"), send(q, "dead")
    work = claim(q, 2)
    q.execute("select bartleby.fail(%s, %s)", [work.lease, f'[{{"position": {work.positions[1]}, "verdict": "dead"}}]'])
    assert [each["message_id"] for each in rows(q, DEAD)] == [dead]
    assert (places(q, dead), places(q, living)) == (["dead"], ["leased"])


@pytest.mark.seed("outbox-5")
def test_what_was_put_away_is_not_listed(q: Connection) -> None:
    kept, away = bury(q), bury(q, "spam")
    q.execute("select * from bartleby.discard(array[%s::bigint], 'ana', 'spam')", [away])
    assert [each["message_id"] for each in rows(q, DEAD)] == [kept]
    assert (letter(q, away)["payload"], letter(q, away)["discarded_by"]) == ("spam", "ana")


@pytest.mark.seed("outbox-6")
def test_the_producer_owns_the_recovery(q: Connection, connect: Callable[[], Connection]) -> None:
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


@pytest.mark.seed("outbox-7")
def test_the_default_policy_of_retries(q: Connection) -> None:
    found = stats(q)
    assert (found["backoff"], found["base"], found["factor"]) == ("exponential", SECOND, 2)
    assert (found["cap"], found["jitter"]) == (timedelta(minutes=5), "full")


@pytest.mark.seed("outbox-8")
def test_the_schedule_is_1_2_4_8_16_and_at_most_300_seconds(q: Connection, clock: Clock) -> None:
    create(q, "even", jitter="none")
    send(q, queue="even", max_attempts=12)
    waits = [each.total_seconds() for each in fail_until_dead(q, clock, "even")]
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


@pytest.mark.seed("outbox-9")
def test_full_jitter_spreads_retries(q: Connection) -> None:
    send_count(q, 300)
    failed_at = value(q, "select bartleby.clock()")
    waits = [(each["retry_at"] - failed_at).total_seconds() for each in fail_all(q, claim(q, 300))]
    assert 0 <= min(waits) < 0.1
    assert 0.9 < max(waits) <= 1
    assert 0.4 < sum(waits) / 300 < 0.6


@pytest.mark.seed("outbox-10")
def test_jitter_is_drawn_for_every_attempt(q: Connection, clock: Clock) -> None:
    send(q, max_attempts=9)
    shares = [each.total_seconds() / 2**n for n, each in enumerate(fail_until_dead(q, clock))]
    assert max(shares) <= 1
    assert len({round(each, 3) for each in shares}) > 4


@pytest.mark.seed("outbox-11")
def test_five_attempts_by_default(q: Connection, clock: Clock) -> None:
    sent = send(q)
    assert len(fail_until_dead(q, clock)) == 4
    assert (letter(q, sent)["attempts"], letter(q, sent)["reason"]) == (5, "exhausted")


@pytest.mark.seed("outbox-12")
def test_a_handler_may_override_the_number_of_attempts(shop: Shop) -> None:
    shop.open(retry=RetryPolicy(max_attempts=3))
    shop.ruling(ConnectionError())
    assert assert_dead(shop.app, "q")[0].attempts == 3


@pytest.mark.seed("outbox-13")
def test_five_attempts_are_over_within_half_a_minute(q: Connection, clock: Clock) -> None:
    create(q, "even", jitter="none")
    sent = send(q, queue="even")
    fail_until_dead(q, clock, "even")
    found = letter(q, sent)
    assert 15 * SECOND <= found["dead_at"] - found["first_failed_at"] < 16 * SECOND


@pytest.mark.seed("outbox-14")
def test_terminal_integrity_error(shop: Shop, dsn: str) -> None:
    shop.conn.execute("create table seen (id int primary key)")

    def insert_twice(message: Message) -> None:
        with psycopg.connect(dsn) as connection:
            connection.execute("insert into seen values (1)")
            connection.execute("insert into seen values (1)")

    shop.app.handler("q")(insert_twice)
    send(shop.conn)
    assert drain(shop.app) == {"dead": 1}
    [found] = assert_dead(shop.app, "q", error_type="UniqueViolation", reason="terminal")
    assert found.attempts == 1


@pytest.mark.seed("outbox-15")
def test_terminal_value_error_from_validating_the_payload(shop: Shop) -> None:

    @dataclass
    class Order:
        amount: int

        def __post_init__(self) -> None:
            if self.amount < 0:
                raise ValueError("negative")

    def charge(order: Order) -> None:
        raise ValueError("not of the payload")

    shop.app.handler("q")(charge)
    for amount in ("many", -1, 1):
        send(shop.conn, {"amount": amount})
    drain(shop.app)
    assert [each.attempts for each in assert_dead(shop.app, "q", reason="unacceptable")] == [1, 1]
    assert [each.attempts for each in assert_dead(shop.app, "q", reason="exhausted")] == [2]


@pytest.mark.seed("outbox-16")
def test_terminal_pydantic_validation_error(shop: Shop) -> None:
    ran: list[object] = []

    class Order(pydantic.BaseModel):
        id: int

    def checks(message: Message) -> None:
        ran.append(Order.model_validate(message.payload))

    def annotated(order: Order) -> None:
        ran.append(order)

    create(shop.conn, "typed", breaker="off")
    shop.app.handler("q")(checks)
    shop.app.handler("typed")(annotated)
    for queue, reason in (("q", "terminal"), ("typed", "unacceptable")):
        send(shop.conn, {"id": "x"}, queue)
        assert drain(shop.app) == {"dead": 1}
        [found] = assert_dead(shop.app, queue, reason=reason)
        assert (found.attempts, "valid integer" in (found.error or "")) == (1, True)
        assert (ran, [each["verdict"] for each in ledger(shop.conn, found.message_id)]) == ([], ["dead"])
    for queue in ("q", "typed"):
        send(shop.conn, {"id": 1}, queue)
    assert drain(shop.app) == {"done": 2}
    assert ran == [Order(id=1)] * 2


@pytest.mark.seed("outbox-17")
def test_terminal_by_an_explicit_class(shop: Shop) -> None:

    class NotPaid(Terminal):
        pass

    verdict, rule = shop.open().ruling(NotPaid("order 42"))
    assert (verdict, rule.rpartition(".")[2]) == ("dead", "NotPaid is a Terminal")


@pytest.mark.seed("outbox-18")
def test_transient_connection_error(shop: Shop) -> None:
    assert shop.open().ruling(ConnectionResetError()) == (
        "retry", "ConnectionResetError is transient; attempt 1 of 2",
    )  # fmt: skip


@pytest.mark.seed("outbox-19")
def test_transient_timeout_error(shop: Shop) -> None:
    assert shop.open().ruling(TimeoutError()) == ("retry", "TimeoutError is transient; attempt 1 of 2")


@pytest.mark.seed("outbox-20")
def test_transient_operational_error(shop: Shop) -> None:
    with pytest.raises(psycopg.OperationalError) as refusal:
        psycopg.connect("postgresql://nobody@127.0.0.1:1/nothing", connect_timeout=2)
    verdict, rule = shop.open().ruling(refusal.value)
    assert (verdict, rule) == ("retry", "psycopg.OperationalError is transient; attempt 1 of 2")
    shop.error = psycopg.errors.AdminShutdown("terminating connection")
    send(shop.conn)
    assert drain(shop.app) == {"released": 1}
    assert row(shop.conn, "select state, attempts from bartleby.messages") == {"state": "deferred", "attempts": 0}


@pytest.mark.seed("outbox-21")
def test_transient_by_default(shop: Shop) -> None:
    assert shop.open().ruling(KeyError("AT")) == ("retry", "KeyError: transient by default; attempt 1 of 2")


@pytest.mark.seed("outbox-22")
def test_a_handler_may_list_more_terminal_errors(shop: Shop) -> None:
    verdict, rule = shop.open(terminal=[LookupError]).ruling(KeyError("AT"))
    assert (verdict, rule) == ("dead", "KeyError is a LookupError, listed by the handler")


@pytest.mark.seed("outbox-23")
def test_failure_history_is_empty_at_first(q: Connection) -> None:
    sent = bury(q)
    assert letter(q, sent)["failure_history"] == []


@pytest.mark.seed("outbox-24")
def test_failure_history_gathers_a_snapshot_of_each_cycle(q: Connection) -> None:
    sent = bury(q, error="first")
    for error in ("second", "third"):
        replay(q, sent)
        fail_one(q, verdict="dead", error=error)
    found = letter(q, sent)
    assert [each["error"] for each in found["failure_history"]] == ["first", "second"]
    assert (found["error"], found["cycle"]) == ("third", 3)


@pytest.mark.seed("outbox-25")
def test_attempts_are_those_of_the_current_cycle(q: Connection, clock: Clock) -> None:
    sent = send(q)
    assert value(q, "select attempts from bartleby.messages") == 0
    fail_until_dead(q, clock)
    replay(q, sent)
    assert value(q, "select attempts from bartleby.messages") == 0
    fail_one(q)
    assert value(q, "select attempts from bartleby.messages") == 1


@pytest.mark.seed("outbox-26")
def test_the_last_error_is_that_of_the_current_cycle(q: Connection) -> None:
    sent = bury(q, error="old")
    replay(q, sent)
    assert rows(q, "select error from bartleby.attempts where cycle = 2") == []
    fail_one(q, error_type="IndexError", error="new", verdict="dead")
    assert (letter(q, sent)["error_type"], letter(q, sent)["error"]) == ("IndexError", "new")


@pytest.mark.seed("outbox-27")
def test_first_failed_at_is_that_of_the_current_cycle(q: Connection, clock: Clock) -> None:
    sent = send(q)
    began = value(q, "select bartleby.clock()")
    fail_until_dead(q, clock)
    assert letter(q, sent)["first_failed_at"] == began
    clock.advance(3600)
    replay(q, sent)
    again = value(q, "select bartleby.clock()")
    fail_until_dead(q, clock)
    assert letter(q, sent)["first_failed_at"] == again


@pytest.mark.seed("outbox-28")
def test_replay_1_takes_a_snapshot_of_the_cycle(q: Connection) -> None:
    sent = bury(q, error="first")
    replay(q, sent)
    found = letter(q, sent)
    assert (found["status"], found["error"], found["cycle"], found["failure_history"]) == ("replayed", "first", 1, [])
    fail_one(q, verdict="dead", error="second")
    found = letter(q, sent)
    assert (found["error"], found["cycle"], found["failure_history"][0]["error"]) == ("second", 2, "first")


@pytest.mark.seed("outbox-29")
def test_replay_2_clears_the_cycle(q: Connection, clock: Clock) -> None:
    sent = send(q)
    fail_until_dead(q, clock, error="first")
    replay(q, sent)
    assert row(q, "select attempts, crashes, cycle from bartleby.messages") == {"attempts": 0, "crashes": 0, "cycle": 2}
    clock.advance(3600)
    found = fail_one(q)
    assert (found["attempt"], found["cycle"], found["error"]) == (1, 2, None)
    clock.advance(1)
    fail_one(q, verdict="dead")
    assert letter(q, sent)["error"] is None
    assert letter(q, sent)["dead_at"] - letter(q, sent)["first_failed_at"] < 2 * SECOND


@pytest.mark.seed("outbox-30")
def test_replay_3_sets_the_generation_that_the_caller_gives(q: Connection) -> None:
    sent = bury(q, generation=3)
    replay(q, sent, generation=7)
    assert value(q, "select generation from bartleby.messages") == 7


@pytest.mark.seed("outbox-31")
def test_a_generation_is_never_assumed(q: Connection) -> None:
    sent = bury(q, generation=3)
    replay(q, sent)
    assert value(q, "select generation from bartleby.messages") == 3


@pytest.mark.seed("outbox-32")
def test_a_generation_stays_with_its_workers_while_a_deployment_rolls(q: Connection, dsn: str, clock: Clock) -> None:
    old, new = (Shop(Bartleby(dsn, generation=each), q).open() for each in (1, 2))
    ahead = send(q, generation=2)
    drain(old.app)
    assert (old.runs, value(q, "select attempts from bartleby.messages"), ledger(q, ahead)) == ([], 0, [])
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


@pytest.mark.seed("outbox-33")
def test_replay_4_makes_it_pending(q: Connection) -> None:
    sent = bury(q, {"order": 42})
    assert replay(q, sent) == [sent]
    assert places(q, sent) == ["ready"]
    assert (claim(q).ids, rows(q, DEAD)) == ([sent], [])


@pytest.mark.seed("outbox-34")
def test_a_replay_is_atomic(q: Connection) -> None:
    sent = bury(q)
    before = letter(q, sent)
    with q.transaction(force_rollback=True):
        replay(q, sent, generation=7)
        assert places(q, sent) == ["ready"]
    assert (places(q, sent), letter(q, sent)) == (["dead"], before)
    assert rows(q, "select * from bartleby.audit_log where action = 'letter.replay'") == []


@pytest.mark.seed("outbox-35")
def test_who_replayed_is_a_text(q: Connection) -> None:
    for by in ("ana@example.com", "sql-direct"):
        sent = bury(q)
        replay(q, sent, by=by)
        assert letter(q, sent)["replayed_by"] == by
        ack(q, claim(q).lease)


@pytest.mark.seed("outbox-36")
def test_a_replay_takes_its_values_from_the_caller(q: Connection) -> None:
    sent = bury(q)
    for who, why in ((None, "mended"), ("ana", None), ("", "mended"), ("ana", " ")):
        with refused("ZB008"):
            q.execute("select bartleby.replay(array[%s::bigint], %s, %s)", [sent, who, why])
    assert places(q, sent) == ["dead"]


@pytest.mark.seed("outbox-37")
def test_an_entry_of_the_history_has_a_fixed_shape(q: Connection, client: Client) -> None:
    full = {
        "error_type": "KeyError", "error": "first", "traceback": "File …", "fingerprint": "f1",
        "worker_version": "2.4.0",
    }  # fmt: skip
    bare = send(q)
    fail_one(q, verdict="dead")
    sent = send(q, generation=3)
    fail_one(q, verdict="dead", **full)
    for each in (sent, bare):
        replay(q, each, generation=4)
        fail_one(q, verdict="dead")
    found = client.dead_letter(sent)
    assert found is not None
    [entry] = found.failure_history
    assert {name: type(entry.get(name)) for name in ENTRY} == ENTRY
    assert (entry["edited"], entry["replay_id"]) == (None, None)
    assert {name: entry[name] for name in full} == full
    assert (entry["cycle"], entry["attempts"], entry["crashes"], entry["generation"]) == (1, 1, 0, 3)
    assert (entry["reason"], entry["queue"], entry["worker"]) == ("terminal", "q", "w")
    assert (entry["replayed_by"], entry["replay_reason"]) == ("ana", "mended")
    times = [datetime.fromisoformat(entry[each]) for each in ("first_failed_at", "dead_at", "replayed_at")]
    assert (times, all(each.tzinfo for each in times)) == (sorted(times), True)
    [other] = letter(q, bare)["failure_history"]
    assert other.keys() == entry.keys()
    assert [name for name in full if other[name] is not None] == []


@pytest.mark.seed("outbox-38")
def test_failed_rows_are_inspected_with_psql(q: Connection, dsn: str) -> None:
    bury(q, {"order": 42}, error="no such customer")
    done = psql(dsn, "-At", "-c", "select queue, payload ->> 'order', error from bartleby.dead_letters")
    assert (done.returncode, done.stdout) == (0, "q|42|no such customer\n")


@pytest.mark.seed("outbox-39")
def test_a_row_is_replayed_with_psql(q: Connection, dsn: str) -> None:
    sent = bury(q)
    done = psql(dsn, "-At", "-c", f"select bartleby.replay(array[{sent}], 'ana@example.com', 'mended')")
    assert (done.returncode, done.stdout, places(q, sent)) == (0, f"{sent}\n", ["ready"])


@pytest.mark.seed("outbox-40")
def test_the_runbook_works_as_it_is_written(q: Connection) -> None:
    bury(q)
    send(q)
    fail_one(q, verdict="dead", error_type="IndexError")
    found = re.search(r"## With psql alone.*?```sql\n(.*?)```", ON_CALL.read_text(), re.DOTALL)
    assert found
    q.execute(found[1].encode())
    assert row(q, "select state, note from bartleby.groups where id = 2")["state"] == "resolved"
    assert value(q, "select status from bartleby.replays where id = 1") == "running"


@pytest.mark.seed("outbox-41")
def test_tool_list_dead_letters(q: Connection, client: Client) -> None:
    agent = Agent(client)
    died = [bury(q, {"n": n}) for n in range(3)]
    listed = agent.call("list_dead_letters").document["letters"]
    assert [each["message_id"] for each in listed] == died[::-1]
    [found] = agent.call("list_dead_letters", filter="queue:q payload.n:1").document["letters"]
    assert (found["message_id"], found["status"]) == (died[1], "dead")
    assert found["error"] == {"untrusted": True, "text": "'x'", "cut": None}
    assert [each.subject["tool"] for each in agent.audited("agent.call")] == ["list_dead_letters"] * 2


@pytest.mark.seed("outbox-42")
def test_tool_detail_of_a_dead_letter(q: Connection, client: Client) -> None:
    agent = Agent(client)
    sent = bury(q, {"order": 42, "password": "hunter2"}, error="no such customer")
    shown = agent.call("get_dead_letter", message_id=sent).document
    assert shown["payload"]["text"] == '{"order": 42, "password": "***"}'
    assert shown["error"]["text"] == "no such customer"
    told = agent.call("explain", message_id=sent).document
    assert any("no such customer" in each["told"]["text"] for each in told["timeline"])


@pytest.mark.seed("outbox-43")
def test_tool_replay_a_dead_letter(conn: Connection, app: Bartleby, client: Client) -> None:
    create(conn)
    agent = Agent(client)
    sent, again = bury(conn, "mended"), bury(conn, "not yet")
    shop = Shop(app, conn).open(terminal=[KeyError])

    def replayed(one: int) -> str:
        plan = agent.plan(ids=[one])
        assert agent.run(plan).failed
        client.approve_replay(plan["replay_id"], plan["hash"], **ANA)
        assert not agent.call("run_replay", **as_seen(plan)).failed
        until(lambda: agent.call("replay_status", replay_id=plan["replay_id"]).document["status"] == "finished")
        over = agent.call("replay_status", replay_id=plan["replay_id"]).document
        return "done" if over["done"] else "died again" if over["died_again"] else "open"

    with working(app):
        assert replayed(sent) == "done"
        shop.error = KeyError("AT")
        assert replayed(again) == "died again"
    assert [each.id for each in shop.runs] == [sent, again]
    assert (letter(conn, sent)["status"], letter(conn, again)["status"]) == ("resolved", "dead")
    assert len(agent.audited("access.refuse")) == 2


@pytest.mark.seed("outbox-44")
def test_ten_failures_are_too_many_for_plain_sql(q: Connection) -> None:
    escalated = "select data from bartleby.events where type = 'io.bartleby.group.escalated'"
    for n in range(9):
        bury(q, n)
    q.execute("select bartleby.tally()")
    assert rows(q, escalated) == []
    bury(q, 9)
    q.execute("select bartleby.tally()")
    assert rows(q, "select dead, error_type from bartleby.groups") == [{"dead": 10, "error_type": "KeyError"}]
    assert row(q, escalated)["data"]["dead"] == 10


@pytest.mark.seed("outbox-45")
def test_an_alert_when_a_failure_is_terminal(shop: Shop, client: Client, bus: Bus) -> None:
    alert = alerted(shop.open(), client, bus, Terminal("not paid"))
    assert (alert["tags"]["reason"], alert["tags"]["attempts"]) == ("terminal", "1")
    assert alert["exception"]["values"][0] == {"type": "bartleby.Terminal", "value": "not paid"}


@pytest.mark.seed("outbox-46")
def test_an_alert_when_the_retries_are_used_up(shop: Shop, client: Client, bus: Bus) -> None:
    alert = alerted(shop.open(), client, bus, ConnectionError("refused"))
    assert (alert["tags"]["reason"], alert["tags"]["attempts"]) == ("exhausted", "2")
    assert len(bus.events) == 1


def alerted(shop: Shop, client: Client, bus: Bus, error: BaseException, **options: Any) -> dict[str, Any]:
    """What Sentry is sent when a message has died of this."""
    client.put_sink("bus", "sentry", {"options": bus.sentry, "types": ["dead_letter.*"]}, **ANA)
    shop.error = error
    sent = send(shop.conn, **options)
    with relaying(shop.app.settings.dsn or ""):
        drain(shop.app)
        until(lambda: bus.events)
    assert bus.events[0]["tags"]["message_id"] == str(sent)
    return bus.events[0]


@pytest.mark.seed("outbox-47")
def test_an_alert_says_what_failed_where_and_how(shop: Shop, client: Client, bus: Bus, dsn: str) -> None:
    add_bus(client, bus, types=["dead_letter.created"])
    shop.open().error = KeyError("AT")
    sent = send(shop.conn, {"order": 42}, headers={"type": "order.placed", "source": "shop"})
    with relaying(dsn):
        drain(shop.app)
        until(lambda: bus.events)
    data = bus.events[0]["data"]
    assert (data["message_id"], data["message_type"], data["message_source"]) == (sent, "order.placed", "shop")
    assert (data["queue"], data["handler"].rpartition(".")[2]) == ("q", "handle")
    assert (data["error_type"], data["error"], data["attempts"]) == ("KeyError", "'AT'", 2)


@pytest.mark.seed("outbox-48")
def test_an_alert_in_sentry_has_type_and_source(shop: Shop, client: Client, bus: Bus) -> None:
    alert = alerted(shop.open(), client, bus, KeyError("AT"), headers={"type": "order.placed", "source": "shop"})
    tags = {name: alert["tags"][name] for name in ("message_type", "message_source", "queue", "handler")}
    handler = shop.app.handlers["q"].name
    assert tags == {"message_type": "order.placed", "message_source": "shop", "queue": "q", "handler": handler}


@pytest.mark.seed("outbox-49")
def test_the_log_has_every_failure(shop: Shop) -> None:
    with Told.listening() as told:
        shop.open().ruling(KeyError("AT"))
    assert [each.getMessage() for each in told.of("message.failed")] == ["KeyError: 'AT'"]
    [dead] = told.of("message.dead")
    assert (dead.levelname, dead.getMessage()) == ("WARNING", "KeyError: 'AT'")
    [found] = assert_dead(shop.app, "q")
    assert vars(dead)["fields"] == {
        "queue": "q",
        "message_id": found.message_id,
        "handler": shop.app.handlers["q"].name,
        "attempt": 2,
    }


@pytest.mark.seed("outbox-50")
def test_the_log_has_a_terminal_failure_too(shop: Shop) -> None:
    with Told.listening() as told:
        shop.open().ruling(Terminal("not paid"))
    assert told.of("message.failed") == []
    [dead] = told.of("message.dead")
    assert (dead.levelname, vars(dead)["fields"]["attempt"]) == ("WARNING", 1)
    assert "not paid" in dead.getMessage()


def effects(app: Bartleby, conn: Connection, dsn: str, after: BaseException, *, once: bool | str = True) -> list[int]:
    """A handler with an effect that must not happen twice; when that is committed it fails. Return what it began."""
    conn.execute("create table effect (message bigint)")
    begun: list[int] = []

    def handle(message: Message) -> None:
        begun.append(message.id)
        with psycopg.connect(dsn) as connection:
            app.mark_handled(message, connection)
            connection.execute("insert into effect values (%s)", [message.id])
        raise after

    app.handler("q", once=once)(handle)
    return begun


@pytest.mark.seed("outbox-51")
def test_what_was_handled_is_not_done_twice(shop: Shop, dsn: str) -> None:
    begun = effects(shop.app, shop.conn, dsn, after=Retry("the answer was lost"))
    sent = send(shop.conn)
    assert drain(shop.app) == {"retried": 1, "done": 1}
    assert (begun, column(shop.conn, "select message from effect")) == ([sent], [sent])


@pytest.mark.seed("outbox-52")
def test_a_replay_has_the_same_id_and_the_same_idempotency_key(q: Connection) -> None:
    sent = bury(q, key="order-42")
    created = letter(q, sent)["created_at"]
    replay(q, sent)
    again = claim(q).one
    assert (again["message_id"], again["key"], again["created_at"]) == (sent, "order-42", created)


@pytest.mark.seed("outbox-53")
def test_a_replay_of_what_was_handled_is_deduplicated(shop: Shop, dsn: str) -> None:
    begun = effects(shop.app, shop.conn, dsn, after=Terminal("after the effect"))
    sent = send(shop.conn)
    assert drain(shop.app) == {"dead": 1}
    replay(shop.conn, sent)
    assert drain(shop.app) == {"done": 1}
    assert (begun, column(shop.conn, "select message from effect")) == ([sent], [sent])
    assert letter(shop.conn, sent)["status"] == "resolved"


@pytest.mark.seed("outbox-54")
def test_the_same_key_is_done_once(shop: Shop, dsn: str) -> None:
    begun = effects(shop.app, shop.conn, dsn, after=Terminal("after the effect"), once="key")
    sent = send(shop.conn, key="order-42")
    assert drain(shop.app) == {"dead": 1}
    replay(shop.conn, sent)
    send(shop.conn, key="order-42")
    assert drain(shop.app) == {"done": 2}
    assert (begun, column(shop.conn, "select message from effect")) == ([sent], [sent])
    other = send(shop.conn, key="order-43")
    assert drain(shop.app) == {"dead": 1}
    assert column(shop.conn, "select message from effect order by 1") == [sent, other]


@pytest.mark.seed("outbox-55")
def test_the_history_of_a_message_is_not_scattered(q: Connection) -> None:
    sent = bury(q, error="first")
    for _ in range(3):
        replay(q, sent)
        fail_one(q, verdict="dead")
    assert value(q, "select count(*) from bartleby.dead_letters") == 1
    assert [each["cycle"] for each in letter(q, sent)["failure_history"]] == [1, 2, 3]


@pytest.mark.seed("outbox-56")
def test_the_row_has_cycles_and_not_attempts(q: Connection, clock: Clock) -> None:
    sent = send(q)
    fail_until_dead(q, clock)
    replay(q, sent)
    fail_until_dead(q, clock)
    assert [each["attempts"] for each in letter(q, sent)["failure_history"]] == [5]
    assert [(each["cycle"], each["attempt"]) for each in ledger(q, sent)] == [
        (cycle, attempt) for cycle in (1, 2) for attempt in range(1, 6)
    ]


@pytest.mark.seed("outbox-57")
def test_the_audit_is_on_the_row_and_not_in_logs(q: Connection, connect: Callable[[], Connection]) -> None:
    sent = bury(q)
    replay(q, sent)
    fail_one(q, verdict="dead")
    entry = letter(connect(), sent)["failure_history"][0]
    assert (entry["replayed_by"], entry["replay_reason"]) == ("ana", "mended")
    assert row(q, "select actor, reason from bartleby.audit_log where action = 'letter.replay'") == {
        "actor": "ana",
        "reason": "mended",
    }


@pytest.mark.seed("outbox-58")
def test_a_replay_is_no_new_message(q: Connection) -> None:
    sent = bury(q, key="order-42")
    last = value(q, "select bartleby.last_message_id()")
    replay(q, sent)
    assert value(q, "select bartleby.last_message_id()") == last
    assert column(q, "select message_id from bartleby.messages") == [sent]


@pytest.mark.seed("outbox-59")
def test_the_operator_is_not_blocked_by_missing_tools(q: Connection) -> None:
    sent = bury(q)
    q.execute("set role bartleby_reader")
    with refused("42501"):
        replay(q, sent)
    q.execute("set role bartleby_operator")
    assert [each["message_id"] for each in rows(q, DEAD)] == [sent]
    assert replay(q, sent) == [sent]


@pytest.mark.seed("outbox-60")
def test_failure_is_handled_though_nobody_tells_it(q: Connection, clock: Clock) -> None:
    sent = send(q)
    lost = 0
    while places(q, sent) != ["dead"]:
        clock.advance(300)
        assert lose(q, clock).ids == [sent]
        lost += 1
    found = letter(q, sent)
    assert (lost, found["reason"], found["attempts"], found["crashes"]) == (4, "crashed", 3, 3)
    assert [(each["outcome"], each["verdict"]) for each in ledger(q, sent)] == [
        ("lost", "retry"), ("crashed", "retry"), ("crashed", "retry"), ("crashed", "dead"),
    ]  # fmt: skip


@pytest.mark.seed("outbox-61")
def test_a_replay_preserves_the_trail(q: Connection) -> None:
    sent = bury(q, error="first")
    replay(q, sent)
    ack(q, claim(q).lease)
    found = letter(q, sent)
    assert (found["status"], found["error"], found["replayed_by"]) == ("resolved", "first", "ana")
    assert found["resolved_at"] >= found["replayed_at"] >= found["dead_at"]


@pytest.mark.seed("outbox-62")
def test_terminal_failures_burn_no_time(shop: Shop) -> None:
    create(shop.conn, max_attempts=3, jitter="none")
    shop.open()
    spent = {}
    for error in (Terminal("not paid"), ConnectionError("refused")):
        began = value(shop.conn, "select bartleby.clock()")
        shop.ruling(error)
        died = value(shop.conn, "select max(dead_at) from bartleby.dead_letters")
        spent[type(error)] = (len(shop.runs), round((died - began).total_seconds()))
        shop.runs.clear()
    assert spent == {Terminal: (1, 0), ConnectionError: (3, 3)}


@pytest.mark.seed("outbox-63")
def test_the_operator_has_a_way_from_the_first_day(q: Connection) -> None:
    sent = bury(q)
    q.execute("set role bartleby_operator")
    for verb, status in (("discard", "discarded"), ("restore", "dead")):
        q.execute(f"select bartleby.{verb}(array[%s::bigint], 'ana', 'so it is')".encode(), [sent])
        assert letter(q, sent)["status"] == status
    assert replay(q, sent) == [sent]
    assert places(q, sent) == ["ready"]


@pytest.mark.seed("outbox-64")
def test_the_growth_of_the_history_is_tracked(q: Connection, client: Client) -> None:
    often, once = bury(q, error="x" * 200_000), bury(q)
    for _ in range(3):
        replay(q, often)
        fail_one(q, verdict="dead")
    assert [each.message_id for each in client.dead_letters("cycle:>3")] == [often]
    assert [each.message_id for each in client.dead_letters("cycle:1")] == [once]
    assert [len(each["error"] or "") for each in letter(q, often)["failure_history"]] == [100_000, 0, 0]


@pytest.mark.seed("outbox-65")
def test_nobody_has_to_write_sql(q: Connection, bartleby: Run) -> None:
    austria, germany = bury(q, {"country": "AT"}), bury(q, {"country": "DE"})

    def told(*words: str) -> str:
        done = bartleby(*words)
        assert done.code == 0, done.err
        return done.out + done.err

    def statuses() -> list[str]:
        return [letter(q, each)["status"] for each in (austria, germany)]

    why = ("--reason", "so it is", "--yes")
    [group] = bartleby("groups", "--json").document
    assert f"bartleby replay group:{group['id']}" in told("groups", str(group["id"]))
    assert [line.split()[0] for line in told("dead", "payload.country:DE").splitlines()] == ["message", str(germany)]
    assert f"bartleby replay {austria} --reason" in told("explain", str(austria))
    shown = told("replay", "queue:q payload.country:AT", "--reason", "mended", "--dry-run")
    assert ("1: q 1" in shown, statuses()) == (True, ["dead", "dead"])
    told("discard", "queue:q payload.country:DE", *why)
    assert statuses() == ["dead", "discarded"]
    told("restore", str(germany), *why)
    told("hold", str(germany), *why)
    assert (statuses(), letter(q, germany)["held_at"] is None) == (["dead", "dead"], False)
    told("replay", "queue:q payload.country:AT", *why, "--detach")
    q.execute("select count(*) from bartleby.advance_replays()")
    assert (statuses(), claim(q, 10).ids) == (["replayed", "dead"], [austria])


@pytest.mark.seed("outbox-66")
def test_the_classifier_says_which_rule_it_applied(shop: Shop, bartleby: Run) -> None:
    shop.open().ruling(KeyError("AT"))
    [found] = assert_dead(shop.app, "q")
    assert "KeyError: transient by default" in bartleby("explain", str(found.message_id)).out


@pytest.mark.seed("outbox-67")
def test_a_handler_overrules_the_classifier_both_ways(shop: Shop) -> None:

    def handle(message: Message) -> None:
        if message.payload == "end":
            raise KeyError("AT")
        raise Retry("somebody else is at it") from psycopg.IntegrityError("duplicate key")

    shop.app.handler("q", terminal=[LookupError])(handle)
    ended, again = send(shop.conn, "end"), send(shop.conn, "again")
    drain(shop.app)
    assert [each["verdict"] for each in ledger(shop.conn, ended)] == ["dead"]
    assert [each["verdict"] for each in ledger(shop.conn, again)] == ["retry", "dead"]


@pytest.mark.seed("outbox-68")
def test_sql_and_tools_end_in_the_same(q: Connection, bartleby: Run) -> None:
    by_tool, by_sql = bury(q), bury(q)
    done = bartleby("discard", str(by_tool), "--actor", "ana", "--reason", "not needed", "--yes")
    assert done.code == 0, done.err
    q.execute("select bartleby.discard(array[%s::bigint], 'ana', 'not needed')", [by_sql])
    told = "select status, discarded_by, discard_reason from bartleby.dead_letters where message_id = %s"
    assert row(q, told, by_tool) == row(q, told, by_sql)
    audit = rows(q, "select action, actor, reason from bartleby.audit_log where action = 'letter.discard'")
    assert audit == [{"action": "letter.discard", "actor": "ana", "reason": "not needed"}] * 2
