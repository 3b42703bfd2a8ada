"""What is between a client and its server: pools, poolers, restarts, wrong addresses and the caller's own settings."""

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row, namedtuple_row

from bartleby import AsyncClient, Client, NotInstalled, WrongIsolation, dev, schema
from bartleby.config import Settings
from bartleby.errors import BartlebyError, NoConnection
from bartleby.pooling import AsyncPooled, Pooled

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


def other_database(dsn: str, name: str) -> str:
    return f"{dsn.rpartition('/')[0]}/{name}"


@pytest.mark.parametrize("factory", [dict_row, namedtuple_row])
def test_the_callers_connection_may_make_other_rows(client: Client, dsn: str, factory: Any) -> None:
    with psycopg.connect(dsn, row_factory=factory) as connection:
        api = client.using(connection)
        sent = api.send("orders", {"a": 1})
        connection.commit()
        lease = api.claim("orders", "w")
        assert lease is not None
        assert [(message.id, message.payload) for message in lease] == [(sent, {"a": 1})]
        assert api.queues()[0].leased == 1
        assert connection.row_factory is factory


async def test_a_call_takes_part_in_the_transactions_of_an_awaited_connection(dsn: str) -> None:
    async with AsyncClient(dsn) as client, await psycopg.AsyncConnection.connect(dsn, row_factory=dict_row) as mine:
        await client.create_queue("orders")
        async with mine.transaction(force_rollback=True):
            await client.using(mine).send("orders", 1)
        assert await client.claim("orders", "w") is None


def test_raw_sql_under_another_isolation_is_told(client: Client, dsn: str) -> None:
    client.send("orders", 1)
    for level in (psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE):
        with psycopg.connect(dsn) as connection:
            connection.isolation_level = level
            with pytest.raises(WrongIsolation, match=level.name.replace("_", " ")):
                client.using(connection).claim("orders", "w")
            connection.rollback()
            with pytest.raises(psycopg.Error) as caught:
                connection.execute("select * from bartleby.claim('orders', 'w')")
            assert caught.value.sqlstate == "ZB007"
    assert client.claim("orders", "w") is not None


def test_threads_share_a_client_and_every_message_is_had_once(client: Client) -> None:
    def work(number: int) -> list[int]:
        mine = client.send_many("orders", [{"payload": number}] * 20)
        had: list[int] = []
        while lease := client.claim("orders", f"w{number}", limit=7):
            had += [message.id for message in lease]
            client.ack(lease.id)
        assert len(mine) == 20
        return had

    with ThreadPoolExecutor(12) as threads:
        had = [message_id for part in threads.map(work, range(12)) for message_id in part]
    while lease := client.claim("orders", "last", limit=100):
        had += [message.id for message in lease]
    assert len(had) == len(set(had)) == 240


async def test_tasks_share_a_client(dsn: str) -> None:
    async with AsyncClient(dsn) as client:
        await client.create_queue("orders")
        ids = await asyncio.gather(*(asyncio.create_task(client.send("orders", number)) for number in range(50)))
        assert len(set(ids)) == 50
        lease = await client.claim("orders", "w", limit=100)
        assert lease is not None
        assert sorted(message.payload for message in lease) == list(range(50))


@pytest.mark.pgbouncer
def test_a_pooler_is_noticed_and_nothing_is_prepared_behind_it(dsn: str, pooled_dsn: str, conn: Conn) -> None:
    with Client(dsn) as direct, Client(pooled_dsn) as pooled:
        assert not direct.behind_pooler()
        assert pooled.behind_pooler()
        pooled.create_queue("orders")
        pids = set()
        for _ in range(30):
            pooled.send("orders", 1)
            pids.add(pooled.facts().backend_pid)
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: [pooled.send("orders", 1) for _ in range(20)], range(4)))
        assert pooled.queues()[0].ready == 110


async def test_an_awaited_client_does_as_much_for_a_pooled_connection(dsn: str) -> None:
    async with await AsyncPooled.connect(dsn, autocommit=True) as connection:
        await AsyncPooled.configure(connection)
        assert connection.prepare_threshold is not None
        assert connection.isolation_level is None
    with Pooled.connect(dsn, autocommit=True, options="-c default_transaction_isolation=serializable") as other:
        Pooled.configure(other)
        assert other.isolation_level is psycopg.IsolationLevel.READ_COMMITTED


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restart_between_two_calls_is_survived(folder: Path, mode: Any) -> None:
    server = dev.start(folder, settings={"fsync": "off"})
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        schema.install(connection)
    with asyncio.Runner() as loop, Client(server.dsn) as client:
        awaited = AsyncClient(server.dsn)
        client.create_queue("orders")
        for number in range(2):
            client.send("orders", number)
            loop.run(awaited.send("orders", number))
            server.stop(mode)
            server = dev.start(folder, settings={"fsync": "off"})
            client.send("orders", number)
            loop.run(awaited.send("orders", number))
        lease = client.claim("orders", "w", limit=100)
        assert lease is not None
        assert sorted(message.payload for message in lease) == [0, 0, 0, 0, 1, 1, 1, 1]
        loop.run(awaited.close())
    server.stop()


def test_a_session_that_was_ended_is_replaced(client: Client, conn: Conn) -> None:
    pid = client.facts().backend_pid
    conn.execute("select pg_terminate_backend(%s, 5000)", [pid])
    assert client.facts().backend_pid != pid


def test_when_all_connections_are_in_use_the_error_says_so(
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


def test_a_wrong_address_is_an_error_that_says_what_the_server_said(dsn: str, unused_port: int) -> None:
    user, _, address = dsn.partition("@")
    wrong = {
        f"host=127.0.0.1 port={unused_port} dbname=x": "Connection refused",
        f"{user.rpartition(':')[0]}:wrong@{address}": "password authentication failed",
        other_database(dsn, "nowhere"): 'database "nowhere" does not exist',
        "host=/nonexistent dbname=x": "No such file",
    }
    for address, says in wrong.items():
        settings = Settings(address, connect_timeout=2)
        with Client(settings=settings) as client, pytest.raises(NoConnection, match=says) as caught:
            client.queues()
        assert isinstance(caught.value, BartlebyError)
        assert isinstance(caught.value, psycopg.OperationalError)
        assert caught.value.hint
        asyncio.run(awaited_wrong(settings, says))


async def awaited_wrong(settings: Settings, says: str) -> None:
    async with AsyncClient(settings=settings) as client:
        with pytest.raises(NoConnection, match=says):
            await client.queues()


@pytest.fixture
def unused_port() -> Iterator[int]:
    import socket

    with socket.socket() as taken:  # where nobody listens, and nobody else can
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


def test_a_database_without_the_schema_is_told_for_every_verb(server: dev.Server) -> None:
    with Client(server.dsn) as client:
        for attempt in (
            lambda: client.send("orders", 1),
            lambda: client.claim("orders", "w"),
            lambda: client.ack(1),
            client.queues,
            client.dead_letters,
            client.version,
            client.segments,
        ):
            with pytest.raises(NotInstalled) as caught:
                attempt()
            assert caught.value.hint == "run: bartleby install"


def test_a_closed_client_says_so(dsn: str) -> None:
    client = Client(dsn)
    client.version()
    client.close()
    client.close()
    with pytest.raises(psycopg.OperationalError, match="closed"):
        client.version()
