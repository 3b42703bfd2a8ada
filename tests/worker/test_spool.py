"""Failures that the database cannot take are kept in a file, and entered when it is back."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bartleby import Bartleby, Message, dev, worker
from bartleby.config import Settings
from tests.kit.proxy import Proxy, proxied
from tests.kit.worker import Conn, Gate, Told, drain, row, state, until, working

NO_SERVER = 1


@pytest.fixture
def wire(server: dev.Server) -> Iterator[Proxy]:
    with proxied(server.port) as made:
        yield made


def application(dsn: str, folder: Path) -> Bartleby:
    return Bartleby(dsn, settings=Settings(spool=str(folder)))


def spooled(folder: Path) -> int:
    """Return how many failures are in files."""
    return sum(path.read_text().count("\n") for path in folder.rglob("*.jsonl"))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def ledger(conn: Conn) -> Counter[tuple[str, str]]:
    return Counter(conn.execute("select outcome, error_type from bartleby.attempts").fetchall())


@pytest.mark.parametrize("stopped", [False, True])
def test_failures_of_an_outage_are_kept_and_recorded_once(
    app: Bartleby,
    dsn: str,
    conn: Conn,
    wire: Proxy,
    tmp_path: Path,
    *,
    server: dev.Server,
    monkeypatch: pytest.MonkeyPatch,
    stopped: bool,
) -> None:
    """By the same worker if it lives through it, else by the next one."""
    app.client.configure_queue("orders", {"max_attempts": 1, "lease": 600, "breaker": "off"})
    app.client.send_many("orders", [{"payload": number} for number in range(5)])
    gate, far = Gate(), application(wire.dsn(dsn), tmp_path)

    @far.handler("orders", concurrency=5)
    async def handle(message: Message) -> None:
        await gate.handler(awaited=True)(message)
        raise KeyError(message.payload)

    with working(far) as running:
        gate.wait_for_start(5)
        wire.lead_to(NO_SERVER)
        wire.cut()
        gate.open()
        until(lambda: spooled(tmp_path) == 5)
        assert running.worker.counts == {}
        if stopped:
            monkeypatch.setattr(worker, "_LAST_WORDS", 0.5)  # the database will not answer
            running.end()
        wire.lead_to(server.port)
        if not stopped:
            until(lambda: running.worker.counts["dead"] == 5)
            until(lambda: files(tmp_path) == [])
    if stopped:
        assert spooled(tmp_path) == 5
        following = application(dsn, tmp_path)
        following.handler("others")(print)
        drain(following)
    assert ledger(conn) == {("failed", "KeyError"): 5}
    assert state(conn) == (0, 0, 0, 5)
    assert files(tmp_path) == []


def test_unreadable_and_foreign_lines_are_put_aside(dsn: str, conn: Conn, tmp_path: Path, told: Told) -> None:
    app = application(dsn, tmp_path)
    app.client.create_queue("orders", {"max_attempts": 1, "lease": 600})
    app.send_many("orders", [{"payload": number} for number in range(3)])
    lease = app.client.claim("orders", "dead:1:aaaa", limit=3)
    assert lease is not None
    database = row(conn, "select bartleby.spool_identity()")
    good, bad, foreign = (
        {
            "id": f"entry {message.id}", "database": database, "queue": "orders", "worker": "dead:1:aaaa",
            "lease_id": message.lease_id, "position": message.position, "message_id": message.id,
            "attempt": message.attempt, "failed_at": time.time(),
            "failure": {"position": message.position, "error_type": "KeyError", "error": "x"},
        }
        for message in lease
    )  # fmt: skip
    bad["failure"] = {"verdict": "perhaps"}
    foreign["database"] = "another"
    written = "\n".join([*map(json.dumps, (bad, foreign, good)), "nonsense", '{"id": "torn'])
    for folder in (tmp_path / database, tmp_path / "another"):
        folder.mkdir()
        (folder / "left.jsonl").write_text(written)
    app.handler("others")(print)
    drain(app)
    assert ledger(conn) == {("failed", "KeyError"): 1}
    assert state(conn) == (0, 2, 0, 1)
    assert files(tmp_path) == ["left.jsonl", "left.unusable"]
    assert (tmp_path / database / "left.unusable").read_text() == written
    (event,) = told.of("spool.unusable")
    assert event.getMessage().startswith("3 lines of ")
