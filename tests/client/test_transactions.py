"""Sending in a caller's transaction: one suite for every library it may be in."""

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

from bartleby import (
    Client,
    Failure,
    InvalidArgument,
    InvalidMessage,
    Message,
    NotInstalled,
    PayloadTooLarge,
    UnknownQueue,
    calls,
    dev,
    grouping,
    operating,
    plans,
    transactions,
    triage,
)
from bartleby.app import Bartleby
from tests.kit.callers import CALLERS, Begin, Caller, asyncpg_connection, session, use_django, with_driver
from tests.kit.database import database_dsn

Conn = psycopg.Connection[tuple[Any, ...]]

PAYLOADS = [
    None, True, 2**53 + 1, -(2**80), 0.1, "Straße ☃ \U0001f600", "%s %(x)s %% {} $1 :p1 ::jsonb", "'; drop schema --",
    [], {"a": {"": [1.5, "x", None]}}, ["x" * 100_000],
]  # fmt: skip


@pytest.fixture
def app(dsn: str) -> Iterator[Bartleby]:
    app = Bartleby(dsn)
    app.client.create_queue("orders", {"payload_limit": 200_000})
    yield app
    app.client.close()


@pytest.fixture(params=list(CALLERS.values()), ids=list(CALLERS))
def begin(request: pytest.FixtureRequest) -> Begin:
    chosen: Begin = request.param
    return chosen


@pytest.fixture
def caller(begin: Begin, dsn: str, app: Bartleby) -> Iterator[Caller]:
    with begin(dsn) as opened:
        yield opened


def received(app: Bartleby) -> list[Message]:
    lease = app.client.claim("orders", "tester", limit=100)
    return [] if lease is None else list(lease)


def test_what_is_sent_is_there_after_the_commit(app: Bartleby, caller: Caller) -> None:
    sent = caller.send(app, "orders", {"id": 42})
    caller.execute("create table effect as select 1 as n")
    assert received(app) == []
    caller.commit()
    [message] = received(app)
    assert (message.id, message.payload) == (sent, {"id": 42})


def test_what_is_rolled_back_was_never_sent(app: Bartleby, caller: Caller, conn: Conn) -> None:
    caller.execute("create table effect as select 1 as n")
    caller.send(app, "orders", {"id": 42})
    caller.send_many(app, "orders", [{"payload": 1}, {"payload": 2}])
    caller.rollback()
    assert received(app) == []
    assert conn.execute("select to_regclass('public.effect')").fetchall() == [(None,)]


def test_payloads_arrive_as_they_were_sent(app: Bartleby, caller: Caller) -> None:
    ids = [caller.send(app, "orders", payload) for payload in PAYLOADS]
    ids += caller.send_many(app, "orders", [{"payload": payload} for payload in PAYLOADS])
    caller.commit()
    assert [(message.id, message.payload) for message in received(app)] == list(zip(ids, PAYLOADS * 2, strict=True))


def test_everything_that_send_knows_is_known_here(app: Bartleby, caller: Caller, conn: Conn) -> None:
    known: dict[str, Any] = {"headers": {"tenant": "acme"}, "key": "order-1", "max_attempts": 7, "generation": 3}
    first = caller.send(app, "orders", 1, **known, unique_for=timedelta(hours=1))
    again = caller.send(app, "orders", 1, **known, unique_for=3600)
    later = caller.send(app, "orders", 2, delay=timedelta(minutes=5))
    caller.send_many(app, "orders", [{"payload": 3, "delay": 0.0, "max_attempts": 2}])
    caller.commit()
    assert again == first
    [message, other] = received(app)
    assert (message.headers, message.key, message.generation) == ({"tenant": "acme"}, "order-1", 3)
    assert other.payload == 3
    due = conn.execute("select run_at from bartleby.messages where message_id = %s", [later]).fetchall()[0][0]
    assert timedelta(minutes=4) < due - datetime.now(UTC) < timedelta(minutes=6)


def test_the_generation_of_the_application_is_stamped(app: Bartleby, caller: Caller) -> None:
    app.generation = 5
    caller.send(app, "orders", "plain")
    caller.send(app, "orders", "own", generation=2)
    caller.send_many(app, "orders", [{"payload": "bulk"}, {"payload": "own bulk", "generation": 2}])
    using = app.using(caller.connection)
    sent = using.send("orders", "using") if caller.wait is None else caller.wait(using.asend("orders", "using"))
    caller.commit()
    messages = received(app)
    assert [message.generation for message in messages] == [5, 2, 5, 2, 5]
    assert messages[-1].id == sent


