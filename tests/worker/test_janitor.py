"""Upkeep: one janitor at a time in a database, taken over when it dies, and what it does."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import Bartleby, Client, Failure, Message
from bartleby import janitor as upkeep
from bartleby.config import Settings
from bartleby.janitor import DUTY, Janitor
from tests.kit.worker import Program, Told, lapse, row, sessions, state, until, working

Conn = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def app(dsn: str) -> Iterator[Bartleby]:
    made = Bartleby(dsn)
    made.handler("orders", lease=1)(print)
    yield made
    made.client.close()


def holder(conn: Conn) -> str | None:
    found = row(conn, "select holder from bartleby.duty where name = %s and until > bartleby.clock()", DUTY)
    return None if found is None else str(found)


def test_of_three_workers_one_does_the_upkeep(app: Bartleby, conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_HOLD", 60.0)  # on a busy machine the first round may take longer than the usual three
    with working(app) as one, working(app) as two, working(app) as three:
        names = {each.worker.name: each for each in (one, two, three)}
        first = until(lambda: holder(conn))
        assert first in names
        until(lambda: len(sessions(conn, "janitor")) == 3)
        # all three have asked by now, and asked again; it stays where it is
        asked = row(conn, "select xact_commit from pg_stat_database where datname = current_database()")
        until(lambda: row(conn, "select xact_commit from pg_stat_database where datname = current_database()") > asked)
        assert holder(conn) == first
        names[first].end()
        second = until(lambda: (found := holder(conn)) != first and found)
        assert second in names


def test_a_holder_that_was_killed_is_replaced(app: Bartleby, conn: Conn, dsn: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("from bartleby import Bartleby\napp = Bartleby()\napp.handler('orders')(print)\n")
    app.client.create_queue("orders")
    with Program(dsn, "shop:app", cwd=tmp_path) as victim:
        first = until(lambda: holder(conn))
        with working(app) as heir:
            until(lambda: sessions(conn, "janitor"))
            assert holder(conn) == first
            os.kill(victim.pid, signal.SIGKILL)
            until(lambda: holder(conn) == heir.worker.name)
        victim.end()


def test_a_worker_that_stops_leaves_the_duty_at_once(app: Bartleby, conn: Conn) -> None:
    with working(app) as running:
        until(lambda: holder(conn) == running.worker.name)
    assert holder(conn) is None


async def test_a_janitor_that_is_stopped_while_it_rests_leaves_the_duty_at_once(dsn: str, conn: Conn) -> None:
    janitor = Janitor(Settings(dsn), "me")
    task = asyncio.create_task(janitor.run())
    while holder(conn) != "me" or janitor._link._turn.locked():  # noqa: ASYNC110 - it is in the database
        await asyncio.sleep(0.001)
    janitor.abort()
    task.cancel()
    await asyncio.wait([task])
    assert holder(conn) is None


def test_lapsed_leases_are_taken_back_by_a_worker(app: Bartleby, conn: Conn) -> None:
    done = threading.Event()

    @app.handler("parcels")
    async def handle(message: Message) -> None:
        done.set()

    app.client.create_queue("parcels")
    sent = app.send("parcels", 1)
    with Client(app.settings.dsn) as dying:
        assert dying.claim("parcels", "dying", lease=0.3) is not None
    with Told.listening() as told, working(app):
        assert done.wait(30)
        until(lambda: state(conn, "parcels") == (0, 0, 0, 0))
        (event,) = told.of("lease.reaped")
    assert "worker dying stopped answering" in event.getMessage()
    assert [each.outcome for each in app.client.attempts(sent)] == ["lost"]


async def test_a_round_reaps_turns_and_prunes(dsn: str, conn: Conn) -> None:
    reaped: list[Any] = []
    with Client(dsn) as client:
        client.create_queue("orders", {"retention": "1 second"})
        client.send("orders", 1)
        client.claim("orders", "dying")
        conn.execute("select bartleby.mark_handled('orders', 'orders', 'id:77')")
        conn.execute("update bartleby.handled set handled_at = handled_at - interval '1 day'")
        conn.execute("update bartleby.lease set until = bartleby.clock() - interval '1 s' where not isempty(pending)")
    janitor = Janitor(Settings(dsn), "me", on_reaped=reaped.extend)
    with Told.listening() as told:
        await janitor.round()
        await janitor._leave()
    assert [(each.queue, each.worker, each.messages) for each in reaped] == [("orders", "dying", 1)]
    assert told.of("segments.turned")
    assert [each.getMessage() for each in told.of("pruned")] == ["forgot 1 handled"]
    assert row(conn, "select count(*) from bartleby.handled") == 0


async def test_a_round_adds_up_counts_and_moves_letters_to_their_groups(dsn: str, conn: Conn) -> None:
    with Client(dsn) as client:
        client.create_queue("orders")
        client.send_many("orders", [{"payload": {"country": each}} for each in "deee"])
        lease = client.claim("orders", "tester", limit=4)
        assert lease is not None
        client.fail(lease.id, [Failure(each.position, "KeyError", "'x'", verdict="dead") for each in lease])
        [group] = client.groups()
        client.split_group(group.id, "payload.country", "e", actor="ana", reason="another bug")
        conn.execute("update bartleby.dead_letter set group_id = %s", [group.id])
        conn.execute("update bartleby.failure_group set restless = true where id = %s", [group.id])
        assert row(conn, "select count(*) from bartleby.letter_delta") > 0
        janitor = Janitor(Settings(dsn), "me")
        await janitor.round()
        await janitor.round()  # what regrouping changed
        await janitor._leave()
        assert row(conn, "select count(*) from bartleby.letter_delta") == 0
        assert sorted(each.dead for each in client.groups()) == [1, 3]


async def test_much_that_is_old_goes_in_small_bulks_and_not_all_in_one_round(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_LITTLE", 10)
    monkeypatch.setattr(upkeep, "_REST", 100)
    with Client(dsn) as client:
        client.create_queue("orders", {"retention": "1 second"})
    for number in range(95):
        conn.execute("select bartleby.mark_handled('orders', 'orders', %s)", [f"id:{number}"])
    conn.execute("update bartleby.handled set handled_at = handled_at - interval '1 day'")
    janitor = Janitor(Settings(dsn), "me")
    left = [95]
    with Told.listening() as told:
        while left[-1]:
            await janitor.round()
            left.append(row(conn, "select count(*) from bartleby.handled"))
        await janitor._leave()
    assert len(left) > 3
    forgot = [int(each.getMessage().split()[1]) for each in told.of("pruned")]
    assert sum(forgot) == 95
    assert max(forgot) <= 40


async def test_the_janitor_survives_its_connection(dsn: str, conn: Conn) -> None:
    task = asyncio.create_task(Janitor(Settings(dsn), "me").run())
    try:
        while holder(conn) != "me":  # noqa: ASYNC110 - it is in the database
            await asyncio.sleep(0.01)
        (pid,) = sessions(conn, "janitor")
        conn.execute("select pg_terminate_backend(%s, 5000)", [pid])
        conn.execute("update bartleby.duty set until = bartleby.clock() - interval '1 s'")
        for _ in range(1000):
            if holder(conn) == "me":
                break
            await asyncio.sleep(0.01)
        assert holder(conn) == "me"
        assert sessions(conn, "janitor") != [pid]
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert holder(conn) is None


def test_what_was_taken_back_is_not_lost_when_the_worker_goes_on(app: Bartleby, conn: Conn) -> None:
    """The janitor of a worker takes back that very worker's lease: as any other's."""
    started, go = threading.Event(), threading.Event()

    @app.handler("parcels", lease=1.0)
    def handle(message: Message) -> None:
        if not started.is_set():
            started.set()
            go.wait(60)

    app.client.create_queue("parcels")
    app.send("parcels", 1)
    with working(app) as running:
        assert started.wait(30)
        lapse(conn)
        go.set()
        until(lambda: running.worker.counts["done"] == 1)
    assert state(conn, "parcels") == (0, 0, 0, 0)
