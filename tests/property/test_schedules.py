"""Thousands of random schedules of open transactions, with every verb: conservation holds in each of them."""

import os
from collections.abc import Iterator

import psycopg
import pytest

from tests.kit.clock import move_clock
from tests.property.schedules import run_schedule
from tests.property.world import Lab, close_lab, open_lab

FIRST_SEED = int(os.environ.get("BARTLEBY_SEED", "0"))
SCHEDULES = int(os.environ.get("BARTLEBY_SCHEDULES", "0"))
SLICE = 375
# what must have happened to letters and plans, or nobody has looked: in every part, and in all of them together
OPERATED = {
    *("discarded", "held", "refused", "run: replayed", "run: skipped", "held: skipped"),
    *("plan finished", "item done", "item died_again", "item skipped", "item waiting"),
    *("told: dead_letter.created", "told: dead_letter.replayed", "told: dead_letter.resolved"),
    *("told: dead_letter.died_again", "told: dead_letter.discarded", "told: group.opened", "told: replay.finished"),
}
SELDOM = {
    *("restored", "released", "taken by retention", "again: replayed", "discarded: skipped", "replayed: skipped"),
    *("plan cancelled", "plan aborted", "told: dead_letter.restored", "told: dead_letter.expired"),
}


@pytest.fixture
def lab(dsn: str) -> Iterator[Lab]:
    with psycopg.connect(dsn, autocommit=True) as conn:
        move_clock(conn)
    opened = open_lab(dsn, 4)
    yield opened
    close_lab(opened)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("part", [0, 1, *(pytest.param(part, marks=pytest.mark.slow) for part in (2, 3))])
def test_every_committed_message_is_in_exactly_one_place_in_any_schedule(lab: Lab, part: int) -> None:
    first = FIRST_SEED + part * SLICE
    assert sum(run_schedule(lab, seed) for seed in range(first, first + SLICE)) > SLICE
    assert lab.emptied > 0
    assert set(lab.seen) >= OPERATED


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_committed_message_is_in_exactly_one_place_in_ten_thousand_schedules(lab: Lab) -> None:
    count = SCHEDULES or 10_000
    first = FIRST_SEED + 1_000_000
    assert sum(run_schedule(lab, seed) for seed in range(first, first + count)) > count
    assert lab.emptied > 0
    assert set(lab.seen) >= OPERATED | SELDOM
