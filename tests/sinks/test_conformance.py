"""What every sink does. Sinks that need no server run here, the others in tests/nightly/buses/test_conformance.py."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cloudevents.core.formats.json import JSONFormat

from bartleby.errors import BartlebyError
from bartleby.sinks.publisher import Published, Publisher, Readable
from tests.kit.sinks import conformance
from tests.kit.sinks.conformance import Sink, bounded, event, events, ids_of, named, publish_all, stored_ids, why
from tests.kit.sinks.servers import eventually


async def arrived_ids(sink: Sink) -> list[str]:
    """Return what arrived, each id once: a batch that took too long is sent again."""
    return list(dict.fromkeys(each.id for each in await sink.arrived()))


async def cancel(publishing: "asyncio.Task[Any]") -> None:
    publishing.cancel()
    with suppress(asyncio.CancelledError):
        await publishing


class Conformance:
    """A subclass has a fixture `kind`: the harnesses that it is run with."""

    @pytest.fixture
    async def sink(self, kind: type[Sink], tmp_path: Path) -> AsyncIterator[Sink]:
        if reason := kind.missing():
            pytest.skip(reason)
        made = kind(tmp_path)
        try:
            yield made
        finally:
            await made.stop()

    @pytest.fixture
    async def publisher(self, sink: Sink) -> AsyncIterator[Publisher]:
        made = sink.publisher()
        yield made
        await made.close()

    async def test_events_arrive_in_order_as_cloud_events_with_stable_keys(
        self, sink: Sink, publisher: Publisher
    ) -> None:
        await sink.start()
        assert await bounded(publisher, []) == []
        batch = events(1000)
        await publish_all(publisher, batch)
        assert await arrived_ids(sink) == ids_of(batch)
        await publish_all(publisher, [event(1)])
        arrivals = await sink.arrived()
        keys = {(each.id, each.key) for each in arrivals}
        assert len(keys) == len({key for _, key in keys}) == 1000, "one key for each event"
        if isinstance(publisher, Readable):
            assert set(await stored_ids(publisher)) == set(ids_of(batch))
            assert await stored_ids(publisher, datetime.now(UTC) + timedelta(days=1)) == []
        body = next(each.body for each in arrivals if each.id == event(7)["id"])
        if body is not None:  # Sentry has a format of its own
            assert json.loads(body) == event(7)
            read = JSONFormat().read(None, body)
            assert (read.get_id(), read.get_type()) == (event(7)["id"], event(7)["type"])
            assert (read.get_subject(), read.get_extension("sequence")) == (event(7)["subject"], "1")
            assert read.get_data() == event(7)["data"]

    async def test_server_that_was_down_gets_the_events_later(self, sink: Sink, publisher: Publisher) -> None:
        assert set(named(await bounded(publisher, events(100)))) == {"Failed"}
        await sink.start()
        await publish_all(publisher, events(100))
        assert await arrived_ids(sink) == ids_of(events(100))
        await sink.stop()
        for _ in range(2):
            outcomes = await bounded(publisher, events(10, first=101))
            assert set(named(outcomes)) == {"Failed"}
            assert all(map(why, outcomes)), "a failure has a reason"
        if isinstance(publisher, Readable) and sink.kind != "log":
            with pytest.raises(BartlebyError, match=r"cannot be read|Kafka at"):
                await stored_ids(publisher)
        await sink.start()
        await publish_all(publisher, events(10, first=111))
        found = set(ids_of(events(100))) | set(ids_of(events(10, first=111)))
        assert set(await arrived_ids(sink)) == found, "what failed is not sent later"
        await publisher.close()

    async def test_killed_server_has_what_it_confirmed(self, sink: Sink, publisher: Publisher) -> None:
        if reason := sink.cannot.get("kill"):
            pytest.skip(reason)
        await sink.start()
        await publish_all(publisher, events(1))
        await sink.outlast()
        confirmed, left = {event(1)["id"]}, list[dict[str, Any]]()
        enough, killed = asyncio.Event(), asyncio.Event()

        async def stream() -> None:
            for number in itertools.count(2, 50):
                batch = events(50, first=number)
                outcomes = await bounded(publisher, batch)
                failed = [each for each, end in zip(batch, outcomes, strict=True) if not isinstance(end, Published)]
                left.extend(failed)
                confirmed.update(each["id"] for each in batch if each not in failed)
                if len(confirmed) >= 500:
                    enough.set()
                if failed and killed.is_set():  # a busy machine may be late before, too
                    return

        streaming = asyncio.create_task(stream())
        try:
            await asyncio.wait_for(enough.wait(), 60)
            await sink.kill()
            killed.set()
            await asyncio.wait_for(streaming, 60)
        finally:
            streaming.cancel()
        await sink.start()
        assert confirmed <= set(await arrived_ids(sink))
        await publish_all(publisher, left)
        assert set(ids_of(left)) <= set(await arrived_ids(sink))

    async def test_calls_that_are_not_answered_fail_in_time(self, sink: Sink, publisher: Publisher) -> None:
        if reason := sink.cannot.get("hang"):
            pytest.skip(reason)
        await sink.start()
        await publish_all(publisher, events(1))
        fresh = sink.publisher()
        large = [event(number, data_bytes=40_000) for number in range(1000, 1600)]  # more than buffers hold
        await sink.hang()
        try:
            for each, batch in ((publisher, events(20, first=2)), (fresh, events(20, first=2)), (publisher, large)):
                assert set(named(await bounded(each, batch))) == {"Failed"}
            if isinstance(publisher, Readable):
                with pytest.raises(BartlebyError, match=r"cannot be read|Kafka at"):
                    await asyncio.wait_for(stored_ids(publisher), conformance.PATIENCE)
            publishing = asyncio.create_task(publisher.publish(events(10, first=2)))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not publishing.done(), "the event loop runs meanwhile"
            await asyncio.wait_for(cancel(publishing), conformance.PATIENCE)
            await asyncio.wait_for(fresh.close(), conformance.PATIENCE)
        finally:
            await sink.wake()
        for each in (publisher, fresh):
            await publish_all(each, events(20, first=2))
        await fresh.close()
        assert set(await arrived_ids(sink)) >= set(ids_of(events(21)))

    async def test_cancelled_publisher_can_be_used_again(self, sink: Sink, publisher: Publisher) -> None:
        await sink.start()
        for turn in range(20):  # each time a bit later: while it connects, while it waits for answers
            publishing = asyncio.create_task(publisher.publish(events(200, first=1 + 200 * turn)))
            for _ in range(turn):
                await asyncio.sleep(0)
            await cancel(publishing)
        last = ids_of(events(10, first=100_000))
        await publish_all(publisher, events(10, first=100_000))
        assert [each for each in await arrived_ids(sink) if each in last] == last

    async def test_closed_publisher_leaves_no_task_and_can_be_used_again(
        self, sink: Sink, publisher: Publisher
    ) -> None:
        before = asyncio.all_tasks()
        await sink.start()
        for number in (1, 2):
            await publisher.close()
            await publish_all(publisher, [event(number)])
            await publisher.close()
            await eventually(lambda: asyncio.all_tasks() <= before)
        assert set(await arrived_ids(sink)) == set(ids_of(events(2)))

    async def test_event_that_is_too_large_is_refused_alone(self, sink: Sink) -> None:
        if sink.too_large is None:
            pytest.skip(f"the {sink.kind} sink takes events of any size")
        await sink.start()
        publisher = sink.publisher(conformance.PATIENT)
        outcomes = await publisher.publish([event(1), event(2, data_bytes=sink.too_large), event(3)])
        await publisher.close()
        assert named(outcomes) == ["Published", "Refused", "Published"]
        assert why(outcomes[1])
        assert await arrived_ids(sink) == [event(1)["id"], event(3)["id"]]


class TestSinksWithoutServer(Conformance):
    @pytest.fixture(params=["log", "webhook", "sentry"])
    def kind(self, request: pytest.FixtureRequest) -> type[Sink]:
        return conformance.harness(request.param)
