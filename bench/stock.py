"""The server as systems install it, which compiles what looks expensive: with that on and off, in turns."""

import asyncio
import contextlib
import json
import logging
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from psycopg.conninfo import make_conninfo

from bartleby.app import Bartleby
from bartleby.message import Message
from bartleby.worker import Worker
from bench import ours
from bench.console import furnish, pages
from bench.lab import Bar, Connection, Figure, Findings, Lab, compared, connect, rows, run, script, seconds
from bench.letters import QUEUES, Cemetery
from bench.site import served, worked
from bench.working import percentile

JIT = ("on", "off")
SEEN, BATCH, OFFERED, SLICE = 60, 10, 8_000, 0.1
RATIO = Bar("ratio", most=1.2)
QUEUES_LOOK = "select * from bartleby.queues"
SESSIONS = "select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"


def stock(lab: Lab) -> Findings:
    """Calls of the hot path, a look at all queues, pages of the console, a worker under load, and an idle one."""
    found = Findings()
    with lab.database() as dsn, connect(dsn) as conn:
        compiler, setting = rows(conn, "select pg_jit_available(), current_setting('jit_above_cost')")[0]
        print(f"  jit_above_cost = {setting}, compiler: {'there' if compiler else 'none'}", flush=True)
        yard = Cemetery(dsn, conn, lab.scaled(1_000_000, 100_000))
        furnish(yard)
        for number in range(QUEUES, SEEN - 1):
            run(conn, "select bartleby.create_queue(%s)", f"letters-{number}")
        found.figures += calls(dsn, lab.scaled(400, 100))
        found.figures += visits(yard, lab.scaled(20, 10))
    found.figures += loaded(lab)
    found.figures.append(idle(lab))
    return found


@contextlib.contextmanager
def sessions(dsn: str) -> Iterator[list[Connection]]:
    """One session that may compile and one that may not."""
    with connect(dsn, settings="-c jit=on") as compiling, connect(dsn, settings="-c jit=off") as plain:
        yield [compiling, plain]


def figure(name: str, measured: list[list[float]]) -> Figure:
    return compared(name, "ms", measured, "jit = off", RATIO)


def calls(dsn: str, rounds: int) -> list[Figure]:
    """Milliseconds a call, each once a round on both sessions."""
    ours.Client(dsn).create()
    timed: dict[str, list[list[float]]] = {}
    with sessions(dsn) as both:
        for number in range(rounds):
            for place in (0, 1) if number % 2 else (1, 0):
                for name, taken in one_round(both[place]):
                    timed.setdefault(name, [[], []])[place].append(taken * 1000)
    found = [figure(name, measured) for name, measured in timed.items()]
    [looked] = [each for each in found if each.name == "a look at 60 queues"]
    return [*found, Figure(f"{looked.name}, jit = on", "ms", looked.ours, bar=Bar("value", most=100))]


def one_round(conn: Connection) -> Iterator[tuple[str, float]]:
    """Send, claim and settle in all ways, and what a janitor and an operator do."""
    messages = json.dumps([{"payload": {"order": number}} for number in range(BATCH)])
    batch: list[tuple[int, int]] = []

    def claim() -> None:
        text = "select lease_id, position from bartleby.claim(%s, 'bench', %s::integer)"
        batch[:] = rows(conn, text, ours.QUEUE, BATCH)

    def fail(verdict: str) -> Callable[[], object]:
        text = "select count(*) from bartleby.fail(%s::bigint, %s::jsonb)"
        why = {"error_type": "Timeout", "error": "no answer", "verdict": verdict, "delay": 3600}
        return lambda: run(conn, text, batch[0][0], json.dumps([{**why, "position": row[1]} for row in batch]))

    def send() -> None:
        run(conn, "select count(*) from bartleby.send_many(%s, %s::jsonb)", ours.QUEUE, messages)

    settled = {
        "ack": lambda: run(conn, "select bartleby.ack(%s::bigint)", batch[0][0]),
        "fail, to be retried": fail("retry"),
        "fail, dead": fail("dead"),
    }
    for name, settle in settled.items():
        sent, claimed, taken = seconds(send), seconds(claim), seconds(settle)
        yield from ((f"send of {BATCH}", sent), (f"claim of {BATCH}", claimed), (f"{name}, {BATCH}", taken))
    yield "reap", seconds(lambda: run(conn, "select count(*) from bartleby.reap()"))
    yield f"a look at {SEEN} queues", seconds(lambda: rows(conn, QUEUES_LOOK))


