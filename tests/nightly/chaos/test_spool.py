"""Outages, kills and bad disks while messages fail: every failure is recorded, and only once."""

import asyncio
import contextlib
import json
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
import pytest
from psycopg.types.json import Jsonb

from bartleby import Bartleby, Client, Message, dev, schema, spool, spooling
from bartleby.config import Settings
from tests.kit.proxy import Proxy, proxied
from tests.kit.worker import Program, Running, Told, drain, row, sessions, state, until, working

Conn = psycopg.Connection[tuple[Any, ...]]

SHOP = """
import os, time
from pathlib import Path
from bartleby import Bartleby

app = Bartleby()
note = os.open("notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def say(*words):
    os.write(note, (" ".join(map(str, words)) + "\\n").encode())

@app.handler("orders", concurrency=20)
def handle(message):
    say("began", message.id, message.lease_id)
    while not Path("go").exists():
        time.sleep(0.005)
    if Path("broken").exists():
        say("failed", message.id, message.lease_id)
        raise KeyError(f"customer {message.payload}")
    say("done", message.id, message.lease_id)
"""


class Own:
    """A server that only this test uses, and may stop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.start()
        self.dsn = self.server.dsn
        with self.connection() as connection:
            schema.install(connection)

    def start(self) -> None:
        self.server = dev.start(self._folder, settings={"fsync": "off", "max_connections": "50"})

    def stop(self) -> None:
        with self.connection() as connection:
            connection.execute("checkpoint")  # a claim need not be on the disk, and would be undone
        self.server.stop("immediate")

    def connection(self) -> Conn:
        return psycopg.connect(self.dsn, autocommit=True)


@pytest.fixture
def own(scratch: Path) -> Iterator[Own]:
    folder = Path(tempfile.mkdtemp(prefix="bartleby-test-", dir=scratch))
    made = Own(folder)
    yield made
    made.server.stop("immediate")
    shutil.rmtree(folder)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "broken").touch()
    return tmp_path


def begin(shop: Path, own: Own) -> Program:
    return Program(own.dsn, "shop:app", cwd=shop, environment={"BARTLEBY_SPOOL": str(shop / "spool")})


def notes(shop: Path, word: str) -> list[tuple[int, int]]:
    """What handlers wrote: message and lease."""
    found = [line.split() for line in (shop / "notes").read_text().splitlines()] if (shop / "notes").exists() else []
    return [(int(message), int(lease)) for what, message, lease in found if what == word]


def spooled(folder: Path) -> list[dict[str, Any]]:
    found = [path.read_text() for path in folder.rglob("*.jsonl")]
    return [json.loads(line) for text in found for line in text.splitlines(keepends=True) if line.endswith("\n")]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def ledger(conn: Conn) -> Counter[tuple[str, str]]:
    return Counter(conn.execute("select outcome, error_type from bartleby.attempts").fetchall())


def recorded(conn: Conn) -> list[tuple[int, int]]:
    """Message and lease of each failure of a handler that the ledger has."""
    query = "select message_id, lease_id from bartleby.attempts where error_type = 'KeyError' order by 1, 2"
    return conn.execute(query).fetchall()


@contextlib.contextmanager
def failing_in_the_dark(own: Own, shop: Path, count: int = 20) -> Iterator[Program]:
    """Stop the server while handlers run, let them fail, and go on when all is on the disk."""
    with begin(shop, own) as worker:
        until(lambda: len(notes(shop, "began")) == count, what="handlers")
        own.stop()
        (shop / "go").touch()
        until(lambda: len(spooled(shop / "spool")) == count, what="the spool")
        yield worker


def prepare(own: Own, count: int = 20, **policy: Any) -> None:
    with Bartleby(own.dsn).client as client:
        client.create_queue("orders", {"backoff": "none", "lease": 60, **policy})
        client.send_many("orders", [{"payload": number} for number in range(count)])


def reaped(conn: Conn) -> None:
    conn.execute("update bartleby.lease set until = bartleby.clock() - interval '1 second'")
    conn.execute("select bartleby.reap()")


# A worker that dies with its evidence


@pytest.mark.parametrize("max_attempts", [3, 1])
def test_failures_of_a_killed_worker_are_entered_by_the_next(own: Own, shop: Path, max_attempts: int) -> None:
    prepare(own, max_attempts=max_attempts)
    with failing_in_the_dark(own, shop) as worker:
        worker.process.kill()
        worker.end()
    failed = sorted(notes(shop, "failed"))
    own.start()
    (shop / "broken").unlink()
    with begin(shop, own) as heir, own.connection() as conn:
        until(lambda: len(recorded(conn)) == 20)
        if max_attempts == 1:
            until(lambda: state(conn) == (0, 0, 0, 20))
            assert row(conn, "select count(*) from bartleby.dead_letters where traceback like '%%KeyError%%'") == 20
        else:
            until(lambda: len(notes(shop, "done")) == 20 and state(conn) == (0, 0, 0, 0))
        assert recorded(conn) == failed
        assert ledger(conn) == {("failed", "KeyError"): 20}
        until(lambda: files(shop / "spool") == [])
        heir.wait_for("failures that were kept")
        heir.term()
        assert heir.end() == 0


def test_failures_of_lapsed_leases_are_evidence_and_not_charged(own: Own, shop: Path) -> None:
    prepare(own, max_attempts=1)
    with failing_in_the_dark(own, shop) as worker:
        worker.process.kill()
        worker.end()
    own.start()
    (shop / "broken").unlink()
    with own.connection() as conn:
        reaped(conn)
        assert ledger(conn) == {("lost", "WorkerLost"): 20}
        with begin(shop, own):
            until(lambda: state(conn) == (0, 0, 0, 0) and ledger(conn) == {("lost", "KeyError"): 20})
            until(lambda: files(shop / "spool") == [])
        assert recorded(conn) == sorted(notes(shop, "failed"))
        assert Counter(message for message, _ in notes(shop, "done")).total() == 20


def test_stopping_worker_writes_at_once(own: Own, shop: Path) -> None:
    prepare(own, max_attempts=1)
    with begin(shop, own) as worker:
        until(lambda: len(notes(shop, "began")) == 20)
        own.stop()
        worker.term()
        worker.wait_for("finishing 20 running handlers")
        (shop / "go").touch()
        assert worker.end() == 0
    assert len(spooled(shop / "spool")) == 20
    own.start()
    (shop / "broken").unlink()
    with begin(shop, own), own.connection() as conn:
        until(lambda: state(conn) == (0, 0, 0, 20))
        assert ledger(conn) == {("failed", "KeyError"): 20}
        until(lambda: files(shop / "spool") == [])


def test_worker_that_runs_until_idle_enters_what_it_finds(own: Own, shop: Path) -> None:
    prepare(own, max_attempts=1)
    with failing_in_the_dark(own, shop) as worker:
        worker.process.kill()
        worker.end()
    own.start()
    app = Bartleby(own.dsn, settings=Settings(spool=str(shop / "spool")))
    app.handler("others")(print)
    drain(app)
    assert files(shop / "spool") == []
    with own.connection() as conn:
        assert ledger(conn) == {("failed", "KeyError"): 20}


def test_kills_and_outages_lose_no_failure(own: Own, shop: Path) -> None:
    """Whatever is killed when: each failure that was told of on the disk is in the ledger, once."""
    rng = random.Random(7)
    prepare(own, 60, max_attempts=100, crash_budget=100, breaker="off", lease=4)
    (shop / "go").touch()
    with contextlib.ExitStack() as opened:
        worker = opened.enter_context(begin(shop, own))
        for _ in range(4):
            enough = len(notes(shop, "failed")) + 20
            until(lambda enough=enough: len(notes(shop, "failed")) > enough)  # type: ignore[misc]
            own.stop()
            safe = at_rest(shop)
            first, then = rng.sample([own.start, worker.process.kill], 2)
            first()
            then()
            worker = opened.enter_context(begin(shop, own))
            with own.connection() as conn:
                until(lambda safe=safe: safe <= set(recorded(conn)), 30)  # type: ignore[misc]
        (shop / "broken").unlink()
        with own.connection() as conn:
            until(lambda: state(conn) == (0, 0, 0, 0), 30)
            until(lambda: files(shop / "spool") == [])
            assert set(Counter(recorded(conn)).values()) == {1}
            assert set(recorded(conn)) <= set(notes(shop, "failed"))
        assert {message for message, _ in notes(shop, "done")} == {message for message, _ in notes(shop, "began")}


def at_rest(shop: Path) -> set[tuple[int, int]]:
    """Wait until nothing more has happened for two seconds; return what is in the spool."""
    seen, since = (-1, -1), 0.0

    def still() -> bool:
        nonlocal seen, since
        now = len(notes(shop, "failed")), len(spooled(shop / "spool"))
        if now != seen:
            seen, since = now, time.monotonic()
        return time.monotonic() - since > 2

    until(still, 30)
    return {(each["message_id"], each["lease_id"]) for each in spooled(shop / "spool")}


# A worker that lives on


class Failing:
    """Handlers that wait for a word, and then fail; that of a `slow` payload only ends when all is well."""

    def __init__(self, app: Bartleby, *, slow: int | None = None) -> None:
        self.slow = slow
        self.began = threading.Semaphore(0)
        self.go, self.broken = threading.Event(), True
        self.runs: Counter[int] = Counter()
        app.handler("orders", concurrency=20)(self.handle)

    def handle(self, message: Message) -> None:
        self.runs[message.id] += 1
        if self.broken:
            self.began.release()
            self.go.wait(60)
            if message.payload != self.slow:
                raise KeyError(f"customer {message.payload}")
            while self.broken:
                time.sleep(0.005)

    def all_began(self, count: int = 20) -> None:
        for _ in range(count):
            assert self.began.acquire(timeout=30)


def application(dsn: str, folder: Path) -> Bartleby:
    return Bartleby(dsn, settings=Settings(spool=str(folder)))


def test_worker_that_survives_the_outage_settles_and_leaves_nothing(own: Own, tmp_path: Path, told: Told) -> None:
    prepare(own, max_attempts=2)
    app = application(own.dsn, tmp_path)
    failing = Failing(app)
    with working(app) as running:
        failing.all_began()
        own.stop()
        failing.go.set()
        until(lambda: len(spooled(tmp_path)) == 20)
        assert running.worker.counts == {}
        failing.broken = False
        own.start()
        with own.connection() as conn:
            until(lambda: state(conn) == (0, 0, 0, 0) and running.worker.counts["done"] == 20)
            assert ledger(conn) == {("failed", "KeyError"): 20}
        until(lambda: files(tmp_path) == [])
        assert running.end() == {"retried": 20, "done": 20}
    assert set(failing.runs.values()) == {2}
    assert len(told.of("spool.kept")) >= 1
    assert told.of("spool.failed") == told.of("spool.entered") == []


def test_short_outage_writes_nothing(
    dsn: str, conn: Conn, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spooling, "_PATIENCE", 10.0)  # a new connection takes long where many want the processor
    app = application(dsn, tmp_path)
    app.client.create_queue("orders", {"backoff": "none", "max_attempts": 2})
    failing = Failing(app)
    app.send_many("orders", [{"payload": number} for number in range(20)])
    with working(app) as running:
        failing.all_began()
        for pid in sessions(conn, "settles"):
            conn.execute("select pg_terminate_backend(%s, 5000)", [pid])
        failing.broken = False
        failing.go.set()
        until(lambda: running.worker.counts["done"] == 20)
        running.end()
    assert list(tmp_path.iterdir()) == []
    assert ledger(conn) == {("failed", "KeyError"): 20}
    assert [record for record in told.records if str(getattr(record, "event", "")).startswith("spool")] == []


def test_slow_database_is_waited_for(
    dsn: str, conn: Conn, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures wait for seconds, but only for their turn."""
    monkeypatch.setattr(spooling, "_PATIENCE", 3.0)
    app = application(dsn, tmp_path)
    app.client.create_queue("orders", {"max_attempts": 1, "breaker": "off"})
    conn.execute(
        "create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(0.5); return null; end $$"
    )
    conn.execute("create trigger slow after insert on bartleby.attempt execute function slow()")
    app.send_many("orders", [{"payload": number} for number in range(10)])

    @app.handler("orders", concurrency=1)
    async def handle(message: Message) -> None:
        raise KeyError(message.payload)

    with working(app, claim_limit=1) as running:
        until(lambda: running.worker.counts["dead"] == 10)
        running.end()
    assert list(tmp_path.iterdir()) == []
    assert told.of("spool.kept") == []


