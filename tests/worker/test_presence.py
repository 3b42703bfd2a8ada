"""Workers report that they are there, and those of a relay too."""

from collections.abc import Callable, Iterator

import pytest

from bartleby import Bartleby, Client, WorkerReport, presence
from tests.kit.relay import ANA, Bus, add, relaying
from tests.kit.worker import LONG, CapturedLog, Conn, Gate, renew_now, until, working


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports come often; a worker that stops waits for one that is under way."""
    monkeypatch.setattr(presence, "EVERY", 0.05)
    monkeypatch.setattr(presence, "_UNDER_WAY", LONG)
    monkeypatch.setattr(presence, "_LAST_WORDS", LONG)


@pytest.fixture
def gate(app: Bartleby) -> Iterator[Gate]:
    """Handlers of queue orders wait for it."""
    made = Gate()
    app.handler("orders", concurrency=7, lease=600)(made.handler(awaited=False))
    yield made
    made.open()


def the_worker(client: Client) -> WorkerReport:
    [found] = client.workers()
    return found


def wait_for_running(client: Client, count: int) -> None:
    until(lambda: client.workers() and the_worker(client).running == count)


def test_worker_is_seen_from_its_start_to_its_end(
    app: Bartleby, client: Client, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(presence, "EVERY", 3600.0)
        with working(app):
            until(client.workers)
    app.version = "2.4.1"
    app.handler("mails", concurrency=3)(print)
    client.send_many("orders", [{"payload": 1}, {"payload": 2}])
    with working(app) as running:
        wait_for_running(client, 2)
        found = the_worker(client)
        assert found.name == running.worker.name
        assert found.name.startswith(f"{found.host}:{found.pid}:")
        assert (found.kind, found.state, found.version) == ("worker", "working", "2.4.1")
        assert (found.queues, found.concurrency, found.wanted) == (["mails", "orders"], 10, "run")
        assert (found.messages, found.oldest_lease_at is None) == (2, False)
        gate.open()
        wait_for_running(client, 0)
        running.end()
        assert client.workers() == []


@pytest.mark.parametrize("orders", ["drain", "drain stop", "stop drain"])
def test_drained_worker_finishes_what_runs_and_stops(
    app: Bartleby, client: Client, gate: Gate, log: CapturedLog, *, orders: str
) -> None:
    """Draining workers and then sending SIGTERM to all of them is one order to stop, in either order."""
    client.send("orders", 1)
    with working(app) as running:
        wait_for_running(client, 1)
        for order in orders.split():
            assert order == "stop" or client.drain_worker(running.worker.name, **ANA)
            if order == "stop":
                running.stop()
            until(running.worker._shared.stopping.is_set)
        until(lambda: log.of("worker.draining"))
        running.wait_for_loop()
        assert not running.worker._now.is_set()
        client.send("orders", 2)
        assert the_worker(client).state == "draining"
        assert running.thread.is_alive(), "it waits for its handler"
        gate.open()
        assert running.join() == {"done": 1}
        assert client.workers() == []
        assert [each.ready for each in client.queues()] == [1]
    assert len(log.of("worker.draining")) == 1


@pytest.mark.own_database
def test_worker_that_cannot_report_renews_its_leases_and_warns_once(
    app: Bartleby, client: Client, conn: Conn, gate: Gate, *, log: CapturedLog, is_waiting: Callable[[], bool]
) -> None:
    """A report that waits for a lock gives up, and the renewal on the same connection gets its turn."""
    client.send("orders", 1)
    with working(app) as running:
        gate.wait_for_start()
        [lease] = running.worker._shared.holding.leases.values()
        renew_now(running.worker)
        with conn.transaction():
            conn.execute("lock table bartleby.worker in access exclusive mode")
            until(is_waiting)
            before = lease.deadline
            until(lambda: lease.deadline > before)
        conn.execute("alter function bartleby.report_worker rename to hidden")
        until(lambda: log.of("worker.unreported"))
        before = lease.deadline
        until(lambda: lease.deadline > before)
        gate.open()
        until(lambda: running.worker.counts["done"] == 1)
        assert running.end() == {"done": 1}
    [warning] = log.of("worker.unreported")
    assert "others cannot see this worker" in warning.getMessage()


def test_relay_reports_its_workers_and_stops_when_one_is_drained(client: Client, dsn: str) -> None:
    buses = {"bus": Bus(), "ops": Bus()}
    for name in buses:
        add(client, name)
    with relaying(dsn, buses) as running:
        until(lambda: len(client.workers()) == 2)
        found = {(each.kind, *each.queues) for each in client.workers()}
        assert found == {("relay", "sink.bus"), ("relay", "sink.ops")}
        client.drain_worker(client.workers()[0].name, **ANA)
        running.thread.join(LONG)
        assert not running.thread.is_alive()
    assert client.workers() == []
