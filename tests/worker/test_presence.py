"""Workers that say that they are there: real ones, in this process and in others, and those of a relay."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import Bartleby, Client, Message, WorkerReport, presence
from tests.kit.proxy import proxied
from tests.kit.relay import ANA, Bus, add, relaying
from tests.kit.worker import Program, Told, drain, state, until, working

Conn = psycopg.Connection[tuple[Any, ...]]
BY: dict[str, Any] = {"actor": "ana", "reason": "deploy"}

APP = """
import time
from bartleby import Bartleby

app = Bartleby(version="2.4.1")

@app.handler("orders")
def handle(order: int) -> None:
    time.sleep(order)
"""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody wants to wait ten seconds for each report; who stops while one is under way waits for it."""
    monkeypatch.setattr(presence, "EVERY", 0.05)
    monkeypatch.setattr(presence, "_UNDER_WAY", 2.0)
    monkeypatch.setattr(presence, "_LAST_WORDS", 4.0)


@pytest.fixture
def client(app: Bartleby) -> Client:
    return app.client


@pytest.fixture
def busy(app: Bartleby) -> Iterator[threading.Event]:
    """A handler that runs until it is told to end."""
    end = threading.Event()

    @app.handler("orders", concurrency=7)
    def handle(_: Message) -> None:
        assert end.wait(20)

    yield end
    end.set()


def the_worker(client: Client) -> WorkerReport:
    [found] = client.workers()
    return found


def test_a_worker_is_seen_from_its_start_to_its_end(app: Bartleby, client: Client, busy: threading.Event) -> None:
    app.version = "2.4.1"
    app.handler("mails", concurrency=3)(print)
    client.send_many("orders", [{"payload": 1}, {"payload": 2}])
    with working(app) as running:
        until(lambda: client.workers() and the_worker(client).running == 2)
        found = the_worker(client)
        assert found.name == running.worker.name
        assert found.name.startswith(f"{found.host}:{found.pid}:")
        assert (found.kind, found.state, found.version) == ("worker", "working", "2.4.1")
        assert (found.queues, found.concurrency, found.wanted) == (["mails", "orders"], 10, "run")
        assert (found.messages, found.oldest_lease_at is None) == (2, False)
        busy.set()
        until(lambda: the_worker(client).running == 0)
        running.end()
        assert client.workers() == []


def test_the_first_report_comes_at_the_start(
    app: Bartleby, client: Client, busy: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "EVERY", 3600.0)
    with working(app):
        until(client.workers)


def test_one_that_blocks_its_event_loop_is_still_seen(app: Bartleby, client: Client) -> None:
    end = threading.Event()

    @app.handler("orders")
    async def handle(_: Message) -> None:
        end.wait(20)

    client.send("orders", 1)
    with working(app):
        until(lambda: client.workers() and the_worker(client).running == 1)
        seen = the_worker(client).seen_at
        until(lambda: the_worker(client).seen_at > seen)
        end.set()


def test_one_that_is_told_to_drain_finishes_what_runs_and_stops(
    app: Bartleby, client: Client, busy: threading.Event, told: Told
) -> None:
    client.send("orders", 1)
    with working(app) as running:
        until(lambda: client.workers() and the_worker(client).running == 1)
        assert client.drain_worker(running.worker.name, **BY)
        until(lambda: told.of("worker.draining"))
        until(running.worker._shared.stopping.is_set)
        client.send("orders", 2)
        assert the_worker(client).state == "draining"
        assert running.thread.is_alive(), "it waits for its handler"
        busy.set()
        assert running.join() == {"done": 1}
        assert client.workers() == []
        assert [each.ready for each in client.queues()] == [1]
    assert len(told.of("worker.draining")) == 1


def test_a_signal_after_that_is_the_first(app: Bartleby, client: Client, busy: threading.Event) -> None:
    """Whoever drains workers and then sends SIGTERM to all of them cuts no handler short."""
    client.send("orders", 1)
    with working(app) as running:
        until(lambda: client.workers() and the_worker(client).running == 1)
        client.drain_worker(running.worker.name, **BY)
        until(running.worker._shared.stopping.is_set)
        running.stop()
        until(lambda: running.worker._told)
        assert not running.worker._now.is_set()
        busy.set()
        assert running.join() == {"done": 1}


def test_a_wish_that_comes_while_it_stops_changes_nothing(
    app: Bartleby, client: Client, busy: threading.Event, told: Told
) -> None:
    client.send("orders", 1)
    with working(app) as running:
        until(lambda: client.workers() and the_worker(client).running == 1)
        running.stop()
        until(running.worker._shared.stopping.is_set)
        client.drain_worker(running.worker.name, **BY)
        until(lambda: told.of("worker.draining"))
        assert not running.worker._now.is_set()
        busy.set()
        assert running.join() == {"done": 1}


def test_one_that_is_not_to_be_seen_is_not(app: Bartleby, client: Client) -> None:
    seen = []

    @app.handler("orders")
    def handle(_: Message) -> None:
        seen.append(client.workers())

    client.send("orders", 1)
    drain(app, kind=None)
    assert seen == [[]]


