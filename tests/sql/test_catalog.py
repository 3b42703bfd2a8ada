"""What the catalogs say about every object, so that a new one is covered at birth."""

import re

import pytest

from tests.kit.sql import SQL, Connection, column, create, rows, value

IN_SCHEMA = "pronamespace = 'bartleby'::regnamespace"
CLOCKS = re.compile(
    r"\b(now\s*\(|clock_timestamp|current_timestamp|statement_timestamp|transaction_timestamp|localtimestamp"
    r"|localtime\b|current_date|current_time\b|timeofday)",
    re.IGNORECASE,
)


@pytest.fixture
def conn(conn: Connection) -> Connection:
    """A database with queues in it: what creating a queue creates is questioned too."""
    create(conn, "a")
    create(conn, "b", dead_letter_to="a")
    return conn


def test_there_is_something_to_question(conn: Connection) -> None:
    assert value(conn, f"select count(*) from pg_proc where {IN_SCHEMA}") > 40
    assert value(conn, "select count(*) from pg_class where relname ~ '^(positions|idle)_[0-9]+$'") == 4


def test_nobody_may_execute_a_function_by_default(conn: Connection) -> None:
    assert (
        column(
            conn,
            f"select oid::regprocedure::text from pg_proc where {IN_SCHEMA}"
            " and has_function_privilege('public', oid, 'execute')",
        )
        == []
    )


def test_nobody_may_touch_a_table_view_or_sequence_by_default(conn: Connection) -> None:
    assert (
        column(
            conn,
            "select c.oid::regclass::text from pg_class c where relnamespace = 'bartleby'::regnamespace and case"
            " when relkind = 'S' then has_sequence_privilege('public', c.oid, 'usage, select, update')"
            " when relkind in ('r', 'p', 'v', 'm') then has_table_privilege('public', c.oid,"
            " 'select, insert, update, delete, truncate, references, trigger')"
            " or has_any_column_privilege('public', c.oid, 'select, insert, update, references') end",
        )
        == []
    )


def test_nobody_may_use_the_schema_or_create_in_it_by_default(conn: Connection) -> None:
    assert not value(conn, "select has_schema_privilege('public', 'bartleby', 'usage, create')")


def test_nobody_may_use_a_type_of_its_own_by_default(conn: Connection) -> None:
    """The row types of tables follow their tables, and cannot be granted."""
    assert (
        column(
            conn,
            "select t.oid::regtype::text from pg_type t left join pg_class c on c.oid = t.typrelid"
            " where t.typnamespace = 'bartleby'::regnamespace and t.typelem = 0 and t.typtype <> 'm'"
            " and (c.relkind is null or c.relkind = 'c') and has_type_privilege('public', t.oid, 'usage')",
        )
        == []
    )


def test_only_the_owner_may_grant(conn: Connection) -> None:
    assert (
        column(
            conn,
            "select p.oid::regprocedure::text from pg_proc p, aclexplode(p.proacl) a"
            f" where {IN_SCHEMA} and a.is_grantable and a.grantee <> p.proowner",
        )
        == []
    )


def test_every_function_has_a_comment(conn: Connection) -> None:
    assert (
        column(
            conn,
            f"select oid::regprocedure::text from pg_proc where {IN_SCHEMA}"
            " and coalesce(obj_description(oid, 'pg_proc'), '') = ''",
        )
        == []
    )


def test_every_table_view_sequence_and_type_has_a_comment(conn: Connection) -> None:
    """Except those of a queue, and those that belong to an identity column."""
    assert (
        column(
            conn,
            "select c.oid::regclass::text from pg_class c where relnamespace = 'bartleby'::regnamespace"
            " and relkind in ('r', 'p', 'v', 'm', 'S', 'f') and relname !~ '^(positions|idle)_[0-9]+$'"
            " and not exists (select from pg_depend d where d.objid = c.oid and d.deptype = 'i'"
            "   and d.classid = 'pg_class'::regclass and c.relkind = 'S')"
            " and coalesce(obj_description(c.oid, 'pg_class'), '') = ''"
            " union all select t.oid::regtype::text from pg_type t join pg_class c on c.oid = t.typrelid"
            " where t.typnamespace = 'bartleby'::regnamespace and c.relkind = 'c'"
            " and coalesce(obj_description(t.oid, 'pg_type'), '') = ''",
        )
        == []
    )
    assert value(conn, "select obj_description('bartleby'::regnamespace, 'pg_namespace')")


def test_every_definer_function_pins_its_search_path_with_pg_temp_last(conn: Connection) -> None:
    pinned = rows(
        conn,
        f"select oid::regprocedure::text as name, proconfig from pg_proc where {IN_SCHEMA} and prosecdef",
    )
    assert len(pinned) > 10
    assert [
        found["name"]
        for found in pinned
        if "search_path=pg_catalog, bartleby, pg_temp" not in (found["proconfig"] or [])
    ] == []


