"""The redis sink against a real server: keys, memory, roles, logins and strangers."""

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bartleby.errors import BartlebyError
from bartleby.sinks import open_publisher
from bartleby.sinks.publisher import Failed, Outcome, Published, Refused
from bartleby.sinks.redis import RedisPublisher
from tests.kit.sinks.conformance import PATIENT, TIMEOUT, event, events, named, publish_all
from tests.kit.sinks.harness_redis import Harness
from tests.kit.sinks.servers import free_port
from tests.sinks.conftest import Eventually

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
STREAM = "bartleby:events"


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
async def publisher(sink: Harness) -> AsyncIterator[RedisPublisher]:
    made = opened(sink)
    yield made
    await made.close()


def opened(sink: Harness, timeout: float = PATIENT, **changes: object) -> RedisPublisher:
    made = sink.publisher(timeout, **changes)
    assert isinstance(made, RedisPublisher)
    return made


def why(outcome: Outcome) -> str:
    assert isinstance(outcome, Failed | Refused), outcome
    return outcome.why


async def ask(sink: Harness, *words: object) -> Any:
    async with sink.client() as client:
        return await client.execute_command(*words)  # type: ignore[no-untyped-call]


async def ids(publisher: RedisPublisher, since: datetime = LONG_AGO) -> list[str]:
    """Return what the sink says it has, each once: a batch that took too long is sent again."""
    return list(dict.fromkeys([each async for each in publisher.ids(since, datetime.now(UTC))]))


async def test_an_entry_has_three_fields(sink: Harness, publisher: RedisPublisher) -> None:
    (outcome,) = await publisher.publish([event(1)])
    ((number, fields),) = await ask(sink, "XRANGE", STREAM, "-", "+")
    assert outcome == Published(number.decode())
    assert set(fields) == {b"id", b"type", b"event"}
    assert (fields[b"id"], fields[b"type"]) == (event(1)["id"].encode(), event(1)["type"].encode())


async def test_the_key_can_be_chosen(sink: Harness) -> None:
    publisher = opened(sink, stream="letters")
    await publisher.publish(events(3))
    assert await ask(sink, "XLEN", "letters") == 3
    assert await ids(publisher) == [each["id"] for each in events(3)]
    await publisher.close()


async def test_a_length_is_kept_about(sink: Harness) -> None:
    publisher = opened(sink, maxlen=500)
    await publish_all(publisher, events(3000))
    length = await ask(sink, "XLEN", STREAM)
    assert 500 <= length < 1000
    await publisher.close()


async def test_a_key_that_is_no_stream_is_waited_for(sink: Harness, publisher: RedisPublisher) -> None:
    await ask(sink, "SET", STREAM, "hello")
    outcomes = await publisher.publish(events(2))
    assert named(outcomes) == ["Failed", "Failed"]
    assert "the key bartleby:events holds something that is no stream" in why(outcomes[0])
    with pytest.raises(BartlebyError, match="cannot be read"):
        await ids(publisher)
    await ask(sink, "DEL", STREAM)
    assert named(await publisher.publish(events(2))) == ["Published", "Published"]


async def test_a_full_memory_is_waited_for(sink: Harness, publisher: RedisPublisher) -> None:
    await publisher.publish(events(10))
    await ask(sink, "CONFIG", "SET", "maxmemory-policy", "noeviction")
    await ask(sink, "CONFIG", "SET", "maxmemory", "100kb")
    outcomes = await publisher.publish(events(10, first=11))
    assert set(named(outcomes)) == {"Failed"}
    assert "maxmemory" in why(outcomes[0])
    await ask(sink, "CONFIG", "SET", "maxmemory", "0")
    assert set(named(await publisher.publish(events(10, first=11)))) == {"Published"}
    assert await ids(publisher) == [each["id"] for each in events(20)]


async def test_a_replica_takes_nothing(sink: Harness, publisher: RedisPublisher) -> None:
    await publisher.publish([event(1)])
    await ask(sink, "REPLICAOF", "127.0.0.1", free_port())
    assert "read only replica" in why((await publisher.publish([event(2)]))[0])
    await ask(sink, "REPLICAOF", "NO", "ONE")
    assert named(await publisher.publish([event(2)])) == ["Published"]


def cluster_port() -> int:
    """Return a free port, to which Redis can add 10,000 for the port of the cluster."""
    return next(port for port in iter(free_port, None) if port < 55_000)


async def test_a_key_on_another_server_of_a_cluster(tmp_path: Path, eventually: Eventually) -> None:
    if reason := Harness.missing():
        pytest.skip(reason)
    alone = {"appendonly": "no", "cluster-enabled": "yes"}
    one, two = (Harness(tmp_path, cluster_port(), **alone, **{"cluster-config-file": name}) for name in ("1", "2"))
    try:
        await one.start()
        await two.start()
        await ask(two, "CLUSTER", "ADDSLOTS", *range(16384))
        await ask(one, "CLUSTER", "MEET", "127.0.0.1", two.port)

        async def knows() -> bool:
            return b"cluster_state:ok" in await ask(one, "CLUSTER", "INFO")

        await eventually(knows)
        publisher = opened(one)
        told = why((await publisher.publish([event(1)]))[0])
        assert f"is on another server of a Redis Cluster: {await ask(one, 'CLUSTER', 'KEYSLOT', STREAM)}" in told
        assert f"127.0.0.1:{two.port}" in told
        await publisher.close()
    finally:
        await one.stop()
        await two.stop()


