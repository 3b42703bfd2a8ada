"""Which database a command speaks to, the one that was named or else the embedded PostgreSQL; and in whose name."""

import contextlib
import fcntl
import math
import random
import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from bartleby.client import Client
from bartleby.config import Settings
from bartleby.link import shut
from bartleby.operations import Operator
from bartleby.surfaces.cli.confirming import actor_of
from bartleby.version import __version__

if TYPE_CHECKING:
    from bartleby import dev

_LONGEST_PAUSE, _AGAIN = 1.0, 60.0
# what a server says that is there, and will soon say no more
_FOR_NOW = re.compile("too many|slots are reserved|read-only|hot standby")
# what is said before anybody is let in, and will be said again
_FOR_EVER = re.compile("does not support SSL|certificate")


@contextmanager
def database(given: str | None) -> Iterator[str]:
    """Yield a DSN; where none is configured, of the embedded server with the schema in it."""
    dsn = Settings.load(dsn=given).dsn
    if dsn:
        yield dsn
        return
    with embedded() as server:
        if server.started:
            where = f"the embedded PostgreSQL in {server.directory} (see `bartleby dev`)"
            click.echo(f"no --dsn and no BARTLEBY_DSN: using {where}", err=True)
        yield server.dsn


@contextmanager
def embedded() -> Iterator["dev.Server"]:
    """Yield the embedded server. Commands share it, and the last to leave stops it if one of them started it."""
    from bartleby import dev

    with contextlib.ExitStack() as held:
        server = dev.start()
        users = held.enter_context((server.directory / "users").open("a"))
        fcntl.flock(users, fcntl.LOCK_SH)
        while not server.started and dev.running() is None:  # the last one left while we waited
            server = dev.start()
        ours = server.directory / "stop-when-unused"
        if server.started:
            ours.touch()
        try:
            prepare(server.dsn)
            yield server
        finally:
            fcntl.flock(users, fcntl.LOCK_UN)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if ours.exists():
                    ours.unlink()
                    server.stop()


@contextmanager
def client(given: str | None) -> Iterator[Client]:
    """Yield a client of that database, or fail at once: a client by itself waits for its server."""
    import psycopg

    with database(given) as dsn:
        settings = Settings.load(dsn=dsn)
        psycopg.connect(dsn, connect_timeout=math.ceil(settings.connect_timeout)).close()
        with Client(settings=settings) as opened:
            yield opened


@contextmanager
def patient_client(dsn: str) -> Iterator[Client]:
    """Yield a client as soon as the database can be reached: for what is to run for long."""
    wait_for(dsn)
    with client(dsn) as opened:
        yield opened


def wait_for(dsn: str) -> None:
    """Return when the database answers, be it after an outage; raise what waiting does not mend."""
    from bartleby import telemetry

    began, told = time.monotonic(), -math.inf
    pause, refusal = 0.1, ""
    while (trouble := _trouble(dsn)) is not None:
        if str(trouble) == refusal:  # twice: the server may have come between the first one and the look at it
            raise trouble
        refusal = str(trouble) if _turned_away(dsn, trouble) else ""
        if not refusal and time.monotonic() > told + _AGAIN:
            told = time.monotonic()
            text = f"the database cannot be reached, and is waited for: {' '.join(str(trouble).split())}"
            telemetry.warning("database.away", text, connection="start")
        time.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - spreads load, no secret
        pause = min(_LONGEST_PAUSE, pause * 2)
    if told > 0:
        text = f"the database answers after {time.monotonic() - began:.1f} s"
        telemetry.event("database.back", text, connection="start")


class _Silent(Exception):
    """A pooler has let us in, and its server does not answer."""


def _trouble(dsn: str) -> Exception | None:
    import psycopg

    timeout = math.ceil(Settings.load(dsn=dsn).connect_timeout)
    try:
        connection = psycopg.connect(
            dsn, autocommit=True, connect_timeout=timeout, target_session_attrs="read-write", prepare_threshold=None
        )
    except psycopg.OperationalError as error:
        return error
    # Whoever is let in is not answered yet: a pooler knows its people by heart while its server is away.
    too_long = threading.Timer(timeout, shut, [connection])
    too_long.daemon = True
    too_long.start()
    try:
        with connection:
            connection.execute("select 1")
    except psycopg.OperationalError as error:
        return _Silent(str(error))
    finally:
        too_long.cancel()
    return None


def _turned_away(dsn: str, error: Exception) -> bool:
    # A connection that fails has no SQLSTATE. So the server is asked whether it takes any: if it does, it has something
    # against us, such as our password.
    from psycopg import errors, pq
    from psycopg.conninfo import make_conninfo

    if isinstance(error, errors.ConnectionTimeout | _Silent) or _FOR_NOW.search(str(error)):
        return False
    if _FOR_EVER.search(str(error)):
        return True
    return pq.PGconn.ping(make_conninfo(dsn, connect_timeout=2).encode()) in {pq.Ping.OK, pq.Ping.NO_ATTEMPT}


def operating(opened: Client, actor: str | None) -> Operator:
    """Return who does it, with an id that the lines of the audit about this command share."""
    return Operator(opened, actor_of(actor), request_id=f"cli-{uuid.uuid4().hex[:12]}")


def signed(operator: Operator, reason: str | None) -> dict[str, Any]:
    """Return who does a deed and why, as every call wants it."""
    return {"actor": operator.actor, "reason": reason, "request_id": operator.request_id}


def prepare(dsn: str) -> None:
    """Install the schema into the embedded server, or bring it to this version."""
    import psycopg

    from bartleby import schema

    with psycopg.connect(dsn, autocommit=True) as connection:
        installed = schema.installed_version(connection)
        if installed is None:
            schema.install(connection)
        elif installed != __version__:
            schema.upgrade(connection)
