"""Hundreds of random schedules of open transactions, with every verb: no message is lost or doubled in any of them."""

import pytest

from tests.property.schedules import run_schedule
from tests.property.world import Lab

SCHEDULES = 250
# what must have happened to dead letters and plans; otherwise the schedules prove nothing
OPERATED = {
    *("discarded", "held", "refused", "run: replayed", "run: skipped", "held: skipped"),
    *("plan finished", "item done", "item died_again", "item skipped", "item waiting"),
    *("told: dead_letter.created", "told: dead_letter.replayed", "told: dead_letter.resolved"),
    *("told: dead_letter.died_again", "told: dead_letter.discarded", "told: group.opened", "told: replay.finished"),
}


@pytest.mark.timeout(600)
def test_committed_message_is_in_exactly_one_place_in_any_schedule(lab: Lab) -> None:
    assert sum(run_schedule(lab, seed) for seed in range(SCHEDULES)) > SCHEDULES
    assert lab.emptied > 0
    assert set(lab.seen) >= OPERATED
