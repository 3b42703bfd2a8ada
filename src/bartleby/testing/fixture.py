"""The fixture for pytest."""

import contextlib
from collections.abc import Iterator

import pytest

from bartleby.testing.sandbox import Sandbox, sandbox

_SANDBOX = pytest.StashKey[Sandbox]()


@pytest.fixture
def bartleby_database(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of an empty database with the schema of Bartleby, for this test alone."""
    config = request.config
    if _SANDBOX not in config.stash:
        with contextlib.ExitStack() as opened:
            config.stash[_SANDBOX] = opened.enter_context(sandbox())
            # until pytest ends: a fixture for the session would have to be imported beside this one
            config.add_cleanup(opened.pop_all().close)
    with config.stash[_SANDBOX].database() as dsn:
        yield dsn
