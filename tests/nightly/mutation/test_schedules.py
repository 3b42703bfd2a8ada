"""Random schedules find these mutants too, not only the race that was written for each of them."""

from collections import deque
from pathlib import Path

import psycopg
import pytest

from bartleby import dev
from tests.nightly.mutation.mutant import mutants
from tests.property.schedules import run_schedule
from tests.property.world import open_lab

PACKAGE = Path(dev.__file__).parent
ENOUGH_SCHEDULES = 400
# The schedule that is tried first is known to fail. If it no longer does, all others are tried.
LIKELY = {
    "races: no guard: hole is delivered when its sender commits": 8,
    "races: no guard: probe cut by its limit buries no hole": 9,
    "races: no guard: release that commits behind the mark is found": 278,
    "races: no guard 1: unsettled messages are carried over": 10,
    "races: no guard: concurrent changes of a letter have numbers of their own": 30,
}
MUTANTS = {mutant.name: mutant for mutant in mutants()}
FAILED = (AssertionError, pytest.fail.Exception, psycopg.errors.DeadlockDetected, psycopg.errors.QueryCanceled)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", LIKELY)
def test_random_schedule_finds_the_bug(dsn: str, name: str) -> None:
    mutant = MUTANTS[name]
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(b"set check_function_bodies = off")
        conn.execute(mutant.text(PACKAGE).encode())
    with open_lab(dsn) as lab, pytest.raises(FAILED):
        deque((run_schedule(lab, seed) for seed in (LIKELY[name], *range(ENOUGH_SCHEDULES))), maxlen=0)
