"""A dump taken while the ring turns is restored into another cluster: every message is there and can be handled."""

import shutil
import subprocess
from pathlib import Path

import psycopg
import pytest

from bartleby import dev
from tests.kit.clock import Clock, move_clock
from tests.kit.database import database_dsn
from tests.kit.demo import a_folder
from tests.kit.sql import Connect, Connection, claim, column, create, drain, psql, reap, reject, send
from tests.nightly.chaos.stage import turning


def test_dump_taken_while_the_ring_turns_restores_every_message(
    conn: Connection, dsn: str, connect: Connect, scratch: Path, tmp_path: Path
) -> None:
    pg_dump = shutil.which("pg_dump", path=dev.find_binaries())
    if pg_dump is None:
        pytest.skip("there is no pg_dump beside this PostgreSQL")
    alive, dead = populate(conn, connect)
    files = [tmp_path / f"restored{number}.sql" for number in range(3)]
    with turning(connect):
        for file in files:
            subprocess.run([pg_dump, "-xO", "-d", dsn, "-f", file], check=True)
    with a_folder(scratch) as folder, dev.start(folder) as elsewhere:
        for file in files:
            with psycopg.connect(elsewhere.dsn, autocommit=True) as admin:
                admin.execute(f"create database {file.stem}".encode())
            restored = database_dsn(elsewhere, file.stem)
            done = psql(restored, "-o", str(tmp_path / "out"), "-f", str(file))
            assert done.returncode == 0, done.stderr
            with psycopg.connect(restored, autocommit=True) as there:
                go_on(there, alive, dead)


def populate(conn: Connection, connect: Connect) -> tuple[list[str], list[str]]:
    """Put messages into every place there is, with open senders; return what is alive and what is dead."""
    clock = move_clock(conn)
    create(conn, backoff="none")
    conn.execute(
        "select bartleby.send_many('q', jsonb_agg(jsonb_build_object('payload', repeat('x', 500))))"
        " from generate_series(1, 200)"
    )
    drain(conn)
    for k in range(2):
        send(connect(autocommit=False), "never")
        send(conn, f"behind {k}")
        assert drain(conn) == [f"behind {k}"]
        clock.advance(5 - 5 * k)
        assert drain(conn) == []
    assert conn.execute("select from bartleby.hole").rowcount == 1
    alive, dead = [f"alive {k}" for k in range(30)], ["dead 0", "dead 1"]
    for value in (*dead, *alive[:20]):
        send(conn, value)
    for value in alive[20:]:
        send(conn, value, delay="10 seconds")
    for value in dead:
        claimed = claim(conn)
        assert claimed.payloads == [value]
        reject(conn, claimed.lease, claimed.positions[0], "unacceptable")
    assert claim(conn, 5).payloads == alive[:5]
    return alive, dead


def go_on(conn: Connection, alive: list[str], dead: list[str]) -> None:
    assert column(conn, "select payload from bartleby.messages order by message_id") == alive
    Clock(conn).advance(3600)
    reap(conn)
    send(conn, "new")
    conn.execute("select bartleby.replay(array(select message_id from bartleby.dead_letters), 'me', 'restored')")
    assert sorted(drain(conn, limit=10)) == sorted([*alive, *dead, "new"])
    assert conn.execute("select from bartleby.messages").rowcount == 0
