"""Installing twice changes nothing, removing leaves nothing, and no superuser is needed."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from bartleby import dev, schema
from tests.kit import sql
from tests.kit.pgmq import SCRIPT as PGMQ
from tests.kit.refusals import assert_refused
from tests.kit.sql import Connect, Connection

INSTALL = sql.SQL / "install.sql"
UNINSTALL = sql.SQL / "uninstall.sql"
PLPGSQL_CHECK = sorted(Path("/usr/lib/postgresql").glob("*/lib/plpgsql_check.so"))
pytestmark = pytest.mark.own_database


def run(dsn: str, file: Path) -> str:
    """Run a file that must succeed; returns its warnings and notices."""
    done = sql.psql(dsn, file=file)
    assert done.returncode == 0, done.stderr
    return done.stderr


@contextmanager
def own_server(scratch: Path, bin_dir: Path | None = None) -> Iterator[dev.Server]:
    folder = Path(tempfile.mkdtemp(prefix="bartleby-test-", dir=scratch))
    try:
        with dev.start(folder, bin_dir=bin_dir, settings={"fsync": "off"}) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def empty_server(scratch: Path) -> Iterator[dev.Server]:
    """A cluster of its own, because roles belong to a cluster and not to a database."""
    with own_server(scratch) as running:
        yield running


@pytest.fixture
def superuser(empty_server: dev.Server) -> Iterator[Connection]:
    """A superuser in a cluster where nothing is installed."""
    with psycopg.connect(empty_server.dsn, autocommit=True) as conn:
        yield conn
        for database in sql.column(conn, "select datname from pg_database where datname ~ '^shop'"):
            conn.execute(f"drop database {database} with (force)".encode())
        for role in sql.column(conn, "select rolname from pg_roles where rolname ~ '^(bartleby_|person_)'"):
            conn.execute(f"drop role {role}".encode())


def database(conn: Connection, name: str = "shop", user: str = "postgres", owner: str | None = None) -> str:
    """Create a database; returns the address for that user, in the form that every psql understands."""
    conn.execute(f"create database {name} owner {owner or user}".encode())
    password = conn.info.password if user == "postgres" else "secret"
    return f"postgresql://{user}:{password}@{conn.info.host}:{conn.info.port}/{name}"


def roles(conn: Connection) -> list[str]:
    return sql.column(conn, "select rolname from pg_roles where rolname ~ '^bartleby_' order by 1")


def objects(conn: Connection) -> list[str]:
    """Every object that is not PostgreSQL's own, from every catalog that could list one."""
    return sql.column(
        conn,
        "select 'class ' || oid::regclass::text from pg_class"
        "   where oid >= 16384 and relnamespace <> 'pg_toast'::regnamespace"
        " union all select 'proc ' || oid::regprocedure from pg_proc where oid >= 16384"
        " union all select 'type ' || typname from pg_type where oid >= 16384"
        " union all select 'schema ' || nspname from pg_namespace where oid >= 16384"
        " union all select 'acl ' || defaclrole from pg_default_acl"
        " union all select 'role ' || rolname from pg_roles where oid >= 16384"
        " union all select 'dependency of ' || classid::regclass from pg_depend where objid >= 16384"
        " union all select 'role dependency of ' || classid::regclass from pg_shdepend s"
        "   where s.dbid = (select oid from pg_database where datname = current_database())"
        " order by 1",
    )


def assert_it_works(conn: Connection) -> None:
    assert sql.rows(conn, "select * from bartleby.drift()") == []
    sql.create(conn)
    sql.send_count(conn, 3)
    sql.fail_all(conn, sql.claim(conn, 2), verdict="dead")
    assert sql.drain(conn) == [3]
    assert sql.value(conn, "select count(*) from bartleby.dead_letters") == 2
    assert sql.value(conn, "select bartleby.turn(0)").startswith("writing to")
    assert sql.rows(conn, "select * from bartleby.reap()") == []


def test_installing_again_loses_nothing_and_repairs_drift(dsn: str, conn: Connection, connect: Connect) -> None:
    sql.create(conn, max_attempts=7)
    sql.send_count(conn, 5)
    sql.fail_all(conn, sql.claim(conn, 2), verdict="dead")
    worker = connect(autocommit=False)
    claimed = sql.claim(worker, 2)
    worker.commit()
    before = sql.snapshot_of_everything(conn)
    assert run(dsn, INSTALL) == ""
    assert sql.snapshot_of_everything(conn) == before
    assert sql.ack(worker, claimed.lease) == 2
    worker.commit()
    assert len(sql.drain(conn)) == 1
    conn.execute("drop index bartleby.lease_id_key")
    conn.execute("drop view bartleby.attempts")
    conn.execute("grant execute on function bartleby.reap() to public")
    assert len(sql.rows(conn, "select * from bartleby.drift()")) == 3
    run(dsn, INSTALL)
    assert sql.rows(conn, "select * from bartleby.drift()") == []
    assert sql.value(conn, "select has_function_privilege('public', 'bartleby.reap()', 'execute')") is False


