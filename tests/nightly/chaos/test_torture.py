"""Producers and consumers are killed at any moment: nothing is lost, invented, done twice or charged."""

import logging
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bartleby import dev
from tests.kit.sql import Connect, Connection, create, send
from tests.kit.worker import until
from tests.nightly.chaos import actors
from tests.nightly.chaos.actors import QUEUE
from tests.nightly.chaos.ledgers import Fault, Ledger, Sent, judge, read
from tests.nightly.chaos.stage import SEED

POLICY = {"lease": 2, "max_attempts": 32000, "crash_budget": 32000, "backoff": "fixed", "base": 0.2}
PRODUCERS, CONSUMERS = 6, 3
MESSAGES = 130_000
DUMPS, TURNS = 5, 3
# Sessions pause where a race has its window: after the clock, a position, a snapshot, a probe.
SLOWED = [
    ("clock", "", "timestamptz", "clock_timestamp()"),
    ("big", "p_payload jsonb, p_headers jsonb", "integer", "null"),
    (
        "ranges",
        "p_positions bigint[]",
        "int8multirange",
        "(select coalesce(range_agg(int8range(p, p + 1)), '{}') from unnest(p_positions) p)",
    ),
    (
        "running",
        "p_snapshot pg_snapshot, p_beyond boolean",
        "int8multirange",
        """(select coalesce(range_agg(int8range(x.xid, x.xid, '[]')), '{}') + case when p_beyond
          then int8multirange(int8range(pg_snapshot_xmax(p_snapshot)::text::bigint, null)) else '{}' end
          from (select s::text::bigint as xid from pg_snapshot_xip(p_snapshot) s) x)""",
    ),
]
log = logging.getLogger(__name__)
pytestmark = pytest.mark.timeout(1200)


