"""Short names for pgmq and for what is attached to it."""

from importlib.resources import files
from typing import Any

from psycopg.types.json import Jsonb

from tests.kit import plans, sql
from tests.kit.events import NOT_RECORDED
from tests.kit.sql import Claim, Connection, Row, column, rows, value

QUEUE, SIBLING = "jobs", "jobs_dlq"
SCRIPT = files("pgmq") / "sql" / "pgmq.sql"
"""The SQL that the Python package of pgmq ships."""


def attach(conn: Connection, queue: str = QUEUE, *, sibling: bool = True, **policy: Any) -> None:
    conn.execute("select bartleby.pgmq_attach(%s, %s, %s)", [queue, Jsonb(policy), sibling])


def made(conn: Connection, **policy: Any) -> None:
    conn.execute("select pgmq.create(%s)", [QUEUE])
    attach(conn, **({"backoff": "none"} | policy))


def put(conn: Connection, *payloads: Any, queue: str = QUEUE, headers: Row | None = None) -> list[int]:
    query = "select pgmq.send(%s, %s::jsonb, %s::jsonb)"
    return [value(conn, query, queue, Jsonb(each), Jsonb(headers)) for each in payloads]


def read(conn: Connection, qty: int = 10, vt: int = 0, queue: str = QUEUE) -> list[Row]:
    """What a reader gets; it is in sight again at once, unless `vt` says otherwise."""
    return rows(conn, "select * from bartleby.pgmq_read(%s, %s, %s)", queue, vt, qty)


def fail(conn: Connection, msg_id: int, error: str = "boom", kind: str = "ValueError", **details: Any) -> Any:
    read_ct = details.pop("read_ct", None)
    return value(
        conn, "select bartleby.pgmq_fail(%s, %s, %s, %s, %s, %s)", QUEUE, msg_id, error, kind, Jsonb(details), read_ct
    )


def inside(conn: Connection, queue: str = QUEUE) -> list[Any]:
    """The payloads in a queue of pgmq, seen or not."""
    return column(conn, f"select message from pgmq.q_{queue} order by msg_id")


def letters(conn: Connection) -> list[Row]:
    return rows(conn, "select * from bartleby.dead_letters order by message_id")


def watch(conn: Connection) -> int:
    return int(value(conn, "select bartleby.watch()"))


def agrees(conn: Connection) -> None:
    """The sibling has what is dead, and nothing else; the counts add up, and every change has its event."""
    assert rows(conn, NOT_RECORDED) == []
    dead = "select coalesce(edited, payload) from bartleby.dead_letters where status = 'dead' and payload is not null"
    assert sorted(map(repr, inside(conn, SIBLING))) == sorted(map(repr, column(conn, dead)))
    counted = "select coalesce(sum(letters), 0) from bartleby.letter_counts"
    assert value(conn, counted) == value(conn, "select count(*) from bartleby.dead_letter")


def dead(conn: Connection, *payloads: Any) -> list[int]:
    """Letters of these payloads; their ids."""
    made(conn, max_attempts=1)
    sent = put(conn, *payloads)
    read(conn)
    for msg_id in sent:
        fail(conn, msg_id, fingerprint="f")
    assert read(conn) == inside(conn) == []
    return column(conn, "select message_id from bartleby.dead_letters order by 1")


def change(conn: Connection, verb: str, *ids: int) -> list[str]:
    return column(conn, f"select outcome from bartleby.{verb}(%s, 'ann', 'why not')", list(ids))


def replay(conn: Connection, *ids: int) -> None:
    assert column(conn, "select bartleby.replay(%s, 'ann', 'fixed')", list(ids)) == list(ids)


def replay_by_plan(conn: Connection, *ids: int, **options: Any) -> None:
    plans.started(conn, list(ids), **options)
    step(conn)


def step(conn: Connection) -> None:
    conn.execute("select count(*) from bartleby.advance_replays()")


def statuses(conn: Connection) -> dict[Any, str]:
    return {str(each["payload"]): each["status"] for each in letters(conn)}


def claim(conn: Connection, limit: int = 10, lease: str = "1 hour") -> Claim:
    return sql.claim(conn, limit, QUEUE, lease)


def lapse(conn: Connection) -> None:
    """Let every lease lapse, here and there."""
    conn.execute("update bartleby.lease set until = until - interval '2 hours' where pending <> '{}'")
    conn.execute("update pgmq.q_jobs set vt = vt - interval '2 hours'")
