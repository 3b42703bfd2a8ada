"""Least privilege: which role may do what, by the catalog and by trying, and that no search path is trusted."""

import json
from collections.abc import Iterator

import pytest

from tests.kit import sql
from tests.kit.events import put_sink
from tests.kit.sql import Connection

PRODUCER = {"send", "send_many", "version"}
WORKER = PRODUCER | {
    "ack", "advance_replays", "channel", "claim", "clock", "extend", "fail", "handled_keys", "idle",
    "lease_length", "leave_duty", "leave_worker", "mark_handled", "open_breaker", "outlook", "prune", "reap", "regroup",
    "reject", "release", "report_worker", "give_back", "server_started_at", "server_trouble",
    "start", "take_duty", "tally", "turn", "watch",
}  # fmt: skip
READER = {
    "audit_anchor", "clock", "count_letters", "depth_elsewhere", "drift", "expiring", "fates", "find_letters",
    "find_token", "group_pulse", "last_message_id", "note", "on_duty", "oldest_waiting", "queue_stats",
    "replay_change", "segments", "shared_values", "sink_facts", "unsettled", "verify_audit", "version", "worker_leases",
}  # fmt: skip
MANAGEMENT = {
    "acknowledge_group", "add_token", "approve_replay", "cancel_replay", "close_breaker", "close_session",
    "configure_queue", "create_queue", "discard", "drain_worker", "drop_preview", "drop_queue", "emit_again", "emitted",
    "erase_key", "exclude_items", "find_password", "force_breaker", "hold", "keep_answer", "letter_ids", "merge_groups",
    "mute_group", "open_session", "pause_queue", "pause_replay", "pause_sink", "plan_replay", "put_sink", "remove_rule",
    "remove_sink", "reopen_group", "replay", "resolve_group", "restore", "resume_queue", "resume_replay", "resume_sink",
    "revoke_token", "split_group", "start_replay", "take_answer",
}  # fmt: skip
RELAY = WORKER - {"send", "send_many"} | {"cloud_events", "emitted", "refuse_events", "report_sink", "sink_settings"}
FUNCTIONS = {
    "bartleby_producer": PRODUCER,
    "bartleby_worker": WORKER,
    "bartleby_reader": READER,
    "bartleby_operator": WORKER | READER | MANAGEMENT,
    "bartleby_relay": RELAY,
}
VIEWS = {
    "attempts", "audit_log", "dead_letters", "events", "group_rules", "group_heads", "groups", "messages", "queues",
    "replay_items", "replays", "sinks", "workers",
}  # fmt: skip
RELATIONS = {"bartleby_reader": VIEWS, "bartleby_operator": VIEWS | {"tokens"}}


@pytest.mark.seed("pgmq-55")
def test_each_role_has_exactly_its_rights(conn: Connection) -> None:
    sql.create(conn)
    ours = "namespace = 'bartleby'::regnamespace"
    functions = (
        f"select distinct proname::text from pg_proc where pro{ours} and has_function_privilege(%s, oid, 'execute')"
    )
    tables = f"select relname::text from pg_class where rel{ours} and relkind in ('r', 'p', 'v')"
    sequences = f"select relname::text from pg_class where rel{ours} and case when relkind = 'S' then"
    for role in sql.ROLES:
        assert set(sql.column(conn, functions, role)) == FUNCTIONS[role], role
        readable = sql.column(conn, tables + " and has_any_column_privilege(%s, oid, 'select')", role)
        assert set(readable) == RELATIONS.get(role, set()), role
        for writes in (
            "has_table_privilege(%s, oid, 'insert, update, delete, truncate, references, trigger')",
            "has_any_column_privilege(%s, oid, 'insert, update, references')",
        ):
            assert sql.column(conn, f"{tables} and {writes}", role) == [], role
        uses = " has_sequence_privilege(%s, oid, 'usage, select, update') end"
        assert sql.column(conn, sequences + uses, role) == [], role
        assert sql.value(conn, "select has_schema_privilege(%s, 'bartleby', 'usage')", role), role
        assert not sql.value(conn, "select has_schema_privilege(%s, 'bartleby', 'create')", role), role
        powers = "rolcanlogin or rolsuper or rolcreaterole or rolcreatedb or rolbypassrls or rolreplication"
        assert sql.value(conn, f"select {powers} from pg_roles where rolname = %s", role) is False, role
        memberships = "select roleid::regrole::text from pg_auth_members where member = %s::regrole"
        assert sql.column(conn, memberships, role) == [], role


def work(conn: Connection) -> None:
    claimed = sql.claim(conn, 4)
    first, second, third, fourth = claimed.positions
    conn.execute("select bartleby.start(%s), bartleby.extend(%s, '1 minute')", [claimed.lease, [claimed.lease]])
    sql.ack(conn, claimed.lease, [first])
    sql.release(conn, claimed.lease, [second])
    sql.reject(conn, claimed.lease, third, "delivery_error")
    sql.fail(conn, claimed.lease, {"position": fourth})
    sql.reap(conn)


