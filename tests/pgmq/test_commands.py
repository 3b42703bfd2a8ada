"""`bartleby work --pgmq`: the same handlers, policy and commands over pgmq."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.commands import Done
from tests.kit.pgmq import QUEUE, SCRIPT, SIBLING, agrees, inside, letters, put, step, watch
from tests.kit.sql import Connection, rows, value

APP = """
from bartleby import Bartleby, Message, Terminal

app = Bartleby()


@app.handler("jobs")
def handle(message: Message) -> None:
    print("ran", message.payload, message.attempt, flush=True)
    if message.payload == "poison":
        raise ValueError("cannot be swallowed")
    if message.payload == "hopeless":
        raise Terminal("never")
"""


@pytest.mark.seed("pgmq-4", "pgmq-18", "pgmq-37", "pgmq-44", "pgmq-57")
def test_worker_runs_over_pgmq_and_commands_replay_its_letters(
    conn: Connection, dsn: str, tmp_path: Path, bartleby: Callable[..., Done]
) -> None:
    conn.execute("select pgmq.create('jobs')")
    put(conn, "good", "poison", "hopeless")
    (tmp_path / "shop.py").write_text(APP)
    command = [sys.executable, "-m", "bartleby", "--dsn", dsn, "work", "shop:app", "--pgmq", QUEUE, "--until-idle"]
    environment = {**os.environ, "BARTLEBY_PGMQ_MAX_ATTEMPTS": "3"}
    work = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert work.returncode == 0, work.stderr
    runs = sorted(line for line in work.stdout.splitlines() if line.startswith("ran"))
    assert runs == ["ran good 1", "ran hopeless 1", "ran poison 1", "ran poison 2", "ran poison 3"]
    assert inside(conn) == []
    found = sorted((each["payload"], each["reason"], each["error"], each["attempts"]) for each in letters(conn))
    assert found == [("hopeless", "terminal", "never", 1), ("poison", "exhausted", "cannot be swallowed", 3)]
    assert all("shop.py" in each["traceback"] for each in letters(conn))
    assert value(conn, "select max_attempts from bartleby.queues where name = 'jobs'") == 3
    agrees(conn)
    assert "ValueError: cannot be swallowed" in bartleby("groups").out
    assert bartleby("replay", "queue:jobs", "--reason", "fixed", "--yes", "--detach").code == 0
    step(conn)
    conn.execute("select pgmq.archive('jobs', msg_id) from bartleby.pgmq_read('jobs', 30, 10)")
    assert watch(conn) == 2
    step(conn)
    assert value(conn, "select status from bartleby.replays") == "finished"
    assert (inside(conn), inside(conn, SIBLING)) == ([], [])
    assert [each["status"] for each in letters(conn)] == ["resolved", "resolved"]


@pytest.mark.own_database
class TestWithoutPgmq:
    """A database in which pgmq was never installed."""

    @pytest.fixture
    def template(self) -> str:
        return "template0"

    @pytest.mark.seed("pgmq-74")
    def test_missing_pgmq_is_reported_and_may_come_later(self, conn: Connection, bartleby: Callable[..., Done]) -> None:
        assert bartleby("install").code == 0
        assert rows(conn, "select proname from pg_proc where proname like 'pgmq%'") == []
        done = bartleby("queues", "attach", QUEUE)
        assert (done.code != 0, "no pgmq" in done.err, "bartleby install" in done.err) == (True, True, True)
        conn.execute(SCRIPT.read_bytes())
        conn.execute("select pgmq.create('jobs')")
        assert bartleby("install").code == 0
        assert bartleby("queues", "attach", QUEUE).code == 0
        assert value(conn, "select count(*) from bartleby.drift()") == 0
