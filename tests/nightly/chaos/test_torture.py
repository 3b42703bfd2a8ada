"""Producers and consumers are killed at any moment: no message is lost, invented or acknowledged twice."""

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from bartleby import dev
from tests.nightly.chaos.actors import QUEUE
from tests.nightly.chaos.ledgers import Report, compare, read

Connection = psycopg.Connection[tuple[Any, ...]]
ROOT = Path(__file__).parents[3]
POLICY = {"lease": 2, "max_attempts": 32000, "crash_budget": 32000, "backoff": "fixed", "base": 0.2}
PRODUCERS, CONSUMERS = 6, 3
MESSAGES = 130_000
DUMPS, TURNS = 5, 3
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


@dataclass(slots=True)
class Stage:
    """The processes of one run, their ledgers, and which of them were killed."""

    dsn: str
    folder: Path
    rng: random.Random
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    killed: set[str] = field(default_factory=set)
    started: int = 0

    def start(self, actor: str, quota: int = 0) -> str:
        self.started += 1
        name = f"{actor}{self.started}"
        words = [actor, self.dsn, self.ledger(name), name, self.stop(actor), quota]
        command = [sys.executable, "-m", "tests.nightly.chaos.actors", *(str(word) for word in words)]
        self.running[name] = subprocess.Popen(command, cwd=ROOT)
        return name

    def ledger(self, name: str) -> Path:
        return self.folder / f"{name}.ledger"

    def ledgers(self, actor: str) -> list[Path]:
        return sorted(self.folder.glob(f"{actor}*.ledger"))

    def stop(self, actor: str) -> Path:
        return self.folder / f"{actor}.stop"

    def alive(self, actor: str) -> list[str]:
        return [name for name in self.running if name.startswith(actor)]

    def kill_one(self, actor: str) -> str | None:
        """Kill one of them with signal 9 and return its name; it may have ended before."""
        name = self.rng.choice(self.alive(actor) or [None])
        if name is None:
            return None
        process = self.running.pop(name)
        process.kill()
        if (code := process.wait()) != 0:
            assert code == -signal.SIGKILL, f"{name} failed"
            self.killed.add(name)
        return name

    def end(self, actor: str) -> None:
        self.stop(actor).touch()
        for name in self.alive(actor):
            assert self.running.pop(name).wait(60) == 0, f"{name} failed"

    def sent(self, name: str) -> int:
        path = self.ledger(name)
        return sum(len(values) for word, _, values in read(path) if word == "T") if path.exists() else 0


@contextmanager
def stage(dsn: str, folder: Path) -> Iterator[Stage]:
    opened = Stage(dsn, folder, random.Random(int(os.environ.get("BARTLEBY_SEED", "0"))))
    try:
        yield opened
    finally:
        for process in opened.running.values():
            process.kill()
            process.wait()


@contextmanager
def slow_senders(connect: Callable[..., Connection]) -> Iterator[set[str]]:
    """Keep one transaction open and one prepared until the body ends; then commit both. Yields what they sent."""
    idle, prepared = connect(autocommit=False), connect(autocommit=False)
    values = {"idle": [f"idle.{k}" for k in range(700)], "prepared": [f"prepared.{k}" for k in range(300)]}
    for name, conn in (("idle", idle), ("prepared", prepared)):
        for value in values[name]:
            conn.execute("select bartleby.send(%s, %s)", [QUEUE, Jsonb(value)])
    prepared.execute("prepare transaction 'torture'")
    prepared.rollback()
    idle.execute("select")  # the driver keeps the last portal of a statement with parameters, and so its snapshot
    yield {*values["idle"], *values["prepared"]}
    idle.commit()
    prepared.autocommit = True
    prepared.execute("commit prepared 'torture'")


def supervise(running: Stage, quota: int, *, dumps: list[int] | None) -> None:
    """Kill one process after another and start another in its place, until the producers have sent their quota."""
    left = {running.start("produce", quota): quota for _ in range(PRODUCERS)}
    dump, pause_until = None, 0.0
    while left or (dumps is not None and len(dumps) < DUMPS):
        for name in list(left):
            if (process := running.running.get(name)) is not None and process.poll() is not None:
                assert running.running.pop(name).returncode == 0, f"{name} failed"
                del left[name]
        if dumps is not None and dump is not None and dump.poll() is not None:
            dumps.append(dump.returncode)
            dump, pause_until = None, time.monotonic() + 3  # between two dumps the ring may turn
        elif dumps is not None and dump is None and time.monotonic() > pause_until:
            dump = start_dump(running)
        time.sleep(0.3 + running.rng.random() * 0.4)
        victim = running.kill_one(running.rng.choice(["produce", "consume", "consume"]))
        if victim is not None and victim.startswith("consume"):
            running.start("consume")
        elif victim is not None:
            rest = left.pop(victim) - running.sent(victim)
            if rest > 0:
                left[running.start("produce", rest)] = rest
    if dump is not None and dumps is not None:
        dumps.append(dump.wait(60))


