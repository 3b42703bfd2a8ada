"""Commands about queues and what is in them: send, queues, dead."""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import click

from bartleby.client import Client
from bartleby.errors import InvalidMessage, InvalidPolicy, UnknownQueue
from bartleby.surfaces.cli.connecting import client, show_json, show_table

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
        rows = [
            [queue.name, *(f"{count:,}" for count in (queue.ready, queue.leased, queue.deferred, queue.dead)),
             _when(queue.oldest_ready_at), "paused" if queue.paused else ""]
            for queue in found
        ]  # fmt: skip
        show_table(["queue", "ready", "leased", "deferred", "dead", "oldest ready", ""], rows)


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


@click.command()
@click.argument("queue", required=False)
@click.option("--limit", type=click.IntRange(min=1, max=100_000), default=50, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_obj
def dead(dsn: str | None, queue: str | None, limit: int, as_json: bool) -> None:
    """List dead letters, the newest first."""
    with client(dsn) as opened:
        letters = opened.dead_letters(queue, limit=limit)
        if queue is not None and not letters and queue not in {each.name for each in opened.queues()}:
            raise UnknownQueue(f"unknown queue: {queue!r}", hint="bartleby queues lists them")
    if as_json:
        show_json(letters)
    elif not letters:
        click.echo("no dead letters", err=True)
    else:
        rows = [
            [str(letter.message_id), letter.queue, letter.reason, str(letter.attempts), _when(letter.dead_at),
             ": ".join(filter(None, (letter.error_type, letter.error)))[:200]]
            for letter in letters
        ]  # fmt: skip
        show_table(["message", "queue", "reason", "attempts", "dead at", "error"], rows)


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


def _when(time: Any) -> str:  # noqa: ANN401 - a datetime or None
    return "" if time is None else time.astimezone().strftime("%Y-%m-%d %H:%M:%S")
