"""Random requests to every operation of the OpenAPI document."""

import pytest

from bartleby.surfaces.web import ConsoleSettings, console
from tests.kit.openapi import fuzz


# threads of the pools use `random` while hypothesis draws a case, which looks like a strategy that does
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
@pytest.mark.timeout(1800)
def test_random_requests_get_documented_answers(dsn: str) -> None:
    app = console(dsn, ConsoleSettings(writes_per_minute=1_000_000))
    fuzz(app, dsn, examples=25)
    app.state.house.close()
