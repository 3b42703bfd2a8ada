"""What a client adds to the SQL core: error classes, transactions and durability."""

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import bartleby
from bartleby import AsyncClient, Bartleby, BartlebyError, Client, Failure, InvalidArgument, InvalidMessage, LeaseLost
from bartleby.client import Runner
from tests.kit.ways import WAYS, Way
from tests.kit.worker import present

Conn = psycopg.Connection[tuple[Any, ...]]
Refusal = tuple[Callable[[Client], object], type[BartlebyError], str]
ANA: dict[str, Any] = {"actor": "ana", "reason": "because"}


def claimed(api: Runner) -> bartleby.Lease:
    return present(api.claim("orders", "tester", limit=100))


def broken(position: int, **more: Any) -> Failure:
    return Failure(position, "KeyError", "'customer'", **more)


# Bad input: a Bartleby error names the problem, and nothing is sent or changed. tests/sql has the rules of SQL.


def send(error: type[BartlebyError], text: str, payload: Any = 1, **options: Any) -> Refusal:
    return lambda api: api.send("orders", payload, **options), error, text


def send_second(error: type[BartlebyError], text: str, message: Any) -> Refusal:
    return lambda api: api.send_many("orders", [{"payload": 1}, message]), error, f"message 1: .*{text}"


def policy(text: str, keys: Any) -> Refusal:
    return lambda api: api.create_queue("other", keys), bartleby.InvalidPolicy, text


REFUSALS: list[Refusal] = [
    send(InvalidMessage, "set is not JSON", {1}),
    send(InvalidMessage, "JSON", Failure),
    send(InvalidMessage, "JSON", {"inside": broken(1)}),
    send(bartleby.PayloadTooLarge, 'limit of queue "orders" is 5000', "x" * 6000),
    send(InvalidMessage, "Out of range", headers={"a": math.nan}),
    send(InvalidMessage, "headers must be a JSON object", headers=[1]),
    send(InvalidMessage, "key", key="a\0"),
    *(send(BartlebyError, "interval|delay", delay=each) for each in (math.nan, math.inf, timedelta.max, 10**30)),
    send(InvalidArgument, "out of range", max_attempts=10**10),
    send_second(InvalidMessage, 'unknown key "paylod"', {"payload": 1, "paylod": 1}),
    send_second(InvalidMessage, "object with the key", "x"),
    send_second(InvalidMessage, "Out of range", {"payload": 1, "delay": math.nan}),
    send_second(InvalidMessage, "NUL", {"payload": 1, "key": "\0"}),
    send_second(InvalidMessage, "surrogate", {"payload": "\ud800"}),
    send_second(bartleby.PayloadTooLarge, "is 5000", {"payload": "x" * 6000}),
    policy("Out of range", {"base": math.nan}),
    policy("NUL", {"backoff": "\0"}),
    policy("policy", {"lease": {1}}),
    policy("JSON object", [1]),
    (lambda api: api.send_many("orders", [{"payload": 1, "generation": 2**63}]), BartlebyError, "range|generation"),
    (lambda api: api.create_queue("nul\0"), bartleby.InvalidQueueName, "invalid queue name"),
    (lambda api: api.create_queue("x" * 10_000), bartleby.InvalidQueueName, "invalid queue name"),
    (lambda api: api.send("\ud800", 1), bartleby.UnknownQueue, "unknown queue"),
    (lambda api: api.split_group(1, "payload.land", {1, 2}, **ANA), InvalidMessage, "set is not JSON"),
    (lambda api: api.plan_replay("queue:orders", patch=[{"op": {1}}], **ANA), bartleby.InvalidPatch, "invalid patch"),
    (lambda api: api.ack(1, [2**63]), InvalidArgument, "out of range"),
    (lambda api: api.extend([12345], 60), LeaseLost, "lease"),
    (lambda api: api.release(1, delay=math.nan), InvalidArgument, "interval|delay"),
    (lambda api: api.reject(1, 1, "because\0"), InvalidArgument, "delivery_error or as unacc"),
    (lambda api: api.fail(1, [broken(1, delay=math.nan)]), BartlebyError, "range"),
    (lambda api: api.fail(1, [broken(2**63)]), BartlebyError, "range|position"),
    (lambda api: api.idle("orders", math.nan), BartlebyError, "interval|range|NaN"),
    (lambda api: api.mark_handled("orders", "billing", "id:\0"), InvalidMessage, "NUL"),
]


def test_bad_input_raises_a_bartleby_error_and_changes_nothing(app: Bartleby) -> None:
    client = app.client
    client.configure_queue("orders", {"payload_limit": 5000})
    [before], anchor = client.queues(), client.audit_anchor()
    for number, (call, error, text) in enumerate(REFUSALS):
        try:
            with pytest.raises(error, match=text) as caught:
                call(client)
        except Exception as other:
            raise AssertionError(f"row {number}: {text}") from other
        assert len(str(caught.value)) < 400, text
        assert caught.value.hint or error is not bartleby.PayloadTooLarge
        assert "message 1: " not in text or getattr(caught.value, "index", None) == 1, text
    assert (client.queues(), client.audit_anchor()) == ([before], anchor)


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
    """tests/unit/test_public_api.py has the verbs; a change of a lease shows with which setting it was made."""
    api = way.api
    api.create_queue("orders")
    conn.execute("""
        create table public.noted (setting text);
        create function public.note() returns trigger language plpgsql as $$
        begin
          insert into public.noted values (current_setting('synchronous_commit'));
          return null;
        end $$;
        create trigger note after insert or update on bartleby.lease for each row execute function public.note()""")

    def noted() -> set[str]:
        return {str(setting) for (setting,) in conn.execute("delete from public.noted returning setting").fetchall()}

    asynchronous = {"off"} if way.own_transactions else {"on"}
    api.send_many("orders", [{"payload": 1}, {"payload": 2}, {"payload": 3}])
    lease = present(api.claim("orders", "tester", limit=2))
    assert noted() == asynchronous
    api.extend([lease.id], 60)
    assert noted() == asynchronous
    api.fail(lease.id, [broken(lease.messages[0].position, verdict="dead")])
    assert noted() == {"on"}
    api.ack(lease.id)
    assert noted() == asynchronous
    assert api.facts().synchronous_commit == "on"
    transaction = way.begin()
    claimed(transaction.api)
    transaction.rollback()
    lease = claimed(transaction.api)
    transaction.api.extend([lease.id], 60)
    transaction.api.ack(lease.id)
    assert transaction.query("show synchronous_commit") == [("on",)]
    transaction.commit()
    assert noted() == {"on"}


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
