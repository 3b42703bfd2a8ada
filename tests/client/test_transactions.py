"""Sending and marking in a caller's transaction: one story for every library that it may be of."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import django.db
import psycopg
import psycopg2.extras  # type: ignore[import-untyped]
import pytest
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy import NullPool, orm
from sqlalchemy.ext import asyncio as alchemy

import bartleby
from bartleby import AlreadyHandled, Bartleby, InvalidArgument, Message, UnknownQueue, dev
from tests.kit.callers import CALLERS, Begin, Caller, use_django, with_driver
from tests.kit.database import database_dsn

Conn = psycopg.Connection[tuple[Any, ...]]

PAYLOADS = [
    None, True, 2**53 + 1, -(2**80), 10**400, 0.1, 5e-324, "Straße ☃ \U0001f600", "'; drop schema --", [],
    "%s %(x)s %% {} $1 :p1 ::jsonb", {"a": {"": [1.5, "x", None]}}, ["x" * 100_000],
]  # fmt: skip
EFFECT = "insert into effect values (1)"


@pytest.fixture
def app(dsn: str, conn: Conn) -> Iterator[Bartleby]:
    conn.execute("create table effect (n integer)")
    app = Bartleby(dsn, generation=5)
    app.client.create_queue("orders", {"payload_limit": 200_000})
    yield app
    app.client.close()


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
    assert timedelta(minutes=2) < due - datetime.now(UTC) < timedelta(minutes=6)
    assert effects(conn) == 1


def second_mark_is_refused(app: Bartleby, begin: Begin, dsn: str, conn: Conn) -> None:
    before = effects(conn)
    app.send_many("orders", [{"payload": 1, "key": "ß" * 500}] * 2)
    first, again = received(app)
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


async def test_object_that_is_not_a_connection_is_refused(app: Bartleby) -> None:
    for thing in (object(), "postgresql://localhost/", 7, sqlalchemy.create_engine("sqlite://")):
        with pytest.raises(InvalidArgument, match="no connection that is known") as caught:
            app.send("orders", 1, connection=thing)
        assert "psycopg2" in (caught.value.hint or "")
        with pytest.raises(InvalidArgument, match="no connection that is known"):
            app.using(thing).send("orders", 1)
        with pytest.raises(InvalidArgument, match="no connection that is known"):
            await app.asend("orders", 1, connection=thing)


def test_connection_to_another_kind_of_database_is_refused(app: Bartleby) -> None:
    with orm.Session(sqlalchemy.create_engine("sqlite://")) as session, pytest.raises(InvalidArgument, match="sqlite"):
        app.send("orders", 1, connection=session)
    use_django(app.settings.dsn or "")
    connections: Any = django.db.connections
    connections.settings = connections.configure_settings({"default": {"ENGINE": "django.db.backends.sqlite3"}})
    try:
        with pytest.raises(InvalidArgument, match="not one to PostgreSQL"):
            app.send("orders", 1, connection=django.db.connection)
    finally:
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
import sys
from bartleby import transactions
try:
    transactions.run(object(), None)
except Exception as error:
    assert type(error).__name__ == "InvalidArgument", error
print(*{"sqlalchemy", "django", "psycopg2", "asyncpg"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("", "")
