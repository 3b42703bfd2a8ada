"""What a client adds to the SQL core: error classes, transactions and durability."""

import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import bartleby
from bartleby import AsyncClient, BartlebyError, Client, Failure, InvalidArgument, InvalidMessage, LeaseLost
from bartleby.client import Runner
from tests.kit.ways import WAYS, Way
from tests.kit.worker import present

Conn = psycopg.Connection[tuple[Any, ...]]
Refusal = tuple[Callable[[Client], object], type[BartlebyError], str]
ANA: dict[str, Any] = {"actor": "ana", "reason": "because"}
BOTH = pytest.mark.parametrize("way", ["Client", "AsyncClient"], indirect=True)


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        opened.create_queue("orders", {"payload_limit": 5000})
        yield opened


def claimed(api: Runner) -> bartleby.Lease:
    return present(api.claim("orders", "tester", limit=100))


def broken(position: int, **more: Any) -> Failure:
    return Failure(position, "KeyError", "'customer'", **more)


def numbers(api: Runner) -> tuple[int, int, int, int]:
    [found] = api.queues()
    return found.ready, found.leased, found.deferred, found.dead


# Bad input: an error of ours that says what is wrong, and nothing is sent or changed


def send(error: type[BartlebyError], text: str, payload: Any = 1, **options: Any) -> Refusal:
    return lambda api: api.send("orders", payload, **options), error, text


def send_many(error: type[BartlebyError], text: str, *messages: Any) -> Refusal:
    return lambda api: api.send_many("orders", messages), error, text


def policy(text: str, keys: Any) -> Refusal:
    return lambda api: api.create_queue("other", keys), bartleby.InvalidPolicy, text


def fail(error: type[BartlebyError], text: str, *failures: Failure) -> Refusal:
    return lambda api: api.fail(1, failures), error, text


def plan(text: str, **operation: Any) -> Refusal:
    return lambda api: api.plan_replay("queue:orders", patch=[operation], **ANA), bartleby.InvalidPatch, text


REFUSALS: list[Refusal] = [
    send(InvalidMessage, "Out of range", math.nan),
    send(InvalidMessage, "NUL", {"a": "\0"}),
    send(InvalidMessage, "surrogate", "\ud800"),
    send(InvalidMessage, "4300", 10**5000),
    send(InvalidMessage, "set is not JSON", {1}),
    send(bartleby.PayloadTooLarge, 'limit of queue "orders" is 5000', "x" * 6000),
    send(bartleby.PayloadTooLarge, "is 5000", headers={"h": "x" * 6000}),
    send(InvalidMessage, "Out of range", headers={"a": math.nan}),
    send(InvalidMessage, "headers must be a JSON object", headers=[1]),
    send(InvalidMessage, "key", key="a\0"),
    *(send(BartlebyError, "interval|delay", delay=each) for each in (math.nan, math.inf, timedelta.max, 10**30)),
    send(InvalidMessage, "max_attempts is between 1 and 32000", max_attempts=0),
    send(InvalidArgument, "out of range", max_attempts=10**10),
    send(InvalidArgument, "out of range", generation=2**63),
    send(InvalidMessage, "unique_for needs a key", unique_for=5),
    send_many(InvalidMessage, 'message 1: .*unknown key "paylod"', {"payload": 1}, {"payload": 1, "paylod": 1}),
    send_many(InvalidMessage, "message 1: .*object with the key", {"payload": 1}, "x"),
    send_many(InvalidMessage, "message 1: .*Out of range", {"payload": 1}, {"payload": 1, "delay": math.nan}),
    send_many(BartlebyError, "range|generation", {"payload": 1, "generation": 2**63}),
    send_many(InvalidMessage, "message 1: .*NUL", {"payload": 1}, {"payload": 1, "key": "\0"}),
    send_many(InvalidMessage, "message 1: .*surrogate", {"payload": 1}, {"payload": "\ud800"}),
    send_many(bartleby.PayloadTooLarge, "message 1: .*is 5000", {"payload": 1}, {"payload": "x" * 6000}),
    policy("unknown policy key", {"'; drop": 3}),
    policy("Out of range", {"base": math.nan}),
    policy("NUL", {"backoff": "\0"}),
    policy("policy", {"lease": {1}}),
    policy("JSON object", [1]),
    plan("invalid patch", op="add", path="/a", value={1}),
    plan("dance", op="dance", path=""),
    (lambda api: api.claim("orders", "w", limit=10**30), InvalidArgument, "out of range"),
    (lambda api: api.claim("orders", "w", lease=math.nan), InvalidArgument, "interval|lease"),
    (lambda api: api.claim("orders", "w", lease=1e300), InvalidArgument, "interval|lease"),
    (lambda api: api.ack(2**63), InvalidArgument, "out of range"),
    (lambda api: api.ack(1, [2**63]), InvalidArgument, "out of range"),
    (lambda api: api.extend([10**30], 60), InvalidArgument, "out of range"),
    (lambda api: api.release(1, delay=math.nan), InvalidArgument, "interval|delay"),
    (lambda api: api.reject(1, 1, "because\0"), InvalidArgument, "delivery_error or as unacc"),
    (lambda api: api.ack(2**62, [1]), LeaseLost, "lease"),
    (lambda api: api.release(12345), LeaseLost, "lease"),
    (lambda api: api.reject(12345, 1, "unacceptable"), LeaseLost, "lease"),
    (lambda api: api.extend([12345], 60), LeaseLost, "lease"),
    fail(LeaseLost, "lease", broken(1)),
    fail(InvalidArgument, 'failure 0: .*"retry" or "dead"', broken(1, verdict="maybe")),
    fail(BartlebyError, "range", broken(1, delay=math.nan)),
    fail(BartlebyError, "range|position", broken(2**63)),
    (lambda api: api.replay([2**63], **ANA), InvalidArgument, "range"),
    (lambda api: api.replay([1], actor=" ", reason="r"), InvalidArgument, "an actor and a reason"),
    (lambda api: api.dead_letters(limit=10_001), InvalidArgument, "1 to 10,000"),
    (lambda api: api.dead_letters(sort="size"), InvalidArgument, "newest, oldest, id or -id"),
    (lambda api: api.dead_letters(after="here"), InvalidArgument, "no place"),
    (lambda api: api.idle("orders", math.nan), BartlebyError, "interval|range|NaN"),
    (lambda api: api.mark_handled("orders", "billing", "id:\0"), InvalidMessage, "NUL"),
    (lambda api: api.add_token("token", "ci", "plain", "reader", **ANA), InvalidArgument, "hash"),
]


