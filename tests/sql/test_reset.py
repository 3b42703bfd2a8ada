"""The databases that tests share are as good as new after each reset."""

from typing import Any

import psycopg
import pytest

from tests.kit.clock import move_clock
from tests.kit.database import Pool
from tests.kit.sql import Connection, claim, column, create, fail_all, send, value

CHANGES = (
    "create table public.left_behind ()",
    "create or replace function bartleby.version() returns text language sql as $$ select 'x' $$",
    "create schema left_behind",
    "create type bartleby.left_behind as enum ('a')",
    "create domain bartleby.left_behind as text",
    """do $$ begin
        execute 'create or replace view bartleby.attempts as '
            || rtrim(pg_get_viewdef('bartleby.attempts'::regclass), ';') || ' where false';
    end $$""",
    "create rule left_behind as on insert to bartleby.queue do also notify left_behind",
    "create trigger left_behind after insert on bartleby.queue execute function suppress_redundant_updates_trigger()",
    "update pg_index set indisvalid = false where indexrelid = 'bartleby.deferred_due'::regclass",
    "alter table bartleby.queue alter column lease drop not null",
    "alter table bartleby.queue alter column lease set default '1 day'",
    "alter table bartleby.queue add constraint left_behind check (name <> 'left_behind')",
    "alter sequence bartleby.message_id increment 5",
    "create statistics bartleby.left_behind on queue, run_at from bartleby.deferred",
    "alter default privileges in schema bartleby grant select on tables to public",
    "grant select on bartleby.queue to public",
    "comment on table bartleby.queue is 'left behind'",
    "drop schema bartleby cascade",
)


def contents(conn: Connection) -> dict[str, Any]:
    """Return every row, every sequence, every function, and the settings of the session."""
    tables = column(
        conn, "select relname from pg_class where relnamespace = 'bartleby'::regnamespace and relkind = 'r' order by 1"
    )
    found: dict[str, Any] = {
        table: column(conn, f"select t::text from bartleby.{table} t order by 1") for table in tables
    }
    found["sequences"] = conn.execute("select sequencename, last_value from pg_sequences order by 1").fetchall()
    found["drift"] = column(conn, "select object from bartleby.drift()")
    found["clock"] = value(conn, "select pg_get_functiondef('bartleby.clock()'::regprocedure)")
    found["settings"] = column(conn, "select name from pg_settings where source = 'session' order by 1")
    found["channels"] = column(conn, "select pg_listening_channels()")
    return found


def leave_traces(conn: Connection) -> None:
    """Use tables, sequences, clock and session in every way that tests do."""
    create(conn, max_attempts=1)
    clock = move_clock(conn)
    for number in range(3):
        send(conn, number, key=str(number), unique_for="1 day")
    fail_all(conn, claim(conn, 2), error_type="E", error="text")
    conn.execute("select bartleby.discard(array(select message_id from bartleby.dead_letters), 'a test', 'testing')")
    clock.advance(3600)
    conn.execute("select bartleby.reap()")
    conn.execute("listen everything")
    conn.execute("set statement_timeout = '5min'")
    conn.execute("update bartleby.segment set current = slot = 1")


def test_reset_removes_every_trace_of_a_test_and_ends_its_sessions(pool: Pool) -> None:
    with pool.lend("first") as database:
        before = contents(database.conn)
        other = psycopg.connect(database.dsn)
        leave_traces(database.conn)
        changed = contents(database.conn)
        assert {name for name in before if changed[name] != before[name]} >= {
            *("queue", "log_0", "lease", "dead_letter", "attempt", "audit", "audit_head", "segment", "unique_key"),
            *("sequences", "drift", "clock", "settings", "channels"),
        }
        send(other)
        database.conn.autocommit = False
        send(database.conn)
        assert database.reset()
        with pytest.raises(psycopg.OperationalError):
            other.execute("select 1")
        assert contents(database.conn) == before
        database.lend("first")


def test_changed_schema_is_not_handed_to_the_next_test(pool: Pool) -> None:
    with pool.lend("first") as database:
        for change in CHANGES:
            with database.conn.transaction(force_rollback=True):
                database.conn.execute(change.encode())
                assert database._structure() != database.structure, change
        assert database._structure() == database.structure
        database.conn.execute("create table public.left_behind ()")
    with pool.lend("second") as another:
        assert another.name != database.name


def test_database_that_was_not_reset_is_noticed(pool: Pool) -> None:
    with pool.lend("the first test") as database, pytest.raises(AssertionError, match="the first test"):
        database.lend("the second test")