# A report that fails


def test_a_worker_that_cannot_report_works_all_the_same(app: Bartleby, client: Client, conn: Conn, told: Told) -> None:
    conn.execute("drop function bartleby.report_worker")
    done = threading.Event()

    @app.handler("orders", lease=6)
    def handle(_: Message) -> None:
        assert done.wait(20)

    client.send("orders", 1)
    with working(app) as running:
        until(lambda: running.worker.running == 1)
        [lease] = running.worker._shared.holding.leases.values()
        renewed = lease.extended
        until(lambda: told.of("worker.unreported") and lease.extended > renewed)
        done.set()
        until(lambda: running.worker.counts["done"] == 1)
        counts = running.end()
    assert counts == {"done": 1}
    [warning] = told.of("worker.unreported")
    assert "others cannot see this worker" in warning.getMessage()


def test_a_report_that_nobody_answers_keeps_no_lease_from_being_renewed(
    app: Bartleby, client: Client, conn: Conn, told: Told
) -> None:
    """Somebody has locked the table: the report gives up, and the renewal on the same connection gets its turn."""
    done = threading.Event()

    @app.handler("orders", lease=6)
    def handle(_: Message) -> None:
        assert done.wait(20)

    client.send("orders", 1)
    with working(app) as running:
        until(lambda: running.worker.running == 1)
        with conn.transaction():
            conn.execute("lock table bartleby.worker in access exclusive mode")
            [lease] = running.worker._shared.holding.leases.values()
            began = lease.extended
            until(lambda: lease.extended > began + 6)
        done.set()
        until(lambda: running.worker.counts["done"] == 1)
    assert not told.of("lease.lost")


def test_a_database_that_does_not_answer_holds_up_no_stop(
    client: Client, dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "_UNDER_WAY", 0.2)
    monkeypatch.setattr(presence, "_LAST_WORDS", 1.0)
    with proxied(int(conn.info.port)) as proxy:
        far = Bartleby(proxy.dsn(dsn))
        far.handler("orders")(print)
        with working(far) as running:
            until(client.workers)
            proxy.mode = "blackhole"
            running.stop()
            running.stop()
            assert running.join(20) == {}
            proxy.mode = "pass"


# As programs


def test_a_program_is_drained_and_ends_well(client: Client, dsn: str, tmp_path: Path) -> None:
    """With the ten seconds that users have."""
    (tmp_path / "shop.py").write_text(APP)
    with Program(dsn, "shop:app", cwd=tmp_path) as program:
        until(client.workers)
        found = the_worker(client)
        assert (found.pid, found.version) == (program.pid, "2.4.1")
        client.drain_worker(found.name, **BY)
        assert program.end(30) == 0
        assert "worker.draining" in program.text()
    assert client.workers() == []


def test_one_of_several_processes_is_drained_and_not_replaced(
    client: Client, dsn: str, tmp_path: Path, conn: Conn
) -> None:
    (tmp_path / "shop.py").write_text(APP)
    with Program(dsn, "shop:app", "--processes", "2", cwd=tmp_path) as program:
        until(lambda: len(client.workers()) == 2)
        first, second = client.workers()
        client.drain_worker(first.name, **BY)
        until(lambda: [each.name for each in client.workers()] == [second.name], 30)
        client.send("orders", 0)
        until(lambda: state(conn) == (0, 0, 0, 0))
        program.term()
        assert program.end() == 0
    assert client.workers() == []


def test_one_that_is_killed_leaves_its_name(client: Client, dsn: str, tmp_path: Path, conn: Conn) -> None:
    (tmp_path / "shop.py").write_text(APP)
    client.send("orders", 20)
    with Program(dsn, "shop:app", cwd=tmp_path) as program:
        until(lambda: client.workers() and the_worker(client).messages == 1)
        program.process.send_signal(signal.SIGKILL)
        program.end()
    conn.execute("update bartleby.worker set seen_at = seen_at - interval '31 seconds'")
    found = the_worker(client)
    assert (found.state, found.messages) == ("silent", 1)


# The relay


def test_the_workers_of_a_relay_are_seen_as_what_they_are(client: Client, dsn: str) -> None:
    buses = {"bus": Bus(), "ops": Bus()}
    for name in buses:
        add(client, name)
    with relaying(dsn, buses):
        until(lambda: len(client.workers()) == 2)
        assert {(each.kind, *each.queues) for each in client.workers()} == {
            ("relay", "sink.bus"),
            ("relay", "sink.ops"),
        }
    assert client.workers() == []


def test_a_relay_stops_when_one_of_its_workers_is_drained(client: Client, dsn: str) -> None:
    buses = {"bus": Bus(), "ops": Bus()}
    for name in buses:
        add(client, name)
    with relaying(dsn, buses) as running:
        until(lambda: len(client.workers()) == 2)
        client.drain_worker(client.workers()[0].name, **ANA)
        running.thread.join(20)
        assert not running.thread.is_alive()
    assert client.workers() == []
