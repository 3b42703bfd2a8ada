"""The schema is upgraded step by step in one transaction. tests/sql/test_install.py has its installation."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import Client, VersionMismatch, dev, schema
from tests.kit.sql import Connect, waiting
from tests.kit.worker import present

Conn = psycopg.Connection[tuple[Any, ...]]
GREET = "create or replace function bartleby.greet() returns text language sql as $$ select 'hello' $$;\n"

pytestmark = pytest.mark.own_database


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


@pytest.fixture
def empty_dsn(server: dev.Server, admin: Conn) -> Iterator[str]:
    admin.execute("create database nothing_yet")
    yield f"{server.dsn.rpartition('/')[0]}/nothing_yet"
    admin.execute("drop database nothing_yet with (force)")


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
    # installing again and upgrading to the same version restore what was changed by hand
    conn.execute("drop function bartleby.greet()")
    assert schema.upgrade(conn, later.folder, "0.10.0") == []
    # an older package does not touch a newer schema
    with pytest.raises(VersionMismatch, match=r"0\.10\.0 is installed here, and this is 0\.1\.0") as caught:
        schema.install(conn)
    assert caught.value.hint
    with pytest.raises(VersionMismatch):
        schema.upgrade(conn)
    assert schema.installed_version(conn) == "0.10.0"
    assert conn.execute("select bartleby.greet()").fetchone() == ("hello",)


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
    assert conn.execute("select * from bartleby.drift()").fetchall() == [], (
        "neither the column nor the function is there"
    )


def test_upgrade_waits_for_an_open_sender_and_keeps_its_message(
    dsn: str, conn: Conn, connect: Connect, later: NextVersions
) -> None:
    later.add("0.1.0", "0.2.0", "alter table bartleby.log add column colour text;", GREET)
    sender = connect(autocommit=False)

    def upgrade(upgrader: Conn) -> list[str]:
        return schema.upgrade(upgrader, later.folder, "0.2.0")

    with Client(dsn) as client:
        client.create_queue("orders")
        sent = client.using(sender).send("orders", 1)
        with waiting(conn, connect(), upgrade, for_whom=sender) as upgraded:
            sender.commit()
        assert upgraded.result() == ["0.1.0--0.2.0.sql"]
        assert [message.id for message in present(client.claim("orders", "w"))] == [sent]


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
