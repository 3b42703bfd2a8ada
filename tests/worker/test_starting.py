"""Commands that run for long wait for a database that is unavailable when they start, and say so once."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
import pytest

from bartleby import Client, dev
from bartleby.surfaces.cli import connecting
from tests.kit.commands import Done
from tests.kit.dead_letters import bury
from tests.kit.proxy import Proxy, proxied
from tests.kit.worker import CapturedLog, Program

NO_SERVER = 1
BEGINS = {
    "relay": "relay.started",
    "work shop:app": "worker.started",
    "janitor": "janitor.started",
    "mcp --http 127.0.0.1:0": "listening on",
}
SHOP = "from bartleby import Bartleby\napp = Bartleby()\napp.handler('orders')(print)\n"


@pytest.fixture
def away() -> Iterator[Proxy]:
    """A proxy without a server behind it."""
    with proxied(NO_SERVER) as proxy:
        yield proxy


@pytest.fixture
def start(tmp_path: Path, dsn: str, away: Proxy) -> Callable[[str], Program]:
    """Start a command whose database is unavailable."""

    def begin(words: str) -> Program:
        (tmp_path / "shop.py").write_text(SHOP)
        command, *arguments = words.split()
        return Program(away.dsn(dsn), *arguments, cwd=tmp_path, command=command)

    return begin


@pytest.mark.seed("cordum-29")
@pytest.mark.parametrize("words", BEGINS)
def test_command_begins_when_the_database_is_available(
    start: Callable[[str], Program], away: Proxy, server: dev.Server, *, dsn: str, words: str
) -> None:
    with Client(dsn) as client:
        client.create_queue("orders")
        plan = client.plan_replay(ids=bury(client, [1]), actor="ana", reason="fixed")
        client.start_replay(plan, actor="ana", reason="fixed")
    with start(words) as begun:
        begun.wait_for("database.away")
        away.lead_to(server.port)
        begun.wait_for(BEGINS[words])
        if words in {"work shop:app", "janitor"}:
            begun.wait_for("replay.taken")
        assert begun.text().count("is waited for") == 1
        assert "database.back" in begun.text().partition(BEGINS[words])[0]
        begun.term()
        assert begun.end() == 0


@pytest.mark.parametrize(("words", "order"), [("work shop:app", signal.SIGTERM), ("relay", signal.SIGINT)])
def test_command_can_be_stopped_while_it_waits(
    start: Callable[[str], Program], words: str, order: signal.Signals
) -> None:
    with start(words) as begun:
        begun.wait_for("database.away")
        begun.process.send_signal(order)
        assert begun.end() == 0
        assert "Traceback" not in begun.text()


def test_janitor_ends_where_nothing_is_installed(bartleby: Callable[..., Done], server: dev.Server) -> None:
    done = bartleby("janitor", address=server.dsn)
    assert done.code == 1
    assert "bartleby install" in done.err


def test_server_that_refuses_the_connection_for_good_is_not_waited_for(dsn: str, log: CapturedLog) -> None:
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
    assert not log.records


REFUSED_FOR_NOW = [
    (psycopg, "connect", "FATAL:  sorry, too many clients already"),
    (psycopg, "connect", "FATAL:  remaining connection slots are reserved for roles with the SUPERUSER attribute"),
    (psycopg, "connect", "session is read-only"),
    (psycopg.Connection, "execute", "server login has been failing"),  # a pooler has accepted the connection
]


def test_server_that_refuses_the_connection_for_now_is_waited_for(dsn: str) -> None:
    for owner, name, text in REFUSED_FOR_NOW:
        plain: Any = getattr(owner, name)
        refusals = [psycopg.OperationalError(f"connection failed: {text}")] * 2

        def refuse(*arguments: Any, plain: Any = plain, refusals: list[Any] = refusals, **named: Any) -> Any:
            if refusals:
                raise refusals.pop()
            return plain(*arguments, **named)

        with CapturedLog.capturing() as log, mock.patch.object(owner, name, refuse):
            connecting.wait_for(dsn)
        assert not refusals, text
        assert [len(log.of(f"database.{each}")) for each in ("away", "back")] == [1, 1], text
