"""The two pools of a surface: one that reads and one that operates, each in a role with no further rights."""

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import psycopg
import pytest

from bartleby.answers import scalar
from bartleby.calls import Call
from bartleby.config import Settings
from bartleby.errors import NoConnection
from bartleby.pooling import Pooled, rows
from bartleby.surfaces.pools import Pools
from bartleby.surfaces.watchdog import Watchdog
from tests.kit.worker import LONG, present, until

pytestmark = pytest.mark.usefixtures("patient_pools")

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
def member(admin: Connection, dsn: str, conn: Connection) -> Iterator[Callable[..., str]]:
    """Create a user who is a member of a role; return a DSN for it."""
    made: list[str] = []

    def make(role: str, options: str = "") -> str:
        name = f"member_{dsn.rpartition('_')[2]}_{len(made)}"
        admin.execute(f"create role {name} login password 'x'".encode())
        made.append(name)
        admin.execute(f"grant {role} to {name} {options}".encode())
        return psycopg.conninfo.make_conninfo(dsn, user=name, password="x")

    yield make
    for name in made:
        conn.execute(f"drop owned by {name}".encode())
        admin.execute(f"drop role {name}".encode())


def test_each_pool_works_in_its_role(dsn: str, pools: Callable[..., Pools], monkeypatch: pytest.MonkeyPatch) -> None:
    both = pools(dsn)
    assert both.reader.run(WHO) == "bartleby_reader 10s"
    assert both.operator is both.operating
    assert both.operating.run(WHO) == "bartleby_operator 1min"
    with both.operating.transaction() as runner:
        assert runner.run(WHO) == "bartleby_operator 1min"
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        both.reader.create_queue("orders")
    both.operating.create_queue("orders")
    assert [each.name for each in both.reader.queues()] == ["orders"]
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        both.operating.run(Call("select count(*) from bartleby.token", (), scalar))
    with both.operating.transaction(), both.operating.transaction():
        both.operating._pool.timeout = 0.1
        with pytest.raises(NoConnection, match="all 2"):
            both.operating.queues()
    monkeypatch.setattr("bartleby.surfaces.pools._READER_TIMEOUT", "500ms")
    with pytest.raises(psycopg.errors.QueryCanceled):
        pools(dsn).reader.run(Call("select pg_sleep(300)", (), scalar))
    monkeypatch.setattr("bartleby.surfaces.pools._READER_TIMEOUT", "70s")
    assert pools(dsn).reader.run(WHO) == "bartleby_reader 70s"
    # a pooler that cannot be noticed can be declared
    with pools(dsn, pooled=True).reader._connected() as connection:
        assert connection.execute(WHO.text).fetchall() == [("postgres 0",)]
    # without roles everything is done as the user
    monkeypatch.setattr("bartleby.surfaces.pools.READER", "no_such_reader")
    monkeypatch.setattr("bartleby.surfaces.pools.OPERATOR", "no_such_operator")
    plain = pools(dsn)
    plain.reader.run(WHO)
    assert (plain.reader.run(WHO), present(plain.operator).run(WHO)) == ("postgres 70s", "postgres 1min")


@pytest.mark.pgbouncer
@pytest.mark.parametrize("declared", [False, True])
def test_role_ends_with_its_transaction_behind_a_pooler(
    pooled_dsn: str, pools: Callable[..., Pools], declared: bool
) -> None:
    both = pools(pooled_dsn, pooled=declared)
    for _ in range(12):  # the pooler hands each transaction to another process of the server
        assert both.reader.run(WHO) == "bartleby_reader 10s"
        assert both.operating.run(WHO) == "bartleby_operator 1min"
        with both.operating.transaction() as runner:
            assert runner.run(WHO) == "bartleby_operator 1min"
            assert runner.run(WHO) == "bartleby_operator 1min"
    with psycopg.connect(pooled_dsn, autocommit=True, prepare_threshold=None) as other:
        for _ in range(24):
            assert other.execute(WHO.text).fetchall() == [("postgres 0",)]
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        both.reader.create_queue("orders")


@pytest.mark.own_database
def test_member_of_one_role_can_do_no_more(
    admin: Connection, member: Callable[..., str], pools: Callable[..., Pools]
) -> None:
    reading = pools(member("bartleby_reader"))
    operator = present(reading.operator)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        operator.create_queue("orders")
    assert reading.operator is None
    assert reading.reader.run(WHO) == "bartleby_reader 10s"
    operating = pools(member("bartleby_operator"))
    assert operating.operating.run(WHO) == "bartleby_operator 1min"
    assert operating.reader.queues() == []
    assert str(operating.reader.run(WHO)).startswith("member_")
    if admin.info.server_version >= 160000:  # a role that is inherited but cannot be set: it works as the user
        both = pools(member("bartleby_operator", "with inherit true, set false"))
        both.operating.create_queue("orders")
        assert str(both.operating.run(WHO)).startswith("member_")
        assert str(both.operating.run(WHO)).endswith(" 1min")


def test_pools_that_are_closed_after_a_call_leave_no_connection(
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
    until(lambda: conn.execute(connected).rowcount == 0)


def test_watchdog_keeps_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, shut_late = threading.Event(), Watchdog._shut_late

    def look(self: Watchdog) -> None:
        shut_late(self)
        looked.set()

    monkeypatch.setattr(Watchdog, "_shut_late", look)
    watched = threading.Event()  # which can be referred to weakly, as a connection can
    with Watchdog().within(cast("Pooled", watched), 600):
        assert looked.wait(LONG)
    gone = weakref.ref(watched)
    del watched
    until(lambda: gone() is None)