def test_bad_input_is_an_error_of_ours_and_changes_nothing(client: Client) -> None:
    before = numbers(client), client.audit_anchor(), client.tokens()
    for number, (call, error, text) in enumerate(REFUSALS):
        try:
            with pytest.raises(error, match=text) as caught:
                call(client)
        except Exception as other:
            raise AssertionError(f"row {number}: {text}") from other
        assert len(str(caught.value)) < 400, text
        assert caught.value.hint or error is not bartleby.PayloadTooLarge
        assert "message 1: " not in text or getattr(caught.value, "index", None) == 1, text
    assert (numbers(client), client.audit_anchor(), client.tokens()) == before


def test_bad_queue_names_are_refused_and_unknown_everywhere(client: Client) -> None:
    for name in ("", "x" * 10_000, "o'orders", "a;drop table x", "bücher", "nul\0", "\ud800", "Orders", "a\n", "%s"):
        with pytest.raises(bartleby.InvalidQueueName, match="invalid queue name") as caught:
            client.create_queue(name)
        assert "at most 63 characters" in (caught.value.hint or "")
        assert len(str(caught.value)) < 200
        calls: list[Callable[[str], object]] = [client.pause_queue, client.resume_queue, client.drop_queue]
        calls += [lambda name: client.send(name, 1), lambda name: client.send_many(name, [{"payload": 1}])]
        calls += [lambda name: client.claim(name, "w"), lambda name: client.configure_queue(name, {})]
        calls += [lambda name: client.idle(name, 1)]
        for call in calls:
            with pytest.raises(bartleby.UnknownQueue, match="unknown queue") as unknown:
                call(name)
            assert len(str(unknown.value)) < 200
    assert [queue.name for queue in client.queues()] == ["orders"]


# Transactions


@BOTH
def test_calls_are_part_of_the_callers_transaction(way: Way) -> None:
    api = way.api
    api.create_queue("orders", {"backoff": "none"})
    transaction = way.begin()
    transaction.api.send("orders", "rolled back")
    transaction.api.send_many("orders", [{"payload": "rolled back"}, {"payload": "rolled back", "delay": 1}])
    transaction.rollback()
    transaction.api.send("orders", "committed")
    assert api.claim("orders", "tester") is None
    transaction.commit()
    lease = claimed(transaction.api)
    assert [message.payload for message in lease] == ["committed"]
    transaction.api.fail(lease.id, [broken(lease.messages[0].position, verdict="dead")])
    transaction.rollback()
    assert not api.dead_letters()
    lease = claimed(transaction.api)
    transaction.commit()
    assert transaction.api.ack(lease.id) == 1
    transaction.rollback()
    assert api.ack(lease.id) == 1
    # an error is one of ours, and ending the transaction is left to the caller
    with pytest.raises(bartleby.UnknownQueue):
        transaction.api.send("nowhere", 1)
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        transaction.api.send("orders", 1)
    transaction.rollback()
    # an answer is kept if and only if the action is committed
    for end, names in ((transaction.rollback, ["orders"]), (transaction.commit, ["billing", "orders"])):
        assert transaction.api.take_answer("ana", "k", "POST /a") is None
        transaction.api.create_queue("billing")
        transaction.api.keep_answer("ana", "k", 201, "made")
        end()
        assert [each.name for each in api.queues()] == names
    assert api.take_answer("ana", "k", "POST /a") == bartleby.Answer(201, "made")


