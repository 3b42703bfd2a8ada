"""Kafka in the conformance suite: one mock cluster for all tests, each with a topic of its own."""

import asyncio
import atexit
import contextlib
import functools
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from confluent_kafka import Consumer, TopicPartition

from tests.kit.sinks.conformance import Sink
from tests.kit.sinks.kafka_cluster import Cluster


@functools.cache
def shared() -> Cluster:
    """Return the cluster of this process; between tests it is down."""
    cluster = Cluster()
    cluster.order("down")
    atexit.register(cluster.close)
    return cluster


class Harness(Sink):
    """stop() has the brokers refuse connections; what they hold they keep."""

    kind = "kafka"
    too_large = 100_000
    cannot: ClassVar[Mapping[str, str]] = {
        "kill": "the mock cluster has its records in memory, and new ports each time"
    }
    partitions = 1
    """Order is kept in a partition, and 5 MB of it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._cluster = shared()
        self._topic = self._cluster.topic(self.partitions)

    def options(self) -> dict[str, Any]:
        """Return options with a small limit: the mock cluster itself has none."""
        return {"brokers": self._cluster.brokers, "topic": self._topic, "message.max.bytes": str(self.too_large)}

    async def start(self) -> None:
        self._cluster.order("up")

    async def stop(self) -> None:
        self._cluster.thaw()
        self._cluster.order("down")

    async def hang(self) -> None:
        self._cluster.freeze()

    async def wake(self) -> None:
        self._cluster.thaw()

    async def records(self) -> AsyncIterator[tuple[str, bytes]]:
        for _, value, headers in await asyncio.to_thread(read, self._topic, self.partitions):
            yield headers["ce_id"].decode(), value

    async def count(self) -> int:
        return await asyncio.to_thread(count, self._topic, self.partitions)


class Large(Harness):
    """With room for the events of a long outage."""

    partitions = 64


def count(topic: str, partitions: int) -> int:
    with contextlib.closing(_reader()) as reader:
        return sum(_end(reader, TopicPartition(topic, number, 0)) for number in range(partitions))


def read(topic: str, partitions: int = 1) -> list[tuple[bytes, bytes, dict[str, bytes]]]:
    found: list[Any] = []
    with contextlib.closing(_reader()) as reader:
        for number in range(partitions):
            place = TopicPartition(topic, number, 0)
            end = len(found) + _end(reader, place)
            reader.assign([place])
            while len(found) < end:
                found += reader.consume(end - len(found), timeout=0.2)
    return [(each.key(), each.value(), dict(each.headers())) for each in found]


def _reader() -> Consumer:
    return Consumer({"bootstrap.servers": shared().brokers, "group.id": "reader", "enable.auto.commit": False})


def _end(reader: Consumer, place: TopicPartition) -> int:
    first, end = reader.get_watermark_offsets(place, timeout=10)
    assert first == 0, "the mock cluster has dropped records"
    return int(end)
