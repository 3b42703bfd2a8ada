"""The nats sink against one real server: what streams, subjects, limits and strangers make of an event."""

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg
from nats.js.api import DiscardPolicy, StreamConfig

from bartleby.errors import BartlebyError, InvalidSettings
from bartleby.sinks import open_publisher
from bartleby.sinks.nats import NatsPublisher
from bartleby.sinks.publisher import Failed, Outcome, Published, Readable, Refused
from tests.kit.sinks.conformance import PATIENCE, PATIENT, TIMEOUT, event, events, named, publish_all
from tests.kit.sinks.harness_nats import Harness, connected, stored
from tests.kit.sinks.servers import free_port
from tests.sinks.conftest import Eventually

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncIterator[Harness]:
    if reason := Harness.missing():
        pytest.skip(reason)
    made = Harness(tmp_path)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


@pytest.fixture
async def publisher(sink: Harness) -> AsyncIterator[NatsPublisher]:
    made = opened(sink)
    yield made
    await made.close()


def opened(sink: Harness, timeout: float = PATIENT, **changes: object) -> NatsPublisher:
    made = sink.publisher(timeout, **changes)
    assert isinstance(made, NatsPublisher)
    return made


def why(outcome: Outcome) -> str:
    assert isinstance(outcome, Failed | Refused), outcome
    return outcome.why


async def ids(readable: Readable, since: datetime = LONG_AGO) -> list[str]:
    return [each async for each in readable.ids(since, datetime.now(UTC))]


async def add_stream(sink: Harness, **settings: Any) -> None:
    async with connected([sink.port]) as client:
        await client.jetstream().add_stream(StreamConfig(**settings))


async def test_a_stream_that_must_exist_and_does_not(sink: Harness) -> None:
    publisher = opened(sink, create=False)
    (outcome,) = await publisher.publish([event(1)])
    assert isinstance(outcome, Failed)
    assert "no stream takes subject bartleby.dead_letter.created" in outcome.why
    await add_stream(sink, name="bartleby", subjects=["bartleby.>"])
    assert named(await publisher.publish([event(1)])) == ["Published"]
    await publisher.close()


async def test_a_stream_is_made_as_it_is_wanted(sink: Harness) -> None:
    publisher = opened(sink, stream="letters", subject="dead.{queue}.{type}", subjects=["dead.>", "died.>"])
    assert named(await publisher.publish([event(1)])) == ["Published"]
    async with connected([sink.port]) as client:
        config = (await client.jetstream().stream_info("letters")).config
    assert (config.subjects, config.num_replicas, config.storage) == (["dead.>", "died.>"], 1, "file")
    await publisher.close()


async def test_a_stream_deleted_behind_our_back_is_made_again(sink: Harness, publisher: NatsPublisher) -> None:
    assert named(await publisher.publish(events(3))) == ["Published"] * 3
    async with connected([sink.port]) as client:
        await client.jetstream().delete_stream("bartleby")
    assert "no stream takes subject" in why((await publisher.publish([event(4)]))[0])
    assert named(await publisher.publish([event(4)])) == ["Published"]
    assert await ids(publisher) == [event(4)["id"]], "what is missing can be seen"


async def test_subjects_come_from_the_event(sink: Harness) -> None:
    publisher = opened(sink, subject="dead.{event}.{queue}.{type}")
    plain = {**event(1), "type": "io.bartleby.replay.finished", "data": {}}
    assert named(await publisher.publish([plain, event(2)])) == ["Published"] * 2
    async with connected([sink.port]) as client:
        subjects = [(await client.jetstream().get_msg("bartleby", seq)).subject for seq in (1, 2)]
    assert subjects == [
        "dead.replay.finished.-.io.bartleby.replay.finished",
        "dead.dead_letter.created.orders.io.bartleby.dead_letter.created",
    ]
    await publisher.close()


async def test_every_queue_has_a_subject(sink: Harness) -> None:
    publisher = opened(sink, subject="dead.{queue}")
    names = ["a.b", "a..b", "a.", "*", "> >"]
    batch = [{**event(number), "data": {"queue": name}} for number, name in enumerate(names)]
    assert set(named(await publisher.publish(batch))) == {"Published"}
    async with connected([sink.port]) as client:
        subjects = [(await client.jetstream().get_msg("bartleby", seq)).subject for seq in range(1, 6)]
    assert subjects == ["dead.a.b", "dead.a._.b", "dead.a._", "dead._", "dead.___"]
    await publisher.close()


async def test_the_subjects_of_a_stream_cannot_be_guessed_from_everything(sink: Harness) -> None:
    with pytest.raises(InvalidSettings, match="subjects"):
        opened(sink, subject="{queue}.{type}")
    await opened(sink, subject="{queue}.{type}", subjects=["orders.>"]).close()


async def test_the_limit_of_the_server_counts_headers(publisher: NatsPublisher) -> None:
    await publisher.publish([event(1)])
    fixed = publisher._message(event(2, data_bytes=1)).size - 1
    outcomes = await publisher.publish([event(2, data_bytes=65536 - fixed), event(3, data_bytes=65537 - fixed)])
    assert named(outcomes) == ["Published", "Refused"]
    assert why(outcomes[1]) == "65537 bytes with its headers; the server takes 65536"
    assert named(await publisher.publish([event(4)])) == ["Published"]


async def test_the_limit_of_the_stream_refuses_one_event_alone(sink: Harness, publisher: NatsPublisher) -> None:
    await add_stream(sink, name="bartleby", subjects=["bartleby.>"], max_msg_size=2000)
    outcomes = await publisher.publish([event(1), event(2, data_bytes=3000), event(3)])
    assert named(outcomes) == ["Published", "Refused", "Published"]
    assert "message size exceeds maximum allowed" in why(outcomes[1])


