"""A private PostgreSQL on a disk that has to be waited for, and the words for what is measured on it."""

import contextlib
import itertools
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, LiteralString, Self

import psycopg
from psycopg.conninfo import make_conninfo

from bartleby import dev

Connection = psycopg.Connection[tuple[Any, ...]]
Row = tuple[Any, ...]

INSTALL = Path(dev.__file__).parent / "sql" / "install.sql"
SETTINGS = {
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "30min",
    "max_connections": "200",
}

# About 130 bytes; what a small order looks like.
PAYLOAD = """jsonb_build_object('order', g, 'customer', 'customer-' || g % 1000, 'amount', (g % 9973) * 0.37,
    'currency', 'EUR', 'note', 'please leave it at the door')"""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure has to reach: its ratio to the other contestant, or its own value."""

    of: str
    least: float | None = None
    most: float | None = None

    def holds(self, ratio: float | None, value: float) -> bool:
        """Whether the figure is good enough."""
        seen = value if self.of == "value" else ratio
        if seen is None:
            return False
        return (self.least is None or seen >= self.least) and (self.most is None or seen <= self.most)

    def __str__(self) -> str:
        unit = "x" if self.of == "ratio" else ""
        if self.least is not None and self.most is not None:
            return f"{self.least:g}-{self.most:g}{unit}"
        return f">= {self.least:,g}{unit}" if self.least is not None else f"<= {self.most:,g}{unit}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    name: str
    unit: str
    ours: float
    other: float | None = None
    against: str = ""
    bar: Bar | None = None
    paired: float | None = None

    @property
    def ratio(self) -> float | None:
        """Ours over theirs: the median of pairs measured back to back, where there were several."""
        if self.paired is not None:
            return self.paired
        return self.ours / self.other if self.other else None

    @property
    def passed(self) -> bool | None:
        """Whether it reached its bar, if it has one."""
        return self.bar.holds(self.ratio, self.ours) if self.bar else None


@dataclass(slots=True)
class Findings:
    """What a scenario found: figures for the table, series for the chart."""

    figures: list[Figure] = field(default_factory=list)
    series: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lab:
    """A running server; every scenario gets databases of its own."""

    server: dev.Server
    quick: bool
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    @classmethod
    @contextlib.contextmanager
    def opened(cls, *, quick: bool, directory: Path | None = None) -> Iterator[Self]:
        """Start the server in a directory that is removed afterwards."""
        folder = Path(tempfile.mkdtemp(prefix="bartleby-bench-", dir=directory or disk()))
        try:
            with dev.start(folder, settings=SETTINGS) as server:
                lab = cls(server, quick)
                lab.admin("create database bench_template")
                install(server, "bench_template")
                yield lab
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """A fresh database with both contestants in it, as a connection string."""
        name = f"bench_{next(self._numbers)}"
        self.admin(f"create database {name} template bench_template")
        # Wherever the checkpoint falls in what follows, it should not fall into a measurement.
        self.admin("checkpoint")
        try:
            yield self.dsn(name)
        finally:
            self.admin(f"drop database {name} with (force)")

    def dsn(self, name: str) -> str:
        """The connection string of a database, by Unix socket where there is one."""
        where: dict[str, str] = {"dbname": name}
        if self.server.socket_directory is not None:
            where["host"] = str(self.server.socket_directory)
        return make_conninfo(self.server.dsn, **where)

    def admin(self, statement: str) -> None:
        """Run a statement in no scenario's database."""
        with connect(self.dsn("postgres")) as connection:
            script(connection, statement)

    def scaled(self, full: int, quick: int) -> int:
        """A size for a full or for a quick run."""
        return quick if self.quick else full

    def machine(self) -> dict[str, str | int]:
        """What the figures depend on."""
        with connect(self.dsn("postgres")) as connection:
            found = connection.execute("select current_setting('server_version'), pg_jit_available()").fetchone()
        return {
            "postgresql": f"{found[0]}, {'JIT on' if found[1] else 'no JIT'}" if found else "",
            "python": platform.python_version(),
            "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
            "cores": os.cpu_count() or 0,
            "load before": f"{os.getloadavg()[0]:.1f}",
            "settings": ", ".join(f"{name}={value}" for name, value in SETTINGS.items()),
        }


def disk() -> Path:
    """A place for temporary things that is not memory, which would make every commit free."""
    lasting = Path("/var/tmp")  # noqa: S108 - only a directory that mkdtemp makes is used in it
    return lasting if os.access(lasting, os.W_OK) else Path(tempfile.gettempdir())


def install(server: dev.Server, name: str) -> None:
    """Install Bartleby as somebody with nothing but psql would."""
    psql = shutil.which("psql", path=dev.find_binaries()) or "psql"
    environment = {**os.environ, **server.environment, "PGDATABASE": name}
    options = ["-X", "-q", "-1", "-v", "ON_ERROR_STOP=1", "-f", str(INSTALL)]
    subprocess.run([psql, *options], check=True, env=environment)


def connect(dsn: str, *, durable: bool = True, settings: str = "") -> Connection:
    """A session in autocommit; one that is not durable does not wait for the disk."""
    options = f"-c synchronous_commit={'on' if durable else 'off'} {settings}"
    return psycopg.connect(dsn, autocommit=True, options=options, prepare_threshold=0)


def rows(connection: Connection, query: LiteralString, *values: object) -> list[Row]:
    """Run a prepared statement and read its result in binary."""
    return connection.execute(query, values, prepare=True, binary=True).fetchall()


def run(connection: Connection, query: LiteralString, *values: object) -> None:
    """Run a prepared statement for its effect."""
    connection.execute(query, values, prepare=True)


def script(connection: Connection, text: str) -> None:
    """Run statements that take no values and may be built from names that we chose."""
    connection.execute(text.encode(), prepare=False)


def seconds(action: Callable[[], object]) -> float:
    """How long it takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def interleaved(rounds: int, *contestants: Callable[[], float]) -> list[list[float]]:
    """Measure each contestant once per round, so that a noisy minute hits all of them."""
    measured: list[list[float]] = [[] for _ in contestants]
    for number in range(rounds):
        order = range(len(contestants))
        for index in order if number % 2 == 0 else reversed(order):
            measured[index].append(contestants[index]())
    return measured


def compared(name: str, unit: str, measured: Sequence[Sequence[float]], against: str, bar: Bar | None = None) -> Figure:
    """A figure from measurements taken in pairs: medians, and the median of the pairs' ratios."""
    ours, other = measured
    ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, other, strict=True))
    return Figure(name, unit, statistics.median(ours), statistics.median(other), against, bar, ratio)
