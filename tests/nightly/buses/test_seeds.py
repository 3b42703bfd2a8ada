"""Decisions of the designs in tests/stories/seeds.toml that need a bus that fails, or that measure time."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from bartleby import Bartleby, Client, Message, Terminal
from tests.kit.commands import Done
from tests.kit.database import install
from tests.kit.sql import ack, claim, column, create, fail_all, refused, send, stats, value
from tests.kit.worker import Running, Told, until, working
from tests.nightly.buses.webhook_bus import Bus
from tests.pgmq.conftest import SCRIPT
from tests.stories.kit import ANA, Connection, bury, letter, places, relaying, sink
from tests.stories.seeds.test_4_cordum import FULL

Run = Callable[..., Done]
SHORT = 0.05
CREATED = "dead_letter.created"


class Stage:
    """A queue, a bus, and the means to watch both."""

    def __init__(self, conn: Connection, client: Client, bus: Bus, dsn: str) -> None:
        self.conn = conn
        self.client = client
        self.bus = bus
        self.dsn = dsn
        create(conn)

    @contextmanager
    def relay(self, **settings: object) -> Iterator[Running]:
        """A relay that serves the bus by the default settings, but for a short delay."""
        chosen = {"options": self.bus.options, "types": ["dead_letter.*"], "delay": SHORT, **settings}
        self.client.put_sink("bus", "webhook", chosen, **ANA)
        with relaying(self.dsn) as running:
            yield running

    def bury(self, count: int = 1) -> list[int]:
        """In one transaction: a letter that comes while the first is tried would wait behind it."""
        with self.conn.transaction():
            return [bury(self.conn, {"order": n}) for n in range(count)]

    def taken(self) -> list[int]:
        """The messages whose death the bus has taken, in its order."""
        return [each["data"]["message_id"] for each in self.bus.of(CREATED)]

    def degraded(self) -> None:
        until(lambda: sink(self.client).state == "degraded")

    def delivered(self) -> None:
        until(lambda: (found := sink(self.client)).waiting == 0 and found.state == "working")


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        yield opened


@pytest.fixture
def bus() -> Iterator[Bus]:
    with Bus.running() as running:
        yield running


@pytest.fixture
def stage(conn: Connection, client: Client, bus: Bus, dsn: str) -> Stage:
    return Stage(conn, client, bus, dsn)


def counted(bartleby: Run) -> int:
    """The failures of the sink, as Prometheus reads them."""
    metrics = bartleby("sinks", "metrics").out
    found = re.search(r'^bartleby_emit_failures_total{sink="bus"} (\d+)$', metrics, re.MULTILINE)
    assert found
    return int(found[1])


def listed(bartleby: Run) -> list[int]:
    done = bartleby("dead", "queue:q", "--json")
    assert done.code == 0
    return sorted(each["message_id"] for each in done.document)


@pytest.mark.seed("cordum-6", "cordum-14", "cordum-18", "cordum-19", "cordum-35")
def test_event_follows_the_letter_and_has_its_data(stage: Stage, connect: Callable[[], Connection]) -> None:
    other = connect()
    seen: list[list[str]] = []
    stage.bus.arrived = lambda event: seen.append(places(other, event["data"]["message_id"]))
    with stage.relay():
        died = stage.bury(3)
        stage.delivered()
        assert seen == [["dead"]] * 3
        assert len(stage.bus.tried) == len(set(stage.bus.names_tried())) == 3
        for event in stage.bus.of(CREATED):
            found = letter(stage.conn, event["data"]["message_id"])
            assert (event["specversion"], event["subject"]) == ("1.0", f"message/{found['message_id']}")
            assert (found["queue"], found["status"], found["error"]) == ("q", "dead", "'x'")
            assert (found["reason"], found["error_type"]) == ("terminal", "KeyError")
            for each in ("message_id", "queue", "error", "reason", "error_type"):
                assert event["data"][each] == found[each], each
        stage.client.discard(died[:1], **ANA)
        stage.client.restore(died[:1], **ANA)
        until(lambda: len(stage.bus.events) == 5)
    told = [each for each in stage.bus.events if each["subject"] == f"message/{died[0]}"]
    assert [(each["type"].rpartition(".")[2], each["sequence"]) for each in told] == [
        ("created", "1"), ("discarded", "2"), ("restored", "3"),
    ]  # fmt: skip


@pytest.mark.seed("cordum-22", "cordum-33")
def test_retries_that_succeed_are_not_counted_as_failures(stage: Stage, bartleby: Run) -> None:
    died: list[int] = []
    for failing in (1, 3):
        stage.bus.failing = failing
        stage.bus.tried.clear()
        with stage.relay(attempts=failing + 1):
            died += stage.bury()
            stage.delivered()
        assert (stage.taken(), len(stage.bus.tried)) == (died, failing + 1)
        assert (sink(stage.client).failures, counted(bartleby), listed(bartleby)) == (0, 0, died)


@pytest.mark.seed("cordum-2", "cordum-4", "cordum-5", "cordum-7", "cordum-9", "cordum-10", "cordum-21", "cordum-23")
@pytest.mark.seed("cordum-24", "cordum-25", "cordum-27", "cordum-28", "cordum-31", "cordum-36", "cordum-37")
@pytest.mark.seed("cordum-40")
def test_outage_is_counted_and_reported_once_and_loses_no_event(stage: Stage, bartleby: Run) -> None:
    with Bus.running() as healthy, Told.listening() as log, stage.relay():
        stage.client.put_sink("healthy", "webhook", {"options": healthy.options, "types": [CREATED]}, **ANA)
        before = stage.bury()
        stage.delivered()
        assert_shown(bartleby, "working")
        stage.bus.down = True
        during = stage.bury(2)
        until(lambda: sink(stage.client).failures == 2)
        seen = len(stage.bus.tried)
        until(lambda: len(stage.bus.tried) >= seen + 6)
        later = stage.bury(3)
        died = [*before, *during, *later]
        until(lambda: len(healthy.events) == 6)
        assert sorted(each["data"]["message_id"] for each in healthy.events) == died == listed(bartleby)
        assert (stats(stage.conn)["dead"], stage.taken()) == (6, before)
        assert_outage_is_reported(stage, bartleby, log)
        assert "KeyError: 'x'" in bartleby("explain", str(died[0])).out
        assert stage.client.replay(died[:1], **ANA) == died[:1]
        assert places(stage.conn, died[0]) == ["ready"]
        ack(stage.conn, claim(stage.conn).lease)

        stage.bus.down = False
        stage.delivered()
        after = stage.bury()
        stage.delivered()
    taken = stage.taken()  # events of different messages may change places, but not over the outage
    assert ([taken[0]], sorted(taken[1:-1]), [taken[-1]]) == (before, during + later, after)
    assert len({each["id"] for each in stage.bus.events}) == len(stage.bus.events)
    for event in stage.bus.of(CREATED):
        stored, data = letter(stage.conn, event["data"]["message_id"]), event["data"]
        assert (data["error"], data["dead_at"].removesuffix("Z") in stored["dead_at"].isoformat()) == ("'x'", True)
    assert column(stage.conn, "select type from bartleby.events").count("io.bartleby.sink.recovered") == 1


def assert_shown(bartleby: Run, state: str, *words: str) -> None:
    shown = bartleby("sinks", "show", "bus").out
    assert [each for each in ("working", "degraded") if each in shown] == [state]
    assert "503" in shown if words else "503" not in shown
    assert [each for each in words if each not in shown] == []


def assert_outage_is_reported(stage: Stage, bartleby: Run, log: Told) -> None:
    """Two events have failed for good, five wait: the sink, metrics, log, events and audit log say so once."""
    found = sink(stage.client)
    assert (found.state, found.waiting, found.failures, counted(bartleby)) == ("degraded", 5, 2, 2)
    assert_shown(bartleby, "degraded", found.error or "", "503")
    assert ["503" in each.getMessage() for each in log.of("sink.degraded")] == [True]
    data = value(stage.conn, "select data from bartleby.events where type = 'io.bartleby.sink.degraded'")
    assert (data["sink"], data["kind"], "503" in data["error"]) == ("bus", "webhook", True)
    lines = stage.client.audit_log(action="sink.failure")
    assert sum(each.after["events"] for each in lines) == 2
    assert {(each.actor, each.subject["sink"], "503" in (each.reason or "")) for each in lines} == {
        ("bartleby relay", "bus", True)
    }


@pytest.mark.seed("cordum-8", "cordum-26", "cordum-34")
def test_first_retry_comes_after_500_milliseconds_and_later_ones_ever_rarer(stage: Stage) -> None:
    stage.bus.down = True
    with stage.relay(delay=0.5):
        died = stage.bury()
        until(lambda: len(stage.bus.tried) >= 5)
        assert (sink(stage.client).failures, sink(stage.client).waiting) == (1, 1)
        assert len(set(stage.bus.names_tried())) == 1
        gaps = [after - before for (before, _), (after, _) in pairwise(stage.bus.tried[:5])]
        assert 0.95 * 0.5 <= gaps[0] < 5
        for gap, least in zip(gaps[1:], (0.25, 0.5, 1), strict=True):
            assert gap >= 0.95 * least
        stage.bus.down = False
        stage.delivered()
    stage.bus.down = True
    waiting = stage.bury(20)
    delay = 0.2
    with stage.relay(attempts=3, delay=delay):
        stage.degraded()
        before = len(stage.bus.tried)
        until(lambda: len(stage.bus.tried) >= before + 4)
        times = [at for at, _ in stage.bus.tried[before : before + 4]]
        assert min(after - before for before, after in pairwise(times)) >= 0.95 * delay / 2  # one at a time
        assert len(set(stage.bus.names_tried())) < sink(stage.client).waiting == len(waiting)
        stage.bus.down = False
        stage.delivered()
    assert sorted(stage.taken()) == died + waiting


@pytest.mark.seed("cordum-11", "cordum-12", "cordum-32")
def test_slow_bus_does_not_delay_what_fails(stage: Stage) -> None:
    stage.bus.hung = True
    with stage.relay():
        stage.bury()
        until(lambda: len(stage.bus.tried) >= 2)
        (first, _), (second, _) = stage.bus.tried[:2]
        assert 1.5 <= second - first < 10
        stage.degraded()
    settings: dict[str, Any]
    for hung, settings in ((True, {"timeout": 30}), (False, {"delay": 30})):
        stage.bus.hung = stage.bus.down = False
        with stage.relay():
            stage.delivered()
        stage.bus.hung, stage.bus.down = hung, not hung
        stage.bus.tried.clear()
        taken = stage.taken()
        with stage.relay(**settings):
            stage.bury()
            until(lambda: stage.bus.tried)
            began = time.monotonic()
            died = stage.bury()
            assert time.monotonic() - began < 15
            assert (places(stage.conn, died[0]), sink(stage.client).state) == (["dead"], "working")
        assert stage.taken() == taken


@pytest.mark.seed("cordum-20", "cordum-38", "cordum-42")
def test_repeated_outages_and_restarts_lose_no_event(stage: Stage) -> None:
    stage.bus.down = True
    with stage.relay(delay=60) as running:
        died = stage.bury()
        until(lambda: stage.bus.tried)
        running.stop()
        running.thread.join(30)
        assert not running.thread.is_alive()
    assert sink(stage.client).waiting == 1
    stage.bus.down = False
    with stage.relay():
        stage.delivered()
    assert (stage.taken(), len(set(stage.bus.names_tried()))) == (died, 1)
    with stage.relay():
        for _ in range(3):
            stage.bus.down = True
            died += stage.bury(8)
            stage.degraded()
            stage.bus.down = False
            stage.delivered()
        stage.bus.down = True
        died += stage.bury(5)
        stage.degraded()
    died += stage.bury(5)
    with stage.relay():
        seen = len(stage.bus.tried)
        until(lambda: len(stage.bus.tried) > seen + 3)
        stage.bus.down = False
        stage.delivered()
    assert sorted(stage.taken()) == died
    assert len({each["id"] for each in stage.bus.events}) == len(stage.bus.events)


@pytest.mark.own_database
@pytest.mark.seed("cordum-16", "cordum-30")
def test_letter_that_could_not_be_stored_is_not_published(stage: Stage) -> None:
    with stage.relay():
        stage.conn.execute(FULL)
        sent = send(stage.conn)
        work = claim(stage.conn)
        with refused("P0001", "the disk is full"):
            fail_all(stage.conn, work, verdict="dead")
        assert places(stage.conn, sent) == ["leased"]
        stage.conn.execute("drop trigger full_up on bartleby.dead_letter")
        died = stage.bury()
        stage.delivered()
        assert stage.taken() == died
        fail_all(stage.conn, work, verdict="dead")
        stage.delivered()
        assert (sink(stage.client).state, sink(stage.client).failures) == ("working", 0)
    assert stage.taken() == [*died, sent]
    assert stage.bus.names_tried() == [each["id"] for each in stage.bus.events]


@pytest.mark.seed("outbox-45", "outbox-46", "outbox-47", "outbox-48")
def test_alert_says_what_failed_where_and_how(stage: Stage) -> None:
    app = Bartleby(stage.dsn)
    create(stage.conn, max_attempts=2, backoff="none", breaker="off")
    stage.client.put_sink("sentry", "sentry", {"options": stage.bus.sentry, "types": ["dead_letter.*"]}, **ANA)

    @app.handler("q")
    def handle(message: Message) -> None:
        raise Terminal("not paid") if message.payload == "terminal" else KeyError("AT")

    headers = {"type": "order.placed", "source": "shop"}
    with Bus.running() as webhook, relaying(stage.dsn), working(app):
        stage.client.put_sink("webhook", "webhook", {"options": webhook.options, "types": [CREATED]}, **ANA)
        for payload, reason, attempts, error in (
            ("terminal", "terminal", 1, {"type": "bartleby.Terminal", "value": "not paid"}),
            ("transient", "exhausted", 2, {"type": "KeyError", "value": "'AT'"}),
        ):
            stage.bus.events.clear()
            webhook.events.clear()
            sent = send(stage.conn, payload, headers=headers)
            until(lambda: stage.bus.events and webhook.events)
            [alert], [event] = stage.bus.events, webhook.events
            place: dict[str, Any] = {"queue": "q", "handler": app.handlers["q"].name, "reason": reason}
            expected = {**place, "message_type": "order.placed", "message_source": "shop"}
            assert alert["exception"]["values"][0] == error
            assert alert["tags"].items() >= {**expected, "message_id": str(sent), "attempts": str(attempts)}.items()
            expected |= {"message_id": sent, "attempts": attempts, "error_type": error["type"], "error": error["value"]}
            assert event["data"].items() >= expected.items()


@pytest.mark.own_database
@pytest.mark.seed("pgmq-59")
def test_letters_of_pgmq_are_sent_to_sentry(stage: Stage) -> None:
    stage.conn.execute(SCRIPT.read_bytes())
    install(stage.dsn)
    stage.conn.execute("select pgmq.create('jobs')")
    stage.conn.execute("select bartleby.pgmq_attach('jobs', %s)", [Jsonb({"max_attempts": 1})])
    stage.client.put_sink("bus", "sentry", {"options": stage.bus.sentry, "types": ["dead_letter.*"]}, **ANA)
    msg_id = value(stage.conn, "select pgmq.send('jobs', '1')")
    assert len(column(stage.conn, "select msg_id from bartleby.pgmq_read('jobs', 60, 10)")) == 1
    stage.conn.execute("select bartleby.pgmq_fail('jobs', %s, 'bad audio', 'ValueError')", [msg_id])
    assert column(stage.conn, "select msg_id from bartleby.pgmq_read('jobs', 60, 10)") == []
    with relaying(stage.dsn):
        until(lambda: stage.bus.events)
    [alert] = stage.bus.events
    assert alert["exception"]["values"][0] == {"type": "ValueError", "value": "bad audio"}
    assert alert["tags"]["queue"] == "jobs"