def visits(yard: Cemetery, times: int) -> list[Figure]:
    """The pages of two consoles, whose sessions may compile and may not; the one that suffers most, and the sum."""
    with (
        served(make_conninfo(yard.dsn, options="-c jit=on")) as compiling,
        served(make_conninfo(yard.dsn, options="-c jit=off")) as plain,
    ):
        asked = [pages(site, yard) for site in (compiling, plain)]
        measured: dict[str, list[list[float]]] = {name: [[], []] for name in asked[0]}
        dice = random.Random(5)  # turns that follow a pattern may fall in with one of the pages
        for number in range(times + 1):
            for name, taken in measured.items():
                for place in dice.sample((0, 1), 2):
                    milliseconds = asked[place][name]().seconds * 1000
                    if number:  # the first request of a page also fills caches
                        taken[place].append(milliseconds)
    found = [figure(f"page: {name}", taken) for name, taken in measured.items()]
    sums = [[sum(at) for at in zip(*(taken[place] for taken in measured.values()), strict=True)] for place in (0, 1)]
    return [*sorted(found, key=lambda each: each.ratio or 0)[-3:], figure("all pages of the console", sums)]


def loaded(lab: Lab) -> list[Figure]:
    """Messages a second of one worker that is offered 8,000, a tenth of which fail once, and how long they wait."""
    tries = [list(zip(*(under_load(lab, setting) for setting in JIT), strict=True)) for _ in range(lab.scaled(3, 1))]
    handled, waited = ([list(at) for at in zip(*each, strict=True)] for each in zip(*tries, strict=True))
    name = f"{OFFERED:,} msg/s offered, a tenth of them fail once"
    return [
        compared(f"{name}: handled", "msg/s", handled, "jit = off", Bar("ratio", least=1 / 1.2)),
        compared(f"{name}: from send to handler, p50", "ms", waited, "jit = off"),
    ]


def under_load(lab: Lab, setting: str) -> tuple[float, float]:
    """Messages a second, and the median of milliseconds until a handler had them."""
    with lab.database() as dsn:
        sender = ours.Client(dsn)
        sender.create()
        script(sender.durable, f"select bartleby.configure_queue('{ours.QUEUE}', '{{\"base\": \"1s\"}}')")
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            done = pool.apply_async(handle, (make_conninfo(dsn, options=f"-c jit={setting}"), lab.scaled(30, 10)))
            offer(sender, done.ready)
            rate, waits = done.get()
        sender.close()
    return rate, percentile(sorted(waits), 0.5)


def offer(sender: ours.Client, over: Callable[[], bool]) -> None:
    """Send at an even pace, as long as somebody wants it."""
    messages = json.dumps([{"payload": {"order": number}} for number in range(int(OFFERED * SLICE))])
    due = time.monotonic()
    while not over():
        sender.send_many(messages)
        due += SLICE
        time.sleep(max(0.0, due - time.monotonic()))


def handle(dsn: str, length: float) -> tuple[float, list[float]]:
    """Run a worker; return how many messages it handled in a second, and how long each waited."""
    logging.getLogger("bartleby").setLevel(logging.ERROR)
    app = Bartleby(dsn)
    waits: list[float] = []

    @app.handler(ours.QUEUE)
    async def handle(message: Message) -> None:
        if message.attempt == 1:
            waits.append((datetime.now(UTC) - message.created_at).total_seconds())
            if message.payload["order"] % 10 == 0:
                raise TimeoutError("no answer")

    worker = Worker(app)

    async def run() -> float:
        running = asyncio.create_task(worker.run())
        await asyncio.sleep(3)  # it starts, and takes what has gathered meanwhile
        waits.clear()
        begin, before = time.monotonic(), sum(worker.counts.values())
        await asyncio.sleep(length)
        rate = (sum(worker.counts.values()) - before) / (time.monotonic() - begin)
        worker.stop()
        await running
        return rate

    return asyncio.run(run()), waits


def idle(lab: Lab) -> Figure:
    """What a worker with nothing to do costs the server: the part of a processor that its sessions take."""
    compiling, plain = (at_rest(lab, setting) for setting in JIT)
    bar = Bar("value", most=1)
    return Figure("an idle worker, in the server", "% of a core", compiling, plain, "jit = off", bar)


def at_rest(lab: Lab, setting: str) -> float:
    """Percent of a processor."""
    with lab.database() as dsn, connect(dsn) as conn:
        ours.Client(dsn).create()
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.apply_async(handle, (make_conninfo(dsn, options=f"-c jit={setting}"), 60))
            time.sleep(5)
            pids = [row[0] for row in rows(conn, SESSIONS)]
            before, length = sum(map(worked, pids)), lab.scaled(30, 15)
            time.sleep(length)
            spent = sum(map(worked, pids)) - before
            pool.terminate()
    return spent / 1000 / length * 100
