"""Who may do what: a golden matrix of every role and every object, and real attempts under each role."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest

from tests.kit.events import put_sink
from tests.kit.sql import (
    ROLES,
    Claim,
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
    "advance_replays",
    "channel",
    "claim",
    "clock",
    "enter_spooled",
    "extend",
    "fail",
    "handled_keys",
    "idle",
    "lease_length",
    "leave_duty",
    "leave_worker",
    "mark_handled",
    "open_breaker",
    "outlook",
    "prune",
    "reap",
    "regroup",
    "reject",
    "release",
    "report_worker",
    "spool_identity",
    "start",
    "take_duty",
    "tally",
    "turn",
    "watch",
}
READER = {
    "audit_anchor",
    "clock",
    "count_letters",
    "depth_elsewhere",
    "drift",
    "expiring",
    "fates",
    "find_letters",
    "find_token",
    "group_pulse",
    "last_message_id",
    "note",
    "on_duty",
    "queue_stats",
    "replay_change",
    "segments",
    "shared_values",
    "sink_facts",
    "oldest_waiting",
    "unsettled",
    "verify_audit",
    "version",
    "worker_leases",
}
MANAGEMENT = {
    "acknowledge_group",
    "add_token",
    "approve_replay",
    "cancel_replay",
    "close_breaker",
    "close_session",
    "configure_queue",
    "create_queue",
    "discard",
    "drain_worker",
    "drop_queue",
    "erase_key",
    "drop_preview",
    "emit_again",
    "emitted",
    "exclude_items",
    "find_password",
    "force_breaker",
    "hold",
    "keep_answer",
    "letter_ids",
    "merge_groups",
    "mute_group",
    "open_session",
    "pause_queue",
    "pause_replay",
    "pause_sink",
    "plan_replay",
    "put_sink",
    "remove_rule",
    "remove_sink",
    "reopen_group",
    "replay",
    "resolve_group",
    "restore",
    "resume_queue",
    "resume_replay",
    "resume_sink",
    "revoke_token",
    "split_group",
    "start_replay",
    "take_answer",
}
RELAY = WORKER - {"send", "send_many"} | {
    "cloud_events",
    "emitted",
    "refuse_events",
    "report_sink",
    "sink_settings",
}
FUNCTIONS = {
    "bartleby_producer": PRODUCER,
    "bartleby_worker": WORKER,
    "bartleby_reader": READER,
    "bartleby_operator": WORKER | READER | MANAGEMENT,
    "bartleby_relay": RELAY,
}
VIEWS = {
    "attempts",
    "audit_log",
    "dead_letters",
    "events",
    "group_rules",
    "group_heads",
    "groups",
    "messages",
    "queues",
    "replay_items",
    "replays",
    "sinks",
    "workers",
}
RELATIONS = {
    "bartleby_producer": set[str](),
    "bartleby_worker": set[str](),
    "bartleby_reader": VIEWS,
    "bartleby_operator": VIEWS | {"tokens"},
    "bartleby_relay": set[str](),
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


def run_plan(conn: Connection) -> None:
    plan = value(conn, "select bartleby.plan_replay(null, 'me', 'because', p_ids => '{1,2}')")
    conn.execute("select bartleby.exclude_items(%s, '[{\"message_id\": 2}]', 'me', 'because')", [plan])
    told = value(conn, "select hash from bartleby.replays where id = %s", plan)
    conn.execute("select bartleby.approve_replay(%s, %s, 'you', 'because')", [plan, told])
    for verb in ("start", "pause", "resume", "cancel"):
        conn.execute(f"select bartleby.{verb}_replay(%s, 'me', 'because')".encode(), [plan])


def split_and_merge(conn: Connection) -> None:
    split = value(conn, "select bartleby.split_group(1, 'payload.a', '1', 'me', 'because')")
    conn.execute("select bartleby.remove_rule(id, 'me', 'because') from bartleby.group_rules")
    conn.execute("select bartleby.merge_groups(%s, 1, 'me', 'because')", [[split]])


def sessions(conn: Connection) -> None:
    conn.execute("select bartleby.open_session(repeat('c', 64), 1, 'ci', 'reader', null, bartleby.clock() + '1 hour')")
    assert value(conn, "select bartleby.close_session(repeat('c', 64))")


def relay(conn: Connection) -> None:
    """What only the relay does, with the secrets of sinks."""
    assert column(conn, "select options ->> 'password' from bartleby.sink_settings()") == ["secret"]
    conn.execute("select bartleby.cloud_events('bus', '[{\"event\": 1}]'), bartleby.report_sink('bus', 1, 1, 'x')")
    conn.execute("select bartleby.refuse_events('bus', '[]')")


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
    "ask for the spool": lambda conn: value(conn, "select bartleby.spool_identity()"),
    "enter what was spooled": lambda conn: rows(conn, "select * from bartleby.enter_spooled('[]')"),
    "open the breaker": lambda conn: value(conn, "select bartleby.open_breaker('q', 'storm', '0')"),
    "force the breaker": lambda conn: value(conn, "select bartleby.force_breaker('q', 'me', 'because')"),
    "close the breaker": lambda conn: value(conn, "select bartleby.close_breaker('q', 'me', 'because')"),
    "create a queue": lambda conn: create(conn, "other"),
    "change a policy": lambda conn: create(conn, "q", max_attempts=3),
    "pause": lambda conn: conn.execute("select bartleby.pause_queue('q')"),
    "drop a queue": lambda conn: conn.execute("select bartleby.drop_queue('q', true)"),
    "replay": lambda conn: conn.execute("select bartleby.replay('{1}', 'me', 'because')"),
    "discard letters": lambda conn: rows(conn, "select * from bartleby.discard('{1}', 'me', 'because')"),
    "restore letters": lambda conn: rows(conn, "select * from bartleby.restore('{1}', 'me', 'because')"),
    "hold letters": lambda conn: rows(conn, "select * from bartleby.hold('{1}', 'me', 'because')"),
    "erase letters": lambda conn: value(conn, "select bartleby.erase_key('k', 'me', 'because')"),
    "list the ids of letters": lambda conn: column(conn, "select bartleby.letter_ids('', 10)"),
    "look at found letters": lambda conn: rows(conn, "select * from bartleby.find_letters('type:KeyError age:>1h x')"),
    "look at counts of letters": lambda conn: rows(conn, "select * from bartleby.count_letters('payload.a:1')"),
    "look at fates": lambda conn: rows(conn, "select * from bartleby.fates('{1}')"),
    "advance replays": lambda conn: rows(conn, "select * from bartleby.advance_replays()"),
    "tally": lambda conn: value(conn, "select bartleby.tally()"),
    "regroup": lambda conn: value(conn, "select bartleby.regroup()"),
    "plan a replay": lambda conn: value(conn, "select bartleby.plan_replay('queue:q', 'me', 'because')"),
    "run a plan": run_plan,
    "look after a group": lambda conn: conn.execute(
        "select bartleby.acknowledge_group(1, 'me', 'because'), bartleby.mute_group(1, '2099-01-01', 'me', 'because'),"
        " bartleby.resolve_group(1, 'me', 'because'), bartleby.reopen_group(1, 'me', 'because')"
    ),
    "split and merge groups": split_and_merge,
    "look at what a group shares": lambda conn: rows(conn, "select * from bartleby.shared_values(1)"),
    "look at what a plan changes": lambda conn: rows(conn, "select * from bartleby.replay_change(1, 1)"),
    "look at what expires": lambda conn: rows(conn, "select * from bartleby.expiring('7 days')"),
    "look at rules": lambda conn: rows(conn, "select * from bartleby.group_rules"),
    "look at replays": lambda conn: rows(conn, "select * from bartleby.replays"),
    "look at items": lambda conn: rows(conn, "select * from bartleby.replay_items"),
    "look at queues": lambda conn: rows(conn, "select * from bartleby.queues"),
    "look at messages": lambda conn: rows(conn, "select * from bartleby.messages"),
    "look at dead letters": lambda conn: rows(conn, "select * from bartleby.dead_letters"),
    "look at groups": lambda conn: rows(conn, "select * from bartleby.groups"),
    "look at workers": lambda conn: rows(conn, "select * from bartleby.workers"),
    "report a worker": lambda conn: conn.execute(
        "select bartleby.report_worker('w', 'worker', '1', '{q}', 'h', 1, 10, 0), bartleby.leave_worker('w')"
    ),
    "drain a worker": lambda conn: value(conn, "select bartleby.drain_worker('there', 'me', 'because')"),
    "drain a worker directly": lambda conn: conn.execute("update bartleby.worker set wanted = 'drain'"),
    "look at sinks": lambda conn: rows(conn, "select * from bartleby.sinks"),
    "add a sink": lambda conn: conn.execute("select bartleby.put_sink('new', 'log', '{}', 'me', 'because')"),
    "change a sink": lambda conn: conn.execute("select bartleby.put_sink('bus', 'log', '{}', 'me', 'because')"),
    "pause a sink": lambda conn: conn.execute("select bartleby.pause_sink('bus', 'me', 'because')"),
    "resume a sink": lambda conn: conn.execute("select bartleby.resume_sink('bus', 'me', 'because')"),
    "remove a sink": lambda conn: conn.execute("select bartleby.remove_sink('bus', 'me', 'because', true)"),
    "let somebody in": lambda conn: value(
        conn, "select bartleby.add_token('token', 't', repeat('a', 64), 'admin', null, null, 'me', 'because')"
    ),
    "turn somebody away": lambda conn: conn.execute("select bartleby.revoke_token(1, 'me', 'because')"),
    "ask for a token": lambda conn: rows(conn, "select * from bartleby.find_token(repeat('b', 64))"),
    "ask for a password": lambda conn: rows(conn, "select * from bartleby.find_password('ana')"),
    "open a session": sessions,
    "see who may come in": lambda conn: rows(conn, "select * from bartleby.tokens"),
    "read hashes directly": lambda conn: rows(conn, "select hash from bartleby.token"),
    "let somebody in directly": lambda conn: conn.execute("update bartleby.token set role = 'admin'"),
    "leave a note": lambda conn: value(conn, "select bartleby.note('payload.reveal', '{\"message_id\": 1}', 'me')"),
    "forge an audit line": lambda conn: value(
        conn, "select bartleby.record_audit('letter.discard', '{}', 'me', 'because', null, null, null)"
    ),
    "keep an answer": lambda conn: conn.execute(
        "select bartleby.take_answer('me', 'k', 'r'), bartleby.keep_answer('me', 'k', 200, 'done')"
    ),
    "read answers directly": lambda conn: rows(conn, "select * from bartleby.answer"),
    "relay": relay,
    "ask what was emitted": lambda conn: rows(conn, "select * from bartleby.emitted('bus', '-infinity', 'infinity')"),
    "emit again": lambda conn: conn.execute("select bartleby.emit_again('bus', '[{\"event\": 1}]', 'me', 'because')"),
    "read secrets directly": lambda conn: rows(conn, "select options from bartleby.sink"),
    "write sinks directly": lambda conn: conn.execute("update bartleby.sink set options = '{}'"),
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
    "ask for the outlook", "ask what is handled", "open the breaker", "advance replays", "tally", "regroup",
    "ask for the spool", "enter what was spooled", "report a worker",
}  # fmt: skip
LOOK = {deed for deed in DEEDS if deed.startswith("look at ")} | {
    "ask for drift", "ask for the version", "ask for a token", "leave a note",
}  # fmt: skip
MANAGE = {
    "create a queue", "change a policy", "pause", "drop a queue", "replay", "force the breaker", "close the breaker",
    "discard letters", "restore letters", "hold letters", "erase letters", "list the ids of letters",
    "plan a replay", "run a plan", "look after a group", "split and merge groups",
    "add a sink", "change a sink", "pause a sink", "resume a sink", "remove a sink",
    "ask what was emitted", "emit again",
    "let somebody in", "turn somebody away", "ask for a password", "open a session", "see who may come in",
    "keep an answer", "drain a worker",
}  # fmt: skip
RELAYING = WORK - {"send", "send many"} | {"relay", "ask what was emitted"}
MAY = {
    "bartleby_producer": SEND,
    "bartleby_worker": WORK,
    "bartleby_reader": LOOK,
    "bartleby_operator": WORK | LOOK | MANAGE,
    "bartleby_relay": RELAYING,
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
    put_sink(conn, options={"password": "secret"})
    conn.execute("select bartleby.add_token('token', 'ci', repeat('b', 64), 'reader', null, null, 'me', 'because')")
    conn.execute("select bartleby.report_worker('there', 'worker', '1', '{q}', 'h', 1, 10, 0)")
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


def test_a_reader_sees_no_secret_of_a_sink(conn: Connection) -> None:
    put_sink(conn, "bus", "nats", options={"password": "s3cr3t", "url": "nats://me:s3cr3t@bus.example"})
    with acting_as(conn, "bartleby_reader"):
        found = [rows(conn, "select * from bartleby.sinks"), rows(conn, "select * from bartleby.audit_log")]
        assert "bus.example" in str(found)
        assert "s3cr3t" not in str(found)


def test_a_relay_can_do_all_of_its_work(conn: Connection) -> None:
    create(conn)
    put_sink(conn)
    send_count(conn, 3)
    fail_all(conn, claim(conn, 3), verdict="dead")
    with acting_as(conn, "bartleby_relay"):
        (queue,) = column(conn, "select queue from bartleby.sink_settings()")
        claimed = claim(conn, 10, queue)
        conn.execute("select bartleby.start(%s), bartleby.extend(%s, '1 minute')", [claimed.lease, [claimed.lease]])
        told = column(
            conn,
            "select document ->> 'id' from bartleby.cloud_events('bus', %s::jsonb)",
            json.dumps(claimed.payloads),
        )
        assert len(told) == 4
        assert value(conn, "select bartleby.report_sink('bus', 0, 1, 'not now')") == "degraded"
        assert value(conn, "select bartleby.report_sink('bus', 3, 0, null)") == "recovered"
        refusals = json.dumps([{"id": told[3], "error_type": "Refused", "error": "no", "worker": "w"}])
        assert value(conn, "select bartleby.refuse_events('bus', %s::jsonb)", refusals) == 1
        assert ack(conn, claimed.lease) == 2
        expected = column(conn, "select id from bartleby.emitted('bus', '-infinity', 'infinity')")
        assert set(told) < set(expected)
        assert reap(conn) == []
    assert rows(conn, "select refused, published, failures from bartleby.sinks") == [
        {"refused": 1, "published": 3, "failures": 1}
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
        "breaker", "handled", "duty", "event", "letter_count", "letter_delta", "group_hour", "failure_group",
        "group_rule", "replay", "replay_item", "replay_delta", "retention_mark", "audit", "audit_head",
        "sink", "origin", "untold_expiry", "token", "answer", "worker",
        "added", "removed", "before", "after"):  # fmt: skip
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
    assert set(column(conn, "select rows from bartleby.prune()")) == {0}
    assert value(conn, "select bartleby.open_breaker('q', 'storm', '0')")
    assert claim(conn).messages == []
    assert value(conn, "select bartleby.close_breaker('q', 'me', 'enough')")
    assert column(conn, "select type from bartleby.events order by id") == [
        "io.bartleby.group.opened",
        "io.bartleby.dead_letter.created",
        "io.bartleby.dead_letter.replayed",
        "io.bartleby.breaker.opened",
        "io.bartleby.breaker.closed",
    ]
    plans_and_groups_work(conn)
    create(conn, "other", dead_letter_to="q")
    conn.execute("select bartleby.drop_queue('other')")
    sinks_work(conn)
    credentials_work(conn)
    assert value(conn, "select bartleby.report_worker('w', 'worker', '1', '{q}', 'h', 1, 10, 0)") == "run"
    assert value(conn, "select bartleby.drain_worker('w', 'me', 'because')")
    assert column(conn, "select wanted from bartleby.workers") == ["drain"]


def credentials_work(conn: Connection) -> None:
    added = value(
        conn, "select bartleby.add_token('token', 'ci', repeat('a', 64), 'reader', '{q}', null, 'me', 'because')"
    )
    assert column(conn, "select id from bartleby.find_token(repeat('a', 64))") == [added]
    query = "select bartleby.open_session(repeat('b', 64), %s, 'ci', 'reader', '{q}', '2100-01-01')"
    conn.execute(query, [added])
    conn.execute("select bartleby.revoke_token(%s, 'me', 'because')", [added])
    assert column(conn, "select id from bartleby.tokens") == []
    assert rows(conn, "select * from bartleby.take_answer('me', 'k', 'r')") == []
    conn.execute("select bartleby.keep_answer('me', 'k', 201, 'made')")
    assert rows(conn, "select * from bartleby.take_answer('me', 'k', 'r')") == [{"status": 201, "body": "made"}]
    conn.execute("select bartleby.note('agent.call', '{}', 'me')")
    assert column(conn, "select problem from bartleby.verify_audit()") == []


def sinks_work(conn: Connection) -> None:
    conn.execute("select bartleby.put_sink('bus', 'log', '{\"attempts\": 3}', 'me', 'because')")
    conn.execute("select bartleby.fail(%s, %s)", failure_of(claim(conn)))
    assert column(conn, "select waiting from bartleby.sinks") == [1]
    assert len(column(conn, "select id from bartleby.emitted('bus', '-infinity', 'infinity')")) > 1
    assert value(conn, "select bartleby.emit_again('bus', '[{\"event\": 1}]', 'me', 'because')") == 1
    claimed = claim(conn, 10, "sink.bus")
    assert [len(found) for found in claimed.payloads] == [1, 1]
    ack(conn, claimed.lease)
    conn.execute("select bartleby.pause_sink('bus', 'me', 'because'), bartleby.resume_sink('bus', 'me', 'because')")
    conn.execute("select bartleby.remove_sink('bus', 'me', 'because')")
    assert column(conn, "select problem from bartleby.verify_audit()") == []


def plans_and_groups_work(conn: Connection) -> None:
    conn.execute("select bartleby.fail(%s, %s)", failure_of(claim(conn)))
    plan = value(conn, "select bartleby.plan_replay('queue:q', 'me', 'again')")
    conn.execute("select bartleby.start_replay(%s, 'me', 'again')", [plan])
    assert column(conn, "select status from bartleby.advance_replays()") == ["settling"]
    assert column(conn, "select waiting from bartleby.replays") == [0]
    split_and_merge(conn)
    assert value(conn, "select bartleby.tally()") > 0
    assert value(conn, "select bartleby.regroup()") == 0
    assert column(conn, "select problem from bartleby.verify_audit()") == []


def failure_of(claimed: Claim) -> list[object]:
    failure = f'[{{"position": {claimed.one["position"]}, "verdict": "dead", "worker_version": "1"}}]'
    return [claimed.lease, failure]
