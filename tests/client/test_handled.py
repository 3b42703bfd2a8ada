"""Effects exactly once: the mark and the effect are one transaction. The callers are in test_transactions.py."""

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import django.db
import psycopg
import psycopg2  # type: ignore[import-untyped]
import pytest
import sqlalchemy
from django.db import models
from sqlalchemy import NullPool, orm
from sqlalchemy.ext import asyncio as alchemy

from bartleby import InvalidArgument, Message
from bartleby.app import Bartleby
from bartleby.outcomes import AlreadyHandled
from tests.kit.callers import use_django, with_driver
from tests.kit.worker import Conn, drain, lapse, numbered, present

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


def killed_before_its_ack(app: Bartleby, conn: Conn) -> Message:
    """Send a message, and claim it as a worker that dies; it will be delivered again."""
    app.client.configure_queue("orders", {"backoff": "none"})
    app.send("orders", {"id": 42}, key="order-42")
    [message] = present(app.client.claim("orders", "tester"))
    lapse(conn)
    return message


def effects(conn: Conn) -> int:
    return int(conn.execute("select count(*) from effect").fetchall()[0][0])


# A mark that is committed before its effect would lose the effect if that fails.


def test_mark_without_a_transaction_is_refused(  # noqa: PLR0915 - one database for all libraries
    app: Bartleby, dsn: str, conn: Conn
) -> None:
    message = killed_before_its_ack(app, conn)

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


async def test_awaited_mark_without_a_transaction_is_refused(app: Bartleby, dsn: str, conn: Conn) -> None:
    message = killed_before_its_ack(app, conn)

    async def refused(connection: Any) -> None:
        with pytest.raises(InvalidArgument, match="there is no transaction"):
            await app.amark_handled(message, connection)

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
        await app.amark_handled(message, connection)
    await connection.close()


# The code of the how-to, with what it takes for granted


def check_block(app: Bartleby, block: str, conn: Conn, run: Callable[[Any], object] = bool, **given: Any) -> None:
    conn.execute("create table parcel (id bigint generated always as identity, order_id bigint)")
    exec(BLOCKS[block], {"app": app, "Message": Message, **given})  # noqa: S102 - the text is ours
    message, function = killed_before_its_ack(app, conn), app.handlers["orders"].function
    run(function(message))
    with pytest.raises(AlreadyHandled):
        run(function(message))
    assert conn.execute("select order_id from parcel").fetchall() == [(42,)]


def test_how_to_with_psycopg(app: Bartleby, conn: Conn, dsn: str) -> None:
    check_block(app, "psycopg", conn, psycopg=psycopg, DSN=dsn)


def test_how_to_with_sqlalchemy(app: Bartleby, conn: Conn, dsn: str) -> None:
    class Base(orm.DeclarativeBase):
        pass

    class Parcel(Base):
        __tablename__ = "parcel"
        id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
        order_id: orm.Mapped[int]

    engine = sqlalchemy.create_engine(with_driver(dsn, "psycopg"), poolclass=NullPool)
    check_block(app, "SQLAlchemy", conn, engine=engine, Session=orm.Session, Parcel=Parcel)


def test_how_to_with_django(app: Bartleby, conn: Conn, dsn: str) -> None:
    use_django(dsn)
    meta = type("Meta", (), {"app_label": "shop", "db_table": "parcel"})
    fields = {"id": models.BigAutoField(primary_key=True), "order_id": models.BigIntegerField()}
    parcel = type("Parcel", (models.Model,), {"__module__": __name__, "Meta": meta, **fields})
    given = {"transaction": django.db.transaction, "connection": django.db.connection, "Parcel": parcel}
    check_block(app, "Django", conn, **given)
    django.db.connection.close()
    del django.db.connections["default"]


def test_how_to_with_asyncpg(app: Bartleby, conn: Conn, dsn: str) -> None:
    with asyncio.Runner() as loop:

        async def open_pool() -> Any:
            return await asyncpg.create_pool(dsn, min_size=1, max_size=2)

        pool = loop.run(open_pool())
        check_block(app, "asyncpg", conn, loop.run, pool=pool)
        loop.run(pool.close())


# In a worker


@pytest.mark.seed("outbox-51")
@pytest.mark.parametrize("once", [False, True, "key"])
def test_redelivery_is_acked_without_a_second_effect(app: Bartleby, dsn: str, conn: Conn, once: Any) -> None:
    """With once the handler does not even run again."""
    runs: list[int] = []

    @app.handler("orders", once=once)
    async def fulfil(message: Message) -> None:
        runs.append(message.id)
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            await app.amark_handled(message, connection, by="key" if once == "key" else "id")
            await connection.execute(EFFECT)

    asyncio.run(fulfil(killed_before_its_ack(app, conn)))
    assert effects(conn) == 1
    assert drain(app) == {"done": 1}
    assert (len(runs), effects(conn)) == (1 if once else 2, 1)


@pytest.mark.seed("outbox-54")
def test_messages_of_one_key_in_one_claim_are_all_settled(app: Bartleby, dsn: str, conn: Conn) -> None:
    @app.handler("orders", once="key")
    def fulfil(message: Message) -> None:
        with psycopg.connect(dsn) as connection:
            app.mark_handled(message, connection, by="key")
            connection.execute(EFFECT)

    app.send_many("orders", [{**each, "key": f"order-{each['payload'] % 3}"} for each in numbered(30)])
    assert drain(app) == {"done": 30}
    assert effects(conn) == 3


def test_replay_of_a_handled_message_resolves_its_letter(app: Bartleby, dsn: str, conn: Conn) -> None:
    @app.handler("orders", retry={"max_attempts": 1})
    def fulfil(message: Message) -> None:
        with psycopg.connect(dsn) as connection:
            app.mark_handled(message, connection)
            connection.execute(EFFECT)
        raise ConnectionError("the mail server is unavailable")  # after the commit

    sent = app.send("orders", 1)
    assert drain(app) == {"dead": 1}
    app.client.replay([sent], actor="tester", reason="the mail server is back")
    assert drain(app) == {"done": 1}
    assert (effects(conn), len(app.client.dead_letters("queue:orders"))) == (1, 0)
