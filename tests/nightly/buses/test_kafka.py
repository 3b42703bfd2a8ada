"""What is Kafka's own; what all sinks share is in test_conformance.py.

All against librdkafka's mock cluster, whose limits kafka_cluster.py tells. So these tests show that we understand what
a cluster answers, and when it does not answer. They cannot show that a real one keeps what it has confirmed when a
broker dies (acks=all with min.insync.replicas), that it takes TLS, SASL and access rights as we pass them on, that its
own limit on the size of a batch is the error that is ordered here, or that reading from a time begins at that time.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer

from bartleby.errors import BartlebyError, InvalidSettings
from bartleby.sinks import open_publisher
from bartleby.sinks.kafka import KafkaPublisher
from bartleby.sinks.publisher import Failed, Outcome, Published, Publisher, Readable, Refused
from tests.kit.sinks.conformance import PATIENCE, PATIENT, event, events, named, publish_all
from tests.kit.sinks.harness_kafka import read, shared
from tests.kit.sinks.kafka_cluster import Cluster

TIMEOUT = 2.0
BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """The shared cluster, up."""
    cluster = shared()
    cluster.up()
    yield cluster
    cluster.down()


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A topic with some partitions."""
    return cluster.topic()


@pytest.fixture
async def opened(cluster: Cluster) -> AsyncIterator[Callable[..., Publisher]]:
    """Opens publishers, and closes them at the end."""
    made: list[Publisher] = []

    def open_one(topic: str, timeout: float = PATIENT, **options: Any) -> Publisher:
        made.append(open_publisher("kafka", {"brokers": cluster.brokers, "topic": topic, **options}, timeout))
        return made[-1]

    yield open_one
    for each in made:
        await each.close()


def together(publisher: Publisher) -> Publisher:
    """What is published at once goes in one request, also when the publisher is slow to say it."""
    assert isinstance(publisher, KafkaPublisher)
    publisher._producing = {**publisher._producing, "linger.ms": 300}
    return publisher


def why(outcome: Outcome) -> str:
    assert isinstance(outcome, Failed | Refused)
    return outcome.why


def partitions(outcomes: list[Outcome]) -> list[str]:
    assert all(isinstance(each, Published) for each in outcomes)
    return [each.note.partition(" ")[0] for each in outcomes if isinstance(each, Published)]


async def ids_of(publisher: Publisher, since: datetime = BEGINNING) -> list[str]:
    assert isinstance(publisher, Readable)
    return [each async for each in publisher.ids(since, datetime.now(UTC))]


async def test_a_record_says_what_it_is(cluster: Cluster, opened: Callable[..., Publisher]) -> None:
    topic, sent = cluster.topic(partitions=1), event(7)
    (outcome,) = await opened(topic).publish([sent])
    assert outcome == Published(f"{topic}[0] 0")
    ((key, value, headers),) = await asyncio.to_thread(read, topic)
    assert key == sent["partitionkey"].encode()
    assert json.loads(value) == sent
    assert dict(headers) == {"ce_id": sent["id"].encode(), "content-type": b"application/cloudevents+json"}


async def test_what_is_about_the_same_thing_is_in_one_partition(opened: Callable[..., Publisher], topic: str) -> None:
    first, second = opened(topic), opened(topic)
    places = partitions(await first.publish(events(40)))
    assert len(set(places)) > 1
    again = [{**each, "id": f"{each['id']}0", "sequence": "2"} for each in events(40)]
    assert partitions(await first.publish(again)) == places
    assert partitions(await second.publish(again)) == places


async def test_types_and_queues_may_have_topics_of_their_own(
    cluster: Cluster, opened: Callable[..., Publisher]
) -> None:
    prefix = cluster.topic()
    outcomes = await opened(f"{prefix}.{{queue}}.{{type}}").publish([event(1)])
    assert partitions(outcomes)[0].startswith(f"{prefix}.orders.io.bartleby.dead_letter.created[")


