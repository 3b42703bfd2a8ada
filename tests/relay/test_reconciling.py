"""The reconciler: events that a bus acknowledged and lost are sent again, and no others."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bartleby import AsyncClient, Client
from bartleby.errors import UnknownSink
from bartleby.events import Sink
from bartleby.reconciling import Found, Reconciler
from bartleby.sinks.publisher import Published, Refused
from tests.kit.relay import ANA, Bus, add, die, relaying, sink
from tests.kit.worker import Conn, until

DAY = timedelta(days=1)


class Shelf(Bus):
    async def ids(self, since: datetime, until: datetime) -> AsyncIterator[str]:
        assert since < until
        yield "of another program"
        yield "00000000.x"
        for each in self.events:
            yield each["id"]


async def look(dsn: str, bus: Any, *, again: bool = False) -> Found:
    now = datetime.now(UTC)
    async with AsyncClient(dsn) as opened:
        reconciler = Reconciler(opened, "bus")
        found = await reconciler.missing(bus, now - DAY, now + DAY)
        if again:
            assert await reconciler.send_again(found, **ANA) == found.events
        return found


def test_only_missing_events_are_sent_again(client: Client, dsn: str) -> None:
    bus = Shelf()
    add(client, types=["dead_letter.*", "group.opened"])
    with relaying(dsn, {"bus": bus}):
        died = die(client, 5)
        client.discard(died, **ANA)  # one row for five
        until(lambda: sink(client).waiting == 0)
        everything = list(bus.events)
        assert len(everything) == 11
        assert asyncio.run(look(dsn, bus)).events == 0
        lost = {everything[0]["id"], everything[3]["id"], bus.of("dead_letter.discarded")[2]["id"]}
        bus.events = [each for each in bus.events if each["id"] not in lost]
        found = asyncio.run(look(dsn, bus, again=True))
        assert (found.looked, found.events) == (11, 3)
        assert [each for each in found.references() if "ordinals" in each] == [
            {"event": int(everything[7]["id"].split(".")[1]), "ordinals": [3]}
        ]
        until(lambda: len(bus.events) == 11)
        assert asyncio.run(look(dsn, bus)).events == 0
    by_id = {each["id"]: each for each in everything}
    assert {each["id"]: each for each in bus.events} == by_id
    [line] = client.audit_log(action="sink.emit_again")
    assert line.actor == "ana"


def test_refused_waiting_and_later_events_are_not_missing(
    client: Client, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def while_an_event_comes(self: Reconciler) -> Sink:
        found = await usual(self)
        died.extend(die(client, 1))  # nothing has waited
        return found

    died: list[int] = []
    usual = Reconciler.sink
    bus = Shelf(lambda event: Refused("no") if event["sequence"] == "2" else Published())
    with pytest.raises(UnknownSink):
        asyncio.run(look(dsn, bus))
    add(client, types=["dead_letter.*"])
    with monkeypatch.context() as patch:
        patch.setattr(Reconciler, "sink", while_an_event_comes)
        assert asyncio.run(look(dsn, bus)).events == 0
    died += die(client, 2)
    found = asyncio.run(look(dsn, bus))
    assert (found.looked, found.events, sink(client).waiting) == (0, 0, 3)
    with relaying(dsn, {"bus": bus}):
        client.discard(died[:2], **ANA)
        until(lambda: sink(client).waiting == 0 and sink(client).refused == 2)
        found = asyncio.run(look(dsn, bus))
    assert (found.looked, found.events, len(bus.events)) == (5, 0, 3)


def test_event_that_was_sent_again_and_waits_is_not_sent_once_more(client: Client, dsn: str, conn: Conn) -> None:
    bus = Shelf()
    add(client, types=["dead_letter.*"])
    with relaying(dsn, {"bus": bus}):
        die(client, 5)
        until(lambda: sink(client).waiting == 0)
    conn.execute("update bartleby.event set created_at = created_at - interval '1 hour'")
    bus.events.clear()
    assert asyncio.run(look(dsn, bus, again=True)).events == 5
    found = asyncio.run(look(dsn, bus, again=True))
    assert (found.looked, found.events, sink(client).waiting) == (0, 0, 5)
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).waiting == 0)
    bus.events.pop()
    assert asyncio.run(look(dsn, bus, again=True)).events == 1
