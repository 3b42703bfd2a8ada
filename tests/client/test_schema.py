"""The schema: installed twice, upgraded step by step in one transaction, checked for drift, and removed."""

import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from bartleby import Client, NotInstalled, VersionMismatch, __version__, dev, schema
from bartleby.surfaces.cli import cli
from tests.kit.worker import present

Conn = psycopg.Connection[tuple[Any, ...]]
EVERYTHING = """
select format('%s %s', kind, name) from (
  select 'schema' as kind, nspname::text as name from pg_namespace where nspname = 'bartleby'
  union all select 'relation', relname from pg_class where relnamespace = to_regnamespace('bartleby')
  union all select 'function', proname from pg_proc where pronamespace = to_regnamespace('bartleby')
  union all select 'type', typname from pg_type where typnamespace = to_regnamespace('bartleby')
) as found
"""


@pytest.fixture
def empty_dsn(server: dev.Server, admin: Conn) -> Iterator[str]:
    admin.execute("create database nothing_yet")
    yield f"{server.dsn.rpartition('/')[0]}/nothing_yet"
    admin.execute("drop database nothing_yet with (force)")


@pytest.fixture
def empty(empty_dsn: str) -> Iterator[Conn]:
    """A connection to a database with nothing in it."""
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        yield connection


class NextVersions:
    """A copy of the SQL files to which made-up later versions can be added."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "sql"
        shutil.copytree(Path(str(schema.SQL)), self.folder)

    def add(self, old: str, new: str, step: str, function: str = "") -> None:
        record = f"update bartleby.installation set version = '{new}'; delete from bartleby.manifest;"
        (self.folder / "upgrade" / f"{old}--{new}.sql").write_text(f"{step}\n{record}")
        tables = self.folder / "tables.sql"
        tables.write_text(tables.read_text().replace(f"'{old}'", f"'{new}'").replace(f"is {old}'", f"is {new}'"))
        views = self.folder / "views.sql"
        views.write_text(views.read_text() + function)


@pytest.fixture
def later(tmp_path: Path) -> NextVersions:
    return NextVersions(tmp_path)


GREET = "create or replace function bartleby.greet() returns text language sql as $$ select 'hello' $$;\n"


def function_exists(conn: Conn, name: str) -> bool:
    return conn.execute("select to_regproc(%s) is not null", [f"bartleby.{name}"]).fetchone() == (True,)


def has_column(conn: Conn, table: str, column: str) -> bool:
    query = "select from pg_attribute where attrelid = %s::regclass and attname = %s and not attisdropped"
    return conn.execute(query, [f"bartleby.{table}", column]).rowcount == 1


pytestmark = pytest.mark.own_database


def test_empty_database_has_no_version(empty: Conn) -> None:
    assert schema.installed_version(empty) is None
    with pytest.raises(NotInstalled, match="no schema of Bartleby") as caught:
        schema.upgrade(empty)
    assert caught.value.hint == "run: bartleby install"
    assert empty.execute(EVERYTHING.encode()).fetchall() == []
    with empty.transaction(force_rollback=True):
        schema.install(empty)
    assert schema.installed_version(empty) is None


def drift(conn: Conn) -> list[tuple[str, Any]]:
    found = conn.execute("select object, change from bartleby.drift()").fetchall()
    return [(str(name).replace(" bartleby.", " "), change) for name, change in found]


def test_chain_of_steps_changes_tables_and_functions_in_order(dsn: str, conn: Conn, later: NextVersions) -> None:
    later.add("0.1.0", "0.2.0", "alter table bartleby.queue add column colour text default 'red';")
    later.add("0.2.0", "0.10.0", "alter table bartleby.queue rename column colour to shade;", GREET)
    (later.folder / "upgrade" / "notes.sql").write_text("this is not a step")
    with Client(dsn) as client:
        client.create_queue("orders")
        sent = client.send("orders", 1)
        assert schema.upgrade(conn, later.folder, "0.10.0") == ["0.1.0--0.2.0.sql", "0.2.0--0.10.0.sql"]
        assert client.version() == "0.10.0"
        lease = present(client.claim("orders", "w"))
        assert [message.id for message in lease] == [sent]
        assert client.drift() == []
    assert conn.execute("select bartleby.greet()").fetchone() == ("hello",)
    assert conn.execute("select shade from bartleby.queue").fetchone() == ("red",)
    assert conn.execute("select count(*) from bartleby.installation").fetchone() == (1,)
    assert schema.upgrade(conn, later.folder, "0.10.0") == []
    # an older package does not touch a newer schema
    with pytest.raises(VersionMismatch, match=r"0\.10\.0 is installed here, and this is 0\.1\.0") as caught:
        schema.install(conn)
    assert caught.value.hint
    with pytest.raises(VersionMismatch):
        schema.upgrade(conn)
    assert schema.installed_version(conn) == "0.10.0"
    assert function_exists(conn, "greet")


def test_upgrade_that_is_impossible_changes_nothing(conn: Conn, later: NextVersions) -> None:
    later.add("0.1.0", "0.2.0", "alter table bartleby.queue add column colour text;", GREET)
    with pytest.raises(VersionMismatch) as older:
        schema.install(conn, later.folder)
    assert older.value.hint == "run: bartleby upgrade"
    missing = r"has Bartleby 0\.1\.0, and there is no way from there to 0\.3\.0"
    with pytest.raises(VersionMismatch, match=missing) as caught:
        schema.upgrade(conn, later.folder, "0.3.0")
    assert "version of the package" in (caught.value.hint or "")
    # an error in the second step or in the files after it
    later.add("0.2.0", "0.3.0", "select 1 / 0;")
    with pytest.raises(Exception, match="division by zero"):
        schema.upgrade(conn, later.folder, "0.3.0")
    later.add("0.2.0", "0.3.0", "select 1;", "select 1 / 0;")
    with pytest.raises(Exception, match="division by zero"):
        schema.upgrade(conn, later.folder, "0.3.0")
    # a step that does not record its version
    (later.folder / "upgrade" / "0.1.0--0.2.0.sql").write_text("alter table bartleby.queue add column colour text;")
    with pytest.raises(VersionMismatch):
        schema.upgrade(conn, later.folder, "0.2.0")
    assert schema.installed_version(conn) == "0.1.0"
    assert not has_column(conn, "queue", "colour")
    assert not function_exists(conn, "greet")
    assert drift(conn) == []


def test_concurrent_installations_and_upgrades_are_one(empty_dsn: str, later: NextVersions) -> None:
    later.add("0.1.0", "0.2.0", "alter table bartleby.queue add column colour text;", GREET)

    def install(_: int) -> list[str]:
        with psycopg.connect(empty_dsn, autocommit=True) as connection:
            schema.install(connection)
            return []

    def upgrade(_: int) -> list[str]:
        with psycopg.connect(empty_dsn, autocommit=True) as connection:
            return schema.upgrade(connection, later.folder, "0.2.0")

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(install, range(4))) == [[]] * 4
        assert sorted(threads.map(upgrade, range(4))) == [[], [], [], ["0.1.0--0.2.0.sql"]]


def test_drift_is_listed_and_installing_again_restores_all_but_tables(conn: Conn) -> None:
    assert drift(conn) == []
    conn.execute("create function bartleby.mine() returns int language sql as 'select 1'")
    conn.execute("drop index bartleby.deferred_due")
    conn.execute("alter function bartleby.ack(bigint, bigint[]) security invoker")
    conn.execute("drop view bartleby.attempts")
    conn.execute("alter table bartleby.queue add column colour text")
    assert drift(conn) == [
        ("function ack(bigint, bigint[])", "changed"),
        ("function mine()", "added"),
        ("index deferred_due", "missing"),
        ("table queue", "changed"),
        ("view attempts", "missing"),
    ]
    conn.execute("drop function bartleby.mine()")
    schema.install(conn)
    assert drift(conn) == [("table queue", "changed")]
    conn.execute("alter table bartleby.queue drop column colour")
    assert drift(conn) == []
    assert conn.execute("select prosecdef from pg_proc where proname = 'ack'").fetchone() == (True,)
    conn.execute("create or replace function bartleby.version() returns text language sql as 'select ''0.1.0'''")
    assert drift(conn) == [("function version()", "changed")]
    assert schema.upgrade(conn) == []
    assert drift(conn) == []


def test_printed_sql_installs_through_the_driver_and_through_psql(empty: Conn, empty_dsn: str) -> None:
    printed = CliRunner().invoke(cli, ["sql"])
    assert printed.exit_code == 0
    assert not re.search(r"^\\", printed.output, re.MULTILINE), "a command of psql"
    empty.execute(printed.output.encode())
    assert (schema.installed_version(empty), drift(empty)) == (__version__, [])
    psql = shutil.which("psql", path=dev.find_binaries()) or shutil.which("psql")
    if psql is None:
        pytest.skip("there is no psql on this machine")
    schema.uninstall(empty)
    command = [psql, "-X", "-q", "-1", "-v", "ON_ERROR_STOP=1", empty_dsn]
    done = subprocess.run(command, input=printed.output, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (schema.installed_version(empty), drift(empty)) == (__version__, [])


def test_upgrade_that_was_killed_half_way_can_be_run_again(
    conn: Conn,
    connect: Callable[..., Conn],
    later: NextVersions,
    wait_for: Callable[[Callable[[], object]], None],
    is_waiting: Callable[[], bool],
) -> None:
    later.add("0.1.0", "0.2.0", "alter table bartleby.queue add column colour text;", GREET)
    later.add("0.2.0", "0.3.0", "lock table bartleby.log in access exclusive mode;")
    blocker, victim = connect(autocommit=False), connect()
    blocker.execute("select from bartleby.log")
    caught: list[BaseException] = []

    def upgrade() -> None:
        try:
            schema.upgrade(victim, later.folder, "0.3.0")
        except psycopg.Error as error:
            caught.append(error)

    thread = threading.Thread(target=upgrade)
    thread.start()
    wait_for(is_waiting)
    conn.execute("select pg_terminate_backend(%s, 5000)", [victim.info.backend_pid])
    thread.join()
    blocker.rollback()
    assert isinstance(caught[0], psycopg.OperationalError)
    assert schema.installed_version(conn) == "0.1.0"
    assert not has_column(conn, "queue", "colour")
    assert schema.upgrade(conn, later.folder, "0.3.0") == ["0.1.0--0.2.0.sql", "0.2.0--0.3.0.sql"]
    assert drift(conn) == []
