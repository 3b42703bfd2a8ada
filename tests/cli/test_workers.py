"""`bartleby workers`: who works, what each holds, and how one is told to stop."""

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from bartleby import Client
from tests.kit.commands import HOSTILE, Done, on_a_terminal

Run = Callable[..., Done]
Conn = psycopg.Connection[tuple[Any, ...]]
WHY = ("--reason", "the machine goes")


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        opened.create_queue("orders")
        yield opened


def report(client: Client, name: str = "web-7:4711:9f", **given: Any) -> str:
    facts = {"version": "2.4.1", "queues": ["orders"], "host": "web-7", "pid": 4711, "concurrency": 10, "running": 3}
    return client.report_worker(name, **{**facts, **given})


def test_nobody_works(client: Client, bartleby: Run) -> None:
    done = bartleby("workers")
    assert (done.code, done.out) == (0, "")
    assert done.err == "nobody works here; run handlers: bartleby work MODULE:APP\n"
    assert bartleby("workers", "--json").document == []


def test_the_list_says_who_works_and_what_each_holds(client: Client, bartleby: Run, dsn: str) -> None:
    client.send_many("orders", [{"payload": number} for number in range(5)])
    report(client)
    report(client, "relay:1:a", kind="relay", version=None, queues=["sink.bus"], running=0, concurrency=1)
    client.claim("orders", "web-7:4711:9f", limit=5)
    heading, first, second = bartleby("workers").out.splitlines()
    assert heading.split() == [
        "worker",
        "kind",
        "state",
        "running",
        "in",
        "hand",
        "oldest",
        "seen",
        "version",
        "queues",
    ]
    words = first.split()
    assert words[:7] == ["web-7:4711:9f", "worker", "working", "3", "of", "10", "5"]
    assert words[-2:] == ["2.4.1", "orders"]
    assert second.split()[:7] == ["relay:1:a", "relay", "working", "0", "of", "1", "0"]
    assert bartleby("workers", "list").out.splitlines()[0] == heading
    found, other = bartleby("workers", "--json").document
    assert (found["name"], found["messages"], found["leases"], found["queues"]) == ("web-7:4711:9f", 5, 1, ["orders"])
    assert (other["kind"], other["version"]) == ("relay", None)
    assert any("ago" in line for line in on_a_terminal(dsn, "workers", columns=160))


def test_one_is_told_to_stop(client: Client, bartleby: Run) -> None:
    report(client)
    done = bartleby("workers", "drain", "web-7:4711:9f", *WHY, "--actor", "ana")
    assert (done.code, done.out) == (0, "")
    assert done.err == "worker web-7:4711:9f is told to stop, and hears of it within ten seconds\n"
    assert report(client) == "drain"
    assert bartleby("workers").out.splitlines()[1].split()[2] == "draining"
    assert "was told before" in bartleby("workers", "drain", "web-7:4711:9f", *WHY).err
    [line] = client.audit_log(action="worker.drain")
    assert (line.actor, line.reason, line.subject) == ("ana", "the machine goes", {"worker": "web-7:4711:9f"})
    assert line.request_id is not None
    assert line.request_id.startswith("cli-")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["drain", "nobody", *WHY], 1, "unknown worker: 'nobody'\nhint: bartleby workers lists them"),
        (["drain", "nobody"], 2, "the reason is missing"),
        (["drain"], 2, "Missing argument 'NAME'"),
    ],
)
def test_what_cannot_be_done_is_said(client: Client, bartleby: Run, words: list[str], code: int, said: str) -> None:
    done = bartleby("workers", *words)
    assert done.code == code
    assert said in done.err


def test_what_workers_say_of_themselves_steers_no_terminal(client: Client, bartleby: Run, dsn: str) -> None:
    report(client, HOSTILE, version=HOSTILE, queues=[HOSTILE], host=HOSTILE)
    assert "evil" in bartleby("workers").out
    assert "evil" in bartleby("workers", "--json").out
    assert on_a_terminal(dsn, "workers", columns=200)
