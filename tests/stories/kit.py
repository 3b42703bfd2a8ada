"""Short names for the acceptance tests, all by public means: SQL, the library, the worker, the relay.

bury(conn)         a message that dies at its first attempt; its id
fail_one(conn)     a message is claimed and its attempt fails; the row of the attempt
lose(conn, clock)  a message is claimed and its lease lapses
relaying(dsn)      a relay until the end of the block
"""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from bartleby import Client, Sink
from bartleby.config import Settings
from bartleby.relay import Relay
from bartleby.testing import Clock
from tests.kit.sql import Claim, Connection, Row, claim, fail, reap, row, rows, send
from tests.kit.worker import Running, until

if TYPE_CHECKING:
    from bartleby.worker import Worker

ANA: dict[str, Any] = {"actor": "ana", "reason": "the cause is fixed"}
SECOND = timedelta(seconds=1)


def bury(conn: Connection, payload: Any = None, queue: str = "q", error: str = "'x'", **options: Any) -> int:
    """Send a message whose first attempt fails for good."""
    sent = send(conn, payload, queue, **options)
    fail_one(conn, queue, verdict="dead", error_type="KeyError", error=error)
    return sent


def fail_one(conn: Connection, queue: str = "q", **failure: Any) -> Row:
    """Let the attempt at the next message fail; return its row in the ledger."""
    work = claim(conn, queue=queue)
    [decided] = fail(conn, work.lease, {"position": work.one["position"], **failure})
    return ledger(conn, decided["message_id"])[-1]


def fail_until_dead(conn: Connection, clock: Clock, queue: str = "q", **failure: Any) -> list[timedelta]:
    """Let every attempt of one message fail; return the delay after each."""
    waits: list[timedelta] = []
    while (found := fail_one(conn, queue, **failure))["verdict"] == "retry":
        waits.append(found["retry_at"] - found["failed_at"])
        clock.advance(waits[-1])
    return waits


def lose(conn: Connection, clock: Clock, queue: str = "q", limit: int = 1) -> Claim:
    """Claim as a worker that goes silent; its lease lapses and is taken back."""
    lost = claim(conn, limit, queue)
    clock.advance(61)
    reap(conn)
    clock.advance(0)  # it is due after this moment
    return lost


def letter(conn: Connection, message_id: int) -> Row:
    return row(conn, "select * from bartleby.dead_letters where message_id = %s", message_id)


def ledger(conn: Connection, message_id: int) -> list[Row]:
    attempts = "select * from bartleby.attempts where message_id = %s order by cycle, failed_at, attempt"
    return rows(conn, attempts, message_id)


def places(conn: Connection, message_id: int) -> list[str]:
    """The states of a message, over all places where it could be."""
    living = "select state from bartleby.messages where message_id = %s"
    dead = "select status as state from bartleby.dead_letters where message_id = %s and status = 'dead'"
    return [each["state"] for each in rows(conn, living, message_id) + rows(conn, dead, message_id)]


def sink(client: Client) -> Sink:
    [found] = [each for each in client.sinks() if each.name == "bus"]
    return found


@contextlib.contextmanager
def relaying(dsn: str) -> Iterator[Running]:
    """Run a relay; it is stopped at the end."""
    running = Running(cast("Worker", Relay(Settings(dsn=dsn, spool="off"), look=0.1, poll=0.05)))
    try:
        yield running
    finally:
        if running.thread.is_alive():
            running.stop()
            running.stop()
        running.thread.join(30)
    assert not running.thread.is_alive(), "the relay does not end"
    if running.error is not None:
        raise running.error


__all__ = [
    "ANA", "SECOND", "Connection", "bury", "fail_one", "fail_until_dead", "ledger", "letter", "lose", "places",
    "relaying", "sink", "until",
]  # fmt: skip
