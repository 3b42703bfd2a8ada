"""Races in two real sessions, each of which first proves that it is where it wants to be."""

from collections.abc import Callable

import pytest

from tests.property.breaker_races import BREAKER_RACES
from tests.property.deferred_races import DEFERRED_RACES
from tests.property.event_races import EVENT_RACES
from tests.property.letter_races import LETTER_RACES
from tests.property.pause_races import PAUSE_RACES
from tests.property.races import RACES
from tests.property.segment_races import SEGMENT_RACES
from tests.property.sessions import Sessions
from tests.property.sleep_races import SLEEP_RACES

ALL = [
    *RACES, *DEFERRED_RACES, *SEGMENT_RACES, *SLEEP_RACES, *BREAKER_RACES, *LETTER_RACES, *EVENT_RACES, *PAUSE_RACES,
]  # fmt: skip


@pytest.mark.parametrize("race", ALL, ids=lambda race: race.__name__)
def test_race(dsn: str, race: Callable[[Sessions], None]) -> None:
    with Sessions(dsn) as sessions:
        race(sessions)
        assert sessions.opened
