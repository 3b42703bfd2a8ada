"""The judge of worker chaos, on histories written by hand."""

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
    """Judge this history of the first worker, after which the second runs the message alone, as this attempt."""
    second = [*claimed(SECOND, 20, solo=True), *started(SECOND, 20), began(SECOND, 21, attempt, solo=True)]
    for worker, entries in {FIRST: first, SECOND: second + done(SECOND, 22)}.items():
        (folder / f"{worker}.ran").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (folder / "0.sent").write_text('["T", 1, "m"]\n["C", 1]\n')
    return judge(Book(folder), Sent.read(folder), [fault], dead=set(), lapsed=set())


def asleep(since: float, until: float) -> Fault:
    return Fault("stopped", since, until, FIRST)


@pytest.mark.parametrize("stood_still", [True, False])
def test_lease_is_lost_by_a_worker_that_stood_still_while_holding_it(tmp_path: Path, stood_still: bool) -> None:
    first = [*claimed(FIRST, 5, solo=False), began(FIRST, 6, 1, solo=False)]
    verdict(tmp_path, [*first, ["T", 7, 9] if stood_still else ["T", 2, 4]], 1, asleep(0, 0))
    book = Book(tmp_path)
    assert (book.starved_with(FIRST), book.starved_with(SECOND)) == (stood_still, False)


def test_verdict_on_a_message_whose_worker_was_stopped_from_3_to_9(tmp_path: Path) -> None:
    alone = [*claimed(FIRST, 1, solo=True), *started(FIRST, 2), began(FIRST, 10, 1, solo=True)]
    announced_later = [*claimed(FIRST, 1, solo=True), *started(FIRST, 10)]
    begun_later = [*announced_later, began(FIRST, 11, 1, solo=True)]
    in_a_batch = [*claimed(FIRST, 1, solo=False), began(FIRST, 10, 1, solo=False)]
    claimed_later = [*claimed(FIRST, 9.5, solo=False), began(FIRST, 10, 1, solo=False)]
    settled = [*in_a_batch, *done(FIRST, 11)]
    for name, first, attempt, violations, explained in (
        ("hit between its start and its handler, charged", alone, 2, set(), 1),
        # claimed before the fault, so it may run again; but no fault hit it while it ran
        ("announced after the fault, charged", announced_later, 2, {"wrongly_charged"}, None),
        ("announced after the fault, not charged", announced_later, 1, set(), None),
        ("begun after the fault, charged", begun_later, 2, {"wrongly_charged"}, None),
        ("begun after the fault, not charged", begun_later, 1, set(), None),
        ("hit in a batch before its handler, charged", in_a_batch, 2, {"wrongly_charged"}, 1),
        ("hit in a batch before its handler, not charged", in_a_batch, 1, set(), 1),
        ("claimed after the fault", claimed_later, 1, {"unexplained"}, None),
        ("settled after the fault", settled, 1, {"wrong_owner", "unexplained"}, None),
    ):
        report = verdict(tmp_path, first, attempt, asleep(3, 9))
        assert set(report.violations()) == violations, name
        assert explained is None or report.explained == {"stopped": explained}, name
