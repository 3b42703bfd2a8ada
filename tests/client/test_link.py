"""The connection of a worker: no statement outlasts its deadline, and an abandoned one leaves nothing behind."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psycopg
import pytest

from bartleby import calls, dev
from bartleby.calls import Call
from bartleby.config import Settings
from bartleby.link import Link
from tests.kit.links import LONG, PID, until_busy
from tests.kit.proxy import Proxy, proxied
from tests.kit.sql import value
from tests.kit.worker import CapturedLog, Conn, present, state, until

Links = Callable[..., Link]
NONSENSE: Call[str] = Call("select nonsense", (), lambda rows: str(rows[0][0]))


@pytest.fixture
async def links(dsn: str) -> AsyncIterator[Links]:
    made: list[Link] = []

    def make(address: str = dsn, deadline: float = 30.0) -> Link:
        made.append(Link(Settings(dsn=address), "claims", deadline=deadline))
        return made[-1]

    yield make
    for each in made:
        await each.close()


@pytest.fixture
def proxy(server: dev.Server) -> Iterator[Proxy]:
    with proxied(server.port) as made:
        yield made


async def test_statement_and_connection_end_at_the_deadline(
    links: Links, proxy: Proxy, dsn: str, log: CapturedLog
) -> None:
    made = links()
    before = await made.run(PID)
    with pytest.raises(psycopg.errors.UndefinedColumn):
        await made.run(NONSENSE)
    assert await made.run(PID) == before, "an error of the server costs no connection"
    assert not log.records
    made.deadline = 0.2
    with pytest.raises(psycopg.errors.ConnectionTimeout, match=r"no answer within 0\.2 s"):
        await made.run(LONG)
    made.deadline = 30.0
    assert await made.run(PID) != before
    proxy.mode = "blackhole"
    with pytest.raises(psycopg.errors.ConnectionTimeout, match=r"no connection within 0\.2 s"):
        await links(proxy.dsn(dsn), deadline=0.2).run(PID)


@pytest.mark.parametrize("meanwhile", ["nothing", "the connection breaks", "the server hangs"])
async def test_cancelled_statement_costs_its_connection_and_stays_cancelled(
    links: Links, proxy: Proxy, conn: Conn, dsn: str, *, caplog: pytest.LogCaptureFixture, meanwhile: str
) -> None:
    """psycopg asks the server to cancel, for five seconds, and then raises and logs the error that came instead."""
    made = links(proxy.dsn(dsn) if meanwhile == "the server hangs" else dsn)
    before = await made.run(PID)
    running = asyncio.create_task(made.run(LONG))
    await until_busy(conn, before)
    if meanwhile == "the server hangs":
        proxy.mode = "blackhole"
    running.cancel()
    if meanwhile == "the connection breaks":
        made.abort()
    with pytest.raises(asyncio.CancelledError):
        await running
    proxy.mode = "pass"
    assert await made.run(PID) != before
    logged = [each.message for each in caplog.records if each.name == "psycopg"]
    assert [each for each in logged if not each.startswith("query cancellation interrupted")] == []


async def test_abandoned_claim_leases_nothing(links: Links, conn: Conn, connect: Any) -> None:
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
    until(lambda: value(conn, gone, pid), what="the abandoned backend")
    holder.rollback()
    made.deadline = 30.0
    assert state(conn) == (1, 0, 0, 0)
    lease = present(await made.run(calls.claim("orders", "me")))
    assert len(lease) == 1


@pytest.mark.pgbouncer
async def test_session_behind_a_pooler_keeps_its_settings(links: Links, pooled_dsn: str, conn: Conn) -> None:
    show: Call[str] = Call("show client_connection_check_interval", (), lambda rows: str(rows[0][0]))
    usual = value(conn, "show client_connection_check_interval")
    assert await links(pooled_dsn).run(show) == usual
    assert await links().run(show) != usual


async def test_outage_and_its_end_are_logged_once(links: Links, proxy: Proxy, dsn: str, log: CapturedLog) -> None:
    made = links(proxy.dsn(dsn))
    for _ in range(2):
        await made.run(PID)
        made.deadline = 0.2
        proxy.mode = "blackhole"
        for _ in range(3):
            with pytest.raises(psycopg.OperationalError):
                await made.run(PID)
        proxy.mode = "pass"
        made.deadline = 30.0
        for _ in range(2):
            await made.run(PID)
    events = [record.event for record in log.records]  # type: ignore[attr-defined]
    assert events == ["database.away", "database.back"] * 2


async def test_abort_ends_what_runs_and_logs_nothing(links: Links, conn: Conn, log: CapturedLog) -> None:
    made = links()
    made.abort()  # it was never connected
    pid = await made.run(PID)
    made.abort()
    assert await made.run(PID) == pid, "an idle connection is left alone"
    running = asyncio.create_task(made.run(LONG))
    await until_busy(conn, pid)
    made.abort()
    with pytest.raises(psycopg.OperationalError):
        await running
    assert not log.records
    await made.close()
    await made.close()
