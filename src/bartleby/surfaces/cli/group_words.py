"""The portrait of a group, in words: what broke, whether it still does, who looks after it, what was tried, what next.

Pure: facts in, sentences out, and none of them can steer a terminal.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from bartleby.evidence import Count, DeadLetter, Group, SharedValue
from bartleby.inspection import GroupReplay, GroupVersion
from bartleby.message import Queue
from bartleby.replays import OVER
from bartleby.surfaces.words import breaker, error_line, length, line, pause, relative, traceback_end, when

RECENT = timedelta(minutes=5)

_LONGEST = 200
_LONGEST_VALUE = 80
_MOST_SHARED = 12
_MOST_VERSIONS = 4
_MOST_TRIES = 5
_LAST_LINES = 8
_STYLES = {"regressed": "bold red", "open": "bold yellow", "muted": "dim", "resolved": "green"}
# The first is for none at all, so that one among a thousand is still seen.
_BARS = "▁▂▃▄▅▆▇█"
_ASCII = "_.:-=+*#"


@dataclass(frozen=True, slots=True)
class Portrait:
    """What is known of a group; `recent` are those that died within `RECENT`, `newest` its last letter."""

    group: Group
    queue: Queue | None
    recent: Count
    newest: DeadLetter | None
    shared: list[SharedValue]
    versions: list[GroupVersion]
    replays: list[GroupReplay]


@dataclass(frozen=True, slots=True)
class Section:
    """Lines that belong together, below a title; a command that they name is to be typed as it is."""

    title: str
    lines: tuple[str, ...]
    style: str = ""


def state_style(state: str) -> str:
    """Return how a state of a group looks on a terminal."""
    return _STYLES.get(state, "")


def title(group: Group) -> str:
    """Return what a group is called, in one line."""
    return line(group.title or group.error_type or "no error was given", _LONGEST)


def summary(group: Group, now: datetime) -> str:
    """Return a group and its state in one line."""
    return f"group {group.id} is {_state(group, now)}: {title(group)}"


def heading(portrait: Portrait, now: datetime) -> list[str]:
    """Return which group it is, what it died of, and whether that still happens."""
    group = portrait.group
    lines = [
        f"Group {group.id} of queue {group.queue} is {_state(group, now)}",
        title(group),
        _pulse(portrait, now),
    ]
    if portrait.queue is not None and portrait.queue.paused:
        lines.append(f"the queue is {pause(portrait.queue, now)}")
    if portrait.queue is not None and portrait.queue.breaker in {"open", "forced"}:
        lines.append(breaker(portrait.queue, now))
    return lines


def sections(portrait: Portrait, now: datetime, *, everything: bool = False) -> list[Section]:
    """Return the parts of a portrait; what is not known has none."""
    found = [
        Section("", tuple(_facts(portrait, now))),
        *_shared(portrait, everything=everything),
        *_newest(portrait, now, everything=everything),
        Section("What was tried", tuple(_tries(portrait, now))),
    ]
    return [section for section in found if section.lines]


def advice(portrait: Portrait) -> list[tuple[str, str]]:
    """Return what to do next: commands, and what each is for."""
    return list(_steps(portrait))


def _state(group: Group, now: datetime) -> str:
    ago = f" {relative(group.state_at, now)}" if group.state_at else ""
    by = f" by {line(group.state_by, _LONGEST)}" if group.state_by else ""
    if group.state == "open":
        return "open: nobody looks after it yet" if not by else f"open again{by}{ago}"
    if group.state == "regressed":
        fixed = f" in {line(group.resolved_version, _LONGEST)}" if group.resolved_version else ""
        times = f", for the {_ordinal(group.regressions)} time" if group.regressions > 1 else ""
        return f"regressed{ago}: it was resolved{fixed} and is back{times}"
    if group.state == "muted" and group.muted_until is not None:
        return f"muted until {when(group.muted_until)} ({relative(group.muted_until, now)}){by}"
    if group.state == "resolved" and group.resolved_version:
        return f"resolved in {line(group.resolved_version, _LONGEST)}{by}{ago}"
    return f"{group.state}{by}{ago}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in {11, 12, 13} else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _pulse(portrait: Portrait, now: datetime) -> str:
    group, recent = portrait.group, portrait.recent
    last = f"the last {relative(group.last_dead_at, now)}" if group.last_dead_at else "none is known"
    hour = f"about {group.deaths_last_hour:,} in the last hour"
    if recent.letters:
        rate = recent.letters / (RECENT / timedelta(minutes=1))
        return f"Still happening: {recent} in the last {length(RECENT)} ({rate:,.1f} a minute), {last}; {hour}"
    if group.deaths_last_hour:
        return f"None in the last {length(RECENT)}, {last}; {hour}"
    return f"Quiet: {last}"


def _facts(portrait: Portrait, now: datetime) -> Iterator[str]:
    group = portrait.group
    counts = {"dead": group.dead, "alive again": group.replayed, "resolved": group.resolved}
    counts["discarded"] = group.discarded
    yield f"letters   {', '.join(f'{count:,} {name}' for name, count in counts.items() if count) or 'none any more'}"
    peak = max(group.deaths_by_hour, default=0)
    yield f"24 hours  {sparkline(group.deaths_by_hour)}" + (f"  at most {peak:,} an hour" if peak else "")
    if group.first_dead_at is not None:
        yield f"first     {when(group.first_dead_at)} ({relative(group.first_dead_at, now)})"
    if versions := _versions(portrait):
        yield f"versions  {versions}"
    if group.error_types is None or len(group.error_types) > 1:
        types = ", ".join(line(each, _LONGEST_VALUE) for each in group.error_types or ()) or "more than 50"
        yield f"types     {line(types, _LONGEST)}"
    if group.restless:
        yield "moving    letters are on their way to where merges and splits want them"
    if group.owner:
        yield f"owner     {line(group.owner, _LONGEST)}"
    if group.note:
        yield f"note      {line(group.note, _LONGEST)}"
    if group.link:
        yield f"link      {line(group.link, _LONGEST)}"


def _versions(portrait: Portrait) -> str:
    seen = {each.version: each.letters for each in portrait.versions}
    of = sum(seen.values())
    named = [
        f"{line(each, _LONGEST_VALUE)} ({seen.get(each, 0):,} of {of:,})" if len(portrait.group.versions) > 1
        else line(each, _LONGEST_VALUE)
        for each in reversed(portrait.group.versions)
    ]  # fmt: skip
    more = f" and {len(named) - _MOST_VERSIONS} more" if len(named) > _MOST_VERSIONS else ""
    return f"{', '.join(named[:_MOST_VERSIONS])}{more}"


def _shared(portrait: Portrait, *, everything: bool) -> Iterator[Section]:
    # of versions there is a line already
    shared = [each for each in portrait.shared if each.path != "version"]
    every = [each for each in shared if each.letters == each.of]
    nearly = [each for each in shared if each.letters < each.of]
    width = max((len(line(each.path, _LONGEST_VALUE)) for each in shared), default=0)
    for values, name in ((every, "All"), (nearly, "Nearly all")):
        shown = values if everything else values[:_MOST_SHARED]
        lines = [
            f"{line(each.path, _LONGEST_VALUE):{width}}  {line(each.raw, _LONGEST_VALUE)}"
            + (f"  ({each.letters:,})" if each.letters < each.of else "")
            for each in shown
        ]
        if len(shown) < len(values):
            lines.append(f"… {len(values) - len(shown)} more (--all)")
        if lines:
            yield Section(f"{name} of the newest {values[0].of:,} share", tuple(lines))


def _newest(portrait: Portrait, now: datetime, *, everything: bool) -> Iterator[Section]:
    letter = portrait.newest
    if letter is None:
        return
    version = f", version {line(letter.worker_version, _LONGEST_VALUE)}" if letter.worker_version else ""
    worker = f"by worker {line(letter.worker, _LONGEST_VALUE)}{version}"
    payload = "erased" if letter.raw is None else line(letter.raw, _LONGEST)
    lines = [f"payload {payload}", *traceback_end(letter.traceback, None if everything else _LAST_LINES)]
    if letter.traceback is None and letter.error:
        lines.append(error_line(letter.error_type, letter.error))
    yield Section(
        f"The newest, message {letter.message_id}, died {relative(letter.dead_at, now)}, {worker}", tuple(lines)
    )


def _tries(portrait: Portrait, now: datetime) -> Iterator[str]:
    for each in portrait.replays[:_MOST_TRIES]:
        number = f"replay {each.replay_id}" if each.replay_id is not None else "replayed"
        status = f" is {'a ' * (each.status == 'draft')}{each.status}" if each.status else ""
        by = f" by {line(each.actor, _LONGEST_VALUE)} {relative(each.at, now)}{status}"
        counts = {
            "done": each.done,
            "died again": each.died_again,
            "alive": each.replayed,
            "skipped": each.skipped,
            "left alone" if each.status in OVER else "waiting": each.waiting,
        }
        came = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
        yield f"{number}{by}: {came} ({line(each.reason, _LONGEST_VALUE)})"
        if each.cause:
            yield f"  {line(each.cause, _LONGEST)}"
    if len(portrait.replays) > _MOST_TRIES:
        yield "… more: bartleby replay list"


def _steps(portrait: Portrait) -> Iterator[tuple[str, str]]:
    group = portrait.group
    under_way = [each for each in portrait.replays if each.status in _UNDER_WAY]
    for each in under_way:
        verb, words = _UNDER_WAY[each.status or ""]
        yield f"bartleby replay {verb} {each.replay_id}", words
    if portrait.newest is not None:
        yield f"bartleby explain {portrait.newest.message_id}", "the newest, from send to death"
    if portrait.newest is not None and group.dead:
        yield f"bartleby repro {portrait.newest.message_id} --app MODULE:APP", "a test that fails as it did"
        yield f"bartleby dead group:{group.id}", f"its letters, all {group.dead:,}" if group.dead > 1 else "its letter"
    if group.state in {"open", "regressed"}:
        yield f"bartleby groups ack {group.id} --reason 'I am at it'", "tell others that you look after it"
    if group.dead and not under_way:
        canary = " --canary 10" if group.dead > 1 else ""
        words = "now that it is mended" if group.state == "resolved" else "when it is mended"
        yield f"bartleby replay group:{group.id}{canary} --reason 'what mended it'", words
    if group.state != "resolved":
        yield f"bartleby groups resolve {group.id} --in VERSION --reason 'what mended it'", "be told if it comes back"


_UNDER_WAY = {
    "draft": ("show", "a plan that waits to be started"),
    "running": ("watch", "it is being replayed just now"),
    "settling": ("watch", "it is being replayed just now"),
    "paused": ("resume", "a replay that was paused"),
}


def sparkline(counts: Sequence[int], *, width: int | None = None) -> str:
    """Return one bar for each number, or for as many together that they fit into the width."""
    together = 1 if not width else max(1, -(-len(counts) // width))
    sums = [sum(counts[begin : begin + together]) for begin in range(0, len(counts), together)]
    most = max(sums, default=0)
    bars = _BARS if _drawable() else _ASCII
    return "".join(bars[0] if not each else bars[max(1, -(-each * (len(bars) - 1) // most))] for each in sums)


def _drawable() -> bool:
    try:
        _BARS.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
