"""`bartleby explain`: the story of one message, from what is kept about it."""

import sys
from datetime import UTC, datetime

import click

from bartleby.client import Client
from bartleby.errors import BartlebyError
from bartleby.surfaces.cli.connecting import client, show_json
from bartleby.surfaces.cli.story import Story, advice, entries, heading, last_words

_LOOKS = 3


@click.command()
@click.argument("message_id", metavar="ID", type=click.IntRange(min=1, max=2**63 - 1))
@click.option("--all", "everything", is_flag=True, help="Every attempt, however many, with its whole traceback.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_obj
def explain(dsn: str | None, message_id: int, everything: bool, as_json: bool) -> None:
    """Tell the story of a message. Where it is, every failed attempt, what was decided and by which rule."""
    with client(dsn) as opened:
        story = gather(opened, message_id)
    now = datetime.now(UTC)
    if as_json:
        show_json(_document(story))
    else:
        tell(story, now, everything=everything)


def gather(opened: Client, message_id: int) -> Story:
    """Return everything that is kept about a message; an error if there never was one with this id."""
    message, letter = None, None
    # It may move while we look: what is replayed is alive, so look again.
    for _ in range(_LOOKS):
        message, letter = opened.find_message(message_id), opened.dead_letter(message_id)
        if message is not None or letter is None or letter.status != "replayed":
            break
    attempts = opened.attempts(message_id)
    queues = {queue.name: queue for queue in opened.queues()}
    if message is None and letter is None and not attempts and message_id > (last := opened.last_message_id()):
        raise BartlebyError(
            f"there is no message {message_id}, and there never was",
            hint=f"the newest message has the id {last}" if last else "no message was ever sent to this database",
        )
    known = message or letter or (attempts[-1] if attempts else None)
    return Story(message_id, message, letter, attempts, queues.get(known.queue) if known else None)


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


def _document(story: Story) -> dict[str, object]:
    return {
        "message_id": story.message_id,
        "state": story.state,
        "message": story.message,
        "dead_letter": story.letter,
        "attempts": story.attempts,
        "queue": story.queue,
        "next": " ".join(advice(story)),
    }
