"""Fixtures of the command line: a client with a queue, and a terminal inside the test's own process."""

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
from click.testing import CliRunner

from bartleby import Bartleby, Client
from bartleby.surfaces.cli import main
from tests.kit.commands import STEERING, Done, kept_logging
from tests.kit.replay import Shop
from tests.kit.screen import CTRL_C, END_OF_INPUT, plain

Answer = str | Callable[[], str]
Conn = psycopg.Connection[tuple[Any, ...]]
Run = Callable[..., Done]
Terminal = Callable[..., "Talk"]


@dataclass
class Talk:
    """What stood on the terminal, without colours, and how it ended."""

    code: int = 0
    text: str = ""
    asked: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        return [line.strip() for line in self.text.splitlines() if line.strip()]


@pytest.fixture(autouse=True)
def patience(patient_worker: None) -> None:
    """Workers of this process give nothing up because the machine is slow."""


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    """A client of a database with a queue `orders`, where a message has one attempt."""
    with Client(dsn) as opened:
        opened.create_queue("orders", {"max_attempts": 1}, actor="ana", reason="a shop")
        yield opened


@pytest.fixture
def shop(app: Bartleby, client: Client) -> Shop:
    return Shop(app, client)


@pytest.fixture
def login(conn: Conn, dsn: str) -> Iterator[Callable[..., str]]:
    """Make database users with these roles; return their addresses."""
    made: list[str] = []

    def make(*roles: str) -> str:
        name = f"person_{len(made)}"
        granted = f" in role {', '.join(roles)}" if roles else ""
        conn.execute(f"create role {name} login password 'x'{granted}".encode())
        made.append(name)
        return f"postgresql://{name}:x@{dsn.partition('@')[2]}"

    yield make
    for name in made:
        conn.execute(f"drop owned by {name}; drop role {name}".encode())


class Keyboard(io.StringIO):
    """Standard input of a person: each line that is read is the next answer."""

    def __init__(self, answers: Sequence[Answer], shown: Callable[[], str], asked: list[str]) -> None:
        super().__init__()
        self.left = list(answers)
        self._shown, self._asked = shown, asked
        self._read_upto = 0

    def isatty(self) -> bool:
        return True

    def readline(self, *_: object) -> str:  # type: ignore[override]
        shown = self._shown()
        self._asked.append(shown[self._read_upto :].splitlines()[-1])
        self._read_upto = len(shown)
        assert self.left, f"no answer for {self._asked[-1]!r}"
        answer = self.left.pop(0)
        typed = answer if isinstance(answer, str) else answer()
        if typed == CTRL_C:
            raise KeyboardInterrupt
        if typed == END_OF_INPUT:
            return ""
        click.echo(typed)  # as a terminal does
        return f"{typed}\n"


@pytest.fixture
def terminal(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Run a command as on a terminal; an answer may be a function that acts while the question is shown."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BARTLEBY_DSN", dsn)
    monkeypatch.setenv("TERM", "xterm")

    def run(*words: str, answers: Sequence[Answer] = (), columns: int = 80) -> Talk:
        screen = Talk()
        monkeypatch.setattr(sys, "argv", ["bartleby", *words])
        monkeypatch.setenv("COLUMNS", str(columns))
        with CliRunner().isolation() as (_, _, mixed), monkeypatch.context() as patched, kept_logging():

            def shown() -> str:
                sys.stdout.flush()
                sys.stderr.flush()
                return plain(mixed.getvalue())

            keyboard = Keyboard(answers, shown, screen.asked)
            patched.setattr(sys, "stdin", keyboard)
            for stream in (sys.stdout, sys.stderr):
                patched.setattr(stream, "isatty", lambda: True)
            with pytest.raises(SystemExit) as end:
                main()
            screen.text = shown()
        screen.code = end.value.code if isinstance(end.value.code, int) else 0
        assert not keyboard.left, f"no question for {keyboard.left}: {screen.text}"
        assert not STEERING & set(screen.text)
        return screen

    return run
