"""The kafka sink with librdkafka's mock cluster, whose limits tests/kit/sinks/kafka_cluster.py lists.

These tests show that answers of a cluster, and missing answers, are understood. They do not show that a real cluster
keeps what it confirmed when a broker dies, nor how it handles TLS, SASL, access rights and sizes of batches.
"""

import asyncio
import json
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer

from bartleby.sinks.kafka import KafkaPublisher
from bartleby.sinks.publisher import Outcome, Published, Publisher
from tests.kit.sinks.conformance import PATIENCE, Open, event, events, ids_of, named, publish_all, stored_ids, why
from tests.kit.sinks.harness_kafka import Harness, read, shared
from tests.kit.sinks.kafka_cluster import Cluster

TIMEOUT = 2.0


@pytest.fixture
def cluster(sink: Harness) -> Cluster:
    return shared()


@pytest.fixture
def options(cluster: Cluster) -> dict[str, Any]:
    return {"brokers": cluster.brokers}


def in_one_request(publisher: Publisher) -> Publisher:
    """Send what is published at once in one request, even if the machine is slow."""
    assert isinstance(publisher, KafkaPublisher)
    publisher._producing = {**publisher._producing, "linger.ms": 300}
    return publisher


def partitions(outcomes: list[Outcome]) -> list[str]:
    assert all(isinstance(each, Published) for each in outcomes)
    return [each.note.partition(" ")[0] for each in outcomes if isinstance(each, Published)]


async def test_record_has_a_topic_and_a_partition_by_its_key(cluster: Cluster, opened: Open) -> None:
    topic, sent = cluster.topic(partitions=1), event(7)
    assert await opened(topic=topic).publish([sent]) == [Published(f"{topic}[0] 0")]
    prefix = cluster.topic()
    (place,) = partitions(await opened(topic=f"{prefix}.{{queue}}.{{type}}").publish([sent]))
    assert place.startswith(f"{prefix}.orders.io.bartleby.dead_letter.created[")
    first, second = opened(topic=prefix), opened(topic=prefix)
    places = partitions(await first.publish(events(40)))
    assert len(set(places)) > 1
    again = [{**each, "id": f"{each['id']}0", "sequence": "2"} for each in events(40)]
    assert partitions(await first.publish(again)) == partitions(await second.publish(again)) == places


async def test_topic_that_is_not_available_is_a_failure_with_its_reason(cluster: Cluster, opened: Open) -> None:
    for error, reason in (
        (KafkaError.UNKNOWN_TOPIC_OR_PART, "Unknown topic"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, "authorization failed"),
    ):
        topic = cluster.topic()
        publisher = opened(3 * TIMEOUT, topic=topic)
        cluster.order(f"refuse {topic} {error}")
        outcomes = await publisher.publish(events(3))
        assert named(outcomes) == ["Failed"] * 3
        assert reason in why(outcomes[0])
        cluster.order(f"refuse {topic} {KafkaError.NO_ERROR}")
        await publish_all(publisher, events(3))


async def test_record_that_is_too_large_is_found_among_the_others_and_a_broken_producer_replaced(
    cluster: Cluster, opened: Open
) -> None:
    topic = cluster.topic(partitions=1)
    publisher = in_one_request(opened(topic=topic))
    await publisher.publish([event(1)])
    cluster.order(f"fail {KafkaError.MSG_SIZE_TOO_LARGE} 2")  # all of them, then the first of them when it is alone
    assert named(await publisher.publish(events(5, first=2))) == ["Refused"] + ["Published"] * 4
    stored = [json.loads(value)["id"] for _, value, _ in await asyncio.to_thread(read, topic)]
    assert stored == [event(number)["id"] for number in (1, 3, 4, 5, 6)]
    cluster.order(f"fail {KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER} 1")  # fatal for a producer
    assert set(named(await publisher.publish(events(2)))) == {"Failed"}
    assert named(await publisher.publish(events(2))) == ["Published"] * 2


async def test_too_few_replicas_are_waited_for_until_the_timeout(cluster: Cluster, opened: Open) -> None:
    topic = cluster.topic(partitions=1)
    patient, publisher = opened(topic=topic), opened(TIMEOUT, topic=topic)
    for each in (patient, publisher):
        await publish_all(each, [event(1)])
    cluster.order(f"fail {KafkaError.NOT_ENOUGH_REPLICAS} 2")
    assert named(await patient.publish(events(5))) == ["Published"] * 5
    cluster.order(f"fail {KafkaError.NOT_ENOUGH_REPLICAS} 1000")
    try:
        assert named(await asyncio.wait_for(publisher.publish(events(5)), PATIENCE)) == ["Failed"] * 5
    finally:
        cluster.order("relent")
    await publish_all(publisher, events(5))


async def test_ids_are_read_from_all_topics_of_the_name_and_a_cluster_that_is_down_is_named(
    cluster: Cluster, opened: Open
) -> None:
    topic = cluster.topic()
    publisher = opened(topic=topic)
    assert await stored_ids(publisher) == []
    foreign = Producer({"bootstrap.servers": cluster.brokers})
    foreign.produce(topic, b"hello")
    foreign.produce(topic, b"hello", headers=[("ce_id", None)])
    await asyncio.to_thread(foreign.flush)
    await publisher.publish(events(1200))
    await publisher.publish(events(1))
    found = await stored_ids(publisher)
    assert (len(found), set(found)) == (1201, set(ids_of(events(1200))))
    by_queue = opened(topic=f"{topic}.{{queue}}")
    other = {**event(2), "data": {**event(2)["data"], "queue": "bills"}}
    await by_queue.publish([event(1), other])
    assert sorted(await stored_ids(by_queue)) == [event(1)["id"], event(2)["id"]]
    cluster.order("down")
    (outcome,) = await opened(3 * TIMEOUT, topic="any").publish([event(1)])
    assert "Connection refused" in why(outcome)
    assert cluster.brokers in why(outcome)
