"""Effects exactly once: the mark and the effect in one transaction, whatever library it is in."""

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

from bartleby import InvalidArgument, Message, UnknownQueue
from bartleby.app import Bartleby
from bartleby.outcomes import AlreadyHandled
from bartleby.worker import Worker
from tests.kit.callers import CALLERS, Begin, use_django, with_driver
from tests.kit.clock import move_clock

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


@pytest.fixture(params=list(CALLERS.values()), ids=list(CALLERS))
def begin(request: pytest.FixtureRequest) -> Begin:
    chosen: Begin = request.param
    return chosen


@pytest.fixture
def redeliveries(app: Bartleby, conn: Conn) -> list[Message]:
    """One message, handed out three times because its leases lapsed; no worker knows that."""
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


def test_the_second_delivery_is_told_before_its_effect(
    app: Bartleby, begin: Begin, dsn: str, conn: Conn, redeliveries: list[Message]
) -> None:
    with begin(dsn) as caller:
        caller.mark_handled(app, redeliveries[0])
        caller.execute(EFFECT)
        caller.commit()
    with begin(dsn) as caller:
        with pytest.raises(AlreadyHandled, match=str(redeliveries[0].id)):
            caller.mark_handled(app, redeliveries[1])
        caller.rollback()
    assert effects(conn) == 1


def test_the_mark_goes_with_the_effect_when_that_is_rolled_back(
    app: Bartleby, begin: Begin, dsn: str, conn: Conn, redeliveries: list[Message]
) -> None:
    with begin(dsn) as caller:
        caller.mark_handled(app, redeliveries[0])
        caller.execute(EFFECT)
        caller.rollback()
    with begin(dsn) as caller:
        caller.mark_handled(app, redeliveries[1])
        caller.execute(EFFECT)
        caller.commit()
    assert effects(conn) == 1


@pytest.mark.parametrize("first_commits", [True, False], ids=["first commits", "first rolls back"])
def test_three_redeliveries_at_once_have_one_effect(
    app: Bartleby,
    begin: Begin,
    redeliveries: list[Message],
    conn: Conn,
    wait_for: Wait,
    *,
    first_commits: bool,
) -> None:
    marked, go_on = threading.Event(), threading.Event()

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

    with ThreadPoolExecutor(3) as threads:
        outcomes: list[Future[str]] = [threads.submit(first)]
        assert marked.wait(30)
        outcomes += [threads.submit(other, message) for message in redeliveries[1:]]
        try:
            wait_for(lambda: waiting(conn) == 2)
        finally:
            go_on.set()
        found = sorted(each.result() for each in outcomes)
    assert found == sorted(["done", "already handled", "already handled" if first_commits else "rolled back"])
    assert effects(conn) == 1


def waiting(conn: Conn) -> int:
    query = "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    return conn.execute(query).rowcount


def test_by_its_key_what_was_sent_twice_is_done_once(app: Bartleby, begin: Begin, dsn: str, conn: Conn) -> None:
    for _ in range(2):
        app.send("orders", 1, key="order-42")
    app.send("orders", 1, key="order-43")
    lease = app.client.claim("orders", "tester", limit=3)
    assert lease is not None
    done = []
    for message in lease:
        with begin(dsn) as caller:
            try:
                caller.mark_handled(app, message, by="key")
                caller.execute(EFFECT)
                caller.commit()
                done.append(message.key)
            except AlreadyHandled:
                caller.rollback()
    assert done == ["order-42", "order-43"]
    assert effects(conn) == 2


def test_a_key_as_long_as_a_sender_may_use_is_remembered(app: Bartleby, dsn: str) -> None:
    for _ in range(2):
        app.send("orders", 1, key="ß" * 500)
    lease = app.client.claim("orders", "tester", limit=2)
    assert lease is not None
    with psycopg.connect(dsn) as connection:
        app.mark_handled(lease.messages[0], connection, by="key")
        with pytest.raises(AlreadyHandled):
            app.mark_handled(lease.messages[1], connection, by="key")


def test_a_queue_that_is_gone_is_named(app: Bartleby, begin: Begin, dsn: str, redeliveries: list[Message]) -> None:
    app.client.drop_queue("orders", force=True)
    with begin(dsn) as caller, pytest.raises(UnknownQueue):
        caller.mark_handled(app, redeliveries[0])


