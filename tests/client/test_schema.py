"""The schema: installed twice, upgraded step by step in one transaction, looked after, and removed without a trace."""

import re
import shutil
import subprocess
import tempfile
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

Conn = psycopg.Connection[tuple[Any, ...]]
Waiting = Callable[[Callable[[], object]], None]
EVERYTHING = """
select format('%s %s', kind, name) from (
  select 'schema' as kind, nspname::text as name from pg_namespace where nspname = 'bartleby'
  union all select 'relation', relname from pg_class where relnamespace = to_regnamespace('bartleby')
  union all select 'function', proname from pg_proc where pronamespace = to_regnamespace('bartleby')
  union all select 'type', typname from pg_type where typnamespace = to_regnamespace('bartleby')
) as found
"""
ROLES = "select rolname from pg_roles where rolname like 'bartleby\\_%' order by 1"


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


def test_installing_twice_loses_nothing(dsn: str, conn: Conn) -> None:
    with Client(dsn) as client:
        client.create_queue("orders", {"max_attempts": 3})
        sent = client.send("orders", 1)
        schema.install(conn)
        schema.install(conn)
        lease = client.claim("orders", "w")
        assert lease is not None
        assert [message.id for message in lease] == [sent]
        assert client.drift() == []
    assert schema.installed_version(conn) == __version__


def test_two_may_install_at_once(empty_dsn: str) -> None:
    def install(_: int) -> str | None:
        with psycopg.connect(empty_dsn, autocommit=True) as connection:
            schema.install(connection)
            return schema.installed_version(connection)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(install, range(4))) == [__version__] * 4


def test_an_empty_database_has_no_version(empty: Conn) -> None:
    assert schema.installed_version(empty) is None
    with pytest.raises(NotInstalled, match="no schema of Bartleby") as caught:
        schema.upgrade(empty)
    assert caught.value.hint == "run: bartleby install"
    assert empty.execute(EVERYTHING.encode()).fetchall() == []


def test_an_upgrade_to_what_is_there_takes_no_step_and_restores_functions(conn: Conn) -> None:
    conn.execute("create or replace function bartleby.version() returns text language sql as 'select ''0.1.0'''")
    assert drift(conn) == [("function version()", "changed")]
    assert schema.upgrade(conn) == []
    assert drift(conn) == []


def drift(conn: Conn) -> list[tuple[str, Any]]:
    found = conn.execute("select object, change from bartleby.drift()").fetchall()
    return [(str(name).replace(" bartleby.", " "), change) for name, change in found]


def test_a_step_changes_tables_and_brings_new_functions(dsn: str, conn: Conn, later: NextVersions) -> None:
    later.add("0.1.0", "0.2.0", "alter table bartleby.queue add column colour text default 'red';", GREET)
    with Client(dsn) as client:
        client.create_queue("orders")
        sent = client.send("orders", 1)
        assert schema.upgrade(conn, later.folder, "0.2.0") == ["0.1.0--0.2.0.sql"]
        assert client.version() == "0.2.0"
        lease = client.claim("orders", "w")
        assert lease is not None
        assert [message.id for message in lease] == [sent]
        assert client.drift() == []
    assert conn.execute("select bartleby.greet()").fetchone() == ("hello",)
    assert conn.execute("select colour from bartleby.queue").fetchone() == ("red",)
    assert conn.execute("select count(*) from bartleby.installation").fetchone() == (1,)
    assert schema.upgrade(conn, later.folder, "0.2.0") == []


def test_a_chain_of_steps_is_walked_in_order(conn: Conn, later: NextVersions) -> None:
    later.add("0.1.0", "0.2.0", "alter table bartleby.queue add column colour text;")
    later.add("0.2.0", "0.10.0", "alter table bartleby.queue rename column colour to shade;", GREET)
    (later.folder / "upgrade" / "notes.sql").write_text("this is not a step")
    assert schema.upgrade(conn, later.folder, "0.10.0") == ["0.1.0--0.2.0.sql", "0.2.0--0.10.0.sql"]
    assert schema.installed_version(conn) == "0.10.0"
    assert has_column(conn, "queue", "shade")
    assert not has_column(conn, "queue", "colour")


