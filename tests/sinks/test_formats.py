"""What sinks for buses send, without a server: names, messages and records, and servers of another protocol."""

import asyncio
import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest

from bartleby.errors import InvalidSettings
from bartleby.sinks import open_publisher, rabbitmq
from bartleby.sinks.kafka import KafkaPublisher
from bartleby.sinks.naming import BY_EVENT, Name
from bartleby.sinks.nats import NatsPublisher
from bartleby.sinks.options import Options
from bartleby.sinks.redis import RedisPublisher
from tests.kit.sinks.conformance import event, events, named, why

LETTER = {"type": "io.bartleby.dead_letter.created", "data": {"queue": "orders"}}
SINK = {"type": "io.bartleby.sink.degraded", "data": {"sink": "bus"}}
CONTENT_TYPE = "application/cloudevents+json"


def name(text: str) -> Name:
    return Name.option(Options("nats", {"subject": text}), "subject")


def test_name_is_filled_in_from_the_event_and_matches_its_pattern() -> None:
    rows: list[tuple[str, dict[str, Any], str]] = [
        (BY_EVENT, LETTER, "bartleby.dead_letter.created"),
        ("all", LETTER, "all"),
        ("{queue}.{event}", LETTER, "orders.dead_letter.created"),
        ("{queue}.{type}.{queue}", SINK, "-.io.bartleby.sink.degraded.-"),
        ("{queue}", {"type": "com.example.other", "data": {"queue": "{event}"}}, "{event}"),
        ("{event}", {"type": "com.example.other"}, "com.example.other"),
    ]
    for text, about, expected in rows:
        assert name(text).of(about) == expected, text
        assert name(text).pattern().fullmatch(expected), text
    for text, other in (("a.{event}", "b.group.opened"), ("a.{event}", "axgroup.opened"), ("a", "ab")):
        assert not name(text).pattern().fullmatch(other), text
    for text in ("{colour}", "{", "}", "{{event}}", "{event", "{Event}", "{event.name}"):
        with pytest.raises(InvalidSettings, match=r"\{event\}, \{type\} and \{queue\}"):
            name(text)


def test_nats_message_has_subject_headers_and_size() -> None:
    publisher = open_publisher("nats", {"url": "nats://h", "stream": "letters", "subject": "dead.{queue}"}, 1.0)
    assert isinstance(publisher, NatsPublisher)
    message = publisher._message(event(1))
    assert (message.subject, json.loads(message.body)) == ("dead.orders", event(1))
    headers = {"Nats-Msg-Id": event(1)["id"], "Nats-Expected-Stream": "letters", "Content-Type": CONTENT_TYPE}
    assert message.headers == headers
    lines = "".join(f"{key}: {value}\r\n" for key, value in headers.items())
    assert message.size == len(message.body) + len(f"NATS/1.0\r\n{lines}\r\n")
    for queue, subject in {"a.b": "a.b", "a..b": "a._.b", "a.": "a._", "*": "_", "> >": "___"}.items():
        assert publisher._message({**event(1), "data": {"queue": queue}}).subject == f"dead.{subject}", queue


def test_redis_rabbitmq_and_kafka_send_the_event_with_its_id() -> None:
    redis = open_publisher("redis", {"url": "redis://h", "maxlen": 500}, 1.0)
    assert isinstance(redis, RedisPublisher)
    id_, kind, body = redis._entry(event(1))
    assert (id_, kind, json.loads(body)) == (event(1)["id"], event(1)["type"], event(1))
    assert redis._trim == ("MAXLEN", "~", "500")
    message = rabbitmq._message(event(1), "orders")
    properties = message.properties
    assert (message.key, json.loads(message.body), properties.message_id) == ("orders", event(1), event(1)["id"])
    assert (properties.content_type, properties.message_type) == (CONTENT_TYPE, event(1)["type"])
    assert properties.delivery_mode == 2
    kafka = open_publisher("kafka", {"brokers": "h:9092", "topic": "letters.{queue}"}, 1.0)
    assert isinstance(kafka, KafkaPublisher)
    produced: list[Any] = []
    producer: Any = SimpleNamespace(produce=lambda *record, **more: produced.append((*record, more["headers"])))
    kafka._produce(producer, event(1), None)
    kafka._produce(producer, {**event(2), "partitionkey": None}, None)
    (topic, value, key, headers), other = produced
    assert (topic, json.loads(value), key) == ("letters.orders", event(1), event(1)["partitionkey"])
    assert dict(headers) == {"ce_id": event(1)["id"], "content-type": CONTENT_TYPE}
    assert other[2] == event(2)["subject"]


async def test_server_that_speaks_another_protocol_is_a_failure() -> None:
    answer = b""

    def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(answer)

    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    answers = (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00" * 100_000, b"+OK\r\nINFO {}\r\n")
    for kind, answer in itertools.product(("nats", "redis"), answers):
        publisher = open_publisher(kind, {"url": f"{kind}://127.0.0.1:{port}"}, 0.3)
        for _ in range(2):
            outcomes = await publisher.publish(events(3))
            assert named(outcomes) == ["Failed"] * 3, (kind, answer[:10])
            assert why(outcomes[0]), (kind, answer[:10])
        await publisher.close()
    server.close()
    for writer in writers:
        writer.close()