class TestWithoutATransaction:
    """A mark that is committed before its effect loses the effect when that fails."""

    @pytest.fixture
    def message(self, redeliveries: list[Message]) -> Message:
        return redeliveries[0]

    @pytest.fixture
    def refused(self, app: Bartleby, message: Message, conn: Conn) -> Iterator[Callable[[Any], None]]:
        def refuse(connection: Any) -> None:
            with pytest.raises(InvalidArgument, match="there is no transaction") as caught:
                app.mark_handled(message, connection)
            assert "transaction" in (caught.value.hint or "")

        yield refuse
        assert conn.execute("select count(*) from bartleby.handled").fetchall() == [(0,)]

    def test_psycopg(self, app: Bartleby, message: Message, refused: Callable[[Any], None], dsn: str) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            refused(connection)
            with connection.transaction(force_rollback=True):
                app.mark_handled(message, connection)

    def test_psycopg2(self, app: Bartleby, message: Message, refused: Callable[[Any], None], dsn: str) -> None:
        connection = psycopg2.connect(dsn)
        connection.autocommit = True
        refused(connection)
        with connection.cursor() as cursor:
            cursor.execute("begin")
            app.mark_handled(message, connection)
            cursor.execute("rollback")
        connection.close()

    @pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
    def test_sqlalchemy(self, refused: Callable[[Any], None], dsn: str, driver: str) -> None:
        engine = sqlalchemy.create_engine(with_driver(dsn, driver), poolclass=NullPool)
        with orm.Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
            refused(session)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            refused(connection)

    def test_django(self, app: Bartleby, message: Message, refused: Callable[[Any], None], dsn: str) -> None:
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

    @pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
    async def test_awaited_sqlalchemy(self, app: Bartleby, message: Message, dsn: str, driver: str) -> None:
        engine = alchemy.create_async_engine(with_driver(dsn, driver), poolclass=NullPool)
        async with engine.connect() as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            with pytest.raises(InvalidArgument, match="there is no transaction"):
                await app.amark_handled(message, connection)
        async with alchemy.AsyncSession(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
            with pytest.raises(InvalidArgument, match="there is no transaction"):
                await app.amark_handled(message, session)
        await engine.dispose()

    async def test_asyncpg_and_awaited_psycopg(self, app: Bartleby, message: Message, dsn: str) -> None:
        connection = await asyncpg.connect(dsn)
        with pytest.raises(InvalidArgument, match="there is no transaction"):
            await app.amark_handled(message, connection)
        async with connection.transaction():
            await app.amark_handled(message, connection)
        await connection.close()
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other:
            with pytest.raises(InvalidArgument, match="there is no transaction"):
                await app.amark_handled(message, other)


def test_an_old_snapshot_is_no_way_around_it(app: Bartleby, dsn: str, conn: Conn, redeliveries: list[Message]) -> None:
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
    """What a handler sees of it: one line, and the rest is the worker's."""

    def test_a_redelivery_is_acked_without_a_second_effect(self, app: Bartleby, dsn: str, conn: Conn) -> None:
        runs: list[int] = []

        @app.handler("orders")
        def fulfil(message: Message) -> None:
            runs.append(message.id)
            with psycopg.connect(dsn) as connection:
                app.mark_handled(message, connection)
                connection.execute(EFFECT)

        handled_but_not_acked(app, conn, runs)
        assert work(app) == {"done": 1}
        assert (len(runs), effects(conn)) == (2, 1)

    @pytest.mark.parametrize("once", [True, "key"])
    def test_with_once_it_is_not_even_run(self, app: Bartleby, dsn: str, conn: Conn, once: Any) -> None:
        runs: list[int] = []

        @app.handler("orders", once=once)
        async def fulfil(message: Message) -> None:
            runs.append(message.id)
            async with await psycopg.AsyncConnection.connect(dsn) as connection:
                await app.amark_handled(message, connection, by="id" if once is True else "key")
                await connection.execute(EFFECT)

        handled_but_not_acked(app, conn, runs)
        assert work(app) == {"done": 1}
        assert (len(runs), effects(conn)) == (1, 1)

    def test_messages_of_one_key_in_one_claim_are_all_settled(self, app: Bartleby, dsn: str, conn: Conn) -> None:
        @app.handler("orders", once="key")
        def fulfil(message: Message) -> None:
            with psycopg.connect(dsn) as connection:
                app.mark_handled(message, connection, by="key")
                connection.execute(EFFECT)

        app.send_many("orders", [{"payload": n, "key": f"order-{n % 3}"} for n in range(30)])
        assert work(app) == {"done": 30}
        assert effects(conn) == 3

    def test_a_dead_letter_of_something_handled_is_resolved_by_its_replay(
        self, app: Bartleby, dsn: str, conn: Conn
    ) -> None:
        @app.handler("orders", retry={"max_attempts": 1})
        def fulfil(message: Message) -> None:
            with psycopg.connect(dsn) as connection:
                app.mark_handled(message, connection)
                connection.execute(EFFECT)
            raise ConnectionError("the mail server is away")  # after the commit

        app.send("orders", 1)
        assert work(app) == {"dead": 1}
        [letter] = app.client.dead_letters("queue:orders")
        app.client.replay([letter.message_id], actor="tester", reason="the mail server is back")
        assert work(app) == {"done": 1}
        assert effects(conn) == 1
        assert len(app.client.dead_letters("queue:orders")) == 0


def handled_but_not_acked(app: Bartleby, conn: Conn, runs: list[int]) -> None:
    """Run the handler of one message, and have its worker vanish before the ack."""
    app.send("orders", {"id": 42}, key="order-42")
    message = redelivered(app, move_clock(conn).advance)
    function = app.handlers["orders"].function
    answer = function(message)
    if answer is not None:
        asyncio.run(answer)
    assert (runs, effects(conn)) == ([message.id], 1)


def work(app: Bartleby) -> dict[str, int]:
    async def run() -> dict[str, int]:
        return dict(await Worker(app, until_idle=True).run())

    return asyncio.run(run())
