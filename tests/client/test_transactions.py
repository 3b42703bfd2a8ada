"""A caller's transaction, in every library: what is sent and marked in it is part of it, so effects happen once."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import django.db
import psycopg
import psycopg2.extras  # type: ignore[import-untyped]
import pytest
import sqlalchemy
from django.db import models
from psycopg.rows import dict_row
from sqlalchemy import NullPool, orm
from sqlalchemy.ext import asyncio as alchemy

import bartleby
from bartleby import AlreadyHandled, Bartleby, InvalidArgument, Message, UnknownQueue, dev
from tests.client.callers import CALLERS, Begin, Caller, finished, use_django, with_driver
from tests.kit.database import database_dsn
from tests.kit.worker import Conn, drain, lapse, numbered, present

HOWTO = Path(__file__).parents[2] / "docs" / "howto" / "effects-exactly-once.md"
BLOCKS = dict(re.findall(r"## (\w+).*?```python\n(.*?)```", HOWTO.read_text(), re.DOTALL))

PAYLOADS = [
    None, True, 2**53 + 1, -(2**80), 10**400, 0.1, 5e-324, "Straße ☃ \U0001f600", "'; drop schema --", [],
    "%s %(x)s %% {} $1 :p1 ::jsonb", {"a": {"": [1.5, "x", None]}}, ["x" * 100_000],
]  # fmt: skip
EFFECT = "insert into effect values (1)"


@pytest.fixture
def app(dsn: str, conn: Conn) -> Iterator[Bartleby]:
    conn.execute("create table effect (n integer)")
    app = Bartleby(dsn, generation=5)
    app.client.create_queue("orders", {"payload_limit": 200_000, "lease": "PT1H"})
    yield app
    app.client.close()


def killed_before_its_ack(app: Bartleby, conn: Conn) -> Message:
    """Send a message, and claim it as a worker that dies; it will be delivered again."""
    app.client.configure_queue("orders", {"backoff": "none"})
    app.send("orders", {"id": 42}, key="order-42", generation=0)
    [message] = present(app.client.claim("orders", "tester"))
    lapse(conn)
    return message


def received(app: Bartleby) -> list[Message]:
    lease = app.client.claim("orders", "tester", limit=100)
    return [] if lease is None else list(lease)


def effects(conn: Conn) -> int:
    return int(conn.execute("select count(*) from effect").fetchall()[0][0])


@pytest.mark.parametrize("begin", list(CALLERS.values()), ids=list(CALLERS))
def test_sends_and_marks_are_part_of_the_callers_transaction(
    app: Bartleby, begin: Begin, dsn: str, conn: Conn, server: dev.Server
) -> None:
    rollback_discards_everything(app, begin, dsn, conn)
    commit_makes_everything_visible(app, begin, dsn, conn)
    second_mark_is_refused(app, begin, dsn, conn)
    errors_are_of_our_classes(app, begin, dsn)
    with begin(dsn) as caller:
        other_kind_of_connection_is_refused(app, caller)
    app.client.drop_queue("orders", force=True)
    with begin(database_dsn(server, "postgres")) as caller, pytest.raises(bartleby.NotInstalled) as caught:
        caller.send(app, "orders", 1)
    assert caught.value.hint == "run: bartleby install"


def rollback_discards_everything(app: Bartleby, begin: Begin, dsn: str, conn: Conn) -> None:
    sent = app.send("orders", "to be marked")
    [message] = received(app)
    with begin(dsn) as caller:
        caller.execute(EFFECT)
        caller.send(app, "orders", {"id": 42})
        caller.send_many(app, "orders", [{"payload": 1}, {"payload": 2}])
        caller.mark_handled(app, message)
        caller.rollback()
    assert (received(app), effects(conn), app.client.handled_keys("orders", [f"id:{sent}"])) == ([], 0, set())


def commit_makes_everything_visible(app: Bartleby, begin: Begin, dsn: str, conn: Conn) -> None:
    known: dict[str, Any] = {"headers": {"tenant": "acme"}, "key": "order-1", "max_attempts": 7, "generation": 3}
    began = datetime.now(UTC)
    with begin(dsn) as caller:
        caller.execute(EFFECT)
        ids = [caller.send(app, "orders", payload) for payload in PAYLOADS]
        ids += caller.send_many(app, "orders", [{"payload": payload} for payload in PAYLOADS])
        once = caller.send(app, "orders", "once", **known, unique_for=timedelta(hours=1))
        assert caller.send(app, "orders", "once", **known, unique_for=3600) == once
        later = caller.send(app, "orders", "later", delay=timedelta(minutes=5))
        ids += [once, *caller.send_many(app, "orders", [{"payload": "own", "delay": 0.0, "generation": 2}])]
        assert received(app) == []
        caller.commit()
    messages = received(app)
    expected = list(zip(ids, [*PAYLOADS, *PAYLOADS, "once", "own"], strict=True))
    assert [(message.id, message.payload) for message in messages] == expected
    assert [message.generation for message in messages] == [5] * 2 * len(PAYLOADS) + [3, 2]
    assert (messages[-2].headers, messages[-2].key) == ({"tenant": "acme"}, "order-1")
    query = "select run_at, max_attempts from bartleby.messages where message_id = any (%s) order by message_id"
    (_, attempts), (due, _) = conn.execute(query, [[once, later]]).fetchall()
    assert attempts == 7
    assert began + timedelta(minutes=5) <= due <= datetime.now(UTC) + timedelta(minutes=5)
    assert effects(conn) == 1


def second_mark_is_refused(app: Bartleby, begin: Begin, dsn: str, conn: Conn) -> None:
    before = effects(conn)
    app.send_many("orders", [{"payload": 1, "key": "ß" * 500}] * 2)
    first, again = received(app)
    assert first.generation == again.generation == 5
    for by, message, handled in (
        ("id", first, False),
        ("id", first, True),
        ("key", first, False),
        ("key", again, True),
    ):
        with begin(dsn) as caller:
            if handled:
                with pytest.raises(AlreadyHandled, match=str(message.id)):
                    caller.mark_handled(app, message, by=by)
                caller.rollback()
            else:
                caller.mark_handled(app, message, by=by)
                caller.execute(EFFECT)
                caller.commit()
    assert effects(conn) == before + 2


def errors_are_of_our_classes(app: Bartleby, begin: Begin, dsn: str) -> None:
    with pytest.raises(UnknownQueue) as direct:
        app.send("nowhere", 1)
    refusals: list[tuple[type[Exception], tuple[Any, ...], dict[str, Any]]] = [
        (UnknownQueue, ("nowhere", 1), {}),
        (bartleby.PayloadTooLarge, ("orders", "x" * 300_000), {}),
        (InvalidArgument, ("orders", 1), {"max_attempts": "many"}),
        (InvalidArgument, ("orders", 1), {"max_attempts": 2**40}),
    ]
    for kind, arguments, options in refusals:
        with begin(dsn) as caller, pytest.raises(kind) as caught:
            caller.send(app, *arguments, **options)
        assert caught.value.__cause__ is not None, "the error of the library is kept"
        if isinstance(caught.value, UnknownQueue):
            assert (str(caught.value), caught.value.hint) == (str(direct.value), direct.value.hint)
    for bulk in ([{"payload": 1}, {"payload": 2, "keys": "x"}], [{"payload": 1}, 7]):
        with begin(dsn) as caller, pytest.raises(bartleby.InvalidMessage) as bad:
            caller.send_many(app, "orders", bulk)
        assert bad.value.index == 1
    message = Message(1, "gone", 1, 1, 1, "1", "{}", None, None, datetime.now(UTC), solo=False)  # type: ignore[arg-type]
    with begin(dsn) as caller, pytest.raises(UnknownQueue):
        caller.mark_handled(app, message)
    assert received(app) == []


def other_kind_of_connection_is_refused(app: Bartleby, caller: Caller) -> None:
    if caller.wait is None:
        with pytest.raises(InvalidArgument, match="hold up the event loop") as caught, asyncio.Runner() as loop:
            loop.run(app.asend("orders", 1, connection=caller.connection))
        assert "without the a" in (caught.value.hint or "")
    else:
        with pytest.raises(InvalidArgument, match="is awaited") as caught:
            app.send("orders", 1, connection=caller.connection)
        assert "asend" in (caught.value.hint or "")


async def test_object_that_is_not_a_connection_to_postgresql_is_refused(app: Bartleby) -> None:
    for thing in (object(), "postgresql://localhost/", 7, sqlalchemy.create_engine("sqlite://")):
        with pytest.raises(InvalidArgument, match="no connection that is known") as caught:
            app.send("orders", 1, connection=thing)
        assert "psycopg2" in (caught.value.hint or "")
        with pytest.raises(InvalidArgument, match="no connection that is known"):
            app.using(thing).send("orders", 1)
        with pytest.raises(InvalidArgument, match="no connection that is known"):
            await app.asend("orders", 1, connection=thing)
    with orm.Session(sqlalchemy.create_engine("sqlite://")) as session, pytest.raises(InvalidArgument, match="sqlite"):
        app.send("orders", 1, connection=session)
    use_django(app.settings.dsn or "")
    connections: Any = django.db.connections
    connections.settings = connections.configure_settings({"default": {"ENGINE": "django.db.backends.sqlite3"}})
    with pytest.raises(InvalidArgument, match="not one to PostgreSQL"):
        app.send("orders", 1, connection=django.db.connection)
    del connections["default"]


async def test_settings_of_a_connection_do_not_matter(app: Bartleby, dsn: str) -> None:
    class Own(psycopg.Connection[Any]):
        pass

    with Own.connect(dsn, row_factory=dict_row) as own:
        app.send("orders", "rows of another shape, in a subclass", connection=own)
    other = psycopg2.connect(dsn, cursor_factory=psycopg2.extras.RealDictCursor)
    with other:
        app.send("orders", "rows of another shape", connection=other)
    other.close()
    with psycopg.connect(dsn, autocommit=True) as connection:
        app.send("orders", "no transaction", connection=connection)
        assert len(received(app)) == 3
    encoding = await asyncpg.connect(dsn)
    await encoding.set_type_codec("jsonb", schema="pg_catalog", encoder=json.dumps, decoder=json.loads)
    await app.asend("orders", {"id": 1}, connection=encoding, headers={"a": 1})
    await app.using(encoding).asend_many("orders", [{"payload": "text"}])
    await encoding.close()
    engine = alchemy.create_async_engine(with_driver(dsn, "asyncpg"), poolclass=NullPool)
    async with alchemy.AsyncSession(engine) as session:
        await session.run_sync(lambda plain: app.send("orders", "inside run_sync", connection=plain))
        await session.commit()
    await engine.dispose()
    assert [message.payload for message in received(app)] == [{"id": 1}, "text", "inside run_sync"]


def test_no_library_is_imported_to_recognise_a_connection() -> None:
    program = """
