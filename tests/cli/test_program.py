"""The program as a whole: help, exit codes, installation, and errors with hints instead of tracebacks."""

import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import Client, __version__, dev
from bartleby.surfaces.cli import cli
from tests.cli.conftest import Conn, Run, Terminal
from tests.kit.commands import HOSTILE, PROGRAM, check_refusals
from tests.kit.dead_letters import bury

UNREACHABLE = "host=127.0.0.1 port=1 dbname=x"


@pytest.fixture
def empty(server: dev.Server, admin: Conn) -> Iterator[str]:
    """The address of a database without the schema."""
    admin.execute("drop database if exists no_schema with (force)")
    admin.execute("create database no_schema")
    yield f"{server.dsn.rpartition('/')[0]}/no_schema"
    admin.execute("drop database no_schema with (force)")


def test_help_lists_every_command(bartleby: Run) -> None:
    done = bartleby()
    assert done.code == 2
    for command in cli.commands:
        line = next(line for line in done.err.splitlines() if line.strip().startswith(f"{command} "))
        assert not line.endswith("...") or command in {"relay", "tokens"}, command
        assert bartleby(command, "--help").code == 0, command
    assert bartleby("--version").out == f"bartleby, version {__version__}\n"
    for words in (["nonsense"], ["send"], ["--nonsense"], ["queues", "nonsense"], ["dead", "--limit", "0"]):
        done = bartleby(*words)
        assert (done.code, done.out, "Usage: " in done.err, "Error: " in done.err) == (2, "", True, True), words


def test_install_upgrade_and_uninstall(bartleby: Run, empty: str) -> None:
    missing = "bartleby: this database has no schema of Bartleby\nhint: run: bartleby install\n"
    check_refusals(partial(bartleby, address=empty), [(["upgrade"], 1, missing), (["queues"], 1, "bartleby install")])
    for command in ("install", "install", "upgrade"):
        done = bartleby(command, address=empty)
        assert (done.code, done.out, done.err) == (0, f"bartleby {__version__} is installed in no_schema\n", "")
    refused = bartleby("uninstall", stdin="n\n", address=empty)
    assert refused.code == 1
    assert "Delete all queues, messages and dead letters in no_schema?" in refused.out
    assert bartleby("uninstall", address=empty).code == 1
    assert bartleby("queues", address=empty).code == 0
    assert bartleby("uninstall", "--yes", address=empty).out == "bartleby is removed from no_schema\n"
    assert bartleby("install", address=empty).code == bartleby("uninstall", stdin="y\n", address=empty).code == 0
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute(bartleby("sql").out.encode())
        assert bartleby("queues", address=empty).code == 0
        connection.execute(bartleby("sql", "--uninstall").out.encode())
        assert bartleby("queues", address=empty).code == 1


@pytest.mark.seed("cordum-29")
def test_unreachable_database_is_reported_at_once(bartleby: Run) -> None:
    for command in (["queues"], ["dead"], ["doctor"], ["install"], ["upgrade"], ["janitor", "--once"]):
        done = bartleby(*command, address=UNREACHABLE)
        assert (done.code, done.out) == (1, ""), command
        assert done.err.startswith("bartleby: the database cannot be reached: connection failed"), command
        assert "error connecting in" not in done.err, command
        assert done.err.endswith("hint: check --dsn, or BARTLEBY_DSN, and that the server is running\n"), command
    check_refusals(bartleby, [(["--dsn", "what is this", "queues"], 1, "is not a connection string")])
    assert bartleby("--dsn", " ", "queues").code == 2


def test_console_script_works_in_a_process_of_its_own(client: Client, dsn: str, tmp_path: Path) -> None:
    strict = {**os.environ, "BARTLEBY_DSN": dsn, "PYTHONWARNINGS": "error", "PYTHONIOENCODING": "utf-8:strict"}
    for stdin, code, out, err in (
        ('"ü"'.encode(), 0, b"1\n", b""),
        (b'"\xff"', 1, b"", b"bartleby: standard input is not text"),
    ):
        command = [*PROGRAM, "send", "orders"]
        done = subprocess.run(command, input=stdin, capture_output=True, check=False, cwd=tmp_path, env=strict)
        assert (done.returncode, done.stdout, done.stderr[: len(err) or None]) == (code, out, err)


