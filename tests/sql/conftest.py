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
