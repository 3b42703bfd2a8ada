"""A whole worker, handlers and all, beside the raw client that only claims and acks."""

import asyncio
import logging
import multiprocessing
import random
import statistics
import threading
import time
from functools import partial

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bartleby.app import Bartleby
from bartleby.message import Message
from bartleby.worker import Worker
from bench import draining, ours
from bench.lab import Bar, Figure, Findings, Lab, compared, interleaved
from bench.memory import resident
from bench.pooler import pgbouncer, program

MESSAGES = {100: 200_000, 500: 400_000}
BARS = {"async": Bar("ratio", least=0.35), "sync": Bar("ratio", least=0.1)}
FAILURES = 60_000
POLL = 0.2


def work(lab: Lab) -> Findings:
    """Messages per second through a worker with handlers that do nothing, and with handlers that fail for good."""
    found = Findings()
    for batch, full in MESSAGES.items():
        count = lab.scaled(full, full // 5)
        for kind, bar in BARS.items():
            measured = interleaved(
                lab.scaled(3, 1),
                partial(rate, lab, kind, batch, count),
                partial(draining.rate, lab, "bartleby", 1, batch, count),
            )
            name = f"worker, {kind} handlers, batch {batch}"
            found.figures.append(compared(name, "msg/s", measured, "raw client", bar))
    failing = [rate(lab, "dead", 500, lab.scaled(FAILURES, FAILURES // 5)) for _ in range(lab.scaled(3, 1))]
    bar = Bar("value", least=10_000)
    found.figures.append(
        Figure("worker, terminal failures with evidence", "msg/s", statistics.median(failing), bar=bar)
    )
    found.figures += latency(lab)
    found.figures.append(memory(lab))
    return found


def rate(lab: Lab, kind: str, batch: int, count: int) -> float:
    """Messages per second of one worker process."""
    with lab.database() as dsn:
        queue = ours.Client(dsn)
        queue.create()
        queue.fill(count)
        queue.close()
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seconds, _, _ = pool.apply(drain, (dsn, kind, batch, count))
    return count / seconds


def latency(lab: Lab) -> list[Figure]:
    """Milliseconds from the commit of a send to the handler while nothing else happens, heard and polled."""
    with lab.database() as dsn:
        ours.Client(dsn).create()
        heard = waits(dsn, lab.scaled(500, 100), poll=1.0, pause=0.02)
        polled = through_pooler(lab, dsn) if program() else []
    found = [
        Figure("commit to handler when idle, p50", "ms", percentile(heard, 0.5), bar=Bar("value", most=5)),
        Figure("commit to handler when idle, p99", "ms", percentile(heard, 0.99), bar=Bar("value", most=25)),
    ]
    if polled:
        name, bar = f"through pgbouncer, polling every {POLL * 1000:.0f} ms, p99", Bar("value", most=POLL * 1000 + 25)
        found.append(Figure(name, "ms", percentile(polled, 0.99), bar=bar))
    return found


def through_pooler(lab: Lab, dsn: str) -> list[float]:
    """The same through pgbouncer, where nothing can be heard."""
    with pgbouncer(lab.server) as port:
        name = str(conninfo_to_dict(dsn)["dbname"])
        pooled = make_conninfo(lab.server.dsn, host="127.0.0.1", port=port, dbname=name)
        return waits(pooled, lab.scaled(200, 40), poll=POLL, pause=0.07)


def waits(dsn: str, count: int, *, poll: float, pause: float) -> list[float]:
    """How long each message took, sorted, measured in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return sorted(pool.apply(listen, (dsn, count, poll, pause)))


def percentile(values: list[float], part: float) -> float:
    """Milliseconds below which this part of the sorted seconds lies."""
    return values[min(len(values) - 1, int(len(values) * part))] * 1000


def memory(lab: Lab) -> Figure:
    """The memory of a worker at a tenth of its work and at the end."""
    count = lab.scaled(1_000_000, 100_000)
    with lab.database() as dsn:
        queue = ours.Client(dsn)
        queue.create()
        queue.fill(count)
        queue.close()
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            _, early, late = pool.apply(drain, (dsn, "async", 500, count))
    return Figure(f"memory of a worker after {count:,}", "MB", late, early, "after a tenth", Bar("ratio", most=1.05))


def application(dsn: str, kind: str) -> Bartleby:
    """An application whose handler does nothing, or fails."""
    app = Bartleby(dsn, version="bench")
    if kind == "sync":

        @app.handler(ours.QUEUE)
        def handle(_message: Message) -> None: ...

    elif kind == "async":

        @app.handler(ours.QUEUE)
        async def handle_async(_message: Message) -> None: ...

    else:

        @app.handler(ours.QUEUE, terminal=[LookupError])
        async def fail(message: Message) -> None:
            raise KeyError(f"customer of order {message.payload['order']}")

    return app


def drain(dsn: str, kind: str, batch: int, count: int) -> tuple[float, float, float]:
    """Drain the queue; return how long it took, and the memory at a tenth of it and at the end."""
    logging.getLogger("bartleby").setLevel(logging.ERROR)
    worker = Worker(application(dsn, kind), claim_limit=batch)

    async def run() -> tuple[float, float, float]:
        begin, early = time.monotonic(), 0.0
        running = asyncio.create_task(worker.run())
        while sum(worker.counts.values()) < count and not running.done():
            await asyncio.sleep(0.01)
            if not early and sum(worker.counts.values()) >= count // 10:
                early = resident()
        taken, late = time.monotonic() - begin, resident()
        worker.stop()
        await running
        return taken, early, late

    return asyncio.run(run())


def listen(dsn: str, count: int, poll: float, pause: float) -> list[float]:
    """Send one message after another to an idle worker in the same process; return how long each took."""
    app = Bartleby(dsn)
    arrived = threading.Event()
    seen: list[float] = []

    @app.handler(ours.QUEUE)
    async def handle(_message: Message) -> None:
        seen.append(time.monotonic())
        arrived.set()

    worker = Worker(app, poll=poll)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(worker.run(),))
    thread.start()
    taken: list[float] = []
    app.send(ours.QUEUE, {"warm": True})
    arrived.wait(10)
    for number in range(count):
        time.sleep(pause * random.uniform(1, 2))  # so that it is idle again, and at no fixed beat
        arrived.clear()
        app.send(ours.QUEUE, {"order": number})
        committed = time.monotonic()
        arrived.wait(10)
        taken.append(max(0.0, seen[-1] - committed))
    loop.call_soon_threadsafe(worker.stop)
    thread.join()
    return taken
