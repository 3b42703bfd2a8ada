"""Tools of the SQL tests: short names for the verbs, refusals by SQLSTATE, and proofs of waiting."""

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from bartleby import dev
from tests.kit.worker import LONG, until

Connection = psycopg.Connection[tuple[Any, ...]]
Connect = Callable[..., Connection]
Row = dict[str, Any]

SQL = Path(dev.__file__).parent / "sql"
PSQL = shutil.which("psql", path=dev.find_binaries()) or shutil.which("psql")
NO_WAIT = "-c statement_timeout=60s"
"""Options of a session that must not wait for another one."""
ROLES = ("bartleby_producer", "bartleby_worker", "bartleby_reader", "bartleby_operator", "bartleby_relay")


def rows(conn: Connection, query: LiteralString, *parameters: Any) -> list[Row]:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query, parameters or None).fetchall()


def row(conn: Connection, query: LiteralString, *parameters: Any) -> Row:
    found = rows(conn, query, *parameters)
    assert len(found) == 1, found
    return found[0]


def column(conn: Connection, query: LiteralString, *parameters: Any) -> list[Any]:
    return [found for (found,) in conn.execute(query, parameters or None).fetchall()]


def value(conn: Connection, query: LiteralString, *parameters: Any) -> Any:
    found = column(conn, query, *parameters)
    assert len(found) == 1, found
    return found[0]


def pages_read(conn: Connection, query: LiteralString, *parameters: Any) -> int:
    """Return how many pages a query reads, and roll it back.

    The first run also reads the catalog, and new statistics cause a new plan, so the smallest of three runs counts.
    """
    looks = []
    for _ in range(3):
        with conn.transaction(force_rollback=True):
            top = value(conn, "explain (analyze, buffers, format json) " + query, *parameters)[0]["Plan"]
        looks.append(top["Shared Hit Blocks"] + top["Shared Read Blocks"])
    return int(min(looks))


def create(conn: Connection, name: str = "q", **policy: Any) -> None:
    conn.execute("select bartleby.create_queue(%s, %s)", [name, Jsonb(policy)])


def send(conn: Connection, payload: Any = None, queue: str = "q", **options: Any) -> int:
    if "headers" in options:
        options["headers"] = Jsonb(options["headers"])
    named = "".join(f", p_{name} => %({name})s" for name in options)
    query = f"select bartleby.send(%(queue)s, %(payload)s{named})"
    found = conn.execute(query, {"queue": queue, "payload": Jsonb(payload), **options}).fetchone()
    assert found is not None
    return int(found[0])


def send_count(conn: Connection, count: int, queue: str = "q") -> list[int]:
    """Send that many messages, whose payloads are 1, 2, 3 …"""
    messages = "select jsonb_agg(jsonb_build_object('payload', n)) from generate_series(1, %s) n"
    return column(conn, f"select bartleby.send_many(%s, ({messages}))", queue, count)


@dataclass(frozen=True)
class Claim:
    messages: list[Row]

    @property
    def lease(self) -> int:
        leases = {message["lease_id"] for message in self.messages}
        assert len(leases) == 1, leases
        return int(leases.pop())

    @property
    def positions(self) -> list[int]:
        return [message["position"] for message in self.messages]

    @property
    def ids(self) -> list[int]:
        return [message["message_id"] for message in self.messages]

    @property
    def payloads(self) -> list[Any]:
        return [message["payload"] for message in self.messages]

    @property
    def one(self) -> Row:
        assert len(self.messages) == 1, self.messages
        return self.messages[0]


def claim(conn: Connection, limit: int = 1, queue: str = "q", lease: str | None = None, worker: str = "w") -> Claim:
    return Claim(rows(conn, "select * from bartleby.claim(%s, %s, %s, %s)", queue, worker, limit, lease))


def ack(conn: Connection, lease: int, positions: list[int] | None = None) -> int:
    return int(value(conn, "select bartleby.ack(%s, %s)", lease, positions))


def fail(conn: Connection, lease: int, *failures: Row) -> list[Row]:
    return rows(conn, "select * from bartleby.fail(%s, %s)", lease, Jsonb(list(failures)))


def fail_all(conn: Connection, claimed: Claim, **failure: Any) -> list[Row]:
    return fail(conn, claimed.lease, *({"position": position, **failure} for position in claimed.positions))


