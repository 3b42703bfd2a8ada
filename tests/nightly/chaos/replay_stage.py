"""What the tests of replay share: dead letters, a consumer that records what it ran, and checks of the whole state."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg

from tests.kit import plans
from tests.kit.sql import Connection, ack, claim, create, fail, rows, value
from tests.kit.worker import until

POLICY = {"backoff": "none", "lease": 60, "breaker": "off", "max_attempts": 3}
Dies = Callable[[int], str | None]
COUNTED = ("status", "items", "waiting", "replayed", "done", "already_handled", "died_again", "skipped")


def open_queue(conn: Connection, queue: str = "orders") -> None:
    create(conn, queue, **POLICY)


def failure(kind: str) -> dict[str, Any]:
    return {"error_type": "KeyError", "error": kind, "fingerprint": kind, "verdict": "dead"}


def die_in_orders(conn: Connection, count: int) -> list[int]:
    return plans.die(conn, count, "orders", **failure("a"))


def finish(conn: Connection) -> None:
    open_plans = "select from bartleby.replays where status in ('running', 'settling')"
    until(lambda: plans.steps(conn) is not None and not conn.execute(open_plans).rowcount, what="the end of plans")


def counts(conn: Connection, replay_id: int) -> dict[str, Any]:
    found = plans.replay_of(conn, replay_id)
    return {name: found[name] for name in COUNTED if found[name]}


def sound(conn: Connection) -> None:
    """Check what must hold whatever was killed: all adds up, the audit log is unbroken, and nothing deadlocked."""
    plans.adds_up(conn)
    assert rows(conn, "select * from bartleby.verify_audit()") == []
    assert value(conn, "select deadlocks from pg_stat_database where datname = current_database()") == 0


class Consumer:
    """Claims, records what ran, and settles it; `dies` gives the error of a message."""

    def __init__(self, dsn: str, queue: str, dies: Dies) -> None:
        self.runs: Counter[int] = Counter()
        self.deaths: Counter[int] = Counter()
        self.over = threading.Event()
        self._dsn, self._queue, self._dies = dsn, queue, dies

    def work(self) -> None:
        options = "-c default_transaction_isolation=read\\ committed"
        with psycopg.connect(self._dsn, autocommit=True, options=options) as conn:
            last = False
            while self._once(conn) or not last:
                last = self.over.wait(0.005)

    def _once(self, conn: Connection) -> int:
        claimed = claim(conn, 100, self._queue)
        self.runs.update(claimed.ids)
        dead = [(each, kind) for each in claimed.messages if (kind := self._dies(each["message_id"]))]
        if dead:
            version = {"worker_version": str(len(self.deaths))}
            failures = (failure(kind) | version | {"position": each["position"]} for each, kind in dead[::-1])
            fail(conn, claimed.lease, *failures)
            self.deaths.update(each["message_id"] for each, _ in dead)
        if len(dead) < len(claimed.messages):
            ack(conn, claimed.lease)
        return len(claimed.messages)


@contextmanager
def consuming(dsn: str, queue: str = "orders", dies: Dies = lambda _: None) -> Iterator[Consumer]:
    """Consume in a thread while the block runs; at its end handle what is left."""
    consumer = Consumer(dsn, queue, dies)
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(consumer.work)
        try:
            yield consumer
        finally:
            consumer.over.set()
        under_way.result(60)
