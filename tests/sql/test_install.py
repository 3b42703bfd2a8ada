"""Installing twice changes nothing, removing leaves nothing, and nobody needs to be a superuser."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from bartleby import dev
from tests.kit.sql import (
    ROLES,
    SQL,
    Connect,
    Connection,
    ack,
    claim,
    column,
    create,
    drain,
    fail_all,
    psql,
    rows,
    send,
    send_count,
    snapshot_of_everything,
    value,
)

INSTALL = SQL / "install.sql"
UNINSTALL = SQL / "uninstall.sql"


@pytest.fixture(scope="module")
def lonely_server(scratch: Path) -> Iterator[dev.Server]:
    """A cluster of its own, since roles belong to a cluster and not to a database."""
    folder = Path(tempfile.mkdtemp(prefix="bartleby-test-", dir=scratch))
    try:
        with dev.start(folder, settings={"fsync": "off"}) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def lonely(lonely_server: dev.Server) -> Iterator[Connection]:
    """A superuser in a cluster where nothing is installed."""
    with psycopg.connect(lonely_server.dsn, autocommit=True) as conn:
        yield conn
        for database in column(conn, "select datname from pg_database where datname ~ '^shop'"):
            conn.execute(f"drop database {database} with (force)".encode())
        for role in column(conn, "select rolname from pg_roles where rolname ~ '^(bartleby_|person_)'"):
            conn.execute(f"drop role {role}".encode())


def database(conn: Connection, name: str, owner: str = "postgres", password: str | None = None) -> str:
    conn.execute(f"create database {name} owner {owner}".encode())
    return address(conn, name, owner, password or conn.info.password)


def address(conn: Connection, name: str, user: str, password: str) -> str:
    """Only what every psql understands: the libpq of the tests may be newer."""
    return f"postgresql://{user}:{password}@{conn.info.host}:{conn.info.port}/{name}"


def roles(conn: Connection) -> list[str]:
    return column(conn, "select rolname from pg_roles where rolname ~ '^bartleby_' order by 1")


def test_installing_again_loses_nothing(dsn: str, conn: Connection) -> None:
    create(conn, max_attempts=7)
    send_count(conn, 5)
    fail_all(conn, claim(conn, 2), verdict="dead")
    before = snapshot_of_everything(conn)
    again = psql(dsn, file=INSTALL)
    assert (again.returncode, again.stderr) == (0, "")
    assert snapshot_of_everything(conn) == before
    assert rows(conn, "select * from bartleby.drift()") == []
    assert len(drain(conn)) == 3


def test_installing_again_repairs_what_has_drifted(dsn: str, conn: Connection) -> None:
    conn.execute("drop index bartleby.lease_id_key")
    conn.execute("drop view bartleby.attempts")
    conn.execute("grant execute on function bartleby.reap() to public")
    assert len(rows(conn, "select * from bartleby.drift()")) == 3
    assert psql(dsn, file=INSTALL).returncode == 0
    assert rows(conn, "select * from bartleby.drift()") == []
    assert value(conn, "select has_function_privilege('public', 'bartleby.reap()', 'execute')") is False


def test_a_schema_that_somebody_else_made_is_refused(dsn: str, conn: Connection) -> None:
    conn.execute("drop schema bartleby cascade")
    conn.execute("create role stranger_of_the_schema")
    try:
        conn.execute("create schema bartleby authorization stranger_of_the_schema")
        done = psql(dsn, file=INSTALL)
        assert done.returncode != 0
        assert "belongs to another user" in done.stderr
        assert rows(conn, "select from pg_class where relnamespace = 'bartleby'::regnamespace") == []
    finally:
        conn.execute("drop schema bartleby cascade")
        conn.execute("drop role stranger_of_the_schema")


def test_another_version_is_refused_and_left_alone(dsn: str, conn: Connection) -> None:
    create(conn)
    conn.execute("update bartleby.installation set version = '0.0.9'")
    refusal = psql(dsn, file=INSTALL)
    assert refusal.returncode == 3
    assert "ZB010" in refusal.stderr
    assert "0.0.9" in refusal.stderr
    assert value(conn, "select bartleby.version()") == "0.0.9"
    assert send(conn, 1) > 0


def test_installing_while_workers_run_waits_for_nobody_for_long(dsn: str, connect: Connect) -> None:
    conn = connect()
    create(conn)
    send_count(conn, 3)
    worker = connect(autocommit=False)
    claimed = claim(worker, 2)
    worker.commit()
    assert psql(dsn, file=INSTALL).returncode == 0
    assert ack(worker, claimed.lease) == 2
    worker.commit()


def test_removing_leaves_nothing(lonely: Connection) -> None:
    target = database(lonely, "shop")
    with psycopg.connect(target, autocommit=True) as conn:
        before = objects(conn)
        assert psql(target, file=INSTALL).returncode == 0
        create(conn, "a")
        create(conn, "b", dead_letter_to="a")
        send_count(conn, 3, "b")
        fail_all(conn, claim(conn, 2, "b"), verdict="dead")
        gone = psql(target, file=UNINSTALL)
        assert gone.returncode == 0, gone.stderr
        assert objects(conn) == before
        assert roles(conn) == []


def objects(conn: Connection) -> list[str]:
    """Every object that is not PostgreSQL's own, by all the catalogs that could know one."""
    return column(
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


def test_removing_keeps_roles_that_another_database_uses_and_says_so(lonely: Connection) -> None:
    one, two = database(lonely, "shop_one"), database(lonely, "shop_two")
    for target in (one, two):
        assert psql(target, file=INSTALL).returncode == 0
    gone = psql(one, file=UNINSTALL)
    assert gone.returncode == 0
    for role in ROLES:
        assert f"role {role} is kept" in gone.stderr
    assert roles(lonely) == sorted(ROLES)
    with psycopg.connect(two, autocommit=True) as conn:
        create(conn)
        conn.execute("set role bartleby_producer")
        assert send(conn, 1) > 0
    assert psql(two, file=UNINSTALL).returncode == 0
    assert roles(lonely) == []


def test_removing_what_is_not_there_is_harmless(lonely: Connection) -> None:
    assert psql(database(lonely, "shop"), file=UNINSTALL).returncode == 0
    assert roles(lonely) == []


def test_an_owner_of_a_database_who_may_create_roles_needs_no_superuser(lonely: Connection) -> None:
    lonely.execute("create role person_a login createrole password 'secret'")
    target = database(lonely, "shop", "person_a", "secret")
    done = psql(target, file=INSTALL)
    assert (done.returncode, done.stderr) == (0, "")
    assert roles(lonely) == sorted(ROLES)
    lonely.execute("create role person_b login password 'secret'")
    with psycopg.connect(target, autocommit=True) as conn:
        conn.execute("grant bartleby_producer to person_b")
        create(conn)
        assert_it_works(conn)
    with psycopg.connect(address(lonely, "shop", "person_b", "secret"), autocommit=True) as conn:
        assert send(conn, 1) > 0
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            claim(conn)
    again = psql(target, file=INSTALL)
    assert (again.returncode, again.stderr) == (0, "")
    assert psql(target, file=UNINSTALL).returncode == 0
    assert roles(lonely) == []


def test_create_on_the_database_is_enough(lonely: Connection) -> None:
    lonely.execute("create role person_a login createrole password 'secret'")
    database(lonely, "shop")
    lonely.execute("grant create on database shop to person_a")
    target = address(lonely, "shop", "person_a", "secret")
    done = psql(target, file=INSTALL)
    assert (done.returncode, done.stderr) == (0, "")
    with psycopg.connect(target, autocommit=True) as conn:
        create(conn)
        assert_it_works(conn)


def test_who_may_not_create_roles_is_warned_and_can_work_alone(lonely: Connection) -> None:
    lonely.execute("create role person_a login password 'secret'")
    target = database(lonely, "shop", "person_a", "secret")
    done = psql(target, file=INSTALL)
    assert done.returncode == 0, done.stderr
    assert "WARNING" in done.stderr
    assert roles(lonely) == []
    with psycopg.connect(target, autocommit=True) as conn:
        assert rows(conn, "select * from bartleby.drift()") == []
        create(conn)
        assert_it_works(conn)
    assert psql(target, file=UNINSTALL).returncode == 0


def test_roles_that_an_administrator_creates_later_get_their_rights_by_installing_again(
    lonely: Connection,
) -> None:
    lonely.execute("create role person_a login password 'secret'")
    target = database(lonely, "shop", "person_a", "secret")
    assert "WARNING" in psql(target, file=INSTALL).stderr
    for role in ROLES:
        lonely.execute(f"create role {role} nologin".encode())
    again = psql(target, file=INSTALL)
    assert (again.returncode, again.stderr) == (0, "")
    with psycopg.connect(target, autocommit=True) as conn:
        assert value(conn, "select has_function_privilege('bartleby_worker', 'bartleby.reap()', 'execute')")
        kept = psql(target, file=UNINSTALL)
    assert kept.returncode == 0
    assert "is kept" in kept.stderr


def assert_it_works(conn: Connection) -> None:
    send_count(conn, 3)
    fail_all(conn, claim(conn, 2), verdict="dead")
    assert drain(conn) == [3]
    assert value(conn, "select count(*) from bartleby.dead_letters") == 2
    assert value(conn, "select bartleby.turn(0)").startswith("writing to")
    assert rows(conn, "select * from bartleby.reap()") == []
