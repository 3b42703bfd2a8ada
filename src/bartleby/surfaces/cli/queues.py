"""Commands about queues and what is in them: send, queues, dead."""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import click

from bartleby.errors import InvalidMessage, InvalidPolicy
from bartleby.surfaces.cli.connecting import client, printable, show_json, show_table

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
    """Send PAYLOAD, which is JSON, to QUEUE; without it, read it from standard input. Prints the message id."""
    options: dict[str, Any] = {"key": key, "delay": delay, "max_attempts": max_attempts, "unique_for": unique_for}
    options = {name: value for name, value in options.items() if value is not None}
    if headers:
        options["headers"] = dict(_header(header) for header in headers)
    with client(dsn) as opened:
        if not lines:
            text = sys.stdin.read() if payload in {None, "-"} else payload
            click.echo(opened.send(queue, _json(text or "", "the payload"), **options))
            return
        for numbers, messages in _bulks(options):
            try:
                sent = opened.send_many(queue, messages)
            except InvalidMessage as error:
                place = numbers[error.index or 0]
                raise InvalidMessage(f"line {place}: {error}; what stood before line {numbers[0]} was sent") from error
            for message_id in sent:
                click.echo(message_id)


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
@click.option("--limit", default=50, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_obj
def dead(dsn: str | None, queue: str | None, limit: int, as_json: bool) -> None:
    """List dead letters, the newest first."""
    with client(dsn) as opened:
        letters = opened.dead_letters(queue, limit=limit)
    if as_json:
        show_json(letters)
    else:
        rows = [
            [str(letter.message_id), letter.queue, letter.reason, str(letter.attempts), _when(letter.dead_at),
             printable(f"{letter.error_type}: {letter.error}"[:200])]
            for letter in letters
        ]  # fmt: skip
        show_table(["message", "queue", "reason", "attempts", "dead at", "error"], rows)


def _bulks(options: dict[str, Any]) -> Iterator[tuple[list[int], list[dict[str, Any]]]]:
    lines = ((number, line) for number, line in enumerate(sys.stdin, 1) if line.strip())
    while bulk := list(islice(lines, _BULK)):
        numbers = [number for number, _ in bulk]
        yield numbers, [{"payload": _json(line, f"line {number}"), **options} for number, line in bulk]


def _json(text: str, what: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"{what} is not JSON: {error}", hint="""a text needs its quotes: '"hello"'""") from None


def _policy(text: str) -> dict[str, Any]:
    try:
        policy = json.loads(text)
    except ValueError as error:
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