@pytest.fixture
def wire(server: dev.Server) -> Iterator[Proxy]:
    with proxied(server.port) as made:
        yield made


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("kept", [True, False])
def test_outage_that_outlasts_the_lease_costs_no_evidence(
    dsn: str, conn: Conn, wire: Proxy, tmp_path: Path, *, slow: bool, kept: bool
) -> None:
    """With a file or without one; and whether all of the lease was finished or something in it still ran."""
    with Bartleby(dsn).client as client:
        client.create_queue("orders", {"backoff": "none", "max_attempts": 1, "lease": 2})
        client.send_many("orders", [{"payload": number} for number in range(4)])
    app = Bartleby(wire.dsn(dsn), settings=Settings(spool=str(tmp_path) if kept else "off"))
    failing = Failing(app, slow=0 if slow else None)
    failures = 3 if slow else 4
    with working(app) as running:
        failing.all_began(4)
        wire.mode = "blackhole"
        failing.go.set()
        until(lambda: not kept or len(spooled(tmp_path)) == failures)
        until(lambda: lapsed(conn))
        conn.execute("select bartleby.reap()")
        assert ledger(conn) == {("lost", "WorkerLost"): 4}
        failing.broken = False
        wire.mode = "pass"
        wire.cut()
        until(lambda: ledger(conn)["lost", "KeyError"] == failures, 30)
        until(lambda: state(conn) == (0, 0, 0, 0), 30)
        until(lambda: files(tmp_path) == [])
        running.end()
    assert +ledger(conn) == +Counter({("lost", "KeyError"): failures, ("lost", "WorkerLost"): 4 - failures})


