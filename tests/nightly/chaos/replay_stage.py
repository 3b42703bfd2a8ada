"""What the tests of replay share: dead letters, a consumer that records what it ran, and checks of the whole state."""

import contextlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, LiteralString

import psycopg
from psycopg.types.json import Jsonb

Connection = psycopg.Connection[tuple[Any, ...]]
SEED = int(os.environ.get("BARTLEBY_SEED", "0"))
QUEUE = "orders"
POLICY = {"backoff": "none", "lease": 60, "breaker": "off", "max_attempts": 3}
BY = ["ana", "fixed"]
AT_ONCE = 1000
READ_COMMITTED = "-c default_transaction_isolation=read\\ committed"


def column(conn: Connection, query: LiteralString, *parameters: Any) -> list[Any]:
    return [found for (found,) in conn.execute(query, parameters or None).fetchall()]


def value(conn: Connection, query: LiteralString, *parameters: Any) -> Any:
    (found,) = column(conn, query, *parameters)
    return found


def create(conn: Connection, queue: str = QUEUE, **policy: Any) -> None:
    conn.execute("select bartleby.create_queue(%s, %s)", [queue, Jsonb(POLICY | policy)])


def failure(position: int, kind: str = "a", version: str | None = None) -> dict[str, Any]:
    found = {"position": position, "error_type": "KeyError", "error": kind, "fingerprint": kind, "verdict": "dead"}
    return found | {"worker_version": version}


def bury(conn: Connection, count: int, queue: str = QUEUE, kind: str = "a") -> list[int]:
    """Send messages and let them die; return their ids."""
    ids: list[int] = []
    while len(ids) < count:
        messages = [{"payload": {"n": n}} for n in range(len(ids), min(count, len(ids) + AT_ONCE))]
        ids += column(conn, "select bartleby.send_many(%s, %s)", queue, Jsonb(messages))
        rows = conn.execute(
            "select lease_id, position from bartleby.claim(%s, 'w', %s)", [queue, len(messages)]
        ).fetchall()
        assert len(rows) == len(messages)
        failures = [failure(position, kind) for _, position in rows]
        conn.execute("select bartleby.fail(%s, %s)", [rows[0][0], Jsonb(failures)])
    return ids


def heap(conn: Connection, count: int) -> list[int]:
    """Let one message die, and copy its letter until there are `count`; return their ids."""
    bury(conn, 1)
    query: LiteralString = """
        with one as (select l from bartleby.dead_letter l limit 1),
          fresh as materialized (select nextval('bartleby.message_id') as id from generate_series(2, %s))
        insert into bartleby.dead_letter
        select n.* from one o cross join fresh f,
          lateral jsonb_populate_record(o.l, jsonb_build_object('message_id', f.id)) n"""
    conn.execute(query, [count])
    return column(conn, "select message_id from bartleby.dead_letter order by 1")


def plan(conn: Connection, ids: Sequence[int] | None = None, filter: str | None = None, **options: Any) -> int:
    query: LiteralString = "select bartleby.plan_replay(%s, %s, %s, %s, false, %s)"
    made = value(conn, query, filter, *BY, None if ids is None else list(ids), Jsonb(options))
    assert isinstance(made, int)
    return made


def start(conn: Connection, replay_id: int) -> None:
    conn.execute("select bartleby.start_replay(%s, %s, %s)", [replay_id, *BY])


def started(conn: Connection, ids: Sequence[int] | None = None, filter: str | None = None, **options: Any) -> int:
    replay_id = plan(conn, ids, filter, **options)
    start(conn, replay_id)
    return replay_id


def step(conn: Connection, replay_id: int | None = None, limit: int = 2000) -> float:
    """Make one step; return how long to wait."""
    query: LiteralString = "select extract(epoch from wait)::float8 from bartleby.advance_replays(%s, %s)"
    return min(column(conn, query, limit, replay_id), default=1.0)


def finish(conn: Connection, seconds: float = 60) -> None:
    """Make steps until every plan is over."""
    open_plans: LiteralString = "select count(*) from bartleby.replays where status in ('running', 'settling')"
    until(lambda: step(conn) and not value(conn, open_plans), "plans do not end", seconds)


