"""`bartleby queues attach` and `bartleby work --pgmq`: the same handlers, policy and commands over pgmq."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.kit.pgmq import QUEUE, SIBLING, agrees, inside, letters, made, put
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


def bartleby(dsn: str, folder: Path, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    (folder / "shop.py").write_text(APP)
    command = [sys.executable, "-m", "bartleby", "--dsn", dsn, *words]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=100
    )


@contextmanager
def archiving(dsn: str) -> Iterator[None]:
    """A reader that does everything well, and a janitor that sees it."""
    over = threading.Event()

    def read() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            while not over.wait(0.05):
                conn.execute("select pgmq.archive('jobs', msg_id) from bartleby.pgmq_read('jobs', 30, 10)")
                conn.execute("select bartleby.watch()")

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        over.set()
        reader.join()


@pytest.mark.seed("pgmq-37", "pgmq-44")
def test_worker_runs_over_pgmq(conn: Connection, dsn: str, tmp_path: Path) -> None:
    conn.execute("select pgmq.create('jobs')")
    put(conn, "good", "poison", "hopeless")
    done = bartleby(dsn, tmp_path, "work", "shop:app", "--pgmq", QUEUE, "--until-idle", BARTLEBY_PGMQ_MAX_ATTEMPTS="3")
    assert done.returncode == 0, done.stderr
    runs = sorted(line for line in done.stdout.splitlines() if line.startswith("ran"))
    assert runs == ["ran good 1", "ran hopeless 1", "ran poison 1", "ran poison 2", "ran poison 3"]
    assert inside(conn) == []
    found = sorted((each["payload"], each["reason"], each["error"], each["attempts"]) for each in letters(conn))
    assert found == [("hopeless", "terminal", "never", 1), ("poison", "exhausted", "cannot be swallowed", 3)]
    assert all("shop.py" in each["traceback"] for each in letters(conn))
    assert value(conn, "select max_attempts from bartleby.queues where name = 'jobs'") == 3
    agrees(conn)


@pytest.mark.seed("pgmq-4", "pgmq-18", "pgmq-57")
def test_commands_show_and_replay_its_letters(conn: Connection, dsn: str, tmp_path: Path) -> None:
    made(conn, max_attempts=1)
    put(conn, "poison")
    assert bartleby(dsn, tmp_path, "work", "shop:app", "--pgmq", QUEUE, "--until-idle").returncode == 0
    assert "ValueError: cannot be swallowed" in bartleby(dsn, tmp_path, "groups").stdout
    (tmp_path / "shop.py").write_text(APP)
    with archiving(dsn):
        replayed = bartleby(dsn, tmp_path, "replay", "queue:jobs", "--reason", "fixed", "--yes")
    assert replayed.returncode == 0, replayed.stderr
    assert replayed.stdout == "1: done\n"
    assert (inside(conn), inside(conn, SIBLING)) == ([], [])
    assert [each["status"] for each in letters(conn)] == ["resolved"]


def test_queue_is_attached_by_command(conn: Connection, dsn: str, tmp_path: Path) -> None:
    missing = bartleby(dsn, tmp_path, "queues", "attach", QUEUE)
    assert missing.returncode != 0
    assert "pgmq has no queue 'jobs'" in missing.stderr
    assert "pgmq.create" in missing.stderr
    for queue in (QUEUE, SIBLING):
        conn.execute("select pgmq.create(%s)", [queue])
    put(conn, 1, 2, queue=SIBLING)
    done = bartleby(dsn, tmp_path, "queues", "attach", QUEUE, "--policy", '{"max_attempts": 7}')
    assert done.stdout == "queue jobs of pgmq is attached; dead letters: 2\n", done.stderr
    assert value(conn, "select max_attempts from bartleby.queues") == 7


@pytest.mark.own_database
class TestWithoutPgmq:
    """A database in which pgmq was never installed."""

    @pytest.fixture
    def template(self) -> str:
        return "template0"

    @pytest.mark.seed("pgmq-74")
    def test_missing_pgmq_is_reported_and_may_come_later(
        self, conn: Connection, dsn: str, tmp_path: Path, bare: str
    ) -> None:
        assert bartleby(dsn, tmp_path, "install").returncode == 0
        assert rows(conn, "select proname from pg_proc where proname like 'pgmq%'") == []
        done = bartleby(dsn, tmp_path, "queues", "attach", QUEUE)
        assert done.returncode != 0
        assert "no pgmq" in done.stderr
        assert "bartleby install" in done.stderr
        conn.execute(bare.encode())
        conn.execute("select pgmq.create('jobs')")
        assert bartleby(dsn, tmp_path, "install").returncode == 0
        assert bartleby(dsn, tmp_path, "queues", "attach", QUEUE).returncode == 0
        assert value(conn, "select count(*) from bartleby.drift()") == 0
