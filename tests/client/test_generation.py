"""Generations: in a rolling deployment old workers leave new messages to new ones."""

from typing import Any

import pytest

from bartleby import Bartleby, Client, Message, fetching
from tests.kit.sql import value
from tests.kit.worker import Conn, drain, present, until, working


def made(dsn: str, seen: list[Any], generation: int | None, version: str | None = None) -> Bartleby:
    app = Bartleby(dsn, generation=generation, version=version)

    @app.handler("orders", retry={"max_attempts": 1})
    def handle(message: Message) -> None:
        seen.append((message.payload, message.generation))
        if message.payload == "bad":
            raise ValueError

    app.client.create_queue("orders")
    return app


@pytest.mark.seed("outbox-32")
def test_newer_message_is_released_uncharged_for_a_newer_worker(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_TOO_NEW", 3000.0)
    seen: list[Any] = []
    without = made(dsn, seen, None)
    without.client.send_many("orders", [{"payload": "first", "generation": each} for each in (None, 0, 1)])
    assert drain(without) == {"done": 2, "released": 1}
    without.client.drop_queue("orders", force=True)
    without.client.close()
    seen.clear()
    old, new = made(dsn, seen, 1, "1.0"), made(dsn, seen, 2, "2.0")
    sent = new.send("orders", "bad")
    with working(old) as running:
        until(lambda: running.worker.counts["released"] == 1)
        with Client(dsn) as client:
            client.send("orders", "old", generation=1)
        until(lambda: running.worker.counts["done"] == 1)
        wait = value(conn, "select extract(epoch from run_at - bartleby.clock())::float8 from bartleby.messages")
        assert 0 < wait <= 3000
    found = present(new.client.find_message(sent))
    assert (found.attempts, found.generation, found.state, new.client.attempts(sent)) == (0, 2, "deferred", [])
    conn.execute("update bartleby.deferred set run_at = bartleby.clock()")
    assert drain(new) == {"dead": 1}
    new.client.replay([sent], actor="me", reason="for the old ones", generation=1)
    assert drain(old) == {"dead": 1}
    assert seen == [("old", 1), ("bad", 2), ("bad", 1)]
    assert [each.worker_version for each in old.client.attempts(sent)] == ["2.0", "1.0"]
    old.client.close()
    new.client.close()