def counts(conn: Connection, replay_id: int) -> dict[str, Any]:
    query = """
        select status, items, waiting, replayed, done, already_handled, died_again, skipped from bartleby.replays
        where id = %s"""
    cursor = conn.execute(query, [replay_id])
    (found,) = cursor.fetchall()
    assert cursor.description is not None
    return {each.name: part for each, part in zip(cursor.description, found, strict=True) if part}


def letters(conn: Connection, ids: Sequence[int] | None = None) -> str:
    """Return a hash of every column of these letters, or of all."""
    query: LiteralString = """
        select md5(coalesce(string_agg(d::text, E'\\n' order by d.message_id), '')) from bartleby.dead_letter d
        where d.message_id = any (%s) or %s::bigint[] is null"""
    chosen = None if ids is None else list(ids)
    return str(value(conn, query, chosen, chosen))


def sound(conn: Connection) -> None:
    """Check what must hold whatever was killed: counts match rows, plans count their items, the audit is unbroken."""
    drift = conn.execute("""
        select c.*, d.* from (select queue, group_id, status, letters from bartleby.letter_counts where letters <> 0) c
        full join (select queue, group_id, status, count(*) as letters from bartleby.dead_letter group by 1, 2, 3) d
          using (queue, group_id, status) where c.letters is distinct from d.letters""").fetchall()
    assert not drift, "letters are not counted right"
    odd = conn.execute("""
        select r.id, r.items, i.* from bartleby.replays r, lateral (
          select count(*) as items, count(*) filter (where i.state = 'waiting') as waiting,
            count(*) filter (where i.state = 'replayed') as replayed,
            count(*) filter (where i.state = 'skipped') as skipped, count(*) filter (where i.state = 'done') as done,
            count(*) filter (where i.state = 'died_again') as died
          from bartleby.replay_items i where i.replay_id = r.id) i
        where (r.items, r.waiting, r.replayed, r.skipped, r.done, r.died_again)
          is distinct from (i.items, i.waiting, i.replayed, i.skipped, i.done, i.died)""").fetchall()
    assert not odd, "a plan does not count its items right"
    assert not conn.execute("select * from bartleby.verify_audit()").fetchall()
    assert value(conn, "select deadlocks from pg_stat_database where datname = current_database()") == 0


class Consumer:
    """Claims in a thread, records what ran, and settles it; `dies` gives the error of a message."""

    def __init__(self, dsn: str, queue: str = QUEUE, *, dies: Callable[[int], str | None] = lambda _: None) -> None:
        self.runs: Counter[int] = Counter()
        self.deaths: Counter[int] = Counter()
        self.error: BaseException | None = None
        self._dsn, self._queue, self._dies = dsn, queue, dies
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            with psycopg.connect(self._dsn, autocommit=True, options=READ_COMMITTED) as conn:
                stopping = False
                while self.once(conn) or not stopping:
                    stopping = self._stop.wait(0.005)
        except psycopg.Error as error:
            self.error = error

    def once(self, conn: Connection) -> int:
        query: LiteralString = "select lease_id, position, message_id from bartleby.claim(%s, 'consumer', 100)"
        rows = conn.execute(query, [self._queue]).fetchall()
        self.runs.update(message for _, _, message in rows)
        dead = [(position, message, kind) for _, position, message in rows if (kind := self._dies(message))]
        if dead:
            conn.execute("select bartleby.fail(%s, %s)", [rows[0][0], Jsonb([failure(p, kind) for p, _, kind in dead])])
            self.deaths.update(message for _, message, _ in dead)
        if len(rows) > len(dead):
            conn.execute("select bartleby.ack(%s)", [rows[0][0]])
        return len(rows)

    def close(self) -> None:
        """Handle what is left, and end."""
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def consuming(dsn: str, queue: str = QUEUE, **options: Any) -> Iterator[Consumer]:
    consumer = Consumer(dsn, queue, **options)
    try:
        yield consumer
    finally:
        consumer.close()


def until(condition: Callable[[], object], problem: str, seconds: float = 60) -> float:
    """Wait for a condition; return how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, problem
        time.sleep(0.005)
    return time.monotonic() - began


def dice(salt: object = 0) -> random.Random:
    return random.Random(f"{SEED} {salt}")
