"""Which database a command speaks to: the one that was named, else the embedded PostgreSQL."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import datetime
from typing import Any

import click

from bartleby.client import Client
from bartleby.config import Settings


@contextmanager
def database(given: str | None) -> Iterator[str]:
    """Yield a DSN; where none is configured, of the embedded server with the schema in it."""
    dsn = Settings.load(dsn=given).dsn
    if dsn:
        yield dsn
        return
    from bartleby import dev

    with dev.start() as server:
        prepare(server.dsn)
        if server.started:
            click.echo("no --dsn and no BARTLEBY_DSN: using the embedded PostgreSQL (see `bartleby dev`)", err=True)
        yield server.dsn


@contextmanager
def client(given: str | None) -> Iterator[Client]:
    """Yield a client of that database."""
    with database(given) as dsn, Client(dsn) as opened:
        yield opened


def prepare(dsn: str) -> None:
    """Install the schema into the embedded server, or bring it to this version."""
    import psycopg

    from bartleby import schema

    with psycopg.connect(dsn, autocommit=True) as connection:
        match schema.installed_version(connection):
            case None:
                schema.install(connection)
            case _:
                schema.upgrade(connection)


def show_json(value: object) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(value, default=_plain, indent=2, ensure_ascii=False))


def _plain(value: Any) -> object:  # noqa: ANN401 - whatever json does not know
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.isoformat() if isinstance(value, datetime) else str(value)


def show_table(columns: list[str], rows: list[list[str]]) -> None:
    """Print a table: with lines on a terminal, plain columns into a pipe."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=SIMPLE_HEAD if console.is_terminal else None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console.print(table, soft_wrap=not console.is_terminal)


def printable(text: str) -> str:
    """Return a text that cannot steer a terminal."""
    return "".join(character if character.isprintable() or character == "\n" else "\ufffd" for character in text)
