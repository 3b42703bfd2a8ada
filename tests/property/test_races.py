"""Races in two real sessions, each of which first proves that it is where it wants to be."""

from collections.abc import Callable

import pytest

from tests.property.deferred_races import DEFERRED_RACES
from tests.property.races import RACES
from tests.property.segment_races import SEGMENT_RACES
from tests.property.sessions import Sessions

OPEN = {
    "a_sender_can_prepare_while_a_worker_sleeps": "a transaction that notified cannot be prepared",
    "a_ring_from_another_cluster_turns": "a segment settled in another cluster waits for its snapshots",
}


@pytest.mark.parametrize("race", [*RACES, *DEFERRED_RACES, *SEGMENT_RACES], ids=lambda race: race.__name__)
def test_race(dsn: str, race: Callable[[Sessions], None], request: pytest.FixtureRequest) -> None:
    if race.__name__ in OPEN:
        request.applymarker(pytest.mark.xfail(reason=OPEN[race.__name__], strict=False))
    with Sessions(dsn) as sessions:
        race(sessions)
        assert sessions.opened