async def test_a_full_stream_is_waited_for(sink: Harness, publisher: NatsPublisher) -> None:
    await add_stream(sink, name="bartleby", subjects=["bartleby.>"], max_msgs=2, discard=DiscardPolicy.NEW)
    outcomes = await publisher.publish(events(3))
    assert named(outcomes) == ["Published", "Published", "Failed"]
    assert "maximum messages exceeded" in why(outcomes[2])
    async with connected([sink.port]) as client:
        await client.jetstream().purge_stream("bartleby")
    assert named(await publisher.publish([event(3)])) == ["Published"]


async def test_a_subject_that_another_stream_takes(sink: Harness) -> None:
    await add_stream(sink, name="somebody", subjects=["bartleby.>"])
    publisher = opened(sink, create=False)
    assert "expected stream does not match: another stream has this subject" in why(
        (await publisher.publish([event(1)]))[0]
    )
    creating = opened(sink)
    assert "overlap" in why((await creating.publish([event(1)]))[0])
    await publisher.close()
    await creating.close()


async def test_an_answer_of_something_that_is_no_stream(sink: Harness) -> None:
    publisher = opened(sink, create=False, subject="questions.{type}")

    async def answer(message: Msg) -> None:
        await message.respond(b"42")

    async with connected([sink.port]) as client:
        await client.subscribe("questions.>", cb=answer)
        await client.flush()
        assert "something that is no stream" in why((await publisher.publish([event(1)]))[0])
    await publisher.close()


async def test_a_subscriber_that_never_answers(sink: Harness) -> None:
    publisher = opened(sink, TIMEOUT, create=False, subject="questions.{type}")
    async with connected([sink.port]) as client:
        await client.subscribe("questions.>")
        await client.flush()
        assert f"not confirmed within {TIMEOUT:g} s" in why((await publisher.publish([event(1)]))[0])
    await publisher.close()


async def test_the_same_event_again_is_stored_once(sink: Harness, publisher: NatsPublisher) -> None:
    await publisher.publish([event(1)])
    (again,) = await publisher.publish([event(1)])
    assert again == Published("bartleby 1 (had it)")
    assert len(await sink.arrived()) == 1


async def test_a_batch_larger_than_the_buffers(sink: Harness, publisher: NatsPublisher) -> None:
    batch = [event(number, data_bytes=30_000) for number in range(300)]
    await publish_all(publisher, batch)
    assert [each.id for each in await sink.arrived()] == [each["id"] for each in batch]


async def test_ids_are_all_that_is_there(sink: Harness, publisher: NatsPublisher) -> None:
    await publish_all(publisher, events(1200))
    async with connected([sink.port]) as client:
        await client.jetstream().publish("bartleby.by.somebody.else", b"{}")
    await publisher.publish([event(1201)])
    assert await ids(publisher) == [each["id"] for each in events(1201)]
    assert await ids(publisher, datetime.now(UTC) + timedelta(days=1)) == []


async def test_ids_of_an_empty_stream_and_of_none(sink: Harness, publisher: NatsPublisher) -> None:
    assert await ids(publisher) == [], "a stream that is gone has nothing"
    await add_stream(sink, name="bartleby", subjects=["bartleby.>"])
    assert await ids(publisher) == []
    await sink.stop()
    with pytest.raises(BartlebyError, match="the stream bartleby cannot be read"):
        await ids(publisher)


async def test_servers_are_tried_in_turn(sink: Harness) -> None:
    accepted: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
    ports = [free_port(), silent.sockets[0].getsockname()[1], sink.port]
    servers = [f"nats://127.0.0.1:{port}" for port in ports]
    publisher = open_publisher("nats", {"servers": servers, "create": True}, PATIENCE)
    begun = time.monotonic()
    assert named(await publisher.publish(events(10))) == ["Published"] * 10
    assert time.monotonic() - begun < 2 * PATIENCE
    await publisher.close()
    silent.close()
    assert accepted
    for writer in accepted:
        writer.close()


async def test_a_failure_names_each_server_and_no_password(sink: Harness) -> None:
    await sink.stop()
    other = free_port()
    servers = [f"nats://bob:hush@127.0.0.1:{port}" for port in (sink.port, other)]
    publisher = open_publisher("nats", {"servers": servers}, TIMEOUT)
    told = why((await publisher.publish([event(1)]))[0])
    assert f"127.0.0.1:{sink.port}: " in told
    assert f"127.0.0.1:{other}: " in told
    assert "hush" not in told
    await publisher.close()


async def test_nothing_goes_on_in_the_background(sink: Harness, eventually: Eventually) -> None:
    before = asyncio.all_tasks()
    publisher = opened(sink)
    await publisher.publish(events(10))
    await sink.stop()
    assert set(named(await publisher.publish(events(10)))) == {"Failed"}

    async def quiet() -> bool:
        return asyncio.all_tasks() <= before

    await eventually(quiet)
    await sink.start()
    assert len(await stored([sink.port], "bartleby")) == 10, "what failed is not sent later"
    await publisher.close()


async def test_two_thousand_events_take_less_than_a_second_of_ours(sink: Harness, publisher: NatsPublisher) -> None:
    batches = [events(500, first=1 + 500 * turn) for turn in range(20)]
    await publisher.publish([event(0)])
    begun, worked = time.monotonic(), time.process_time()
    for batch in batches:
        await publish_all(publisher, batch)
    print(f"nats: {10_000 / (time.monotonic() - begun):,.0f} events/s")  # noqa: T201 - shown with -s
    # our own work, because the rate is that of the machine and of whatever else runs on it
    assert 10_000 / (time.process_time() - worked) > 2000
    async with connected([sink.port]) as client:
        assert (await client.jetstream().stream_info("bartleby")).state.messages == 10_001
