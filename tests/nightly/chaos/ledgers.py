"""What processes record, and the verdict on it. The tables of the queue are not consulted.

Producers write to FOLDER/*.sent, consumers and workers to FOLDER/<pid>.ran:

    T number values                                                 a transaction has sent these
    C number, R number                                              it was committed, rolled back
    B time run queue value message_id attempt lease position solo   a handler began
    E time run                                                      it ended well
    F time run                                                      it failed, as its payload asked
    X time run                                                      it was cancelled or interrupted
    S time try kind lease positions                                 a settlement left (no positions: the whole lease)
    K time try [[position, verdict]]                                the database has it
    L time try                                                      refused: the lease is lost
    U time try error                                                the outcome is unknown
    G time lease                                                    a claim left that was granted this lease
    A time lease value                                              a claim handed out a message that has to run alone
    D time until                                                    the process stood still

The clock is the system's monotonic one, the same for every process.
"""

import itertools
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ASYNCHRONOUS_SECONDS = 1.5
"""How long before a crash of the server an ack may be lost: three rounds of the WAL writer, on a slow machine."""


class Ledger:
    """Lines of JSON in a file, written at once: a killed process cannot take one back."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, *entries: Iterable[Any]) -> None:
        os.write(self._file, "".join(json.dumps([*entry]) + "\n" for entry in entries).encode())


def read(path: Path) -> Iterator[list[Any]]:
    """Yield the lines of a ledger; the last one of a killed process may be cut."""
    for line in path.read_text().split("\n")[:-1] if path.exists() else ():
        yield json.loads(line)


@dataclass(slots=True)
class Sent:
    """What producers committed, may have committed, and rolled back."""

    committed: set[str] = field(default_factory=set)
    maybe: set[str] = field(default_factory=set)
    undone: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, folder: Path) -> "Sent":
        sent = cls()
        for path in folder.glob("*.sent"):
            entries = list(read(path))
            ends = {number: word for word, number, *_ in entries if word != "T"}
            for word, number, *values in entries:
                if word == "T":
                    {"C": sent.committed, "R": sent.undone, None: sent.maybe}[ends.get(number)].update(values)
        return sent


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

    def failed(self, *how: str | None) -> bool:
        return any(each.kind == "fail" and each.how in how for each in self.tries)


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


class Book:
    def __init__(self, folder: Path) -> None:
        self.runs: list[Run] = []
        self.tries: list[Try] = []
        self.alone: dict[str, list[int]] = defaultdict(list)
        """The leases under which a message was handed out to run alone."""
        self.starved: list[Fault] = []
        """When a worker stood still for long without a fault of the test."""
        self.by_value: dict[str, list[Run]] = defaultdict(list)
        self.by_lease: dict[int, list[Run]] = defaultdict(list)
        claimed: dict[int, float] = {}
        for path in folder.glob("*.ran"):
            self._read(int(path.stem), path, claimed)
        self.runs.sort(key=lambda run: run.begun)
        for run in self.runs:
            run.claimed = claimed.get(run.lease)
            self.by_value[run.value].append(run)
            self.by_lease[run.lease].append(run)
        for settling in self.tries:
            for run in self.by_lease.get(settling.lease, ()):
                if settling.kind == "start":
                    run.started = settling.left
                elif settling.positions is None or run.position in settling.positions:
                    run.tries.append(settling)

    def _read(self, worker: int, path: Path, claimed: dict[int, float]) -> None:
        runs: dict[int, Run] = {}
        tries: dict[int, Try] = {}
        for word, time, number, *rest in read(path):
            if word == "B":
                self.runs.append(runs.setdefault(number, Run(worker, time, *rest)))
            elif word == "S":
                self.tries.append(tries.setdefault(number, Try(worker, time, *rest)))
            elif word == "G":
                claimed[number] = time
            elif word == "A":
                self.alone[rest[0]].append(number)
            elif word == "D":
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
        leases = [lease for lease in self.alone.get(value, ()) if lease not in self.by_lease]
        return [
            Run(each.worker, each.left, "", value, 0, 0, each.lease, 0, solo=True)
            for each in (self.tries if leases else ())
            if each.kind == "start" and each.how != "L" and each.lease in leases
        ]

    def done(self, value: str) -> bool:
        """Return whether a run of it ended well, and its ack was accepted or at least sent."""
        return any(
            run.how == "E" and any(each.kind == "ack" and each.how in {"K", "U", None} for each in run.tries)
            for run in self.by_value.get(value, ())
        )


@dataclass(slots=True)
class Report:
    """What broke a promise, by promise, and how duplicates are explained."""

    sent: int
    runs: int
    broken: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    explained: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        some = {name: found[:5] for name, found in self.broken.items()}
        return f"{self.sent} sent, {self.runs} runs; run again: {dict(self.explained)}; broken: {some or 'nothing'}"


def judge(folder: Path, faults: list[Fault], *, dead: Iterable[str] = (), lapsed: Iterable[int] = ()) -> Report:
    """Compare. `dead` are the values of dead letters, `lapsed` the leases that a worker may have lost."""
    book, sent, lapsed = Book(folder), Sent.read(folder), set(lapsed)
    report = Report(len(sent.committed), len(book.runs))
    if lost := sorted(value for value in sent.committed.difference(dead) if not book.done(value)):
        report.broken["lost"] = lost
    if phantoms := sorted(book.by_value.keys() - sent.committed - sent.maybe):
        report.broken["phantom"] = phantoms
    for value, runs in book.by_value.items():
        for run in runs:
            _check_settlements(report, run, runs, faults)
        _check_attempts(report, sorted(runs + book.hardly_begun(value), key=lambda run: run.begun), faults, lapsed)
        for before, after in itertools.pairwise(runs):
            if why := _explain(before, after, faults, lapsed):
                report.explained[why] += 1
            else:
                report.broken["unexplained"].append(f"{before} then {after}")
    return report


def _check_settlements(report: Report, run: Run, runs: list[Run], faults: list[Fault]) -> None:
    accepted = [each for each in run.tries if each.how == "K"]
    for each in accepted:
        if each.worker != run.worker:
            report.broken["wrong_owner"].append(f"{run} settled by {each}")
        if each.kind == "ack" and (run.how != "E" or run.ended is None or run.ended > each.left):
            report.broken["unearned"].append(f"{run} acked by {each}")
    if sum(each.positions is not None for each in accepted) > 1:
        report.broken["wrong_owner"].append(f"{run} settled twice: {accepted}")
    for later, each in itertools.product(runs, accepted):
        final = each.kind == "ack" or each.verdicts.get(run.position) == "dead"
        again = later.lease > run.lease and (final or each.left > later.begun)
        if again and not _undone_by_a_crash(each, later, faults):
            report.broken["wrong_owner"].append(f"{run} settled by {each} and then run as {later}")


def _undone_by_a_crash(settling: Try, later: Run, faults: list[Fault]) -> bool:
    return any(
        fault.kind == "server" and settling.left - 0.1 <= fault.until and later.begun >= fault.since
        and (settling.answered or settling.left) >= fault.since - ASYNCHRONOUS_SECONDS
        for fault in faults
    )  # fmt: skip


def _check_attempts(report: Report, runs: list[Run], faults: list[Fault], lapsed: set[int]) -> None:
    least = most = 1
    for run in runs:
        if run.attempt and not least <= run.attempt <= most:
            report.broken["wrongly_charged"].append(f"attempt {run.attempt}, expected {least} to {most}: {runs}")
            return
        if run.failed("K"):
            least, most = least + 1, most + 1
        elif run.failed("U", None) or (run.solo and run.settled() is None and _struck(run, faults, lapsed)):
            most += 1


def _struck(run: Run, faults: list[Fault], lapsed: set[int]) -> bool:
    # its worker may be hit after the announcement and before its handler began
    since = run.begun if run.started is None else run.started
    return run.lease in lapsed or any(fault.worker == run.worker and fault.until >= since for fault in faults)


def _explain(before: Run, after: Run, faults: list[Fault], lapsed: set[int]) -> str | None:
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
