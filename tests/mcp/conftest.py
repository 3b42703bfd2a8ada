"""What tests of the tools for agents share: a database with letters, and an agent that calls tools over it."""

from collections.abc import Iterator

import pytest

from bartleby import Bartleby, Client
from tests.kit.agent import Agent


@pytest.fixture
def app(dsn: str) -> Iterator[Bartleby]:
    """An application with a queue `orders`, where one attempt is all there is."""
    made = Bartleby(dsn)
    made.client.create_queue("orders", {"max_attempts": 1, "breaker": "off"})
    yield made
    made.client.close()


@pytest.fixture
def client(app: Bartleby, dsn: str) -> Iterator[Client]:
    """Whoever knows the database: sends, lets die, and looks at what came of it."""
    with Client(dsn) as opened:
        yield opened


@pytest.fixture
def agent(client: Client) -> Agent:
    """An agent `agent:robin` that a person has to let run things."""
    return Agent(client)
