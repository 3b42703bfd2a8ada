"""The clock of the acceptance tests, and limits that hold on a busy machine."""

from importlib.resources import files

import pytest

from bartleby.testing import Clock, frozen_clock
from tests.kit.sql import Connection


@pytest.fixture(autouse=True)
def patience(patient_pools: None, patient_worker: None) -> None:
    """Wait longer for a connection, and let no worker give up because the machine is slow."""


@pytest.fixture
def frozen(dsn: str, conn: Connection) -> Clock:
    """The clock of the test's database, as the testing kit has it: it stands still until it is moved."""
    conn.execute((files("bartleby.testing") / "clock.sql").read_bytes())
    return frozen_clock(dsn)
