"""One connection of a worker. It reconnects by itself, and no statement outlasts its deadline.

A pool serves many callers and hides which connection they got; a worker wants few connections whose failures it sees.
Keepalives of TCP do not notice a server that hangs behind a living proxy, so the deadline is ours: when it passes the
socket is shut, which ends the statement at once.
"""

import asyncio
import contextlib
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any, LiteralString, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict

from bartleby import telemetry
from bartleby.answers import Row
from bartleby.calls import Call
from bartleby.config import Settings
from bartleby.errors import translated
from bartleby.pooling import AsyncPooled, async_rows

T = TypeVar("T")

_HELD_UP = 0.5
_CAREFUL = 60.0

# After these the same connection would give the same answer: a standby, or a server that is going.
_LEAVE = ("25006", "57P01", "57P02", "57P03", "08")


def passing(error: BaseException) -> bool:
    """Return whether this is trouble of the database or of the way to it, which trying again may outlast."""
    if isinstance(error, psycopg.Error):
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) or (
            error.sqlstate or ""
        ).startswith(_LEAVE)
    return isinstance(error, OSError)


def _is_trouble(error: BaseException) -> bool:
    # of the server or the way to it: not a deadlock, nor a statement that took too long
    sqlstate = error.sqlstate if isinstance(error, psycopg.Error) else None
    return passing(error) and (sqlstate is None or sqlstate.startswith((*_LEAVE, "53")))


class _Wire(AsyncPooled):
    """A connection that asks nobody when a statement is cancelled."""

    async def cancel_safe(self, *, timeout: float = 0.0) -> None:  # noqa: ARG002, ASYNC109 - as psycopg calls it
        """Shut it: to ask the server would take seconds if that hangs, and it notices by itself that we have gone."""
        shut(self)


