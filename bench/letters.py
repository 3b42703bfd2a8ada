"""Ten million dead letters: finding some of them, replaying a million by plan, and letting retention take a million."""

import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import LiteralString

from bench import ours
from bench.lab import Bar, Connection, Figure, Findings, Lab, connect, rows, run, script

QUEUES, GROUPS, DAYS = 20, 400, 25
PAGE = 50
CLAIMS_A_SECOND = 200

INDEXES = ("dead_letter_status", "dead_letter_group", "dead_letter_key", "dead_letter_payload", "dead_letter_restored")

GROUP = f"""
insert into bartleby.failure_group (queue, fingerprint, error_type, error_types, title, state_at, opened_at)
select q.id, 'bench ' || g, t.type, array[t.type], t.type || ': order * was declined', now(),
  now() - interval '{DAYS} days'
from generate_series(0, {GROUPS} - 1) g join bartleby.queue q on q.name = 'letters-' || g % {QUEUES}, lateral (
  select 'app.errors.' || (array['CardDeclined', 'Timeout', 'NoStock', 'KeyError', 'BadAddress'])[g / {QUEUES} % 5 + 1]
    || g / 100) as t (type)
"""

# Which group a letter is in: all are of one size, or the first has a fifth of all letters and the last one in 1,600.
EVEN = f"n * 7919 %% {GROUPS}"
SKEWED = f"floor({GROUPS} * power((n * 7919 %% 1000003) / 1000003::double precision, 4))"

# A letter and its attempt are about 1 KiB, most of it traceback; every group has letters of all ages.
LETTER = f"""
with letter as (insert into bartleby.dead_letter (message_id, queue, group_id, status, status_at, reason, created_at,
  first_failed_at, dead_at, attempts, crashes, cycle, error_type, error, fingerprint, worker, worker_version, key,
  payload)
select nextval('bartleby.message_id'), f.queue, f.id, s.status, a.at, 'exhausted', a.at - interval '1 minute',
  a.at - interval '30 seconds', a.at, 5, 0, 1, f.error_type,
  'order ' || n || ' was declined after ' || n %% 977 || ' ms',
  f.fingerprint,
  'host-' || n %% 8, '2.' || n %% 5, 'order-' || n, jsonb_build_object('order', n, 'customer',
    jsonb_build_object('id', n %% 1000003, 'country', (array['DE', 'FR', 'JP'])[n %% 3 + 1]),
    'amount', n %% 9973 * 0.37, 'currency', case when n %% 100 = 0 then 'JPY' else 'EUR' end)
from generate_series(%s::bigint, %s::bigint) n, lateral (
  select now() - interval '{DAYS} days' + (n::double precision / %s) * interval '{DAYS} days' as at) a, lateral (
  select case when n %% 20 < 17 then 'dead' else (array['replayed', 'resolved', 'discarded'])[n %% 20 - 16] end
    as status) s, lateral (
  select * from bartleby.failure_group g where g.id = {{group}} + 1) f
returning message_id, dead_at, queue, worker, error_type, error, fingerprint)
insert into bartleby.attempt (message_id, lease_id, failed_at, queue, attempt, cycle, outcome, verdict, worker,
  error_type, error, traceback, fingerprint)
select l.message_id, 1, l.dead_at, l.queue, 5, 1, 'failed', 'dead', l.worker, l.error_type, l.error,
  repeat('  File "/srv/app/orders/handlers.py", line ' || l.message_id %% 400 || ', in step', 12), l.fingerprint
from letter l
"""
COUNT = """
insert into bartleby.letter_count (group_id, status, queue, letters)
select d.group_id, d.status, d.queue, count(*) from bartleby.dead_letter d group by 1, 2, 3
"""
FIND = """
select l.* from bartleby.find_letters(%s, %s::integer, %s) f join bartleby.dead_letters l on l.message_id = f.message_id
"""
TALLY = "select letters, exact from bartleby.count_letters(%s)"


@dataclass(frozen=True, slots=True)
class Cemetery:
    """A database full of letters."""

    dsn: str
    connection: Connection
    letters: int


def letters(lab: Lab) -> Findings:
    """Pages, counts and searches, a plan, retention."""
    found = Findings()
    with lab.database() as dsn:
        yard = Cemetery(dsn, connect(dsn), lab.scaled(10_000_000, 200_000))
        begin = time.monotonic()
        bury(yard)
        print(f"  {yard.letters:,} letters in {time.monotonic() - begin:.0f} s", flush=True)
        many = lab.scaled(1_000_000, 20_000)
        for part in (look, replayed, expired):
            found.figures += (figures := part(yard, many))
            for figure in figures:  # it takes a while
                print(f"  {figure.name}: {figure.ours:,.4g} {figure.unit}", flush=True)
        yard.connection.close()
    return found


