"""Chaos has everything that users have, autovacuum too."""

from collections.abc import Iterator

import pytest

from bartleby import dev
from tests.kit.database import switch_autovacuum


@pytest.fixture(autouse=True, scope="module")
def vacuumed(server: dev.Server) -> Iterator[None]:
    switch_autovacuum(server, "on")
    yield
    switch_autovacuum(server, "off")
