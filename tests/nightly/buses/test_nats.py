"""The nats sink with one real server: streams, subjects, limits, and answers of other clients."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg
from nats.js.api import DiscardPolicy, StreamConfig

from bartleby.errors import BartlebyError
from bartleby.sinks import open_publisher
from bartleby.sinks.nats import NatsPublisher
from bartleby.sinks.publisher import Published
from tests.kit.sinks.conformance import PATIENCE, PATIENT, TIMEOUT, event, events, named, publish_all, stored_ids, why
from tests.kit.sinks.harness_nats import Harness, connected, stored
from tests.kit.sinks.servers import free_port, until

pytestmark = pytest.mark.skipif(Harness.missing() is not None, reason=str(Harness.missing()))


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncIterator[Harness]:
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


async def add_stream(sink: Harness, **settings: Any) -> None:
    async with connected([sink.port]) as client:
        await client.jetstream().add_stream(StreamConfig(**settings))


async def test_missing_stream_is_a_failure_or_created(sink: Harness, publisher: NatsPublisher) -> None:
    strict = opened(sink, create=False)
    reason = why((await strict.publish([event(1)]))[0])
    assert "no stream takes subject bartleby.dead_letter.created" in reason
    await add_stream(sink, name="bartleby", subjects=["bartleby.>"])
    assert named(await strict.publish([event(1)])) == ["Published"]
    await strict.close()
    assert named(await publisher.publish(events(3))) == ["Published"] * 3
    async with connected([sink.port]) as client:
        await client.jetstream().delete_stream("bartleby")
    assert "no stream takes subject" in why((await publisher.publish([event(4)]))[0])
    assert named(await publisher.publish([event(4)])) == ["Published"], "it is created again"
    assert await stored_ids(publisher) == [event(4)["id"]]


async def test_stream_is_created_with_its_subjects(sink: Harness) -> None:
    subjects = ["dead.>", "died.>"]
    publisher = opened(sink, stream="letters", subject="dead.{event}.{queue}.{type}", subjects=subjects)
    plain = {**event(1), "type": "io.bartleby.replay.finished", "data": {}}
    odd = [{**event(number), "data": {"queue": name}} for number, name in enumerate(["a..b", "> >"], 10)]
    assert named(await publisher.publish([plain, event(2), *odd])) == ["Published"] * 4
    async with connected([sink.port]) as client:
        config = (await client.jetstream().stream_info("letters")).config
        found = [(await client.jetstream().get_msg("letters", seq)).subject for seq in (1, 2, 3, 4)]
    assert (config.subjects, config.num_replicas, config.storage) == (subjects, 1, "file")
    assert found == [
        "dead.replay.finished.-.io.bartleby.replay.finished",
        "dead.dead_letter.created.orders.io.bartleby.dead_letter.created",
        "dead.dead_letter.created.a._.b.io.bartleby.dead_letter.created",
        "dead.dead_letter.created.___.io.bartleby.dead_letter.created",
    ]
    await publisher.close()


async def test_limits_of_server_and_stream_refuse_one_event_alone(sink: Harness, publisher: NatsPublisher) -> None:
    await publisher.publish([event(1)])
    fixed = publisher._message(event(2, data_bytes=1)).size - 1
    outcomes = await publisher.publish([event(2, data_bytes=65536 - fixed), event(3, data_bytes=65537 - fixed)])
    assert named(outcomes) == ["Published", "Refused"]
    assert why(outcomes[1]) == "65537 bytes with its headers; the server takes 65536"
    await add_stream(sink, name="small", subjects=["small.>"], max_msg_size=2000)
    small = opened(sink, stream="small", subject="small.{event}")
    outcomes = await small.publish([event(1), event(2, data_bytes=3000), event(3)])
    assert named(outcomes) == ["Published", "Refused", "Published"]
    assert "message size exceeds maximum allowed" in why(outcomes[1])
    await small.close()


async def test_full_stream_is_waited_for(sink: Harness, publisher: NatsPublisher) -> None:
    await add_stream(sink, name="bartleby", subjects=["bartleby.>"], max_msgs=2, discard=DiscardPolicy.NEW)
    outcomes = await publisher.publish(events(3))
    assert named(outcomes) == ["Published", "Published", "Failed"]
    assert "maximum messages exceeded" in why(outcomes[2])
    async with connected([sink.port]) as client:
        await client.jetstream().purge_stream("bartleby")
    assert named(await publisher.publish([event(3)])) == ["Published"]


async def test_answer_that_is_not_from_the_stream_is_a_failure(sink: Harness) -> None:
    await add_stream(sink, name="another", subjects=["bartleby.>"])
    strict, creating = opened(sink, create=False), opened(sink)
    reason = why((await strict.publish([event(1)]))[0])
    assert "expected stream does not match: another stream has this subject" in reason
    assert "overlap" in why((await creating.publish([event(1)]))[0])

    async def answer(message: Msg) -> None:
        await message.respond(b"42")

    answered = opened(sink, create=False, subject="questions.{type}")
    silent = opened(sink, TIMEOUT, create=False, subject="silence.{type}")
    async with connected([sink.port]) as client:
        await client.subscribe("questions.>", cb=answer)
        await client.subscribe("silence.>")
        await client.flush()
        assert "something that is no stream" in why((await answered.publish([event(1)]))[0])
        assert f"not confirmed within {TIMEOUT:g} s" in why((await silent.publish([event(1)]))[0])
    for each in (strict, creating, answered, silent):
        await each.close()


async def test_event_is_stored_once_and_ids_are_all_that_is_stored(sink: Harness, publisher: NatsPublisher) -> None:
    assert await stored_ids(publisher) == [], "there is no stream yet"
    await publish_all(publisher, events(1200))
    (again,) = await publisher.publish([event(1)])
    assert again == Published("bartleby 1 (had it)")
    async with connected([sink.port]) as client:
        await client.jetstream().publish("bartleby.by.another.client", b"{}")
    batch = [event(number, data_bytes=30_000) for number in range(1201, 1501)]  # larger than the buffers
    await publish_all(publisher, batch)
    assert await stored_ids(publisher) == [event(number)["id"] for number in range(1, 1501)]
    assert await stored_ids(publisher, datetime.now(UTC) + timedelta(days=1)) == []
    await sink.stop()
    with pytest.raises(BartlebyError, match="the stream bartleby cannot be read"):
        await stored_ids(publisher)


async def test_servers_are_tried_in_turn_and_named_without_password(sink: Harness) -> None:
    accepted: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
    ports = [free_port(), silent.sockets[0].getsockname()[1], sink.port]
    servers = [f"nats://bob:hush@127.0.0.1:{port}" for port in ports]
    publisher = open_publisher("nats", {"servers": servers, "create": True}, 5.0)
    outcomes = await asyncio.wait_for(publisher.publish(events(10)), PATIENCE)
    assert named(outcomes) == ["Published"] * 10
    await publisher.close()
    await sink.stop()
    reason = why((await publisher.publish([event(1)]))[0])
    assert [f"127.0.0.1:{port}: " in reason for port in ports] == [True] * 3
    assert "hush" not in reason
    silent.close()
    assert accepted
    for writer in accepted:
        writer.close()


async def test_nothing_runs_in_the_background(sink: Harness) -> None:
    before = asyncio.all_tasks()
    publisher = opened(sink)
    await publisher.publish(events(10))
    await sink.stop()
    assert set(named(await publisher.publish(events(10)))) == {"Failed"}

    async def quiet() -> bool:
        return asyncio.all_tasks() <= before

    await until(quiet)
    await sink.start()
    assert len(await stored([sink.port], "bartleby")) == 10, "what failed is not sent later"
    await publisher.close()