def lapsed(conn: Conn) -> bool:
    query = "select bool_and(until < bartleby.clock()) from bartleby.lease where not isempty(pending)"
    return bool(row(conn, query))


# Several, and bad luck


def test_two_workers_share_a_directory(own: Own, tmp_path: Path) -> None:
    """Each has a file of its own, and leaves the other's alone while that lives."""
    prepare(own, 40, max_attempts=1)
    apps = [application(own.dsn, tmp_path) for _ in range(2)]
    failing = [Failing(app) for app in apps]
    with mock.patch.object(spooling, "_LOOK_AROUND", 0.1), working(apps[0]) as one, working(apps[1]) as two:
        for each in failing:
            each.all_began()
        own.stop()
        for each in failing:
            each.go.set()
        until(lambda: len(spooled(tmp_path)) == 40)
        assert len(files(tmp_path)) == 2
        own.start()
        until(lambda: one.worker.counts["dead"] == two.worker.counts["dead"] == 20)
        until(lambda: files(tmp_path) == [])
    with own.connection() as conn:
        assert ledger(conn) == {("failed", "KeyError"): 40}


def test_living_worker_enters_the_failures_of_a_killed_one(own: Own, shop: Path) -> None:
    prepare(own, max_attempts=1)
    app = application(own.dsn, shop / "spool")
    app.handler("others")(print)
    with mock.patch.object(spooling, "_LOOK_AROUND", 0.1), working(app), failing_in_the_dark(own, shop) as worker:
        own.start()
        worker.process.kill()
        worker.end()
        with own.connection() as conn:
            until(lambda: state(conn) == (0, 0, 0, 20), 30)
            until(lambda: files(shop / "spool") == [])
            assert ledger(conn) == {("failed", "KeyError"): 20}


