"""A session holds the xmin horizon back, as a report, a dump or a stuck replication slot does.

Nothing that died since can be vacuumed. Messages are offered at a fixed rate which both contestants can
sustain without the pin; what is looked at is whether they still do so after a minute of it.
"""

import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from bench.draining import CONTESTANTS
from bench.lab import Bar, Figure, Findings, Lab, connect, rows, script

BATCH = 200
STORM_DELAY = 0.3
FAILURES = 2
WARM_UP = 2
DRAIN_RATE = 15_000
STORM_RATE = 3_000
PINS = {
    "none": None,
    "snapshot": "begin isolation level repeatable read; select 1",
    "xid": "begin isolation level repeatable read; create table held (x int); insert into held values (1)",
}


@dataclass(frozen=True, slots=True)
class Load:
    """What is offered to whom, for how long."""

    contestant: str
    dsn: str
    rate: int
    failures: int
    begin: float
    seconds: int

    @property
    def end(self) -> float:
        """When it is over."""
        return self.begin + self.seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """Messages done in each second, and how long the last claims took."""

    done: list[float]
    claim: float

    def kept(self, window: int) -> float:
        """The last seconds' throughput over that of the first."""
        return sum(self.done[-window:]) / max(1.0, sum(self.done[:window]))


def pinned(lab: Lab) -> Findings:
    """Throughput over time under a pinned horizon: plain drain, and every message failing twice."""
    found = Findings()
    length = lab.scaled(60, 15)
    window = lab.scaled(10, 3)
    for name, rate, failures in (("drain", DRAIN_RATE, 0), ("retry storm", STORM_RATE, FAILURES)):
        free = offer(lab, "classic", "none", (rate, failures), lab.scaled(20, 8))
        unpinned = f"{name}, not pinned: last / first {window} s"
        found.figures.append(Figure(f"{unpinned} (classic)", "", free.kept(window)))
        found.series[f"{name}, offered"] = [float(rate)]
        for pin in ("snapshot", "xid"):
            mine = offer(lab, "bartleby", pin, (rate, failures), length)
            theirs = offer(lab, "classic", pin, (rate, failures), length)
            what = f"{name} at {rate:,}/s, {pin} pinned"
            bar = Bar("value", least=0.95)
            found.figures += [
                Figure(
                    f"{what}: last / first {window} s",
                    "",
                    mine.kept(window),
                    theirs.kept(window),
                    "classic",
                    bar,
                ),
                Figure(
                    f"{what}: last {window} s",
                    "msg/s",
                    statistics.mean(mine.done[-window:]),
                    statistics.mean(theirs.done[-window:]),
                    "classic",
                ),
                Figure(f"{what}: claim of {BATCH} at the end", "ms", mine.claim, theirs.claim, "classic"),
            ]
            found.series[f"{name}, {pin}, bartleby"] = mine.done
            found.series[f"{name}, {pin}, classic"] = theirs.done
    return found


def offer(lab: Lab, contestant: str, pin: str, load: tuple[int, int], length: int) -> Outcome:
    with lab.database() as dsn:
        queue = CONTESTANTS[contestant](dsn)
        queue.create()
        queue.close()
        with ProcessPoolExecutor(3, get_context("spawn")) as pool, holding(dsn, PINS[pin]):
            offered = Load(contestant, dsn, *load, time.monotonic() + 2, WARM_UP + length)
            others = [pool.submit(produce, offered), pool.submit(tidy, offered)]
            done, claims = pool.submit(consume, offered).result()
            for other in others:
                other.result()
        return Outcome(done[WARM_UP:], statistics.median(claims[-20:]) * 1000)


@contextlib.contextmanager
def holding(dsn: str, statements: str | None) -> Iterator[None]:
    with connect(dsn) as connection:
        if statements:
            script(connection, statements)
        yield


def produce(load: Load) -> None:
    queue = CONTESTANTS[load.contestant](load.dsn)
    message = json.dumps({"payload": {"order": 7, "customer": "customer-7", "note": "leave it at the door"}})
    sleep_until(load.begin)
    sent = 0
    while (now := time.monotonic()) < load.end:
        owed = min(1_000, int((now - load.begin) * load.rate) - sent)
        if owed > 0:
            queue.send_many(f"[{','.join([message] * owed)}]")
            sent += owed
        time.sleep(0.02)
    queue.close()


def consume(load: Load) -> tuple[list[float], list[float]]:
    queue = CONTESTANTS[load.contestant](load.dsn)
    done = [0.0] * load.seconds
    claims: list[float] = []
    sleep_until(load.begin)
    while (now := time.monotonic()) < load.end:
        batch = queue.claim(BATCH)
        if not batch:
            time.sleep(0.005)
            continue
        if len(batch) == BATCH:
            claims.append(time.monotonic() - now)
        failed = [row for row in batch if queue.attempt(row) <= load.failures]
        passed = [row for row in batch if queue.attempt(row) > load.failures]
        if failed:
            queue.retry(failed, STORM_DELAY)
        if passed:
            queue.ack_some(passed)
        if (second := int(time.monotonic() - load.begin)) < load.seconds:
            done[second] += len(passed)
    queue.close()
    return done, claims or [0.0]


def tidy(load: Load) -> None:
    """The janitor of Bartleby; autovacuum is the one of the classic table."""
    if load.contestant != "bartleby":
        return
    with connect(load.dsn, durable=False) as connection:
        for second in range(load.seconds):
            sleep_until(load.begin + second)
            rows(connection, "select count(*) from bartleby.reap()")
            if second % 5 == 4:
                rows(connection, "select bartleby.turn()")


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
