"""`bartleby repro`: a dead letter as a test that fails no more once its bug is mended.

Everything that comes from the database gets into the file as a literal or as a comment of one line: an error text is
no code.
"""

import builtins
import inspect
import keyword
import os
import pprint
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bartleby.errors import BartlebyError, UndecodablePayload
from bartleby.evidence import DeadLetter
from bartleby.fingerprint import normalised
from bartleby.message import encode
from bartleby.surfaces.cli.connecting import client
from bartleby.surfaces.cli.exporting import private
from bartleby.surfaces.cli.work import load
from bartleby.surfaces.words import error_line, printable

if TYPE_CHECKING:
    from bartleby.app import Bartleby

_WIDTH = 100
_LONGEST_MATCH = 120
_LONGEST_IN_LINE = 200
_WHERE_APP = "your_application:app"
_HIDDEN = "***"
_KEY_NAME = re.compile(r"'[A-Za-z_.-]{1,80}'")

_RAISES = """\
def test_message_{id}() -> None:
    # This passes while the bug is there. Once it is mended this fails: then take the line with pytest.raises away, and
    # the test keeps the bug from coming back.
    with pytest.raises({exception}{match}):
        {call}
"""
_NAMED = """\
def test_message_{id}() -> None:
    # This passes while the bug is there. Once it is mended this fails: then leave only the call of run(), and the test
    # keeps the bug from coming back.
    with pytest.raises(BaseException) as raised:
        {call}
    assert type(raised.value).__name__ == {name}
"""
_CRASHES = """\
def test_message_{id}() -> None:
    # It took its worker along, so it runs in a process of its own. This passes while that process does not end well.
    # Once the bug is mended this fails: then turn the last line round, == 0, and the test keeps it from coming back.
    process = multiprocessing.get_context("fork").Process(target=attempt)
    process.start()
    process.join(60)
    process.kill()
    process.join()
    assert process.exitcode != 0


def attempt() -> None:
    {call}
"""


@click.command()
@click.argument("message_id", metavar="ID", type=click.IntRange(min=1, max=2**63 - 1))
@click.option("--app", metavar="MODULE:APP", envvar="BARTLEBY_APP", help="The application with the handler: shop:app.")
@click.option("--output", metavar="FILE", help="test_message_ID.py if not given; - is standard output.")
@click.option("--force", is_flag=True, help="Write over FILE.")
@click.pass_obj
def repro(dsn: str | None, message_id: int, app: str | None, output: str | None, force: bool) -> None:
    """Write a test that reproduces a dead letter.

    It runs the handler with the payload of the letter, without a database, and expects the exception. It passes as
    long as the bug is there, and says how to turn it round.
    """
    with client(dsn) as opened:
        letter = opened.dead_letter(message_id)
    if letter is None:
        raise BartlebyError(f"message {message_id} has no dead letter", hint=f"bartleby explain {message_id}")
    _check(letter)
    where = _WHERE_APP if app is None else _located(app, letter.queue)
    text = written(letter, where, resolve=app is not None)
    if output == "-":
        click.echo(text, nl=False)
        return
    path = Path(output or f"test_message_{message_id}.py")
    _save(path, text, force=force)
    click.echo(path)
    if app is None:
        hint = "say where the application is, in the file or with --app MODULE:APP, such as shop:app"
        click.echo(f"hint: {hint}", err=True)
    click.echo(f"run it: pytest {printable(str(path))}", err=True)


def _check(letter: DeadLetter) -> None:
    if letter.raw is None:
        erased = "" if letter.erased_at is None else f" on {letter.erased_at:%Y-%m-%d %H:%M} UTC"
        raise BartlebyError(
            f"the payload of message {letter.message_id} was erased{erased}: there is nothing to run the handler with",
            hint=f"what is left of it: bartleby explain {letter.message_id}",
        )
    if letter.error_type in {"delivery_error", "unacceptable"}:
        raise BartlebyError(
            f"message {letter.message_id} was rejected, not failed: {error_line(letter.error_type, letter.error)}",
            hint="there is no exception that a test could expect",
        )


def _located(app: str, queue: str) -> str:
    application = load(app)
    application.handlers_for([queue])
    module, _, name = app.partition(":")
    return f"{module}:{name or _name_of(application, module)}"


def _name_of(application: "Bartleby", module: str) -> str:
    return next(name for name, value in vars(sys.modules[module]).items() if value is application)


def _save(path: Path, text: str, *, force: bool) -> None:
    try:
        with open(path, "w" if force else "x", encoding="utf-8", opener=private) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
    except FileExistsError:
        raise BartlebyError(f"{path} exists", hint="say --force to write over it, or --output FILE") from None
    except OSError as error:
        raise BartlebyError(f"{path} cannot be written: {error.strerror}") from None