def start_dump(running: Stage) -> subprocess.Popen[bytes]:
    program = pg_dump()
    assert program is not None
    return subprocess.Popen([program, "-d", running.dsn, "-f", str(running.folder / "dump.sql")])


def pg_dump() -> str | None:
    return shutil.which("pg_dump", path=dev.find_binaries())


def torture(
    connect: Callable[..., Connection],
    running: Stage,
    total: int,
    dumps: list[int] | None = None,
) -> Report:
    admin = connect()
    admin.execute("select bartleby.create_queue(%s, %s)", [QUEUE, Jsonb(POLICY)])
    running.start("tend")
    for _ in range(CONSUMERS):
        running.start("consume")
    with slow_senders(connect) as extra:
        supervise(running, total // PRODUCERS, dumps=dumps)
    wait_until_empty(admin)
    running.end("consume")
    running.end("tend")
    report = compare(running.ledgers("produce"), running.ledgers("consume"), running.killed, extra)
    taken_back = {int(lease) for path in running.ledgers("tend") for word, _, leases in read(path) if word == "X"
                  for lease in leases}  # fmt: skip
    assert report.leases_lost <= taken_back, "a living consumer lost a lease that was not taken back"
    log.info("%s", report)
    assert admin.execute("select from bartleby.dead_letters").rowcount == 0
    return report


def wait_until_empty(admin: Connection) -> None:
    # less than the minute after which the sweep behind the mark would find what was passed by
    deadline = time.monotonic() + 50
    while admin.execute("select from bartleby.messages limit 1").rowcount:
        assert time.monotonic() < deadline, admin.execute(
            "select state, count(*), min(message_id), max(run_at) from bartleby.messages group by 1"
        ).fetchall()
        time.sleep(0.05)


def judge(report: Report, at_least: int) -> None:
    assert report.committed + report.maybe >= at_least
    assert report.killed > 0
    assert report.rolled_back > 0
    assert not report.lost, report
    assert not report.phantom, report
    assert not report.acked_twice, report
    assert not report.unexplained, report


@pytest.mark.timeout(1200)
def test_nothing_is_lost_while_the_ring_turns_and_dumps_run(
    dsn: str, connect: Callable[..., Connection], tmp_path: Path
) -> None:
    if pg_dump() is None:
        pytest.skip("there is no pg_dump beside this PostgreSQL")
    dumps: list[int] = []
    with stage(dsn, tmp_path) as running:
        judge(torture(connect, running, MESSAGES, dumps=dumps), 100_000)
        log.info("%s dumps, %s turns of the ring", len(dumps), turns(running))
        assert turns(running) >= TURNS
    assert dumps == [0] * len(dumps)


@pytest.mark.timeout(1200)
def test_nothing_is_lost_while_a_long_reader_holds_its_snapshot(
    dsn: str, connect: Callable[..., Connection], tmp_path: Path
) -> None:
    reader = connect()
    reader.execute("begin isolation level repeatable read")
    reader.execute("select count(*) from bartleby.queue")
    with stage(dsn, tmp_path) as running:
        judge(torture(connect, running, MESSAGES), 100_000)
    assert reader.execute("select from bartleby.messages").rowcount == 0
    reader.rollback()


@pytest.mark.own_database
@pytest.mark.timeout(1200)
def test_nothing_is_lost_when_the_windows_of_every_race_are_wide(
    dsn: str, connect: Callable[..., Connection], tmp_path: Path
) -> None:
    widen(connect())
    with stage(dsn, tmp_path) as running:
        judge(torture(connect, running, MESSAGES // 2), MESSAGES // 4)


def widen(admin: Connection) -> None:
    """Let sessions pause where a race has its window: after the clock, a position, a snapshot, a probe."""
    for name, arguments, result, value in SLOWED:
        admin.execute(
            f"create or replace function bartleby.{name}({arguments}) returns {result} language plpgsql as $$"
            f" declare v_value {result} := {value};"
            f" begin if random() < 0.05 then perform pg_sleep(random() * 0.03); end if; return v_value; end $$".encode()
        )


def turns(running: Stage) -> int:
    (path,) = running.ledgers("tend")
    return sum("emptied" in values for word, _, values in read(path) if word == "S")
