"""Upkeep: one janitor at a time in a database, replaced when it dies, and the work of a round."""

import asyncio
import signal
from typing import Any

import pytest

from bartleby import Bartleby, Client, Failure
from bartleby import janitor as upkeep
from bartleby.config import Settings
from bartleby.janitor import DUTY, Janitor
from bartleby.surfaces.cli import upkeep as command
from tests.kit.sql import column, value
from tests.kit.worker import CapturedLog, Conn, present, sessions, until, working


def holder(conn: Conn) -> str | None:
    found = column(conn, "select holder from bartleby.duty where name = %s and until > bartleby.clock()", DUTY)
    return str(found[0]) if found else None


def test_one_of_three_workers_has_the_duty_and_leaves_it_when_it_stops(app: Bartleby, conn: Conn) -> None:
    app.handler("orders")(print)
    with working(app) as one, working(app) as two, working(app) as three:
        names = {each.worker.name: each for each in (one, two, three)}
        first = present(until(lambda: holder(conn)))
        until(lambda: len(sessions(conn, "janitor")) == 3)
        assert holder(conn) == first
        names[first].end()
        second = until(lambda: (found := holder(conn)) != first and found)
        assert second in names


async def test_command_leaves_both_duties_on_sigterm(dsn: str, conn: Conn) -> None:
    def held() -> Any:
        return value(conn, "select count(*) from bartleby.duty where until > bartleby.clock()")

    running = asyncio.create_task(command._run(Settings(dsn), "me"))
    await asyncio.to_thread(until, lambda: held() == 2)
    signal.raise_signal(signal.SIGTERM)
    await running
    assert held() == 0


@pytest.mark.seed("pgmq-47")
async def test_round_reaps_turns_tallies_regroups_and_prunes(dsn: str, conn: Conn, log: CapturedLog) -> None:
    reaped: list[Any] = []
    with Client(dsn) as client:
        client.create_queue("orders", {"retention": "1 hour"})
        client.send_many("orders", [{"payload": {"country": each}} for each in "deee"])
        lease = present(client.claim("orders", "tester", limit=4))
        client.fail(lease.id, [Failure(each.position, "KeyError", "'x'", verdict="dead") for each in lease])
        [group] = client.groups()
        client.split_group(group.id, "payload.country", "e", actor="ana", reason="another bug")
        conn.execute("update bartleby.dead_letter set group_id = %s", [group.id])
        conn.execute("update bartleby.failure_group set restless = true where id = %s", [group.id])
        client.send("orders", 1)
        client.claim("orders", "dying")
        conn.execute("update bartleby.lease set until = bartleby.clock() - interval '1 s' where not isempty(pending)")
        conn.execute("select bartleby.mark_handled('orders', 'orders', 'id:77')")
        conn.execute("update bartleby.handled set handled_at = handled_at - interval '1 day'")
        janitor = Janitor(Settings(dsn), "me", on_reaped=reaped.extend)
        await janitor.round()
        await janitor.round()  # adds up what regrouping changed
        await janitor._leave()
        assert sorted(each.dead for each in client.groups()) == [1, 3]
    assert [(each.queue, each.worker, each.messages) for each in reaped] == [("orders", "dying", 1)]
    assert log.of("segments.turned")
    assert "forgot 1 handled" in [each.getMessage() for each in log.of("pruned")]
    assert value(conn, "select count(*) from bartleby.handled") == 0
    assert value(conn, "select count(*) from bartleby.letter_delta") == 0


async def test_prune_goes_on_in_the_next_round_if_much_is_old(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_LITTLE", 10)
    monkeypatch.setattr(upkeep, "_SPELL", -1.0)  # the time for it is always over
    with Client(dsn) as client:
        client.create_queue("orders", {"retention": "1 second"})
    for number in range(35):
        conn.execute("select bartleby.mark_handled('orders', 'orders', %s)", [f"id:{number}"])
    conn.execute("update bartleby.handled set handled_at = handled_at - interval '1 day'")
    janitor = Janitor(Settings(dsn), "me")
    left = []
    for _ in range(4):
        await janitor.round()
        left.append(value(conn, "select count(*) from bartleby.handled"))
    await janitor._leave()
    assert left == [25, 15, 5, 0]
