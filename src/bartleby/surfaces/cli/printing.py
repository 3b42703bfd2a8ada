"""What commands print: documents for programs, tables for people, and nothing that steers a terminal."""

import sys

import click

from bartleby.surfaces import shapes
from bartleby.surfaces.words import printable


def show_json(value: object) -> None:
    """Print one JSON document, with everything escaped that could steer a terminal."""
    click.echo(shapes.text(value, indent=2))


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
