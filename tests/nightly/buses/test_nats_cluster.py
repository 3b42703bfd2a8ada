"""The nats sink against a cluster of three, whose servers die and freeze."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bartleby.sinks import open_publisher
from bartleby.sinks.publisher import Failed, Published, Publisher
from tests.kit.sinks.conformance import TIMEOUT, event, events, named, publish_all
from tests.kit.sinks.harness_nats import Harness, stored
from tests.kit.sinks.nats_cluster import NAMES, Cluster
from tests.sinks.conftest import Eventually


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    if reason := Harness.missing():
        pytest.skip(reason)
    made = Cluster(tmp_path)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


@pytest.fixture
async def publisher(cluster: Cluster, eventually: Eventually) -> AsyncIterator[Publisher]:
    """A publisher whose stream has a leader and three replicas."""
    made = open_publisher("nats", cluster.options(), TIMEOUT)

    async def works() -> bool:
        return named(await made.publish([event(0)])) == ["Published"]

    await eventually(works)
    await eventually(cluster.complete)
    yield made
    await made.close()


class Streaming:
    """Publishes batch after batch, as the relay does, and knows what was confirmed."""

    def __init__(self, publisher: Publisher) -> None:
        self.confirmed: dict[str, None] = {}
        self.failures: list[Failed] = []
        self._publisher = publisher
        self._ending = False
        self._progress = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def reaches(self, count: int) -> None:
        while len(self.confirmed) < count and not self._task.done():
            self._progress.clear()
            await self._progress.wait()

    async def end(self) -> None:
        self._ending = True
        await self._task

    async def _run(self) -> None:
        number = 1
        while not self._ending:
            left: Sequence[dict[str, Any]] = events(50, first=number)
            number += 50
            while left:
                outcomes = await self._publisher.publish(left)
                self.failures += [each for each in outcomes if isinstance(each, Failed)]
                self.confirmed |= {
                    each["id"]: None
                    for each, outcome in zip(left, outcomes, strict=True)
                    if isinstance(outcome, Published)
                }
                left = [each for each in left if each["id"] not in self.confirmed]
                self._progress.set()
                await asyncio.sleep(0.05 if left else 0)


async def test_the_leader_is_killed(cluster: Cluster, publisher: Publisher, eventually: Eventually) -> None:
    leaders: list[str] = []

    async def led() -> bool:
        leaders.extend(filter(None, [await cluster.leader()]))
        return len(leaders) == turn

    streaming = Streaming(publisher)
    for turn in range(1, 3):
        await asyncio.wait_for(streaming.reaches(1000 * turn), 60)
        await eventually(led)
        await cluster.servers[leaders[-1]].kill()
        await asyncio.wait_for(streaming.reaches(len(streaming.confirmed) + 500), 60)
        await cluster.start()
        await eventually(cluster.complete)
    await streaming.end()
    assert streaming.failures, "there was a time without a leader"
    found = [each.id for each in await stored(cluster.running(), "bartleby")]
    assert set(streaming.confirmed) <= set(found)
    assert len(found) == len(set(found)), "the stream drops what came twice"


async def test_without_a_majority_everything_fails(
    cluster: Cluster, publisher: Publisher, eventually: Eventually
) -> None:
    await publish_all(publisher, events(100))
    for name in NAMES[:2]:
        await cluster.servers[name].kill()
    for _ in range(3):
        assert set(named(await publisher.publish(events(20, first=101)))) == {"Failed"}
    await cluster.start()

    async def works() -> bool:
        return set(named(await publisher.publish(events(20, first=101)))) == {"Published"}

    await eventually(works)
    found = {each.id for each in await stored(cluster.running(), "bartleby")}
    assert found >= {each["id"] for each in events(120)}


async def test_the_server_that_we_talk_to_freezes(
    cluster: Cluster, publisher: Publisher, eventually: Eventually
) -> None:
    for name in NAMES:
        cluster.servers[name].freeze()

        async def works(first: int = 1000 + NAMES.index(name)) -> bool:
            return named(await publisher.publish(events(1, first=first))) == ["Published"]

        await eventually(works)
        cluster.servers[name].thaw()
        await eventually(cluster.complete)
    found = {each.id for each in await stored(cluster.running(), "bartleby")}
    assert found >= {each["id"] for each in events(3, first=1000)}
