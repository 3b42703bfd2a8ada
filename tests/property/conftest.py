"""A laboratory: several sessions over one database whose clock is moved, driven by one thread."""

from collections.abc import Iterator

import psycopg
import pytest

from tests.kit.clock import move_clock
from tests.property.world import Lab, close_lab, open_lab

SESSIONS = 4


@pytest.fixture
def lab(dsn: str) -> Iterator[Lab]:
    with psycopg.connect(dsn, autocommit=True) as conn:
        move_clock(conn)
    opened = open_lab(dsn, SESSIONS)
    yield opened
    close_lab(opened)
