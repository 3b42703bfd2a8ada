"""The console as people run it, and somebody who asks it things and looks at the clock."""

import contextlib
import gzip
import http.client
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode, urljoin

from bench.lab import Connection, connect, rows

ASSET = re.compile(r'(?:href|src)="([^"]*/static/[^"]+)"')
SESSIONS = """
select pid from pg_stat_activity where application_name = 'bartleby console' and datname = current_database()
"""
MODULE = re.compile(r'\bfrom "(\./[^"]+)"')


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, how long it took, and how many bytes it was on the wire."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float

    @property
    def text(self) -> str:
        """The body, unpacked."""
        packed = self.headers.get("content-encoding") == "gzip"
        return (gzip.decompress(self.body) if packed else self.body).decode()


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of one kind of request: the very first, then the middle and the tail of many, and their work.

    The work is time on a processor, of the console and of its sessions of the database: others do not add to it.
    """

    first: float
    middle: float
    tail: float
    work: float


@dataclass(frozen=True, slots=True)
class Site:
    """A console that runs as a process of its own."""

    process: subprocess.Popen[str]
    port: int
    database: Connection

    def ask(self, path: str, form: Mapping[str, object] | None = None) -> Answer:
        """Get a page, or send a form as a page of the console does; raise an error for a refusal."""
        body = None if form is None else urlencode(form, doseq=True)
        headers = {"Accept-Encoding": "gzip", "Sec-Fetch-Site": "same-origin"}
        if body is not None:
            headers |= {"Content-Type": "application/x-www-form-urlencoded", "HX-Request": "true"}
        with contextlib.closing(http.client.HTTPConnection("localhost", self.port, timeout=60)) as connection:
            connection.connect()
            begin = time.perf_counter()
            connection.request("GET" if body is None else "POST", path, body, headers)
            response = connection.getresponse()
            found = response.read()
            taken = time.perf_counter() - begin
        kept = {name.lower(): value for name, value in response.getheaders()}
        if response.status >= 400:
            raise RuntimeError(f"{path}: {response.status} {found[:500].decode()}")
        return Answer(response.status, kept, found, taken)

    def do(self, path: str, form: Mapping[str, object]) -> Answer:
        """Send a form and follow to where it leads, as a browser does before it shows anything."""
        done = self.ask(path, form)
        shown = self.ask(done.headers["location"]) if done.status == 303 else done
        headers = {**shown.headers, "x-request-id": done.headers["x-request-id"]}
        return Answer(shown.status, headers, shown.body, done.seconds + shown.seconds)

    def timed(self, times: int, action: Callable[[], Answer]) -> Times:
        """Measure the same request again and again."""
        first = action().seconds * 1000
        before = self.worked()
        rest = [action().seconds * 1000 for _ in range(times)]
        work = (self.worked() - before) / times
        return Times(first, statistics.median(rest), statistics.quantiles(rest, n=20)[-1], work)

    def worked(self) -> float:
        """Milliseconds on a processor until now."""
        sessions = [row[0] for row in rows(self.database, SESSIONS)]
        return sum(map(worked, [self.process.pid, *sessions]))

    def weight(self, path: str) -> tuple[int, int]:
        """Bytes of a page on the wire: with everything that it needs, and with only what no browser keeps."""
        page = self.ask(path)
        found: dict[str, int] = {}
        wanted = ASSET.findall(page.text)
        while wanted:
            address = wanted.pop()
            if address not in found:
                asset = self.ask(address)
                found[address] = len(asset.body)
                if address.endswith(".js"):
                    wanted += [urljoin(address, each) for each in MODULE.findall(asset.text)]
                if "immutable" not in asset.headers["cache-control"]:
                    raise AssertionError(f"{address} is not kept by browsers")
        return len(page.body) + sum(found.values()), len(page.body)

    def resident(self) -> float:
        """Megabytes of the console in memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / 1e6


def worked(pid: int) -> float:
    """Milliseconds that a process has been on a processor."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK") * 1000


@contextlib.contextmanager
def served(dsn: str) -> Iterator[Site]:
    """Start `bartleby console` on this machine."""
    command = [sys.executable, "-m", "bartleby", "console", "--port", "0"]
    environment = {**os.environ, "BARTLEBY_DSN": dsn, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        said = process.stdout.readline() if process.stdout else ""
        found = re.search(r":(\d+)/", said)
        if found is None:
            raise RuntimeError(f"the console did not start: {said!r}")
        with connect(dsn) as database:
            yield Site(process, int(found[1]), database)
    finally:
        process.terminate()
        process.wait(30)
