"""What it costs a queue of pgmq to be attached: pgmq_read() against pgmq.read(), in turns, with nothing stuck."""

import time
from importlib.resources import files

from bartleby.schema import install_sql
from bench.lab import Bar, Connection, Figure, Findings, Lab, connect, script

PLAIN, ATTACHED = "plain", "attached"
READS = {
    PLAIN: "select * from pgmq.read('plain', 600, {})",
    ATTACHED: "select * from bartleby.pgmq_read('attached', 600, {})",
}


def pgmq(lab: Lab) -> Findings:
    """Microseconds a message, read one by one, by tens and by hundreds."""
    found = Findings()
    for quantity in (1, 10, 100):
        with lab.database() as dsn, connect(dsn) as conn:
            prepare(conn, quantity * lab.scaled(4000, 1000))
            spent = dict.fromkeys(READS, 0.0)
            turns = list(READS.items())
            count = lab.scaled(2000, 500)
            for _ in range(count):
                turns.reverse()  # neither is always the second
                for queue, query in turns:
                    begin = time.perf_counter()
                    script(conn, query.format(quantity))
                    spent[queue] += time.perf_counter() - begin
        ours, theirs = (spent[queue] / count / quantity * 1e6 for queue in (ATTACHED, PLAIN))
        name = f"pgmq_read of {quantity}, nothing stuck"
        found.figures.append(Figure(name, "us/msg", ours, theirs, "pgmq.read", Bar("ratio", most=1.10)))
    return found


def prepare(conn: Connection, count: int) -> None:
    """Two queues of pgmq with the same messages, one of them attached."""
    script(conn, (files("pgmq") / "sql" / "pgmq.sql").read_text())
    script(conn, install_sql(pgmq=True))
    for queue in READS:
        script(conn, f"select pgmq.create('{queue}')")
        some = f"select array_agg(jsonb_build_object('order', g)) from generate_series(1, {min(count, 10_000)}) g"
        for _ in range(0, count, 10_000):
            script(conn, f"select count(*) from pgmq.send_batch('{queue}', ({some}))")
        script(conn, f"vacuum analyze pgmq.q_{queue}")
    script(conn, "select bartleby.pgmq_attach('attached')")
