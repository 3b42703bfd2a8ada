"""Sending: one message per transaction, and a thousand per call."""

import itertools
import json
import time
from collections.abc import Callable
from functools import partial

from bench import classic, ours
from bench.lab import Bar, Connection, Findings, Lab, compared, connect, interleaved, rows, script

Sender = Callable[[Connection, str], None]

BULK = 1_000
PAYLOAD = {"customer": "customer-7", "amount": 12.5, "currency": "EUR", "note": "please leave it at the door"}

# As the log, but for the partitions: what COPY saves by not choosing one is on its side.
COPIED = """
create table copied (like bartleby.log);
create unique index copied_position on copied (queue, position);
"""
POSITIONS = itertools.count(1)
COPY = b"copy copied (position, id, created_at, queue, slot, payload) from stdin"


def send(lab: Lab) -> Findings:
    """Messages per second on one connection."""
    found = Findings()
    length, rounds = lab.scaled(3, 1), lab.scaled(5, 2)
    with lab.database() as dsn:
        ours.Client(dsn).create()
        classic.Client(dsn).create()
        for durable in (True, False):
            with connect(dsn, durable=durable) as connection:
                measured = interleaved(
                    rounds,
                    partial(one_by_one, connection, ours_single, length),
                    partial(one_by_one, connection, classic_single, length),
                )
            name = f"send single, synchronous_commit {'on' if durable else 'off'}"
            found.figures.append(compared(name, "msg/s", measured, "classic"))
        with connect(dsn) as connection:
            script(connection, COPIED)
            mine, copied, theirs = interleaved(
                rounds,
                partial(in_bulk, connection, as_json, ours_bulk, length),
                partial(in_bulk, connection, as_copy, copy_bulk, length),
                partial(in_bulk, connection, as_json, classic_bulk, length),
            )
        bar = Bar("ratio", least=0.6)
        found.figures.append(compared("send 1,000 per call", "msg/s", (mine, copied), "COPY", bar))
        found.figures.append(compared("send 1,000 per call", "msg/s", (mine, theirs), "classic"))
    return found


def one_by_one(connection: Connection, sender: Sender, length: float) -> float:
    begin, sent = time.perf_counter(), 0
    while time.perf_counter() - begin < length:
        sender(connection, json.dumps({"order": sent, **PAYLOAD}))
        sent += 1
    return sent / (time.perf_counter() - begin)


def in_bulk(connection: Connection, maker: Callable[[], str], sender: Sender, length: float) -> float:
    """The rate of the calls alone; making the text is not what is compared."""
    spent, sent = 0.0, 0
    while spent < length:
        messages = maker()
        begin = time.perf_counter()
        sender(connection, messages)
        spent += time.perf_counter() - begin
        sent += BULK
    return sent / spent


def as_json() -> str:
    return json.dumps([{"payload": {"order": number, **PAYLOAD}} for number in range(BULK)])


def as_copy() -> str:
    payloads = (json.dumps({"order": number, **PAYLOAD}) for number in range(BULK))
    return "".join(f"{(n := next(POSITIONS))}\t{n}\t2026-01-01 00:00Z\t1\t0\t{text}\n" for text in payloads)


def ours_single(connection: Connection, payload: str) -> None:
    rows(connection, "select bartleby.send(%s, %s::jsonb)", ours.QUEUE, payload)


def classic_single(connection: Connection, payload: str) -> None:
    rows(
        connection,
        "insert into classic (queue, payload) values (%s, %s::jsonb) returning id",
        classic.QUEUE,
        payload,
    )


def ours_bulk(connection: Connection, messages: str) -> None:
    rows(connection, "select bartleby.send_many(%s, %s::jsonb)", ours.QUEUE, messages)


def classic_bulk(connection: Connection, messages: str) -> None:
    rows(
        connection,
        """insert into classic (queue, payload)
        select %s, m -> 'payload' from jsonb_array_elements(%s::jsonb) m returning id""",
        classic.QUEUE,
        messages,
    )


def copy_bulk(connection: Connection, lines: str) -> None:
    with connection.cursor() as cursor, cursor.copy(COPY) as copy:
        copy.write(lines)