def bury(yard: Cemetery, group: LiteralString = EVEN) -> None:
    """Write the letters as their deaths would have, but without their deaths."""
    to = yard.connection
    for number in range(QUEUES):
        rows(to, "select bartleby.create_queue(%s)", f"letters-{number}")
    script(to, GROUP)
    definitions = [
        row[0] for row in rows(to, "select indexdef from pg_indexes where indexname = any(%s)", list(INDEXES))
    ]
    script(to, ";".join(f"drop index bartleby.{name}" for name in INDEXES))
    script(to, "alter table bartleby.dead_letter disable trigger user; set maintenance_work_mem = '1GB'")
    step = 500_000
    for first in range(0, yard.letters, step):
        run(to, LETTER.format(group=group), first, min(first + step, yard.letters) - 1, float(yard.letters))
    for definition in definitions:
        script(to, definition)
    script(to, COUNT)
    for statement in ("alter table bartleby.dead_letter enable trigger user", "vacuum analyze bartleby.dead_letter"):
        script(to, statement)
    script(to, "analyze")
    script(to, "checkpoint")


def look(yard: Cemetery, count: int) -> list[Figure]:
    """The 95th percentile of pages, counts and searches with values that differ from one to the next."""
    times = max(20, count // 10_000)
    dice = random.Random(7)
    some = yard.letters
    filters: dict[str, Callable[[], str]] = {
        "all": lambda: "",
        "queue": lambda: f"queue:letters-{dice.randrange(QUEUES)}",
        "type": lambda: (
            f"type:{dice.choice(['CardDeclined', 'Timeout', 'NoStock', 'KeyError', 'BadAddress'])}{dice.randrange(4)}"
        ),
        "key": lambda: f"key:order-{dice.randrange(some)}",
        "time": lambda: f"age:>{dice.randrange(1, DAYS * 24)}h",
        "group": lambda: f"group:{dice.randrange(1, GROUPS + 1)}",
        "queue and time": lambda: f"queue:letters-{dice.randrange(QUEUES)} age:>{dice.randrange(1, 20)}d age:<{DAYS}d",
    }
    figures = []
    for name, make in filters.items():
        pages = timed(yard, times, FIND, lambda make=make: (make(), PAGE, None))  # type: ignore[misc]
        counts = timed(yard, times, TALLY, lambda make=make: (make(),))  # type: ignore[misc]
        figures += [
            Figure(f"page of {PAGE} by {name}, p95", "ms", pages, bar=Bar("value", most=100)),
            Figure(f"count by {name}, p95", "ms", counts, bar=Bar("value", most=100)),
        ]
    searches: dict[str, Callable[[], str]] = {
        "a rare payload value": lambda: f"payload.customer.id:{dice.randrange(1_000_003)}",
        "a common payload value": lambda: f"payload.customer.country:{dice.choice(['DE', 'FR', 'JP'])}",
        "a value of one in a hundred": lambda: "payload.currency:JPY",
    }
    for name, make in searches.items():
        found = timed(yard, times, FIND, lambda make=make: (make(), PAGE, None))  # type: ignore[misc]
        figures.append(Figure(f"search for {name}, p95", "ms", found, bar=Bar("value", most=300)))
    deep = iter(cursors(yard))
    figures.append(
        Figure(
            "page after a place far down, p95",
            "ms",
            timed(yard, times, FIND, lambda: ("", PAGE, next(deep))),
            bar=Bar("value", most=100),
        )
    )
    view = timed(
        yard,
        max(5, times // 10),
        "select * from bartleby.groups where queue = %s order by dead desc limit 50",
        lambda: (f"letters-{dice.randrange(QUEUES)}",),
    )
    figures.append(Figure("groups of a queue, p95", "ms", view, bar=Bar("value", most=100)))
    return figures


def timed(yard: Cemetery, times: int, query: str, values: Callable[[], tuple[object, ...]]) -> float:
    """The 95th percentile in milliseconds."""
    spent = []
    for _ in range(times):
        given = values()
        begin = time.perf_counter()
        yard.connection.execute(query, given).fetchall()
        spent.append((time.perf_counter() - begin) * 1000)
    return statistics.quantiles(spent, n=20)[-1]


def cursors(yard: Cemetery) -> Iterator[str]:
    """Places spread over the whole list."""
    dice = random.Random(11)
    while True:
        found = rows(
            yard.connection,
            "select bartleby.cursor_text('newest', status_at, message_id) from bartleby.dead_letter"
            " where message_id >= %s::bigint and status = 'dead' order by message_id limit 1",
            dice.randrange(yard.letters),
        )
        yield from (row[0] for row in found)


def replayed(yard: Cemetery, count: int) -> list[Figure]:
    """A plan for a million letters of some queues: freezing it, running it, and its outcomes."""
    to = yard.connection
    names = ",".join(f"letters-{number}" for number in range(QUEUES))
    ids = [
        row[0]
        for row in rows(
            to,
            "select message_id from bartleby.dead_letter where status = 'dead'"
            " order by message_id desc limit %s::bigint",
            count,
        )
    ]
    begin = time.perf_counter()
    plan = rows(to, "select bartleby.plan_replay(null, 'bench', 'measured', %s::bigint[])", ids)[0][0]
    planned = time.perf_counter()
    run(to, "select bartleby.start_replay(%s::bigint, 'bench', 'measured')", plan)
    started = time.perf_counter()
    while rows(to, "select status from bartleby.advance_replays(5000)")[0][0] == "running":
        pass
    moved = time.perf_counter()
    fast = connect(yard.dsn, durable=False)
    for name in names.split(","):
        while leased := rows(fast, "select max(lease_id), count(*) from bartleby.claim(%s, 'bench', 1000)", name):
            if leased[0][1] == 0:
                break
            run(fast, "select bartleby.ack(%s::bigint)", leased[0][0])
    done = time.perf_counter()
    run(to, "select count(*) from bartleby.advance_replays()")
    status, settled = rows(to, "select status, done from bartleby.replays where id = %s::bigint", plan)[0]
    if (status, settled) != ("finished", count):
        raise AssertionError(json.dumps([status, settled, count]))
    fast.close()
    return [
        Figure(f"plan of {count:,} frozen and judged", "items/s", count / (planned - begin)),
        Figure(f"plan of {count:,} judged again at its start", "items/s", count / (started - planned)),
        Figure(f"plan of {count:,} replayed", "items/s", count / (moved - started), bar=Bar("value", least=20_000)),
        Figure(f"plan of {count:,} done and their outcomes told", "items/s", count / (done - moved)),
    ]


def expired(yard: Cemetery, count: int) -> list[Figure]:
    """Claims while retention deletes, against claims while it rests, in turns: the machine is not always as fast."""
    queue = ours.Client(yard.dsn)
    queue.create()
    queue.fill(max(100_000, count))
    # the oldest letters of all queues: so many days hold so many
    kept = {"retention": DAYS * (1 - count / yard.letters) * 86400}
    for number in range(QUEUES):
        rows(yard.connection, "select bartleby.configure_queue(%s, %s::jsonb)", f"letters-{number}", json.dumps(kept))
    janitor = Janitor(yard.dsn, count // 10)
    janitor.thread.start()
    quiet, busy = [], []
    while janitor.thread.is_alive():
        quiet += claim_times(queue, 2)
        janitor.may_work.set()
        busy += claim_times(queue, 8)
        janitor.may_work.clear()
    queue.close()
    begin, rest = time.perf_counter(), 0
    while gone := deleted(yard.connection, 2_000):
        rest += gone
    took = time.perf_counter() - begin
    bar = Bar("ratio", most=1.2)
    return [
        Figure("claim of 10 while retention deletes, p50", "ms", middle(busy), middle(quiet), "without", bar),
        Figure("claim of 10 while retention deletes, p99", "ms", tail(busy), tail(quiet), "without", bar),
        Figure(f"the first {janitor.deleted:,} deleted so, 200 at once", "letters/s", janitor.deleted / janitor.worked),
        Figure(f"the other {rest:,} without a pause, 2,000 at once", "letters/s", rest / took),
    ]


class Janitor:
    """Deletes what is too old as the worker's janitor does: a little at a time, a tenth of the time."""

    def __init__(self, dsn: str, enough: int) -> None:
        self._dsn = dsn
        self._enough = enough
        self.may_work = threading.Event()
        self.thread = threading.Thread(target=self._prune)
        self.deleted, self.worked = 0, 0.0

    def _prune(self) -> None:
        with connect(self._dsn) as connection:
            while self.deleted < self._enough and self.may_work.wait():
                begin = time.perf_counter()
                self.deleted += deleted(connection, 200)
                took = time.perf_counter() - begin
                time.sleep(9 * took)
                self.worked += 10 * took


def deleted(connection: Connection, limit: int) -> int:
    """Delete letters that are too old, in one transaction; return how many."""
    gone = rows(connection, "select rows from bartleby.prune(%s::integer) where what like '%%letters'", limit)
    return sum(row[0] for row in gone)


def claim_times(queue: ours.Client, seconds: int) -> list[float]:
    """Milliseconds of claims of ten, not so many that a core is left for nothing else."""
    spent: list[float] = []
    start = time.perf_counter()
    for number in range(seconds * CLAIMS_A_SECOND):
        time.sleep(max(0.0, start + number / CLAIMS_A_SECOND - time.perf_counter()))
        begin = time.perf_counter()
        batch = queue.claim(10)
        spent.append((time.perf_counter() - begin) * 1000)
        if len(batch) < 10:
            raise AssertionError(json.dumps([number, len(batch)]))
        queue.ack(batch)
    return spent


def middle(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)


def tail(values: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(values, n=100)[-1]
