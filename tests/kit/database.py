"""One private PostgreSQL per test process, and a database of its own for every test.

scratch   a directory for servers, fast and reachable for other accounts (session)
server    the running server (session); BARTLEBY_PG_BIN chooses another PostgreSQL
template  the name of a database with the SQL core in it, installed once (session)
dsn       a fresh copy of the template, dropped afterwards
conn      an autocommit connection to it
connect   opens more connections to it, and closes them all at the end
wait_for  waits until something is so; is_waiting says whether a session of the database waits for a lock
"""

import base64
import contextlib
import hashlib
import hmac
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, settings

from bartleby import dev
from bench import pooler

# Whoever starts the tests in the background has Ctrl-C ignored, and so would have every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes is no property of what is tested, and four test processes share the machine.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

# What a worker of a test could not tell is nobody's evidence, unless the test says so.
os.environ.setdefault("BARTLEBY_SPOOL", "off")

Connection = psycopg.Connection[tuple[Any, ...]]

INSTALL = Path(dev.__file__).parent / "sql" / "install.sql"
SETTINGS = {
    "fsync": "off",
    "max_connections": "200",
    "max_prepared_transactions": "50",
    "shared_buffers": "256MB",
}
ENOUGH_MEMORY = 2 << 30
NUMBERS = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if pooler.program():
        return
    for item in items:
        if item.get_closest_marker("pgbouncer"):
            item.add_marker(pytest.mark.skip(reason="there is no pgbouncer on this machine"))


@pytest.fixture(scope="session")
def scratch() -> Path:
    """Where servers of tests live: in memory if there is plenty of it.

    ext4 avoids inodes it has just freed: a database after a dropped one costs 0.2 s there, 0.02 s in memory.
    Not pytest's tmp_path: as root the server runs as somebody else, who cannot pass through it.
    """
    memory = Path("/dev/shm")  # noqa: S108 - only directories that mkdtemp makes are used in it
    if os.access(memory, os.W_OK):
        state = os.statvfs(memory)
        if state.f_bavail * state.f_frsize >= ENOUGH_MEMORY and not state.f_flag & os.ST_NOEXEC:
            return memory
    return Path(tempfile.gettempdir())


@pytest.fixture(scope="session")
def server(scratch: Path) -> Iterator[dev.Server]:
    folder = Path(tempfile.mkdtemp(prefix="bartleby-test-", dir=scratch))
    try:
        with dev.start(folder, settings=SETTINGS) as running:
            cheapen_logins(running)
            switch_autovacuum(running, "off")
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def switch_autovacuum(server: dev.Server, state: str) -> None:
    """Let it come or not: it comes when it likes, and snapshots show its transactions, plans its statistics."""
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        conn.execute(f"alter system set autovacuum = {state}".encode())
        conn.execute("select pg_reload_conf()")


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
    # through the log, as is usual since PostgreSQL 15, it takes three times as long
    strategy = "strategy file_copy" if admin.info.server_version >= 150000 else ""
    admin.execute(f"create database {name} template {template} {strategy}".encode())
    yield database_dsn(server, name)
    wait_for_sessions_to_end(admin, name)
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


@pytest.fixture
def wait_for() -> Callable[[Callable[[], object]], None]:
    """Wait until something is so."""

    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.005)

    return wait


@pytest.fixture
def is_waiting(conn: Connection) -> Callable[[], bool]:
    """Whether a session of this database waits for a lock."""

    def look() -> bool:
        query = "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        return conn.execute(query).rowcount > 0

    return look


def cheapen_logins(server: dev.Server) -> None:
    """Store the same password with one round of hashing: of what a connection costs a test, 4096 rounds are most.

    Made here, as the setting for it is of PostgreSQL 16.
    """
    salt = os.urandom(16)
    salted = hashlib.pbkdf2_hmac("sha256", server.password.encode(), salt, 1)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    parts = [base64.b64encode(part).decode() for part in (salt, stored, hmac.digest(salted, b"Server Key", "sha256"))]
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("alter role postgres password 'SCRAM-SHA-256$1:{}${}:{}'".format(*parts).encode())


def wait_for_sessions_to_end(admin: Connection, name: str) -> None:
    # PostgreSQL looks again only after 100 ms if it finds one, and a closed session takes a few to go.
    deadline = time.monotonic() + 0.05
    query = "select from pg_stat_activity where datname = %s and backend_type = 'client backend'"
    while admin.execute(query, [name]).rowcount and time.monotonic() < deadline:
        time.sleep(0.001)


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
