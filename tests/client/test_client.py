"""What a client adds to the SQL core: payloads, typed answers, error classes, transactions and durability."""

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from bartleby import (
    Answer,
    AsyncClient,
    Client,
    Failure,
    InvalidArgument,
    InvalidMessage,
    InvalidPatch,
    InvalidPolicy,
    InvalidQueueName,
    Lease,
    LeaseLost,
    PayloadTooLarge,
    UndecodablePayload,
    UnknownQueue,
    WrongIsolation,
)
from bartleby.client import Runner
from tests.kit.ways import WAYS, Way

Conn = psycopg.Connection[tuple[Any, ...]]
ANA: dict[str, Any] = {"actor": "ana", "reason": "because"}
BOTH = pytest.mark.parametrize("way", ["Client", "AsyncClient"], indirect=True)

PAYLOADS = [
    None, True, False, 0, -1, 2**53 + 1, -(2**80), 10**400, 0.1, -2.5e-7, 5e-324, 1e15,
    "", "Straße ☃ \U0001f600 \u2028 \x7f\x9b", r"\u0000", "'; drop schema bartleby; --", "%s %(x)s {}", "\\", '"',
    [], {}, [[], {}, [None]], {"": {"": ""}}, {"b": 1, "a": [1.5, "x", None, {"deep": [True]}]}, ["x" * 100_000],
]  # fmt: skip


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        opened.create_queue("orders", {"backoff": "none"})
        yield opened


def claimed(api: Runner, limit: int = 100) -> Lease:
    lease = api.claim("orders", "tester", limit=limit)
    assert lease is not None
    return lease


def numbers(api: Runner) -> tuple[int, int, int, int]:
    [found] = api.queues()
    return found.ready, found.leased, found.deferred, found.dead


def broken(position: int, **more: Any) -> Failure:
    return Failure(position, "KeyError", "'customer'", **more)


def test_payloads_arrive_as_they_were_sent(client: Client, conn: Conn) -> None:
    for payload in PAYLOADS:
        client.send("orders", payload)
    client.send_many("orders", [{"payload": payload} for payload in PAYLOADS])
    lease = claimed(client)
    received = [message.payload for message in lease]
    assert received == PAYLOADS * 2
    assert [type(value) for value in received] == [type(value) for value in PAYLOADS * 2]
    client.ack(lease.id)
    # jsonb writes a float of 1e16 or more as an integer
    large = [1e16, 1e23, 1.7976931348623157e308]
    client.send("orders", large)
    [message] = claimed(client)
    assert [(type(value), float(value)) for value in message.payload] == [(int, each) for each in large]
    # a payload that Python cannot decode does not affect the others of its lease
    client.send("orders", "before")
    conn.execute("select bartleby.send('orders', '1e130000')")
    client.send("orders", "after")
    before, bad, after = (lease := claimed(client))
    assert (before.payload, after.payload, bad.raw[:4]) == ("before", "after", "1000")
    with pytest.raises(UndecodablePayload, match="130001 characters"):
        _ = bad.payload
    client.fail(lease.id, [broken(bad.position, verdict="dead")])
    assert client.ack(lease.id) == 2


def test_bulk_send_keeps_order_and_accepts_an_empty_list(client: Client) -> None:
    ids = client.send_many("orders", [{"payload": number} for number in range(1500)])
    assert ids == sorted(set(ids))
    assert client.send_many("orders", []) == []
    assert [message.payload for message in claimed(client, limit=1500)] == list(range(1500))


def test_text_that_postgresql_cannot_store_is_replaced_in_evidence(client: Client) -> None:
    client.send("orders", 1)
    lease = claimed(client)
    failure = Failure(lease.messages[0].position, "Odd\0", "a\0b\ud800c\\u0000", traceback="\udfff" * 3, verdict="dead")
    client.fail(lease.id, [failure])
    [letter] = client.dead_letters()
    assert (letter.error_type, letter.error, letter.traceback) == ("Odd\ufffd", "a\ufffdb?c\\u0000", "???")


def test_policy_of_a_failure_goes_along(client: Client) -> None:
    client.send_many("orders", [{"payload": number} for number in range(4)])
    one, two, three, four = claimed(client)
    failures = [
        Failure(one.position, "E", "e", max_attempts=1, rule="transient"),
        Failure(two.position, "E", "e", give_up_after=1.5, delay=2),
        Failure(three.position, "E", "e", reason="unacceptable"),
        Failure(four.position, "E", "e", delay=3600),
    ]
    decisions = sorted(client.fail(one.lease_id, failures), key=lambda each: each.position)
    assert [each.verdict for each in decisions] == ["dead", "dead", "dead", "retry"]
    reasons = {letter.message_id: letter.reason for letter in client.dead_letters()}
    assert reasons == {one.id: "exhausted", two.id: "expired", three.id: "unacceptable"}
    assert [each.rule for each in client.attempts(one.id)] == ["transient; attempt 1 of 1"]
    assert [each.rule for each in client.attempts(two.id)] == ["give_up_after 00:00:01.5 is over"]


