"""Fifty people with a page open while letters die: what each of them hears, and what that costs."""

import asyncio
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from bench.lab import Bar, Figure, connect, rows, run
from bench.letters import Cemetery
from bench.site import Site

LISTENERS = 50
DEATHS = 20
TOLD = 12  # seconds after which PostgreSQL knows what a session that is idle has counted
TRACE = '  File "/srv/app/orders/handlers.py", line {0}, in step_{0}\n    return self._charge(order, amount)\n'
COMMITS = "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"


class Crowd:
    """Listeners of the stream, each with the moments that it was told of."""

    def __init__(self, port: int, count: int) -> None:
        self._port = port
        self.heard: list[list[str]] = [[] for _ in range(count)]

    async def listen(self, seconds: float) -> None:
        """Listen at once, for so long after the last has heard its first beat."""
        tasks = [asyncio.create_task(self._one(heard)) for heard in self.heard]
        async with asyncio.timeout(60):
            while not all(self.heard):  # noqa: ASYNC110 - it is no hurry
                await asyncio.sleep(0.05)
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task  # one that has ended by itself says why

    async def _one(self, heard: list[str]) -> None:
        while True:  # a stream ends now and then, to ask again who listens
            reader, writer = await asyncio.open_connection("localhost", self._port, limit=1 << 24)
            try:
                writer.write(f"GET /live HTTP/1.1\r\nHost: localhost:{self._port}\r\n\r\n".encode())
                async for line in reader:
                    if line.startswith(b"data: "):
                        heard.append(json.loads(line[6:])["at"])
                    elif line == b"0\r\n":
                        break
                else:
                    raise ConnectionError("a stream was cut off")
            finally:
                writer.close()

    def missed(self) -> int:
        """How many beats somebody has not heard that somebody else has, while all were listening."""
        since, until = max(each[0] for each in self.heard), min(each[-1] for each in self.heard)
        within = [{at for at in each if since <= at <= until} for each in self.heard]
        every = set().union(*within)
        return sum(len(every - each) for each in within)

    def beats(self) -> int:
        """How many beats were heard."""
        return len(set().union(*self.heard))


def held(yard: Cemetery, site: Site, seconds: int) -> list[Figure]:
    """Questions for one and for fifty listeners, then a minute in which letters die and somebody reads."""
    alone, many = (questions(yard, site, count, max(10, seconds // 3)) for count in (1, LISTENERS))
    crowd = Crowd(site.port, LISTENERS)
    early: list[float] = []
    spent: list[float] = []
    paths = ("/", "/groups", "/letters", "/letters/7")

    def seconds_of(path: str) -> float:
        return site.ask(path).seconds

    with dying(yard.dsn) as die, again(die, 0.5), again(lambda: spent.extend(map(seconds_of, paths)), 1):
        later = threading.Timer(min(10, seconds / 3), lambda: early.append(site.resident()))
        later.start()
        asyncio.run(crowd.listen(seconds))
        later.join()
        late = site.resident()
    tail = statistics.quantiles(spent, n=20)[-1] * 1000
    name = f"{LISTENERS} listeners"
    return [
        Figure(f"{name}: questions to the database a beat", "", many, alone, "one listener", Bar("ratio", most=1.1)),
        Figure(f"{name}, letters die: beats that somebody missed", "", crowd.missed(), bar=Bar("value", most=0)),
        Figure(f"{name}, letters die: seconds a beat", "s", seconds / crowd.beats(), bar=Bar("value", most=3)),
        Figure(f"{name}, letters die: a page, p95", "ms", tail, bar=Bar("value", most=300)),
        Figure(f"{name}, letters die: memory", "MB", late, early[0], "soon after they came", Bar("ratio", most=1.1)),
    ]


def questions(yard: Cemetery, site: Site, count: int, seconds: int) -> float:
    """How many transactions a beat needs while nothing else happens."""
    crowd = Crowd(site.port, count)
    time.sleep(TOLD)
    before = rows(yard.connection, COMMITS)[0][0]
    asyncio.run(crowd.listen(seconds))
    time.sleep(TOLD)
    return float(rows(yard.connection, COMMITS)[0][0] - before) / crowd.beats()


@contextmanager
def dying(dsn: str) -> Iterator[Callable[[], None]]:
    """Something that lets messages die as they do in a worker: of bugs that are known, and of a new one each time."""
    with connect(dsn) as connection:
        numbers = itertools.count()

        def die() -> None:
            number = next(numbers)
            queue = f"letters-{number % 5}"
            messages = [{"payload": {"order": number, "place": each}} for each in range(DEATHS)]
            run(connection, "select count(*) from bartleby.send_many(%s, %s::jsonb)", queue, json.dumps(messages))
            claim = "select lease_id, position from bartleby.claim(%s, 'bench', %s::int)"
            leased = rows(connection, claim, queue, DEATHS)
            failures = [
                {
                    "position": position,
                    "error_type": "KeyError",
                    "error": f"customer {number}",
                    "traceback": TRACE.format(number),
                    "fingerprint": f"bench {number % 100}",
                    "verdict": "dead",
                }
                for _, position in leased
            ]
            fail = "select count(*) from bartleby.fail(%s::bigint, %s::jsonb)"
            run(connection, fail, leased[0][0], json.dumps(failures))

        yield die


@contextmanager
def again(action: Callable[[], None], pause: float) -> Iterator[None]:
    """Do something again and again beside what is measured; what goes wrong with it is told at the end."""
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:

        def repeat() -> None:
            while not over.wait(pause):
                action()

        running = pool.submit(repeat)
        try:
            yield
        finally:
            over.set()
        running.result()
