"""The command line for tests: how to start it, what it printed, and tables of refusals."""

import json
import logging
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from click.testing import CliRunner

from bartleby.surfaces.cli import main

PROGRAM = [sys.executable, "-c", "from bartleby.surfaces.cli import main; main()"]
HOSTILE = "\x1b]0;owned\x07\x1b[31mred\x9b2J\u202eevil\r\b"
# for a pytest that a test starts: these plugins take two thirds of its start
WITHOUT_PLUGINS = ["-p", "no:hypothesispytest", "-p", "no:schemathesis"]
STEERING = set("\x1b\x07\x9b\u202e\r\b")


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


def checked(code: int, out: bytes, err: bytes) -> Done:
    done = Done(code, out.decode(), err.decode())
    assert "Traceback" not in done.err, done.err
    assert not STEERING & set(done.out + done.err)
    return done


@contextmanager
def kept_logging() -> Iterator[None]:
    """Restore the logger `bartleby`, which commands such as `work` configure for their process."""
    logger = logging.getLogger("bartleby")
    level, propagate, handlers = logger.level, logger.propagate, [*logger.handlers]
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.propagate, logger.handlers[:] = propagate, handlers


@contextmanager
def terminal(dsn: str) -> Iterator[Callable[..., Done]]:
    """Run the command line as `main` does, in this process, against a database."""
    kept = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, kept_logging():

        def run(*words: str, stdin: str | bytes = "", address: str | None = dsn) -> Done:
            patch.setattr(sys, "argv", ["bartleby", *words])
            patch.setenv("BARTLEBY_DSN", address or "")
            with CliRunner().isolation(input=stdin) as (out, err, _), pytest.raises(SystemExit) as end:
                main()
            code = end.value.code
            return checked(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())

        yield run
    signal.signal(signal.SIGTERM, kept)


def check_refusals(run: Callable[..., Done], rows: Iterable[tuple[Sequence[str], int, str]]) -> None:
    """Run each command: it ends with this code and this text on standard error, and prints no data."""
    for words, code, text in rows:
        done = run(*words)
        assert (done.code, done.out) == (code, ""), (words, done)
        assert text in done.err, (words, done.err)


def has_lines(done: Done, *patterns: str) -> None:
    """Each pattern matches a line of the output, one after the other; blanks count once."""
    assert (done.code, done.err) == (0, "")
    rest = [" ".join(line.split()) for line in done.out.splitlines() if line.strip()]
    for pattern in patterns:
        while not re.search(pattern, rest[0]):
            rest.pop(0)
            assert rest, f"{pattern!r} is missing, or out of order:\n{done.out}"
