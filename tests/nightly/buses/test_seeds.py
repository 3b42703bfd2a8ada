"""Decisions of the designs in tests/stories/seeds.toml that measure time, or need a server that takes alerts."""

import asyncio
import json
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from bartleby import Bartleby, Client, Message, Terminal
from tests.kit.database import install
from tests.kit.pgmq import SCRIPT
from tests.kit.plans import die, places
from tests.kit.relay import ANA, relaying, sink
from tests.kit.sinks.harness_webhook import SECRET
from tests.kit.sinks.receiver import Receiver, Reply, Request
from tests.kit.sql import Connection, column, create, send, value
from tests.kit.worker import until, working
from tests.nightly.buses.bus_stage import run


class Bus:
    """An HTTP server that takes events by webhook or as a Sentry: `down` answers 503, `hung` does not answer."""

    def __init__(self) -> None:
        self.down = self.hung = False
        self.tried: list[float] = []
        self.names: set[str] = set()
        self.events: list[dict[str, Any]] = []
        self.alerts: list[dict[str, Any]] = []
        self.receiver = Receiver(self._answer)

    def add(self, client: Client, **settings: object) -> None:
        options = {"url": self.receiver.url, "secret": SECRET, "allow_private": True}
        client.put_sink("bus", "webhook", {"options": options, "types": ["dead_letter.*"], **settings}, **ANA)

    def _answer(self, request: Request) -> Reply:
        if "x-sentry-auth" in request.headers:
            self.alerts.append(json.loads(request.body.splitlines()[2]))
            return Reply(200, body=b'{"id": "0"}')
        self.names.add(request.headers["webhook-id"])
        self.tried.append(time.monotonic())
        if self.hung:
            return Reply(wait=asyncio.Event())
        if self.down:
            return Reply(503)
        self.events.append(json.loads(request.body))
        return Reply(200)


@pytest.fixture
def bus() -> Iterator[Bus]:
    bus = Bus()
    run(bus.receiver.start())
    yield bus
    run(bus.receiver.stop())


@pytest.mark.seed("cordum-8", "cordum-26", "cordum-34")
def test_first_retry_comes_after_500_milliseconds_and_later_ones_ever_rarer(
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


@pytest.mark.own_database
@pytest.mark.seed("outbox-45", "outbox-46", "outbox-47", "outbox-48", "pgmq-59")
def test_alert_says_what_failed_where_and_how(conn: Connection, client: Client, dsn: str, bus: Bus) -> None:
    conn.execute(SCRIPT.read_bytes())
    install(dsn)
    app = Bartleby(dsn)
    create(conn, max_attempts=2, backoff="none", breaker="off")
    bus.add(client)
    options = {"dsn": f"http://abc123@127.0.0.1:{bus.receiver.port}/42", "allow_private": True}
    client.put_sink("sentry", "sentry", {"options": options, "types": ["dead_letter.*"]}, **ANA)

    @app.handler("q")
    def handle(message: Message) -> None:
        raise Terminal("not paid") if message.payload == "terminal" else KeyError("AT")

    headers = {"type": "order.placed", "source": "shop"}
    with relaying(dsn), working(app):
        for payload, reason, attempts, error in (
            ("terminal", "terminal", 1, {"type": "bartleby.Terminal", "value": "not paid"}),
            ("transient", "exhausted", 2, {"type": "KeyError", "value": "'AT'"}),
        ):
            sent = send(conn, payload, headers=headers)
            until(lambda: bus.events and bus.alerts)
            alert, event = bus.alerts.pop(), bus.events.pop()
            place: dict[str, Any] = {"queue": "q", "handler": app.handlers["q"].name, "reason": reason}
            expected = {**place, "message_type": "order.placed", "message_source": "shop"}
            assert alert["exception"]["values"][0] == error
            assert alert["tags"].items() >= {**expected, "message_id": str(sent), "attempts": str(attempts)}.items()
            expected |= {"message_id": sent, "attempts": attempts, "error_type": error["type"], "error": error["value"]}
            assert event["data"].items() >= expected.items()
        conn.execute("select pgmq.create('jobs')")
        conn.execute("select bartleby.pgmq_attach('jobs', %s)", [Jsonb({"max_attempts": 1})])
        sent = value(conn, "select pgmq.send('jobs', '1')")
        assert column(conn, "select msg_id from bartleby.pgmq_read('jobs', 60, 10)") == [sent]
        conn.execute("select bartleby.pgmq_fail('jobs', %s, 'bad audio', 'ValueError')", [sent])
        assert column(conn, "select msg_id from bartleby.pgmq_read('jobs', 60, 10)") == []
        until(lambda: bus.alerts)
    [alert] = bus.alerts
    assert alert["exception"]["values"][0] == {"type": "ValueError", "value": "bad audio"}
    assert alert["tags"]["queue"] == "jobs"
