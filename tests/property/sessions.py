"""Sessions of one database, and how to hold one of them at a certain point."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, LiteralString, Self

import psycopg
import pytest

from tests.kit import sql
from tests.kit.clock import Clock, move_clock
from tests.kit.sql import Connection, Waiting, ack, claim, under_way

drain = partial(sql.drain, limit=10)
# Functions of Bartleby in which a call can be held: between the probe of the log and the burial of holes, between the
# position that a sender draws and the row that it writes, just after a look at the clock, and before an event is sent.
Gate = tuple[str, str, str]
RANGES: Gate = (
    "ranges(p_positions bigint[])",
    "int8multirange",
    "(select coalesce(range_agg(int8range(p, p + 1)), '{}') from unnest(p_positions) p)",
)
BIG: Gate = ("big(p_payload jsonb, p_headers jsonb)", "integer", "null")
CLOCK: Gate = ("clock()", "timestamptz", "clock_timestamp() + (select shift from public.test_clock)")
WANTS: Gate = ("wants(p_sink bartleby.sink, p_type text, p_queue text)", "boolean", "true")


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
        sql.create(self.main, backoff="none", lease=60)
        return self

    def __exit__(self, *_: object) -> None:
        for conn in self.opened:
            conn.close()

    def open(self) -> Connection:
        self.opened.append(psycopg.connect(self.dsn, autocommit=True))
        return self.opened[-1]

    def begin(self, mode: LiteralString = "") -> Connection:
        conn = self.open()
        conn.execute(b"begin " + mode.encode())
        return conn

    def begin_with_snapshot(self, mode: LiteralString = "") -> Connection:
        """Begin a transaction that sees nothing that is committed from now on."""
        conn = self.begin("isolation level repeatable read " + mode)
        conn.execute("select 1 from bartleby.queue")
        return conn

    def hasty(self) -> Connection:
        """Open a session whose statements are cancelled if they wait for another session."""
        conn = self.open()
        conn.execute("set statement_timeout = '60s'")
        return conn

    def waiting(
        self, conn: Connection, call: Callable[..., Any], *args: Any, may_end: bool = False
    ) -> AbstractContextManager[Waiting]:
        """Run a call of this session in a thread, and continue once it waits for a lock, or is over if it may be."""
        blocked = "select exists (select from pg_locks where pid = %s and not granted)"

        def waits(running: Waiting) -> object:
            return sql.value(self.main, blocked, running.pid) or (may_end and running.future.done())

        return under_way(conn, lambda conn: call(conn, *args), waits)

    def blocked(self, conn: Connection, release: Callable[[], object], call: Callable[..., Any], *args: Any) -> Any:
        """Run a call of this session, do `release` once it waits for a lock, and return the result of the call."""
        with self.waiting(conn, call, *args) as running:
            release()
            return running.result()

    @contextmanager
    def held(self, gate: Gate, call: Callable[..., Any], *args: Any) -> Iterator[Waiting]:
        """Hold a call in a function of Bartleby, which is replaced by one that waits, during the block."""
        function, result, found = gate
        self.main.execute(
            f"create or replace function bartleby.{function} returns {result} language plpgsql"
            f" set lock_timeout = 0 as $$ declare v_value {result} := {found};"
            " begin if current_setting('test.gate', true) = 'on' then perform pg_advisory_xact_lock(4711); end if;"
            " return v_value; end $$".encode()
        )
        keeper, conn = self.open(), self.open()
        keeper.execute("select pg_advisory_lock(4711)")
        conn.execute("set test.gate = 'on'")
        with self.waiting(conn, call, *args) as running:
            try:
                yield running
            finally:
                keeper.execute("select pg_advisory_unlock(4711)")
        running.result()


def execute(conn: Connection, query: LiteralString, *parameters: object) -> list[Any]:
    """Return the rows of a query, if it has any."""
    cursor = conn.execute(query, parameters or None)
    return cursor.fetchall() if cursor.description else []


def send(conn: Connection, *payloads: int) -> None:
    for payload in payloads:
        sql.send(conn, payload)


def leased(conn: Connection, *payloads: int) -> list[int]:
    """Send these and claim each; return the leases."""
    send(conn, *payloads)
    return [claim(conn).lease for _ in payloads]


def payloads(conn: Connection, limit: int = 10) -> list[int]:
    """Claim and ack; return what was in it."""
    claimed = claim(conn, limit)
    if claimed.messages:
        ack(conn, claimed.lease)
    return claimed.payloads


def hole(s: Sessions, *numbers: int, parked: bool = False) -> Connection:
    """Leave a hole: these are sent in a transaction that stays open while a later message is delivered."""
    slow = s.begin()
    send(slow, *numbers)
    send(s.main, 99)
    assert [payloads(s.main), payloads(s.main)] == [[99], []]
    if parked:
        s.clock.advance(5)
        before = sql.value(s.main, "select count(*) from bartleby.hole")
        assert payloads(s.main) == []
        assert sql.value(s.main, "select count(*) from bartleby.hole") == before + 1, "the hole was not parked"
    return slow


def fill(conn: Connection) -> None:
    """Make the current segment large enough to be left, with messages that are done."""
    conn.execute(
        "select bartleby.send_many('q', jsonb_agg(jsonb_build_object('payload', repeat('x', 500))))"
        " from generate_series(1, 200)"
    )
    sql.drain(conn, limit=100)


def turn(conn: Connection, until: str = "emptied") -> None:
    """Turn the ring until it says so: each turn is one step, and any passing statement may delay it."""
    answers: list[str] = []
    while not answers or until not in answers[-1]:
        assert len(answers) < 100, answers[-5:]
        answers.append(sql.value(conn, "select bartleby.turn(0)"))
        time.sleep(0.002)


def turn_often(conn: Connection) -> None:
    """As many turns as would empty a segment, if nothing stood in the way."""
    for _ in range(4):
        conn.execute("select bartleby.turn(0)")


def sqlstate(conn: Connection, call: Callable[..., object], *args: object) -> str | None:
    """Return the error of a call that must be refused."""
    with pytest.raises(psycopg.Error) as raised:
        call(conn, *args)
    return raised.value.sqlstate
