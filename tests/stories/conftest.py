"""What the acceptance tests share: a clock that the test moves, an application, a bus, the command line."""

from collections.abc import Iterator
from importlib.resources import files

import pytest

from bartleby import Bartleby, Client
from bartleby.testing import Clock, frozen_clock

pytest.register_assert_rewrite("tests.stories.kit")

from tests.kit.fixtures import bartleby  # noqa: E402, F401 - the fixture that runs the command line
from tests.stories.kit import Bus, Connection  # noqa: E402 - its assertions explain themselves


@pytest.fixture
def clock(dsn: str, conn: Connection) -> Clock:
    """The clock of the test's database, as the testing kit has it: it stands still, and is moved."""
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


@pytest.fixture
def bus() -> Iterator[Bus]:
    """A real server that events are sent to."""
    with Bus.running() as running:
        yield running
