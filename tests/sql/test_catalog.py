"""Rules that every object of the schema obeys, read from the catalogs, so that a new object is covered at once."""

import os
import re

import pytest

from tests.kit.sql import Connection, column, create, rows, value

OURS = "pronamespace = 'bartleby'::regnamespace"
CLOCKS = re.compile(
    r"\b(now\s*\(|clock_timestamp|current_timestamp|statement_timestamp|transaction_timestamp|localtimestamp"
    r"|localtime\b|current_date|current_time\b|timeofday)",
    re.IGNORECASE,
)
# what no object may be: each query names those that are
OFFENDERS = {
    "function that public may execute": f"select oid::regprocedure::text from pg_proc where {OURS}"
    " and has_function_privilege('public', oid, 'execute')",
    "table, view or sequence that public may use": "select c.oid::regclass::text from pg_class c"
    " where relnamespace = 'bartleby'::regnamespace and case"
    " when relkind = 'S' then has_sequence_privilege('public', c.oid, 'usage, select, update')"
    " when relkind in ('r', 'p', 'v', 'm') then has_table_privilege('public', c.oid,"
    " 'select, insert, update, delete, truncate, references, trigger')"
    " or has_any_column_privilege('public', c.oid, 'select, insert, update, references') end",
    "schema that public may use": "select nspname::text from pg_namespace where nspname = 'bartleby'"
    " and has_schema_privilege('public', oid, 'usage, create')",
    # row types of tables follow their tables, and cannot be granted
    "type that public may use": "select t.oid::regtype::text from pg_type t left join pg_class c on c.oid = t.typrelid"
    " where t.typnamespace = 'bartleby'::regnamespace and t.typelem = 0 and t.typtype <> 'm'"
    " and (c.relkind is null or c.relkind = 'c') and has_type_privilege('public', t.oid, 'usage')",
    "function that another than the owner may grant": "select p.oid::regprocedure::text"
    f" from pg_proc p, aclexplode(p.proacl) a where {OURS} and a.is_grantable and a.grantee <> p.proowner",
    "function without a comment": f"select oid::regprocedure::text from pg_proc where {OURS}"
    " and coalesce(obj_description(oid, 'pg_proc'), '') = ''",
    # except those of a queue, and those that belong to an identity column
    "table, view or sequence without a comment": "select c.oid::regclass::text from pg_class c"
    " where relnamespace = 'bartleby'::regnamespace and relkind in ('r', 'p', 'v', 'm', 'S', 'f')"
    " and relname !~ '^(positions|idle)_[0-9]+$' and not exists (select from pg_depend d where d.objid = c.oid"
    "   and d.deptype = 'i' and d.classid = 'pg_class'::regclass and c.relkind = 'S')"
    " and coalesce(obj_description(c.oid, 'pg_class'), '') = ''",
    "type without a comment": "select t.oid::regtype::text from pg_type t join pg_class c on c.oid = t.typrelid"
    " where t.typnamespace = 'bartleby'::regnamespace and c.relkind = 'c'"
    " and coalesce(obj_description(t.oid, 'pg_type'), '') = ''",
    "schema without a comment": "select nspname::text from pg_namespace where nspname = 'bartleby'"
    " and coalesce(obj_description(oid, 'pg_namespace'), '') = ''",
    "definer function whose search path does not end with pg_temp": "select oid::regprocedure::text from pg_proc"
    f" where {OURS} and prosecdef"
    " and ('search_path=pg_catalog, bartleby, pg_temp' = any (proconfig)) is not true",
    "function of a role that runs with the role's rights": "select distinct p.proname::text"
    f" from pg_proc p, aclexplode(p.proacl) a where {OURS} and a.grantee <> p.proowner and not p.prosecdef"
    " and p.proname not in ('clock', 'sink_facts', 'shown_option')",
    "parameter without a name that begins with p_": "select p.proname || '.' || coalesce(a.name, '')"
    " from pg_proc p, unnest(p.proargnames, coalesce(p.proargmodes,"
    f" array_fill('i'::\"char\", array[p.pronargs::integer]))) as a (name, mode) where {OURS}"
    " and a.mode in ('i', 'v') and (a.name like 'p\\_%') is not true",
    "function with unnamed parameters": f"select proname::text from pg_proc where {OURS} and pronargs > 0"
    " and (proargnames is null or '' = any (proargnames))",
    # a plan that has to do what was forbidden costs 1e10, and PostgreSQL would compile it at each call
    "function that pins its plans and lets PostgreSQL compile them": "select oid::regprocedure::text from pg_proc"
    f" where {OURS} and array_to_string(proconfig, ' ') ~ '(enable_\\w+=off|_cost=)'"
    " and ('jit=off' = any (proconfig)) is not true",
    "function that catches every error": f"select proname::text from pg_proc where {OURS} and prosrc ~ 'when others'",
    "object that is not in the manifest": "select object || ' ' || change from bartleby.drift()",
    "index that is not valid": "select indexrelid::regclass::text from pg_index i join pg_class c"
    " on c.oid = i.indexrelid where c.relnamespace = 'bartleby'::regnamespace and not (indisvalid and indisready)",
    "table without a unique index": "select relname::text from pg_class c"
    " where relnamespace = 'bartleby'::regnamespace and relkind in ('r', 'p') and relnatts > 0"
    " and not exists (select from pg_index i where i.indrelid = c.oid and i.indisunique)"
    " and relname not in ('installation', 'log')",
    # the error of a violated check prints the whole row, and the server's log keeps it
    "check on a table with payloads": "select conname::text from pg_constraint c join pg_attribute a"
    " on a.attrelid = c.conrelid where c.connamespace = 'bartleby'::regnamespace and c.contype = 'c'"
    " and a.attname = 'payload'",
}


