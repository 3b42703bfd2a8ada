"""For tests of the connection of a worker: a call that shows its backend, and one that takes long."""

from bartleby.calls import Call
from tests.kit.sinks.servers import eventually
from tests.kit.sql import Connection, value

PID: Call[int] = Call("select pg_backend_pid()", (), lambda rows: int(rows[0][0]))
LONG: Call[str] = Call("select pg_sleep(100)::text", (), lambda rows: str(rows[0][0]))


async def until_busy(conn: Connection, pid: int) -> None:
    """Wait until a backend is at its statement."""
    query = "select state = 'active' and wait_event is not null from pg_stat_activity where pid = %s"
    await eventually(lambda: value(conn, query, pid))
