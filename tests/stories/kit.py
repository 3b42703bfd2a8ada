"""Short names for stories, all by public means."""

from typing import Any

from tests.kit.relay import ANA, relaying, sink
from tests.kit.sql import Connection, Row, claim, fail_all, row, rows, send


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


__all__ = ["ANA", "Connection", "bury", "fail_one", "letter", "places", "relaying", "sink"]