def test_every_function_that_a_role_may_call_is_a_definer_or_touches_nothing(conn: Connection) -> None:
    assert set(
        column(
            conn,
            f"select distinct p.proname::text from pg_proc p, aclexplode(p.proacl) a where {IN_SCHEMA}"
            " and a.grantee <> p.proowner and not p.prosecdef",
        )
    ) <= {"clock", "sink_facts", "shown_option"}


def test_time_is_only_read_through_the_clock(conn: Connection) -> None:
    sources = rows(conn, f"select proname, prosrc from pg_proc where {IN_SCHEMA}")
    readers = {found["proname"] for found in sources if CLOCKS.search(found["prosrc"])}
    assert readers == {"clock", "server_clock"}, "server_clock is compared with PostgreSQL's own times, never with ours"
    views = rows(
        conn,
        "select relname, pg_get_viewdef(oid) as source from pg_class"
        " where relnamespace = 'bartleby'::regnamespace and relkind = 'v'",
    )
    assert [found["relname"] for found in views if CLOCKS.search(found["source"])] == []


def test_every_parameter_begins_with_p(conn: Connection) -> None:
    parameters = rows(
        conn,
        "select p.proname, a.name, a.mode from pg_proc p, unnest(p.proargnames, coalesce(p.proargmodes,"
        f" array_fill('i'::\"char\", array[p.pronargs::integer]))) as a (name, mode) where {IN_SCHEMA}",
    )
    assert len(parameters) > 50
    assert [found for found in parameters if found["mode"] in "iv" and not found["name"].startswith("p_")] == []


def test_every_input_has_a_name(conn: Connection) -> None:
    assert (
        column(
            conn,
            f"select proname::text from pg_proc where {IN_SCHEMA} and pronargs > 0"
            " and (proargnames is null or '' = any (proargnames))",
        )
        == []
    )


def test_every_error_that_is_raised_is_of_our_own_class(conn: Connection) -> None:
    raised = re.compile(r"\braise\s+exception\b.*?;", re.IGNORECASE | re.DOTALL)
    sources = rows(conn, f"select proname, prosrc from pg_proc where {IN_SCHEMA}")
    statements = [(found["proname"], text) for found in sources for text in raised.findall(found["prosrc"])]
    assert len(statements) > 10
    assert [name for name, text in statements if not re.search(r"errcode\s*=\s*'ZB\d{3}'", text)] == []


def test_no_error_is_recognised_by_its_text(conn: Connection) -> None:
    assert column(conn, f"select proname::text from pg_proc where {IN_SCHEMA} and prosrc ~ 'when others'") == []


def test_every_object_is_in_the_manifest(conn: Connection) -> None:
    assert rows(conn, "select * from bartleby.drift()") == []
    assert value(conn, "select count(*) from bartleby.manifest where object like 'function %'") == value(
        conn, f"select count(*) from pg_proc where {IN_SCHEMA}"
    )


def test_no_index_is_invalid_and_no_table_is_without_a_unique_one_unless_it_is_a_log(conn: Connection) -> None:
    assert (
        column(
            conn,
            "select indexrelid::regclass::text from pg_index i join pg_class c on c.oid = i.indexrelid"
            " where c.relnamespace = 'bartleby'::regnamespace and not (indisvalid and indisready)",
        )
        == []
    )
    assert column(
        conn,
        "select relname::text from pg_class c where relnamespace = 'bartleby'::regnamespace and relkind in ('r', 'p')"
        " and relnatts > 0 and not exists (select from pg_index i where i.indrelid = c.oid and i.indisunique)"
        " order by 1",
    ) == ["installation", "log"]


def test_sql_files_name_the_schema_of_whatever_they_create() -> None:
    created = re.compile(
        r"^\s*create (?:or replace )?(?:unique )?(?:table|view|function|sequence|type)"
        r" (?:if not exists )?(\S+)",
        re.MULTILINE,
    )
    names = [name for path in SQL.glob("*.sql") for name in created.findall(path.read_text())]
    assert len(names) > 60
    assert [name for name in names if not name.startswith("bartleby.")] == []


def test_no_constraint_can_put_a_payload_into_an_error(conn: Connection) -> None:
    """The error of a violated check prints the whole row, and the server's log keeps it."""
    assert (
        column(
            conn,
            "select conname::text from pg_constraint c join pg_attribute a on a.attrelid = c.conrelid"
            " where c.connamespace = 'bartleby'::regnamespace and c.contype = 'c' and a.attname = 'payload'",
        )
        == []
    )


def test_the_lock_of_a_queue_cannot_be_guessed_from_its_name(conn: Connection) -> None:
    """Anybody may take any advisory lock; who knew the key could stop the queue."""
    keys = column(conn, "select lock_key from bartleby.queue")
    assert len(set(keys)) == 2
    conn.execute("select bartleby.drop_queue('b')")
    create(conn, "b")
    assert value(conn, "select lock_key from bartleby.queue where name = 'b'") not in keys