@pytest.fixture
def conn(conn: Connection) -> Connection:
    """A database with queues, so that the objects of a queue are covered too."""
    create(conn, "a")
    create(conn, "b", dead_letter_to="a")
    return conn


def test_no_object_breaks_a_rule(conn: Connection) -> None:
    for rule, query in OFFENDERS.items():
        assert [found for (found,) in conn.execute(query.encode())] == [], rule
    functions = value(conn, f"select count(*) from pg_proc where {OURS}")
    assert functions > 40
    assert value(conn, f"select count(*) from pg_proc where {OURS} and prosecdef") > 10
    assert value(conn, "select count(*) from pg_class where relname ~ '^(positions|idle)_[0-9]+$'") == 4
    assert value(conn, "select count(*) from bartleby.manifest where object like 'function %'") == functions


def test_time_is_only_read_through_the_clock(conn: Connection) -> None:
    sources = rows(conn, f"select proname, prosrc from pg_proc where {OURS}")
    readers = {found["proname"] for found in sources if CLOCKS.search(found["prosrc"])}
    assert readers == {"clock", "server_clock"}, "server_clock is compared with PostgreSQL's own times, never with ours"
    views = "select relname, pg_get_viewdef(oid) as source from pg_class where relkind = 'v'"
    found = rows(conn, f"{views} and relnamespace = 'bartleby'::regnamespace")
    assert [view["relname"] for view in found if CLOCKS.search(view["source"])] == []


def test_every_error_that_is_raised_is_of_our_own_class(conn: Connection) -> None:
    raised = re.compile(r"\braise\s+exception\b.*?;", re.IGNORECASE | re.DOTALL)
    sources = rows(conn, f"select proname, prosrc from pg_proc where {OURS}")
    statements = [(found["proname"], text) for found in sources for text in raised.findall(found["prosrc"])]
    assert len(statements) > 10
    assert [name for name, text in statements if not re.search(r"errcode\s*=\s*'ZB\d{3}'", text)] == []


def test_lock_of_a_queue_cannot_be_guessed_from_its_name(conn: Connection) -> None:
    """Any user may take any advisory lock, and one that knew the key could stop the queue."""
    keys = column(conn, "select lock_key from bartleby.queue")
    assert len(set(keys)) == 2
    conn.execute("select bartleby.drop_queue('b')")
    create(conn, "b")
    assert value(conn, "select lock_key from bartleby.queue where name = 'b'") not in keys


def test_jit_is_on_where_the_run_promises_it(conn: Connection) -> None:
    """`make matrix VERSIONS=debian` tests the server as users have it."""
    assert value(conn, "select pg_jit_available()") or os.environ.get("BARTLEBY_EXPECT_JIT") != "True"
