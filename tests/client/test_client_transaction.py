"""A client lends one of its connections for a transaction of several calls."""

import pytest

from bartleby import AsyncClient, Client, InvalidQueueName


def names(client: Client) -> list[str]:
    return [each.name for each in client.queues()]


def create_both(client: Client, first: str, second: str) -> None:
    with client.transaction() as runner:
        runner.create_queue(first)
        assert names(client) == [], "nobody else sees the half of it"
        runner.create_queue(second)


async def create_both_awaited(client: AsyncClient, first: str, second: str) -> None:
    async with client.transaction() as runner:
        await runner.create_queue(first)
        await runner.create_queue(second)


def test_calls_of_a_transaction_are_there_together_or_not_at_all(dsn: str) -> None:
    with Client(dsn) as client:
        with pytest.raises(InvalidQueueName):
            create_both(client, "orders", "Not A Name")
        assert names(client) == []
        create_both(client, "orders", "billing")
        assert sorted(names(client)) == ["billing", "orders"]


async def test_the_same_awaited(dsn: str) -> None:
    async with AsyncClient(dsn) as client:
        with pytest.raises(InvalidQueueName):
            await create_both_awaited(client, "orders", "Not A Name")
        assert await client.queues() == []
        await create_both_awaited(client, "orders", "billing")
        assert len(await client.queues()) == 2