async def test_larger_than_we_want(sink: Harness) -> None:
    publisher = opened(sink, max_bytes=2000)
    outcomes = await publisher.publish([event(1), event(2, data_bytes=2000), event(3)])
    assert named(outcomes) == ["Published", "Refused", "Published"]
    assert "the sink takes 2000" in why(outcomes[1])
    await publisher.close()


async def test_all_are_larger_than_the_server_takes(sink: Harness, publisher: RedisPublisher) -> None:
    assert named(await publisher.publish([event(1, data_bytes=1 << 20)])) == ["Refused"]
    assert named(await publisher.publish([event(2)])) == ["Published"]


async def test_a_batch_larger_than_the_buffers(sink: Harness, publisher: RedisPublisher) -> None:
    batch = [event(number, data_bytes=100_000) for number in range(100)]
    await publish_all(publisher, batch)
    assert list(dict.fromkeys(each.id for each in await sink.arrived())) == [each["id"] for each in batch]


async def test_a_user_who_may_only_add(sink: Harness) -> None:
    await ask(sink, "ACL", "SETUSER", "relay", "on", ">secret", "~bartleby:*", "+xadd")
    publisher = opened(sink, user="relay", password="secret")
    assert named(await publisher.publish(events(3))) == ["Published"] * 3
    with pytest.raises(BartlebyError, match="no permissions"):
        await ids(publisher)
    await ask(sink, "ACL", "SETUSER", "relay", "-xadd")
    assert "no permissions" in why((await publisher.publish([event(4)]))[0])
    await publisher.close()


async def test_a_wrong_password(sink: Harness) -> None:
    await ask(sink, "CONFIG", "SET", "requirepass", "secret")
    for options in ({}, {"password": "wr0ng"}, {"url": f"redis://:wr0ng@127.0.0.1:{sink.port}"}):
        publisher = opened(sink, PATIENT, **options)
        told = why((await publisher.publish([event(1)]))[0])
        assert "uthentication" in told or "password" in told
        assert "wr0ng" not in told
        await publisher.close()
    publisher = opened(sink, password="secret")
    assert named(await publisher.publish([event(1)])) == ["Published"]
    await publisher.close()


async def test_ids_are_all_that_is_there(sink: Harness, publisher: RedisPublisher) -> None:
    assert await ids(publisher) == []
    await publish_all(publisher, events(2500))
    await ask(sink, "XADD", STREAM, "*", "by", "somebody else")
    await publisher.publish([event(2501)])
    assert await ids(publisher) == [each["id"] for each in events(2501)]
    assert await ids(publisher, datetime.now(UTC) + timedelta(days=1)) == []
    assert await ids(publisher, datetime(1970, 1, 1, tzinfo=UTC)) == [each["id"] for each in events(2501)]
    await sink.stop()
    with pytest.raises(BartlebyError, match="the stream bartleby:events cannot be read"):
        await ids(publisher)


async def test_nothing_goes_on_in_the_background(sink: Harness) -> None:
    before = asyncio.all_tasks()
    publisher = opened(sink)
    await publisher.publish(events(10))
    await sink.stop()
    assert set(named(await publisher.publish(events(10)))) == {"Failed"}
    assert asyncio.all_tasks() <= before
    await publisher.close()


@pytest.mark.parametrize("kind", ["nats", "redis"])
@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00" * 100_000, b"+OK\r\nINFO {}\r\n"])
async def test_a_stranger_on_the_port(kind: str, said: bytes) -> None:
    answering: list[asyncio.Task[None]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            answering.append(task)
        writer.write(said)
        await reader.read(100)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"{kind}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    publisher = open_publisher(kind, {"url": url}, TIMEOUT)
    for _ in range(2):
        outcomes = await publisher.publish(events(3))
        assert named(outcomes) == ["Failed"] * 3
        assert why(outcomes[0])
    await publisher.close()
    server.close()
    await server.wait_closed()
    assert answering
    await asyncio.wait(answering, timeout=30)


async def test_two_thousand_events_take_less_than_a_second_of_ours(sink: Harness, publisher: RedisPublisher) -> None:
    await ask(sink, "CONFIG", "SET", "appendfsync", "everysec")
    batches = [events(500, first=1 + 500 * turn) for turn in range(20)]
    await publisher.publish([event(0)])
    begun, worked = time.monotonic(), time.process_time()
    for batch in batches:
        await publish_all(publisher, batch)
    print(f"redis: {10_000 / (time.monotonic() - begun):,.0f} events/s")  # noqa: T201 - shown with -s
    # our own work, because the rate is that of the machine and of whatever else runs on it
    assert 10_000 / (time.process_time() - worked) > 2000
