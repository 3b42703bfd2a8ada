"""A dump taken while the ring turns is restored into another cluster: every message is there and can be handled."""

import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg.types.json import Jsonb

from bartleby import dev
from tests.kit.clock import Clock, move_clock

Connection = psycopg.Connection[tuple[Any, ...]]
FILLER: LiteralString = """
    select bartleby.send_many('q', jsonb_agg(jsonb_build_object('payload', repeat('x', 500))))
    from generate_series(1, 200)"""


def program(name: str) -> str:
    found = shutil.which(name, path=dev.find_binaries())
    if found is None:
        pytest.skip(f"there is no {name} beside this PostgreSQL")
    return found


def test_dump_taken_while_the_ring_turns_restores_every_message(
    dsn: str, connect: Callable[..., Connection], scratch: Path, tmp_path: Path
) -> None:
    pg_dump, psql = program("pg_dump"), program("psql")
    conn = connect()
    clock = move_clock(conn)
    alive, dead = populate(conn, clock, connect)
    with turning(connect):
        for number in range(3):
            file = tmp_path / f"{number}.sql"
            subprocess.run([pg_dump, "-xO", "-d", dsn, "-f", file], check=True)
    folder = Path(tempfile.mkdtemp(prefix="bartleby-restore-", dir=scratch))
    try:
        with dev.start(folder) as elsewhere:
            for number in range(3):
                restored = f"{elsewhere.dsn.rpartition('/')[0]}/restored{number}"
                with psycopg.connect(elsewhere.dsn, autocommit=True) as admin:
                    admin.execute(f"create database restored{number}".encode())
                command = [psql, "-Xq", "-v", "ON_ERROR_STOP=1", "-o", str(tmp_path / "out"), "-d", restored]
                subprocess.run([*command, "-f", str(tmp_path / f"{number}.sql")], check=True)
                with psycopg.connect(restored, autocommit=True) as there:
                    go_on(there, alive, dead)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def populate(conn: Connection, clock: Clock, connect: Callable[..., Connection]) -> tuple[list[str], list[str]]:
    """Put messages into every place there is, with open senders; return what is alive and what is dead."""
    conn.execute("select bartleby.create_queue('q', '{\"backoff\": \"none\"}')")
    conn.execute(FILLER)
    while claim(conn, 100, ack=True):
        pass
    for k in range(2):
        slow = connect(autocommit=False)
        slow.execute("select bartleby.send('q', '\"never\"')")
        conn.execute("select bartleby.send('q', %s)", [Jsonb(f"behind {k}")])
        assert claim(conn, 10, ack=True) == [f"behind {k}"]
        assert claim(conn, 10, ack=True) == []
        clock.advance(5 - 5 * k)
        assert claim(conn, 10, ack=True) == []
    assert conn.execute("select from bartleby.hole").rowcount == 1
    alive, dead = [f"alive {k}" for k in range(30)], ["dead 0", "dead 1"]
    for value in (*dead, *alive[:20]):
        conn.execute("select bartleby.send('q', %s)", [Jsonb(value)])
    for value in alive[20:]:
        conn.execute("select bartleby.send('q', %s, p_delay => '10 seconds')", [Jsonb(value)])
    for value in dead:
        ((lease, position, payload),) = conn.execute(
            "select lease_id, position, payload from bartleby.claim('q', 'w')"
        ).fetchall()
        assert payload == value
        conn.execute("select bartleby.reject(%s, %s, 'unacceptable')", [lease, position])
    assert claim(conn, 5, ack=False) == alive[:5]
    return alive, dead


def claim(conn: Connection, limit: int, *, ack: bool) -> list[str]:
    query = "select lease_id, payload from bartleby.claim('q', 'w', %s) order by position"
    rows = conn.execute(query, [limit]).fetchall()
    if rows and ack:
        conn.execute("select bartleby.ack(%s)", [rows[0][0]])
    return [row[1] for row in rows]


@contextmanager
def turning(connect: Callable[..., Connection]) -> Iterator[None]:
    """Turn the ring as fast as possible."""
    conn, stop, failed = connect(), threading.Event(), list[BaseException]()

    def turn() -> None:
        try:
            while not stop.is_set():
                conn.execute("select bartleby.turn(0)")
        except BaseException as error:  # noqa: BLE001 - raised below, in the test
            failed.append(error)

    thread = threading.Thread(target=turn)
    thread.start()
    yield
    stop.set()
    thread.join()
    assert not failed


def go_on(conn: Connection, alive: list[str], dead: list[str]) -> None:
    rows = conn.execute("select payload from bartleby.messages order by message_id").fetchall()
    assert [payload for (payload,) in rows] == alive
    conn.execute("update public.test_clock set shift = shift + interval '1 hour'")
    conn.execute("select bartleby.reap()")
    conn.execute("select bartleby.send('q', '\"new\"')")
    ids = [row[0] for row in conn.execute("select message_id from bartleby.dead_letters")]
    conn.execute("select bartleby.replay(%s, 'me', 'restored')", [ids])
    got: list[str] = []
    while some := claim(conn, 10, ack=True):
        got += some
    assert sorted(got) == sorted([*alive, *dead, "new"])
    assert conn.execute("select from bartleby.messages").rowcount == 0