async def test_transaction_of_a_client_is_atomic(dsn: str) -> None:
    with Client(dsn) as client:
        with pytest.raises(bartleby.InvalidQueueName), client.transaction() as runner:  # noqa: PT012 - the second call
            runner.create_queue("orders")
            assert client.queues() == [], "the first queue is visible before the commit"
            runner.create_queue("Not A Name")
        assert client.queues() == []
        with client.transaction() as runner:
            runner.create_queue("orders")
    async with AsyncClient(dsn) as awaited:
        with pytest.raises(bartleby.InvalidQueueName):  # noqa: PT012 - the second call
            async with awaited.transaction() as async_runner:
                await async_runner.create_queue("parcels")
                await async_runner.create_queue("Not A Name")
        async with awaited.transaction() as async_runner:
            await async_runner.create_queue("letters")
        assert [each.name for each in await awaited.queues()] == ["letters", "orders"]


@pytest.mark.own_database
@pytest.mark.parametrize("way", ["Client", "AsyncClient", "Client.using", "AsyncClient.using"], indirect=True)
def test_only_claim_ack_and_extend_in_their_own_transaction_commit_asynchronously(way: Way, conn: Conn) -> None:
    api = way.api
    api.create_queue("orders")
    conn.execute("create table public.noted (what text, setting text)")
    conn.execute("""
        create function public.note() returns trigger language plpgsql as $$
        begin
          insert into public.noted values (tg_op || ' ' || tg_table_name, current_setting('synchronous_commit'));
          return null;
        end $$""")
    for table, events in {"lease": "insert or update", "log": "insert", "dead_letter": "insert"}.items():
        trigger = f"create trigger note after {events} on bartleby.{table} for each row execute function public.note()"
        conn.execute(trigger.encode())

    def noted() -> list[tuple[str, str]]:
        found = conn.execute("delete from public.noted returning what, setting").fetchall()
        return sorted({(str(what).replace("log_0", "log"), str(setting)) for what, setting in found})

    asynchronous = "off" if way.own_transactions else "on"
    api.send_many("orders", [{"payload": 1}, {"payload": 2}])
    assert noted() == [("INSERT log", "on")]
    lease = claimed(api)
    assert noted() == [("INSERT lease", asynchronous)]
    api.extend([lease.id], 60)
    assert noted() == [("UPDATE lease", asynchronous)]
    api.fail(lease.id, [broken(lease.messages[0].position, verdict="dead")])
    assert noted() == [("INSERT dead_letter", "on"), ("UPDATE lease", "on")]
    api.ack(lease.id)
    assert noted() == [("UPDATE lease", asynchronous)]
    assert api.facts().synchronous_commit == "on"
    api.send("orders", 3)
    noted()
    transaction = way.begin()
    lease = claimed(transaction.api)
    transaction.api.extend([lease.id], 60)
    transaction.api.ack(lease.id)
    assert transaction.query("show synchronous_commit") == [("on",)]
    transaction.commit()
    assert noted() == [("INSERT lease", "on"), ("UPDATE lease", "on")]


@pytest.mark.own_database
def test_role_that_is_serializable_by_default_claims_through_a_client(dsn: str, conn: Conn) -> None:
    conn.execute("do $$ begin execute format("
                 "'alter role current_user in database %I set default_transaction_isolation = serializable',"
                 "current_database()); end $$")  # fmt: skip
    for name in ("Client", "AsyncClient"):
        with WAYS[name](dsn) as way:
            way.api.create_queue("orders")
            way.api.send("orders", 1)
            assert way.api.ack(claimed(way.api).id) == 1
            transaction = way.begin()
            assert transaction.query("show transaction_isolation") == [("serializable",)]
            with pytest.raises(bartleby.WrongIsolation, match="READ COMMITTED, not SERIALIZABLE"):
                transaction.api.claim("orders", "tester")
            transaction.rollback()


def test_session_that_holds_back_vacuum_is_named(client: Client, dsn: str) -> None:
    with psycopg.connect(dsn) as idle:
        idle.execute("select pg_current_xact_id()")
        holder = present(client.oldest_xmin_holder())
        assert (holder.kind, holder.since is not None) == ("session", True)
        assert holder.who.startswith(f"pid {idle.info.backend_pid} (postgres")
        assert "idle in transaction" in holder.who
        idle.rollback()
