"""Outages and kills while messages fail: every failure is recorded, and only once."""

import contextlib
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bartleby import Bartleby
from tests.kit.sql import Connection
from tests.kit.worker import Program, state, until
from tests.nightly.chaos.servers import OwnServer

SHOP = """
import os, time
from pathlib import Path
from bartleby import Bartleby

app = Bartleby()
note = os.open("notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

@app.handler("orders", concurrency=20)
def handle(message):
    time.sleep(0.01)
    word = "failed" if Path("broken").exists() else "done"
    os.write(note, f"{word} {message.id} {message.lease_id}\\n".encode())
    if word == "failed":
        raise KeyError(f"customer {message.payload}")
"""


def begin(shop: Path, server: OwnServer) -> Program:
    return Program(server.dsn, "shop:app", cwd=shop, environment={"BARTLEBY_SPOOL": str(shop / "spool")})


def notes(shop: Path, word: str) -> list[tuple[int, int]]:
    """Return what handlers wrote: message and lease."""
    found = [line.split() for line in (shop / "notes").read_text().splitlines()] if (shop / "notes").exists() else []
    return [(int(message), int(lease)) for what, message, lease in found if what == word]


def spooled(shop: Path) -> list[dict[str, Any]]:
    found = [path.read_text() for path in (shop / "spool").rglob("*.jsonl")]
    return [json.loads(line) for text in found for line in text.splitlines(keepends=True) if line.endswith("\n")]


def recorded(conn: Connection) -> list[tuple[int, int]]:
    """Return message and lease of each failure of a handler that the database has."""
    return conn.execute("select message_id, lease_id from bartleby.attempts where error_type = 'KeyError'").fetchall()


def test_kills_and_outages_lose_no_failure(scratch: Path, tmp_path: Path) -> None:
    """Whatever is killed when: each failure that was written to the disk is recorded, once."""
    rng = random.Random(7)
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "broken").touch()
    with OwnServer(scratch, {"fsync": "off"}) as server, contextlib.ExitStack() as opened:
        with Bartleby(server.dsn).client as client:
            policy = {"backoff": "none", "lease": 4, "max_attempts": 1000, "crash_budget": 1000, "breaker": "off"}
            client.create_queue("orders", policy)
            client.send_many("orders", [{"payload": number} for number in range(60)])
        worker = opened.enter_context(begin(tmp_path, server))
        for _ in range(4):
            enough = len(notes(tmp_path, "failed")) + 20
            until(lambda enough=enough: len(notes(tmp_path, "failed")) > enough)  # type: ignore[misc]
            with server.connect() as conn:
                conn.execute("checkpoint")  # a claim need not be on the disk, and would be undone
            server.stop_at_once()
            safe = at_rest(tmp_path)
            first, then = rng.sample([server.start_again, worker.process.kill], 2)
            first()
            then()
            worker = opened.enter_context(begin(tmp_path, server))
            with server.connect() as conn:
                until(lambda conn=conn, safe=safe: safe <= set(recorded(conn)))  # type: ignore[misc]
        (tmp_path / "broken").unlink()
        with server.connect() as conn:
            until(lambda: state(conn) == (0, 0, 0, 0))
            until(lambda: spooled(tmp_path) == [])
            assert set(Counter(recorded(conn)).values()) == {1}
            assert set(recorded(conn)) <= set(notes(tmp_path, "failed"))
        assert len({message for message, _ in notes(tmp_path, "done")}) == 60


def at_rest(shop: Path) -> set[tuple[int, int]]:
    """Wait until nothing more has happened for two seconds; return what is in the spool."""
    seen, since = (-1, -1), 0.0

    def still() -> bool:
        nonlocal seen, since
        now = len(notes(shop, "failed")), len(spooled(shop))
        if now != seen:
            seen, since = now, time.monotonic()
        return time.monotonic() - since > 2

    until(still)
    return {(each["message_id"], each["lease_id"]) for each in spooled(shop)}
