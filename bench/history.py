"""What lies behind the reader, and what lies before it: neither should cost anything."""

import statistics
import time

from bench import classic, ours
from bench.lab import Bar, Figure, Findings, Lab, run, script, seconds

BATCH = 10


def history(lab: Lab) -> Findings:
    """The time of a claim in a young queue, and in one with ten million settled messages in the log."""
    found = Findings()
    settled = lab.scaled(10_000_000, 200_000)
    claims = lab.scaled(4_000, 1_000)
    with lab.database() as young_dsn, lab.database() as old_dsn:
        young, old = ours.Client(young_dsn), ours.Client(old_dsn)
        for queue in (young, old):
            queue.create()
        settle(old, settled)
        for queue in (young, old):
            queue.fill(claims * BATCH)
        times: dict[int, list[float]] = {id(young): [], id(old): []}
        for block in range(claims // 100):
            for queue in (young, old) if block % 2 else (old, young):
                times[id(queue)] += [timed_claim(queue) for _ in range(100)]
        for name, quantile in (("p50", 0.5), ("p99", 0.99)):
            before, after = (quantile_of(times[id(queue)], quantile) for queue in (young, old))
            bar = Bar("ratio", most=1.2)
            title = f"claim of {BATCH} after {settled:,} settled, {name}"
            found.figures.append(Figure(title, "ms", after, before, "after none", bar))
        young.close()
        old.close()
    return found


def settle(queue: ours.Client, count: int) -> None:
    """Send and settle messages in large batches on the server; nothing is truncated."""
    for _ in range(0, count, 1_000_000):
        chunk = min(count, 1_000_000)
        queue.fill(chunk)
        script(
            queue.fast,
            f"""do $$ begin
              for i in 1..{-(-chunk // 10_000)} loop
                perform bartleby.ack(max(c.lease_id)) from bartleby.claim('{ours.QUEUE}', 'bench', 10000) c;
                commit;
              end loop; end $$""",
        )
        queue.tidy()
    script(queue.durable, "vacuum analyze bartleby.lease")


def timed_claim(queue: ours.Client) -> float:
    begin = time.perf_counter()
    batch = queue.claim(BATCH)
    taken = time.perf_counter() - begin
    queue.ack(batch)
    return taken * 1000


def quantile_of(values: list[float], quantile: float) -> float:
    return sorted(values)[int(len(values) * quantile)]


def depth(lab: Lab) -> Findings:
    """How long it takes to say how many messages wait."""
    waiting = lab.scaled(1_000_000, 100_000)
    with lab.database() as dsn:
        mine, theirs = ours.Client(dsn), classic.Client(dsn)
        for queue in (mine, theirs):
            queue.create()
            queue.fill(waiting)
        # the best case for counting: everything visible, and the index says so
        script(theirs.durable, "vacuum analyze classic")
        times: list[list[float]] = [[], []]
        for _ in range(30):
            times[0].append(seconds(lambda: run(mine.fast, READY, ours.QUEUE)))
            times[1].append(seconds(lambda: run(theirs.fast, COUNT, classic.QUEUE)))
        mine.close()
        theirs.close()
    fast, slow = (statistics.median(taken) * 1000 for taken in times)
    bar = Bar("value", most=5)
    return Findings([Figure(f"depth with {waiting:,} waiting", "ms", fast, slow, "count(*)", bar)])


READY = "select ready from bartleby.queues where name = %s"
COUNT = "select count(*) from classic where queue = %s and state = 'ready'"
