"""Compares what handlers, settlers and producers recorded. The tables of the queue are not consulted."""

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ASYNCHRONOUS_SECONDS = 1.5
"""How long before a crash of the server an ack may be lost: three rounds of the WAL writer, on a slow machine."""

SWIFT, SLOW = "swift", "slow"
"""Queues whose handlers are coroutines, and functions in threads."""
ABORT, OUTAGE, VENOM, ORDERS, BUGS, ONCE, NOTHING = (
    "abort", "outage", "venom", "orders", "bugs", "once", "nothing",
)  # fmt: skip
EFFECTS = "public.effects"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something done to one worker, or to all of them if none is named."""

    kind: str
    since: float
    until: float
    worker: int | None = None

    def hits(self, worker: int, since: float, until: float) -> bool:
        return self.worker in {None, worker} and self.since <= until and self.until >= since


@dataclass(slots=True, eq=False)
class Run:
    """One run of a handler, and what its worker tried to settle it with."""

    worker: int
    begun: float
    queue: str
    value: str
    message: int
    attempt: int
    lease: int
    position: int
    solo: bool
    ended: float | None = None
    how: str | None = None
    claimed: float | None = None
    started: float | None = None
    """When its worker asked for its lease, and when it announced that this message begins alone."""
    tries: list["Try"] = field(default_factory=list)

    def settled(self) -> "Try | None":
        return next((each for each in self.tries if each.how == "K"), None)

    def charged(self) -> bool:
        return any(each.kind == "fail" and each.how == "K" for each in self.tries)

    def perhaps(self, kind: str) -> bool:
        return any(each.kind == kind and each.how in {"U", None} for each in self.tries)


@dataclass(slots=True, eq=False)
class Try:
    """One settlement: K accepted, L refused, U unknown, None if the worker died before the answer."""

    worker: int
    left: float
    kind: str
    lease: int
    positions: list[int] | None
    answered: float | None = None
    how: str | None = None
    verdicts: dict[int, str] = field(default_factory=dict)


def lines(path: Path) -> Iterator[list[Any]]:
    """Yield the lines of a ledger; the last one of a killed process may be cut."""
    for line in path.read_text().split("\n")[:-1]:
        yield json.loads(line)


class Book:
    """Everything that workers have recorded."""

    def __init__(self, folder: Path) -> None:
        self.runs: list[Run] = []
        self.tries: list[Try] = []
        self.alone: dict[str, list[int]] = defaultdict(list)
        """The leases under which a message was handed out to run alone."""
        self.claimed: dict[int, float] = {}
        self.starved: list[Fault] = []
        """When a worker stood still for long without a fault of the test."""
        for path in folder.glob("*.ran"):
            self._read(int(path.stem), path)
        self.runs.sort(key=lambda run: run.begun)
        self.by_value: dict[str, list[Run]] = defaultdict(list)
        self.by_lease: dict[int, list[Run]] = defaultdict(list)
        for run in self.runs:
            self.by_value[run.value].append(run)
            self.by_lease[run.lease].append(run)
        self.starts = [each for each in self.tries if each.kind == "start"]
        for run in self.runs:
            run.claimed = self.claimed.get(run.lease)
        for settling in self.tries:
            for run in self.by_lease.get(settling.lease, ()):
                if settling.kind == "start":
                    run.started = settling.left
                elif settling.positions is None or run.position in settling.positions:
                    run.tries.append(settling)

    def _read(self, worker: int, path: Path) -> None:
        runs: dict[int, Run] = {}
        tries: dict[int, Try] = {}
        for word, time, number, *rest in lines(path):
            if word == "B":
                self.runs.append(runs.setdefault(number, Run(worker, time, *rest)))
            elif word == "S":
                self.tries.append(tries.setdefault(number, Try(worker, time, *rest)))
            elif word == "C":
                self.claimed[number] = time
            elif word == "A":
                self.alone[rest[0]].append(number)
            elif word == "T":
                self.starved.append(Fault("starved", time, number, worker))
            elif word in {"E", "F", "X"}:
                runs[number].ended, runs[number].how = time, word
            else:
                tries[number].answered, tries[number].how = time, word
                if word == "K":
                    tries[number].verdicts = dict(rest[0])

    def starved_with(self, lease: int) -> bool:
        """Return whether a worker stood still while it had this lease."""
        return any(
            fault.hits(run.worker, run.begun if run.claimed is None else run.claimed, math.inf)
            for run in self.by_lease.get(lease, ())
            for fault in self.starved
        )

    def hardly_begun(self, value: str) -> list[Run]:
        """Return runs that were announced to begin alone and then did not: their worker was hit in between."""
        starts = [each for each in self.starts if each.lease in self.alone.get(value, ())]
        return [
            Run(each.worker, each.left, "", value, 0, 0, each.lease, 0, solo=True)
            for each in starts
            if each.how != "L" and each.lease not in self.by_lease
        ]

    def done(self, value: str) -> bool:
        """Return whether a run of it ended well, and its ack was accepted or at least sent."""
        return any(
            run.how == "E" and any(each.kind == "ack" and each.how in {"K", "U", None} for each in run.tries)
            for run in self.by_value.get(value, ())
        )


@dataclass(slots=True)
class Sent:
    """What producers committed, and what they may have."""

    committed: set[str] = field(default_factory=set)
    maybe: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, folder: Path) -> "Sent":
        sent = cls()
        for path in folder.glob("*.sent"):
            entries = list(lines(path))
            ends = {number for word, number, *_ in entries if word == "C"}
            for word, number, *values in entries:
                if word == "T":
                    (sent.committed if number in ends else sent.maybe).update(values)
        return sent


@dataclass(slots=True)
class Report:
    """Counts; how duplicates are explained; and the lists that must be empty."""

    sent: int = 0
    runs: int = 0
    lost: list[str] = field(default_factory=list)
    phantom: list[str] = field(default_factory=list)
    wrong_owner: list[str] = field(default_factory=list)
    unearned: list[str] = field(default_factory=list)
    wrongly_charged: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    explained: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)

    def violations(self) -> dict[str, list[str]]:
        names = ("lost", "phantom", "wrong_owner", "unearned", "wrongly_charged", "unexplained")
        return {name: found[:5] for name in names if (found := getattr(self, name))}

    def __str__(self) -> str:
        slowest = f"{max(self.recoveries):.2f} s" if self.recoveries else "-"
        again = ", ".join(f"{count} {why}" for why, count in sorted(self.explained.items())) or "none"
        return (
            f"{self.sent} sent, {self.runs} runs; run again: {again}; {len(self.recoveries)} leases taken back, the"
            f" slowest after {slowest}; violations: {self.violations() or 'none'}"
        )


def judge(book: Book, sent: Sent, faults: Iterable[Fault], *, dead: set[str], lapsed: set[int]) -> Report:
    """Compare. `dead` are the values of dead letters, `lapsed` the leases that workers reported as lost."""
    faults = list(faults)
    report = Report(sent=len(sent.committed), runs=len(book.runs))
    report.lost = sorted(value for value in sent.committed - dead if not book.done(value))
    report.phantom = sorted(set(book.by_value) - sent.committed - sent.maybe)
    for value, runs in book.by_value.items():
        for run in runs:
            _check_settlements(report, run, runs, faults)
        _check_attempts(report, value, sorted(runs + book.hardly_begun(value), key=lambda run: run.begun), faults)
        for before, after in itertools.pairwise(runs):
            why = explain(before, after, faults, lapsed)
            if why is None:
                report.unexplained.append(f"{before} then {after}")
            else:
                report.explained[why] += 1
    return report


def _check_settlements(report: Report, run: Run, runs: list[Run], faults: list[Fault]) -> None:
    accepted = [each for each in run.tries if each.how == "K"]
    for each in accepted:
        if each.worker != run.worker:
            report.wrong_owner.append(f"{run} settled by {each}")
        if each.kind == "ack" and (run.how != "E" or run.ended is None or run.ended > each.left):
            report.unearned.append(f"{run} acked by {each}")
    named = [each for each in accepted if each.positions is not None]
    if len(named) > 1:
        report.wrong_owner.append(f"{run} settled twice: {named}")
    for later in runs:
        if later.lease <= run.lease:
            continue
        for each in accepted:
            final = each.kind == "ack" or each.verdicts.get(run.position) == "dead"
            if (final or each.left > later.begun) and not _undone_by_a_crash(each, later, faults):
                report.wrong_owner.append(f"{run} settled by {each} and then run as {later}")


def _undone_by_a_crash(settling: Try, later: Run, faults: list[Fault]) -> bool:
    return any(
        fault.kind == "server" and settling.left - 0.1 <= fault.until and later.begun >= fault.since
        and (settling.answered or settling.left) >= fault.since - ASYNCHRONOUS_SECONDS
        for fault in faults
    )  # fmt: skip


def _check_attempts(report: Report, value: str, runs: list[Run], faults: list[Fault]) -> None:
    least = most = 1
    for run in runs:
        if run.attempt and not least <= run.attempt <= most:
            report.wrongly_charged.append(f"attempt {run.attempt}, expected {least} to {most}: {value} {runs}")
            return
        if run.charged():
            least, most = least + 1, most + 1
        elif run.perhaps("fail") or (run.solo and run.settled() is None and _stricken(run, faults)):
            most += 1


def _stricken(run: Run, faults: list[Fault]) -> bool:
    # its worker may be hit after the announcement and before its handler began
    since = run.begun if run.started is None else run.started
    return any(fault.worker == run.worker and fault.until >= since for fault in faults)


def explain(before: Run, after: Run, faults: list[Fault], lapsed: set[int]) -> str | None:
    """Return why a message was run again, or None."""
    for each in before.tries:
        if each.how == "K" and each.kind in {"fail", "release"} and before.how != "E":
            return {"fail": "failed", "release": "released"}[each.kind]
    # a handler that begins when its worker wakes up may have lost its lease before
    since = before.begun if before.claimed is None or before.settled() else before.claimed
    for fault in faults:
        if fault.hits(before.worker, since, after.begun):
            return fault.kind
    if any(each.how == "U" for each in before.tries):
        return "unknown outcome"
    return "lease lost" if before.lease in lapsed else None
