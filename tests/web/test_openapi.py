"""A short slice of the random requests of tests/nightly/fuzz/test_web.py."""

import pytest

from tests.kit.openapi import fuzz
from tests.web.conftest import OpenConsole


# threads of the pools use `random` while hypothesis draws a case, which looks like a strategy that does
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
def test_random_requests_get_documented_answers(dsn: str, open_console: OpenConsole) -> None:
    fuzz(open_console(writes_per_minute=1_000_000), dsn, examples=4, step=7)
