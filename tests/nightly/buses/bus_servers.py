"""Buses for the drills: the harnesses of their sinks (tests/kit/sinks), and a Kafka for many events."""

import asyncio
import functools
import json
import logging
import threading
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from confluent_kafka import Consumer, TopicPartition

from tests.kit.sinks import harness_kafka, harness_nats, harness_rabbitmq, harness_redis, harness_webhook
from tests.kit.sinks.conformance import Sink

T = TypeVar("T")
SILENT = logging.getLogger("a reader of Kafka")
SILENT.setLevel(logging.CRITICAL + 1)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Await something in the event loop of a thread, which lives as long as the servers that are started there."""
    return asyncio.run_coroutine_threadsafe(work, _loop()).result(900)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


class Kafka(harness_kafka.Harness):
    """The mock cluster keeps 5 MB of a partition, so it is read all the time, and little of an event is kept."""

    _PARTITIONS = 16

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._topic = self._cluster.topic(self._PARTITIONS)
        self._places = [TopicPartition(self._topic, number, 0) for number in range(self._PARTITIONS)]
        self._reader = self._consumer()
        self._reader.assign(self._places)
        self._thread = threading.Thread()
        self._up = False
        self._found: list[bytes] = []
        self._news = threading.Condition()

    async def start(self) -> None:
        await super().start()
        self._up = True
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    async def stop(self) -> None:
        if self._up:
            self._up = False
            await asyncio.to_thread(self._thread.join)
        await super().stop()

    async def records(self) -> AsyncIterator[tuple[str, bytes]]:
        await asyncio.to_thread(self._read_to, await self.count())
        for body in self._found:
            yield "", body

    async def count(self) -> int:
        return await asyncio.to_thread(self._ends)

    def _ends(self) -> int:
        asker = self._consumer()
        try:
            return sum(asker.get_watermark_offsets(place, timeout=10)[1] for place in self._places)
        finally:
            asker.close()

    def _read(self) -> None:
        while self._up:
            bodies = [each.value() for each in self._reader.consume(500, 0.1) if not each.error()]
            with self._news:
                self._found += [brief(body) for body in bodies if body]
                self._news.notify_all()

    def _read_to(self, end: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: len(self._found) >= end, 60), f"{len(self._found)} of {end}"

    def _consumer(self) -> Consumer:
        settings = {"bootstrap.servers": self._cluster.brokers, "group.id": "reader", "enable.auto.commit": False}
        return Consumer({**settings, "reconnect.backoff.max.ms": 200}, logger=SILENT)


def brief(body: bytes) -> bytes:
    """Return the part of an event that identifies it."""
    event = json.loads(body)
    return json.dumps({name: event[name] for name in ("id", "subject", "sequence")}).encode()


BUSES: dict[str, type[Sink]] = {
    "nats": harness_nats.Harness,
    "nats of three": harness_nats.Cluster,
    "redis": harness_redis.Harness,
    "rabbitmq": harness_rabbitmq.Harness,
    "kafka": Kafka,
    "webhook": harness_webhook.Harness,
}
