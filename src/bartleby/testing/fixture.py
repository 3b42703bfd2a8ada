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
            opened.callback(config.stash.__delitem__, _SANDBOX)  # what runs the last test again needs another
            # Until the session ends; a fixture for that would have to be imported beside this one. Not when pytest is
            # through: pytest-xdist gives a process whose session has ended five seconds, and databases would be left.
            request.session.addfinalizer(opened.pop_all().close)
    with config.stash[_SANDBOX].database() as dsn:
        yield dsn
