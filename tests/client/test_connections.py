"""Between a client and its server: pools, poolers, restarts, wrong addresses and the settings of a caller."""

import asyncio
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row, namedtuple_row

from bartleby import AsyncClient, Client, NotInstalled, dev, schema
from bartleby.config import Settings
from bartleby.errors import BartlebyError, NoConnection
from tests.kit.worker import present

Conn = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        opened.create_queue("orders")
        yield opened


@pytest.fixture
def folder(scratch: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="bartleby-test-", dir=scratch))
    yield path
    left = dev.running(path)
    if left is not None:
        left.stop("immediate")
    shutil.rmtree(path)


async def test_callers_connection_keeps_its_row_factory(client: Client, dsn: str) -> None:
    for factory in (dict_row, namedtuple_row):
        with psycopg.connect(dsn, row_factory=factory) as connection:
            api = client.using(connection)
            sent = api.send("orders", {"a": 1})
            connection.commit()
            lease = present(api.claim("orders", "w"))
            assert [(message.id, message.payload) for message in lease] == [(sent, {"a": 1})]
            assert connection.row_factory is factory
    async with AsyncClient(dsn) as awaited, await psycopg.AsyncConnection.connect(dsn, row_factory=dict_row) as mine:
        async with mine.transaction(force_rollback=True):
            await awaited.using(mine).send("orders", 1)
        assert await awaited.claim("orders", "w") is None


async def test_tasks_share_a_client_that_is_closed_right_after_a_call(client: Client, dsn: str) -> None:
    async with AsyncClient(dsn) as awaited:
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
        for _ in range(30):
            pooled.send("orders", 1)
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: [pooled.send("orders", 1) for _ in range(20)], range(4)))
        assert pooled.queues()[0].ready == 110


def test_clients_survive_a_restart_of_the_server(folder: Path) -> None:
    server = dev.start(folder, settings={"fsync": "off"})
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        schema.install(connection)
    with asyncio.Runner() as loop, Client(server.dsn) as client:
        awaited = AsyncClient(server.dsn)
        client.create_queue("orders")
        for number, mode in enumerate(("fast", "immediate")):
            client.send("orders", number)
            loop.run(awaited.send("orders", number))
            server.stop(mode)  # type: ignore[arg-type]
            server = dev.start(folder, settings={"fsync": "off"})
            client.send("orders", number)
            loop.run(awaited.send("orders", number))
        payloads: list[Any] = []
        while lease := client.claim("orders", "w", limit=100):  # an immediate stop leaves a hole, where a claim ends
            payloads += [message.payload for message in lease]
        assert sorted(payloads) == [0, 0, 0, 0, 1, 1, 1, 1]
        loop.run(awaited.close())
    server.stop()


def test_error_says_that_all_connections_are_in_use(
    dsn: str, connect: Callable[..., Conn], wait_for: Any, is_waiting: Callable[[], bool]
) -> None:
    settings = Settings(dsn, max_connections=1, connect_timeout=1.5)
    holder = connect(autocommit=False)
    with Client(settings=settings) as client, asyncio.Runner() as loop:
        client.create_queue("orders")
        holder.execute("select pg_advisory_xact_lock(lock_key) from bartleby.queue")
        waiting = threading.Thread(target=client.claim, args=("orders", "w"))
        waiting.start()
        wait_for(is_waiting)
        with pytest.raises(NoConnection, match=r"no connection for 1.5 s: all 1 of this client are in use") as caught:
            client.queues()
        assert "max_connections" in (caught.value.hint or "")
        loop.run(all_awaited_in_use(settings))
        holder.rollback()
        waiting.join()
        assert len(client.queues()) == 1


async def all_awaited_in_use(settings: Settings) -> None:
    async with AsyncClient(settings=settings) as client:
        waiting = asyncio.create_task(client.claim("orders", "w"))
        await asyncio.sleep(0)
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
            settings = Settings(place, connect_timeout=2)
            with Client(settings=settings) as client, pytest.raises(NoConnection, match=says) as caught:
                client.queues()
            assert isinstance(caught.value, BartlebyError)
            assert isinstance(caught.value, psycopg.OperationalError)
            assert caught.value.hint
            async with AsyncClient(settings=settings) as awaited:
                with pytest.raises(NoConnection, match=says):
                    await awaited.queues()


def test_database_without_the_schema_is_reported_as_such(server: dev.Server) -> None:
    with Client(server.dsn) as client:
        for attempt in (lambda: client.send("orders", 1), lambda: client.ack(1), client.queues, client.version):
            with pytest.raises(NotInstalled) as caught:
                attempt()
            assert caught.value.hint == "run: bartleby install"


def test_session_that_was_ended_is_replaced_and_a_closed_client_says_so(dsn: str, conn: Conn) -> None:
    client = Client(dsn)
    pid = client.facts().backend_pid
    conn.execute("select pg_terminate_backend(%s, 5000)", [pid])
    assert client.facts().backend_pid != pid
    client.close()
    client.close()
    with pytest.raises(psycopg.OperationalError, match="closed"):
        client.version()
