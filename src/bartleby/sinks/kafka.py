"""Kafka, by librdkafka: each event is a record, and published when all replicas in sync have it.

What is about the same thing has the same key, so it is in one partition, in its order. A producer that could not
deliver something is thrown away with what it still holds, and the next publish() makes a new one: nothing is tried
again in the background, and a producer that has given up for good (a fatal error) is no special case.
"""

import asyncio
import functools
import logging
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any, Self, TypeAlias

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from bartleby.errors import BartlebyError, InvalidSettings
from bartleby.message import encode
from bartleby.sinks.naming import Name
from bartleby.sinks.options import Options
from bartleby.sinks.publisher import Event, Failed, Outcome, Published, Refused

_CONNECTING = (
    "security.protocol",
    "sasl.mechanisms",
    "sasl.username",
    "sasl.password",
    "sasl.oauthbearer.method",
    "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.secret",
    "sasl.oauthbearer.scope",
    "sasl.oauthbearer.extensions",
    "sasl.oauthbearer.token.endpoint.url",
    "ssl.ca.location",
    "ssl.ca.pem",
    "ssl.certificate.location",
    "ssl.certificate.pem",
    "ssl.key.location",
    "ssl.key.pem",
    "ssl.key.password",
    "ssl.endpoint.identification.algorithm",
    "client.id",
    "client.dns.lookup",
    "broker.address.family",
)
_PRODUCING = ("compression.type", "message.max.bytes", "partitioner")
_CONTENT_TYPE = "application/cloudevents+json"
_NEVER = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD})
_LEAST = 2.0  # seconds; it takes half a second, at times twice that, until an idempotent producer has its number
_SLICE = 0.1
_SKEW = timedelta(minutes=5)  # between the clock of the database and those that stamp records

# It tells of every lost connection, and so does the outcome; whoever sets up logging has it still.
_LOGGER = logging.getLogger("confluent_kafka")
_LOGGER.addHandler(logging.NullHandler())

Settings: TypeAlias = Mapping[str, Any]
_Answer: TypeAlias = Outcome | KafkaError


class KafkaPublisher:
    """Publishes to one topic, or one for each type or queue; reads them to tell what is there."""

    def __init__(self, connecting: Settings, producing: Settings, topic: Name, timeout: float) -> None:
        self._connecting = connecting
        self._producing = producing
        self._topic = topic
        self._timeout = max(timeout, _LEAST)
        self._producer: Producer | None = None  # used in the thread only
        self._thread: ThreadPoolExecutor | None = None
        self._said = ""

    @classmethod
    def open(cls, options: Options, timeout: float) -> Self:
        """Return one for these options, or raise InvalidSettings.

        brokers  host:port of some brokers, as a list or with commas
        topic    in which {event}, {type} and {queue} are those of the event
        and settings of librdkafka by their own names, as texts: those of TLS and SASL, client.id, compression.type,
        message.max.bytes, partitioner
        """
        brokers = options.texts("brokers")
        if not all(brokers) or not "".join(brokers).strip():
            raise options.bad("brokers", "expected addresses such as host:9092")
        topic = Name.option(options, "topic", "bartleby")
        given = {name: text for name in (*_CONNECTING, *_PRODUCING) if (text := options.optional(name)) is not None}
        connecting = {name: text for name, text in given.items() if name in _CONNECTING}
        producing = {
            **_defaults(max(timeout, _LEAST)),
            **{name: text for name, text in given.items() if name in _PRODUCING},
        }
        try:
            Producer({**connecting, **producing, "logger": _LOGGER})  # without brokers, so it connects nowhere
        except KafkaException as error:
            said = error.args[0].str().strip()
            if name := next((name for name in (*_CONNECTING, *_PRODUCING) if name in said), None):
                raise options.bad(name, said) from error
            raise InvalidSettings(f"the options of a kafka sink cannot be used: {said}") from error
        return cls({"bootstrap.servers": ",".join(brokers), **connecting}, producing, topic, timeout)

    async def publish(self, events: Sequence[Event]) -> list[Outcome]:
        """Publish events, all at once, and return what became of each."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "bartleby-kafka")
        stopped = threading.Event()
        work = functools.partial(self._work, events, time.monotonic() + self._timeout, stopped)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            stopped.set()

    async def close(self) -> None:
        """Let go of the producer; publish() would make a new one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.get_running_loop().run_in_executor(thread, self._part)
            thread.shutdown(wait=False)

    async def ids(self, since: datetime, until: datetime) -> AsyncIterator[str]:  # noqa: ARG002 - late ones, too
        """Return the ids of the events in the topics from this time on, up to what is there now."""
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "bartleby-kafka-read")
        reader = _Reader(self._connecting, self._topic, self._timeout)
        try:
            await loop.run_in_executor(thread, reader.seek, since - _SKEW)
            while reader.unread:
                for found in await loop.run_in_executor(thread, reader.read):
                    yield found
        except KafkaException as error:
            raise BartlebyError(self._why(error.args[0])) from error
        finally:
            await loop.run_in_executor(thread, reader.close)
            thread.shutdown(wait=False)

    def _work(self, events: Sequence[Event], deadline: float, stopped: threading.Event) -> list[Outcome]:
        if self._producer is None:
            settings = {**self._connecting, **self._producing, "logger": _LOGGER, "error_cb": self._hear}
            self._producer = Producer(settings)
        self._said = ""
        answers = self._deliver(self._producer, events, deadline, stopped)
        outcomes: list[Outcome] = []
        for event, first in zip(events, answers, strict=True):
            answer = first
            if isinstance(answer, KafkaError) and answer.code() in _NEVER and len(events) > 1:
                # A broker answers for records that came together: it may be one of the others.
                (answer,) = self._deliver(self._producer, [event], deadline, stopped)
            outcomes.append(self._outcome(answer) if isinstance(answer, KafkaError) else answer)
        if any(isinstance(each, Failed) for each in outcomes):
            self._part()
        return outcomes

    def _deliver(
        self, producer: Producer, events: Sequence[Event], deadline: float, stopped: threading.Event
    ) -> list[_Answer]:
        answers: dict[int, _Answer] = {}

        def answer(index: int, error: KafkaError | None, message: Message) -> None:
            note = f"{message.topic()}[{message.partition()}] {message.offset()}"
            answers[index] = Published(note) if error is None else error

        for index, event in enumerate(events):
            try:
                self._produce(producer, event, functools.partial(answer, index))
            except KafkaException as error:
                found: KafkaError = error.args[0]
                answers[index] = Refused(found.str()) if found.code() in _NEVER else found
            except BufferError as error:
                answers[index] = Failed(str(error))
        late = f"Kafka at {self._brokers} did not confirm within {self._timeout:g} s"
        try:
            while len(answers) < len(events) and not stopped.is_set() and (left := deadline - time.monotonic()) > 0:
                producer.poll(min(left, _SLICE))
        except (KafkaException, SystemError) as error:  # fatal for the producer, and in the way of its own callbacks
            late = f"Kafka at {self._brokers}: {error.__cause__ or error}"
        return [answers.get(index, Failed(f"{late}{self._said}")) for index in range(len(events))]

    def _produce(self, producer: Producer, event: Event, answer: Any) -> None:  # noqa: ANN401 - a partial
        producer.produce(
            self._topic.of(event),
            encode(event).encode(),
            event.get("partitionkey") or event.get("subject"),
            headers=[("content-type", _CONTENT_TYPE), ("ce_id", event["id"])],
            on_delivery=answer,
        )

    def _outcome(self, error: KafkaError) -> Outcome:
        return Refused(error.str()) if error.code() in _NEVER else Failed(self._why(error))

    def _why(self, error: KafkaError) -> str:
        return f"Kafka at {self._brokers}: {error.str()}{self._said}"

    def _hear(self, error: KafkaError) -> None:
        self._said = f" ({error.str()})"

    def _part(self) -> None:
        self._producer = None

    @property
    def _brokers(self) -> str:
        return str(self._connecting["bootstrap.servers"])