def test_history_of_a_letter_has_its_earlier_cycles(client: Client) -> None:
    sent = client.send("orders", {"id": 1})
    for error_type, cycles in (("KeyError", []), ("ValueError", [(1, "KeyError", "ada")])):
        lease = claimed(client)
        client.fail(lease.id, [Failure(lease.messages[0].position, error_type, "e", verdict="dead")])
        letter = client.dead_letter(sent)
        assert letter is not None
        history = letter.failure_history
        assert [(each["cycle"], each["error_type"], each["replayed_by"]) for each in history] == cycles
        if not cycles:
            assert client.replay([sent], actor="ada", reason="fixed") == [sent]
    assert [(each.cycle, each.error_type) for each in client.attempts(sent)] == [(1, "KeyError"), (2, "ValueError")]


def test_refusals_have_their_class_and_hint(client: Client) -> None:
    client.configure_queue("orders", {"payload_limit": 50})
    before = numbers(client), client.audit_anchor()
    large: Any = [{"payload": "x"}, {"payload": "x" * 60}]
    refusals: list[tuple[str, Callable[[], object], type[Exception], str]] = [
        ("payload", lambda: client.send("orders", "x" * 60), PayloadTooLarge, 'limit of queue "orders" is 50'),
        ("headers", lambda: client.send("orders", 1, headers={"h": "x" * 60}), PayloadTooLarge, "is 50"),
        ("bulk", lambda: client.send_many("orders", large), PayloadTooLarge, "message 1: .*is 50"),
        ("no JSON", lambda: client.send("orders", {1, 2}), InvalidMessage, "JSON"),
        ("NUL in a key", lambda: client.mark_handled("orders", "billing", "id:\0"), InvalidMessage, "NUL"),
        ("policy", lambda: client.create_queue("new", {"lease": {1}}), InvalidPolicy, "policy"),
        ("patch", lambda: plan({"op": "add", "path": "/a", "value": {1}}), InvalidPatch, "invalid patch"),
        ("operation", lambda: plan({"op": "dance", "path": ""}), InvalidPatch, "dance"),
        ("actor", lambda: client.close_breaker("orders", actor="", reason="done"), InvalidArgument, "an actor and"),
        ("secret", lambda: client.add_token("token", "ci", "plain", "reader", **ANA), InvalidArgument, "hash"),
        ("ack", lambda: client.ack(2**62, [1]), LeaseLost, "lease"),
        ("release", lambda: client.release(12345), LeaseLost, "lease"),
        ("fail", lambda: client.fail(12345, [broken(1)]), LeaseLost, "lease"),
        ("reject", lambda: client.reject(12345, 1, "unacceptable"), LeaseLost, "lease"),
        ("extend", lambda: client.extend([12345], 60), LeaseLost, "lease"),
        ("too large a number", lambda: client.ack(2**70), InvalidArgument, "."),
    ]

    def plan(operation: dict[str, Any]) -> object:
        return client.plan_replay("queue:orders", patch=[operation], **ANA)

    for what, call, error, match in refusals:
        with pytest.raises(error, match=match) as caught:
            call()
        if isinstance(caught.value, PayloadTooLarge):
            assert "payload_limit" in (caught.value.hint or ""), what
            assert caught.value.index == (1 if what == "bulk" else None), what
    assert (numbers(client), client.audit_anchor()) == before
    assert client.tokens() == []


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
    with pytest.raises(UnknownQueue):
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
    assert api.take_answer("ana", "k", "POST /a") == Answer(201, "made")


def test_transaction_of_a_client_is_atomic(dsn: str) -> None:
    def create_both(client: Client, first: str, second: str) -> None:
        with client.transaction() as runner:
            runner.create_queue(first)
            assert client.queues() == [], "the first queue is visible before the commit"
            runner.create_queue(second)

    with Client(dsn) as client:
        with pytest.raises(InvalidQueueName):
            create_both(client, "orders", "Not A Name")
        assert client.queues() == []
        create_both(client, "orders", "billing")
        assert [each.name for each in client.queues()] == ["billing", "orders"]


async def test_transaction_of_an_async_client_is_atomic(dsn: str) -> None:
    async def create_both(client: AsyncClient, first: str, second: str) -> None:
        async with client.transaction() as runner:
            await runner.create_queue(first)
            await runner.create_queue(second)

    async with AsyncClient(dsn) as client:
        with pytest.raises(InvalidQueueName):
            await create_both(client, "orders", "Not A Name")
        assert await client.queues() == []
        await create_both(client, "orders", "billing")
        assert len(await client.queues()) == 2


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
        conn.execute(
            f"create trigger note after {events} on bartleby.{table}"
            " for each row execute function public.note()".encode()
        )

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
            lease = claimed(way.api)
            assert way.api.ack(lease.id) == 1
            transaction = way.begin()
            assert transaction.query("show transaction_isolation") == [("serializable",)]
            with pytest.raises(WrongIsolation, match="READ COMMITTED, not SERIALIZABLE"):
                transaction.api.claim("orders", "tester")
            transaction.rollback()


def test_session_that_holds_back_vacuum_is_named(client: Client, dsn: str) -> None:
    with psycopg.connect(dsn) as idle:
        idle.execute("select pg_current_xact_id()")
        holder = client.oldest_xmin_holder()
        assert holder is not None
        assert holder.kind == "session"
        assert holder.who.startswith(f"pid {idle.info.backend_pid} (postgres")
        assert "idle in transaction" in holder.who
        assert holder.since is not None
        idle.rollback()
