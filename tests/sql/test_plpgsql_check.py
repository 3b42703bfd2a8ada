"""plpgsql_check, where the system has it: compiles every function against the tables, with pgmq beside them."""

import shutil
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import psycopg
import pytest

from bartleby import dev, schema
from tests.kit.sql import Connection, rows

FOUND = sorted(Path("/usr/lib/postgresql").glob("*/lib/plpgsql_check.so"))


@pytest.fixture
def checker(scratch: Path) -> Iterator[Connection]:
    if not FOUND:
        pytest.skip("the system has no plpgsql_check (Debian: postgresql-15-plpgsql-check)")
    folder = Path(tempfile.mkdtemp(prefix="bartleby-check-", dir=scratch))
    try:
        with (
            dev.start(folder, bin_dir=FOUND[-1].parent.parent / "bin") as server,
            psycopg.connect(server.dsn, autocommit=True) as conn,
        ):
            conn.execute((files("pgmq") / "sql" / "pgmq.sql").read_text().encode())
            schema.install(conn)
            conn.execute("create extension plpgsql_check")
            yield conn
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_no_function_has_an_error_that_only_shows_when_it_runs(checker: Connection) -> None:
    found = rows(
        checker,
        "select p.oid::regprocedure::text as function, c.message"
        " from pg_proc p join pg_language l on l.oid = p.prolang and l.lanname = 'plpgsql'"
        " left join pg_trigger t on t.tgfoid = p.oid,"
        " lateral plpgsql_check_function_tb(p.oid, coalesce(t.tgrelid, 0), oldtable => t.tgoldtable,"
        "   newtable => t.tgnewtable) c"
        " where p.pronamespace = 'bartleby'::regnamespace and c.level in ('error', 'security')",
    )
    assert found == []
