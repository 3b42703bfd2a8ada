"""Fixtures of the acceptance tests: a clock that the test moves, a client, an application."""

from collections.abc import Iterator
from importlib.resources import files

import pytest

from bartleby import Bartleby, Client
from bartleby.testing import Clock, frozen_clock
from tests.kit.sql import Connection


@pytest.fixture
def clock(dsn: str, conn: Connection) -> Clock:
    """The clock of the test's database, as the testing kit has it: it stands still until it is moved."""
    conn.execute((files("bartleby.testing") / "clock.sql").read_bytes())
    return frozen_clock(dsn)


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        yield opened


@pytest.fixture
def app(dsn: str) -> Iterator[Bartleby]:
    """An application without handlers."""
    made = Bartleby(dsn, version="2.4.0")
    yield made
    if "client" in vars(made):
        made.client.close()
