"""The lab of the random schedules, and the sessions of the races."""

from collections.abc import Iterator

import pytest

from tests.property.sessions import Sessions
from tests.property.world import Lab, close_lab, open_lab


@pytest.fixture
def lab(dsn: str) -> Iterator[Lab]:
    """Several sessions over one database whose clock can be moved, driven by one thread."""
    opened = open_lab(dsn, 4)
    yield opened
    close_lab(opened)


@pytest.fixture
def s(dsn: str) -> Iterator[Sessions]:
    with Sessions(dsn) as opened:
        yield opened
