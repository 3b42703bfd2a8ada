"""A typical reader of pgmq: read a few, do and delete each, and report failures."""

import sys
import time

import psycopg


def main(dsn: str, queue: str, poison: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        while True:
            found = conn.execute(
                "select msg_id, read_ct, message from bartleby.pgmq_read(%s, 1, 20)", [queue]
            ).fetchall()
            for msg_id, read_ct, n in found:
                try:
                    if poison and n % poison == 0:
                        conn.execute(
                            "select bartleby.pgmq_fail(%s, %s, 'cannot be swallowed', 'Poison', '{}', %s)",
                            [queue, msg_id, read_ct],
                        )
                        continue
                    with conn.transaction():
                        conn.execute("insert into done values (%s)", [n])
                        conn.execute("select pgmq.delete(%s, %s::bigint)", [queue, msg_id])
                except psycopg.DatabaseError as error:
                    if error.sqlstate != "ZB006":  # it took too long, and another reader has it
                        raise
            if not found:
                time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
