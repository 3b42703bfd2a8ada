"""`bartleby explain`: the story of one message, from what is kept about it."""

import sys
from datetime import UTC, datetime

import click

from bartleby.surfaces import shapes
from bartleby.surfaces.cli.connecting import client
from bartleby.surfaces.cli.printing import show_json
from bartleby.surfaces.cycles import Story, gather
from bartleby.surfaces.story import advice, entries, heading, last_words


@click.command()
@click.argument("message_id", metavar="ID", type=click.IntRange(min=1, max=2**63 - 1))
@click.option("--all", "everything", is_flag=True, help="Every attempt, however many, with its whole traceback.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_obj
def explain(dsn: str | None, message_id: int, everything: bool, as_json: bool) -> None:
    """Tell the story of a message. Where it is, every failed attempt, what was decided, and what people did with it."""
    with client(dsn) as opened:
        story = gather(opened, message_id)
    now = datetime.now(UTC)
    if as_json:
        show_json(shapes.story(story))
    else:
        tell(story, now, everything=everything)


def tell(story: Story, now: datetime, *, everything: bool = False) -> None:
    """Print a story: on a terminal as a timeline in colours, in a pipe as plain lines."""
    if not sys.stdout.isatty():
        click.echo("\n".join(plain(story, now, everything=everything)))
        return
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    title, *facts = heading(story, now)
    console.print(Text(title, style="bold"))
    for fact in facts:
        console.print(Padding(Text(fact, style="dim"), (0, 0, 0, 2)))
    console.print()
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_column(style="dim", no_wrap=True)
    line.add_column(no_wrap=True)
    line.add_column(overflow="fold")
    for entry in entries(story, now, everything=everything):
        line.add_row(Text(entry.time), Text(entry.mark, style=entry.style), Text(entry.text, style=entry.style))
        for detail in (*map(Text, entry.details), *(Text(note, style="dim") for note in entry.notes)):
            line.add_row("", "", detail)
    console.print(Padding(line, (0, 0, 0, 2)))
    if words := last_words(story, everything=everything):
        console.print(Padding(Text("\n".join(["", *words]), style="dim"), (0, 0, 0, 2)))
    console.print()
    for number, word in enumerate(advice(story)):
        console.print(Text.assemble(("Next: " if not number else "      ", "bold"), word), soft_wrap=bool(number))


def plain(story: Story, now: datetime, *, everything: bool = False) -> list[str]:
    """Return a story as lines of text."""
    title, *facts = heading(story, now)
    lines = [title, *(f"  {fact}" for fact in facts), ""]
    for entry in entries(story, now, everything=everything):
        lines.append(f"  {entry.time:12}  {entry.mark}  {entry.text}")
        lines.extend(f"  {'':12}     {detail}" for detail in (*entry.details, *entry.notes))
    if words := last_words(story, everything=everything):
        lines.extend(["", *(f"  {word}" for word in words)])
    first, *more = advice(story)
    return [line.rstrip() for line in [*lines, "", f"Next: {first}", *(f"      {word}" for word in more)]]
