"""The queue table that everybody writes: UPDATE to claim, DELETE to finish.

It is given its best: the limit is inside `id = any(array(...))`, which PostgreSQL plans as two index scans;
written as a join, a parameter in LIMIT makes it hash the whole table. The index has the order of the claim,
so that waiting retries are not waded through. The planner settings pin the index scans, as Bartleby's functions
do: a plan made while the table was small would ruin it later. Autovacuum is as it comes, the table is analyzed
once filled, and a plan that reads the whole table is an error.
"""

from collections.abc import Sequence

from bench.lab import PAYLOAD, Row, connect, rows, run, script

QUEUE = "orders"
PLANNER = "-c enable_seqscan=off -c enable_bitmapscan=off -c enable_sort=off -c enable_hashjoin=off"
TABLES = """
create table classic (
  id bigint generated always as identity primary key,
  queue text not null,
  state text not null default 'ready',
  attempts integer not null default 0,
  max_attempts integer not null default 5,
  run_at timestamptz not null default now(),
  lease_until timestamptz,
  created_at timestamptz not null default now(),
  last_error text,
  headers jsonb,
  payload jsonb not null
);
create index classic_ready on classic (queue, run_at, id) where state = 'ready';
create table classic_dead (
  id bigint primary key,
  queue text not null,
  attempts integer not null,
  created_at timestamptz not null,
  dead_at timestamptz not null,
  error_type text,
  error text,
  traceback text,
  headers jsonb,
  payload jsonb not null
);
create index classic_dead_at on classic_dead (queue, dead_at);
"""
CLAIM = """
update classic set state = 'leased', attempts = attempts + 1, lease_until = now() + interval '60 seconds'
where id = any (array(
  select id from classic where queue = %s and state = 'ready' and run_at <= now()
  order by run_at, id limit %s::int for update skip locked))
returning id, attempts, payload::text
"""
BURY = """
with failure as materialized (
  select * from jsonb_to_recordset(%s::jsonb)
    as f (position bigint, error_type text, error text, traceback text)
), gone as (
  delete from classic where id = any (array(select position from failure)) and state = 'leased' returning *
)
insert into classic_dead (id, queue, attempts, created_at, dead_at, error_type, error, traceback, headers,
  payload)
select g.id, g.queue, g.attempts, g.created_at, now(), f.error_type, f.error, f.traceback, g.headers,
  g.payload
from gone g join failure f on f.position = g.id
"""


class Client:
    """One worker: claim and ack do not wait for the disk, send and fail do."""

    name = "classic"

    def __init__(self, dsn: str) -> None:
        self.fast = connect(dsn, durable=False, settings=PLANNER)
        self.durable = connect(dsn, settings=PLANNER)

    def create(self) -> None:
        """Make the tables."""
        script(self.durable, TABLES)

    def fill(self, count: int) -> None:
        """Put messages into the queue, the fast way."""
        script(
            self.fast,
            f"""insert into classic (queue, payload)
            select '{QUEUE}', {PAYLOAD} from generate_series(1, {count}) g""",
        )
        script(self.durable, "analyze classic")
        self._check_plan()

    def send_many(self, messages: str) -> None:
        """Send a JSON array of messages."""
        run(
            self.durable,
            """insert into classic (queue, payload)
            select %s, m -> 'payload' from jsonb_array_elements(%s::jsonb) m""",
            QUEUE,
            messages,
        )

    def claim(self, limit: int) -> list[Row]:
        """The next messages, each as (id, attempt, payload)."""
        return rows(self.fast, CLAIM, QUEUE, limit)

    def ack(self, batch: Sequence[Row]) -> None:
        """These are done."""
        run(self.fast, "delete from classic where id = any (%s::bigint[])", [row[0] for row in batch])

    ack_some = ack

    def retry(self, batch: Sequence[Row], delay: float) -> None:
        """These failed, and are to be tried again."""
        run(
            self.durable,
            """update classic set state = 'ready', run_at = now() + make_interval(secs => %s),
              last_error = 'Timeout'
            where id = any (%s::bigint[]) and state = 'leased'""",
            delay,
            [row[0] for row in batch],
        )

    def bury(self, batch: Sequence[Row], failures: str) -> None:  # noqa: ARG002 - the ids are in the failures
        """These failed for good; the evidence is JSON as fail() takes it."""
        run(self.durable, BURY, failures)

    def attempt(self, row: Row) -> int:
        """Which attempt of the message this is."""
        return int(row[1])

    def tidy(self) -> None:
        """Nothing: autovacuum is the janitor."""

    def _check_plan(self) -> None:
        statement = CLAIM.replace("%s::int", "$2").replace("%s", "$1")
        script(self.durable, "set plan_cache_mode = force_generic_plan")
        script(self.durable, f"prepare planned (text, int) as {statement}")
        plan = "\n".join(row[0] for row in self.durable.execute(b"explain execute planned ('orders', 100)"))
        script(self.durable, "deallocate planned")
        script(self.durable, "reset plan_cache_mode")
        if "Seq Scan" in plan or "Hash" in plan:
            raise RuntimeError(f"the classic claim is badly planned:\n{plan}")

    def close(self) -> None:
        """End the sessions."""
        self.fast.close()
        self.durable.close()