def _defaults(timeout: float) -> Settings:
    limit = round(timeout * 1000)
    return {
        "acks": "all",
        "enable.idempotence": True,
        "delivery.timeout.ms": limit,
        "request.timeout.ms": limit,
        "topic.metadata.propagation.max.ms": limit // 2,  # so that it says that there is no such topic
        "linger.ms": 1,  # all of a call is there at once
        "partitioner": "murmur2_random",  # as the clients in Java have it
    }


class _Reader:
    """Reads topics from a time up to where they end when it begins."""

    def __init__(self, connecting: Settings, topic: Name, patience: float) -> None:
        self._consumer = Consumer(
            {
                **connecting,
                "group.id": "bartleby-reconcile",  # must be named, and is never joined
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "logger": _LOGGER,
            }
        )
        self._topic = topic.pattern()
        self._patience = patience
        self._heard_at = time.monotonic()
        self.unread: dict[tuple[str | None, int | None], int] = {}

    def seek(self, since: datetime) -> None:
        """Find out where to begin and to end in each partition."""
        topics = self._consumer.list_topics(timeout=self._patience).topics
        stamp = round(since.timestamp() * 1000)
        places = [
            TopicPartition(name, partition, stamp)
            for name, topic in topics.items()
            if self._topic.fullmatch(name)
            for partition in topic.partitions
        ]
        if places and stamp > 0:
            places = self._consumer.offsets_for_times(places, timeout=self._patience)
        begin = []
        for place in places:
            if place.error is not None:
                raise KafkaException(place.error)
            low, end = self._consumer.get_watermark_offsets(place, timeout=self._patience)
            if stamp <= 0:  # all of it
                place.offset = low
            if 0 <= place.offset < end:  # negative: nothing is that late
                self.unread[place.topic, place.partition] = end
                begin.append(place)
        self._consumer.assign(begin)

    def read(self) -> list[str]:
        """Return the ids of some more events."""
        found = []
        for message in self._consumer.consume(500, timeout=_SLICE):
            self._heard_at = time.monotonic()
            place, error = (message.topic(), message.partition()), message.error()
            if error is None:
                found += _id(message)
            elif error.name() != "_PARTITION_EOF":
                raise KafkaException(error)
            if error is not None or (message.offset() or 0) + 1 >= self.unread.get(place, 0):
                self.unread.pop(place, None)
        if self.unread and time.monotonic() - self._heard_at > self._patience:
            raise KafkaException(KafkaError(KafkaError.REQUEST_TIMED_OUT, "stopped answering while it was read"))
        return found

    def close(self) -> None:
        """Let go of it."""
        self._consumer.close()


def _id(message: Message) -> list[str]:
    value = dict(message.headers() or []).get("ce_id")  # records of others have none
    return [value.decode(errors="replace")] if isinstance(value, bytes) else []
