"""Fixtures for tests of the MCP server: a database with a queue, and an agent that calls tools."""

from collections.abc import Iterator

import pytest

from bartleby import Bartleby, Client
from tests.kit.agent import Agent


@pytest.fixture(autouse=True)
def patience(patient_worker: None) -> None:
    """Workers give nothing up because the machine is slow."""


@pytest.fixture
def client(app: Bartleby, dsn: str) -> Iterator[Client]:
    """A client of a database with a queue `orders`, where a message has one attempt."""
    with Client(dsn) as opened:
        opened.configure_queue("orders", {"max_attempts": 1, "breaker": "off"})
        yield opened


@pytest.fixture
def agent(client: Client) -> Agent:
    """An agent `agent:robin` whose plans need approval."""
    return Agent(client)
