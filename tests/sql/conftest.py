"""What tests of the SQL core share."""

import pytest

from tests.kit.clock import Clock, move_clock
from tests.kit.sql import Connection, create


@pytest.fixture
def clock(conn: Connection) -> Clock:
    """The clock of the test's database, which the test moves."""
    return move_clock(conn)


@pytest.fixture
def q(conn: Connection) -> None:
    """The queue `q`, with the policy that every queue has."""
    create(conn)


@pytest.fixture
def quick(conn: Connection) -> None:
    """The queue `q`, where a message has two attempts and no delay between them."""
    create(conn, max_attempts=2, backoff="none")
