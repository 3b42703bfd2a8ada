"""When something ends that is done for a time, by the clock of whoever types it."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from bartleby.surfaces.cli.ends import end_of

EVENING = datetime(2026, 10, 24, 20, 30, tzinfo=UTC)  # 22:30, and in the night clocks are put back


@pytest.fixture(autouse=True)
def _vienna(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(
    ("until", "end"),
    [
        ("22:31", datetime(2026, 10, 24, 20, 31, tzinfo=UTC)),
        ("22:30", datetime(2026, 10, 25, 21, 30, tzinfo=UTC)),
        ("8:00", datetime(2026, 10, 25, 7, tzinfo=UTC)),
        ("01:00", datetime(2026, 10, 24, 23, tzinfo=UTC)),
        ("2026-10-25", datetime(2026, 10, 24, 22, tzinfo=UTC)),
        ("2026-10-26T08:00", datetime(2026, 10, 26, 7, tzinfo=UTC)),
    ],
)
def test_a_time_of_day_is_the_next_one_that_the_clock_on_the_wall_shows(until: str, end: datetime) -> None:
    assert end_of(None, until, EVENING) == end