async def test_an_event_about_no_queue_has_a_topic_too(cluster: Cluster, opened: Callable[..., Publisher]) -> None:
    prefix = cluster.topic()
    told = {**event(1), "data": {"sink": "bus"}}
    assert partitions(await opened(f"{prefix}.{{queue}}").publish([told]))[0].startswith(f"{prefix}.-[")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KafkaError.UNKNOWN_TOPIC_OR_PART, "Unknown topic"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, "authorization failed"),
    ],
)
async def test_a_topic_that_is_not_to_be_had_is_a_failure_that_says_so(
    cluster: Cluster, opened: Callable[..., Publisher], topic: str, error: int, said: str
) -> None:
    publisher = opened(topic, 3 * TIMEOUT)
    cluster.refuse(topic, error)
    outcomes = await publisher.publish(events(3))
    assert named(outcomes) == ["Failed"] * 3
    assert said in why(outcomes[0])
    cluster.refuse(topic, KafkaError.NO_ERROR)
    await publish_all(publisher, events(3))


async def test_of_records_that_went_together_the_too_large_is_found(
    cluster: Cluster, opened: Callable[..., Publisher]
) -> None:
    topic = cluster.topic(partitions=1)
    publisher = together(opened(topic))
    await publisher.publish([event(1)])
    cluster.fail(KafkaError.MSG_SIZE_TOO_LARGE, times=2)  # all of them, then the first of them when it is alone
    assert named(await publisher.publish(events(5, first=2))) == ["Refused"] + ["Published"] * 4
    assert [json.loads(value)["id"] for _, value, _ in await asyncio.to_thread(read, topic)] == [
        event(number)["id"] for number in (1, 3, 4, 5, 6)
    ]


async def test_a_cluster_with_too_few_replicas_is_waited_for(
    cluster: Cluster, opened: Callable[..., Publisher]
) -> None:
    publisher = opened(cluster.topic(partitions=1))
    await publisher.publish([event(1)])
    cluster.fail(KafkaError.NOT_ENOUGH_REPLICAS, times=2)
    assert named(await publisher.publish(events(5))) == ["Published"] * 5


async def test_a_cluster_that_never_has_enough_replicas_is_a_failure_in_time(
    cluster: Cluster, opened: Callable[..., Publisher]
) -> None:
    publisher = opened(cluster.topic(partitions=1), TIMEOUT)
    await publish_all(publisher, [event(1)])
    cluster.fail(KafkaError.NOT_ENOUGH_REPLICAS, times=1000)
    try:
        begun = time.monotonic()
        assert named(await publisher.publish(events(5))) == ["Failed"] * 5
        assert time.monotonic() - begun < TIMEOUT + PATIENCE
    finally:
        cluster.relent()
    await publish_all(publisher, events(5))


async def test_a_producer_that_gave_up_for_good_is_replaced(cluster: Cluster, opened: Callable[..., Publisher]) -> None:
    publisher = together(opened(cluster.topic(partitions=1)))
    await publisher.publish([event(1)])
    cluster.fail(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER)
    assert set(named(await publisher.publish(events(2)))) == {"Failed"}
    assert named(await publisher.publish(events(2))) == ["Published"] * 2


async def test_others_run_while_nobody_answers(cluster: Cluster, opened: Callable[..., Publisher], topic: str) -> None:
    publisher = opened(topic, PATIENCE)
    await publisher.publish([event(1)])
    cluster.freeze()
    try:
        publishing = asyncio.create_task(publisher.publish(events(10)))
        longest, before = 0.0, time.monotonic()
        while not publishing.done():
            await asyncio.sleep(0.01)
            longest, before = max(longest, time.monotonic() - before), time.monotonic()
    finally:
        cluster.thaw()
    assert set(named(await publishing)) == {"Failed"}
    assert longest < 0.9 * PATIENCE


async def test_what_failed_says_that_nobody_is_there(
    cluster: Cluster, opened: Callable[..., Publisher], topic: str
) -> None:
    cluster.down()
    (outcome,) = await opened(topic, 3 * TIMEOUT).publish([event(1)])
    assert "Connection refused" in why(outcome)
    assert cluster.brokers in why(outcome)


