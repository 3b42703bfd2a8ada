"""The programs that are killed: producers, consumers and a janitor, each a process of its own.

    python -m tests.nightly.chaos.actors ACTOR DSN LEDGER SEED STOP [QUOTA]

An actor writes what it does to its ledger, one line per event, before the next statement: a killed process cannot take
a line back. A transaction without an end in the ledger is a `maybe`.
"""

import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

Connection = psycopg.Connection[tuple[Any, ...]]
QUEUE = "torture"
LEASE_LOST = "ZB006"


class Ledger:
    """Lines in a file: a word, a number and values."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, word: str, number: int, values: Iterable[str] = ()) -> None:
        os.write(self.file, (" ".join([word, str(number), *values]) + "\n").encode())


def produce(dsn: str, ledger: Ledger, rng: random.Random, stop: Path, quota: int) -> None:
    """Send in transactions of several statements with pauses between them; roll a fifth back."""
    conn, sent, number = psycopg.connect(dsn), 0, 0
    while sent < quota and not stop.exists():
        number += 1
        values: list[str] = []
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            some = [f"{ledger.name}.{sent + len(values) + k}" for k in range(rng.choice([1, 1, 3, 20]))]
            values += some
            send(conn, rng, some)
            if rng.random() < 0.2:
                time.sleep(rng.random() * 0.01)
        sent += len(values)
        ledger.write("T", number, values)
        if rng.random() < 0.02:
            time.sleep(rng.random() * 1.5)
        if rng.random() < 0.2:
            conn.rollback()
            ledger.write("R", number)
        else:
            conn.commit()
            ledger.write("C", number)


def send(conn: Connection, rng: random.Random, values: list[str]) -> None:
    if len(values) > 1:
        messages = [{"payload": value} for value in values]
        conn.execute("select bartleby.send_many(%s, %s)", [QUEUE, Jsonb(messages)])
        return
    delay = rng.choice([0, 0, 0, 0.001, 0.3])
    query = "select bartleby.send(%s, %s, p_delay => make_interval(secs => %s))"
    conn.execute(query, [QUEUE, Jsonb(values[0]), float(delay)])


def consume(dsn: str, ledger: Ledger, rng: random.Random, stop: Path, quota: int) -> None:
    """Claim, log, settle, log: ack most, fail or release a few, some in a transaction that stays open for a while."""
    conn = psycopg.connect(dsn, autocommit=True)
    conn.execute("set synchronous_commit = off")
    while True:
        rows = conn.execute(
            "select lease_id, position, payload from bartleby.claim(%s, %s, %s)",
            [QUEUE, ledger.name, rng.choice([1, 10, 100])],
        ).fetchall()
        if not rows:
            if stop.exists():
                return
            time.sleep(0.005)
            continue
        ledger.write("G", rows[0][0], [row[2] for row in rows])
        try:
            settle(conn, ledger, rng, rows)
        except psycopg.Error as error:
            if error.sqlstate != LEASE_LOST:
                raise
            ledger.write("L", rows[0][0])


def settle(conn: Connection, ledger: Ledger, rng: random.Random, rows: list[Any]) -> None:
    lease = rows[0][0]
    back = [row for row in rows if rng.random() < 0.03]
    done = [row for row in rows if row not in back]
    if back:
        positions = [row[1] for row in back]
        with conn.transaction():
            if rng.random() < 0.5:
                failures = [{"position": position, "error": "chance"} for position in positions]
                conn.execute("select bartleby.fail(%s, %s)", [lease, Jsonb(failures)])
            else:
                conn.execute("select bartleby.release(%s, %s)", [lease, positions])
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.05)
        ledger.write("F", lease, [row[2] for row in back])
    if done:
        conn.execute("select bartleby.ack(%s, %s)", [lease, [row[1] for row in done]])
        ledger.write("A", lease, [row[2] for row in done])


def tend(dsn: str, ledger: Ledger, rng: random.Random, stop: Path, quota: int) -> None:
    """Reap twice a second, and turn the ring once a second."""
    conn, count = psycopg.connect(dsn, autocommit=True), 0
    while not stop.exists():
        count += 1
        reaped = conn.execute("select lease_id from bartleby.reap()").fetchall()
        ledger.write("X", count, [str(lease) for (lease,) in reaped])
        if count % 2:
            ((answer,),) = conn.execute("select bartleby.turn(0)").fetchall()
            ledger.write("S", count, answer.split())
        time.sleep(0.5)


ACTORS: dict[str, Callable[[str, Ledger, random.Random, Path, int], None]] = {
    "produce": produce,
    "consume": consume,
    "tend": tend,
}

if __name__ == "__main__":
    actor, dsn, path, seed, stop, quota = sys.argv[1:]
    ACTORS[actor](dsn, Ledger(Path(path)), random.Random(seed), Path(stop), int(quota))