def written(letter: DeadLetter, where: str, *, resolve: bool = False) -> str:
    """Return the test; `where` is MODULE:APP. With `resolve`, what it imported tells where the exception is."""
    module, _, name = where.partition(":")
    crashed = letter.error_type == "WorkerLost"
    needed, exception = (None, None) if crashed else _exception(letter.error_type or "", resolve=resolve)
    payload, argument = _payload(letter)
    first = ["import multiprocessing"] if crashed else ["import pytest"]
    imports = [*([f"import {needed}"] if needed else []), "from bartleby.testing import run"]
    application = f"from {module} import {name}" + ("" if where != _WHERE_APP else "  # where is yours?")
    constants = [payload, *([f"HEADERS = {_literal(letter.headers)}"] if letter.raw_headers else [])]
    template = _CRASHES if crashed else _NAMED if exception is None else _RAISES
    body = template.format(
        id=letter.message_id,
        exception=exception,
        match=_match(letter),
        name=repr((letter.error_type or "").rpartition(".")[2] if exception is None else ""),
        call=_call(letter, name, argument),
    )
    parts = ["\n".join(_heading(letter)), "\n".join([*first, "", *imports, application]), "\n\n".join(constants)]
    return "\n\n".join(parts) + "\n\n\n" + body


def _heading(letter: DeadLetter) -> list[str]:
    died = f"{letter.dead_at:%Y-%m-%d %H:%M:%S} UTC"
    attempts = f"{letter.attempts} attempt{'' if letter.attempts == 1 else 's'}"
    version = f", version {letter.worker_version}" if letter.worker_version else ""
    lines = [
        f"Message {letter.message_id} of queue {letter.queue} died on {died}: {letter.reason} after {attempts},",
        f"in worker {letter.worker}{version}:",
        error_line(letter.error_type, letter.error),
        f"Written by: bartleby repro {letter.message_id}",
    ]
    if letter.raw_edited is not None:
        lines.append("The payload is the one it ran with last, as edited by a replay; it was sent with another.")
    if _HIDDEN in (letter.error or ""):
        lines.append("Secrets were taken out of the error text before it was stored (***).")
    return [f"# {printable(line)}".replace("\n", " ") for line in lines]


def _call(letter: DeadLetter, app: str, argument: str) -> str:
    words = [app, _literal(letter.queue), argument]
    if letter.raw_headers:
        words.append("headers=HEADERS")
    if letter.key is not None:
        words.append(f"key={_literal(letter.key)}")
    if letter.generation is not None:
        words.append(f"generation={letter.generation}")
    words += [f"attempt={letter.attempts}", f"message_id={letter.message_id}"]
    return f"run({', '.join(words)})"


def _payload(letter: DeadLetter) -> tuple[str, str]:
    raw = letter.raw if letter.raw_edited is None else letter.raw_edited
    try:
        value = letter.payload if letter.raw_edited is None else letter.edited
        encode(value)
        return f"PAYLOAD = {_literal(value)}", "PAYLOAD"
    except (UndecodablePayload, BartlebyError):
        return f"PAYLOAD = {_literal(raw)}  # as JSON: Python cannot write it down", "raw=PAYLOAD"


def _literal(value: object) -> str:
    if isinstance(value, str):  # pprint breaks long texts apart
        return repr(value)
    return pprint.pformat(value, width=_WIDTH, sort_dicts=False)


def _match(letter: DeadLetter) -> str:
    # Only words that are the same each time: what differs from run to run would look like another bug.
    line = (letter.error or "").partition("\n")[0].strip()[:_LONGEST_MATCH]
    name = letter.error_type or ""
    stable = line == normalised(line, name) or (name == "KeyError" and _KEY_NAME.fullmatch(line))
    return f", match={re.escape(line)!r}" if line and stable and _HIDDEN not in line and "*" not in line else ""


def _exception(error_type: str, *, resolve: bool) -> tuple[str | None, str | None]:
    """Return the module to import and how the exception is called then; None for what cannot be written."""
    parts = error_type.split(".")
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
        return None, None
    if len(parts) == 1:
        known = _is_exception(getattr(builtins, error_type, None))
        return None, error_type if known else None
    found = _found(parts) if resolve else None
    # by convention: what begins with a capital is a class
    place = found or next((n for n in range(1, len(parts)) if parts[n][0].isupper()), len(parts) - 1)
    return ".".join(parts[:place]), error_type


def _found(parts: list[str]) -> int | None:
    for place in range(len(parts) - 1, 0, -1):
        # nothing is imported for it: what the database calls an error may be the name of any module
        value: Any = sys.modules.get(".".join(parts[:place]))
        for name in parts[place:]:
            value = inspect.getattr_static(value, name, None)
        if _is_exception(value):
            return place
    return None


def _is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)