def release(conn: Connection, lease: int, positions: list[int] | None = None, delay: str = "0 seconds") -> int:
    return int(value(conn, "select bartleby.release(%s, %s, %s)", lease, positions, delay))


def reject(conn: Connection, lease: int, position: int, reason: str, description: str | None = None) -> None:
    conn.execute("select bartleby.reject(%s, %s, %s, %s)", [lease, position, reason, description])


def reap(conn: Connection) -> list[Row]:
    return rows(conn, "select * from bartleby.reap()")


def stats(conn: Connection, queue: str = "q") -> Row:
    return row(conn, "select * from bartleby.queues where name = %s", queue)


def last_line(conn: Connection) -> Row:
    """The last line of the audit log."""
    columns = "actor, action, subject, reason, request_id, before, after"
    return row(conn, f"select {columns} from bartleby.audit_log order by id desc limit 1")


def drain(conn: Connection, queue: str = "q", limit: int = 10000) -> list[Any]:
    """Claim and ack until nothing comes; return the payloads."""
    found: list[Any] = []
    while (claimed := claim(conn, limit, queue)).messages:
        found += claimed.payloads
        ack(conn, claimed.lease)
    return found


def snapshot_of_everything(conn: Connection) -> dict[str, list[Any]]:
    """Every row that a settlement could change."""
    tables = ["lease", "deferred", "attempt", "dead_letter", "log", "queue", "hole"]
    tables += ["unique_key", "breaker", "event", "sink"]
    return {table: column(conn, f"select t::text from bartleby.{table} t order by 1") for table in tables}


@contextmanager
def refused(sqlstate: str, *words: str, row: object = "it") -> Iterator[pytest.ExceptionInfo[psycopg.Error]]:
    """The block must raise an error with this SQLSTATE and these words; `row` names the row of a table of refusals."""
    name = f"{row!s:.100}"
    try:
        with pytest.raises(psycopg.Error) as caught:
            yield caught
    except pytest.fail.Exception:
        pytest.fail(f"{name} was accepted")
    assert caught.value.sqlstate == sqlstate, f"{name}: {caught.value.sqlstate}: {caught.value}"
    for word in words:
        assert word in str(caught.value), f"{name}: {word!r} is not in {caught.value}"


class Waiting:
    """A statement under way in another session."""

    def __init__(self, conn: Connection, work: Callable[[Connection], Any]) -> None:
        self.pid = conn.info.backend_pid
        self.future: Future[Any] = Future()
        self.thread = threading.Thread(target=self._run, args=(conn, work), daemon=True)
        self.thread.start()

    def _run(self, conn: Connection, work: Callable[[Connection], Any]) -> None:
        try:
            self.future.set_result(work(conn))
        except BaseException as error:  # noqa: BLE001 - it is raised again by result()
            self.future.set_exception(error)

    def result(self) -> Any:
        return self.future.result(timeout=LONG)


@contextmanager
def under_way(
    conn: Connection, work: Callable[[Connection], Any], waits: Callable[[Waiting], object]
) -> Iterator[Waiting]:
    """Run `work` in another thread and continue once it waits."""
    running = Waiting(conn, work)

    def seen() -> object:
        found = waits(running)
        assert found or not running.future.done(), f"it did not wait: {running.future}"
        return found

    until(seen)
    yield running
    running.thread.join(LONG)
    assert not running.thread.is_alive(), "it still waits"


def waiting(
    observer: Connection, conn: Connection, work: Callable[[Connection], Any], *, for_whom: Connection
) -> AbstractContextManager[Waiting]:
    """Run `work` in another thread and continue once the server reports that it waits for `for_whom`."""
    blocker, query = for_whom.info.backend_pid, "select pg_blocking_pids(%s)"
    return under_way(conn, work, lambda running: blocker in value(observer, query, running.pid))


def psql(dsn: str, *arguments: str, file: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run psql; the SQLSTATE of an error is in its stderr."""
    if PSQL is None:
        pytest.skip("there is no psql on this machine")
    command = [PSQL, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-v", "VERBOSITY=verbose", *arguments]
    if file is not None:
        command += ["-1", "-f", str(file)]
    return subprocess.run([*command, dsn], capture_output=True, text=True, check=False)
