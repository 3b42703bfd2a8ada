"""Generations: in a rolling deployment old workers leave new messages to new ones."""

from collections.abc import Iterator
from typing import Any

import pytest

from bartleby import Bartleby, Client, Message
from tests.kit.worker import Conn, drain, present, row, until, working


@pytest.fixture
def seen() -> list[tuple[object, int | None]]:
    return []


@pytest.fixture
def make(dsn: str, seen: list[tuple[object, int | None]]) -> Iterator[Any]:
    made: list[Bartleby] = []

    def make_app(generation: int | None, **options: Any) -> Bartleby:
        app = Bartleby(dsn, generation=generation, **options)
        made.append(app)

        @app.handler("orders", retry={"max_attempts": 1})
        def handle(message: Message) -> None:
            seen.append((message.payload, message.generation))
            if message.payload == "bad":
                raise ValueError

        app.client.create_queue("orders")
        return app

    yield make_app
    for app in made:
        app.client.close()


def test_worker_runs_messages_up_to_its_generation(make: Any, seen: list[tuple[object, int | None]]) -> None:
    rows: list[tuple[int | None, list[int | None]]] = [(None, [None, 0]), (0, [None, 0]), (3, [None, 0, 1, 3])]
    for worker, runs in rows:
        app = make(worker)
        app.client.send_many("orders", [{"payload": 1, "generation": each} for each in (None, 0, 1, 3, 4)])
        assert drain(app) == {"done": len(runs), "released": 5 - len(runs)}
        assert sorted((each for _, each in seen), key=str) == sorted(runs, key=str), worker
        seen.clear()
        app.client.drop_queue("orders", force=True)


def test_app_stamps_its_generation_on_what_it_sends(make: Any, conn: Conn) -> None:
    app = make(5)
    app.send("orders", 1)
    app.send("orders", 1, generation=2)
    app.send_many("orders", [{"payload": 1}, {"payload": 1, "generation": 3}])
    found = conn.execute("select generation from bartleby.messages order by message_id").fetchall()
    assert [each for (each,) in found] == [5, 2, 5, 3]


@pytest.mark.seed("outbox-32")
def test_newer_message_is_released_uncharged_for_a_newer_worker(
    make: Any, conn: Conn, seen: list[tuple[object, int | None]]
) -> None:
    old, new = make(1, version="1.0"), make(2, version="2.0")
    sent = new.send("orders", "bad")
    with working(old) as running:
        until(lambda: running.worker.counts["released"] == 1)
        with Client(old.settings.dsn) as client:
            client.send("orders", "old", generation=1)
        until(lambda: running.worker.counts["done"] == 1)
        wait = row(conn, "select extract(epoch from run_at - bartleby.clock())::float8 from bartleby.messages")
        assert 0 < wait < 61  # neither in a tight loop nor for long
    found = present(new.client.find_message(sent))
    assert (found.attempts, found.generation, found.state, new.client.attempts(sent)) == (0, 2, "deferred", [])
    conn.execute("update bartleby.deferred set run_at = bartleby.clock()")
    assert drain(new) == {"dead": 1}
    new.client.replay([sent], actor="me", reason="for the old ones", generation=1)
    assert drain(old) == {"dead": 1}
    assert seen == [("old", 1), ("bad", 2), ("bad", 1)]
    assert [each.worker_version for each in old.client.attempts(sent)] == ["2.0", "1.0"]