@pytest.mark.parametrize(
    ("kind", "arguments", "more"),
    [
        (UnknownQueue, ("nowhere", 1), {}),
        (PayloadTooLarge, ("orders", "x" * 300_000), {}),
        (InvalidArgument, ("orders", 1), {"max_attempts": "many"}),
        (InvalidArgument, ("orders", 1), {"max_attempts": 2**40}),
    ],
)
def test_errors_of_the_core_are_our_own(
    app: Bartleby, caller: Caller, kind: type[Exception], arguments: Any, more: Any
) -> None:
    with pytest.raises(kind) as caught:
        caller.send(app, *arguments, **more)
    assert caught.value.__cause__ is not None, "the error of the library is kept"


def test_an_error_says_what_helps_in_the_words_of_the_database(app: Bartleby, caller: Caller) -> None:
    with pytest.raises(UnknownQueue) as there:
        app.send("nowhere", 1)
    with pytest.raises(UnknownQueue) as here:
        caller.send(app, "nowhere", 1)
    assert (str(here.value), here.value.hint) == (str(there.value), there.value.hint)


def test_the_bad_one_of_a_bulk_is_named(app: Bartleby, caller: Caller) -> None:
    app.generation = 1
    with pytest.raises(InvalidMessage) as caught:
        caller.send_many(app, "orders", [{"payload": 1}, {"payload": 2, "keys": "x"}])
    assert caught.value.index == 1
    caller.rollback()
    with pytest.raises(InvalidMessage):
        caller.send_many(app, "orders", [7])


def test_a_database_without_the_schema_is_named_so(server: dev.Server, begin: Begin) -> None:
    with begin(database_dsn(server, "postgres")) as caller:
        app = Bartleby(database_dsn(server, "postgres"))
        with pytest.raises(NotInstalled, match="no schema of Bartleby") as caught:
            caller.send(app, "orders", 1)
        assert caught.value.hint == "run: bartleby install"


def test_the_other_kind_of_connection_is_refused_with_its_remedy(app: Bartleby, caller: Caller) -> None:
    if caller.wait is None:
        with pytest.raises(InvalidArgument, match="hold up the event loop") as caught, asyncio.Runner() as loop:
            loop.run(app.asend("orders", 1, connection=caller.connection))
        assert "without the a" in (caught.value.hint or "")
    else:
        with pytest.raises(InvalidArgument, match="is awaited") as caught:
            app.send("orders", 1, connection=caller.connection)
        assert "asend" in (caught.value.hint or "")


@pytest.mark.parametrize("thing", [object(), "postgresql://localhost/", 7, sqlalchemy.create_engine("sqlite://")])
async def test_what_is_no_connection_is_refused(app: Bartleby, thing: Any) -> None:
    with pytest.raises(InvalidArgument, match="no connection that is known") as caught:
        app.send("orders", 1, connection=thing)
    assert "psycopg2" in (caught.value.hint or "")
    with pytest.raises(InvalidArgument, match="no connection that is known"):
        app.using(thing).send("orders", 1)
    with pytest.raises(InvalidArgument, match="no connection that is known"):
        await app.asend("orders", 1, connection=thing)


def test_a_connection_to_another_kind_of_database_is_refused(app: Bartleby) -> None:
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


def test_rows_of_another_shape_do_not_matter(app: Bartleby, dsn: str) -> None:
    with psycopg.connect(dsn, row_factory=dict_row) as connection:
        app.send("orders", 1, connection=connection)
    other = psycopg2.connect(dsn, cursor_factory=psycopg2.extras.RealDictCursor)
    with other:
        app.send("orders", 2, connection=other)
    other.close()
    assert [message.payload for message in received(app)] == [1, 2]


