"""Each bug that is planted on purpose is caught by a profile."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.nightly.chaos import worker_profiles
from tests.nightly.chaos.worker_plants import IN_THE_CORE, plant_in_the_core
from tests.nightly.chaos.worker_stage import Stage, stage

CAUGHT: dict[str, tuple[Callable[[Stage, int], None], int, str]] = {
    # what a late worker settles may be leased by another one, or gone
    "no_lease_guard": (worker_profiles.frozen, 6, "wrong_owner|lost"),
    "ack_before_the_handler_ran": (worker_profiles.killed, 3, "unearned"),
    "no_heartbeat": (worker_profiles.undisturbed, 60, "unexplained"),
    "no_solo_lane": (partial(worker_profiles.aborting, processes=2), 2, "siblings were charged"),
    "release_charges": (worker_profiles.restarted, 4, "wrongly_charged"),
    "crash_charges_the_whole_batch": (worker_profiles.killed, 3, "wrongly_charged"),
}


@pytest.mark.own_database
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", CAUGHT)
def test_planted_bug_is_caught(dsn: str, tmp_path: Path, bug: str) -> None:
    profile, length, finding = CAUGHT[bug]
    with stage(dsn, tmp_path, plant="" if bug in IN_THE_CORE else bug) as on:
        if bug in IN_THE_CORE:
            with on.admin() as conn:
                plant_in_the_core(conn, bug)
        with pytest.raises(AssertionError, match=finding):
            profile(on, length)
