"""A hand on Bartleby's clock: tests move time instead of waiting for it."""

from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg

_SHIFTABLE: LiteralString = """
do $$
declare
    v_old pg_catalog.pg_proc;
begin
    select * into strict v_old from pg_catalog.pg_proc where oid = 'bartleby.clock()'::regprocedure;
    execute pg_catalog.format(
        'create or replace function bartleby.clock() returns timestamptz language sql %s as %L',
        case v_old.provolatile when 's' then 'stable' else 'volatile' end,
        'select coalesce(stands_at, pg_catalog.clock_timestamp()) + shift from public.test_clock'
    );
end
$$
"""


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of one database. What it says is seen by every session once `conn` has committed."""

    conn: psycopg.Connection[Any]

    def advance(self, seconds: float) -> None:
        self.conn.execute("update public.test_clock set shift = shift + make_interval(secs => %s)", [float(seconds)])

    def half_past(self) -> None:
        """Half past the hour before this one: whatever is counted by the hour is not divided by the next one."""
        self.conn.execute(
            "update public.test_clock set shift = shift - make_interval("
            "secs => 1800 + extract(epoch from bartleby.clock())::float8::numeric % 3600)"
        )

    def stop(self) -> None:
        """From now on it moves by hand alone, and however slow the machine is, no time passes."""
        self.conn.execute("update public.test_clock set stands_at = pg_catalog.clock_timestamp()")


def move_clock(conn: psycopg.Connection[Any]) -> Clock:
    """Replace `bartleby.clock()` in this database by one that can be moved, and that goes on by itself."""
    conn.execute("create table public.test_clock (shift interval not null, stands_at timestamptz)")
    conn.execute("insert into public.test_clock values ('0')")
    conn.execute("grant select on public.test_clock to public")
    conn.execute(_SHIFTABLE)
    return Clock(conn)
