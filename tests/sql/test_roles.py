"""Who may do what: a golden matrix of every role and every object, and real attempts under each role."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest

from tests.sql.support import (
    ROLES,
    Connect,
    Connection,
    ack,
    claim,
    column,
    create,
    fail_all,
    reap,
    reject,
    release,
    rows,
    send,
    send_count,
    value,
)

PRODUCER = {"send", "send_many", "version"}
WORKER = PRODUCER | {
    "ack",
    "channel",
    "claim",
    "clock",
    "extend",
    "fail",
    "handled_keys",
    "idle",
    "lease_length",
    "leave_duty",
    "mark_handled",
    "open_breaker",
    "outlook",
    "prune",
    "reap",
    "reject",
    "release",
    "start",
    "take_duty",
    "turn",
}
READER = {"drift", "last_message_id", "queue_stats", "segments", "unsettled", "version"}
MANAGEMENT = {
    "close_breaker",
    "configure_queue",
    "create_queue",
    "drop_queue",
    "force_breaker",
    "pause_queue",
    "replay",
    "resume_queue",
}
FUNCTIONS = {
    "bartleby_producer": PRODUCER,
    "bartleby_worker": WORKER,
    "bartleby_reader": READER,
    "bartleby_operator": WORKER | READER | MANAGEMENT,
}
VIEWS = {"attempts", "dead_letters", "events", "groups", "messages", "queues"}
RELATIONS = {
    "bartleby_producer": set[str](),
    "bartleby_worker": set[str](),
    "bartleby_reader": VIEWS,
    "bartleby_operator": VIEWS,
}


def work(conn: Connection) -> None:
    claimed = claim(conn, 4)
    first, second, third, fourth = claimed.positions
    conn.execute("select bartleby.start(%s), bartleby.extend(%s, '1 minute')", [claimed.lease, [claimed.lease]])
    ack(conn, claimed.lease, [first])
    release(conn, claimed.lease, [second])
    reject(conn, claimed.lease, third, "unacceptable")
    conn.execute(
        "select bartleby.fail(%s, jsonb_build_array(jsonb_build_object('position', %s::bigint)))",
        [claimed.lease, fourth],
    )
    conn.execute("select bartleby.idle('q'), bartleby.channel('q')")


Deed = Callable[[Connection], object]
DEEDS: dict[str, Deed] = {
    "send": lambda conn: send(conn, 1),
    "send many": lambda conn: send_count(conn, 2),
    "claim": claim,
    "work": work,
    "reap": reap,
    "turn": lambda conn: value(conn, "select bartleby.turn()"),
    "prune": lambda conn: rows(conn, "select * from bartleby.prune()"),
    "take a duty": lambda conn: value(conn, "select bartleby.take_duty('upkeep', 'me', '1 minute')"),
    "leave a duty": lambda conn: conn.execute("select bartleby.leave_duty('upkeep', 'me')"),
    "ask how long a lease is": lambda conn: value(conn, "select bartleby.lease_length('q')"),
    "ask for the outlook": lambda conn: rows(conn, "select * from bartleby.outlook('q')"),
    "mark as handled": lambda conn: value(conn, "select bartleby.mark_handled('q', 'c', 'id:1')"),
    "ask what is handled": lambda conn: column(conn, "select bartleby.handled_keys('c', '{id:1}')"),
    "open the breaker": lambda conn: value(conn, "select bartleby.open_breaker('q', 'storm', '0')"),
    "force the breaker": lambda conn: value(conn, "select bartleby.force_breaker('q', 'me', 'because')"),
    "close the breaker": lambda conn: value(conn, "select bartleby.close_breaker('q', 'me', 'because')"),
    "create a queue": lambda conn: create(conn, "other"),
    "change a policy": lambda conn: create(conn, "q", max_attempts=3),
    "pause": lambda conn: conn.execute("select bartleby.pause_queue('q')"),
    "drop a queue": lambda conn: conn.execute("select bartleby.drop_queue('q', true)"),
    "replay": lambda conn: conn.execute("select bartleby.replay('{1}', 'me', 'because')"),
    "look at queues": lambda conn: rows(conn, "select * from bartleby.queues"),
    "look at messages": lambda conn: rows(conn, "select * from bartleby.messages"),
    "look at dead letters": lambda conn: rows(conn, "select * from bartleby.dead_letters"),
    "look at groups": lambda conn: rows(conn, "select * from bartleby.groups"),
    "look at events": lambda conn: rows(conn, "select * from bartleby.events"),
    "look at attempts": lambda conn: rows(conn, "select * from bartleby.attempts"),
    "look at the last id": lambda conn: value(conn, "select bartleby.last_message_id()"),
    "ask for drift": lambda conn: rows(conn, "select * from bartleby.drift()"),
    "ask for the version": lambda conn: value(conn, "select bartleby.version()"),
    "read the log": lambda conn: rows(conn, "select * from bartleby.log"),
    "write the log": lambda conn: conn.execute("delete from bartleby.log"),
    "read letters directly": lambda conn: rows(conn, "select * from bartleby.dead_letter"),
    "write letters directly": lambda conn: conn.execute("update bartleby.dead_letter set status = 'dead'"),
    "write a policy directly": lambda conn: conn.execute("update bartleby.queue set paused = true"),
    "forge an event": lambda conn: conn.execute("select bartleby.emit('t', 'q', '{}')"),
    "write events directly": lambda conn: conn.execute("delete from bartleby.event"),
    "forget directly what is handled": lambda conn: conn.execute("delete from bartleby.handled"),
    "close the breaker directly": lambda conn: conn.execute("update bartleby.breaker set next_probe_at = null"),
    "take a duty away": lambda conn: conn.execute("delete from bartleby.duty"),
    "forge a dead letter": lambda conn: conn.execute("select bartleby.decide(l, 'failed', '[]') from bartleby.lease l"),
    "draw a position": lambda conn: conn.execute("select nextval('bartleby.positions_1')"),
    "say that workers sleep": lambda conn: conn.execute("select setval('bartleby.idle_1', 1)"),
    "create in the schema": lambda conn: conn.execute("create table bartleby.mine ()"),
    "replace a function": lambda conn: conn.execute(
        "create or replace function bartleby.version() returns text language sql as $$ select 'mine' $$"
    ),
}
SEND = {"send", "send many", "ask for the version"}
WORK = SEND | {
    "mark as handled",
    "claim", "work", "reap", "turn", "prune", "take a duty", "leave a duty", "ask how long a lease is",
    "ask for the outlook", "ask what is handled", "open the breaker",
}  # fmt: skip
LOOK = {deed for deed in DEEDS if deed.startswith("look at")} | {"ask for drift", "ask for the version"}
MANAGE = {
    "create a queue", "change a policy", "pause", "drop a queue", "replay", "force the breaker", "close the breaker",
}  # fmt: skip
MAY = {
    "bartleby_producer": SEND,
    "bartleby_worker": WORK,
    "bartleby_reader": LOOK,
    "bartleby_operator": WORK | LOOK | MANAGE,
    "stranger": set[str](),
}


@contextmanager
def acting_as(conn: Connection, role: str) -> Iterator[None]:
    conn.execute(f"set role {role}".encode())
    try:
        yield
    finally:
        conn.execute("reset role")


@pytest.mark.parametrize("role", ROLES)
def test_each_role_may_execute_exactly_its_functions(conn: Connection, role: str) -> None:
    allowed = column(
        conn,
        "select distinct proname::text from pg_proc where pronamespace = 'bartleby'::regnamespace"
        " and has_function_privilege(%s, oid, 'execute')",
        role,
    )
    assert set(allowed) == FUNCTIONS[role]


@pytest.mark.parametrize("role", ROLES)
def test_each_role_may_read_exactly_its_views_and_write_nothing(conn: Connection, role: str) -> None:
    create(conn)
    query = (
        "select relname::text from pg_class where relnamespace = 'bartleby'::regnamespace"
        " and relkind in ('r', 'p', 'v') and has_table_privilege(%s, oid, %s)"
    )
    assert set(column(conn, query, role, "select")) == RELATIONS[role]
    assert column(conn, query, role, "insert, update, delete, truncate, references, trigger") == []
    assert (
        column(
            conn,
            "select relname::text from pg_class where relnamespace = 'bartleby'::regnamespace and case"
            " when relkind = 'S' then has_sequence_privilege(%s, oid, 'usage, select, update') end",
            role,
        )
        == []
    )


@pytest.mark.parametrize("role", ROLES)
def test_no_role_may_log_in_create_or_become_another(conn: Connection, role: str) -> None:
    assert value(conn, "select has_schema_privilege(%s, 'bartleby', 'usage')", role)
    assert not value(conn, "select has_schema_privilege(%s, 'bartleby', 'create')", role)
    assert (
        value(
            conn,
            "select rolcanlogin or rolsuper or rolcreaterole or rolcreatedb or rolbypassrls or rolreplication"
            " from pg_roles where rolname = %s",
            role,
        )
        is False
    )
    assert column(conn, "select roleid::regrole::text from pg_auth_members where member = %s::regrole", role) == []


@pytest.mark.parametrize("deed", DEEDS)
def test_each_role_can_do_what_it_may_and_nothing_else(conn: Connection, deed: str) -> None:
    """One test for each deed: everyone tries, and what was done is undone."""
    create(conn)
    send_count(conn, 5)
    fail_all(conn, claim(conn), verdict="dead")
    conn.execute("drop role if exists stranger")
    conn.execute("create role stranger")
    try:
        assert {who for who in MAY if tries(conn, who, DEEDS[deed])} == {
            who for who, deeds in MAY.items() if deed in deeds
        }
    finally:
        conn.execute("drop role stranger")


def tries(conn: Connection, who: str, deed: Deed) -> bool:
    try:
        with conn.transaction(force_rollback=True):
            conn.execute(f"set local role {who}".encode())
            deed(conn)
    except psycopg.errors.InsufficientPrivilege:
        return False
    return True


def test_a_reader_sees_what_is_there(conn: Connection) -> None:
    create(conn)
    send_count(conn, 3)
    send(conn, 4, delay="1 hour")
    fail_all(conn, claim(conn), verdict="dead", error_type="KeyError")
    claim(conn)
    with acting_as(conn, "bartleby_reader"):
        states = column(conn, "select state from bartleby.messages order by message_id")
        assert states == ["leased", "ready", "deferred"]
        assert column(conn, "select error_type from bartleby.dead_letters") == ["KeyError"]
        assert column(conn, "select verdict from bartleby.attempts") == ["dead"]
        assert rows(conn, "select ready, leased, deferred, dead from bartleby.queues") == [
            {"ready": 1, "leased": 1, "deferred": 1, "dead": 1}
        ]


def test_queues_that_an_operator_creates_work_for_the_other_roles(conn: Connection) -> None:
    with acting_as(conn, "bartleby_operator"):
        create(conn)
    with acting_as(conn, "bartleby_producer"):
        send(conn, 1)
    with acting_as(conn, "bartleby_worker"):
        assert claim(conn).payloads == [1]
    with acting_as(conn, "bartleby_operator"):
        conn.execute("select bartleby.drop_queue('q', true)")
    assert column(conn, "select name from bartleby.queue") == []


@pytest.fixture
def attacker(connect: Connect) -> Iterator[Connection]:
    """A session of somebody with every role and a schema of their own, first in the search path."""
    conn = connect()
    create(conn)
    send_count(conn, 3)
    conn.execute("drop role if exists attacker")
    conn.execute("create role attacker")
    conn.execute("grant bartleby_operator to attacker")
    conn.execute("create schema hostile authorization attacker")
    conn.execute("set role attacker")
    conn.execute("set search_path = pg_temp, hostile, public, pg_catalog")
    yield conn
    conn.execute("reset role")
    conn.execute("drop owned by attacker cascade")
    conn.execute("drop role attacker")


def test_temporary_tables_with_our_names_change_nothing(attacker: Connection) -> None:
    for table in ("queue", "log", "lease", "deferred", "dead_letter", "attempt", "segment", "unique_key", "sweep",
        "breaker", "handled", "duty", "event"):  # fmt: skip
        attacker.execute(f"create temp table {table} as select 1 as id, 'q'::text as name".encode())
    everything_works(attacker)


def test_functions_and_operators_with_builtin_names_change_nothing(attacker: Connection) -> None:
    attacker.execute("create table hostile.caught (who text)")
    attacker.execute("grant insert, select on hostile.caught to public")
    attacker.execute("grant usage on schema hostile to public")
    for left, name, right, result in (
        ("text", "=", "text", "boolean"),
        ("integer", "=", "integer", "boolean"),
        ("bigint", ">", "bigint", "boolean"),
        ("timestamptz", "<", "timestamptz", "boolean"),
        ("timestamptz", "+", "interval", "timestamptz"),
    ):
        function = f"hostile.trap_{left}_{right}"
        attacker.execute(
            f"create or replace function {function}(a {left}, b {right}) returns {result} language plpgsql as"
            f" $$ begin insert into hostile.caught values (current_user); return null; end $$".encode()
        )
        attacker.execute(
            f"create operator hostile.{name} (leftarg = {left}, rightarg = {right}, function = {function})".encode()
        )
    for function in ("nextval(regclass)", "pg_advisory_xact_lock(bigint)", "jsonb_typeof(jsonb)", "random()"):
        attacker.execute(
            f"create function hostile.{function} returns bigint language plpgsql as"
            " $$ begin insert into hostile.caught values (current_user); return 1; end $$".encode()
        )
    everything_works(attacker)
    attacker.execute("set search_path = pg_catalog")
    assert column(attacker, "select who from hostile.caught") == []


def everything_works(conn: Connection) -> None:
    assert send(conn, 4) > 0
    claimed = claim(conn, 2)
    assert claimed.payloads == [1, 2]
    assert ack(conn, claimed.lease, claimed.positions[:1]) == 1
    assert (
        len(
            rows(
                conn,
                "select * from bartleby.fail(%s, jsonb_build_array(jsonb_build_object("
                "'position', %s::bigint, 'verdict', 'dead')))",
                claimed.lease,
                claimed.positions[1],
            )
        )
        == 1
    )
    assert column(conn, "select bartleby.replay(%s, 'me', 'again')", [claimed.ids[1]]) == [claimed.ids[1]]
    assert rows(conn, "select ready, leased from bartleby.queues") == [{"ready": 3, "leased": 0}]
    assert reap(conn) == []
    assert value(conn, "select bartleby.turn()") == "nothing to do"
    assert value(conn, "select bartleby.mark_handled('q', 'c', 'id:1')")
    assert column(conn, "select bartleby.handled_keys('c', '{id:1,id:2}')") == ["id:1"]
    assert value(conn, "select bartleby.take_duty('upkeep', 'me', '1 minute')")
    assert not value(conn, "select bartleby.take_duty('upkeep', 'you', '1 minute')")
    assert column(conn, "select rows from bartleby.prune()") == [0, 0]
    assert value(conn, "select bartleby.open_breaker('q', 'storm', '0')")
    assert claim(conn).messages == []
    assert value(conn, "select bartleby.close_breaker('q', 'me', 'enough')")
    assert column(conn, "select type from bartleby.events order by id") == [
        "io.bartleby.breaker.opened",
        "io.bartleby.breaker.closed",
    ]
    create(conn, "other", dead_letter_to="q")
    conn.execute("select bartleby.drop_queue('other')")
