"""As much evidence as can be."""

from tests.kit import sql
from tests.kit.clock import move_clock
from tests.kit.sql import Connection


def test_much_evidence_does_not_stop_the_reaper(conn: Connection) -> None:
    """A JSON array is limited to 256 MB, and a traceback is up to 100,000 characters long."""
    clock = move_clock(conn)
    sql.create(conn, "q", give_up_after=60)
    sql.send_count(conn, 1100)
    sql.fail_all(conn, sql.claim(conn, 1100), error_type="Timeout", delay=10)
    conn.execute("update bartleby.attempt set traceback = repeat('é', 100000), error = repeat('é', 30000)")
    clock.advance(61)
    for dead in (500, 1000, 1100):
        sql.reap(conn)
        assert sql.stats(conn)["dead"] == dead
