"""The connection of a worker: no statement outlasts its deadline, and an abandoned one leaves nothing behind."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psycopg
import pytest

from bartleby import calls, dev, link
from bartleby.calls import Call
from bartleby.config import Settings
from bartleby.link import Link
from tests.kit.proxy import Proxy, proxied
from tests.kit.worker import Told, row, state, until

Conn = psycopg.Connection[tuple[Any, ...]]
Links = Callable[..., Link]
PID: Call[int] = Call("select pg_backend_pid()", (), lambda rows: int(rows[0][0]))
LONG: Call[str] = Call("select pg_sleep(100)::text", (), lambda rows: str(rows[0][0]))
NONSENSE: Call[str] = Call("select nonsense", (), lambda rows: str(rows[0][0]))


@pytest.fixture
async def links(dsn: str) -> AsyncIterator[Links]:
    made: list[Link] = []

    def make(address: str = dsn, deadline: float = 10.0) -> Link:
        made.append(Link(Settings(dsn=address), "claims", deadline=deadline))
        return made[-1]

    yield make
    for each in made:
        await each.close()


@pytest.fixture
def proxy(server: dev.Server) -> Iterator[Proxy]:
    with proxied(server.port) as made:
        yield made


async def until_busy(conn: Conn, pid: int) -> None:
    """Wait until a backend is at its statement."""
    query = "select state = 'active' and wait_event is not null from pg_stat_activity where pid = %s"
    async with asyncio.timeout(30):
        while not row(conn, query, pid):  # noqa: ASYNC110 - the server sets no event of ours
            await asyncio.sleep(0.002)


# The deadline


async def test_a_statement_does_not_outlast_its_deadline(links: Links) -> None:
    made = links()
    before = await made.run(PID)
    made.deadline = 0.2
    began = time.monotonic()
    with pytest.raises(psycopg.errors.ConnectionTimeout, match=r"no answer within 0\.2 s"):
        await made.run(LONG)
    assert 0.2 <= time.monotonic() - began < 20
    made.deadline = 10.0
    assert await made.run(PID) != before


async def test_a_connection_is_not_waited_for_longer_than_the_deadline(links: Links, proxy: Proxy, dsn: str) -> None:
    proxy.mode = "blackhole"
    began = time.monotonic()
    with pytest.raises(psycopg.errors.ConnectionTimeout, match=r"no connection within 0\.2 s"):
        await links(proxy.dsn(dsn), deadline=0.2).run(PID)
    assert time.monotonic() - began < 20


async def test_the_next_statement_in_line_has_the_whole_deadline(links: Links) -> None:
    made = links()
    await made.run(PID)
    made.deadline = 2.0
    nap: Call[int] = Call("select 1 from pg_sleep(0.25)", (), lambda rows: int(rows[0][0]))
    assert await asyncio.gather(*(made.run(nap) for _ in range(10))) == [1] * 10


async def test_what_the_server_refuses_costs_no_connection(links: Links, told: Told) -> None:
    made = links()
    before = await made.run(PID)
    with pytest.raises(psycopg.errors.UndefinedColumn):
        await made.run(NONSENSE)
    assert await made.run(PID) == before
    assert not told.records


async def test_a_cancelled_statement_costs_its_connection_and_stays_cancelled(links: Links, conn: Conn) -> None:
    made = links()
    before = await made.run(PID)
    running = asyncio.create_task(made.run(LONG))
    await until_busy(conn, before)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await made.run(PID) != before


async def test_a_cancellation_is_kept_though_the_connection_breaks_meanwhile(links: Links, conn: Conn) -> None:
    """psycopg asks the server to cancel, waits for it, and then knows only of the error that came instead."""
    made = links()
    pid = await made.run(PID)
    running = asyncio.create_task(made.run(LONG))
    await until_busy(conn, pid)
    running.cancel()
    made.abort()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_cancelled_statement_waits_for_no_server_that_hangs(
    links: Links, proxy: Proxy, conn: Conn, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """psycopg would ask it to cancel, for five seconds, and then say that this was in vain."""
    made = links(proxy.dsn(dsn))
    pid = await made.run(PID)
    running = asyncio.create_task(made.run(LONG))
    await until_busy(conn, pid)
    proxy.mode = "blackhole"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    proxy.mode = "pass"
    assert not [each.message for each in caplog.records if each.name == "psycopg"]


# A loop that was held up


async def test_an_answer_that_waits_is_taken_though_the_loop_was_held_up(links: Links, conn: Conn) -> None:
    made = links()
    pid = await made.run(PID)
    conn.execute("select pg_advisory_lock(1)")
    waiting: Call[int] = Call("select 7 from pg_advisory_lock(1)", (), lambda rows: int(rows[0][0]))
    assert made._connection is not None
    await made._connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)  # begin and commit, as well
    made.deadline = 2.0
    running = asyncio.create_task(made.run(waiting))
    await until_busy(conn, pid)
    conn.execute("select pg_advisory_unlock(1)")
    time.sleep(2.7)  # noqa: ASYNC251 - as a handler would that blocks
    assert await running == 7
    made.deadline = 10.0
    assert await made.run(PID) == pid


async def test_a_loop_that_was_held_up_waits_only_a_moment_more(links: Links, conn: Conn) -> None:
    made = links()
    pid = await made.run(PID)
    made.deadline = 2.0
    running = asyncio.create_task(made.run(LONG))
    await until_busy(conn, pid)
    time.sleep(2.7)  # noqa: ASYNC251 - as a handler would that blocks
    began = time.monotonic()
    with pytest.raises(psycopg.errors.ConnectionTimeout):
        await running
    assert link._HELD_UP - 0.1 < time.monotonic() - began < link._HELD_UP + 20


# What it leaves behind


async def test_an_abandoned_claim_leases_nothing_to_nobody(links: Links, conn: Conn, connect: Any) -> None:
    conn.execute("select bartleby.create_queue('orders')")
    conn.execute("select bartleby.send('orders', '1')")
    made = links()
    pid = await made.run(PID)
    made.deadline = 0.3
    holder = connect(autocommit=False)
    holder.execute("select pg_advisory_xact_lock(lock_key) from bartleby.queue where name = 'orders'")
    with pytest.raises(psycopg.errors.ConnectionTimeout):
        await made.run(calls.claim("orders", "me"))
    gone = "select not exists (select from pg_stat_activity where pid = %s)"
    until(lambda: row(conn, gone, pid), what="the backend that nobody listens to")
    holder.rollback()
    made.deadline = 10.0
    assert state(conn) == (1, 0, 0, 0)
    lease = await made.run(calls.claim("orders", "me"))
    assert lease is not None
    assert len(lease) == 1


@pytest.mark.pgbouncer
async def test_behind_a_pooler_the_session_is_left_as_it_was(links: Links, pooled_dsn: str, conn: Conn) -> None:
    show: Call[str] = Call("show client_connection_check_interval", (), lambda rows: str(rows[0][0]))
    usual = row(conn, "show client_connection_check_interval")
    assert await links(pooled_dsn).run(show) == usual
    assert await links().run(show) != usual


# What it tells


async def test_it_is_told_once_that_the_database_went_and_once_that_it_is_back(
    links: Links, proxy: Proxy, dsn: str, told: Told
) -> None:
    made = links(proxy.dsn(dsn))
    for _ in range(2):
        await made.run(PID)
        made.deadline = 0.2
        proxy.mode = "blackhole"
        for _ in range(3):
            with pytest.raises(psycopg.OperationalError):
                await made.run(PID)
        proxy.mode = "pass"
        made.deadline = 10.0
        for _ in range(2):
            await made.run(PID)
    events = [record.event for record in told.records]  # type: ignore[attr-defined]
    assert events == ["database.away", "database.back"] * 2


async def test_an_abort_ends_what_runs_and_says_nothing(links: Links, conn: Conn, told: Told) -> None:
    made = links()
    pid = await made.run(PID)
    running = asyncio.create_task(made.run(LONG))
    await until_busy(conn, pid)
    began = time.monotonic()
    made.abort()
    with pytest.raises(psycopg.OperationalError):
        await running
    assert time.monotonic() - began < 20
    assert not told.records


async def test_an_abort_of_an_idle_connection_leaves_it_alone(links: Links) -> None:
    made = links()
    pid = await made.run(PID)
    made.abort()
    assert await made.run(PID) == pid


async def test_an_abort_of_what_was_never_connected_does_nothing(links: Links) -> None:
    made = links()
    made.abort()
    assert await made.run(PID)
    await made.close()
    await made.close()
