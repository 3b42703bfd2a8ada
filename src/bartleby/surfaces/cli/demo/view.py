"""How the demo looks: on a terminal a picture that is drawn anew, elsewhere lines."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bartleby.surfaces.cli.demo.stage import WORKERS
from bartleby.surfaces.words import error_line, printable

if TYPE_CHECKING:
    from bartleby.evidence import Group as Bug
    from bartleby.message import Queue
    from bartleby.surfaces.cli.demo.crew import Setback

_FIXED_LINES = 19
_NARROW = 74
_MOST_LINES = 8


@dataclass
class Picture:
    """What is to be seen at one moment."""

    seconds: float
    elapsed: float = 0.0
    told: str = ""
    queues: list["Queue"] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    setbacks: list["Setback"] = field(default_factory=list)
    bugs: list["Bug"] = field(default_factory=list)
    deaths: int = 0
    footer: str = ""

    @property
    def dead(self) -> int:
        """How many dead letters there are."""
        return sum(bug.dead for bug in self.bugs)

    def __rich_console__(self, console: Console, _options: object) -> list[Padding]:
        lines = max(2, min(_MOST_LINES, console.height - _FIXED_LINES - len(self.bugs)))
        parts = (self._title(), self._narration(), self._table(), *self._retries(lines), *self._bugs(), *self._foot())
        return [Padding(Group(*parts), (0, 1))]

    def _title(self) -> Table:
        table = Table.grid(expand=True)
        table.add_column()
        table.add_column(justify="right")
        deaths = f", {self.deaths} replaced" if self.deaths else ""
        shown = f"{min(self.elapsed, self.seconds):.0f} of {self.seconds:.0f} s"
        table.add_row(
            Text.assemble((" Bartleby ", "bold reverse"), f"  {WORKERS} workers{deaths}"),
            Text(f"{shown} · Ctrl-C ends it", style="dim"),
        )
        return table

    def _narration(self) -> Padding:
        table = Table.grid(padding=(0, 1))
        table.add_row(Text("▶", style="bold cyan"), Text(self.told, style="bold", overflow="fold"))
        # always two lines, so that nothing below it jumps
        short = len(self.told) < _NARROW
        return Padding(table, (1, 0, 2 if short else 1, 0))

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1))
        table.add_column("queue", min_width=14)
        for name in ("ready", "running", "deferred", "dead", "done/s"):
            table.add_column(name, justify="right", min_width=len(name))
        table.add_column("breaker", no_wrap=True)
        for queue in self.queues:
            counts = [_count(queue.ready), _count(queue.leased), _count(queue.deferred), _count(queue.dead, "red")]
            rate = self.rates.get(queue.name, 0.0)
            table.add_row(queue.name, *counts, Text(f"{rate:.0f}", style="green" if rate else "dim"), _breaker(queue))
        return table

    def _retries(self, lines: int) -> list[Text | Table]:
        table = _columns(13, 9, 11)
        held = {queue.name for queue in self.queues if queue.breaker == "open"}
        for setback in self.setbacks[:lines]:
            left = (setback.retry_at - datetime.now(UTC)).total_seconds() if setback.retry_at else 0.0
            again = "held back" if setback.queue in held else "tried again"
            again = f"again {left:.1f} s" if left > 0 else again
            error = _cut(printable(setback.error), "yellow")
            table.add_row(f"{setback.queue} {setback.message_id}", f"attempt {setback.attempt}", again, error)
        for _ in range(lines - len(self.setbacks)):
            table.add_row("", "", "", "")
        return [Text("\nRetries", style="dim"), table]

    def _bugs(self) -> list[Text | Table]:
        table = _columns(4, 8)
        for bug in self.bugs:
            error = _cut(error_line(bug.error_type, bug.error), "red")
            table.add_row(Text(f"{bug.dead} x", justify="right"), bug.queue, error)
        return [Text.assemble(("\nDead letters: ", "dim"), (bugs(self.dead, len(self.bugs)), "bold")), table]

    def _foot(self) -> list[Text]:
        return [Text(f"\n{self.footer}", style="cyan", no_wrap=True, overflow="ellipsis")] if self.footer else []


def _columns(*widths: int) -> Table:
    # a column that fits into its width, and one that is cut to what is left
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for width in widths:
        table.add_column(no_wrap=True, width=width)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    return table


def bugs(dead: int, kinds: int) -> str:
    """Return how many dead letters there are, and how many bugs that is."""
    if dead <= 1 or kinds == dead:
        return "none yet" if not dead else f"{dead}"
    return f"{dead} are really {kinds} bug{'s' if kinds > 1 else ''}"


def status(picture: Picture) -> str:
    """Return the picture in one line."""
    parts = []
    for queue in picture.queues:
        counts = {"ready": queue.ready, "running": queue.leased, "deferred": queue.deferred, "dead": queue.dead}
        shown = [f"{count} {name}" for name, count in counts.items() if count]
        if queue.breaker == "open":
            shown.append("breaker open")
        parts.append(f"{queue.name}: {', '.join(shown) or 'empty'}")
    return "; ".join(parts)


def _cut(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _count(count: int, style: str = "bold") -> Text:
    return Text(f"{count:,}", style=style if count else "dim")


def _breaker(queue: "Queue") -> Text:
    if queue.breaker != "open":
        return Text("")
    probe = "a probe is out"
    if queue.next_probe_at is not None:
        left = (queue.next_probe_at - datetime.now(UTC)).total_seconds()
        probe = f"probe in {left:.1f} s" if left > 0 else "probe is due"
    return Text(f"open, {probe}", style="bold yellow")
