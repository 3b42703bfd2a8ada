"""What `bartleby doctor` looks at. Each check is one function that returns findings with their remedies."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from bartleby.client import Client
from bartleby.errors import NotInstalled
from bartleby.version import __version__

_LONG = timedelta(minutes=5)
_MANY = 1_000_000
_MUCH_NOTIFY = 0.1
_LITTLE_DISK = 0.1
_MARKS = {"good": "ok", "note": "--", "warning": "!", "bad": "!!"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One result: how bad it is, what was looked at, and what was found."""

    status: Literal["good", "note", "warning", "bad"]
    check: str
    text: str

    @property
    def mark(self) -> str:
        """The status as a short word."""
        return _MARKS[self.status]


def examine(client: Client) -> list[Finding]:
    """Return the findings of every check; where the schema is missing, of those that need none."""
    checks: list[Callable[[Client], Iterator[Finding]]] = [
        _server, _durability, _replication, _pooler, _horizon, _notifications, _disk,
    ]  # fmt: skip
    findings: list[Finding] = []
    try:
        for check in (_version, _drift, _segments):
            findings += _allowed(check, client)
    except NotInstalled as error:
        findings = [Finding("bad", "schema", f"{error}; {error.hint}")]
    return findings + [finding for check in checks for finding in check(client)]


def _allowed(check: Callable[[Client], Iterator[Finding]], client: Client) -> list[Finding]:
    import psycopg

    try:
        return list(check(client))
    except psycopg.errors.InsufficientPrivilege:
        name = check.__name__.strip("_")
        return [Finding("note", name, "this user may not look; it needs the role bartleby_reader")]


def _version(client: Client) -> Iterator[Finding]:
    installed = client.version()
    if installed == __version__:
        yield Finding("good", "schema", f"version {installed}, as this package")
    else:
        yield Finding("bad", "schema", f"version {installed}, but this package is {__version__}; run: bartleby upgrade")


def _drift(client: Client) -> Iterator[Finding]:
    changes = client.drift()
    if not changes:
        yield Finding("good", "drift", "every object is as it was installed")
    for name, change in changes:
        yield Finding("warning", "drift", f"{name} is {change}; `bartleby install` restores functions and views")


def _segments(client: Client) -> Iterator[Finding]:
    sizes = ", ".join(
        f"{segment.slot}: {_size(segment.bytes)}{' (written)' if segment.current else ''}"
        for segment in client.segments()
    )
    yield Finding("good", "segments", sizes)


def _server(client: Client) -> Iterator[Finding]:
    facts = client.facts()
    if facts.in_recovery:
        yield Finding("bad", "server", f"PostgreSQL {facts.version} is a standby: it takes no messages")
    else:
        yield Finding("good", "server", f"PostgreSQL {facts.version}")


def _durability(client: Client) -> Iterator[Finding]:
    facts = client.facts()
    if not facts.fsync:
        yield Finding("bad", "durability", "fsync is off: a power failure can lose everything; set fsync = on")
    elif not facts.full_page_writes:
        yield Finding("bad", "durability", "full_page_writes is off: a power failure can corrupt data; turn it on")
    elif facts.synchronous_commit == "off":
        yield Finding("bad", "durability", "synchronous_commit is off: the last sends before a crash can be lost")
    else:
        yield Finding("good", "durability", "a committed message survives a crash and a power failure")


def _replication(client: Client) -> Iterator[Finding]:
    facts = client.facts()
    if facts.synchronous_standby_names and facts.synchronous_commit not in {"off", "local"}:
        yield Finding("good", "failover", f"synchronous ({facts.synchronous_standby_names}): failover loses nothing")
    else:
        yield Finding("note", "failover", "no synchronous standby: a failover can lose the last committed messages")


def _pooler(client: Client) -> Iterator[Finding]:
    if client.behind_pooler():
        text = "a pooler stands between: no prepared statements, workers poll instead of listening"
        yield Finding("note", "connection", f"{text}; give the listener a direct DSN")
    else:
        yield Finding("good", "connection", "direct, no pooler")


def _horizon(client: Client) -> Iterator[Finding]:
    holder = client.oldest_xmin_holder()
    if holder is None:
        yield Finding("good", "vacuum", "nothing holds it back")
        return
    age = datetime.now(UTC) - holder.since if holder.since else None
    text = f"held back by {holder.kind} {holder.who}, {holder.age} transactions old"
    text += f", for {str(age).partition('.')[0]}" if age else ""
    if holder.kind != "session" or (age and age > _LONG) or holder.age > _MANY:
        yield Finding("warning", "vacuum", f"{text}; claims stay fast, but disk use grows until it ends")
    else:
        yield Finding("good", "vacuum", text)


def _notifications(client: Client) -> Iterator[Finding]:
    usage = client.facts().notify_queue_usage
    if usage > _MUCH_NOTIFY:
        text = f"the queue of notifications is {usage:.0%} full: a listener is stuck in a transaction"
        yield Finding("bad", "notify", f"{text}; when it is full, every NOTIFY fails")
    else:
        yield Finding("good", "notify", f"the queue of notifications is {usage:.0%} full")


def _disk(client: Client) -> Iterator[Finding]:
    directory = client.facts().data_directory
    try:
        if directory is None or not client.is_local():
            raise FileNotFoundError
        usage = shutil.disk_usage(directory)
    except OSError:
        yield Finding("note", "disk", "the server's disk cannot be seen from here")
        return
    text = f"{_size(usage.free)} of {_size(usage.total)} free"
    yield Finding("bad" if usage.free < usage.total * _LITTLE_DISK else "good", "disk", text)


def _size(count: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1024:  # noqa: PLR2004 - the factor between units
            return f"{count:.0f} {unit}"
        count //= 1024
    return f"{count} TB"
