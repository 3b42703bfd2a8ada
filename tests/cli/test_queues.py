"""`bartleby queues drop`: what is deleted for good is named, counted and asked for."""

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from bartleby import Client
from tests.kit.answering import END_OF_INPUT, INTERRUPT, talk
from tests.kit.burying import bury
from tests.kit.commands import Done

Run = Callable[..., Done]
BEN: dict[str, Any] = {"actor": "ben", "reason": "evidence"}
WHY = ("--reason", "gone")


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        opened.create_queue("orders")
        ids = bury(opened, range(4))
        opened.hold(ids[:1], **BEN)
        opened.discard(ids[1:2], **BEN)
        opened.send("orders", 5)
        opened.send("orders", 6, delay=60)
        yield opened


def names(client: Client) -> list[str]:
    return [each.name for each in client.queues()]


def test_the_name_is_typed_below_what_would_be_deleted(client: Client, dsn: str) -> None:
    done = talk(dsn, "queues", "drop", "orders", "--force", answers=["orders", "it moved"])
    assert done.asked == [
        "Drop 1 queue orders with 2 messages and 4 letters? Type orders to go on: ",
        "Reason (it is recorded): ",
    ]
    assert done.code == 0
    for fact in (
        "messages  1 ready, 1 deferred",
        "letters   3 dead, 1 discarded",
        "on hold   1",
        "deleted   all of that",
    ):
        assert any(line.startswith(fact) for line in done.lines), done.text
    assert names(client) == []
    [line] = client.audit_log(action="queue.drop")
    assert line.reason == "it moved"


@pytest.mark.parametrize("answer", ["y", "", "order", END_OF_INPUT, INTERRUPT])
def test_no_other_answer_drops_it(client: Client, dsn: str, answer: str) -> None:
    done = talk(dsn, "queues", "drop", "orders", "--force", *WHY, answers=[answer])
    assert done.code == 1
    assert "nothing was changed" in done.text
    assert names(client) == ["orders"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 1, "queue orders still has messages or letters"),
        (["--yes"], 1, "queue orders still has messages or letters"),
        (["--force"], 2, "the reason is missing"),
        (["--force", "--yes"], 2, "the reason is missing"),
        (["--force", *WHY], 1, "no terminal to ask on"),
        (["--force", "--reason", " ", "--yes"], 2, "the reason is empty"),
    ],
)
def test_what_is_refused_says_why(client: Client, bartleby: Run, words: list[str], *, code: int, said: str) -> None:
    done = bartleby("queues", "drop", "orders", *words)
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert names(client) == ["orders"]


def test_a_script_says_yes(client: Client, bartleby: Run) -> None:
    assert bartleby("queues", "drop", "nowhere", "--force", *WHY, "--yes").err.startswith("bartleby: unknown queue")
    assert bartleby("queues", "drop", "orders", "--force", *WHY, "--yes").code == 0
    assert names(client) == []


def test_what_somebody_uses_is_not_told_to_be_forced(client: Client, bartleby: Run, dsn: str) -> None:
    with psycopg.connect(dsn) as sender:
        sender.execute("select bartleby.send('orders', '1')")
        done = bartleby("queues", "drop", "orders", "--force", *WHY, "--yes")
    assert done.code == 1
    assert "in use by an open transaction" in done.err
    assert "--force" not in done.err
