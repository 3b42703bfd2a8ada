"""Buses for the drills: each a real server that can be stopped, killed and frozen, and read again at the end."""

import asyncio
import base64
import contextlib
import itertools
import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import aiormq
import nats.errors
import nats.js.errors
from confluent_kafka import Consumer, TopicPartition

from tests.kit.sinks import harness_nats, harness_redis, harness_webhook, kafka_cluster, nats_cluster, rabbit_server
from tests.kit.sinks.conformance import Sink
from tests.kit.sinks.receiver import Receiver, Reply, Request

T = TypeVar("T")
S = TypeVar("S", bound=Sink)
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


class Bus(ABC):
    """A bus. What was confirmed survives stop() and kill()."""

    kind: ClassVar[str]

    @abstractmethod
    def __init__(self, folder: Path) -> None: ...

    @classmethod
    def missing(cls) -> str | None:
        """Return how to get the server, if it is not on this machine."""
        return None

    @abstractmethod
    def options(self) -> dict[str, Any]: ...

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def stop(self) -> None: ...

    async def kill(self) -> None:
        raise NotImplementedError

    async def hang(self) -> None:
        raise NotImplementedError

    async def wake(self) -> None:
        raise NotImplementedError

    @abstractmethod
    async def count(self) -> int:
        """Return how much it has."""

    @abstractmethod
    def bodies(self) -> AsyncIterator[bytes]:
        """Return everything it has, in its order."""

    async def close(self) -> None:
        await self.stop()


class Served(Bus, Generic[S]):
    """A bus whose server the tests of its sink know how to run."""

    def __init__(self, harness: S) -> None:
        self._harness = harness

    def options(self) -> dict[str, Any]:
        return self._harness.options()

    async def start(self) -> None:
        await self._harness.start()

    async def stop(self) -> None:
        await self._harness.stop()

    async def kill(self) -> None:
        await self._harness.kill()

    async def hang(self) -> None:
        await self._harness.hang()

    async def wake(self) -> None:
        await self._harness.wake()


class Nats(Served[harness_nats.Harness]):
    kind = "nats"

    def __init__(self, folder: Path) -> None:
        super().__init__(harness_nats.Harness(folder))

    @classmethod
    def missing(cls) -> str | None:
        return harness_nats.Harness.missing()

    def ports(self) -> list[int]:
        return [self._harness.port]

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
    """Three of them that are one; what was confirmed is on two."""

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
        """Kill whoever leads the stream; return its name."""
        leader = await self.cluster.leader()
        while leader is None:
            leader = await self.cluster.leader()
        await self.cluster.servers[leader].kill()
        return leader


class Redis(Served[harness_redis.Harness]):
    kind = "redis"

    def __init__(self, folder: Path) -> None:
        super().__init__(harness_redis.Harness(folder))

    @classmethod
    def missing(cls) -> str | None:
        return harness_redis.Harness.missing()

    async def count(self) -> int:
        async with self._harness.client() as client:
            return int(await client.xlen("bartleby:events"))

    async def bodies(self) -> AsyncIterator[bytes]:
        after = "-"
        while entries := await self._page(after):
            for number, fields in entries:
                after = f"({number.decode()}"
                yield fields[b"event"]

    async def lose(self) -> None:
        async with self._harness.client() as client:
            await client.flushall()

    async def _page(self, after: str) -> list[Any]:
        async with self._harness.client() as client:
            found: Any = await client.xrange("bartleby:events", after, count=1000)
            return list(found)


class Rabbit(Bus):
    """One node for all tests of the process, each with a queue of its own, and a gate before it that can be shut."""

    kind = "rabbitmq"
    _numbers = itertools.count(1)

    def __init__(self, _folder: Path) -> None:
        self._server = rabbit_server.shared()
        self.queue = f"drill-{next(self._numbers)}"
        self.declare = True
        self._gate = rabbit_server.Gate(self._server.port)

    @classmethod
    def missing(cls) -> str | None:
        return rabbit_server.missing()

    def options(self) -> dict[str, Any]:
        return {"url": self._server.url(self._gate.port), "routing_key": self.queue, "declare": self.declare}

    async def start(self) -> None:
        await asyncio.to_thread(self._server.start)
        await self._gate.open()

    async def stop(self) -> None:
        await self._gate.shut()

    async def kill(self) -> None:
        await asyncio.to_thread(self._server.kill)

    async def hang(self) -> None:
        self._server.freeze()

    async def wake(self) -> None:
        self._server.thaw()

    async def close(self) -> None:
        self._server.thaw()
        await self._gate.shut()

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
        connection = await aiormq.connect(self._server.url())
        try:
            yield await connection.channel()
        finally:
            with contextlib.suppress(aiormq.AMQPError):
                await connection.close()


class RabbitNode(Rabbit):
    """The same, and the node itself is stopped: that takes its time."""

    async def stop(self) -> None:
        await asyncio.to_thread(self._server.stop)


class Kafka(Bus):
    """A mock of brokers keeps 5 MB of a partition: it is read all the time."""

    kind = "kafka"
    _PARTITIONS = 16

    def __init__(self, _folder: Path) -> None:
        self._cluster = kafka_cluster.Cluster()
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
    """Return of an event what tells it apart: there are many."""
    event = json.loads(body)
    return json.dumps({name: event[name] for name in ("id", "subject", "sequence")}).encode()


class Webhook(Served[harness_webhook.Harness]):
    kind = "webhook"

    def __init__(self, folder: Path) -> None:
        super().__init__(harness_webhook.Harness(folder))
        self._seen = self._lines = 0

    async def count(self) -> int:
        if self._harness.file.exists():
            with self._harness.file.open("rb") as file:
                file.seek(self._seen)
                new = file.read()
            self._seen += len(new)
            self._lines += new.count(b"\n")
        return self._lines

    async def bodies(self) -> AsyncIterator[bytes]:
        with self._harness.file.open() as file:
            for line in file:
                yield base64.b64decode(json.loads(line)["body"])


class Answering(Bus):
    """A webhook in this process: what it takes is up to `answer`, and what it took it knows."""

    kind = "webhook"

    def __init__(self, _folder: Path) -> None:
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