class Link:
    """A connection that is made when it is needed and left when it fails; calls run one after another."""

    def __init__(self, settings: Settings, name: str, *, deadline: float = 10.0) -> None:
        self._settings = settings.with_database()
        self._name = name
        self.deadline = deadline
        self._turn = asyncio.Lock()
        self._connection: AsyncPooled | None = None
        self._away_since: float | None = None
        self._silent = False
        self.troubled_at = -math.inf
        """When the database could not be used last, by the monotonic clock."""
        self._careful_until = -math.inf

    async def run(self, call: Call[T]) -> T:
        """Run one call in a transaction of its own. If that fails, the next one gets a new connection."""
        async with self._turn:
            with self._telling():
                connection = await self._connected()
                careful = time.monotonic() < self._careful_until
                text = call.text if careful else call.relaxed or call.text
                with translated(), self._leaving(connection):
                    if connection.isolation_level is None:
                        return call.parse(await async_rows(connection, text, call.parameters))
                    async with connection.transaction():
                        return call.parse(await async_rows(connection, text, call.parameters))

    def be_careful(self) -> None:
        """For a minute, let every call wait for the disk.

        A crash of the server undoes a claim that does not, and no trace would be left of the message whose handler
        crashes the server each time.
        """
        self._careful_until = time.monotonic() + _CAREFUL

    async def listen(self, channels: Iterable[str], seconds: float) -> list[str]:
        """Listen on these channels; return those that were heard of, at the first news or when time is up."""
        async with self._turn:
            with self._telling():
                connection = await self._connected()
            with self._leaving(connection, seconds):
                listening = {row[0] for row in await _ask(connection, "select pg_listening_channels()")}
                for channel in sorted(set(channels) - listening):
                    # a channel is a name, not a value; the core makes it of letters and a number
                    await connection.execute(psycopg.sql.SQL("listen {}").format(psycopg.sql.Identifier(channel)))
                if set(channels) - listening:
                    return list(channels)  # what was sent before we listened was not heard
                return [notify.channel async for notify in connection.notifies(timeout=seconds, stop_after=1)]

    async def behind_pooler(self) -> bool:
        """Return whether something like pgbouncer stands between: then nothing is heard on a channel."""
        async with self._turn:
            return (await self._connected()).prepare_threshold is None

    @property
    def connected(self) -> bool:
        """Whether there is a connection; it may not be known yet that it is lost."""
        return self._connection is not None and not self._connection.closed

    @property
    def busy(self) -> bool:
        """Whether something runs here."""
        return self._turn.locked()

    def abort(self) -> None:
        """Let whatever runs here fail now, and say nothing of it."""
        self._silent = True
        if self._connection is not None and self._turn.locked():
            shut(self._connection)

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _connected(self) -> AsyncPooled:
        if self._connection is None or self._connection.closed:
            try:
                async with asyncio.timeout(self.deadline):
                    connection = await _Wire.connect(self._settings.dsn or "", autocommit=True, **self._options())
            except TimeoutError:
                raise psycopg.errors.ConnectionTimeout(f"no connection within {self.deadline:g} s") from None
            with self._leaving(connection):
                await AsyncPooled.configure(connection)
                await _notice_our_going(connection)
            self._connection = connection
        return self._connection

    def _options(self) -> dict[str, Any]:
        given = conninfo_to_dict(self._settings.dsn or "")
        wanted = {
            "application_name": f"bartleby {self._name}",
            "connect_timeout": math.ceil(self._settings.connect_timeout),
            "target_session_attrs": "read-write",
            "tcp_user_timeout": math.ceil(self.deadline * 1000),
        }
        return {name: value for name, value in wanted.items() if name not in given}

    @contextlib.contextmanager
    def _leaving(self, connection: AsyncPooled, extra: float = 0.0) -> Iterator[None]:
        limit = self.deadline + extra
        deadline = _Deadline(connection, limit)
        began = time.monotonic()
        try:
            yield
        except psycopg.Error as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                # psycopg loses the cancellation when the statement fails while it is being cancelled
                self._leave(connection)
                raise asyncio.CancelledError from error
            if connection.broken and time.monotonic() - began >= limit:
                self._leave(connection)
                raise psycopg.errors.ConnectionTimeout(f"no answer within {limit:g} s") from error
            if connection.broken or (error.sqlstate or "").startswith(_LEAVE):
                self._leave(connection)
            raise
        except BaseException:
            # cancelled half-way: whatever state it is in, it is not ours to find out
            self._leave(connection)
            raise
        finally:
            deadline.cancel()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        # once when it goes and once when it is back, however often it was tried in between
        try:
            yield
        except (psycopg.Error, OSError) as error:
            if _is_trouble(error):
                self.troubled_at = time.monotonic()
                self.be_careful()
            if passing(error) and self._away_since is None and not self._silent:
                self._away_since = time.monotonic()
                telemetry.warning("database.away", _sentence(error), connection=self._name)
            raise
        if self._away_since is not None:
            seconds = time.monotonic() - self._away_since
            self._away_since = None
            telemetry.event("database.back", f"the database answers again after {seconds:.1f} s", connection=self._name)

    def _leave(self, connection: AsyncPooled) -> None:
        connection.pgconn.finish()
        if self._connection is connection:
            self._connection = None


class _Deadline:
    """Shuts a connection when time is up. A loop that was held up gets a moment more: the answer may be there."""

    def __init__(self, connection: AsyncPooled, seconds: float) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._due, self._time_is_up)

    def cancel(self) -> None:
        """It was in time."""
        self._timer.cancel()

    def _time_is_up(self) -> None:
        if self._loop.time() - self._due > _HELD_UP:
            self._timer = self._loop.call_later(_HELD_UP, shut, self._connection)
        else:
            shut(self._connection)


def shut(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Let whatever waits for this connection fail now."""
    with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)


async def _notice_our_going(connection: AsyncPooled) -> None:
    # A statement that waits for a lock does not see that its client has gone; a claim that got its lock in the end
    # would lease messages to nobody. Behind a pooler the setting would go to somebody else.
    if connection.prepare_threshold is not None:
        with contextlib.suppress(psycopg.errors.InvalidParameterValue):  # not every system can tell
            await connection.execute("set client_connection_check_interval = '2s'")


def _sentence(error: BaseException) -> str:
    return f"the database cannot be used: {' '.join(str(error).split())}"


async def _ask(connection: AsyncPooled, text: LiteralString) -> list[Row]:
    return await async_rows(connection, text, ())
