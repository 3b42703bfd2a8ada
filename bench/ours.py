"""Bartleby, through raw psycopg."""

import json
from collections.abc import Sequence

from bench.lab import PAYLOAD, Row, connect, rows, run, script

QUEUE = "orders"


class Client:
    """One worker: claim and ack do not wait for the disk, send and fail do."""

    name = "bartleby"

    def __init__(self, dsn: str) -> None:
        self.fast = connect(dsn, durable=False)
        self.durable = connect(dsn)

    def create(self) -> None:
        """Make the queue."""
        run(self.durable, "select bartleby.create_queue(%s)", QUEUE)

    def fill(self, count: int) -> None:
        """Put messages into the queue, the fast way."""
        for begin in range(0, count, 10_000):
            script(
                self.fast,
                f"""select count(*) from bartleby.send_many('{QUEUE}', (
                    select jsonb_agg(jsonb_build_object('payload', {PAYLOAD}))
                    from generate_series({begin + 1}, {min(begin + 10_000, count)}) g))""",
            )
        script(self.durable, "analyze bartleby.log, bartleby.lease")

    def send_many(self, messages: str) -> None:
        """Send a JSON array of messages."""
        rows(self.durable, "select count(*) from bartleby.send_many(%s, %s::jsonb)", QUEUE, messages)

    def claim(self, limit: int) -> list[Row]:
        """The next messages, each as (lease, position, id, attempt, payload)."""
        return rows(
            self.fast,
            """select lease_id, position, message_id, attempt, payload::text
            from bartleby.claim(%s, 'bench', %s::int)""",
            QUEUE,
            limit,
        )

    def ack(self, batch: list[Row]) -> None:
        """All of the lease is done."""
        rows(self.fast, "select bartleby.ack(%s::bigint)", batch[0][0])

    def ack_some(self, batch: Sequence[Row]) -> None:
        """These are done."""
        positions = [row[1] for row in batch]
        rows(self.fast, "select bartleby.ack(%s::bigint, %s::bigint[])", batch[0][0], positions)

    def retry(self, batch: Sequence[Row], delay: float) -> None:
        """These failed, and are to be tried again."""
        failures = [{"position": row[1], "error_type": "Timeout", "delay": delay} for row in batch]
        rows(
            self.durable,
            "select count(*) from bartleby.fail(%s::bigint, %s::jsonb)",
            batch[0][0],
            json.dumps(failures),
        )

    def bury(self, batch: Sequence[Row], failures: str) -> None:
        """These failed for good; the evidence is JSON as fail() takes it."""
        rows(self.durable, "select count(*) from bartleby.fail(%s::bigint, %s::jsonb)", batch[0][0], failures)

    def attempt(self, row: Row) -> int:
        """Which attempt of the message this is."""
        return int(row[3])

    def tidy(self) -> None:
        """What a janitor does once a second."""
        script(self.fast, "select count(*) from bartleby.reap()")

    def close(self) -> None:
        """End the sessions."""
        self.fast.close()
        self.durable.close()
