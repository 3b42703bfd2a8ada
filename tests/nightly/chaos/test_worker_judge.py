"""The judge of worker chaos, on histories that are written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.nightly.chaos.worker_ledger import Book, Fault, Report, Sent, judge

FIRST, SECOND = 100, 200
"""Workers; each has one lease, of the same number."""


def began(worker: int, time: float, attempt: int, *, solo: bool) -> list[Any]:
    return ["B", time, 1, "swift", "m", 7, attempt, worker, 1, solo]


def claimed(worker: int, time: float, *, solo: bool) -> list[list[Any]]:
    return [["C", time, worker], *([["A", time, worker, "m"]] if solo else [])]


def started(worker: int, time: float) -> list[list[Any]]:
    return [["S", time, 1, "start", worker, None], ["K", time, 1, []]]


def done(worker: int, time: float) -> list[list[Any]]:
    return [["E", time, 1], ["S", time, 2, "ack", worker, None], ["K", time, 2, []]]


def verdict(folder: Path, first: list[list[Any]], attempt: int, fault: Fault) -> Report:
    """What is said of this history of the first worker, when the second has it alone then, as this attempt."""
    second = [*claimed(SECOND, 20, solo=True), *started(SECOND, 20), began(SECOND, 21, attempt, solo=True)]
    for worker, entries in {FIRST: first, SECOND: second + done(SECOND, 22)}.items():
        (folder / f"{worker}.ran").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (folder / "0.sent").write_text('["T", 1, "m"]\n["C", 1]\n')
    return judge(Book(folder), Sent.read(folder), [fault], dead=set(), lapsed=set())


@pytest.mark.parametrize("stood_still", [True, False])
def test_a_lease_was_lost_by_whoever_stood_still_while_it_had_it(tmp_path: Path, stood_still: bool) -> None:
    first = [*claimed(FIRST, 5, solo=False), began(FIRST, 6, 1, solo=False)]
    verdict(tmp_path, [*first, ["T", 7, 9] if stood_still else ["T", 2, 4]], 1, asleep(0, 0))
    book = Book(tmp_path)
    assert (book.starved_with(FIRST), book.starved_with(SECOND)) == (stood_still, False)


def asleep(since: float, until: float) -> Fault:
    return Fault("stopped", since, until, FIRST)


def test_one_that_was_hit_between_its_start_and_its_handler_may_be_charged(tmp_path: Path) -> None:
    first = [*claimed(FIRST, 1, solo=True), *started(FIRST, 2), began(FIRST, 10, 1, solo=True)]
    report = verdict(tmp_path, first, 2, asleep(3, 9))
    assert not report.violations()
    assert report.explained == {"stopped": 1}


@pytest.mark.parametrize("runs", [True, False])
def test_one_that_was_started_after_its_worker_woke_up_may_not(tmp_path: Path, runs: bool) -> None:
    """It was claimed before, so that it runs again is no wonder; but nothing hit it while it ran."""
    first = [*claimed(FIRST, 1, solo=True), *started(FIRST, 10)]
    if runs:
        first.append(began(FIRST, 11, 1, solo=True))
    assert set(verdict(tmp_path, first, 2, asleep(3, 9)).violations()) == {"wrongly_charged"}
    assert not verdict(tmp_path, first, 1, asleep(3, 9)).violations()


@pytest.mark.parametrize("attempt", [1, 2])
def test_one_of_many_that_was_hit_before_its_handler_runs_again_at_no_charge(tmp_path: Path, attempt: int) -> None:
    first = [*claimed(FIRST, 1, solo=False), began(FIRST, 10, 1, solo=False)]
    report = verdict(tmp_path, first, attempt, asleep(3, 9))
    assert set(report.violations()) == ({"wrongly_charged"} if attempt == 2 else set())
    assert report.explained == {"stopped": 1}


def test_one_that_was_claimed_after_the_fault_has_no_reason_to_run_again(tmp_path: Path) -> None:
    first = [*claimed(FIRST, 9.5, solo=False), began(FIRST, 10, 1, solo=False)]
    assert set(verdict(tmp_path, first, 1, asleep(3, 9)).violations()) == {"unexplained"}


def test_a_fault_before_a_run_that_was_settled_explains_nothing(tmp_path: Path) -> None:
    first = [*claimed(FIRST, 1, solo=False), began(FIRST, 10, 1, solo=False), *done(FIRST, 11)]
    assert set(verdict(tmp_path, first, 1, asleep(3, 9)).violations()) == {"wrong_owner", "unexplained"}
