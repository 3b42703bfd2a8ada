"""The lab of the random schedules, and the sessions of the races."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.property.sessions import Sessions
from tests.property.world import Lab, open_lab

examples_share_a_database = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
    derandomize=True,
    database=None,
)


@pytest.fixture
def lab(dsn: str) -> Iterator[Lab]:
    """Several sessions over one database whose clock can be moved, driven by one thread."""
    with open_lab(dsn) as opened:
        yield opened


@pytest.fixture
def s(dsn: str) -> Iterator[Sessions]:
    with Sessions(dsn) as opened:
        yield opened
