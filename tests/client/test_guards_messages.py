"""Messages that were lost, blamed or let everybody wait once."""

import threading
import time
from dataclasses import dataclass

import psycopg
import pytest
from psycopg import errors

from bartleby import AlreadyHandled, Bartleby, Message, Snooze, janitor
from bartleby.config import Settings
from tests.kit.guards import BOTH, Conn, handled_by, make_solo
from tests.kit.worker import Told, drain, row, state, until, working


@BOTH
def test_one_message_that_was_handled_before_does_not_make_its_batch_done(
    app: Bartleby, conn: Conn, dsn: str, awaited: bool
) -> None:
    conn.execute("create table effect (id bigint primary key)")

    def handle(messages: list[Message]) -> None:
        with psycopg.connect(dsn) as mine:
            for message in messages:
                app.mark_handled(message, mine)
                mine.execute("insert into effect values (%s)", [message.id])

    async def handle_awaited(messages: list[Message]) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as mine:
            for message in messages:
                await app.amark_handled(message, mine)
                await mine.execute("insert into effect values (%s)", [message.id])

    def answered(messages: list[Message]) -> dict[int, None]:
        handle(messages)
        return dict.fromkeys(message.id for message in messages)

    async def answered_awaited(messages: list[Message]) -> dict[int, None]:
        await handle_awaited(messages)
        return dict.fromkeys(message.id for message in messages)

    app.handler("orders", batch=10)(answered_awaited if awaited else answered)
    sent = list(app.send_many("orders", [{"payload": number} for number in range(10)]))
    before = sent[4], sent[7]
    for each in before:
        assert row(conn, "select bartleby.mark_handled('orders', 'orders', %s)", f"id:{each}")
    counts = drain(app)
    assert counts["done"] == 10
    assert counts["retried"] == counts["dead"] == 0
    assert {each for (each,) in conn.execute("select id from effect")} == set(sent) - set(before)
    assert row(conn, "select count(*) from bartleby.attempts") == 0
    assert state(conn) == (0, 0, 0, 0)


@BOTH
@pytest.mark.parametrize("error", [AlreadyHandled(), AlreadyHandled("of another queue", message_id=1 << 40)])
def test_already_handled_of_no_message_of_the_batch_fails_it(
    app: Bartleby, conn: Conn, *, awaited: bool, error: AlreadyHandled
) -> None:
    def handle(messages: list[Message]) -> None:
        raise error

    async def handle_awaited(messages: list[Message]) -> None:
        raise error

    app.handler("orders", batch=3, retry={"max_attempts": 1})(handle_awaited if awaited else handle)
    app.send_many("orders", [{"payload": number} for number in range(3)])
    assert drain(app) == {"dead": 3}
    assert "not of a message in it" in row(conn, "select error from bartleby.dead_letters limit 1")


# Messages that have to run alone


@BOTH
def test_a_message_that_snoozed_alone_is_a_neighbour_again(app: Bartleby, conn: Conn, awaited: bool) -> None:
    seen: list[bool] = []

    def handle(message: Message) -> object:
        seen.append(message.solo)
        return Snooze(0.01) if len(seen) < 4 else None

    handled_by(app, handle, awaited=awaited)
    make_solo(app, conn, "orders")
    app.client.resume_queue("orders")
    drain(app)
    assert seen == [True, False, False, False]


def test_a_message_that_could_not_run_alone_still_has_to(app: Bartleby, conn: Conn) -> None:
    """It was put back before it began, so nothing is known of it."""
    go, started, ran = threading.Event(), threading.Event(), threading.Event()

    @app.handler("slow")
    def slow(message: Message) -> None:
        started.set()
        go.wait(60)

    @app.handler("orders")
    async def handle(message: Message) -> None:
        ran.set()

    app.client.create_queue("slow")
    app.send("slow", 1)
    sent = make_solo(app, conn, "orders")
    with working(app) as running:
        assert started.wait(30)
        app.client.resume_queue("orders")
        until(lambda: state(conn)[1] == 1)
        running.stop()
        until(lambda: state(conn)[1] == 0)
        go.set()
        running.join()
    assert not ran.is_set()
    found = app.client.find_message(sent)
    assert found is not None
    assert (found.solo, found.attempts) == (True, 0)
    assert row(conn, "select run_at <= now() from bartleby.deferred")  # another worker may have it at once


def test_many_that_are_put_back_together_are_told_of_in_one_line(app: Bartleby, told: Told) -> None:
    handled_by(app, lambda _: Snooze(3000, "not today"), awaited=True)
    app.send_many("orders", [{"payload": number} for number in range(50)])
    assert drain(app) == {"released": 50}
    lines = told.of("message.released")
    assert sum(record.fields["messages"] for record in lines) == 50  # type: ignore[attr-defined]
    assert len(lines) < 10


# Payloads


@dataclass
class Add:
    left: "Add | Mul | int"


@dataclass
class Mul:
    left: "Add | Mul | int"


def test_a_payload_that_could_be_read_in_a_million_ways_is_refused_soon(app: Bartleby, conn: Conn) -> None:
    @app.handler("orders")
    async def handle(formula: Add) -> None: ...

    payload: object = "no number"
    for _ in range(100):
        payload = {"left": payload}
    app.send("orders", payload)
    began = time.monotonic()
    assert drain(app) == {"dead": 1}
    assert time.monotonic() - began < 15
    assert row(conn, "select reason from bartleby.dead_letters") == "unacceptable"


# Trouble of the database that is the message's own doing


@BOTH
@pytest.mark.parametrize("error", [errors.OutOfMemory, errors.ConfigurationLimitExceeded])
def test_what_a_query_of_the_message_uses_up_is_charged(
    app: Bartleby, conn: Conn, *, awaited: bool, error: type[psycopg.Error]
) -> None:
    def handle(message: Message) -> None:
        raise error("temporary file size exceeds temp_file_limit")

    handled_by(app, handle, awaited=awaited, retry={"max_attempts": 2, "backoff": "none"})
    app.send("orders", 1)
    assert drain(app) == {"retried": 1, "dead": 1}
    assert row(conn, "select count(*) from bartleby.attempts") == 2


# Upkeep


async def test_what_one_prune_leaves_the_next_round_takes(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "_LITTLE", 10)
    monkeypatch.setattr(janitor, "_SPELL", 0)
    conn.execute("select bartleby.create_queue('orders')")
    conn.execute(
        "insert into bartleby.handled (consumer, key, queue, handled_at)"
        " select 'orders', 'id:' || n, q.id, now() - interval '1 year' from bartleby.queue q, generate_series(1, 25) n"
    )
    upkeep = janitor.Janitor(Settings(dsn=dsn), "me")
    try:
        for left in (15, 5, 0, 0):
            await upkeep.round()
            assert row(conn, "select count(*) from bartleby.handled") == left
    finally:
        await upkeep._link.close()
