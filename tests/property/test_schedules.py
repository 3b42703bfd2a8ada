"""Hundreds of random schedules of open transactions, with every verb: no message is lost or doubled in any of them."""

import pytest

from tests.property.operators import OPERATED
from tests.property.schedules import run_schedule
from tests.property.world import Lab

SCHEDULES = 250


@pytest.mark.timeout(600)
def test_committed_message_is_in_exactly_one_place_in_any_schedule(lab: Lab) -> None:
    assert sum(run_schedule(lab, seed) for seed in range(SCHEDULES)) > SCHEDULES
    assert lab.emptied > 0
    assert set(lab.seen) >= OPERATED | {"held: skipped"}
