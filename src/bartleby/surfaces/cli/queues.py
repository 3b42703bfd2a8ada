"""Commands about queues and what is in them: send, queues, dead, groups."""

import getpass
import json
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import click

from bartleby.client import Client
from bartleby.errors import InvalidMessage, InvalidPolicy, UnknownQueue
from bartleby.message import Queue
from bartleby.surfaces.cli.connecting import client, show_json, show_table
from bartleby.surfaces.cli.story import breaker as breaker_story
from bartleby.surfaces.cli.story import error_line
from bartleby.surfaces.cli.times import relative, when

_BULK = 1000


@click.command()
@click.argument("queue")
@click.argument("payload", required=False)
@click.option("--key", help="What the message is about, such as order-8812.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="May be given several times.")
@click.option("--delay", type=float, metavar="SECONDS", help="Not before this time has passed.")
@click.option("--max-attempts", type=int, help="Instead of the queue's.")
@click.option("--unique-for", type=float, metavar="SECONDS", help="Within this time, do not send the same key again.")
@click.option("--lines", is_flag=True, help="Read one JSON payload a line from standard input.")
@click.pass_obj
def send(  # noqa: PLR0917 - click passes them by name
    dsn: str | None,
    queue: str,
    payload: str | None,
    key: str | None,
    headers: tuple[str, ...],
    delay: float | None,
    max_attempts: int | None,
    unique_for: float | None,
    lines: bool,
) -> None:
    """Send a message. PAYLOAD is JSON; without it, it is read from standard input. Prints the message id."""
    options: dict[str, Any] = {"key": key, "delay": delay, "max_attempts": max_attempts, "unique_for": unique_for}
    options = {name: value for name, value in options.items() if value is not None}
    if headers:
        options["headers"] = dict(_header(header) for header in headers)
    if lines and payload is not None:
        raise click.UsageError("--lines reads the payloads from standard input: leave PAYLOAD out")
    with client(dsn) as opened:
        if lines:
            _send_lines(opened, queue, options)
        else:
            text = "".join(_input()) if payload in {None, "-"} else payload
            click.echo(opened.send(queue, _json(text or "", "the payload"), **options))


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_context
def queues(context: click.Context, as_json: bool) -> None:
    """List the queues, or create and change one."""
    if context.invoked_subcommand is not None:
        return
    with client(context.obj) as opened:
        found = opened.queues()
    if as_json:
        show_json(found)
    elif not found:
        click.echo("no queues yet; create one: bartleby queues create NAME", err=True)
    else:
        _show_queues(found)


@queues.command()
@click.argument("name")
@click.option("--policy", default="{}", metavar="JSON", help='For example {"max_attempts": 3, "backoff": "fixed"}.')
@click.pass_obj
def create(dsn: str | None, name: str, policy: str) -> None:
    """Create a queue; if it exists, change the policy keys that are given."""
    with client(dsn) as opened:
        opened.create_queue(name, _policy(policy))


@queues.command()
@click.argument("name")
@click.pass_obj
def pause(dsn: str | None, name: str) -> None:
    """Hand out nothing until resumed; sending goes on."""
    with client(dsn) as opened:
        opened.pause_queue(name)


@queues.command()
@click.argument("name")
@click.pass_obj
def resume(dsn: str | None, name: str) -> None:
    """Hand out messages again."""
    with client(dsn) as opened:
        opened.resume_queue(name)


@queues.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="With all its messages and dead letters.")
@click.pass_obj
def drop(dsn: str | None, name: str, force: bool) -> None:
    """Remove a queue."""
    with client(dsn) as opened:
        opened.drop_queue(name, force=force)


@queues.command("breaker")
@click.argument("name")
@click.argument("state", type=click.Choice(["open", "close", "off", "auto"]))
@click.option("--reason", default="by hand", show_default=True, help="Why; it is recorded.")
@click.option("--actor", help="Who; your user name if not given.")
@click.pass_obj
def breaker_(dsn: str | None, name: str, state: str, reason: str, actor: str | None) -> None:
    """Open or close the storm breaker by hand, or switch it off.

    open hands out nothing until it is closed again; close hands out messages whatever the breaker has found; off lets
    it never open by itself; auto, which is the default of a queue, lets it.
    """
    actor = _user() if actor is None else actor
    with client(dsn) as opened:
        match state:
            case "open":
                changed = opened.force_breaker(name, actor=actor, reason=reason)
            case "close":
                changed = opened.close_breaker(name, actor=actor, reason=reason)
            case _:
                changed = True
                opened.configure_queue(name, {"breaker": state})
        [queue] = [queue for queue in opened.queues() if queue.name == name]
    story = breaker_story(queue, datetime.now(UTC)) or "breaker closed"
    click.echo(f"{name}: {story}" if changed else f"{name}: nothing to change, {story}", err=True)


