"""A client that drains a queue needs no more memory at the end than at the beginning."""

import json
import subprocess
import sys

import psycopg
import pytest

BATCH = 500
SMALL_CONSTANT = 2 << 20

# Drains the queue in batches, decodes every payload, and tells its resident memory after each tenth.
CHILD = """
import gc, json, os, resource, sys
from pathlib import Path
from bartleby import Client

def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

dsn, count, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
seen, sizes = 0, []
with Client(dsn) as client:
    while lease := client.claim("orders", "drain", limit=batch):
        seen += sum(message.payload["n"] >= 0 for message in lease)
        client.ack(lease.id)
        if seen >= (len(sizes) + 1) * count // 10:
            sizes.append(resident())
print(json.dumps({"seen": seen, "sizes": sizes}))
"""


def drain(dsn: str, conn: psycopg.Connection[tuple[object, ...]], count: int) -> None:
    conn.execute("select bartleby.create_queue('orders')")
    conn.execute(
        "select count(*) from (select jsonb_agg(jsonb_build_object("
        "'payload', jsonb_build_object('n', n, 'text', repeat('x', 200)))) as batch"
        " from generate_series(1, %s) n group by n / 1000) m, bartleby.send_many('orders', m.batch)",
        [count],
    )
    done = subprocess.run(
        [sys.executable, "-c", CHILD, dsn, str(count), str(BATCH)], capture_output=True, text=True, check=True
    )
    told = json.loads(done.stdout)
    assert told["seen"] == count
    _, warm, *later = told["sizes"]
    assert len(later) == 8
    assert max(later) < warm * 1.05 + SMALL_CONSTANT, told["sizes"]


def test_draining_a_hundred_thousand_messages_keeps_memory_flat(
    dsn: str, conn: psycopg.Connection[tuple[object, ...]]
) -> None:
    drain(dsn, conn, 100_000)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_draining_a_million_messages_keeps_memory_flat(dsn: str, conn: psycopg.Connection[tuple[object, ...]]) -> None:
    drain(dsn, conn, 1_000_000)
