"""Decisions of the designs in tests/stories/seeds.toml that measure time."""

import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from bartleby import Client
from tests.kit.plans import die, places
from tests.kit.relay import ANA, relaying, sink
from tests.kit.sinks.harness_webhook import SECRET
from tests.kit.sinks.receiver import Receiver, Reply, Request
from tests.kit.sql import Connection, create
from tests.kit.worker import until
from tests.nightly.buses.bus_stage import run


class Bus:
    """An HTTP server that takes events by webhook: `down` answers 503, `hung` does not answer."""

    def __init__(self) -> None:
        self.down = self.hung = False
        self.tried: list[float] = []
        self.names: set[str] = set()
        self.receiver = Receiver(self._answer)

    def add(self, client: Client, **settings: object) -> None:
        options = {"url": self.receiver.url, "secret": SECRET, "allow_private": True}
        client.put_sink("bus", "webhook", {"options": options, "types": ["dead_letter.*"], **settings}, **ANA)

    def _answer(self, request: Request) -> Reply:
        self.names.add(request.headers["webhook-id"])
        self.tried.append(time.monotonic())
        if self.hung:
            return Reply(wait=asyncio.Event())
        return Reply(503 if self.down else 200)


@pytest.fixture
def bus() -> Iterator[Bus]:
    bus = Bus()
    run(bus.receiver.start())
    yield bus
    run(bus.receiver.stop())


@pytest.mark.seed("cordum-8", "cordum-26", "cordum-34")
def test_first_retry_comes_after_500_milliseconds_and_later_delays_grow(
    conn: Connection, client: Client, dsn: str, bus: Bus
) -> None:
    create(conn)
    bus.down = True
    bus.add(client)
    for _ in range(20):
        die(conn)
    with relaying(dsn):
        failures = until(lambda: sink(client).failures)
        until(lambda: len(bus.tried) >= 2 * failures + 4)
        gaps = [after - before for before, after in pairwise(bus.tried)]
        assert 0.95 * 0.5 <= gaps[failures - 1] < 5  # all of them once more, and then one at a time
        for gap, least in zip(gaps[2 * failures - 1 :], (0.25, 0.5, 1, 2), strict=False):
            assert gap >= 0.95 * least
        assert len(bus.names) == failures == sink(client).failures < sink(client).waiting == 20


@pytest.mark.seed("cordum-11", "cordum-12", "cordum-32")
def test_bus_that_hangs_is_given_two_seconds_and_does_not_delay_what_fails(
    conn: Connection, client: Client, dsn: str, bus: Bus
) -> None:
    create(conn)
    bus.hung = True
    bus.add(client, delay=0.05)
    with relaying(dsn):
        die(conn)
        until(lambda: bus.tried)
        [died] = die(conn)
        assert (places(conn, died), sink(client).state) == (["dead"], "working")
        until(lambda: len(bus.tried) >= 2)
        assert 1.5 <= bus.tried[1] - bus.tried[0] < 10
        until(lambda: sink(client).state == "degraded")
