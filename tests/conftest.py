"""One private PostgreSQL per test process, and a database of its own for every test.

server    the running server (session); BARTLEBY_PG_BIN chooses another PostgreSQL
template  the name of a database with the SQL core in it, installed once (session)
dsn       a fresh copy of the template, dropped afterwards
conn      an autocommit connection to it
connect   opens more connections to it, and closes them all at the end
"""

import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import dev

Connection = psycopg.Connection[tuple[Any, ...]]

INSTALL = Path(dev.__file__).parent / "sql" / "install.sql"
SETTINGS = {
    "fsync": "off",
    "max_connections": "200",
    "max_prepared_transactions": "50",
    "shared_buffers": "256MB",
}
NUMBERS = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin"):
        return
    for item in items:
        if item.get_closest_marker("pgbouncer"):
            item.add_marker(pytest.mark.skip(reason="there is no pgbouncer on this machine"))


@pytest.fixture(scope="session")
def server() -> Iterator[dev.Server]:
    # Not pytest's tmp_path: as root the server runs as somebody else, who cannot pass through it.
    folder = Path(tempfile.mkdtemp(prefix="bartleby-test-"))
    try:
        with dev.start(folder, settings=SETTINGS) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def admin(server: dev.Server) -> Iterator[Connection]:
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture(scope="session")
def template(server: dev.Server, admin: Connection) -> str:
    name = "bartleby_template"
    admin.execute(f"create database {name}".encode())
    install(database_dsn(server, name))
    return name


@pytest.fixture
def dsn(server: dev.Server, admin: Connection, template: str) -> Iterator[str]:
    name = f"test_{next(NUMBERS)}"
    admin.execute(f"create database {name} template {template}".encode())
    yield database_dsn(server, name)
    admin.execute(f"drop database {name} with (force)".encode())


@pytest.fixture
def connect(dsn: str) -> Iterator[Callable[..., Connection]]:
    with contextlib.ExitStack() as opened:

        def open_one(*, autocommit: bool = True, **parameters: str) -> Connection:
            connection = psycopg.connect(dsn, autocommit=autocommit, **parameters)  # type: ignore[arg-type]
            opened.callback(connection.close)
            return connection

        yield open_one


@pytest.fixture
def conn(connect: Callable[..., Connection]) -> Connection:
    return connect()


def database_dsn(server: dev.Server, name: str) -> str:
    return f"{server.dsn.rpartition('/')[0]}/{name}"


def install(dsn: str) -> None:
    """Install the SQL core as somebody with nothing but psql would; through Python where there is no psql."""
    psql = shutil.which("psql", path=dev.find_binaries()) or shutil.which("psql")
    if psql is None:
        from bartleby import schema

        with psycopg.connect(dsn, autocommit=True) as connection:
            schema.install(connection)
        return
    command = [psql, "-X", "-q", "-1", "-v", "ON_ERROR_STOP=1", "-f", str(INSTALL), dsn]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"install.sql failed:\n{done.stderr}"
