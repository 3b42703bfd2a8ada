"""Many letters at once, which no message has died for."""

from typing import Any

from tests.kit.sql import Connection


def insert_letters(conn: Connection, count: int, *statuses: str, **columns: Any) -> None:
    """Insert letters of the first queue, with these statuses in turn and these columns."""
    given = {"reason": "terminal", "attempts": 1, "crashes": 0, "cycle": 1, "worker": "w", "fingerprint": "f"} | columns
    parameters = {"statuses": list(statuses or ["dead"]), "count": count, **given}
    conn.execute(
        f"insert into bartleby.dead_letter ({', '.join(given)}, message_id, queue, status, status_at, created_at,"
        f" first_failed_at, dead_at, payload) select {', '.join(f'%({name})s' for name in given)},"
        " nextval('bartleby.message_id'), 1, (%(statuses)s::text[])[n %% cardinality(%(statuses)s::text[]) + 1],"
        " now(), now(), now(), now(), jsonb_build_object('n', n) from generate_series(1, %(count)s::int) n".encode(),
        parameters,
    )
