"""Two ways to the database, each as a role that can do no more."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import psycopg
import pytest

from bartleby import AsyncClient, Client
from bartleby.answers import scalar
from bartleby.calls import Call
from bartleby.config import Settings
from bartleby.errors import NoConnection
from bartleby.pooling import Pooled, rows
from bartleby.surfaces.pools import Pools
from bartleby.surfaces.watchdog import Watchdog
from tests.kit.worker import until

WHO = Call("select current_user || ' ' || current_setting('statement_timeout')", (), scalar)
Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def pools() -> Iterator[Callable[..., Pools]]:
    """Open both pools of a DSN."""
    opened: list[Pools] = []

    def open_them(dsn: str, **options: Any) -> Pools:
        opened.append(Pools.open(Settings(dsn=dsn), program="console", readers=3, operators=2, **options))
        return opened[-1]

    yield open_them
    for each in opened:
        each.close()


@pytest.fixture
def user(admin: Connection, dsn: str, conn: Connection) -> Iterator[Callable[..., str]]:
    """Make a user of the database who is in some roles; return a DSN of theirs."""
    made: list[str] = []

    def make(*roles: str) -> str:
        name = f"somebody_{dsn.rpartition('_')[2]}_{len(made)}"
        admin.execute(f"create role {name} login password 'x'".encode())
        made.append(name)
        for role in roles:
            admin.execute(f"grant {role} to {name}".encode())
        return psycopg.conninfo.make_conninfo(dsn, user=name, password="x")

    yield make
    for name in made:
        conn.execute(f"drop owned by {name}".encode())
        admin.execute(f"drop role {name}".encode())


def test_each_looks_or_changes_things_as_its_role(dsn: str, pools: Callable[..., Pools]) -> None:
    both = pools(dsn)
    assert both.reader.run(WHO) == "bartleby_reader 10s"
    assert both.operator is both.operating
    assert both.operating.run(WHO) == "bartleby_operator 1min"
    with both.operating.transaction() as runner:
        assert runner.run(WHO) == "bartleby_operator 1min"


def test_what_looks_can_change_nothing(dsn: str, pools: Callable[..., Pools]) -> None:
    both = pools(dsn)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        both.reader.create_queue("orders")
    both.operating.create_queue("orders")
    assert [each.name for each in both.reader.queues()] == ["orders"]
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        both.operating.run(Call("select count(*) from bartleby.token", (), scalar))


def test_a_slow_look_is_stopped(dsn: str, pools: Callable[..., Pools], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bartleby.surfaces.pools._READER_TIMEOUT", "500ms")
    both = pools(dsn)
    with pytest.raises(psycopg.errors.QueryCanceled):
        both.reader.run(Call("select pg_sleep(30)", (), scalar))
    assert both.reader.run(WHO) == "bartleby_reader 500ms"


@pytest.mark.pgbouncer
@pytest.mark.parametrize("told", [False, True])
def test_behind_a_pooler_a_role_is_left_with_its_transaction(
    pooled_dsn: str, pools: Callable[..., Pools], told: bool
) -> None:
    both = pools(pooled_dsn, pooled=told)
    for _ in range(12):  # the pooler hands each transaction to another process of the server
        assert both.reader.run(WHO) == "bartleby_reader 10s"
        assert both.operating.run(WHO) == "bartleby_operator 1min"
        with both.operating.transaction() as runner:
            assert runner.run(WHO) == "bartleby_operator 1min"
            assert runner.run(WHO) == "bartleby_operator 1min"
    with psycopg.connect(pooled_dsn, autocommit=True, prepare_threshold=None) as somebody:
        for _ in range(24):
            assert somebody.execute(WHO.text).fetchall() == [("postgres 0",)]
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        both.reader.create_queue("orders")


def test_where_a_pooler_cannot_be_noticed_it_can_be_told(dsn: str, pools: Callable[..., Pools]) -> None:
    both = pools(dsn, pooled=True)
    assert both.reader.run(WHO) == "bartleby_reader 10s"
    with both.reader._connected() as connection:
        assert connection.execute(WHO.text).fetchall() == [("postgres 0",)]


def test_who_may_only_read_gets_a_console_that_only_reads(
    user: Callable[..., str], pools: Callable[..., Pools]
) -> None:
    both = pools(user("bartleby_reader"))
    both.reader.run(WHO)
    assert both.operator is None
    assert both.reader.run(WHO) == "bartleby_reader 10s"


def test_before_the_database_has_answered_nothing_is_ruled_out(
    user: Callable[..., str], pools: Callable[..., Pools]
) -> None:
    both = pools(user("bartleby_reader"))
    assert both.operator is not None
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        both.operator.create_queue("orders")
    assert both.operator is None


def test_who_is_an_operator_alone_looks_as_they_are(user: Callable[..., str], pools: Callable[..., Pools]) -> None:
    both = pools(user("bartleby_operator"))
    assert both.operating.run(WHO) == "bartleby_operator 1min"
    assert both.reader.queues() == []
    assert str(both.reader.run(WHO)).startswith("somebody_")


def test_a_role_that_may_be_had_but_not_become_works_as_the_user(
    admin: Connection, user: Callable[..., str], pools: Callable[..., Pools]
) -> None:
    if admin.info.server_version < 160000:
        pytest.skip("before PostgreSQL 16 every member may become the role")
    dsn = user()
    name = psycopg.conninfo.conninfo_to_dict(dsn)["user"]
    admin.execute(f"grant bartleby_operator to {name} with inherit true, set false".encode())
    both = pools(dsn)
    both.reader.run(WHO)
    assert both.operator is not None
    both.operator.create_queue("orders")
    assert str(both.operator.run(WHO)).startswith("somebody_")
    assert str(both.operator.run(WHO)).endswith(" 1min")


def test_where_there_are_no_roles_everything_is_done_as_the_user(
    dsn: str, pools: Callable[..., Pools], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bartleby.surfaces.pools.READER", "no_such_reader")
    monkeypatch.setattr("bartleby.surfaces.pools.OPERATOR", "no_such_operator")
    both = pools(dsn)
    both.reader.run(WHO)
    assert both.reader.run(WHO) == "postgres 10s"
    assert both.operator is not None
    assert both.operator.run(WHO) == "postgres 1min"


def test_many_at_once_share_few_connections(dsn: str, pools: Callable[..., Pools]) -> None:
    both = pools(dsn)
    with Client(dsn) as client:
        client.create_queue("orders")
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(len(both.reader.queues()))) for _ in range(40)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [1] * 40
    with Client(dsn) as client:
        held = Call(
            "select count(*) from pg_stat_activity where datname = current_database()"
            " and application_name = 'bartleby console'",
            (),
            scalar,
        )
        assert client.run(held) <= 3


def test_when_all_connections_are_busy_it_says_so(dsn: str, pools: Callable[..., Pools]) -> None:
    both = pools(dsn)
    with both.operating.transaction(), both.operating.transaction(), pytest.raises(NoConnection, match="all 2"):
        both.operating.queues()
    assert both.operating.queues() == []


def test_what_is_closed_right_after_a_call_leaves_no_connection(
    dsn: str, conn: Connection, pools: Callable[..., Pools]
) -> None:
    for _ in range(20):
        both = pools(dsn)
        with both.reader._connected() as kept:
            assert rows(kept, WHO.text, ()) == [("bartleby_reader 10s",)]
        both.close()
        assert kept.closed
        del kept
    connected = "select from pg_stat_activity where datname = current_database() and application_name like 'bartleby %'"
    until(lambda: conn.execute(connected).rowcount == 0, seconds=5)


async def test_an_asynchronous_client_that_is_closed_right_after_a_call_leaves_none_either(dsn: str) -> None:
    client = AsyncClient(dsn)
    async with client._connected() as kept:
        await kept.execute("select 1")
    await client.close()
    assert kept.closed


def test_a_watchdog_keeps_no_connection() -> None:
    class Connection:
        """It is only kept."""

    watchdog = Watchdog()
    watched = Connection()
    with watchdog.within(cast("Pooled", watched), 60):
        time.sleep(0.4)  # it looks every quarter of a second
    gone = weakref.ref(watched)
    del watched
    until(lambda: gone() is None, seconds=5)