@click.command()
@click.argument("queue", required=False)
@click.option("--limit", type=click.IntRange(min=1, max=100_000), default=50, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_obj
def dead(dsn: str | None, queue: str | None, limit: int, as_json: bool) -> None:
    """List dead letters, the newest first."""
    with client(dsn) as opened:
        letters = opened.dead_letters(queue, limit=limit)
        if queue is not None and not letters:
            _check_queue(opened, queue)
    if as_json:
        show_json(letters)
    elif not letters:
        click.echo("no dead letters", err=True)
    else:
        rows = [
            [str(letter.message_id), letter.queue, letter.reason, str(letter.attempts), _when(letter.dead_at),
             error_line(letter.error_type, letter.error)]
            for letter in letters
        ]  # fmt: skip
        show_table(["message", "queue", "reason", "attempts", "dead at", "error"], rows)


@click.command()
@click.argument("queue", required=False)
@click.option("--limit", type=click.IntRange(min=1, max=100_000), default=50, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_obj
def groups(dsn: str | None, queue: str | None, limit: int, as_json: bool) -> None:
    """List what the dead letters died of. Many letters are often few bugs; the most frequent come first."""
    with client(dsn) as opened:
        found = opened.groups(queue, limit=limit)
        if queue is not None and not found:
            _check_queue(opened, queue)
    if as_json:
        show_json(found)
    elif not found:
        click.echo("no dead letters", err=True)
    else:
        rows = [
            [f"{group.dead:,}", group.queue, _when(group.first_dead_at), _when(group.last_dead_at),
             error_line(group.error_type, group.error)]
            for group in found
        ]  # fmt: skip
        show_table(["dead", "queue", "first", "last", "newest error"], rows)


def _show_queues(found: list[Queue]) -> None:
    stories = {queue.name: story for queue in found if (story := breaker_story(queue, datetime.now(UTC)))}
    terminal = sys.stdout.isatty()
    rows = []
    for queue in found:
        # a terminal has no room for a long cause beside the numbers
        story = f"breaker {queue.breaker}" if terminal and queue.name in stories else stories.get(queue.name, "")
        note = "; ".join(filter(None, ("paused" if queue.paused else "", story)))
        counts = (f"{count:,}" for count in (queue.ready, queue.leased, queue.deferred, queue.dead))
        rows.append([queue.name, *counts, _when(queue.oldest_ready_at), note])
    show_table(["queue", "ready", "leased", "deferred", "dead", "oldest ready", ""], rows)
    for queue in found if terminal else ():
        if queue.breaker in {"open", "forced"}:
            click.echo(f"{queue.name}: {stories[queue.name]}")


def _when(moment: datetime | None) -> str:
    # a person wants to know how long ago, a program the time
    return relative(moment, datetime.now(UTC)) if moment is not None and sys.stdout.isatty() else when(moment)


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # in a container an account need not have a name
        return f"user {os.getuid()}"


def _check_queue(opened: Client, queue: str) -> None:
    if queue not in {each.name for each in opened.queues()}:
        raise UnknownQueue(f"unknown queue: {queue!r}", hint="bartleby queues lists them")


def _send_lines(opened: Client, queue: str, options: dict[str, Any]) -> None:
    lines = ((number, line) for number, line in enumerate(_input(), 1) if line.strip())
    sent = 0
    while bulk := list(islice(lines, _BULK)):
        try:
            messages = [{"payload": _json(line, f"line {number}"), **options} for number, line in bulk]
            for message_id in opened.send_many(queue, messages):
                click.echo(message_id)
        except InvalidMessage as error:
            problem = str(error)
            if error.index is not None:
                problem = f"line {bulk[error.index][0]}: {problem.partition(': ')[2]}"
            done = f"the {sent} messages before line {bulk[0][0]} were sent" if sent else "nothing was sent"
            raise InvalidMessage(f"{problem}; {done}", hint=error.hint) from None
        sent += len(bulk)


def _input() -> Iterator[str]:
    try:
        yield from sys.stdin or ()
    except UnicodeDecodeError as error:
        raise InvalidMessage(f"standard input is not text: {error}") from None


def _json(text: str, what: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"{what} is not JSON: {error}", hint="""a text needs its quotes: '"hello"'""") from None


def _policy(text: str) -> dict[str, Any]:
    try:
        policy = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidPolicy(f"the policy is not JSON: {error}") from None
    if not isinstance(policy, dict):
        raise InvalidPolicy("a policy is a JSON object")
    return policy


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--header")
    return name, value