import contextlib, sys
from bartleby import InvalidArgument, transactions
with contextlib.suppress(InvalidArgument):
    transactions.run(object(), None)
print(*{"sqlalchemy", "django", "psycopg2", "asyncpg"} & set(sys.modules))
"""
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "\n"


def test_mark_without_a_transaction_is_refused(app: Bartleby, dsn: str, conn: Conn) -> None:
    """Such a mark would be committed before its effect, which may fail."""
    message = killed_before_its_ack(app, conn)
    use_django(dsn)
    plain, old = psycopg.connect(dsn, autocommit=True), psycopg2.connect(dsn)
    old.autocommit = True
    opened: list[Any] = [plain, old, django.db.connection]
    autocommit: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"}
    for driver in ("psycopg", "psycopg2"):
        engine = sqlalchemy.create_engine(with_driver(dsn, driver), poolclass=NullPool)
        opened += [orm.Session(engine.execution_options(**autocommit))]
        opened += [engine.connect().execution_options(**autocommit)]
    for each in opened:
        with pytest.raises(InvalidArgument, match="there is no transaction") as caught:
            app.mark_handled(message, each)
        assert "transaction" in (caught.value.hint or "")
    # one may be begun all the same
    with plain.transaction(force_rollback=True):
        app.mark_handled(message, plain)
    old.cursor().execute("begin")
    app.mark_handled(message, old)
    old.cursor().execute("rollback")
    with django.db.transaction.atomic():
        app.mark_handled(message, django.db.connection)
        django.db.transaction.set_rollback(True)
    django.db.transaction.set_autocommit(False)
    app.mark_handled(message, django.db.connection)
    django.db.transaction.rollback()
    for each in opened:
        each.close()
    del django.db.connections["default"]
    assert app.client.handled_keys("orders", [f"id:{message.id}"]) == set()


async def test_awaited_mark_without_a_transaction_is_refused(app: Bartleby, dsn: str, conn: Conn) -> None:
    message = killed_before_its_ack(app, conn)
    opened: list[Any] = [await psycopg.AsyncConnection.connect(dsn, autocommit=True), await asyncpg.connect(dsn)]
    for driver in ("psycopg", "asyncpg"):
        engine = alchemy.create_async_engine(with_driver(dsn, driver), poolclass=NullPool)
        opened += [alchemy.AsyncSession(engine.execution_options(isolation_level="AUTOCOMMIT")), await engine.connect()]
        await opened[-1].execution_options(isolation_level="AUTOCOMMIT")
    for each in opened:
        with pytest.raises(InvalidArgument, match="there is no transaction"):
            await app.amark_handled(message, each)
        await each.close()
    assert app.client.handled_keys("orders", [f"id:{message.id}"]) == set()


def test_code_of_the_how_to_has_each_effect_once(app: Bartleby, conn: Conn, dsn: str) -> None:
    class Base(orm.DeclarativeBase):
        pass

    class Parcel(Base):
        __tablename__ = "parcel"
        id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
        order_id: orm.Mapped[int]

    use_django(dsn)
    meta = type("Meta", (), {"app_label": "shop", "db_table": "parcel"})
    fields = {"id": models.BigAutoField(primary_key=True), "order_id": models.BigIntegerField()}
    model = type("Parcel", (models.Model,), {"__module__": __name__, "Meta": meta, **fields})
    engine = sqlalchemy.create_engine(with_driver(dsn, "psycopg"), poolclass=NullPool)
    conn.execute("create table parcel (id bigint generated always as identity, order_id bigint)")
    with asyncio.Runner() as loop:
        pool = loop.run(finished(asyncpg.create_pool(dsn, min_size=1, max_size=2)))
        taken_for_granted = {
            "psycopg": {"psycopg": psycopg, "DSN": dsn},
            "SQLAlchemy": {"engine": engine, "Session": orm.Session, "Parcel": Parcel},
            "Django": {"transaction": django.db.transaction, "connection": django.db.connection, "Parcel": model},
            "asyncpg": {"pool": pool},
        }
        assert set(taken_for_granted) == set(BLOCKS)
        for library, given in taken_for_granted.items():
            app.client.drop_queue("orders", force=True)
            app.client.create_queue("orders")
            made = Bartleby(dsn)
            exec(BLOCKS[library], {"app": made, "Message": Message, **given})  # noqa: S102 - the text is from docs
            message, function = killed_before_its_ack(app, conn), made.handlers["orders"].function
            run: Any = loop.run if library == "asyncpg" else bool
            run(function(message))
            with pytest.raises(AlreadyHandled):
                run(function(message))
            assert conn.execute("delete from parcel returning order_id").fetchall() == [(42,)], library
        loop.run(pool.close())
    django.db.connection.close()
    del django.db.connections["default"]


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
