"""Failure for good: dead letters with their evidence, and their return."""

import json
import time
from collections.abc import Sequence

from bench import classic, ours
from bench.lab import Bar, Connection, Figure, Findings, Lab, Row, rows, run

BATCH = 100
CHUNK = 1_000
FRAME = '  File "/srv/app/orders/handlers.py", line {0}, in step_{0}\n    return self._charge(order, amount)\n'

APPEND = """
insert into bartleby.log (position, id, created_at, queue, slot, max_attempts, cycle, big, generation, key,
  headers, payload)
select nextval(q.positions), l.message_id, l.created_at, l.queue,
  (select s.slot from bartleby.segment s where s.current), l.max_attempts, l.cycle + 1, l.big, l.generation,
  l.key, l.headers, l.payload
from bartleby.dead_letter l join bartleby.queue q on q.id = l.queue where l.message_id = any (%s::bigint[])
"""
CLASSIC_REPLAY = """
with gone as (delete from classic_dead where id = any (%s::bigint[]) returning *)
insert into classic (id, queue, created_at, headers, payload) overriding system value
select g.id, g.queue, g.created_at, g.headers, g.payload from gone g
"""


def dead(lab: Lab) -> Findings:
    """Dead letters per second on one connection, and how fast they live again."""
    found = Findings()
    count = lab.scaled(60_000, 10_000)
    with lab.database() as dsn:
        mine, theirs = ours.Client(dsn), classic.Client(dsn)
        for queue in (mine, theirs):
            queue.create()
            queue.fill(count)
        spent = {queue.name: [0.0, 0.0] for queue in (mine, theirs)}
        for _ in range(0, count, BATCH):
            for queue in (mine, theirs):
                bury(queue, spent[queue.name])
        rates = [[count / value for value in spent[name]] for name in ("bartleby", "classic")]
        found.figures += [
            Figure(
                "dead-letter, batch 100",
                "msg/s",
                rates[0][1],
                rates[1][1],
                "classic",
                Bar("value", least=15_000),
            ),
            Figure(
                "claim + dead-letter",
                "msg/s",
                count / sum(spent["bartleby"]),
                count / sum(spent["classic"]),
                "classic",
            ),
        ]
        found.figures += replay(mine.durable)
        mine.close()
        theirs.close()
    return found


def bury(queue: ours.Client | classic.Client, spent: list[float]) -> None:
    begin = time.perf_counter()
    batch = queue.claim(BATCH)
    claimed = time.perf_counter()
    failures = evidence(queue, batch)
    called = time.perf_counter()
    queue.bury(batch, failures)
    spent[0] += claimed - begin
    spent[1] += time.perf_counter() - called


def evidence(queue: ours.Client | classic.Client, batch: Sequence[Row]) -> str:
    place = 1 if queue.name == "bartleby" else 0
    return json.dumps(
        [
            {
                "position": row[place],
                "error_type": "app.errors.CardDeclined",
                "error": f"the bank declined the payment of order {row[place]}: insufficient funds",
                "traceback": "Traceback (most recent call last):\n"
                + "".join(FRAME.format(row[place] % 400 + step) for step in range(19)),
                "fingerprint": f"{row[place] % 7:016x}",
                "verdict": "dead",
                "rule": "terminal CardDeclined",
            }
            for row in batch
        ]
    )


def replay(connection: Connection) -> list[Figure]:
    """Chunks in turns: replayed, only appended, and the classic way."""
    ids = [row[0] for row in rows(connection, "select message_id from bartleby.dead_letter order by 1")]
    olds = [row[0] for row in rows(connection, "select id from classic_dead order by 1")]
    spent = [0.0, 0.0, 0.0]
    chunks = len(ids) // CHUNK // 2
    for chunk in range(chunks):
        first, second = (ids[place * CHUNK : (place + 1) * CHUNK] for place in (2 * chunk, 2 * chunk + 1))
        third = olds[chunk * CHUNK : (chunk + 1) * CHUNK]
        times = [time.perf_counter()]
        rows(connection, "select bartleby.replay(%s::bigint[], 'bench', 'the bank is back')", first)
        times.append(time.perf_counter())
        run(connection, APPEND, second)
        times.append(time.perf_counter())
        run(connection, CLASSIC_REPLAY, third)
        times.append(time.perf_counter())
        spent = [total + end - begin for total, begin, end in zip(spent, times, times[1:], strict=False)]
    mine, append, theirs = (chunks * CHUNK / value for value in spent)
    bar = Bar("value", least=50_000)
    return [
        Figure("replay, 1,000 per call", "msg/s", mine, theirs, "classic", bar),
        Figure("replay, 1,000 per call", "msg/s", mine, append, "pure append"),
    ]
