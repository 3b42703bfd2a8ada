"""What a type checker sees of the public API. Checked by mypy, never run: an unused ignore is an error there."""

import asyncio
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, assert_type

import psycopg

from bartleby import Advance, AsyncClient, Client, Count, DeadLetter, Decision, Deed, Failure, Lease, Page, Replay
from bartleby.calls import Call
from bartleby.client import AsyncRunner, Runner
from bartleby.evidence import GroupId, ReplayId
from bartleby.message import LeaseId, MessageId, Position


def what_a_client_returns(client: Client) -> None:
    assert_type(client.send("orders", {"id": 42}), MessageId)
    assert_type(client.send_many("orders", [{"payload": 1}]), list[MessageId])
    assert_type(client.claim("orders", "worker", limit=10, lease=timedelta(minutes=1)), Lease | None)
    assert_type(client.fail(1, [Failure(1, "KeyError", "text")]), list[Decision])
    assert_type(client.replay([1], actor="me", reason="fixed"), list[MessageId])
    assert_type(client.drift(), list[tuple[str, str]])
    identity: int = client.send("orders", 1)
    client.ack(identity)


def what_an_operator_gets(client: Client) -> None:
    assert_type(client.dead_letters("queue:orders", limit=5), Page[DeadLetter])
    assert_type(client.count_letters("queue:orders"), Count)
    assert_type(client.discard([1], actor="me", reason="spam"), list[Deed])
    assert_type(client.split_group(1, "customer.id", 42, actor="me", reason="another bug"), GroupId)
    assert_type(client.plan_replay("group:5", actor="me", reason="fixed", canary=10), ReplayId)
    assert_type(client.advance_replays(), list[Advance])
    assert_type(client.find_replay(1), Replay | None)
    client.discard([1], "me", "spam")  # type: ignore[call-arg]
    client.plan_replay("group:5", [1], actor="me", reason="fixed")  # type: ignore[call-arg]


def what_a_lease_holds(lease: Lease) -> None:
    assert_type(lease.id, LeaseId)
    assert_type(len(lease), int)
    for message in lease:
        assert_type(message.id, MessageId)
        assert_type(message.position, Position)
        assert_type(message.headers, dict[str, Any])
        assert_type(message.generation, int | None)
        message.attempt = 2  # type: ignore[misc]


async def what_an_async_client_returns(client: AsyncClient) -> None:
    sending = assert_type(client.send("orders", 1), Coroutine[Any, Any, MessageId])
    assert_type(await asyncio.create_task(sending), MessageId)
    assert_type(await client.send("orders", 1), MessageId)
    assert_type(await client.claim("orders", "worker"), Lease | None)
    async with client as entered:
        assert_type(entered, AsyncClient)


def what_takes_part_in_a_transaction(
    client: Client, connection: psycopg.Connection, waiting: AsyncClient, awaited: psycopg.AsyncConnection
) -> None:
    assert_type(client.using(connection), Runner)
    assert_type(client.using(connection).send("orders", 1), MessageId)
    assert_type(waiting.using(awaited), AsyncRunner)
    assert_type(Client.send("orders", 1), Call[MessageId])
    client.using(awaited)  # type: ignore[arg-type]
    waiting.using(connection)  # type: ignore[arg-type]


def what_is_wrong(client: Client) -> None:
    client.send(1, 1)  # type: ignore[arg-type]
    client.send("orders", 1, "key")  # type: ignore[arg-type, call-arg]
    client.send("orders", 1, delay="soon")  # type: ignore[arg-type]
    client.send("orders", 1, unknown=1)  # type: ignore[call-arg]
    client.send_many("orders", [1])  # type: ignore[list-item]
    client.fail(1, [{"position": 1}])  # type: ignore[list-item]
    client.nonsense()  # type: ignore[attr-defined]
    Client(5)  # type: ignore[arg-type]
