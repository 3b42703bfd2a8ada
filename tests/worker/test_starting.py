"""Commands that run for long wait for a database that is unavailable when they start, and say so once."""

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import Client, dev
from bartleby.surfaces.cli import connecting
from tests.kit.burying import bury
from tests.kit.commands import PROGRAM, Done
from tests.kit.proxy import Proxy, proxied
from tests.kit.worker import ENVIRONMENT, Told, until

NO_SERVER = 1
BEGINS = {
    ("relay",): "relay.started",
    ("work", "shop:app"): "worker.started",
    ("janitor",): "janitor.started",
    ("mcp", "--http", "127.0.0.1:0"): "listening on",
}
SHOP = "from bartleby import Bartleby\napp = Bartleby()\napp.handler('orders')(print)\n"


@pytest.fixture
def away() -> Iterator[Proxy]:
    """A proxy without a server behind it."""
    with proxied(NO_SERVER) as proxy:
        yield proxy


class Started:
    """A command as a process, and its log."""

    def __init__(self, folder: Path, dsn: str, *words: str) -> None:
        (folder / "shop.py").write_text(SHOP)
        self._file = folder / "log"
        environment = {**ENVIRONMENT, "BARTLEBY_DSN": dsn}
        with self._file.open("w") as log:
            out = subprocess.DEVNULL
            self.process = subprocess.Popen([*PROGRAM, *words], cwd=folder, env=environment, stdout=out, stderr=log)

    def log(self) -> str:
        return self._file.read_text()

    def wait_for(self, word: str) -> None:
        until(lambda: word in self.log() or self.process.poll() is not None, what=f"{word!r} in {self.log()}")
        assert self.process.poll() is None, self.log()

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        until(lambda: self.process.poll() is not None, what=f"an end; the log is {self.log()}")
        return self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    with contextlib.ExitStack() as stack:

        def begin(dsn: str, *words: str) -> Started:
            begun = Started(tmp_path, dsn, *words)
            stack.enter_context(begun.process)
            stack.callback(begun.process.kill)
            return begun

        yield begin


@pytest.mark.seed("cordum-29")
@pytest.mark.parametrize("words", BEGINS, ids=lambda each: each[0])
def test_command_begins_when_the_database_is_available(
    start: Callable[..., Started], away: Proxy, server: dev.Server, dsn: str, words: tuple[str, ...]
) -> None:
    with Client(dsn) as client:
        client.create_queue("orders")
        plan = client.plan_replay(ids=bury(client, [1]), actor="ana", reason="fixed")
        client.start_replay(plan, actor="ana", reason="fixed")
    begun = start(away.dsn(dsn), *words)
    begun.wait_for("database.away")
    away.lead_to(server.port)
    begun.wait_for(BEGINS[words])
    if words[0] in {"work", "janitor"}:
        begun.wait_for("replay.taken")
    assert begun.log().count("is waited for") == 1
    assert "database.back" in begun.log().partition(BEGINS[words])[0]
    assert begun.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(("words", "order"), [("work shop:app", signal.SIGTERM), ("relay", signal.SIGINT)])
def test_command_can_be_stopped_while_it_waits(
    start: Callable[..., Started], away: Proxy, dsn: str, *, words: str, order: signal.Signals
) -> None:
    begun = start(away.dsn(dsn), *words.split())
    begun.wait_for("database.away")
    assert begun.end(order) == 0
    assert "Traceback" not in begun.log()


def test_janitor_ends_where_nothing_is_installed(bartleby: Callable[..., Done], server: dev.Server) -> None:
    done = bartleby("janitor", address=server.dsn)
    assert done.code == 1
    assert "bartleby install" in done.err


def test_server_that_refuses_the_connection_for_good_is_not_waited_for(dsn: str, told: Told) -> None:
    address, _, name = dsn.rpartition("/")
    user = address.partition("://")[2].partition(":")[0]
    for refused, word in (
        (f"postgresql://{user}:wrong@{address.rpartition('@')[2]}/{name}", "password"),
        (f"{address}/nosuch", "does not exist"),
        (f"{dsn}?sslmode=x", "sslmode"),
        (f"{dsn}?sslmode=require", "SSL"),
    ):
        with pytest.raises(psycopg.OperationalError, match=word):
            connecting.wait_for(refused)
    assert not told.records


WAITED_FOR = [
    "FATAL:  sorry, too many clients already",
    "FATAL:  remaining connection slots are reserved for roles with the SUPERUSER attribute",
    "session is read-only",
]


@pytest.mark.parametrize("place", ["connection", "first statement"])
def test_server_that_refuses_the_connection_for_now_is_waited_for(
    dsn: str, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A pooler accepts the connection, and the first statement fails."""
    owner, name = (psycopg, "connect") if place == "connection" else (psycopg.Connection, "execute")
    plain: Any = getattr(owner, name)
    for text in WAITED_FOR if place == "connection" else ["server login has been failing"]:
        tried: list[Any] = []

        def refuse(*arguments: Any, text: str = text, tried: list[Any] = tried, **named: Any) -> Any:
            tried.append(arguments)
            if len(tried) <= 2:
                raise psycopg.OperationalError(f"connection failed: {text}")
            return plain(*arguments, **named)

        monkeypatch.setattr(owner, name, refuse)
        with Told.listening() as told:
            connecting.wait_for(dsn)
        assert len(tried) == 3, text
        assert [len(told.of(f"database.{each}")) for each in ("away", "back")] == [1, 1], text
