"""What `bartleby doctor` looks at. Each check is one function that returns findings with their remedies."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from bartleby.client import Client
from bartleby.errors import NotInstalled
from bartleby.evidence import GroupId, term
from bartleby.relay import DUTY as RELAY
from bartleby.replaying import DUTY
from bartleby.replays import Replay
from bartleby.surfaces.words import LONGEST_ERROR, line, when
from bartleby.version import __version__

_LONG = timedelta(minutes=5)
_SOON = timedelta(days=7)
_COUNTED_UPTO = 1_000
_MANY_GROUPS = 1000
_NAMED = 5
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
        for check in (_version, _drift, _compiling, _segments, _letters, _groups, _replays, _sinks, _audit):
            findings += _allowed(check, client)
    except NotInstalled as error:
        # one that has a version is only too old for some of the checks
        findings = findings or [Finding("bad", "schema", f"{error}; {error.hint}")]
    return findings + [finding for check in checks for finding in check(client)]


def _allowed(check: Callable[[Client], Iterator[Finding]], client: Client) -> list[Finding]:
    import psycopg

    try:
        return list(check(client))
    except psycopg.errors.InsufficientPrivilege:
        name = check.__name__.strip("_")
        return [Finding("note", name, "this user may not look; it needs the role bartleby_reader")]
    except psycopg.errors.QueryCanceled:
        name = check.__name__.strip("_")
        return [Finding("warning", name, "looking took longer than this user may; run: bartleby doctor")]


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


def _compiling(client: Client) -> Iterator[Finding]:
    above = client.facts().jit_above_cost
    cost = client.cost_of_queues() if above is not None else 0
    if above is None or cost <= above:
        yield Finding("good", "jit", "PostgreSQL compiles no small query")
        return
    text = f"PostgreSQL compiles even small queries, which takes longer than to run them: jit_above_cost is {above:g},"
    text = f"{text} and a look at all queues costs {cost:,.0f}; raise it (100000 is the default), or set jit = off"
    yield Finding("warning", "jit", text)


def _segments(client: Client) -> Iterator[Finding]:
    sizes = ", ".join(
        f"{segment.slot}: {_size(segment.bytes)}{' (written)' if segment.current else ''}"
        for segment in client.segments()
    )
    yield Finding("good", "segments", sizes)


def _letters(client: Client) -> Iterator[Finding]:
    found = client.expiring(_SOON)
    for each in found:
        count = f"{each.letters:,}{'+' if each.letters >= _COUNTED_UPTO else ''}"
        letters = "1 unresolved dead letter" if each.letters == 1 else f"{count} unresolved dead letters"
        lost = letters if each.what == "letters" else f"the payloads of {letters}, which cannot be replayed then,"
        text = f"the retention of queue {each.queue} takes {lost} within {_SOON.days} days"
        chosen = term("queue", each.queue)
        text = f"{text}, the first on {when(each.first_at)}; look at them: bartleby dead {chosen} --sort oldest"
        yield Finding("warning", "dead letters", f"{text}; to keep them: bartleby hold {chosen}")
    if not found:
        yield Finding("good", "dead letters", f"retention takes no unresolved ones within {_SOON.days} days")


def _groups(client: Client) -> Iterator[Finding]:
    regressed = client.groups(states=["regressed"], limit=_MANY_GROUPS)
    restless = client.restless_groups()
    if regressed:
        bugs = "1 resolved bug is" if len(regressed) == 1 else f"{len(regressed):,} resolved bugs are"
        text = f"{bugs} back ({_named([each.id for each in regressed])}); see: bartleby groups --state regressed"
        yield Finding("warning", "groups", text)
    if restless:
        text = f"letters of {_named(restless)} have yet to move to where rules want them"
        yield Finding("note", "groups", f"{text}; a worker or `bartleby janitor` moves them")
    if not regressed and not restless:
        yield Finding("good", "groups", "no resolved bug is back")


def _named(groups: list[GroupId]) -> str:
    more = ", …" if len(groups) > _NAMED else ""
    return f"group{'s' if len(groups) > 1 else ''} {', '.join(map(str, groups[:_NAMED]))}{more}"


def _replays(client: Client) -> Iterator[Finding]:
    running = client.replays(statuses=["running", "settling"], limit=_MANY_GROUPS)
    runner = client.on_duty(DUTY)
    if not running:
        yield Finding("good", "replays", "none is running")
    elif runner is None:
        text = f"{_plans(running)}, and nobody runs {'it' if len(running) == 1 else 'them'}: start a worker"
        text = f"{text} or `bartleby janitor`, or run it from here"
        yield Finding("warning", "replays", f"{text}: bartleby replay resume {running[0].id}")
    else:
        yield Finding("good", "replays", f"{_plans(running)}: {runner} sees to it")


def _plans(running: list[Replay]) -> str:
    return f"replay {running[0].id} is running" if len(running) == 1 else f"{len(running):,} replays are running"


def _sinks(client: Client) -> Iterator[Finding]:
    found, relay = client.sinks(), client.on_duty(RELAY)
    troubled = [sink for sink in found if sink.state == "degraded" or sink.refused]
    for sink in troubled:
        said = f"takes nothing: {line(sink.error, LONGEST_ERROR)}" if sink.state == "degraded" else "works"
        refused = f", {sink.refused:,} events refused" if sink.refused else ""
        yield Finding("warning", "sinks", f"sink {sink.name} {said}{refused}; see: bartleby sinks show {sink.name}")
    if relay is None and (waiting := [sink.name for sink in found if sink.waiting and sink.state != "paused"]):
        text = f"events wait for {', '.join(waiting)}, and no relay is seen; start one: bartleby relay"
        yield Finding("warning", "sinks", text)
    elif not troubled:
        yield Finding("good", "sinks", f"{len(found):,}, and all work" if found else "none")


def _audit(client: Client) -> Iterator[Finding]:
    # only its end: `bartleby audit verify` reads every line
    lines, end = client.audit_log(limit=1), client.audit_anchor()
    last = f"{lines[0].id}:{lines[0].hash}" if lines else f"0:{'0' * 64}"
    if end == last:
        yield Finding("good", "audit", f"{lines[0].id if lines else 0:,} lines, and the last is as it should be")
    else:
        yield Finding("bad", "audit", "its last line is not the one that was written last; run: bartleby audit verify")


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