def outlived(own: Own, folder: Path, meanwhile: Callable[[Running], object]) -> Counter[str]:
    """Let a worker live through an outage; return its counts."""
    prepare(own, max_attempts=2)
    app = application(own.dsn, folder)
    failing = Failing(app)
    with working(app) as running:
        failing.all_began()
        own.stop()
        failing.go.set()
        meanwhile(running)
        failing.broken = False
        own.start()
        with own.connection() as conn:
            until(lambda: state(conn) == (0, 0, 0, 0), 30)
            assert ledger(conn) == {("failed", "KeyError"): 20}
        return running.end()


def test_unusable_directory_is_reported_once(own: Own, tmp_path: Path, told: Told) -> None:
    (tmp_path / "file").touch()
    counts = outlived(
        own, tmp_path / "file" / "spool", lambda running: until(lambda: len(running.worker._spooler._kept) == 20)
    )
    assert counts == {"retried": 20, "done": 20}
    assert [record.getMessage() for record in told.of("spool.unusable")] == [
        f"failures are not kept while the database is away: {tmp_path / 'file'} is no directory"
    ]
    assert told.of("spool.failed") == []


def test_full_disk_is_reported_once(own: Own, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    made = spool.Spool.__init__
    monkeypatch.setattr(spool.Spool, "__init__", lambda self, folder: made(self, folder, limit=1000))
    tries: list[int] = []
    write = spool.Spool.write

    def counted(self: spool.Spool, lines: Any) -> None:
        tries.append(1)
        write(self, lines)

    monkeypatch.setattr(spool.Spool, "write", counted)
    counts = outlived(own, tmp_path, lambda _: until(lambda: len(tries) >= 3))
    assert counts == {"retried": 20, "done": 20}
    (said,) = told.of("spool.failed")
    assert "the spool has reached its" in said.getMessage()
    assert files(tmp_path) == []


def test_hanging_disk_blocks_nothing(own: Own, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, heals = threading.Event(), threading.Event()

    def hang(_file: int) -> None:
        hangs.set()
        heals.wait(60)

    monkeypatch.setattr("bartleby.spool.os.fsync", hang)

    def meanwhile(running: Running) -> None:
        assert hangs.wait(20)
        assert running._loop is not None
        turned = threading.Event()
        running._loop.call_soon_threadsafe(turned.set)
        assert turned.wait(20), "the event loop waits for the disk"

    counts = outlived(own, tmp_path, meanwhile)
    heals.set()
    assert counts == {"retried": 20, "done": 20}
    assert told.of("loop.blocked") == []


def _kept(conn: Conn, message: Message, failure: dict[str, Any], worker: str = "w") -> dict[str, Any]:
    return {
        "id": f"entry {message.id}",
        "database": row(conn, "select bartleby.spool_identity()"),
        "queue": "orders",
        "worker": worker,
        "lease_id": message.lease_id,
        "position": message.position,
        "message_id": message.id,
        "attempt": message.attempt,
        "failed_at": time.time(),
        "failure": {"position": message.position, **failure},
    }


@pytest.mark.parametrize("other", ["a worker", "somebody who erases"])
async def test_entering_several_does_not_deadlock(
    dsn: str, conn: Conn, connect: Callable[..., Conn], other: str
) -> None:
    """The first of two opens or tells the group of a bug; somebody has what the second needs, and wants that group."""
    with Client(dsn) as client:
        client.create_queue("orders", {"max_attempts": 1, "backoff": "none"})
        sent = client.send("orders", 1), client.send("orders", 2, key="customer-7")
        leases = [client.claim("orders", "w"), client.claim("orders", "w")]
        first, second = (lease.messages[0] for lease in leases if lease is not None)
        bug = {"error_type": "KeyError", "error": "x", "fingerprint": "f"}
        session = connect(autocommit=False)
        if other == "a worker":
            session.execute("select from bartleby.lease where id = %s for update", [second.lease_id])
            call = "select count(*) from bartleby.fail(%s, %s)"
            given: list[Any] = [second.lease_id, Jsonb([{"position": second.position, **bug}])]
        else:
            fail = "select bartleby.fail(%s, %s)"
            conn.execute(fail, [second.lease_id, Jsonb([{"position": second.position, **bug}])])
            client.replay([sent[1]], actor="ana", reason="why")
            again = client.claim("orders", "w")
            assert again is not None
            second = again.messages[0]
            session.execute("select from bartleby.dead_letter where message_id = %s for update", [sent[1]])
            call, given = "select bartleby.erase_key('customer-7', 'ana', 'asked for')", []
        kept = [_kept(conn, each, {**bug, "worker_version": "2"}) for each in (first, second)]
    spooler = spooling.Spooler(Settings(dsn=dsn), mock.Mock(), "w", asyncio.Event())
    entering = asyncio.create_task(spooler._entered({each["id"]: json.dumps(each) for each in kept}))
    waits = "select from pg_stat_activity where application_name = 'bartleby spool' and wait_event_type = 'Lock'"
    await asyncio.to_thread(until, lambda: conn.execute(waits).rowcount)
    assert (await asyncio.to_thread(session.execute, call.encode(), given)).fetchone() == (1,)
    await asyncio.to_thread(session.commit)
    assert list((await entering).values()) == ["settled", "known" if other == "a worker" else "settled"]
    await spooler.close()