def relay(conn: Connection) -> None:
    assert sql.column(conn, "select options ->> 'password' from bartleby.sink_settings()") == ["secret"]
    conn.execute("select bartleby.cloud_events('bus', '[{\"event\": 1}]'), bartleby.report_sink('bus', 1, 1, 'x')")


def read(conn: Connection) -> None:
    for view in VIEWS:
        conn.execute(f"select * from bartleby.{view}".encode())


@pytest.mark.seed("brighter-36", "brighter-39")
def test_each_role_works_through_functions_and_views_alone(conn: Connection) -> None:
    """A worker can reject without any right in the queue that the copy goes to."""
    sql.create(conn, "dead")
    sql.create(conn, dead_letter_to="dead")
    put_sink(conn, options={"password": "secret"})
    for role, act in (
        ("producer", lambda conn: sql.send_count(conn, 4)),
        *(("worker", work), ("relay", relay), ("reader", read), ("operator", read)),
    ):
        conn.execute(f"set role bartleby_{role}".encode())
        act(conn)
        conn.execute("reset role")
    assert sql.claim(conn, 9, "dead").payloads == [3]


@pytest.fixture
def attacker(conn: Connection) -> Iterator[Connection]:
    """A session of a user with every role and a schema of their own, first in the search path."""
    sql.create(conn)
    sql.send_count(conn, 3)
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


@pytest.mark.own_database
def test_hostile_tables_functions_and_operators_change_nothing(attacker: Connection) -> None:
    ours = "select relname::text from pg_class where relnamespace = 'bartleby'::regnamespace and relkind in ('r', 'p')"
    for table in (*sql.column(attacker, ours), "added", "removed", "before", "after"):
        attacker.execute(f"create temp table {table} as select 1 as id, 'q'::text as name".encode())
    attacker.execute("create table hostile.caught (who text)")
    attacker.execute("grant insert, select on hostile.caught to public")
    attacker.execute("grant usage on schema hostile to public")
    trap = "language plpgsql as $$ begin insert into hostile.caught values (current_user); return {}; end $$"
    for left, name, right, result in (
        ("text", "=", "text", "boolean"),
        ("integer", "=", "integer", "boolean"),
        ("bigint", ">", "bigint", "boolean"),
        ("timestamptz", "<", "timestamptz", "boolean"),
        ("timestamptz", "+", "interval", "timestamptz"),
    ):
        function = f"hostile.trap_{left}_{right}"
        for statement in (
            f"create or replace function {function}(a {left}, b {right}) returns {result} {trap.format('null')}",
            f"create operator hostile.{name} (leftarg = {left}, rightarg = {right}, function = {function})",
        ):
            attacker.execute(statement.encode())
    for function in ("nextval(regclass)", "pg_advisory_xact_lock(bigint)", "jsonb_typeof(jsonb)", "random()"):
        attacker.execute(f"create function hostile.{function} returns bigint {trap.format('1')}".encode())
    attacker.execute("select 1 = 1")
    assert sql.column(attacker, "select who from hostile.caught") == ["attacker"], "the traps work"
    attacker.execute("delete from hostile.caught")
    walk(attacker)
    attacker.execute("set search_path = pg_catalog")
    assert sql.column(attacker, "select who from hostile.caught") == []


def walk(conn: Connection) -> None:
    """Some of everything; tests/sql/test_catalog.py shows that every function has a search path of its own."""
    assert sql.send(conn, 4) > 0
    claimed = sql.claim(conn, 2)
    assert claimed.payloads == [1, 2]
    assert sql.ack(conn, claimed.lease, claimed.positions[:1]) == 1
    assert sql.rows(conn, "select ready, leased from bartleby.queues") == [{"ready": 2, "leased": 1}]
    failures = json.dumps([{"position": claimed.positions[1], "verdict": "dead"}])
    conn.execute("select bartleby.put_sink('bus', 'log', '{}', 'me', 'because')")
    conn.execute("select bartleby.fail(%s, %s)", [claimed.lease, failures])
    assert sql.column(conn, "select waiting from bartleby.sinks") == [2]
    plan = sql.value(conn, "select bartleby.plan_replay('queue:q', 'me', 'again')")
    conn.execute("select bartleby.start_replay(%s, 'me', 'again')", [plan])
    assert sql.column(conn, "select status from bartleby.advance_replays()") == ["settling"]
    assert (sql.value(conn, "select bartleby.tally()") > 0, sql.reap(conn)) == (True, [])
    assert set(sql.column(conn, "select rows from bartleby.prune()")) == {0}
    added = "select bartleby.add_token('token', 'ci', repeat('a', 64), 'reader', '{q}', null, 'me', 'because')"
    assert sql.value(conn, added) == sql.value(conn, "select id from bartleby.find_token(repeat('a', 64))")
    assert sql.column(conn, "select problem from bartleby.verify_audit()") == []