async def test_encoders_for_json_do_not_matter(app: Bartleby, dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.set_type_codec("jsonb", schema="pg_catalog", encoder=json.dumps, decoder=json.loads)
    await app.asend("orders", {"id": 1}, connection=connection, headers={"a": 1})
    await app.using(connection).asend_many("orders", [{"payload": "text"}])
    await connection.close()
    assert [message.payload for message in received(app)] == [{"id": 1}, "text"]


async def test_a_plain_session_inside_run_sync_uses_the_awaited_driver(app: Bartleby, dsn: str) -> None:
    engine = alchemy.create_async_engine(with_driver(dsn, "asyncpg"), poolclass=NullPool)
    async with alchemy.AsyncSession(engine) as session:
        await session.run_sync(lambda plain: app.send("orders", 1, connection=plain))
        await session.commit()
    await engine.dispose()
    assert [message.payload for message in received(app)] == [1]


def test_subclasses_are_recognised(app: Bartleby, dsn: str) -> None:
    class Own(psycopg.Connection[Any]):
        pass

    with Own.connect(dsn) as connection:
        app.send("orders", 1, connection=connection)
    assert [message.payload for message in received(app)] == [1]


def test_a_connection_without_a_transaction_sends_at_once(app: Bartleby, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        app.send("orders", 1, connection=connection)
        assert [message.payload for message in received(app)] == [1]


@pytest.mark.parametrize("driver", ["psycopg2", "asyncpg", "SQLAlchemy"])
def test_every_call_can_be_run_by_every_driver(app: Bartleby, dsn: str, driver: str) -> None:
    client = app.client
    for _ in range(4):
        client.send("orders", 1)
    lease = client.claim("orders", "tester", limit=4)
    assert lease is not None
    positions = [message.position for message in lease]
    failure = Failure(positions[1], "KeyError", "'x'", verdict="dead")
    letter = lease.messages[1].id
    every: list[calls.Call[Any]] = [
        calls.claim("orders", "tester", limit=2, lease=30),
        calls.extend([lease.id], timedelta(seconds=5)),
        calls.ack(lease.id, [positions[0]]),
        calls.fail(lease.id, [failure]),
        calls.reject(lease.id, positions[2], "unacceptable", None),
        calls.release(lease.id, None, delay=1),
        calls.idle("orders", 0.1),
        calls.channel("orders"),
        calls.lease_length("orders"),
        calls.outlook("orders"),
        calls.open_breaker("orders", "a test", 60),
        calls.mark_handled("orders", "orders", "id:1"),
        calls.handled_keys("orders", ["id:1", "id:2"]),
        calls.take_duty("sweep", "me", 5.0),
        calls.leave_duty("sweep", "me"),
        calls.prune(10),
        calls.reap(),
        operating.attempts(letter),
        triage.dead_letter(letter),
        operating.find_message(letter),
        triage.dead_letters("queue:orders", limit=5),
        triage.dead_letters(),
        triage.count_letters("queue:orders"),
        triage.letter_ids("queue:orders", most=5),
        triage.fates([letter]),
        triage.hold([letter], actor="me", reason="a test"),
        triage.hold([letter], actor="me", reason="a test", on=False, request_id="r1"),
        triage.discard([letter], actor="me", reason="a test"),
        triage.restore([letter], actor="me", reason="a test"),
        triage.erase_key("nobody's", actor="me", reason="a test"),
        grouping.groups(),
        grouping.groups("orders", states=["open"]),
        grouping.group(1),
        grouping.group_rules(),
        grouping.shared_values(1),
        grouping.tally(),
        grouping.regroup(),
        plans.plan_replay(
            ids=[letter], actor="me", reason="a test", rate=5, patch=[{"op": "test", "path": "", "value": 1}]
        ),
        plans.plan_replay("queue:orders", actor="me", reason="a test"),
        plans.replays(),
        plans.replays(statuses=["draft"]),
        plans.find_replay(1),
        plans.replay_items(1, states=["waiting"], predictions=["run"]),
        plans.replay_change(1, letter),
        plans.replay_changes(1, [letter]),
        plans.advance_replays(),
        triage.replay([letter], actor="me", reason="a test"),
        operating.configure_queue("orders", {"max_attempts": 3}),
        operating.queues(),
        operating.pause_queue("orders", actor="me", reason="a test", request_id="r2"),
        operating.resume_queue("orders"),
        operating.force_breaker("orders", actor="me", reason="a test"),
        operating.audit_log(actor="me", limit=5),
        operating.verify_audit(),
        operating.audit_anchor(),
        operating.drop_queue("orders", force=True),
    ]
    begin = {"SQLAlchemy": lambda: session(dsn), "asyncpg": lambda: asyncpg_connection(dsn)}
    with begin.get(driver, lambda: CALLERS["psycopg2"](dsn))() as caller:
        for call in every:
            if caller.wait is None:
                transactions.run(caller.connection, call)
            else:
                caller.wait(transactions.arun(caller.connection, call))
        caller.rollback()
    with psycopg.connect(dsn) as connection:
        for call in every:
            Client.using(client, connection).run(call)


def test_no_library_is_imported_for_its_sake() -> None:
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
