"""`bartleby send`: messages from the command line, or a line each from standard input."""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import click

from bartleby.client import Client
from bartleby.errors import InvalidMessage
from bartleby.surfaces.cli.connecting import client

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


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--header")
    return name, value