@dataclass(slots=True)
class Torture:
    """The processes of one run, what each producer still has to send, and which were killed."""

    dsn: str
    folder: Path
    rng: random.Random = field(default_factory=lambda: random.Random(SEED))
    running: dict[str, Any] = field(default_factory=dict)
    quota: dict[str, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    started: int = 0

    def start(self, actor: Callable[..., None], quota: int = 0) -> None:
        self.started += 1
        name = f"{actor.__name__}{self.started}"
        arguments = [name, quota] if quota else []
        self.quota |= {name: quota} if quota else {}
        self.running[name] = actors.start(actor, self.dsn, self.folder, *arguments)

    def kill_one(self, actor: str) -> None:
        """Kill one of them with signal 9 and start another in its place; it may have ended before."""
        name = self.rng.choice([name for name in self.running if name.startswith(actor)] or [""])
        if not name:
            return
        process, since = self.running.pop(name), time.monotonic()
        process.kill()
        process.join()
        assert process.exitcode in {0, -signal.SIGKILL}, f"{name} failed"
        self.faults.append(Fault("killed", since, time.monotonic(), process.pid))
        if actor == "consume":
            self.start(actors.consume)
        elif (left := self.quota.pop(name) - self.sent(name)) > 0:
            self.start(actors.produce, left)

    def sent(self, name: str) -> int:
        return sum(len(entry) - 2 for entry in read(self.folder / f"{name}.sent") if entry[0] == "T")

    def reap(self) -> None:
        for name in [name for name in self.quota if self.running[name].exitcode is not None]:
            assert self.running.pop(name).exitcode == 0, f"{name} failed"
            del self.quota[name]

    def end(self, actor: str) -> None:
        (self.folder / f"{actor}.stop").touch()
        for name in [name for name in self.running if name.startswith(actor)]:
            process = self.running.pop(name)
            process.join(60)
            assert process.exitcode == 0, f"{name} failed"

    def tended(self) -> tuple[list[int], int]:
        """Return the leases that were taken back, and how often the ring turned."""
        entries = list(read(self.folder / "tended"))
        leases = [each for entry in entries for each in entry if isinstance(each, int)]
        return leases, sum("emptied" in str(entry) for entry in entries)


@contextmanager
def tortured(dsn: str, folder: Path, connect: Connect, total: int) -> Iterator[Torture]:
    """Kill producers and consumers while the block runs and until they have sent everything; then judge."""
    admin = connect()
    create(admin, QUEUE, **POLICY)
    run = Torture(dsn, folder)
    try:
        run.start(actors.tend)
        for _ in range(CONSUMERS):
            run.start(actors.consume)
        with slow_senders(connect, folder):
            for _ in range(PRODUCERS):
                run.start(actors.produce, total // PRODUCERS)
            yield run
            while run.quota:
                kill_some(run)
        # less than the minute after which the sweep behind the mark would find what was passed by
        until(lambda: not admin.execute("select from bartleby.messages limit 1").rowcount, 50, "an empty queue")
        run.end("consume")
        run.end("tend")
    finally:
        for process in run.running.values():
            process.kill()
            process.join()
    sent = Sent.read(folder)
    assert len(sent.committed | sent.maybe) >= total * 3 // 4
    assert sent.undone
    assert run.faults
    report = judge(folder, run.faults, lapsed=run.tended()[0])
    log.info("seed %s: %s; %s killed", SEED, report, len(run.faults))
    assert not report.broken, str(report)
    assert admin.execute("select from bartleby.dead_letters").rowcount == 0


@contextmanager
def slow_senders(connect: Connect, folder: Path) -> Iterator[None]:
    """Keep one transaction open and one prepared until the block ends; then commit both."""
    idle, prepared = connect(autocommit=False), connect(autocommit=False)
    for name, conn, count in (("idle", idle, 700), ("prepared", prepared, 300)):
        values = [f"{name}.{k}" for k in range(count)]
        for value in values:
            send(conn, value, QUEUE)
        Ledger(folder / f"{name}.sent").write(("T", 1, *values), ("C", 1))
    prepared.execute("prepare transaction 'torture'")
    prepared.rollback()
    idle.execute("select")  # the driver keeps the last portal of a statement with parameters, and so its snapshot
    yield
    idle.commit()
    prepared.autocommit = True
    prepared.execute("commit prepared 'torture'")


def kill_some(run: Torture) -> None:
    run.reap()
    time.sleep(0.3 + run.rng.random() * 0.4)
    run.kill_one(run.rng.choice(["produce", "consume", "consume"]))


def test_nothing_is_lost_while_the_ring_turns_and_dumps_run(dsn: str, connect: Connect, tmp_path: Path) -> None:
    pg_dump = shutil.which("pg_dump", path=dev.find_binaries())
    if pg_dump is None:
        pytest.skip("there is no pg_dump beside this PostgreSQL")
    with tortured(dsn, tmp_path, connect, MESSAGES) as run:
        for _ in range(DUMPS):
            dump = subprocess.Popen([pg_dump, "-d", dsn, "-f", str(tmp_path / "dump.sql")])
            while dump.poll() is None:
                kill_some(run)
            assert dump.returncode == 0
            for _ in range(6):  # between two dumps the ring may turn
                kill_some(run)
    assert run.tended()[1] >= TURNS


def test_nothing_is_lost_while_a_long_reader_holds_its_snapshot(dsn: str, connect: Connect, tmp_path: Path) -> None:
    reader = connect()
    reader.execute("begin isolation level repeatable read")
    reader.execute("select count(*) from bartleby.queue")
    with tortured(dsn, tmp_path, connect, MESSAGES):
        pass
    assert reader.execute("select from bartleby.messages").rowcount == 0
    reader.rollback()


@pytest.mark.own_database
def test_nothing_is_lost_when_the_windows_of_every_race_are_wide(
    conn: Connection, dsn: str, connect: Connect, tmp_path: Path
) -> None:
    for name, arguments, result, slowed in SLOWED:
        conn.execute(
            f"create or replace function bartleby.{name}({arguments}) returns {result} language plpgsql as $$"
            f" declare v_value {result} := {slowed};"
            f" begin if random() < 0.05 then perform pg_sleep(random() * 0.03); end if; return v_value; end $$".encode()
        )
    with tortured(dsn, tmp_path, connect, MESSAGES // 2):
        pass
