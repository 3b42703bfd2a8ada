"""Between a client and its server: pools, poolers, restarts, wrong addresses and the settings of a caller."""

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from bartleby import AsyncClient, Client
from bartleby.config import Settings
from bartleby.errors import NoConnection
from tests.kit.worker import present, until

Conn = psycopg.Connection[tuple[Any, ...]]

LOCKED_OUT = "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that only finds out why there is none may take long."""
    monkeypatch.setattr("bartleby.client._REASON_SECONDS", 60)


async def test_tasks_share_a_client_that_is_closed_right_after_a_call(dsn: str) -> None:
    async with AsyncClient(dsn) as awaited:
        await awaited.create_queue("orders")
        ids = await asyncio.gather(*(asyncio.create_task(awaited.send("orders", number)) for number in range(50)))
        assert {message.id for message in present(await awaited.claim("orders", "w", limit=100))} == set(ids)
        async with awaited._connected() as kept:
            await kept.execute("select 1")
    assert kept.closed


@pytest.mark.pgbouncer
def test_pooler_is_noticed_and_nothing_is_prepared_behind_it(dsn: str, pooled_dsn: str) -> None:
    with Client(dsn) as direct, Client(pooled_dsn) as pooled:
        assert not direct.behind_pooler()
        assert pooled.behind_pooler()
        pooled.create_queue("orders")
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: [pooled.send("orders", 1) for _ in range(20)], range(4)))
        assert pooled.queues()[0].ready == 80


def test_error_says_that_all_connections_are_in_use(
    dsn: str, conn: Conn, connect: Callable[..., Conn], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(dsn, max_connections=1, connect_timeout=60.5)
    holder = connect(autocommit=False)
    with Client(settings=settings) as client, asyncio.Runner() as loop:
        client.create_queue("orders")
        holder.execute("select pg_advisory_xact_lock(lock_key) from bartleby.queue")
        waiting = threading.Thread(target=client.claim, args=("orders", "w"))
        waiting.start()
        until(lambda: conn.execute(LOCKED_OUT).rowcount == 1)
        with monkeypatch.context() as patched:
            patched.setattr(client._pool, "timeout", 0.1)
            with pytest.raises(NoConnection, match=r"no connection for 60.5 s: all 1 of this client are") as caught:
                client.queues()
        assert "max_connections" in (caught.value.hint or "")
        loop.run(all_awaited_in_use(settings, conn))
        holder.rollback()
        waiting.join()
        assert len(client.queues()) == 1


async def all_awaited_in_use(settings: Settings, conn: Conn) -> None:
    async with AsyncClient(settings=settings) as client:
        waiting = asyncio.create_task(client.claim("orders", "w"))
        await asyncio.to_thread(until, lambda: conn.execute(LOCKED_OUT).rowcount == 2)
        client._pool.timeout = 0.1
        with pytest.raises(NoConnection, match="all 1 of this client are in use"):
            await client.queues()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_error_of_a_wrong_address_has_the_answer_of_the_server(dsn: str) -> None:
    user, _, address = dsn.partition("@")
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        wrong = {
            f"host=127.0.0.1 port={taken.getsockname()[1]} dbname=x": "Connection refused",
            f"{user.rpartition(':')[0]}:wrong@{address}": "password authentication failed",
            f"{dsn.rpartition('/')[0]}/nowhere": 'database "nowhere" does not exist',
            "host=/nonexistent dbname=x": "No such file",
        }
        for place, says in wrong.items():
            settings = Settings(place, connect_timeout=0.1)
            with Client(settings=settings) as client, pytest.raises(NoConnection, match=says) as caught:
                client.queues()
            assert caught.value.hint
            async with AsyncClient(settings=settings) as awaited:
                with pytest.raises(NoConnection, match=says):
                    await awaited.queues()


async def test_session_that_was_ended_is_replaced_and_a_closed_client_says_so(dsn: str, conn: Conn) -> None:
    end = "select pg_terminate_backend(%s, 60000)"
    with Client(dsn) as client:
        pid = client.facts().backend_pid
        conn.execute(end, [pid])
        assert client.facts().backend_pid != pid
        client.close()
        with pytest.raises(psycopg.OperationalError, match="closed"):
            client.version()
    async with AsyncClient(dsn) as awaited:
        pid = (await awaited.facts()).backend_pid
        conn.execute(end, [pid])
        assert (await awaited.facts()).backend_pid != pid
