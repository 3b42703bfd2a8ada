"""Letters as documents: JSON with the payload as it is in the database, and files of many, written as they are read."""

import csv
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

import click

from bartleby.errors import BartlebyError
from bartleby.evidence import DeadLetter
from bartleby.surfaces import shapes
from bartleby.surfaces.cli.progress import progress


def show_letters(letters: Iterable[DeadLetter]) -> None:
    """Print letters as one JSON document."""
    click.echo(shapes.text(list(letters), indent=2))


def export(letters: Iterable[DeadLetter], target: str, form: str, *, force: bool, total: int | None) -> int:
    """Write letters, one after another, to a file or with `-` to standard output; return how many."""
    with ExitStack() as opened:
        file = sys.stdout if target == "-" else opened.enter_context(_whole(Path(target), force=force))
        hidden = file is sys.stdout and sys.stdout.isatty()
        tell = opened.enter_context(progress("exporting", total, hidden=hidden))
        write = _csv_writer(file) if form == "csv" else _line_writer(file)
        count = 0
        for count, letter in enumerate(letters, 1):
            write(letter)
            tell(count)
        file.flush()
        return count


@contextmanager
def _whole(path: Path, *, force: bool) -> Iterator[TextIO]:
    # A file that is there is a whole one: it gets its name at the end.
    if path.exists() and not force:
        raise BartlebyError(f"{path} exists", hint="choose another name, or say --force to write over it")
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "x", encoding="utf-8", newline="", opener=private) as file:
            yield file
        part.replace(path)
    except OSError as error:
        raise BartlebyError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def private(path: str, flags: int) -> int:
    """Open a file that, if it is new, only its owner may read: payloads are in it."""
    return os.open(path, flags, 0o600)


def _line_writer(file: TextIO) -> Callable[[DeadLetter], object]:
    return lambda letter: file.write(shapes.text(letter) + "\n")


def _csv_writer(file: TextIO) -> Callable[[DeadLetter], object]:
    writer = csv.writer(file, lineterminator="\r\n" if file is not sys.stdout else "\n")
    writer.writerow(shapes.csv_head())
    return lambda letter: writer.writerow(shapes.csv_cells(letter))
