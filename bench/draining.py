"""Draining a full queue with no-op work: claim, ack, until nothing is left."""

import multiprocessing
import time
from collections.abc import Callable
from functools import partial

from bench import classic, ours
from bench.lab import Bar, Findings, Lab, compared, interleaved

CONTESTANTS: dict[str, Callable[[str], ours.Client | classic.Client]] = {
    "bartleby": ours.Client,
    "classic": classic.Client,
}
BARS = {(1, 100): Bar("ratio", least=2.0), (1, 500): Bar("ratio", least=2.5)}
# Chosen so that a point takes two to five seconds.
MESSAGES = {1: 10_000, 10: 70_000, 100: 200_000, 500: 400_000}
ROUNDS = 3


def drain(lab: Lab) -> Findings:
    """Messages per second by batch size, with one client and with two."""
    found = Findings()
    for clients in (1, 2):
        for batch, full in MESSAGES.items():
            count = lab.scaled(full, full // 5)
            measured = interleaved(
                lab.scaled(ROUNDS, 1),
                partial(rate, lab, "bartleby", clients, batch, count),
                partial(rate, lab, "classic", clients, batch, count),
            )
            name = f"drain, {clients} client{'s' if clients > 1 else ''}, batch {batch}"
            found.figures.append(compared(name, "msg/s", measured, "classic", BARS.get((clients, batch))))
            found.series.setdefault(f"drain ratio, {clients}", []).append(found.figures[-1].ratio or 0)
    found.series["drain batch"] = [float(batch) for batch in MESSAGES]
    return found


def rate(lab: Lab, contestant: str, clients: int, batch: int, count: int) -> float:
    """Messages per second, in a database of its own; tidying up is part of the time."""
    with lab.database() as dsn:
        queue = CONTESTANTS[contestant](dsn)
        queue.create()
        queue.fill(count)
        spawn = multiprocessing.get_context("spawn")
        ready, results = spawn.Barrier(clients), spawn.Queue()
        workers = [spawn.Process(target=work, args=(contestant, dsn, batch, ready, results)) for _ in range(clients)]
        for worker in workers:
            worker.start()
        measured: list[tuple[float, float, int]] = [results.get(timeout=600) for _ in workers]
        for worker in workers:
            worker.join()
        begin = time.monotonic()
        queue.tidy()
        tidying = time.monotonic() - begin
        queue.close()
        done = sum(one[2] for one in measured)
        if done != count:
            raise RuntimeError(f"{contestant} delivered {done} of {count} messages")
        return count / (max(one[1] for one in measured) - min(one[0] for one in measured) + tidying)


def work(
    contestant: str,
    dsn: str,
    batch: int,
    ready: "multiprocessing.synchronize.Barrier",
    results: "multiprocessing.Queue[tuple[float, float, int]]",
) -> None:
    queue = CONTESTANTS[contestant](dsn)
    ready.wait()
    begin, done = time.monotonic(), 0
    while messages := queue.claim(batch):
        queue.ack(messages)
        done += len(messages)
    results.put((begin, time.monotonic(), done))
    queue.close()
