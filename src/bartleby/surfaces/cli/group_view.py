"""How groups are shown: a list of them, and one in full. On a terminal in colours, in a pipe as plain lines."""

import sys
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import click

from bartleby.client import Client
from bartleby.evidence import Group
from bartleby.surfaces.cli import group_words
from bartleby.surfaces.cli.group_words import Portrait, sparkline
from bartleby.surfaces.cli.printing import show_table
from bartleby.surfaces.words import line, printable, relative, when

if TYPE_CHECKING:
    from rich.console import Console
    from rich.padding import Padding

_COLUMNS = ["id", "queue", "state", "dead", "24 hours", "last seen", "what"]
_WIDE = 120
_FEW_BARS = 8
_LONGEST_NAME = 24


def gather(opened: Client, group: Group) -> Portrait:
    """Return everything that is kept about a group."""
    letters = opened.dead_letters(f"group:{group.id}", limit=1)
    if not letters:
        letters = opened.dead_letters(f"group:{group.id} status:any", limit=1)
    return Portrait(
        group=group,
        queue=next((queue for queue in opened.queues() if queue.name == group.queue), None),
        recent=opened.count_letters(f"group:{group.id} status:any age:<{group_words.RECENT.seconds}s"),
        newest=next(iter(letters), None),
        shared=opened.shared_values(group.id),
        versions=opened.group_versions(group.id),
        replays=opened.group_replays(group.id),
    )


def document(found: Portrait) -> dict[str, object]:
    """Return a portrait for programs."""
    return {
        "group": found.group,
        "queue": found.queue,
        "recent": {"letters": found.recent.letters, "seconds": group_words.RECENT.seconds},
        "newest": found.newest,
        "shared": found.shared,
        "versions": found.versions,
        "replays": found.replays,
        "next": [command for command, _ in group_words.advice(found)],
    }


def show_list(found: Sequence[Group], now: datetime, *, cut: bool) -> None:
    """Print groups, one a line; on a terminal that is too narrow for their titles, with the title below."""
    if not sys.stdout.isatty():
        show_table(_COLUMNS, [[*_cells(group, when(group.last_dead_at)), _title(group)] for group in found])
        return
    from rich.console import Console

    console = Console(highlight=False)
    _draw_list(console, found, now)
    dead = sum(group.dead for group in found)
    bugs = "1 bug" if len(found) == 1 else f"{len(found):,} bugs"
    letters = "1 dead letter" if dead == 1 else f"{dead:,} dead letters"
    more = "; there may be more: --limit" if cut else ""
    click.echo(f"{letters}, {bugs}{more}. What is known of one: bartleby groups ID", err=True)


def _draw_list(console: "Console", found: Sequence[Group], now: datetime) -> None:
    from rich.text import Text

    seen = [relative(group.last_dead_at, now) if group.last_dead_at else "" for group in found]
    rows = [_cells(group, last) for group, last in zip(found, seen, strict=True)]
    widths = _widths(rows)
    if sum(widths) + 2 * len(widths) > console.width:
        rows = [_cells(group, last, hours=_FEW_BARS) for group, last in zip(found, seen, strict=True)]
        widths = _widths(rows)
    wide = console.width >= _WIDE
    console.print(Text(_row([*_COLUMNS[:-1], *_COLUMNS[-1:] * wide], widths), style="bold"), no_wrap=True)
    for group, row in zip(found, rows, strict=True):
        style = group_words.state_style(group.state)
        title = Text(printable(_title(group)), style="dim" if group.state in {"muted", "resolved"} else "")
        cells = Text.assemble((_row(row, widths), "" if group.state == "acknowledged" else style))
        indent = Text(" " * (widths[0] + 2))
        for shown in (Text.assemble(cells, "  ", title),) if wide else (cells, Text.assemble(indent, title)):
            shown.truncate(console.width, overflow="ellipsis")
            console.print(shown, no_wrap=True)


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    # numbers to the right
    right = {0, 3}
    padded = [
        cell.rjust(width) if number in right else cell.ljust(width)
        for number, (cell, width) in enumerate(zip(cells, [*widths, 0], strict=False))
    ]
    return "  ".join(padded)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(_COLUMNS[:-1], *rows, strict=True)]


def _cells(group: Group, last: str, *, hours: int | None = None) -> list[str]:
    queue = line(group.queue, _LONGEST_NAME) if sys.stdout.isatty() else group.queue
    bars = sparkline(group.deaths_by_hour, width=hours)
    return [str(group.id), queue, group.state, f"{group.dead:,}", bars, last]


def _title(group: Group) -> str:
    owner = f"[{line(group.owner, _LONGEST_NAME)}] " if group.owner and group.state != "resolved" else ""
    return f"{owner}{group_words.title(group)}"


def tell(found: Portrait, now: datetime, *, everything: bool = False) -> None:
    """Print a portrait."""
    head, steps = group_words.heading(found, now), group_words.advice(found)
    parts = group_words.sections(found, now, everything=everything)
    width = max((len(command) for command, _ in steps), default=0)
    if not sys.stdout.isatty():
        lines = [head[0], f"  {head[1]}", "", *(f"  {each}" for each in head[2:])]
        for part in parts:
            lines += ["", *([part.title] if part.title else []), *(f"  {each}" for each in part.lines)]
        lines += ["", "Next", *(f"  {command:{width}}  # {words}" for command, words in steps)]
        click.echo("\n".join(each.rstrip() for each in lines))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(head[0], style=group_words.state_style(found.group.state) or "bold"))
    alarm = "bold red" if found.recent.letters else ""
    console.print(_indented(head[1], "bold"))
    console.print()
    for number, text in enumerate(head[2:]):
        console.print(_indented(text, "bold yellow" if number else alarm))
    for part in parts:
        console.print(Text(f"\n{part.title}" if part.title else "", style="bold"))
        console.print(_indented("\n".join(part.lines)))
    console.print(Text("\nNext", style="bold"))
    longest = max((len(words) for _, words in steps), default=0)
    beside = width + longest + len("    # ") <= console.width
    for command, words in steps:
        # never wrapped: it is to be copied
        if not beside:
            console.print(Text(f"  # {words}", style="dim"))
        note = (f"{' ' * (width - len(command))}  # {words}", "dim") if beside else ""
        console.print(Text.assemble("  ", (command, "cyan"), note), soft_wrap=True)


def _indented(text: str, style: str = "") -> "Padding":
    from rich.padding import Padding
    from rich.text import Text

    return Padding(Text(text, style=style), (0, 0, 0, 2), expand=False)
