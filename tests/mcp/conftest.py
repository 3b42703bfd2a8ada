"""Fixtures for tests of the MCP server: a database with a queue, and an agent that calls tools."""

from collections.abc import Iterator

import pytest

from bartleby import Bartleby, Client
from tests.kit.agent import Agent


@pytest.fixture
def app(dsn: str) -> Iterator[Bartleby]:
    """An application with a queue `orders` in which a message has one attempt."""
    made = Bartleby(dsn)
    made.client.create_queue("orders", {"max_attempts": 1, "breaker": "off"})
    yield made
    made.client.close()


@pytest.fixture
def client(app: Bartleby, dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        yield opened


@pytest.fixture
def agent(client: Client) -> Agent:
    """An agent `agent:robin` whose plans need approval."""
    return Agent(client)
