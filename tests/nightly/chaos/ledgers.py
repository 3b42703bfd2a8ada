"""Compares the ledgers of producers and consumers."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

Entry = tuple[str, int, list[str]]


@dataclass(slots=True)
class Report:
    """Counts, and the sets that must be empty."""

    committed: int = 0
    maybe: int = 0
    rolled_back: int = 0
    delivered: int = 0
    handed_back: int = 0
    twice_by_kill: int = 0
    killed: int = 0
    leases_lost: set[int] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    phantom: set[str] = field(default_factory=set)
    acked_twice: set[str] = field(default_factory=set)
    unexplained: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return (
            f"{self.committed} committed, {self.maybe} maybe, {self.rolled_back} rolled back, {self.killed} killed;"
            f" {self.delivered} deliveries, of them {self.handed_back} handed back, {self.twice_by_kill} held by a"
            f" killed consumer, {len(self.leases_lost)} leases lost alive; {len(self.lost)} lost,"
            f" {len(self.phantom)} phantom, {len(self.acked_twice)} acked twice, {len(self.unexplained)} unexplained"
        )


def read(path: Path) -> list[Entry]:
    """Return the lines of a ledger; the last one of a killed process may be cut."""
    entries = []
    for line in path.read_text().split("\n")[:-1]:
        word, number, *values = line.split(" ")
        entries.append((word, int(number), values))
    return entries


def compare(producers: list[Path], consumers: list[Path], killed: set[str], extra: set[str]) -> Report:
    """Compare the ledgers; `extra` was committed by sessions without a ledger."""
    report = Report(killed=len(killed))
    committed, maybe, undone = set(extra), set[str](), set[str]()
    for path in producers:
        entries = read(path)
        ends = {number: word for word, number, _ in entries if word in {"C", "R"}}
        for word, number, values in entries:
            if word == "T":
                {"C": committed, "R": undone, None: maybe}[ends.get(number)].update(values)
    report.committed, report.maybe, report.rolled_back = len(committed), len(maybe), len(undone)
    delivered: set[str] = set()
    acked: Counter[str] = Counter()
    open_ended: dict[str, int] = defaultdict(int)
    for path in consumers:
        _read_consumer(path, path.stem in killed, report, delivered=delivered, acked=acked, open_ended=open_ended)
    report.lost = committed - delivered
    report.phantom = delivered - committed - maybe
    report.acked_twice = {value for value, times in acked.items() if times > 1}
    report.unexplained |= {value for value in delivered if not acked[value] and not open_ended[value]}
    return report


def _read_consumer(
    path: Path,
    was_killed: bool,
    report: Report,
    *,
    delivered: set[str],
    acked: Counter[str],
    open_ended: dict[str, int],
) -> None:
    held: dict[tuple[int, str], str] = {}
    for word, number, values in read(path):
        match word:
            case "G":
                report.delivered += len(values)
                delivered.update(values)
                held.update({(number, value): value for value in values})
            case "A":
                acked.update(values)
            case "F":
                report.handed_back += len(values)
            case "L":
                report.leases_lost.add(number)
                lost = [value for lease, value in held if lease == number]
                open_ended.update({value: open_ended[value] + 1 for value in lost})
                held = {key: value for key, value in held.items() if key[0] != number}
            case _:
                raise AssertionError(f"{path.name}: {word}")
        if word in {"A", "F"}:
            for value in values:
                held.pop((number, value), None)
    for value in held.values():
        open_ended[value] += 1
        if was_killed:
            report.twice_by_kill += 1
        else:
            report.unexplained.add(value)