def test_list_is_another_name_of_each_list(bartleby: Run, client: Client) -> None:
    for noun in ("sinks", "tokens", "workers"):
        assert bartleby(noun, "list") == bartleby(noun), noun


@pytest.mark.own_database
def test_missing_role_is_reported_with_what_each_role_may_do(
    bartleby: Run, client: Client, conn: Conn, login: Callable[..., str]
) -> None:
    stranger, reader, worker = login(), login("bartleby_reader"), login("bartleby_worker")
    bury(client, [1])
    exports = (["dead", "--count"], ["dead", "type:KeyError", "--json"], ["dead", "--export", "-"])
    denied = "bartleby: permission denied for schema bartleby\nhint: "
    rows = [(words, 1, denied) for words in (*exports, ["queues"], ["send", "orders", "1"])]
    check_refusals(partial(bartleby, address=stranger), rows)
    for role in ("bartleby_producer sends", "bartleby_worker works", "bartleby_reader looks", "bartleby_operator"):
        assert role in bartleby("queues", address=worker).err
    for words in (*exports, ["groups", "1"], ["groups", "rules"], ["audit", "verify"], ["explain", "1"], ["queues"]):
        assert bartleby(*words, address=reader).code == 0, words
    why = ["--reason", "x", "--yes"]
    changes = (["discard", "type:KeyError", *why], ["groups", "ack", "1", *why[:2]], ["queues", "pause", "orders"])
    check_refusals(partial(bartleby, address=reader), [(words, 1, "bartleby: permission denied") for words in changes])
    conn.execute("drop schema bartleby cascade")
    assert "CREATE on it" in bartleby("install", address=stranger).err


def test_hostile_text_never_reaches_the_terminal_unescaped(
    bartleby: Run, terminal: Terminal, client: Client, connect: Callable[..., Conn]
) -> None:
    """Both fixtures refuse control characters in what they return; here every list and view meets some."""
    by: dict[str, Any] = {"actor": HOSTILE, "reason": HOSTILE}
    headers = {"original_message_id": 1, "original_queue": HOSTILE, "rejection_message": HOSTILE}
    payloads = [{"text": HOSTILE, HOSTILE: 1}, 2, 3]
    ids = bury(client, payloads, kind=f"Bad{HOSTILE}", error=HOSTILE, key=HOSTILE, headers=headers)
    client.report_worker(HOSTILE, version=HOSTILE, queues=[HOSTILE], host=HOSTILE, pid=1, concurrency=1, running=0)
    client.acknowledge_group(1, owner=HOSTILE, **by)
    client.hold(ids[:1], **by)
    plan = client.plan_replay(ids=ids[:2], patch=[{"op": "add", "path": "", "value": {HOSTILE: HOSTILE}}], **by)
    client.start_replay(plan, **by)
    client.advance_replays()
    client.discard(ids[2:], **by)
    client.force_breaker("orders", **by)
    connect(autocommit=False, application_name=HOSTILE).execute("select pg_current_xact_id()")
    first = str(ids[0])
    views = (
        ["dead", "status:any"], ["dead", HOSTILE], ["explain", first], ["explain", first, "--all"], ["groups"],
        ["groups", "1"], ["audit"], ["queues"], ["workers"], ["doctor"], ["replay", "list"], ["replay", "show", "1"],
        ["replay", "items", "1"],
    )  # fmt: skip
    for words in views:
        assert bartleby(*words).code in {0, 1}, words
        assert terminal(*words, columns=160).lines, words
    for words in (["queues", "create", HOSTILE], ["send", HOSTILE, "1"], ["dead", f"quee:{HOSTILE}"]):
        assert bartleby(*words).code in {1, 2}
    assert terminal("erase", "--key", HOSTILE, "--reason", HOSTILE, answers=["n"]).code == 1
    assert "\ufffd[31mred" in bartleby("dead", "status:any").out
    assert bartleby("explain", first, "--json").document["deeds"][0]["actor"] == HOSTILE
    assert bartleby("groups", "1", "--json").document["group"]["owner"] == HOSTILE
