"""Buses for the drills: real servers that are stopped, killed and frozen, and read at the end.

Each is the harness of its sink (tests/kit/sinks), with a count and a reader that keeps little of many events.
"""

import asyncio
import base64
import contextlib
import json
import logging
import threading
from abc import abstractmethod
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import aiormq
import nats.errors
from confluent_kafka import Consumer, TopicPartition

from tests.kit.sinks import harness_nats, harness_rabbitmq, harness_redis, harness_webhook, nats_cluster, rabbit_server
from tests.kit.sinks.conformance import Arrival, Sink
from tests.kit.sinks.kafka_cluster import Cluster
from tests.kit.sinks.receiver import Receiver, Reply, Request

T = TypeVar("T")
STREAM = "bartleby"
OK = 200
SILENT = logging.getLogger("a reader of Kafka")
SILENT.setLevel(logging.CRITICAL + 1)


class Loop:
    """An event loop in a thread: what is awaited there is simply called from a test."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(900)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class Bus(Sink):
    """A bus. Confirmed events survive stop() and kill()."""

    @abstractmethod
    async def count(self) -> int:
        """Return how many events it has."""

    @abstractmethod
    def bodies(self) -> AsyncIterator[bytes]:
        """Return all events, in its order."""

    async def arrived(self) -> list[Arrival]:
        raise NotImplementedError

    async def close(self) -> None:
        await self.stop()


class Nats(harness_nats.Harness, Bus):
    def ports(self) -> list[int]:
        return [self.port]

    async def count(self) -> int:
        for _ in range(5):  # on a busy machine an answer may be late
            try:
                async with harness_nats.connected(self.ports()) as client:
                    return (await client.jetstream(timeout=2).stream_info(STREAM)).state.messages
            except nats.errors.TimeoutError:
                continue
            except (nats.errors.Error, OSError):
                break
        return 0

    async def bodies(self) -> AsyncIterator[bytes]:
        async with harness_nats.connected(self.ports()) as client:
            reader = await harness_nats.reading(client, STREAM)
            left = (await reader.consumer_info()).num_pending or 0
            while left > 0:
                messages = await reader.fetch(min(500, left), timeout=20)
                left -= len(messages)
                for each in messages:
                    yield each.data

    async def lose(self) -> None:
        """Lose what was acknowledged."""
        async with harness_nats.connected(self.ports()) as client:
            await client.jetstream(timeout=10).delete_stream(STREAM)


class NatsThree(Nats):
    """A cluster of three; confirmed events are on two of them."""

    def __init__(self, folder: Path) -> None:
        self.cluster = nats_cluster.Cluster(folder)

    def options(self) -> dict[str, Any]:
        return self.cluster.options()

    def ports(self) -> list[int]:
        return self.cluster.running()

    async def start(self) -> None:
        await self.cluster.start()

    async def stop(self) -> None:
        await self.cluster.stop()

    async def kill(self) -> None:
        for each in self.cluster.servers.values():
            await each.kill()

    async def kill_leader(self) -> str:
        """Kill the server that leads the stream; return its name."""
        while (leader := await self.cluster.leader()) is None:
            pass
        await self.cluster.servers[leader].kill()
        return leader


class Redis(harness_redis.Harness, Bus):
    async def count(self) -> int:
        async with self.client() as client:
            return int(await client.xlen("bartleby:events"))

    async def bodies(self) -> AsyncIterator[bytes]:
        after = "-"
        while entries := await self._page(after):
            for number, fields in entries:
                after = f"({number.decode()}"
                yield fields[b"event"]

    async def _page(self, after: str) -> list[Any]:
        async with self.client() as client:
            found: Any = await client.xrange("bartleby:events", after, count=1000)
            return list(found)

    async def lose(self) -> None:
        """Lose what was acknowledged."""
        async with self.client() as client:
            await client.flushall()


class Rabbit(harness_rabbitmq.Harness, Bus):
    declare = True

    @property
    def queue(self) -> str:
        return self._queue

    def options(self) -> dict[str, Any]:
        return {**super().options(), "declare": self.declare}

    async def create(self) -> None:
        """Make the queue that was missing."""
        async with self._channel() as channel:
            await channel.queue_declare(self.queue, durable=True)

    async def count(self) -> int:
        with contextlib.suppress(aiormq.ChannelNotFoundEntity):
            async with self._channel() as channel:
                return (await channel.queue_declare(self.queue, passive=True)).message_count or 0
        return 0

    async def bodies(self) -> AsyncIterator[bytes]:
        left = await self.count()
        found: asyncio.Queue[bytes] = asyncio.Queue()

        async def take(message: aiormq.abc.DeliveredMessage) -> None:
            found.put_nowait(message.body)

        async with self._channel() as channel:
            await channel.basic_consume(self.queue, take, no_ack=True)
            for _ in range(left):
                yield await asyncio.wait_for(found.get(), 20)

    @contextlib.asynccontextmanager
    async def _channel(self) -> "AsyncIterator[aiormq.abc.AbstractChannel]":
        connection = await aiormq.connect(rabbit_server.shared().url())
        try:
            yield await connection.channel()
        finally:
            with contextlib.suppress(aiormq.AMQPError):
                await connection.close()


class RabbitNode(Rabbit):
    """The same, but the node itself is stopped, which takes longer."""

    async def stop(self) -> None:
        await asyncio.to_thread(rabbit_server.shared().stop)

    async def close(self) -> None:
        await super().stop()


class Kafka(Bus):
    """The mock cluster keeps 5 MB of a partition, so it is read all the time."""

    kind = "kafka"
    _PARTITIONS = 16

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._cluster = Cluster()
        self._topic = self._cluster.topic(self._PARTITIONS)
        self._found: list[bytes] = []
        self._news = threading.Condition()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def options(self) -> dict[str, Any]:
        return {"brokers": self._cluster.brokers, "topic": self._topic}

    async def start(self) -> None:
        self._cluster.up()

    async def stop(self) -> None:
        self._cluster.down()

    async def hang(self) -> None:
        self._cluster.freeze()

    async def wake(self) -> None:
        self._cluster.thaw()

    async def count(self) -> int:
        return await asyncio.to_thread(self._ends)

    async def bodies(self) -> AsyncIterator[bytes]:
        end = await self.count()
        await asyncio.to_thread(self._read_to, end)
        for body in self._found:
            yield body

    async def close(self) -> None:
        self._ending.set()
        await asyncio.to_thread(self._thread.join, 20)
        self._cluster.close()

    def _ends(self) -> int:
        asker = self._consumer()
        try:
            return sum(asker.get_watermark_offsets(place, timeout=10)[1] for place in self._places())
        finally:
            asker.close()

    def _read_to(self, end: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: len(self._found) >= end, 20), f"{len(self._found)} of {end}"

    def _read(self) -> None:
        reader = self._consumer()
        reader.assign(self._places())
        while not self._ending.is_set():
            new = [brief(body) for each in reader.consume(500, 0.1) if not each.error() and (body := each.value())]
            with self._news:
                self._found += new
                self._news.notify_all()
        reader.close()

    def _consumer(self) -> Consumer:
        settings = {"bootstrap.servers": self._cluster.brokers, "group.id": "reader", "enable.auto.commit": False}
        return Consumer({**settings, "reconnect.backoff.max.ms": 200}, logger=SILENT)

    def _places(self) -> list[TopicPartition]:
        return [TopicPartition(self._topic, number, 0) for number in range(self._PARTITIONS)]


def brief(body: bytes) -> bytes:
    """Return the part of an event that identifies it."""
    event = json.loads(body)
    return json.dumps({name: event[name] for name in ("id", "subject", "sequence")}).encode()


class Webhook(harness_webhook.Harness, Bus):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._seen = self._lines = 0

    async def count(self) -> int:
        if self.file.exists():
            with self.file.open("rb") as file:
                file.seek(self._seen)
                new = file.read()
            self._seen += len(new)
            self._lines += new.count(b"\n")
        return self._lines

    async def bodies(self) -> AsyncIterator[bytes]:
        with self.file.open() as file:
            for line in file:
                yield base64.b64decode(json.loads(line)["body"])


class Answering(Bus):
    """A webhook in this process; `answer` decides what it accepts."""

    kind = "webhook"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.taken: list[bytes] = []
        self._receiver = Receiver(self._answer)

    @abstractmethod
    def answer(self, request: Request) -> int:
        """Return with which status to answer."""

    def options(self) -> dict[str, Any]:
        return {"url": self._receiver.url, "secret": harness_webhook.SECRET, "allow_private": True}

    async def start(self) -> None:
        await self._receiver.start()

    async def stop(self) -> None:
        await self._receiver.stop()

    async def count(self) -> int:
        return len(self.taken)

    async def bodies(self) -> AsyncIterator[bytes]:
        for body in self.taken:
            yield body

    def _answer(self, request: Request) -> Reply:
        status = self.answer(request)
        if status == OK:
            self.taken.append(request.body)
        return Reply(status)


BUSES: dict[str, type[Bus]] = {
    "nats": Nats,
    "nats of three": NatsThree,
    "redis": Redis,
    "rabbitmq": Rabbit,
    "node of rabbitmq": RabbitNode,
    "kafka": Kafka,
    "webhook": Webhook,
}
