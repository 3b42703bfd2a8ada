"""The client of the tests of the relay."""

from collections.abc import Iterator

import pytest

from bartleby import Client


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    """A client of a database with a queue `orders`."""
    with Client(dsn) as opened:
        opened.create_queue("orders")
        yield opened
