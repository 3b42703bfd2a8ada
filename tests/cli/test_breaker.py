"""The storm breaker and the janitor on the command line."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import Client
from bartleby.janitor import DUTY
from bartleby.surfaces.cli import upkeep
from tests.kit.burying import bury
from tests.kit.clock import move_clock
from tests.kit.commands import PROGRAM, Done, on_a_terminal

Conn = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        opened.create_queue("orders")
        yield opened


def events(conn: Conn) -> list[tuple[str, dict[str, Any]]]:
    return conn.execute("select type, data from bartleby.events order by id").fetchall()


def test_a_breaker_is_opened_and_closed_by_hand(bartleby: Callable[..., Done], client: Client, conn: Conn) -> None:
    client.send("orders", 1)
    opened = bartleby("queues", "breaker", "orders", "open", "--reason", "it moves", "--actor", "ana")
    assert (opened.code, opened.out) == (0, "")
    assert opened.err.startswith("orders: breaker forced since ")
    assert opened.err.endswith(": forced by ana: it moves\n")
    assert client.claim("orders", "w") is None
    again = bartleby("queues", "breaker", "orders", "open")
    assert (again.code, again.err.startswith("orders: nothing to change, breaker forced since ")) == (0, True)
    closed = bartleby("queues", "breaker", "orders", "close", "--reason", "moved", "--actor", "ana")
    assert (closed.code, closed.err) == (0, "orders: breaker closed\n")
    assert client.claim("orders", "w") is not None
    assert bartleby("queues", "breaker", "orders", "close").err == "orders: nothing to change, breaker closed\n"
    (first, why), (second, how) = events(conn)
    assert (first, why["actor"], why["reason"]) == ("io.bartleby.breaker.opened", "ana", "it moves")
    assert (second, how["actor"], how["reason"]) == ("io.bartleby.breaker.closed", "ana", "moved")


def test_the_actor_is_the_user_unless_named(
    bartleby: Callable[..., Done], client: Client, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "berta")
    assert bartleby("queues", "breaker", "orders", "open").code == 0
    assert events(conn)[0][1]["actor"] == "berta"
    assert events(conn)[0][1]["reason"] == "by hand"


def test_somebody_without_a_name_is_a_number(
    bartleby: Callable[..., Done], client: Client, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody() -> str:
        raise OSError("no such user")

    monkeypatch.setattr("getpass.getuser", nobody)
    assert bartleby("queues", "breaker", "orders", "open").code == 0
    assert events(conn)[0][1]["actor"] == f"user {os.getuid()}"


def test_a_breaker_is_switched_off_and_on(bartleby: Callable[..., Done], client: Client) -> None:
    assert bartleby("queues", "breaker", "orders", "off").err == "orders: breaker off\n"
    assert client.open_breaker("orders", "storm", 1) is False
    assert "breaker off" in bartleby("queues").out
    assert bartleby("queues", "breaker", "orders", "auto").err == "orders: breaker closed\n"
    assert client.open_breaker("orders", "storm", 1) is True


def test_queues_show_a_breaker_that_is_not_closed(bartleby: Callable[..., Done], client: Client, dsn: str) -> None:
    assert "breaker" not in bartleby("queues").out
    client.create_queue("bills")
    client.pause_queue("orders")
    client.open_breaker("orders", "ConnectionError: refused " * 10, 1)
    _, bills, orders = bartleby("queues").out.splitlines()
    assert "breaker" not in bills
    assert "paused; breaker open since 20" in orders
    assert "ConnectionError: refused" in orders
    assert "; next probe in " in orders
    found = {queue["name"]: queue for queue in bartleby("queues", "--json").document}
    assert (found["bills"]["breaker"], found["orders"]["breaker"]) == ("closed", "open")
    assert found["orders"]["next_probe_at"] is not None
    client.resume_queue("orders")
    shown = on_a_terminal(dsn, "queues")
    assert shown[3].endswith("breaker open")
    assert shown[4].startswith("orders: breaker open since 20")


def test_a_probe_that_is_out_and_one_that_is_due(bartleby: Callable[..., Done], client: Client, conn: Conn) -> None:
    clock = move_clock(conn)
    clock.advance(-60)
    client.send("orders", 1)
    client.open_breaker("orders", "storm", 1)
    assert "; the next probe is due" in bartleby("queues").out
    clock.advance(2)
    assert client.claim("orders", "w") is not None
    assert "; a probe is out" in bartleby("queues").out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["nowhere", "open"], 1, "bartleby: unknown queue: 'nowhere'\nhint: bartleby queues lists them"),
        (["nowhere", "off"], 1, "bartleby: unknown queue: 'nowhere'"),
        (["orders", "open", "--reason", " "], 2, "bartleby: the reason is empty, and it is recorded"),
        (["orders", "close", "--actor", ""], 2, "bartleby: --actor is empty"),
        (["orders", "half"], 2, "Usage: "),
        (["orders"], 2, "Usage: "),
    ],
)
def test_what_cannot_be_done_to_a_breaker_is_explained(
    bartleby: Callable[..., Done], client: Client, words: list[str], code: int, says: str
) -> None:
    done = bartleby("queues", "breaker", *words)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith(says)


def test_the_janitor_does_one_round(bartleby: Callable[..., Done], client: Client, conn: Conn) -> None:
    clock = move_clock(conn)
    client.send_many("orders", [{"payload": 1}, {"payload": 2}])
    client.claim("orders", "web-1:44", limit=2, lease=10)
    clock.advance(11)
    client.mark_handled("orders", "orders", "id:1")
    clock.advance(40 * 86400)
    done = bartleby("janitor", "--once")
    assert (done.code, done.err) == (0, "")
    told = done.out.splitlines()
    assert told[:2] == ["orders: worker web-1:44 stopped answering: 2 messages released", "segments: nothing to do"]
    assert "handled: forgot 1" in told
    assert {each.partition(": ")[2] for each in told if ": forgot " in each} == {"forgot 0", "forgot 1"}
    assert "stopped answering" not in bartleby("janitor", "--once").out
    assert client.take_duty(DUTY, "somebody", 60) is True
    refused = bartleby("janitor", "--once")
    assert (refused.code, refused.out) == (0, "")
    assert refused.err == "nothing to do: a worker or another janitor does the upkeep\n"


def test_one_round_of_the_janitor_runs_plans_at_their_rate(bartleby: Callable[..., Done], client: Client) -> None:
    plan = client.plan_replay(ids=bury(client, range(30)), actor="ana", reason="hotfix", rate=20)
    client.start_replay(plan, actor="ana", reason="hotfix")
    assert f"replay {plan}: 30 replayed" in bartleby("janitor", "--once").out.splitlines()
    found = client.find_replay(plan)
    assert found is not None
    assert found.status == "settling"
    assert client.on_duty("replays") is None


def test_the_role_of_a_worker_is_enough_for_a_round(
    bartleby: Callable[..., Done], client: Client, conn: Conn, dsn: str
) -> None:
    conn.execute("drop role if exists keeper")
    conn.execute("create role keeper login password 'x' in role bartleby_worker")
    plan = client.plan_replay(ids=bury(client, range(3)), actor="ana", reason="hotfix")
    client.start_replay(plan, actor="ana", reason="hotfix")
    done = bartleby("janitor", "--once", address=f"postgresql://keeper:x@{dsn.partition('@')[2]}")
    assert (done.code, done.err) == (0, "")
    assert f"replay {plan}: 3 replayed" in done.out
    conn.execute("drop role keeper")


def test_one_round_of_the_janitor_has_an_end(
    bartleby: Callable[..., Done], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_SECONDS", 0.5)
    plan = client.plan_replay(ids=bury(client, range(30)), actor="ana", reason="hotfix", rate=1)
    client.start_replay(plan, actor="ana", reason="hotfix")
    monkeypatch.setattr("bartleby.client.Runner.tally", lambda *_: 2000)
    monkeypatch.setattr("bartleby.client.Runner.restless_groups", lambda *_: [1])
    began = time.monotonic()
    assert bartleby("janitor", "--once").code == 0
    assert time.monotonic() - began < 20
    found = client.find_replay(plan)
    assert found is not None
    assert (found.status, found.waiting > 20) == ("running", True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_janitor_reaps_until_it_is_told_to_stop_and_leaves_the_duty(
    client: Client, dsn: str, tmp_path: Path, wait_for: Callable[[Callable[[], object]], None], number: signal.Signals
) -> None:
    client.send("orders", 1)
    client.claim("orders", "web-1:44", lease=0.1)
    environment = {**os.environ, "BARTLEBY_DSN": dsn}
    words = [*PROGRAM, "janitor", "--log", "json"]
    said = tmp_path / "said"
    with said.open("w") as stderr, subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=stderr) as process:
        wait_for(lambda: client.queues()[0].leased == 0 and "lease.reaped" in said.read_text())
        assert client.take_duty(DUTY, "somebody else", 1) is False
        process.send_signal(number)
        assert process.wait(timeout=30) == 0
    told = [json.loads(line) for line in said.read_text().splitlines()]
    assert (told[0]["event"], told[-1]["event"]) == ("janitor.started", "janitor.stopped")
    assert [each["queue"] for each in told if each["event"] == "lease.reaped"] == ["orders"]
    assert client.take_duty(DUTY, "somebody else", 1) is True


def test_one_round_of_the_janitor_says_at_once_that_there_is_no_database(bartleby: Callable[..., Done]) -> None:
    done = bartleby("janitor", "--once", address="host=127.0.0.1 port=1 dbname=x")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("bartleby: the database cannot be reached")
