"""One private PostgreSQL per test process, and a pool of databases that are reset between tests."""

import base64
import contextlib
import hashlib
import hmac
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from psycopg import sql
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from bartleby import dev
from bench import pooler
from tests.kit.pgmq import SCRIPT as PGMQ
from tests.kit.sinks.servers import own_share
from tests.kit.sql import PSQL, SQL, Connection, psql
from tests.kit.worker import until

# A shell starts background jobs with Ctrl-C ignored; every process that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes is no property of what is tested, and four test processes share the machine.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")
# Hypothesis also draws constants of the modules that are loaded. Then the examples would depend on the order of tests.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = partial(getattr, providers, "_local_constants")

# A server that is started again expects its port to be free.
dev._PORTS = own_share(dev._PORTS)

RESET = Path(__file__).with_name("reset.sql")
SETTINGS = {
    "fsync": "off",
    "max_connections": "200",
    "max_prepared_transactions": "50",
    "shared_buffers": "256MB",
}
# where JIT is on: whether any statement of the tests, or in a function that they call, was compiled
COUNTING = {
    "shared_preload_libraries": "pg_stat_statements",
    "pg_stat_statements.track": "all",
    "pg_stat_statements.max": "50000",
}
COMPILED = "select distinct left(query, 300) from pg_stat_statements where jit_functions > 0"
ENOUGH_MEMORY = 2 << 30
# what a session may have left behind; its plans and compiled functions are worth keeping
SESSION: tuple[LiteralString, ...] = (
    "set session authorization default",
    "reset all",
    "unlisten *",
    "select pg_advisory_unlock_all()",
    "discard temp",
    "discard sequences",
    "close all",
)
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
    Not pytest's tmp_path: under root the server runs as another user, which cannot enter it.
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
    counting = os.environ.get("BARTLEBY_EXPECT_JIT") == "True"
    try:
        with dev.start(folder, settings={**SETTINGS, **(COUNTING if counting else {})}) as running:
            cheapen_logins(running)
            switch_autovacuum(running, "off")
            yield running
            if counting:
                assert compiled(running) == [], "PostgreSQL compiled these: that takes longer than to run them"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compiled(server: dev.Server) -> list[str]:
    """Return the statements that were compiled since the start, with those in functions."""
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        conn.execute("create extension if not exists pg_stat_statements")
        return [query for (query,) in conn.execute(COMPILED)]


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


@pytest.fixture(scope="session")
def pgmq_template(server: dev.Server, admin: Connection) -> str:
    """A template with pgmq, for folders and modules whose `template` it is."""
    name = "bartleby_pgmq_template"
    admin.execute(f"create database {name}".encode())
    with psycopg.connect(database_dsn(server, name), autocommit=True) as conn:
        conn.execute(PGMQ.read_bytes())
    install(database_dsn(server, name))
    return name


@dataclass
class Database:
    """A database of the pool, and the connection that resets it, which tests use too."""

    name: str
    dsn: str
    admin: Connection
    structure: str = ""
    _conn: Connection | None = None

    @property
    def conn(self) -> Connection:
        if self._conn is None or self._conn.closed:
            self._conn = psycopg.connect(self.dsn, autocommit=True)
        return self._conn

    def prepare(self) -> None:
        """Install the means to reset it."""
        self.conn.execute(RESET.read_bytes())
        self.structure = self._structure()

    def lend(self, test: str) -> None:
        """Record the test that uses it, after checking that it was reset since the last use."""
        found = self.conn.execute("select test from test_kit.canary").fetchall()
        assert not found, f"{self.name} was not reset after {found}"
        self.conn.execute("insert into test_kit.canary values (%s)", [test])

    def reset(self) -> bool:
        """Restore the state after the installation; return False if the test changed the schema."""
        self._end_sessions()
        conn = self.conn
        conn.autocommit = True
        conn.row_factory = tuple_row
        conn.prepare_threshold = 5
        conn.isolation_level = conn.read_only = conn.deferrable = None
        conn._adapters = None
        conn._notice_handlers.clear()
        conn._notify_handlers.clear()
        for statement in SESSION:
            conn.execute(statement)
        if self._structure() != self.structure:
            return False
        conn.execute("select test_kit.reset()")
        return True

    def drop(self) -> None:
        if self._conn is not None:
            self._conn.close()
        wait_for_sessions_to_end(self.admin, self.name)
        self.admin.execute(f"drop database {self.name} with (force)".encode())

    def _structure(self) -> str:
        try:
            found = self.conn.execute("select test_kit.structure()").fetchone()
        except psycopg.Error:  # not even the schema is left
            return ""
        return "" if found is None else str(found[0])

    def _end_sessions(self) -> None:
        conn, kept = self._conn, -1
        if conn is not None and (conn.lock.locked() or conn.info.transaction_status != TransactionStatus.IDLE):
            conn.close()
        if conn is not None and not conn.closed:
            kept = conn.info.backend_pid
        wait_for_sessions_to_end(self.admin, self.name, kept)
        others = "select pg_terminate_backend(pid, 30000) from pg_stat_activity where datname = %s and pid <> %s"
        others += " and backend_type = 'client backend'"
        # looked for again, because one that ends by itself meanwhile cannot be told from one that does not end
        until(lambda: self.admin.execute(others, [self.name, kept]).rowcount == 0, what=f"the sessions of {self.name}")
        open_ones = "select gid from pg_prepared_xacts where database = %s"
        for (gid,) in self.admin.execute(open_ones, [self.name]).fetchall():
            self.conn.execute(sql.SQL("rollback prepared {}").format(gid))


