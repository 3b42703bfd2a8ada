"""A worker that runs for long has to stay as small as it began."""

import os
from multiprocessing import get_context
from pathlib import Path

from bench import ours
from bench.lab import Bar, Figure, Findings, Lab

BATCH = 500


def memory(lab: Lab) -> Findings:
    """The memory of a client process at a tenth of its work and at the end."""
    count = lab.scaled(1_000_000, 100_000)
    with lab.database() as dsn:
        queue = ours.Client(dsn)
        queue.create()
        queue.fill(count)
        queue.close()
        with get_context("spawn").Pool(1) as pool:
            early, late = pool.apply(drain, (dsn, count))
    bar = Bar("ratio", most=1.05)
    return Findings([Figure(f"memory of a client after {count:,}", "MB", late, early, "after a tenth", bar)])


def drain(dsn: str, count: int) -> tuple[float, float]:
    queue = ours.Client(dsn)
    done, early = 0, 0.0
    while batch := queue.claim(BATCH):
        queue.ack(batch)
        done += len(batch)
        if done >= count // 10 and not early:
            early = resident()
    return early, resident()


def resident() -> float:
    """Megabytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6