async def test_all_ids_can_be_read(opened: Callable[..., Publisher], topic: str) -> None:
    publisher = opened(topic)
    assert await ids_of(publisher) == []
    await publisher.publish(events(1200))
    await publisher.publish(events(1))
    found = await ids_of(publisher)
    assert len(found) == 1201
    assert set(found) == {each["id"] for each in events(1200)}


async def test_ids_are_read_in_all_topics_of_the_name_and_nowhere_else(
    cluster: Cluster, opened: Callable[..., Publisher]
) -> None:
    prefix = cluster.topic()
    publisher = opened(f"{prefix}.{{queue}}")
    other = {**event(2), "data": {**event(2)["data"], "queue": "bills"}}
    await publisher.publish([event(1), other])
    await opened(prefix).publish([event(3)])
    assert sorted(await ids_of(publisher)) == [event(1)["id"], event(2)["id"]]


async def test_records_of_others_are_passed_over(
    cluster: Cluster, opened: Callable[..., Publisher], topic: str
) -> None:
    stranger = Producer({"bootstrap.servers": cluster.brokers})
    stranger.produce(topic, b"hello")
    stranger.produce(topic, b"hello", headers=[("ce_id", None)])
    await asyncio.to_thread(stranger.flush)
    publisher = opened(topic)
    await publisher.publish([event(1)])
    assert await ids_of(publisher) == [event(1)["id"]]


async def test_nothing_is_read_where_nothing_is_late_enough(opened: Callable[..., Publisher], topic: str) -> None:
    """The mock cluster says so for any time; where a real one would begin it cannot show."""
    publisher = opened(topic)
    await publisher.publish([event(1)])
    assert await ids_of(publisher, datetime.now(UTC) + timedelta(hours=1)) == []


async def test_reading_from_a_cluster_that_is_down_is_an_error(
    cluster: Cluster, opened: Callable[..., Publisher], topic: str
) -> None:
    cluster.down()
    with pytest.raises(BartlebyError, match="Kafka at"):
        await ids_of(opened(topic, TIMEOUT))


async def test_reading_from_a_cluster_that_hangs_is_an_error(
    cluster: Cluster, opened: Callable[..., Publisher], topic: str
) -> None:
    publisher = opened(topic, TIMEOUT)
    cluster.freeze()
    try:
        with pytest.raises(BartlebyError, match="Kafka at"):
            await ids_of(publisher)
    finally:
        cluster.thaw()


def test_a_secret_is_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARTLEBY_SINK_PASSWORD", "hunter2")
    options = {"brokers": "127.0.0.1:1", "sasl.password": "env:BARTLEBY_SINK_PASSWORD", "security.protocol": "SASL_SSL"}
    with pytest.raises(InvalidSettings, match=r"sasl\.") as caught:
        open_publisher("kafka", {**options, "sasl.mechanisms": "PLAIN"}, TIMEOUT)
    assert "hunter2" not in str(caught.value)
    open_publisher("kafka", {**options, "sasl.mechanisms": "PLAIN", "sasl.username": "bartleby"}, TIMEOUT)


def test_a_setting_that_would_load_code_is_unknown() -> None:
    options = {"brokers": "127.0.0.1:1", "plugin.library.paths": "/tmp/evil.so"}  # noqa: S108 - never opened
    with pytest.raises(InvalidSettings, match=r"unknown option 'plugin\.library\.paths'"):
        open_publisher("kafka", options, TIMEOUT)


async def test_one_core_is_enough_for_two_thousand_a_second(cluster: Cluster, topic: str) -> None:
    """Our own work is measured: the mock cluster writes to no disk and has nobody to replicate to."""
    publisher = open_publisher("kafka", {"brokers": cluster.brokers, "topic": topic}, 30)
    await publisher.publish([event(1)])
    batches = [events(500, first=first) for first in range(0, 5000, 500)]
    begun = time.process_time()
    for batch in batches:
        assert set(named(await publisher.publish(batch))) == {"Published"}
    assert 5000 / (time.process_time() - begun) > 2000
    await publisher.close()
