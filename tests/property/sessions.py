"""Sessions of one database, and how to hold one of them at a certain point.

A session that has to be held in the middle of a SQL function is held by a gate: a small function of Bartleby is
replaced by one that first waits for an advisory lock, in sessions that ask for it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, LiteralString, Self

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.kit.clock import Clock, move_clock

Connection = psycopg.Connection[tuple[Any, ...]]
GATE = 4711

_FILLER: LiteralString = """
    select bartleby.send_many('q', jsonb_agg(jsonb_build_object('payload', repeat('x', 500))))
    from generate_series(1, 200)"""


@dataclass(slots=True)
class Sessions:
    """Sessions to one database with a queue `q`: an autocommit one to look and to lead, and more on demand."""

    dsn: str
    opened: list[Connection] = field(default_factory=list)
    main: Connection = field(init=False)
    clock: Clock = field(init=False)

    def __enter__(self) -> Self:
        self.main = self.open()
        self.clock = move_clock(self.main)
        self.main.execute('select bartleby.create_queue(\'q\', \'{"backoff": "none", "lease": 60}\')')
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for conn in self.opened:
            conn.close()

    def open(self) -> Connection:
        conn = psycopg.connect(self.dsn, autocommit=True)
        self.opened.append(conn)
        return conn

    def begin(self, mode: LiteralString = "") -> Connection:
        conn = self.open()
        conn.execute(b"begin " + mode.encode())
        return conn

    def wait_until_blocked(self, conn: Connection) -> None:
        """Wait until a session waits for a lock: the race is then at the point that the test is about."""
        deadline = time.monotonic() + 30
        while not self._is_blocked(conn):
            if time.monotonic() > deadline:
                raise TimeoutError("the session does not wait for a lock: the race is not where it should be")
            time.sleep(0.001)

    def wait_until_blocked_or_done(self, conn: Connection, call: "Background") -> None:
        """Wait until a session waits for a lock, or its call is over because a safeguard is missing."""
        deadline = time.monotonic() + 30
        while call.thread.is_alive() and not self._is_blocked(conn):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def blocked(self, conn: Connection, call: Callable[[], Any], release: Callable[[], object]) -> Any:
        """Run a call of this session, do `release` once it waits for a lock, and return the result of the call."""
        with Background(call) as running:
            self.wait_until_blocked(conn)
            release()
            return running.join()

    def _is_blocked(self, conn: Connection) -> bool:
        query = "select from pg_locks where pid = %s and not granted"
        return bool(self.main.execute(query, [conn.info.backend_pid]).rowcount)


@dataclass(slots=True)
class Background(AbstractContextManager["Background"]):
    """A call in a thread, for it will wait."""

    call: Callable[[], Any]
    result: Any = None
    error: BaseException | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.result = self.call()
        except BaseException as error:  # noqa: BLE001 - handed to whoever joins
            self.error = error

    def join(self) -> Any:
        self.thread.join(30)
        assert not self.thread.is_alive(), "it still waits"
        if self.error is not None:
            raise self.error
        return self.result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.thread.join(30)


def one(conn: Connection, query: str, *parameters: object) -> Any:
    """Return the single value that a query finds."""
    ((found,),) = conn.execute(query.encode(), parameters).fetchall()
    return found


def at_once(conn: Connection, query: str, *parameters: object) -> list[Any]:
    """Run a query that must not wait for a lock; return its rows."""
    with without_waiting(conn):
        return conn.execute(query.encode(), parameters).fetchall()


@contextmanager
def without_waiting(conn: Connection) -> Iterator[None]:
    conn.execute("set statement_timeout = '10s'")
    try:
        yield
    except psycopg.errors.QueryCanceled:
        raise AssertionError("it waits for a lock") from None


def send(conn: Connection, *payloads: int) -> None:
    for payload in payloads:
        conn.execute("select bartleby.send('q', %s)", [Jsonb(payload)])


def claim(conn: Connection, limit: int = 10) -> list[Any]:
    """Claim, and return (lease, position, payload, attempt, solo) of each message."""
    query = "select lease_id, position, payload, attempt, solo from bartleby.claim('q', 'w', %s) order by position"
    return conn.execute(query, [limit]).fetchall()


def payloads(conn: Connection, limit: int = 10) -> list[int]:
    """Claim and ack; return what was in it."""
    rows = claim(conn, limit)
    if rows:
        conn.execute("select bartleby.ack(%s)", [rows[0][0]])
    return [row[2] for row in rows]


def drain(conn: Connection) -> list[int]:
    got: list[int] = []
    while some := payloads(conn):
        got += some
    return got


def fill(conn: Connection) -> None:
    """Make the current segment large enough to be left, with messages that are done."""
    conn.execute(_FILLER)
    while payloads(conn, 100):
        pass


def turn(conn: Connection, until: str = "emptied") -> None:
    """Turn the ring until it says so: each turn is one step, and any passing statement may delay it."""
    answers = []
    for _ in range(100):
        row = conn.execute("select bartleby.turn(0)").fetchone()
        assert row is not None
        answers.append(row[0])
        if until in row[0]:
            return
        time.sleep(0.002)
    raise AssertionError(answers[-5:])


def turn_often(conn: Connection) -> None:
    """As many turns as would empty a segment, if nothing stood in the way."""
    for _ in range(4):
        conn.execute("select bartleby.turn(0)")


def sqlstate(call: Callable[[], object]) -> str | None:
    with pytest.raises(psycopg.Error) as raised:
        call()
    return raised.value.sqlstate


def gate_ranges(s: Sessions) -> Connection:
    """Hold gated sessions between the probe of the log and the burial of holes; return the session that opens it."""
    value = "(select coalesce(range_agg(int8range(p, p + 1)), '{}') from unnest(p_positions) p)"
    return gate(s, "ranges(p_positions bigint[])", "int8multirange", value)


def gate_big(s: Sessions) -> Connection:
    """Hold gated senders between the position that they draw and the row that they write."""
    return gate(s, "big(p_payload jsonb, p_headers jsonb)", "integer", "null")


def gate_clock(s: Sessions) -> Connection:
    """Hold gated sessions just after they looked at the clock."""
    return gate(s, "clock()", "timestamptz", "clock_timestamp() + (select shift from public.test_clock)")


def gate(s: Sessions, function: str, result: str, value: str) -> Connection:
    """Replace a function by one that waits in gated sessions; return the session that opens the gate."""
    s.main.execute(
        f"create or replace function bartleby.{function} returns {result} language plpgsql as $$"
        f" declare v_value {result} := {value};"
        " begin if current_setting('test.gate', true) = 'on' then perform pg_advisory_xact_lock(4711); end if;"
        " return v_value; end $$".encode()
    )
    keeper = s.open()
    keeper.execute("select pg_advisory_lock(%s)", [GATE])
    return keeper


def open_gate(keeper: Connection) -> None:
    keeper.execute("select pg_advisory_unlock(%s)", [GATE])


def gated(s: Sessions) -> Connection:
    conn = s.open()
    conn.execute("set test.gate = 'on'")
    return conn
