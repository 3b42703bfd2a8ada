"""Kafka in the conformance suite: one mock cluster for all tests, each with a topic of its own."""

import asyncio
import atexit
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from confluent_kafka import Consumer, TopicPartition

from tests.kit.sinks.conformance import Arrival, Sink
from tests.kit.sinks.kafka_cluster import Cluster


@functools.cache
def shared() -> Cluster:
    """Return the cluster of this process; between tests it is down."""
    cluster = Cluster()
    cluster.down()
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
        self._topic = shared().topic(partitions=1)  # order is kept in a partition

    def options(self) -> dict[str, Any]:
        """Return options with a small limit: the mock cluster itself has none."""
        return {"brokers": shared().brokers, "topic": self._topic, "message.max.bytes": str(self.too_large)}

    async def start(self) -> None:
        shared().up()

    async def stop(self) -> None:
        shared().thaw()
        shared().down()

    async def hang(self) -> None:
        shared().freeze()

    async def wake(self) -> None:
        shared().thaw()

    async def arrived(self) -> list[Arrival]:
        return [
            Arrival(json.loads(value)["id"], dict(headers)["ce_id"].decode(), value)
            for _, value, headers in await asyncio.to_thread(read, self._topic)
        ]


def read(topic: str, partition: int = 0) -> list[tuple[bytes, bytes, list[tuple[str, bytes]]]]:
    """Return key, value and headers of each record of a partition."""
    reader = Consumer({"bootstrap.servers": shared().brokers, "group.id": "reader", "enable.auto.commit": False})
    place = TopicPartition(topic, partition, 0)
    found: list[Any] = []
    try:
        _, end = reader.get_watermark_offsets(place, timeout=10)
        reader.assign([place])
        while len(found) < end:
            found += [
                (each.key(), each.value(), each.headers()) for each in reader.consume(end - len(found), timeout=0.2)
            ]
    finally:
        reader.close()
    return found
