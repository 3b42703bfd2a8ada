"""What every sink does, whatever it is. conformance.py says how one joins."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cloudevents.core.formats.json import JSONFormat

from bartleby.errors import InvalidSettings
from bartleby.sinks import KINDS, open_publisher
from bartleby.sinks.publisher import Published, Publisher, Readable, Refused
from tests.kit.sinks.conformance import (
    PATIENCE,
    PATIENT,
    TIMEOUT,
    Sink,
    bounded,
    event,
    events,
    harness,
    named,
    publish_all,
)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> type[Sink]:
    """The harness of each kind of sink."""
    return harness(request.param)


@pytest.fixture
async def sink(kind: type[Sink], tmp_path: Path) -> AsyncIterator[Sink]:
    """A server of each kind, running."""
    if reason := kind.missing():
        pytest.skip(reason)
    made = kind(tmp_path)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


@pytest.fixture
async def publisher(sink: Sink) -> AsyncIterator[Publisher]:
    """A publisher for it."""
    made = sink.publisher()
    yield made
    await made.close()


@pytest.fixture
async def patient(sink: Sink) -> AsyncIterator[Publisher]:
    """A publisher for it that waits for the answer of a busy machine."""
    made = sink.publisher(PATIENT)
    yield made
    await made.close()


def must_be_able_to(sink: Sink, *deeds: str) -> None:
    for deed in deeds:
        if reason := sink.cannot.get(deed):
            pytest.skip(reason)


async def arrived_ids(sink: Sink) -> list[str]:
    return [each.id for each in await sink.arrived()]


def without_repeats(ids: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(ids))


async def test_one_event_arrives(sink: Sink, patient: Publisher) -> None:
    assert named(await patient.publish([event(1)])) == ["Published"]
    assert await arrived_ids(sink) == [event(1)["id"]]


async def test_no_events_are_no_trouble(publisher: Publisher) -> None:
    assert await bounded(publisher, []) == []


async def test_a_thousand_events_arrive_in_order(sink: Sink, publisher: Publisher) -> None:
    batch = events(1000)
    await publish_all(publisher, batch)
    assert without_repeats(await arrived_ids(sink)) == [each["id"] for each in batch]


async def test_what_arrives_is_a_cloud_event(sink: Sink, publisher: Publisher) -> None:
    sent = event(7)
    await publish_all(publisher, [sent])
    (arrival,) = await sink.arrived()
    if arrival.body is None:
        pytest.skip(f"the {sink.kind} sink has a form of its own")
    assert json.loads(arrival.body) == sent
    read = JSONFormat().read(None, arrival.body)
    assert (read.get_id(), read.get_type(), read.get_subject()) == (sent["id"], sent["type"], sent["subject"])
    assert read.get_extension("sequence") == "1"
    assert read.get_data() == sent["data"]


async def test_the_same_event_again_has_the_same_key(sink: Sink, publisher: Publisher) -> None:
    for batch in ([event(1)], [event(1)], [event(2)]):
        await publish_all(publisher, batch)
    keys: dict[str, set[str]] = {}
    for arrival in await sink.arrived():
        keys.setdefault(arrival.id, set()).add(arrival.key)
    assert set(keys) == {event(1)["id"], event(2)["id"]}
    assert [len(each) for each in keys.values()] == [1, 1]
    assert keys[event(1)["id"]] != keys[event(2)["id"]]


async def test_down_from_the_beginning(kind: type[Sink], tmp_path: Path) -> None:
    if reason := kind.missing():
        pytest.skip(reason)
    sink = kind(tmp_path)
    must_be_able_to(sink, "stop")
    publisher = sink.publisher()
    try:
        assert set(named(await bounded(publisher, events(100)))) == {"Failed"}
        await sink.start()
        await publish_all(publisher, events(100))
        assert without_repeats(await arrived_ids(sink)) == [each["id"] for each in events(100)]
    finally:
        await publisher.close()
        await sink.stop()


async def test_stopped_and_started_again(sink: Sink, publisher: Publisher) -> None:
    must_be_able_to(sink, "stop")
    await publish_all(publisher, events(10))
    await sink.stop()
    outcomes = await bounded(publisher, events(10, first=11))
    assert set(named(outcomes)) == {"Failed"}
    assert all(getattr(each, "why", "") for each in outcomes), "a failure says why"
    assert set(named(await bounded(publisher, events(10, first=11)))) == {"Failed"}
    await sink.start()
    await publish_all(publisher, events(10, first=11))
    found = set(await arrived_ids(sink))
    assert found >= {each["id"] for each in events(10, first=11)}
    if sink.durable:
        assert found == {each["id"] for each in events(20)}


async def test_killed_in_the_middle(sink: Sink, publisher: Publisher) -> None:
    must_be_able_to(sink, "kill")
    await publish_all(publisher, events(1))
    await sink.outlast()
    confirmed, left = {event(1)["id"]}, list[dict[str, Any]]()
    enough, killed = asyncio.Event(), asyncio.Event()

    async def stream() -> None:
        for number in itertools.count(2, 50):
            batch = events(50, first=number)
            outcomes = await bounded(publisher, batch)
            failed = [each for each, answer in zip(batch, outcomes, strict=True) if not isinstance(answer, Published)]
            left.extend(failed)
            confirmed.update(each["id"] for each in batch if each not in failed)
            if len(confirmed) >= 500:
                enough.set()
            if failed and killed.is_set():  # a busy machine may be late before, too
                return

    streaming, waiting = asyncio.create_task(stream()), asyncio.create_task(enough.wait())
    try:
        await asyncio.wait([streaming, waiting], timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert enough.is_set(), streaming
        await sink.kill()
        killed.set()
        await asyncio.wait_for(streaming, 60)
    finally:
        streaming.cancel()
        waiting.cancel()
    await sink.start()
    if sink.durable:
        assert confirmed <= set(await arrived_ids(sink))
    await publish_all(publisher, left)
    assert {each["id"] for each in left} <= set(await arrived_ids(sink))


async def test_accepts_and_never_answers(sink: Sink, publisher: Publisher) -> None:
    must_be_able_to(sink, "hang")
    await publish_all(publisher, events(1))
    await sink.hang()
    try:
        assert set(named(await bounded(publisher, events(20, first=2)))) == {"Failed"}
        assert set(named(await bounded(publisher, events(20, first=2)))) == {"Failed"}
    finally:
        await sink.wake()
    await publish_all(publisher, events(20, first=2))
    assert set(await arrived_ids(sink)) == {each["id"] for each in events(21)}


async def test_never_answers_a_new_connection(sink: Sink) -> None:
    must_be_able_to(sink, "hang")
    await sink.hang()
    publisher = sink.publisher()
    try:
        assert set(named(await bounded(publisher, events(20)))) == {"Failed"}
    finally:
        await sink.wake()
    await publish_all(publisher, events(20))
    await publisher.close()
    assert set(await arrived_ids(sink)) == {each["id"] for each in events(20)}


async def test_more_than_buffers_hold_and_nobody_reads(sink: Sink, publisher: Publisher) -> None:
    must_be_able_to(sink, "hang")
    await publish_all(publisher, events(1))
    await sink.hang()
    try:
        batch = [event(number, data_bytes=40_000) for number in range(2, 602)]
        assert set(named(await bounded(publisher, batch))) == {"Failed"}
    finally:
        await sink.wake()
    await publish_all(publisher, events(1, first=1000))
    assert event(1000)["id"] in await arrived_ids(sink)


async def test_what_it_holds_can_be_read(sink: Sink, publisher: Publisher) -> None:
    if not isinstance(publisher, Readable):
        pytest.skip(f"the {sink.kind} sink cannot be asked what it has")
    await publish_all(publisher, events(1500))
    # from the beginning: a mock of Kafka cannot search by time
    found = {each async for each in publisher.ids(datetime.fromtimestamp(0, UTC), datetime.now(UTC))}
    assert found == {each["id"] for each in events(1500)}


async def test_cancelled_and_used_again(sink: Sink, publisher: Publisher) -> None:
    # each time a bit later: before the connection is made, while it waits for answers
    for turn in range(20):
        publishing = asyncio.create_task(publisher.publish(events(200, first=1 + 200 * turn)))
        for _ in range(turn):
            await asyncio.sleep(0)
        publishing.cancel()
        with suppress(asyncio.CancelledError):
            await publishing
    await publish_all(publisher, events(10, first=100_000))
    last = [each for each in await arrived_ids(sink) if each in {one["id"] for one in events(10, first=100_000)}]
    assert without_repeats(last) == [each["id"] for each in events(10, first=100_000)]


async def test_cancelled_while_nobody_answers(sink: Sink, publisher: Publisher) -> None:
    must_be_able_to(sink, "hang")
    await publish_all(publisher, events(1))
    await sink.hang()
    try:
        publishing = asyncio.create_task(publisher.publish(events(10, first=2)))
        await asyncio.wait([publishing], timeout=TIMEOUT / 4)
        begun = time.monotonic()
        publishing.cancel()
        with suppress(asyncio.CancelledError):
            await publishing
        assert time.monotonic() - begun < PATIENCE
    finally:
        await sink.wake()
    await publish_all(publisher, events(10, first=2))
    assert set(await arrived_ids(sink)) == {each["id"] for each in events(11)}


async def test_closed_twice_and_used_again(sink: Sink) -> None:
    unused = sink.publisher()
    await unused.close()
    publisher = sink.publisher()
    await publish_all(publisher, events(1))
    await publisher.close()
    await publisher.close()
    await publish_all(publisher, events(1, first=2))
    await publisher.close()
    assert set(await arrived_ids(sink)) == {each["id"] for each in events(2)}


async def test_closed_while_the_server_is_gone(sink: Sink) -> None:
    must_be_able_to(sink, "stop")
    publisher = sink.publisher()
    await publish_all(publisher, events(1))
    await sink.stop()
    await publisher.close()


async def test_one_that_is_too_large_is_refused_alone(sink: Sink, patient: Publisher) -> None:
    if sink.too_large is None:
        pytest.skip(f"the {sink.kind} sink takes events of any size")
    batch = [event(1), event(2, data_bytes=sink.too_large), event(3)]
    outcomes = await patient.publish(batch)
    assert named(outcomes) == ["Published", "Refused", "Published"]
    assert isinstance(outcomes[1], Refused)
    assert outcomes[1].why
    assert await arrived_ids(sink) == [event(1)["id"], event(3)["id"]]


def test_an_unknown_option_is_named(kind: type[Sink], tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="unknown option 'colour'") as caught:
        kind(tmp_path).publisher(colour="red")
    assert kind.kind in str(caught.value)
    assert caught.value.hint


def test_a_missing_option_is_named(kind: type[Sink], tmp_path: Path) -> None:
    for name in kind.required:
        options = {key: value for key, value in kind(tmp_path).options().items() if key != name}
        with pytest.raises(InvalidSettings, match=f"'{name}'.*is missing") as caught:
            open_publisher(kind.kind, options, TIMEOUT)
        assert kind.kind in str(caught.value)


def test_a_bad_option_is_named(kind: type[Sink], tmp_path: Path) -> None:
    for name, value in kind.bad_options:
        with pytest.raises(InvalidSettings) as caught:
            kind(tmp_path).publisher(**{name: value})
        assert name in str(caught.value), (name, value)
        assert kind.kind in str(caught.value), (name, value)
