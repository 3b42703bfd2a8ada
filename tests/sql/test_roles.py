"""Least privilege: which role may do what, by the catalog and by trying, and that no search path is trusted."""

import json
from collections.abc import Callable, Iterator

import psycopg
import pytest

from tests.kit import sql
from tests.kit.events import put_sink
from tests.kit.sql import Claim, Connection

PRODUCER = {"send", "send_many", "version"}
WORKER = PRODUCER | {
    "ack", "advance_replays", "channel", "claim", "clock", "enter_spooled", "extend", "fail", "handled_keys", "idle",
    "lease_length", "leave_duty", "leave_worker", "mark_handled", "open_breaker", "outlook", "prune", "reap", "regroup",
    "reject", "release", "report_worker", "spool_identity", "start", "take_duty", "tally", "turn", "watch",
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


def work(conn: Connection) -> None:
    claimed = sql.claim(conn, 4)
    first, second, third, fourth = claimed.positions
    conn.execute("select bartleby.start(%s), bartleby.extend(%s, '1 minute')", [claimed.lease, [claimed.lease]])
    sql.ack(conn, claimed.lease, [first])
    sql.release(conn, claimed.lease, [second])
    sql.reject(conn, claimed.lease, third, "unacceptable")
    conn.execute("select bartleby.fail(%s, %s)", [claimed.lease, json.dumps([{"position": fourth}])])
    conn.execute("select bartleby.idle('q'), bartleby.channel('q')")


def run_plan(conn: Connection) -> None:
    plan = sql.value(conn, "select bartleby.plan_replay(null, 'me', 'because', p_ids => '{1,2}')")
    conn.execute("select bartleby.exclude_items(%s, '[{\"message_id\": 2}]', 'me', 'because')", [plan])
    seal = sql.value(conn, "select hash from bartleby.replays where id = %s", plan)
    conn.execute("select bartleby.approve_replay(%s, %s, 'you', 'because')", [plan, seal])
    for verb in ("start", "pause", "resume", "cancel"):
        conn.execute(f"select bartleby.{verb}_replay(%s, 'me', 'because')".encode(), [plan])


def split_and_merge(conn: Connection) -> None:
    split = sql.value(conn, "select bartleby.split_group(1, 'payload.a', '1', 'me', 'because')")
    conn.execute("select bartleby.remove_rule(id, 'me', 'because') from bartleby.group_rules")
    conn.execute("select bartleby.merge_groups(%s, 1, 'me', 'because')", [[split]])


def relay(conn: Connection) -> None:
    """The actions of the relay alone, with the secrets of sinks."""
    assert sql.column(conn, "select options ->> 'password' from bartleby.sink_settings()") == ["secret"]
    conn.execute("select bartleby.cloud_events('bus', '[{\"event\": 1}]'), bartleby.report_sink('bus', 1, 1, 'x')")
    conn.execute("select bartleby.refuse_events('bus', '[]')")


# What each group of roles may do; what is a string is executed. Every role tries everything, and is undone.
Attempts = list[str | Callable[[Connection], object]]
BY = "'me', 'because'"
VERSION: Attempts = ["select bartleby.version()"]
SENDING: Attempts = [lambda conn: sql.send(conn, 1), lambda conn: sql.send_count(conn, 2)]
WORKING: Attempts = [
    sql.claim,
    work,
    sql.reap,
    "select bartleby.turn()",
    "select bartleby.prune()",
    "select bartleby.take_duty('upkeep', 'me', '1 minute'), bartleby.leave_duty('upkeep', 'me')",
    "select bartleby.lease_length('q'), bartleby.outlook('q')",
    "select bartleby.mark_handled('q', 'c', 'id:1')",
    "select bartleby.handled_keys('c', '{id:1}')",
    "select bartleby.spool_identity(), bartleby.enter_spooled('[]')",
    "select bartleby.open_breaker('q', 'storm', '0')",
    "select bartleby.advance_replays()",
    "select bartleby.tally(), bartleby.regroup()",
    "select bartleby.report_worker('w', 'worker', '1', '{q}', 'h', 1, 10, 0), bartleby.leave_worker('w')",
]
READING: Attempts = [
    *(f"select * from bartleby.{view}" for view in sorted(VIEWS)),
    "select * from bartleby.find_letters('type:KeyError age:>1h x')",
    "select * from bartleby.count_letters('payload.a:1')",
    "select bartleby.fates('{1}'), bartleby.last_message_id()",
    "select bartleby.shared_values(1), bartleby.replay_change(1, 1)",
    "select bartleby.expiring('7 days'), bartleby.drift()",
    "select * from bartleby.find_token(repeat('b', 64))",
    "select bartleby.note('payload.reveal', '{\"message_id\": 1}', 'me')",
]
MANAGING: Attempts = [
    "select bartleby.create_queue('other')",
    "select bartleby.create_queue('q', '{\"max_attempts\": 3}')",
    "select bartleby.pause_queue('q'), bartleby.resume_queue('q')",
    "select bartleby.drop_queue('q', true)",
    f"select bartleby.force_breaker('q', {BY}), bartleby.close_breaker('q', {BY})",
    *(f"select bartleby.{verb}('{{1}}', {BY})" for verb in ("replay", "discard", "restore", "hold")),
    f"select bartleby.erase_key('k', {BY})",
    "select bartleby.letter_ids('', 10)",
    f"select bartleby.plan_replay('queue:q', {BY})",
    run_plan,
    f"select bartleby.acknowledge_group(1, {BY}), bartleby.mute_group(1, '2099-01-01', {BY})",
    f"select bartleby.resolve_group(1, {BY}), bartleby.reopen_group(1, {BY})",
    split_and_merge,
    f"select bartleby.put_sink('new', 'log', '{{}}', {BY})",
    f"select bartleby.put_sink('bus', 'log', '{{}}', {BY})",
    f"select bartleby.pause_sink('bus', {BY}), bartleby.resume_sink('bus', {BY})",
    f"select bartleby.remove_sink('bus', {BY}, true)",
    f"select bartleby.emit_again('bus', '[{{\"event\": 1}}]', {BY})",
    f"select bartleby.add_token('token', 't', repeat('a', 64), 'admin', null, null, {BY})",
    f"select bartleby.revoke_token(1, {BY})",
    "select * from bartleby.find_password('ana')",
    "select bartleby.open_session(repeat('c', 64), 1, 'ci', 'reader', null, bartleby.clock() + '1 hour')",
    "select bartleby.close_session(repeat('c', 64))",
    "select * from bartleby.tokens",
    "select bartleby.take_answer('me', 'k', 'r'), bartleby.keep_answer('me', 'k', 200, 'done')",
    f"select bartleby.drain_worker('there', {BY})",
]
EMITTED: Attempts = ["select * from bartleby.emitted('bus', '-infinity', 'infinity')"]
RELAYING: Attempts = [relay]
FORBIDDEN: Attempts = [
    "select hash from bartleby.token", "update bartleby.token set role = 'admin'", "select * from bartleby.answer",
    "select bartleby.record_audit('letter.discard', '{}', 'me', 'because', null, null, null)",
    "select bartleby.lock_audit()", "update bartleby.audit_head set id = 0", "delete from bartleby.audit_log",
    "select options from bartleby.sink", "update bartleby.sink set options = '{}'", "select * from bartleby.log",
    "delete from bartleby.log", "select * from bartleby.dead_letter", "update bartleby.dead_letter set status = 'dead'",
    "update bartleby.queue set paused = true", "select bartleby.end_pauses(now())", "delete from bartleby.event",
    "select bartleby.emit('t', 'q', '{}')", "delete from bartleby.handled", "delete from bartleby.duty",
    "update bartleby.breaker set next_probe_at = null", "update bartleby.worker set wanted = 'drain'",
    "select bartleby.decide(l, 'failed', '[]') from bartleby.lease l", "select nextval('bartleby.positions_1')",
    "select setval('bartleby.idle_1', 1)", "create table bartleby.mine ()",
    "create or replace function bartleby.version() returns text language sql as $$ select 'mine' $$",
]  # fmt: skip
ALLOWED = {
    "bartleby_producer": [VERSION, SENDING],
    "bartleby_worker": [VERSION, SENDING, WORKING],
    "bartleby_reader": [VERSION, READING],
    "bartleby_operator": [VERSION, SENDING, WORKING, READING, MANAGING, EMITTED],
    "bartleby_relay": [VERSION, WORKING, EMITTED, RELAYING],
    "stranger": [],
}


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
        readable = sql.column(conn, tables + " and has_table_privilege(%s, oid, 'select')", role)
        assert set(readable) == RELATIONS.get(role, set()), role
        writes = " and has_table_privilege(%s, oid, 'insert, update, delete, truncate, references, trigger')"
        assert sql.column(conn, tables + writes, role) == [], role
        uses = " has_sequence_privilege(%s, oid, 'usage, select, update') end"
        assert sql.column(conn, sequences + uses, role) == [], role
        assert sql.value(conn, "select has_schema_privilege(%s, 'bartleby', 'usage')", role), role
        assert not sql.value(conn, "select has_schema_privilege(%s, 'bartleby', 'create')", role), role
        powers = "rolcanlogin or rolsuper or rolcreaterole or rolcreatedb or rolbypassrls or rolreplication"
        assert sql.value(conn, f"select {powers} from pg_roles where rolname = %s", role) is False, role
        memberships = "select roleid::regrole::text from pg_auth_members where member = %s::regrole"
        assert sql.column(conn, memberships, role) == [], role


@pytest.mark.seed("brighter-36", "brighter-39")
@pytest.mark.own_database
def test_each_role_can_do_what_it_may_and_nothing_else(conn: Connection) -> None:
    sql.create(conn)
    sql.send_count(conn, 5)
    sql.fail_all(conn, sql.claim(conn), verdict="dead")
    put_sink(conn, options={"password": "secret"})
    conn.execute(f"select bartleby.add_token('token', 'ci', repeat('b', 64), 'reader', null, null, {BY})".encode())
    conn.execute("select bartleby.report_worker('there', 'worker', '1', '{q}', 'h', 1, 10, 0)")
    conn.execute("drop role if exists stranger")
    conn.execute("create role stranger")
    try:
        for attempts in (VERSION, SENDING, WORKING, READING, MANAGING, EMITTED, RELAYING, FORBIDDEN):
            for attempt in attempts:
                able = {role for role in ALLOWED if can(conn, role, attempt)}
                assert able == {role for role, allowed in ALLOWED.items() if attempts in allowed}, attempt
    finally:
        conn.execute("drop role stranger")


def can(conn: Connection, role: str, attempt: str | Callable[[Connection], object]) -> bool:
    try:
        with conn.transaction(force_rollback=True):
            conn.execute(f"set local role {role}".encode())
            if isinstance(attempt, str):
                conn.execute(attempt.encode())
            else:
                attempt(conn)
    except psycopg.errors.InsufficientPrivilege:
        return False
    return True


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
    assert_everything_works(attacker)
    attacker.execute("set search_path = pg_catalog")
    assert sql.column(attacker, "select who from hostile.caught") == []


def assert_everything_works(conn: Connection) -> None:
    assert sql.send(conn, 4) > 0
    claimed = sql.claim(conn, 2)
    assert claimed.payloads == [1, 2]
    assert sql.ack(conn, claimed.lease, claimed.positions[:1]) == 1
    conn.execute("select bartleby.fail(%s, %s)", failure_of(Claim(claimed.messages[1:])))
    assert sql.column(conn, "select bartleby.replay(%s, 'me', 'again')", [claimed.ids[1]]) == [claimed.ids[1]]
    assert sql.rows(conn, "select ready, leased from bartleby.queues") == [{"ready": 3, "leased": 0}]
    assert sql.reap(conn) == []
    assert sql.value(conn, "select bartleby.turn()") == "nothing to do"
    assert sql.value(conn, "select bartleby.mark_handled('q', 'c', 'id:1')")
    assert sql.column(conn, "select bartleby.handled_keys('c', '{id:1,id:2}')") == ["id:1"]
    assert sql.value(conn, "select bartleby.take_duty('upkeep', 'me', '1 minute')")
    assert not sql.value(conn, "select bartleby.take_duty('upkeep', 'you', '1 minute')")
    assert set(sql.column(conn, "select rows from bartleby.prune()")) == {0}
    assert sql.value(conn, "select bartleby.open_breaker('q', 'storm', '0')")
    assert sql.claim(conn).messages == []
    assert sql.value(conn, "select bartleby.close_breaker('q', 'me', 'enough')")
    kinds = "select replace(type, 'io.bartleby.', '') from bartleby.events order by id"
    assert sql.column(conn, kinds) == [
        "group.opened", "dead_letter.created", "dead_letter.replayed", "breaker.opened", "breaker.closed",
    ]  # fmt: skip
    assert_plans_and_groups_work(conn)
    conn.execute("select bartleby.put_sink('bus', 'log', '{}', 'me', 'because')")
    conn.execute("select bartleby.fail(%s, %s)", failure_of(sql.claim(conn)))
    assert sql.column(conn, "select waiting from bartleby.sinks") == [1]
    added = "select bartleby.add_token('token', 'ci', repeat('a', 64), 'reader', '{q}', null, 'me', 'because')"
    assert sql.value(conn, added) == sql.value(conn, "select id from bartleby.find_token(repeat('a', 64))")
    assert sql.column(conn, "select problem from bartleby.verify_audit()") == []


def assert_plans_and_groups_work(conn: Connection) -> None:
    conn.execute("select bartleby.fail(%s, %s)", failure_of(sql.claim(conn)))
    plan = sql.value(conn, "select bartleby.plan_replay('queue:q', 'me', 'again')")
    conn.execute("select bartleby.start_replay(%s, 'me', 'again')", [plan])
    assert sql.column(conn, "select status from bartleby.advance_replays()") == ["settling"]
    assert sql.column(conn, "select waiting from bartleby.replays") == [0]
    split_and_merge(conn)
    assert sql.value(conn, "select bartleby.tally()") > 0
    assert sql.value(conn, "select bartleby.regroup()") == 0


def failure_of(claimed: Claim) -> list[object]:
    failure = {"position": claimed.one["position"], "verdict": "dead", "worker_version": "1"}
    return [claimed.lease, json.dumps([failure])]