def test_a_step_that_does_not_record_its_version_is_refused(conn: Conn, later: NextVersions) -> None:
    later.add("0.1.0", "0.2.0", "")
    (later.folder / "upgrade" / "0.1.0--0.2.0.sql").write_text("alter table bartleby.queue add column colour text;")
    with pytest.raises(VersionMismatch):
        schema.upgrade(conn, later.folder, "0.2.0")
    assert schema.installed_version(conn) == "0.1.0"
    assert not has_column(conn, "queue", "colour")


def test_where_a_step_is_missing_nothing_is_done_and_the_remedy_is_named(conn: Conn, later: NextVersions) -> None:
    later.add("0.1.0", "0.2.0", "alter table bartleby.queue add column colour text;")
    with pytest.raises(
        VersionMismatch, match=r"has Bartleby 0\.1\.0, and there is no way from there to 0\.3\.0"
    ) as caught:
        schema.upgrade(conn, later.folder, "0.3.0")
    assert "version of the package" in (caught.value.hint or "")
    assert schema.installed_version(conn) == "0.1.0"
    assert not has_column(conn, "queue", "colour")


def test_an_older_package_does_not_touch_a_newer_schema(conn: Conn, later: NextVersions) -> None:
    later.add("0.1.0", "0.2.0", "select 1;", GREET)
    schema.upgrade(conn, later.folder, "0.2.0")
    with pytest.raises(VersionMismatch, match=r"0\.2\.0 is installed here, and this is 0\.1\.0") as caught:
        schema.install(conn)
    assert caught.value.hint
    with pytest.raises(VersionMismatch):
        schema.upgrade(conn)
    assert schema.installed_version(conn) == "0.2.0"
    assert function_exists(conn, "greet")


def test_an_installation_over_an_older_schema_says_upgrade(conn: Conn, later: NextVersions) -> None:
    later.add("0.1.0", "0.2.0", "select 1;", GREET)
    with pytest.raises(VersionMismatch) as caught:
        schema.install(conn, later.folder)
    assert caught.value.hint == "run: bartleby upgrade"
    assert not function_exists(conn, "greet")


@pytest.mark.parametrize("where", ["step", "files"])
def test_a_failure_in_the_middle_leaves_the_old_version(conn: Conn, later: NextVersions, where: str) -> None:
    later.add("0.1.0", "0.2.0", "alter table bartleby.queue add column colour text;", GREET)
    later.add("0.2.0", "0.3.0", "select 1 / 0;" if where == "step" else "select 1;", "select 1 / 0;")
    with pytest.raises(Exception, match="division by zero"):
        schema.upgrade(conn, later.folder, "0.3.0")
    assert schema.installed_version(conn) == "0.1.0"
    assert not has_column(conn, "queue", "colour")
    assert not function_exists(conn, "greet")
    assert drift(conn) == []


def test_an_upgrade_waits_for_an_open_sender_and_loses_nothing_of_it(
    dsn: str, connect: Callable[..., Conn], later: NextVersions, wait_for: Waiting, is_waiting: Callable[[], bool]
) -> None:
    later.add("0.1.0", "0.2.0", "alter table bartleby.log add column colour text;", GREET)
    sender, upgrader = connect(autocommit=False), connect()
    with Client(dsn) as client:
        client.create_queue("orders")
        sent = client.using(sender).send("orders", 1)
        steps: list[str] = []
        upgrade = threading.Thread(target=lambda: steps.extend(schema.upgrade(upgrader, later.folder, "0.2.0")))
        upgrade.start()
        wait_for(is_waiting)
        sender.commit()
        upgrade.join()
        assert steps == ["0.1.0--0.2.0.sql"]
        lease = client.claim("orders", "w")
        assert lease is not None
        assert [message.id for message in lease] == [sent]


