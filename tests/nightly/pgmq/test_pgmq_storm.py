"""Ten thousand messages of pgmq, some poisonous, and readers that are killed: none is lost, each dies once."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit.pgmq import QUEUE, SIBLING, agrees, letters, made, watch
from tests.kit.sql import Connection, column, row, value

MESSAGES, POISON, KILLS = 10_000, 20, 20
READER = Path(__file__).with_name("reader.py")


def start(dsn: str, poison: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, str(READER), dsn, QUEUE, str(poison)])


def drained(conn: Connection, dsn: str, poison: int, kills: int) -> None:
    """Let two readers work until nothing is left, and kill them now and then."""
    rng = random.Random(7)
    readers = [start(dsn, poison) for _ in range(2)]
    try:
        deadline = time.monotonic() + 300
        while value(conn, "select count(*) from pgmq.q_jobs"):
            assert time.monotonic() < deadline, "it does not end"
            time.sleep(rng.uniform(0.1, 0.4))
            if kills:
                kills -= 1
                victim = rng.randrange(2)
                readers[victim].send_signal(signal.SIGKILL)
                readers[victim].wait()
                readers[victim] = start(dsn, poison)
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
    assert kills == 0, f"{kills} were spared"


@pytest.mark.timeout(400)  # twenty readers are started, which takes its time where many want the processor
def test_nothing_is_lost_and_each_poisonous_message_dies_once(conn: Connection, dsn: str) -> None:
    made(conn)
    conn.execute(
        "select count(*) from pgmq.send_batch('jobs', (select array_agg(to_jsonb(n)) from generate_series(1, %s) n))",
        [MESSAGES],
    )
    conn.execute("create table done (n integer not null)")
    drained(conn, dsn, POISON, KILLS)

    poisonous = [n for n in range(1, MESSAGES + 1) if n % POISON == 0]
    assert sorted(each["payload"] for each in letters(conn)) == poisonous
    done = set(column(conn, "select distinct n from done"))
    assert done == set(range(1, MESSAGES + 1)) - set(poisonous)
    assert {each["attempts"] for each in letters(conn)} == {5}
    metrics = "select queue_length, total_messages from pgmq.metrics(%s)"
    assert row(conn, metrics, QUEUE) == {"queue_length": 0, "total_messages": MESSAGES}
    assert row(conn, metrics, SIBLING)["queue_length"] == len(poisonous)
    agrees(conn)

    ids = column(conn, "select message_id from bartleby.dead_letters")
    assert len(column(conn, "select bartleby.replay(%s, 'ann', 'fixed')", ids)) == len(ids)
    drained(conn, dsn, 0, 0)
    watch(conn)
    assert {each["status"] for each in letters(conn)} == {"resolved"}
    assert row(conn, metrics, SIBLING)["queue_length"] == 0
    assert set(column(conn, "select distinct n from done")) == set(range(1, MESSAGES + 1))
    agrees(conn)
