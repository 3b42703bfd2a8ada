"""The relay at its limits: publishers that break their contract, large payloads, slow redaction."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from bartleby import Client, dressing, emitting, publishing
from bartleby.answers import nothing
from bartleby.calls import Call
from bartleby.dressing import Document
from bartleby.sinks.publisher import Event, Outcome
from tests.kit.dead_letters import bury
from tests.kit.relay import Bus, add, die, relaying, sink
from tests.kit.worker import LONG, CapturedLog, Conn, until


async def breaks(how: str, events: Sequence[Event]) -> Any:
    match how:
        case "raises":
            raise RuntimeError("password=geheim")
        case "is cancelled":
            raise asyncio.CancelledError
        case "cancels itself":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        case "hangs":
            await asyncio.Event().wait()
        case "says too little":
            return (await Bus().publish(events))[1:]
        case _:
            pass
    return [None] * len(events)


def test_publisher_that_breaks_its_contract_loses_no_event(
    client: Client, dsn: str, conn: Conn, log: CapturedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Bus):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.how = how

        async def publish(self, events: Sequence[Event]) -> list[Outcome]:
            return await (super().publish(events) if well else breaks(self.how, events))

    monkeypatch.setattr(publishing, "_SLOWEST", 0.1)
    well: list[bool] = []
    ways = ("raises", "is cancelled", "cancels itself", "hangs", "says too little", "says nothing")
    buses = {way.replace(" ", "-"): Broken(way) for way in ways}
    for name in buses:
        add(client, name, types=["dead_letter.*"], timeout=0.01 if name == "hangs" else 60)
    died = die(client, 3)
    with relaying(dsn, buses):
        until(lambda: {each.state for each in client.sinks()} == {"degraded"})
        assert sink(client, "raises").error == "RuntimeError: password=***"
        monkeypatch.setattr(publishing, "_SLOWEST", LONG)
        well.append(True)
        until(lambda: all(each.state == "working" and each.published == 3 for each in client.sinks()))
    for name, bus in buses.items():
        assert sorted(each["data"]["message_id"] for each in bus.events) == died, name
        assert sink(client, name).failures == 3, name
        assert any(each.fields["sink"] == name for each in log.of("sink.broken")), name  # type: ignore[attr-defined]
    assert conn.execute("select from bartleby.attempt a where a.error_type <> 'KeyError'").rowcount == 0


def test_redaction_of_payloads_does_not_block_other_sinks(
    client: Client, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted(document: Document, link: str | None) -> Document:
        seen.append("dressed")
        return usual(document, link)

    async def tick() -> None:
        while not bus.events:
            seen.append("tick")
            await asyncio.sleep(0)

    usual, bus = dressing.dressed, Bus()
    seen: list[str] = []
    monkeypatch.setattr(publishing, "_TURN", -1.0)  # a turn is over after each event
    add(client, types=["dead_letter.*"], include_payload=True)
    with relaying(dsn, {"bus": bus}) as running:
        assert running._loop is not None
        monkeypatch.setattr(dressing, "dressed", noted)
        asyncio.run_coroutine_threadsafe(tick(), running._loop)
        bury(client, ["a", "b", "c", "d"])
        until(lambda: len(bus.events) == 4)
    places = [place for place, what in enumerate(seen) if what == "dressed"]
    assert len(places) == 4
    assert all(after - before > 1 for before, after in itertools.pairwise(places))


def test_large_payloads_are_published_a_few_at_a_time(
    client: Client, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_BYTES", 25_000)
    bus = Bus()
    add(client, types=["dead_letter.*"], include_payload=True)
    bury(client, ["x" * 10_000] * 7)
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).published == 7)
    assert [len(each) for each in bus.tried] == [2, 2, 2, 1]


def test_events_that_cannot_be_read_at_once_are_read_in_parts(
    client: Client, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cloud_events(name: str, references: Sequence[dict[str, Any]]) -> Call[Any]:
        asked.append(len(references))
        if len(references) > 2:  # as one that takes longer than its deadline
            return Call("select pg_terminate_backend(pg_backend_pid())", (), nothing)
        return usual(name, references)

    usual = emitting.cloud_events
    asked: list[int] = []
    monkeypatch.setattr(emitting, "cloud_events", cloud_events)
    bus = Bus()
    add(client, types=["dead_letter.*"])
    died = die(client, 9)
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).published == 9)
    assert max(asked) > 2
    assert [each["data"]["message_id"] for each in bus.events] == died
