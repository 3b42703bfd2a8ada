"""The two ways to the database: one that looks and one that changes things, each as a role that can do no more.

A connection takes its role when it is made. Behind a pooler such as pgbouncer a setting of a session would go to
whoever gets the server's process next, so there each transaction takes the role, and leaves it at its end.

Where the roles do not exist (the installer could not create them) everything runs as the user of the DSN. Whoever may
not become bartleby_operator, and has none of its rights either, gets surfaces that only read.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, LiteralString

from psycopg import IsolationLevel
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import ConnectionPool

from bartleby.client import Client
from bartleby.config import Settings
from bartleby.errors import NoConnection
from bartleby.pooling import Pooled, pool_options, rows
from bartleby.surfaces.watchdog import Watchdog

READER, OPERATOR = "bartleby_reader", "bartleby_operator"
_READER_TIMEOUT, _OPERATOR_TIMEOUT = "10s", "60s"
_READER_SILENCE, _OPERATOR_SILENCE = 15.0, 180.0  # of a server that has not even stopped the statement
_PATIENCE = 3.0
_LOOK_AGAIN = 0.5

# bartleby.tokens is for operators alone: whoever may see it has what an operator has.
_STANDING: LiteralString = """
select r.oid is not null, coalesce(pg_has_role(session_user, r.oid, wanted.how), false),
  coalesce((select has_table_privilege(c.oid, 'select') from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where n.nspname = 'bartleby' and c.relname = 'tokens'), true)
from (select case when current_setting('server_version_num')::int < 160000 then 'MEMBER' else 'SET' end) wanted (how)
left join pg_roles r on r.rolname = %s
"""
_BECOME: LiteralString = "select set_config('role', %s, %s), set_config('statement_timeout', %s, %s)"
_LIMIT: LiteralString = "select set_config('statement_timeout', %s, %s)"


@dataclass(frozen=True, slots=True)
class Standing:
    """What the user of the DSN is to a role: whether it exists, they may become it, and have an operator's rights."""

    exists: bool
    becomes: bool
    operates: bool


class RoleClient(Client):
    """A client whose calls run as one role, and that says at once when the database is away."""

    def __init__(
        self, settings: Settings, program: str, role: str, timeout: str, silence: float, *, pooled: bool = False
    ) -> None:
        super().__init__(settings=settings)
        self._silence = silence
        self._watchdog = Watchdog()
        self._pooled = pooled
        self.role = role
        self._timeout = timeout
        self.standing: Standing | None = None
        self.others: tuple[RoleClient, ...] = ()
        self._program = program
        self._pool = self._new_pool()
        self._looking = threading.Lock()
        self._away: NoConnection | None = None
        self._looked_at = 0.0

    def close(self) -> None:
        """Close all connections. An application that is started once more, as in its tests, gets new ones."""
        pool, self._pool = self._pool, self._new_pool()
        pool.close()

    def _new_pool(self) -> ConnectionPool[Pooled]:
        return ConnectionPool(
            connection_class=Pooled,
            configure=self._configure,
            check=self._check,
            **_options(self._settings, self._program),
        )

    @contextmanager
    def _connected(self) -> Iterator[Pooled]:
        self._fail_at_once()
        with super()._connected() as connection, self._watchdog.within(connection, self._silence):
            yield connection

    @contextmanager
    def _begun(self, connection: Pooled) -> Iterator[None]:
        with connection.transaction():
            if connection.prepare_threshold is None:
                self._take_role(connection, for_transaction=True)
            yield

    def _check(self, connection: Pooled) -> None:
        with self._watchdog.within(connection, self._settings.connect_timeout):
            Pooled.check(connection)

    def _configure(self, connection: Pooled) -> None:
        with self._watchdog.within(connection, self._settings.connect_timeout):
            self._introduce(connection)

    def _introduce(self, connection: Pooled) -> None:
        Pooled.configure(connection)
        if self._pooled:
            connection.prepare_threshold = None
        for each in (self, *self.others):
            (found,) = rows(connection, _STANDING, (each.role,))
            each.standing = Standing(*found)
        if connection.prepare_threshold is None:
            # in a transaction of ours each call takes the role by itself
            connection.isolation_level = IsolationLevel.READ_COMMITTED
        else:
            self._take_role(connection, for_transaction=False)

    def _take_role(self, connection: Pooled, *, for_transaction: bool) -> None:
        if self.standing is not None and self.standing.becomes:
            rows(connection, _BECOME, (self.role, for_transaction, self._timeout, for_transaction))
        else:
            rows(connection, _LIMIT, (self._timeout, for_transaction))

    def _no_connection(self) -> NoConnection:
        error = self._reason()
        if error is None:
            return NoConnection.all_in_use(self._settings.max_connections, self._settings.connect_timeout)
        self._away, self._looked_at = error, time.monotonic()
        return error

    def _fail_at_once(self) -> None:
        # A pool makes everybody wait before it says that there is no server; one who looks is enough.
        if self._away is None or not self._looking.acquire(blocking=False):
            error = self._away
        else:
            try:
                error = self._looked()
            finally:
                self._looking.release()
        if error is not None:
            raise NoConnection(str(error), hint=error.hint)

    def _looked(self) -> NoConnection | None:
        if self._away is not None and time.monotonic() - self._looked_at >= _LOOK_AGAIN:
            self._away = self._reason()
            self._looked_at = time.monotonic()
        return self._away


@dataclass(frozen=True, slots=True)
class Pools:
    """Both ways to the database."""

    reader: RoleClient
    operating: RoleClient

    @classmethod
    def open(cls, settings: Settings, *, program: str, readers: int, operators: int, pooled: bool = False) -> "Pools":
        """Return both; nothing connects before it is used, so the database may be away.

        `program` is who the database says is connected.
        """
        patience = min(settings.connect_timeout, _PATIENCE)

        def client(role: str, connections: int, timeout: str, silence: float) -> RoleClient:
            sized = replace(settings, max_connections=connections, connect_timeout=patience)
            return RoleClient(sized, program, role, timeout, silence, pooled=pooled)

        reader = client(READER, readers, _READER_TIMEOUT, _READER_SILENCE)
        operating = client(OPERATOR, operators, _OPERATOR_TIMEOUT, _OPERATOR_SILENCE)
        reader.others = (operating,)  # whoever only looks is to know early that nothing can be changed
        return cls(reader, operating)

    @property
    def operator(self) -> RoleClient | None:
        """What changes things; None if it is known that nothing can be changed."""
        found = self.operating.standing
        if found is not None and found.exists and not found.becomes and not found.operates:
            return None
        return self.operating

    def connect(self) -> None:
        """Connect, so that it is known whether anything can be changed."""
        with self.reader.transaction():
            pass

    def close(self) -> None:
        """Close all connections."""
        self.reader.close()
        self.operating.close()


def _options(settings: Settings, program: str) -> dict[str, Any]:
    given = conninfo_to_dict(settings.dsn or "")
    wanted = {"application_name": f"bartleby {program}", "connect_timeout": 3, "tcp_user_timeout": 10_000}
    options = pool_options(settings)
    options["kwargs"] |= {name: value for name, value in wanted.items() if name not in given}
    # a pool that has given up tries again for the next request; one that still tries waits longer each time
    return {**options, "reconnect_timeout": settings.connect_timeout, "name": program}
