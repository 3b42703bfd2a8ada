"""Which database a command speaks to: the one that was named, else the embedded PostgreSQL."""

import contextlib
import fcntl
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from bartleby.client import Client
from bartleby.config import Settings
from bartleby.version import __version__

if TYPE_CHECKING:
    from bartleby import dev


@contextmanager
def database(given: str | None) -> Iterator[str]:
    """Yield a DSN; where none is configured, of the embedded server with the schema in it."""
    dsn = Settings.load(dsn=given).dsn
    if dsn:
        yield dsn
        return
    with embedded() as server:
        if server.started:
            where = f"the embedded PostgreSQL in {server.directory} (see `bartleby dev`)"
            click.echo(f"no --dsn and no BARTLEBY_DSN: using {where}", err=True)
        yield server.dsn


@contextmanager
def embedded() -> Iterator["dev.Server"]:
    """Yield the embedded server. Commands share it, and the last to leave stops it if one of them started it."""
    from bartleby import dev

    with contextlib.ExitStack() as held:
        server = dev.start()
        users = held.enter_context((server.directory / "users").open("a"))
        fcntl.flock(users, fcntl.LOCK_SH)
        while not server.started and dev.running() is None:  # the last one left while we waited
            server = dev.start()
        ours = server.directory / "stop-when-unused"
        if server.started:
            ours.touch()
        try:
            prepare(server.dsn)
            yield server
        finally:
            fcntl.flock(users, fcntl.LOCK_UN)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if ours.exists():
                    ours.unlink()
                    server.stop()


@contextmanager
def client(given: str | None) -> Iterator[Client]:
    """Yield a client of that database, or fail at once: a client by itself waits for its server."""
    import psycopg

    with database(given) as dsn:
        settings = Settings.load(dsn=dsn)
        psycopg.connect(dsn, connect_timeout=math.ceil(settings.connect_timeout)).close()
        with Client(settings=settings) as opened:
            yield opened


def prepare(dsn: str) -> None:
    """Install the schema into the embedded server, or bring it to this version."""
    import psycopg

    from bartleby import schema

    with psycopg.connect(dsn, autocommit=True) as connection:
        installed = schema.installed_version(connection)
        if installed is None:
            schema.install(connection)
        elif installed != __version__:
            schema.upgrade(connection)


def show_json(value: object) -> None:
    """Print one JSON document, with everything escaped that could steer a terminal."""
    text = json.dumps(value, default=_plain, indent=2, ensure_ascii=False)
    click.echo("".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text))


def _plain(value: Any) -> object:  # noqa: ANN401 - whatever json does not know
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.isoformat() if isinstance(value, datetime) else str(value)


def show_table(columns: list[str], rows: list[list[str]], *, fold: bool = False) -> None:
    """Print a table; on a terminal its last column is cut to fit, or folded, in a pipe a row is always one line."""
    cells = [[printable(cell.replace("\n", " ")) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        for row in (columns, *cells):
            padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            click.echo("  ".join(padded).rstrip())
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for number, column in enumerate(columns, 1):
        table.add_column(column, no_wrap=number < len(columns))
    for row in cells:
        table.add_row(*(Text(cell, no_wrap=not fold, overflow="fold" if fold else "ellipsis") for cell in row))
    Console().print(table)


def printable(text: str) -> str:
    """Return a text that cannot steer a terminal."""
    text = text.replace("\t", "    ")
    return "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in text)
