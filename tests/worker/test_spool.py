"""Failures that the database cannot take are kept in a file, and entered when it is back."""

import json
from collections import Counter
from pathlib import Path

import pytest

from bartleby import Bartleby, Message, dev, worker
from bartleby.config import Settings
from tests.kit.proxy import proxied
from tests.kit.worker import Conn, Gate, Told, drain, numbered, present, row, state, until, working

NO_SERVER = 1


def application(dsn: str, folder: Path) -> Bartleby:
    app = Bartleby(dsn, settings=Settings(spool=str(folder)))
    app.handler("others")(print)
    return app


def spooled(folder: Path) -> int:
    """Return how many failures are in files."""
    return sum(path.read_text().count("\n") for path in folder.rglob("*.jsonl"))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def ledger(conn: Conn) -> Counter[tuple[str, str]]:
    return Counter(conn.execute("select outcome, error_type from bartleby.attempts").fetchall())


@pytest.mark.parametrize("stopped", [False, True])
def test_failures_of_an_outage_are_kept_and_recorded_once(
    app: Bartleby, dsn: str, conn: Conn, tmp_path: Path, server: dev.Server, *, stopped: bool
) -> None:
    """By the same worker if it lives through it, else by the next one."""
    app.client.configure_queue("orders", {"max_attempts": 1, "lease": 600, "breaker": "off"})
    app.client.send_many("orders", numbered(5))
    gate = Gate()

    async def handle(message: Message) -> None:
        await gate.handler(awaited=True)(message)
        raise KeyError(message.payload)

    with proxied(server.port) as wire, pytest.MonkeyPatch.context() as patch:
        far = application(wire.dsn(dsn), tmp_path)
        far.handler("orders", concurrency=5)(handle)
        with working(far) as running:
            gate.wait_for_start(5)
            wire.lead_to(NO_SERVER)
            wire.cut()
            gate.open()
            until(lambda: spooled(tmp_path) == 5)
            assert running.worker.counts == {}
            if stopped:
                patch.setattr(worker, "_LAST_WORDS", 0.5)  # the database will not answer
                running.end()
            wire.lead_to(server.port)
            if not stopped:
                until(lambda: running.worker.counts["dead"] == 5)
                until(lambda: files(tmp_path) == [])
    if stopped:
        assert spooled(tmp_path) == 5
        drain(application(dsn, tmp_path))
    assert ledger(conn) == {("failed", "KeyError"): 5}
    assert state(conn) == (0, 0, 0, 5)
    assert files(tmp_path) == []


def test_unreadable_and_foreign_lines_are_put_aside(dsn: str, conn: Conn, tmp_path: Path, told: Told) -> None:
    app = application(dsn, tmp_path)
    app.client.create_queue("orders", {"max_attempts": 1, "lease": 600})
    app.send_many("orders", numbered(3))
    database = row(conn, "select bartleby.spool_identity()")
    good, bad, foreign = (
        {
            "id": f"entry {message.id}", "database": database, "queue": "orders", "worker": "dead:1:aaaa",
            "lease_id": message.lease_id, "position": message.position, "message_id": message.id,
            "attempt": message.attempt, "failed_at": message.created_at.timestamp(),
            "failure": {"position": message.position, "error_type": "KeyError", "error": "x"},
        }
        for message in present(app.client.claim("orders", "dead:1:aaaa", limit=3))
    )  # fmt: skip
    bad["failure"] = {"verdict": "perhaps"}
    foreign["database"] = "another"
    written = "\n".join([*map(json.dumps, (bad, foreign, good)), "nonsense", '{"id": "torn'])
    for folder in (tmp_path / database, tmp_path / "another"):
        folder.mkdir()
        (folder / "left.jsonl").write_text(written)
    drain(app)
    assert ledger(conn) == {("failed", "KeyError"): 1}
    assert state(conn) == (0, 2, 0, 1)
    assert files(tmp_path) == ["left.jsonl", "left.unusable"]
    assert (tmp_path / database / "left.unusable").read_text() == written
    (event,) = told.of("spool.unusable")
    assert event.getMessage().startswith("3 lines of ")
