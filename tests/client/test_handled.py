"""Effects exactly once: the mark and the effect are one transaction. The callers are in test_transactions.py."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import django.db
import psycopg
import psycopg2  # type: ignore[import-untyped]
import pytest
import sqlalchemy
from sqlalchemy import NullPool, orm
from sqlalchemy.ext import asyncio as alchemy

from bartleby import InvalidArgument, Message
from bartleby.app import Bartleby
from bartleby.outcomes import AlreadyHandled
from tests.kit.callers import CALLERS, use_django, with_driver
from tests.kit.clock import move_clock
from tests.kit.worker import drain

Conn = psycopg.Connection[tuple[Any, ...]]
Wait = Callable[[Callable[[], object]], None]

HOWTO = Path(__file__).parents[2] / "docs" / "howto" / "effects-exactly-once.md"
BLOCKS = dict(re.findall(r"## (\w+).*?```python\n(.*?)```", HOWTO.read_text(), re.DOTALL))
EFFECT = "insert into effect values (1)"


@pytest.fixture
def app(dsn: str, conn: Conn) -> Iterator[Bartleby]:
    conn.execute("create table effect (n integer)")
    app = Bartleby(dsn)
    app.client.create_queue("orders", {"lease": "PT10S"})
    yield app
    app.client.close()


@pytest.fixture
def redeliveries(app: Bartleby, conn: Conn) -> list[Message]:
    """One message that was claimed three times because its leases lapsed."""
    app.send("orders", {"id": 42}, key="order-42")
    clock = move_clock(conn)
    return [redelivered(app, clock.advance) for _ in range(3)]


def redelivered(app: Bartleby, advance: Callable[[float], None]) -> Message:
    lease = app.client.claim("orders", "tester")
    assert lease is not None
    advance(20)
    app.client.reap()
    advance(60)  # longer than the backoff of a crash
    return lease.messages[0]


def effects(conn: Conn) -> int:
    return int(conn.execute("select count(*) from effect").fetchall()[0][0])


@pytest.mark.parametrize(("library", "first_commits"), [("psycopg", True), ("asyncpg", False)])
def test_three_redeliveries_at_once_have_one_effect(
    app: Bartleby, redeliveries: list[Message], conn: Conn, wait_for: Wait, *, library: str, first_commits: bool
) -> None:
    marked, go_on, begin = threading.Event(), threading.Event(), CALLERS[library]

    def first() -> str:
        with begin(app.settings.dsn or "") as caller:
            caller.mark_handled(app, redeliveries[0])
            caller.execute(EFFECT)
            marked.set()
            assert go_on.wait(30)
            (caller.commit if first_commits else caller.rollback)()
        return "done" if first_commits else "rolled back"

    def other(message: Message) -> str:
        with begin(app.settings.dsn or "") as caller:
            try:
                caller.mark_handled(app, message)
            except AlreadyHandled:
                caller.rollback()
                return "already handled"
            caller.execute(EFFECT)
            caller.commit()
        return "done"

    def waiting() -> int:
        query = "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        return conn.execute(query).rowcount

    with ThreadPoolExecutor(3) as threads:
        outcomes: list[Future[str]] = [threads.submit(first)]
        assert marked.wait(30)
        outcomes += [threads.submit(other, message) for message in redeliveries[1:]]
        try:
            wait_for(lambda: waiting() == 2)
        finally:
            go_on.set()
        found = sorted(each.result() for each in outcomes)
    assert found == sorted(["done", "already handled", "already handled" if first_commits else "rolled back"])
    assert effects(conn) == 1


def test_longest_key_of_a_sender_is_remembered(app: Bartleby, dsn: str) -> None:
    for _ in range(2):
        app.send("orders", 1, key="ß" * 500)
    lease = app.client.claim("orders", "tester", limit=2)
    assert lease is not None
    with psycopg.connect(dsn) as connection:
        app.mark_handled(lease.messages[0], connection, by="key")
        with pytest.raises(AlreadyHandled):
            app.mark_handled(lease.messages[1], connection, by="key")


# A mark that is committed before its effect would lose the effect if that fails.


def test_mark_without_a_transaction_is_refused(  # noqa: PLR0915 - one database for all libraries
    app: Bartleby, redeliveries: list[Message], dsn: str, conn: Conn
) -> None:
    message = redeliveries[0]

    def refused(connection: Any) -> None:
        with pytest.raises(InvalidArgument, match="there is no transaction") as caught:
            app.mark_handled(message, connection)
        assert "transaction" in (caught.value.hint or "")

    with psycopg.connect(dsn, autocommit=True) as connection:
        refused(connection)
        with connection.transaction(force_rollback=True):
            app.mark_handled(message, connection)
    old = psycopg2.connect(dsn)
    old.autocommit = True
    refused(old)
    with old.cursor() as cursor:
        cursor.execute("begin")
        app.mark_handled(message, old)
        cursor.execute("rollback")
    old.close()
    for driver in ("psycopg", "psycopg2"):
        engine = sqlalchemy.create_engine(with_driver(dsn, driver), poolclass=NullPool)
        with orm.Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
            refused(session)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as bound:
            refused(bound)
    use_django(dsn)
    refused(django.db.connection)
    with django.db.transaction.atomic():
        app.mark_handled(message, django.db.connection)
        django.db.transaction.set_rollback(True)
    django.db.transaction.set_autocommit(False)
    app.mark_handled(message, django.db.connection)
    django.db.transaction.rollback()
    django.db.connection.close()
    del django.db.connections["default"]
    assert conn.execute("select count(*) from bartleby.handled").fetchall() == [(0,)]


async def test_awaited_mark_without_a_transaction_is_refused(
    app: Bartleby, redeliveries: list[Message], dsn: str
) -> None:
    async def refused(connection: Any) -> None:
        with pytest.raises(InvalidArgument, match="there is no transaction"):
            await app.amark_handled(redeliveries[0], connection)

    for driver in ("psycopg", "asyncpg"):
        engine = alchemy.create_async_engine(with_driver(dsn, driver), poolclass=NullPool)
        async with engine.connect() as bound:
            await bound.execution_options(isolation_level="AUTOCOMMIT")
            await refused(bound)
        async with alchemy.AsyncSession(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
            await refused(session)
        await engine.dispose()
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other:
        await refused(other)
    connection = await asyncpg.connect(dsn)
    await refused(connection)
    async with connection.transaction():
        await app.amark_handled(redeliveries[0], connection)
    await connection.close()


def test_old_snapshot_does_not_allow_a_second_mark(
    app: Bartleby, dsn: str, conn: Conn, redeliveries: list[Message]
) -> None:
    with psycopg.connect(dsn) as first, psycopg.connect(dsn) as second:
        second.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        second.execute("select count(*) from effect")
        app.mark_handled(redeliveries[0], first)
        first.execute(EFFECT)
        first.commit()
        with pytest.raises(psycopg.errors.SerializationFailure):
            app.mark_handled(redeliveries[1], second)
        second.rollback()
        with pytest.raises(AlreadyHandled):
            app.mark_handled(redeliveries[1], second)
        second.rollback()
    assert effects(conn) == 1


class TestHowTo:
    """The code of the how-to, with what it takes for granted."""

    @pytest.fixture
    def given(self, app: Bartleby, dsn: str, conn: Conn) -> dict[str, Any]:
        conn.execute("create table parcel (id bigint generated always as identity, order_id bigint)")
        app.send("orders", {"id": 42})
        return {"app": app, "Message": Message, "DSN": dsn}

    def check(self, given: dict[str, Any], block: str, conn: Conn) -> None:
        exec(BLOCKS[block], given)  # noqa: S102 - the text is ours
        app: Bartleby = given["app"]
        message = redelivered(app, move_clock(conn).advance)
        app.handlers["orders"].function(message)
        with pytest.raises(AlreadyHandled):
            app.handlers["orders"].function(message)
        assert conn.execute("select order_id from parcel").fetchall() == [(42,)]

    def test_psycopg(self, given: dict[str, Any], conn: Conn) -> None:
        self.check({**given, "psycopg": psycopg}, "psycopg", conn)

    def test_sqlalchemy(self, given: dict[str, Any], conn: Conn) -> None:
        class Base(orm.DeclarativeBase):
            pass

        class Parcel(Base):
            __tablename__ = "parcel"
            id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
            order_id: orm.Mapped[int]

        engine = sqlalchemy.create_engine(with_driver(given["DSN"], "psycopg"), poolclass=NullPool)
        self.check({**given, "engine": engine, "Session": orm.Session, "Parcel": Parcel}, "SQLAlchemy", conn)

    def test_django(self, given: dict[str, Any], conn: Conn) -> None:
        use_django(given["DSN"])
        from django.db import models

        meta = type("Meta", (), {"app_label": "shop", "db_table": "parcel"})
        fields = {"id": models.BigAutoField(primary_key=True), "order_id": models.BigIntegerField()}
        parcel = type("Parcel", (models.Model,), {"__module__": __name__, "Meta": meta, **fields})
        there = {"transaction": django.db.transaction, "connection": django.db.connection, "Parcel": parcel}
        self.check({**given, **there}, "Django", conn)
        django.db.connection.close()
        del django.db.connections["default"]

    async def test_asyncpg(self, given: dict[str, Any], conn: Conn) -> None:
        exec(BLOCKS["asyncpg"], given)  # noqa: S102 - the text is ours
        app: Bartleby = given["app"]
        message = redelivered(app, move_clock(conn).advance)
        async with asyncpg.create_pool(given["DSN"], min_size=1, max_size=2) as given["pool"]:
            await app.handlers["orders"].function(message)
            with pytest.raises(AlreadyHandled):
                await app.handlers["orders"].function(message)
        assert conn.execute("select order_id from parcel").fetchall() == [(42,)]


class TestInAWorker:
    """What a handler sees of it: one line; the worker does the rest."""

    def test_redelivery_is_acked_without_a_second_effect(self, app: Bartleby, dsn: str, conn: Conn) -> None:
        runs: list[int] = []

        @app.handler("orders")
        def fulfil(message: Message) -> None:
            runs.append(message.id)
            with psycopg.connect(dsn) as connection:
                app.mark_handled(message, connection)
                connection.execute(EFFECT)

        handled_but_not_acked(app, conn, runs)
        assert drain(app) == {"done": 1}
        assert (len(runs), effects(conn)) == (2, 1)

    @pytest.mark.parametrize("once", [True, "key"])
    def test_handled_message_is_not_run_with_once(self, app: Bartleby, dsn: str, conn: Conn, once: Any) -> None:
        runs: list[int] = []

        @app.handler("orders", once=once)
        async def fulfil(message: Message) -> None:
            runs.append(message.id)
            async with await psycopg.AsyncConnection.connect(dsn) as connection:
                await app.amark_handled(message, connection, by="id" if once is True else "key")
                await connection.execute(EFFECT)

        handled_but_not_acked(app, conn, runs)
        assert drain(app) == {"done": 1}
        assert (len(runs), effects(conn)) == (1, 1)

    def test_messages_of_one_key_in_one_claim_are_all_settled(self, app: Bartleby, dsn: str, conn: Conn) -> None:
        @app.handler("orders", once="key")
        def fulfil(message: Message) -> None:
            with psycopg.connect(dsn) as connection:
                app.mark_handled(message, connection, by="key")
                connection.execute(EFFECT)

        app.send_many("orders", [{"payload": n, "key": f"order-{n % 3}"} for n in range(30)])
        assert drain(app) == {"done": 30}
        assert effects(conn) == 3

    def test_replay_of_a_handled_message_resolves_its_letter(self, app: Bartleby, dsn: str, conn: Conn) -> None:
        @app.handler("orders", retry={"max_attempts": 1})
        def fulfil(message: Message) -> None:
            with psycopg.connect(dsn) as connection:
                app.mark_handled(message, connection)
                connection.execute(EFFECT)
            raise ConnectionError("the mail server is unavailable")  # after the commit

        app.send("orders", 1)
        assert drain(app) == {"dead": 1}
        [letter] = app.client.dead_letters("queue:orders")
        app.client.replay([letter.message_id], actor="tester", reason="the mail server is back")
        assert drain(app) == {"done": 1}
        assert effects(conn) == 1
        assert len(app.client.dead_letters("queue:orders")) == 0


def handled_but_not_acked(app: Bartleby, conn: Conn, runs: list[int]) -> None:
    """Run the handler of one message as a worker that is killed before the ack."""
    app.send("orders", {"id": 42}, key="order-42")
    message = redelivered(app, move_clock(conn).advance)
    function = app.handlers["orders"].function
    answer = function(message)
    if answer is not None:
        asyncio.run(answer)
    assert (runs, effects(conn)) == ([message.id], 1)
