"""What `bartleby mcp` says before it serves: what would make an agent find nothing."""

import os
import subprocess

import psycopg
import pytest
from click.testing import CliRunner
from psycopg.conninfo import make_conninfo

from bartleby import Client
from bartleby.errors import NotInstalled
from bartleby.surfaces.cli import cli
from bartleby.surfaces.mcp import running
from tests.kit.commands import PROGRAM

LISTEN = ["mcp", "--http", "127.0.0.1:0"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything but listening is done; what was to be listened on."""
    addresses: list[str] = []
    monkeypatch.setattr(running, "serve", lambda _site, address, _tell: addresses.append(address.host))
    return addresses


def test_without_a_schema_it_does_not_start(dsn: str, started: list[str]) -> None:
    said = CliRunner().invoke(cli, ["--dsn", make_conninfo(dsn, dbname="postgres"), *LISTEN])
    assert isinstance(said.exception, NotInstalled)
    assert started == []


def test_for_a_user_who_may_not_even_look_it_does_not_start(
    client: Client, dsn: str, conn: psycopg.Connection[tuple[object, ...]], started: list[str]
) -> None:
    conn.execute("create role may_nothing login password 'none'")
    try:
        said = CliRunner().invoke(cli, ["--dsn", make_conninfo(dsn, user="may_nothing", password="none"), *LISTEN])
    finally:
        conn.execute("drop role may_nothing")
    assert isinstance(said.exception, psycopg.errors.InsufficientPrivilege)
    assert started == []


def test_a_queue_that_does_not_exist_is_told(client: Client, dsn: str, started: list[str]) -> None:
    said = CliRunner().invoke(cli, ["--dsn", dsn, *LISTEN, "--no-auth", "--queue", "orders", "--queue", "ordres"])
    assert (said.exit_code, said.stderr) == (0, "there is no queue ordres yet\n")
    assert started == ["127.0.0.1"]
    words = ["tokens", "add", "bot", "--role", "agent", "--reason", "a test", "--queue", "orders", "--queue", "ordres"]
    said = CliRunner().invoke(cli, ["--dsn", dsn, *words])
    assert said.exit_code == 0
    assert said.stderr.endswith("it is shown this once\nthere is no queue ordres yet\n")


def test_queues_that_would_hold_nobody_are_refused(dsn: str, started: list[str]) -> None:
    said = CliRunner().invoke(cli, ["--dsn", dsn, *LISTEN, "--queue", "orders"])
    assert said.exit_code == 2
    assert "over HTTP a token says which queues" in said.stderr
    assert started == []


def test_who_starts_it_by_hand_is_told_whom_it_is_for(dsn: str, client: Client) -> None:
    ours, theirs = os.openpty()
    command = [*PROGRAM, "--dsn", dsn, "mcp"]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = process.stderr.readline()
        process.kill()
    os.close(ours)
    os.close(theirs)
    assert "a host of agents" in told
