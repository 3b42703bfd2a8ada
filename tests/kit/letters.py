"""Letters for tests, and queries about them."""

from typing import Any

from psycopg import sql
from psycopg.types.json import Jsonb

from tests.kit.sql import Connection, Row, column, row, rows, value

JSON = {"headers", "payload", "edited", "failure_history"}
USUAL = {"queue": 1, "status": "dead", "reason": "exhausted", "attempts": 1, "crashes": 0, "cycle": 1, "worker": "w"}


def letter(conn: Connection, ago: float = 0, changed_ago: float | None = None, **columns: Any) -> int:
    """Write a letter that died some seconds ago, and return its id; its group is found as for any other."""
    given = {**USUAL, "payload": None, **columns}
    given.setdefault("message_id", value(conn, "select nextval('bartleby.message_id')"))
    before = "select bartleby.clock() - make_interval(secs => %s)"
    died = value(conn, before, float(ago))
    for name in ("created_at", "first_failed_at", "dead_at"):
        given.setdefault(name, died)
    given.setdefault("status_at", died if changed_ago is None else value(conn, before, float(changed_ago)))
    given = {name: Jsonb(found) if name in JSON and found is not None else found for name, found in given.items()}
    insert = sql.SQL("insert into bartleby.dead_letter ({}) values ({}) returning message_id").format(
        sql.SQL(", ").join(map(sql.Identifier, given)), sql.SQL(", ").join(sql.Placeholder() * len(given))
    )
    inserted = conn.execute(insert, list(given.values())).fetchone()
    assert inserted is not None
    return int(inserted[0])


def page(
    conn: Connection, text: str | None = "", limit: int = 50, after: str | None = None, sort: str = "newest"
) -> list[Row]:
    return rows(conn, "select * from bartleby.find_letters(%s, %s, %s, %s)", text, limit, after, sort)


def found(conn: Connection, text: str = "", limit: int = 10_000, sort: str = "newest") -> list[int]:
    """The ids of one page, which has to be all there is."""
    listed = column(conn, "select message_id from bartleby.find_letters(%s, %s, null, %s)", text, limit, sort)
    assert None not in listed
    assert len(listed) < limit
    return listed


def pages(conn: Connection, text: str = "", limit: int = 3, sort: str = "newest") -> list[int]:
    """The ids of all pages, one after another."""
    listed: list[int] = []
    after = None
    while got := page(conn, text, limit, after, sort):
        listed += [each["message_id"] for each in got if each["message_id"] is not None]
        if len(got) < limit and got[-1]["message_id"] is not None:
            break
        after = got[-1]["cursor"]
    return listed


def counted(conn: Connection, text: str = "", most: int = 10_000) -> tuple[int, bool]:
    got = row(conn, "select * from bartleby.count_letters(%s, %s)", text, most)
    return got["letters"], got["exact"]


def listed_ids(conn: Connection, text: str = "", most: int | None = None) -> list[int]:
    return column(conn, "select bartleby.letter_ids(%s, %s)", text, most)
