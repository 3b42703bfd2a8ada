"""A worker process is killed with SIGKILL in the middle of a batch; other workers finish its messages."""

import os
import signal
from pathlib import Path
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from tests.kit.clock import move_clock
from tests.kit.worker import Program, state, until

Connection = psycopg.Connection[tuple[Any, ...]]
LEASE_SECONDS = 3600
APP = """
import threading
from pathlib import Path
from bartleby import Bartleby, Message

app = Bartleby()


@app.handler("orders", concurrency=1)
def handle(message: Message) -> None:
    with Path("ran").open("a") as ledger:
        ledger.write(f"{message.payload} {message.attempt} {message.solo}\\n")
    if message.payload == 3:
        threading.Event().wait()
"""


def test_killed_worker_loses_no_message_and_only_the_killer_is_charged(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    clock = move_clock(conn)
    (tmp_path / "shop.py").write_text(APP)
    policy = Jsonb({"lease": LEASE_SECONDS, "crash_budget": 1})
    conn.execute("select bartleby.create_queue('orders', %s)", [policy])
    conn.execute("""select bartleby.send_many('orders', jsonb_agg(jsonb_build_object('payload', n)))
        from generate_series(1, 5) n""")  # fmt: skip

    def work_until_killed(runs: list[str]) -> None:
        """Kill a worker when it runs message 3 and has acknowledged what it ran before; take its leases back."""
        with Program(dsn, "shop:app", cwd=tmp_path) as worker:
            until(lambda: ledger(tmp_path) == runs and sum(state(conn)) == 3, what=worker.text())
            os.kill(worker.pid, signal.SIGKILL)
            assert worker.end() == -signal.SIGKILL
        clock.advance(LEASE_SECONDS + 1)
        conn.execute("select bartleby.reap()")

    first = ["1 1 False", "2 1 False", "3 1 False"]
    work_until_killed(first)
    assert conn.execute("select outcome, count(*) from bartleby.attempts group by 1").fetchall() == [("lost", 3)]
    second = [*first, "3 1 True"]
    work_until_killed(second)
    with Program(dsn, "shop:app", "--until-idle", cwd=tmp_path) as worker:
        assert worker.end() == 0, worker.text()
    assert ledger(tmp_path) == [*second, "4 1 True", "5 1 True"]
    assert state(conn) == (0, 0, 0, 1)
    dead = conn.execute("select payload, reason, attempts, crashes from bartleby.dead_letters").fetchall()
    assert dead == [(3, "crashed", 1, 1)]
    charged = "select count(*) from bartleby.attempts where outcome = 'crashed'"
    assert conn.execute(charged).fetchall() == [(1,)]


def ledger(folder: Path) -> list[str]:
    """Return payload, attempt and whether it ran alone for each run so far."""
    path = folder / "ran"
    return path.read_text().splitlines() if path.exists() else []