def test_another_version_or_schema_is_refused_and_left_alone(dsn: str, conn: Connection) -> None:
    sql.create(conn)
    conn.execute("update bartleby.installation set version = '0.0.9'")
    done = sql.psql(dsn, file=INSTALL)
    assert (done.returncode, "ZB010" in done.stderr, "0.0.9" in done.stderr) == (3, True, True), done.stderr
    assert (sql.value(conn, "select bartleby.version()"), sql.send(conn, 1) > 0) == ("0.0.9", True)
    conn.execute("drop schema bartleby cascade")
    conn.execute("create role stranger_of_the_schema")
    try:
        conn.execute("create schema bartleby authorization stranger_of_the_schema")
        done = sql.psql(dsn, file=INSTALL)
        assert (done.returncode, "belongs to another user" in done.stderr) == (3, True), done.stderr
        assert sql.rows(conn, "select from pg_class where relnamespace = 'bartleby'::regnamespace") == []
    finally:
        conn.execute("drop schema bartleby cascade")
        conn.execute("drop role stranger_of_the_schema")


def test_removing_leaves_nothing_but_roles_that_another_database_uses(superuser: Connection) -> None:
    one, two = database(superuser, "shop_one"), database(superuser, "shop_two")
    run(one, UNINSTALL)
    run(two, INSTALL)
    with psycopg.connect(one, autocommit=True) as conn:
        before = [each for each in objects(conn) if not each.startswith("role ")]
        run(one, INSTALL)
        sql.create(conn, "a")
        sql.create(conn, "b", dead_letter_to="a")
        sql.send_count(conn, 3, "b")
        sql.fail_all(conn, sql.claim(conn, 2, "b"), verdict="dead")
        notices = run(one, UNINSTALL)
        assert [each for each in objects(conn) if not each.startswith("role ")] == before
    assert [role for role in sql.ROLES if f"role {role} is kept" not in notices] == []
    assert roles(superuser) == sorted(sql.ROLES)
    with psycopg.connect(two, autocommit=True) as conn:
        sql.create(conn)
        conn.execute("set role bartleby_producer")
        assert sql.send(conn, 1) > 0
    run(two, UNINSTALL)
    assert roles(superuser) == []


@pytest.mark.parametrize("owner", ["person_a", "postgres"])
def test_user_that_may_create_roles_and_schemas_can_install(superuser: Connection, owner: str) -> None:
    superuser.execute("create role person_a login createrole password 'secret'")
    superuser.execute("create role person_b login password 'secret'")
    target = database(superuser, "shop", "person_a", owner)
    superuser.execute("grant create on database shop to person_a")
    assert run(target, INSTALL) == ""
    assert roles(superuser) == sorted(sql.ROLES)
    with psycopg.connect(target, autocommit=True) as conn:
        conn.execute("grant bartleby_producer to person_b")
        assert_it_works(conn)
    with psycopg.connect(target.replace("person_a", "person_b"), autocommit=True) as conn:
        assert sql.send(conn, 1) > 0
        assert_refused(conn, "42501", "denied", "select bartleby.claim('q', 'w')")
    assert run(target, INSTALL) == ""
    run(target, UNINSTALL)
    assert roles(superuser) == []


def test_user_that_may_not_create_roles_is_warned_and_works_alone(superuser: Connection) -> None:
    superuser.execute("create role person_a login password 'secret'")
    target = database(superuser, "shop", "person_a")
    assert "WARNING" in run(target, INSTALL)
    assert roles(superuser) == []
    with psycopg.connect(target, autocommit=True) as conn:
        assert_it_works(conn)
        for role in sql.ROLES:
            superuser.execute(f"create role {role} nologin".encode())
        assert run(target, INSTALL) == "", "roles that an administrator created get their rights now"
        assert sql.value(conn, "select has_function_privilege('bartleby_worker', 'bartleby.reap()', 'execute')")
    assert "is kept" in run(target, UNINSTALL)


@pytest.mark.skipif(not PLPGSQL_CHECK, reason="the system has no plpgsql_check (make plpgsql-check)")
def test_no_function_has_an_error_that_only_shows_when_it_runs(scratch: Path) -> None:
    """Every function is compiled against the tables, with pgmq beside them."""
    with (
        own_server(scratch, PLPGSQL_CHECK[-1].parent.parent / "bin") as server,
        psycopg.connect(server.dsn, autocommit=True) as conn,
    ):
        conn.execute(PGMQ.read_bytes())
        schema.install(conn)
        conn.execute("create extension plpgsql_check")
        query = (
            "select p.oid::regprocedure::text as function, c.message"
            " from pg_proc p join pg_language l on l.oid = p.prolang and l.lanname = 'plpgsql'"
            " left join pg_trigger t on t.tgfoid = p.oid,"
            " lateral plpgsql_check_function_tb(p.oid, coalesce(t.tgrelid, 0), oldtable => t.tgoldtable,"
            "   newtable => t.tgnewtable) c"
            " where p.pronamespace = 'bartleby'::regnamespace and c.level in ('error', 'security')"
        )
        assert sql.rows(conn, query) == []
