"""Kafka in the conformance suite: one mock cluster for all tests, each with a topic of its own."""

import asyncio
import atexit
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

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._cluster = shared()
        self._topic = self._cluster.topic(partitions=1)  # order is kept in a partition

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
        for _, value, headers in await asyncio.to_thread(read, self._topic):
            yield headers["ce_id"].decode(), value


def read(topic: str) -> list[tuple[bytes, bytes, dict[str, bytes]]]:
    """Return key, value and headers of each record of the first partition."""
    reader = Consumer({"bootstrap.servers": shared().brokers, "group.id": "reader", "enable.auto.commit": False})
    place = TopicPartition(topic, 0, 0)
    found: list[Any] = []
    try:
        _, end = reader.get_watermark_offsets(place, timeout=10)
        reader.assign([place])
        while len(found) < end:
            found += reader.consume(end - len(found), timeout=0.2)
    finally:
        reader.close()
    return [(each.key(), each.value(), dict(each.headers())) for each in found]