def test_an_upgrade_that_was_killed_half_way_can_be_run_again(
    conn: Conn, connect: Callable[..., Conn], later: NextVersions, wait_for: Waiting, is_waiting: Callable[[], bool]
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


def test_two_upgrades_at_once_are_one(conn: Conn, connect: Callable[..., Conn], later: NextVersions) -> None:
    later.add("0.1.0", "0.2.0", "alter table bartleby.queue add column colour text;", GREET)
    connections = [connect() for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        steps = list(threads.map(lambda each: schema.upgrade(each, later.folder, "0.2.0"), connections))
    assert sorted(steps) == [[], [], ["0.1.0--0.2.0.sql"]]
    assert schema.installed_version(conn) == "0.2.0"


def test_what_was_changed_is_named_and_installing_again_restores_it(conn: Conn) -> None:
    assert drift(conn) == []
    conn.execute("create function bartleby.mine() returns int language sql as 'select 1'")
    conn.execute("drop index bartleby.deferred_due")
    conn.execute("alter function bartleby.ack(bigint, bigint[]) security invoker")
    conn.execute("drop view bartleby.attempts")
    assert drift(conn) == [
        ("function ack(bigint, bigint[])", "changed"),
        ("function mine()", "added"),
        ("index deferred_due", "missing"),
        ("view attempts", "missing"),
    ]
    conn.execute("drop function bartleby.mine()")
    schema.install(conn)
    assert drift(conn) == []
    assert conn.execute("select prosecdef from pg_proc where proname = 'ack'").fetchone() == (True,)


def test_a_changed_table_stays_drift_until_it_is_mended(conn: Conn) -> None:
    conn.execute("alter table bartleby.queue add column colour text")
    schema.install(conn)
    assert drift(conn) == [("table queue", "changed")]
    conn.execute("alter table bartleby.queue drop column colour")
    assert drift(conn) == []


def test_queues_are_no_drift(dsn: str, conn: Conn) -> None:
    with Client(dsn) as client:
        client.create_queue("orders")
        client.send("orders", 1)
        client.claim("orders", "w")
        assert client.drift() == []


def test_uninstalling_leaves_nothing(empty: Conn, empty_dsn: str, admin: Conn) -> None:
    before = admin.execute(ROLES.encode()).fetchall()
    schema.install(empty)
    with Client(empty_dsn) as client:
        client.create_queue("orders")
        client.send("orders", 1)
    schema.uninstall(empty)
    assert empty.execute(EVERYTHING.encode()).fetchall() == []
    # the roles are the cluster's: other databases of this server use them, so they are kept
    assert admin.execute(ROLES.encode()).fetchall() == before
    schema.uninstall(empty)
    schema.install(empty)
    assert schema.installed_version(empty) == __version__


def test_the_last_to_uninstall_takes_the_roles_along(scratch: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="bartleby-test-", dir=scratch))
    with dev.start(folder) as alone, psycopg.connect(alone.dsn, autocommit=True) as connection:
        schema.install(connection)
        assert connection.execute(ROLES.encode()).rowcount == 5
        schema.uninstall(connection)
        assert connection.execute(ROLES.encode()).rowcount == 0
        assert connection.execute(EVERYTHING.encode()).fetchall() == []
    shutil.rmtree(folder)


def printed() -> str:
    done = CliRunner().invoke(cli, ["sql"])
    assert done.exit_code == 0
    return done.output


def test_the_printed_sql_installs_through_the_driver(empty: Conn) -> None:
    empty.execute(printed().encode())
    assert schema.installed_version(empty) == __version__
    assert drift(empty) == []


def test_the_printed_sql_installs_through_psql(empty: Conn, empty_dsn: str) -> None:
    psql = shutil.which("psql", path=dev.find_binaries()) or shutil.which("psql")
    if psql is None:
        pytest.skip("there is no psql on this machine")
    command = [psql, "-X", "-q", "-1", "-v", "ON_ERROR_STOP=1", empty_dsn]
    done = subprocess.run(command, input=printed(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert schema.installed_version(empty) == __version__
    assert drift(empty) == []


def test_the_printed_sql_has_no_commands_of_psql() -> None:
    assert not re.search(r"^\\", printed(), re.MULTILINE)


def test_it_installs_inside_a_transaction_of_the_caller(empty: Conn) -> None:
    with empty.transaction(force_rollback=True):
        schema.install(empty)
    assert schema.installed_version(empty) is None
