"""What is to run for long starts while the database is away: it says so, waits, and begins when it is there."""

import contextlib
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import dev
from bartleby.surfaces.cli import connecting
from bench import pooler
from tests.kit.commands import PROGRAM
from tests.kit.proxy import Proxy, proxied
from tests.kit.worker import ENVIRONMENT, LONG, Told, until

NOBODY = 1
BEGINS = {
    ("relay",): "relay.started",
    ("work", "shop:app"): "worker.started",
    ("janitor",): "janitor.started",
    ("mcp", "--http", "127.0.0.1:0"): "listening on",
}
"""What each of the commands says when it has begun."""
SHOP = """
from bartleby import Bartleby

app = Bartleby()

@app.handler("orders")
def handle(message):
    pass
"""


@pytest.fixture
def away() -> Iterator[Proxy]:
    """A way to the database that leads nowhere yet."""
    with proxied(NOBODY) as proxy:
        yield proxy


class Started:
    """A command as a process, and what it has said."""

    def __init__(self, folder: Path, dsn: str, *words: str) -> None:
        (folder / "shop.py").write_text(SHOP)
        self._said = folder / "said"
        with self._said.open("w") as said:
            self.process = subprocess.Popen(
                [*PROGRAM, *words],
                cwd=folder,
                env={**ENVIRONMENT, "BARTLEBY_DSN": dsn},
                stdout=subprocess.DEVNULL,
                stderr=said,
            )

    def said(self) -> str:
        return self._said.read_text()

    def says(self, word: str) -> None:
        """Wait until it has said this."""
        until(lambda: word in self.said() or self.process.poll() is not None, what=f"{word!r} in {self.said()}")
        assert self.process.poll() is None, self.said()

    def ends(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(LONG)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    with contextlib.ExitStack() as stack:

        def begin(dsn: str, *words: str) -> Started:
            begun = Started(tmp_path, dsn, *words)
            stack.enter_context(begun.process)
            stack.callback(begun.process.kill)
            return begun

        yield begin


@pytest.mark.parametrize("words", BEGINS, ids=lambda each: each[0])
def test_it_begins_when_the_database_is_there(
    start: Callable[..., Started], away: Proxy, server: dev.Server, dsn: str, words: tuple[str, ...]
) -> None:
    begun = start(away.dsn(dsn), *words)
    begun.says("database.away")
    away.lead_to(server.port)
    begun.says(BEGINS[words])
    assert begun.said().count("is waited for") == 1
    assert "database.back" in begun.said().partition(BEGINS[words])[0]
    assert begun.ends(signal.SIGTERM) == 0


@pytest.mark.parametrize("words", BEGINS, ids=lambda each: each[0])
def test_it_is_stopped_while_it_waits(
    start: Callable[..., Started], away: Proxy, dsn: str, words: tuple[str, ...]
) -> None:
    begun = start(away.dsn(dsn), *words)
    begun.says("database.away")
    assert begun.ends(signal.SIGTERM if len(words) > 1 else signal.SIGINT) == 0
    assert "Traceback" not in begun.said()


@pytest.mark.pgbouncer
def test_a_pooler_that_answers_for_a_server_that_is_away_is_not_the_database(
    server: dev.Server, dsn: str, told: Told
) -> None:
    with proxied(server.port) as proxy, pooler.pgbouncer(replace(server, port=proxy.port)) as port:
        through = f"{dsn.rpartition('@')[0]}@127.0.0.1:{port}/{dsn.rpartition('/')[2]}"
        psycopg.connect(through).close()  # it knows the password from now on
        proxy.lead_to(NOBODY)
        proxy.cut()
        waiting = threading.Thread(target=connecting.wait_for, args=[through])
        waiting.start()
        until(lambda: told.of("database.away"), what="it says that it waits")
        assert waiting.is_alive()
        proxy.lead_to(server.port)
        waiting.join(LONG)
        assert told.of("database.back")


def test_a_janitor_ends_where_nothing_is_installed(start: Callable[..., Started], server: dev.Server) -> None:
    begun = start(server.dsn, "janitor")
    assert begun.process.wait(LONG) == 1
    assert "bartleby install" in begun.said()


def test_a_server_that_turns_us_away_is_not_waited_for(dsn: str, told: Told) -> None:
    address, _, name = dsn.rpartition("/")
    user = address.partition("://")[2].partition(":")[0]
    wrong = f"postgresql://{user}:wrong@{address.rpartition('@')[2]}/{name}"
    for refused, why in (
        (wrong, "password"),
        (f"{address}/nosuch", "does not exist"),
        (f"{dsn}?sslmode=x", "sslmode"),
        (f"{dsn}?sslmode=require", "SSL"),
    ):
        with pytest.raises(psycopg.OperationalError, match=why):
            connecting.wait_for(refused)
    assert not told.records


@pytest.mark.parametrize(
    "said",
    [
        "FATAL:  sorry, too many clients already",
        "FATAL:  remaining connection slots are reserved for roles with the SUPERUSER attribute",
        "session is read-only",
    ],
)
def test_what_a_server_says_for_now_is_waited_out(dsn: str, told: Told, said: str) -> None:
    connect, tried = psycopg.connect, list[Any]()

    def refusing(*arguments: Any, **named: Any) -> Any:
        tried.append(arguments)
        if len(tried) <= 3:
            raise psycopg.OperationalError(f"connection failed: {said}")
        return connect(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psycopg, "connect", refusing)
        connecting.wait_for(dsn)
    assert len(tried) == 4
    assert [len(told.of(f"database.{each}")) for each in ("away", "back")] == [1, 1]