class Pool:
    """Copies of one template; those not in use wait for the next test."""

    def __init__(self, server: dev.Server, admin: Connection, template: str) -> None:
        self._server, self._admin, self._template = server, admin, template
        self._free: list[Database] = []

    def copy(self) -> Database:
        name = f"test_{next(NUMBERS)}"
        # through the log, as is usual since PostgreSQL 15, it takes three times as long
        strategy = "strategy file_copy" if self._admin.info.server_version >= 150000 else ""
        self._admin.execute(f"create database {name} template {self._template} {strategy}".encode())
        return Database(name, database_dsn(self._server, name), self._admin)

    @contextlib.contextmanager
    def lend(self, test: str) -> Iterator[Database]:
        if self._free:
            lent = self._free.pop()
        else:
            lent = self.copy()
            lent.prepare()
        lent.lend(test)
        try:
            yield lent
        finally:
            if lent.reset():
                self._free.append(lent)
            else:
                lent.drop()

    def close(self) -> None:
        for database in self._free:
            database.drop()


@pytest.fixture(scope="session")
def database_pools(admin: Connection) -> Iterator[dict[str, Pool]]:
    """The pools of this process by template, because a folder may have a template of its own."""
    made: dict[str, Pool] = {}
    yield made
    for pool in made.values():
        pool.close()


@pytest.fixture
def pool(database_pools: dict[str, Pool], server: dev.Server, admin: Connection, template: str) -> Pool:
    if template not in database_pools:
        database_pools[template] = Pool(server, admin, template)
    return database_pools[template]


@pytest.fixture
def lent_database(pool: Pool, request: pytest.FixtureRequest) -> Iterator[Database]:
    # pgbouncer keeps sessions open, which the reset would cut
    if request.node.get_closest_marker("own_database") or request.node.get_closest_marker("pgbouncer"):
        made = pool.copy()
        yield made
        made.drop()
    else:
        with pool.lend(request.node.nodeid) as lent:
            yield lent


@pytest.fixture
def dsn(lent_database: Database) -> str:
    return lent_database.dsn


@pytest.fixture
def connect(dsn: str) -> Iterator[Callable[..., Connection]]:
    with contextlib.ExitStack() as opened:

        def open_one(*, autocommit: bool = True, **parameters: str) -> Connection:
            connection = psycopg.connect(dsn, autocommit=autocommit, **parameters)  # type: ignore[arg-type]
            opened.callback(connection.close)
            return connection

        yield open_one


@pytest.fixture
def conn(lent_database: Database) -> Connection:
    return lent_database.conn


@pytest.fixture
def is_waiting(conn: Connection) -> Callable[[], bool]:
    def look() -> bool:
        conn.execute("select pg_stat_clear_snapshot()")  # within a transaction the first look would be every look
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


def wait_for_sessions_to_end(admin: Connection, name: str, kept: int = -1) -> None:
    # PostgreSQL looks again only after 100 ms if it finds one, and a closed session takes a few to go.
    deadline = time.monotonic() + 0.05
    query = "select from pg_stat_activity where datname = %s and pid <> %s and backend_type = 'client backend'"
    while admin.execute(query, [name, kept]).rowcount and time.monotonic() < deadline:
        time.sleep(0.001)


def database_dsn(server: dev.Server, name: str) -> str:
    return f"{server.dsn.rpartition('/')[0]}/{name}"


def install(dsn: str) -> None:
    """Install the SQL core with psql alone; through Python where there is no psql."""
    if PSQL is None:
        from bartleby import schema

        with psycopg.connect(dsn, autocommit=True) as connection:
            schema.install(connection)
        return
    done = psql(dsn, file=SQL / "install.sql")
    assert done.returncode == 0, f"install.sql failed:\n{done.stderr}"
