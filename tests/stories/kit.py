"""Short names for stories, all by public means: SQL, the library, the relay."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from bartleby import Client, Sink
from bartleby.config import Settings
from bartleby.relay import Relay
from tests.kit.sql import Connection, Row, claim, fail_all, row, rows, send
from tests.kit.worker import Running

if TYPE_CHECKING:
    from bartleby.worker import Worker

ANA: dict[str, Any] = {"actor": "ana", "reason": "the cause is fixed"}


def bury(conn: Connection, payload: Any = None, queue: str = "q", error: str = "'x'", **options: Any) -> int:
    """Send a message whose first attempt fails for good."""
    sent = send(conn, payload, queue, **options)
    fail_one(conn, queue, verdict="dead", error_type="KeyError", error=error)
    return sent


def fail_one(conn: Connection, queue: str = "q", **failure: Any) -> None:
    """Let the attempt at the next message fail."""
    fail_all(conn, claim(conn, queue=queue), **failure)


def letter(conn: Connection, message_id: int) -> Row:
    return row(conn, "select * from bartleby.dead_letters where message_id = %s", message_id)


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


__all__ = ["ANA", "Connection", "bury", "fail_one", "letter", "places", "relaying", "sink"]
