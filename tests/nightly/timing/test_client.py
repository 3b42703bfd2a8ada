"""Starts of the demo and of the embedded PostgreSQL, and how long a link waits whose loop was held up."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from bartleby import dev, link
from bartleby.calls import Call
from bartleby.config import Settings
from bartleby.link import Link
from tests.kit.demo import Terminal, a_folder
from tests.kit.links import LONG, PID, until_busy
from tests.kit.worker import Conn, kill_without_reaping, until


def test_demo_shows_its_first_line_after_little_work(scratch: Path) -> None:
    with a_folder(scratch) as folder:
        terminal = Terminal(folder, "--seconds", "6")
        terminal.wait_for("Starting")
        fields = Path(f"/proc/{terminal.process.pid}/stat").read_text().rpartition(")")[2].split()
        assert (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") < 3
        terminal.press_ctrl_c()


def test_first_start_takes_little_work_and_a_running_server_is_reused_at_once() -> None:
    """On a disk; what is measured of the first start is the processor time of this process and its ended children."""
    before, began = sum(os.times()[:4]), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bartleby-dev-") as empty:
        with dev.start(Path(empty)) as server:
            first, waits = time.monotonic() - began, []
            assert server.started
            for _ in range(5):
                began = time.monotonic()
                with dev.start(Path(empty)):
                    waits.append(time.monotonic() - began)
        assert sum(os.times()[:4]) - before < 2
    assert min(waits) < first / 5


def test_orphan_of_a_killed_server_is_waited_for(scratch: Path) -> None:
    with a_folder(scratch) as place, ThreadPoolExecutor(1) as pool:
        first = dev.start(place / "pg")
        held = psycopg.connect(first.dsn)
        os.kill(held.info.backend_pid, signal.SIGSTOP)
        kill_without_reaping(first.pid)
        starting = pool.submit(dev.start, place / "pg")
        try:
            until(lambda: "pre-existing shared memory block" in (place / "pg" / "log").read_text())
            assert not starting.done()
        finally:
            os.kill(held.info.backend_pid, signal.SIGKILL)
            held.close()
        with starting.result() as second:
            psycopg.connect(second.dsn).close()
        first.stop()


@pytest.fixture
async def made(dsn: str) -> AsyncIterator[Link]:
    link = Link(Settings(dsn=dsn), "claims", deadline=30.0)
    await link.run(PID)
    link.deadline = 2.0
    yield link
    await link.close()


async def test_next_statement_in_line_has_the_whole_deadline(made: Link) -> None:
    nap: Call[int] = Call("select 1 from pg_sleep(0.25)", (), lambda rows: int(rows[0][0]))
    assert await asyncio.gather(*(made.run(nap) for _ in range(10))) == [1] * 10


async def test_answer_that_arrived_while_the_loop_was_blocked_is_used_and_a_late_one_fails(
    made: Link, conn: Conn
) -> None:
    assert made._connection is not None
    pid = made._connection.info.backend_pid
    conn.execute("select pg_advisory_lock(1)")
    waiting: Call[int] = Call("select 7 from pg_advisory_lock(1)", (), lambda rows: int(rows[0][0]))
    await made._connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)  # begin and commit, as well
    running = asyncio.create_task(made.run(waiting))
    await until_busy(conn, pid)
    conn.execute("select pg_advisory_unlock(1)")
    time.sleep(2.7)  # noqa: ASYNC251 - as a handler would that blocks
    assert await running == 7
    late = asyncio.create_task(made.run(LONG))
    await until_busy(conn, pid)
    time.sleep(2.7)  # noqa: ASYNC251 - as a handler would that blocks
    began = time.monotonic()
    with pytest.raises(psycopg.errors.ConnectionTimeout):
        await late
    assert link._HELD_UP - 0.1 < time.monotonic() - began < link._HELD_UP + 20
