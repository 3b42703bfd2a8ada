"""What templates need to show a value: times, numbers, small charts, trees of documents, differences of texts."""

import difflib
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from markupsafe import Markup, escape

from bartleby.documents import HIDDEN, Number, parsed, written
from bartleby.replays import Replay
from bartleby.surfaces.web.pages.states import state
from bartleby.surfaces.words import length, line

_MOST_NODES, _OPEN_DEPTH, _LONGEST_TEXT = 3000, 3, 4000
_MINUTE, _AGES = 60, 10**10
_FRAME = re.compile(r'^\s+File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$')
# what steers a terminal, turns letters around, or is there without being seen; joiners that scripts need are none
_STEERING = re.compile(
    "[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3")


@dataclass(frozen=True, slots=True)
class Node:
    """A place of a document: a leaf with its text, or a branch with children."""

    name: str | None
    path: str
    kind: str
    text: str
    children: tuple["Node", ...]
    open: bool


@dataclass(frozen=True, slots=True)
class Frame:
    """A part of a traceback: lines that are shown, or those of a library, which are folded."""

    folded: bool
    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hour:
    """An hour: how many died in it, and the filter that finds them."""

    begin: datetime
    deaths: int
    filter: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a small chart, in its own units."""

    x: float
    y: float
    height: float
    value: int


def visible(value: object) -> object:
    """Return a value for a page; what would turn the letters around it is shown as a mark instead."""
    if isinstance(value, str) and not isinstance(value, Markup) and _STEERING.search(value):
        return _STEERING.sub("\ufffd", value)
    return value


def editable(raw: str | None) -> str:
    """Return a document for a form; what cannot be seen is written as an escape, so that it stays what it is."""
    return _STEERING.sub(lambda each: json.dumps(each[0])[1:-1], pretty(raw))


def exact(text: object) -> Markup:
    """Return a text as it is, for an attribute that is copied from."""
    return escape(text)


def production(environment: str | None) -> bool:
    """Return whether an environment is one where mistakes are expensive."""
    return environment is not None and environment.lower().startswith("prod")


def number(value: int | None) -> str:
    """Return a count with its thousands set apart."""
    return "-" if value is None else f"{value:,}"


def ago(moment: datetime | None, now: datetime) -> str:
    """Return how long ago something was, or how far ahead it is."""
    if moment is None:
        return "never"
    away = moment - now
    if abs(away) < timedelta(seconds=1):
        return "now"
    return f"in {length(away)}" if away > timedelta(0) else f"{length(away)} ago"


def iso(moment: datetime | None) -> str:
    """Return a moment as a machine reads it."""
    return "" if moment is None else moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def utc(moment: datetime | None) -> str:
    """Return a moment as people read it everywhere."""
    return "" if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def seconds(number: float) -> str:
    """Return a length of time that a policy has."""
    return f"{number:g} s" if number < _MINUTE else length(timedelta(seconds=min(number, _AGES)))


def clock(moment: datetime) -> str:
    """Return the time of day, wherever the console runs."""
    return moment.astimezone(UTC).strftime("%H:%M:%S")


def bars(values: Sequence[int], height: int = 24, width: int = 4) -> list[Bar]:
    """Return the bars of a chart; what is not zero can be seen."""
    most = max([*values, 1])
    found = []
    for place, value in enumerate(values):
        tall = 0.0 if not value else max(1.5, height * value / most)
        found.append(Bar(place * width, round(height - tall, 1), round(tall, 1), value))
    return found


def hours(deaths: Sequence[int], now: datetime) -> list[Hour]:
    """Return each hour of the clock up to now, with its deaths."""
    start = now.replace(minute=0, second=0, microsecond=0) - timedelta(hours=len(deaths) - 1)
    found = []
    for place, count in enumerate(deaths):
        begin = start + timedelta(hours=place)
        until = begin + timedelta(hours=1)
        found.append(Hour(begin, count, f"dead:>={begin:%Y-%m-%dT%H:%M} dead:<{until:%Y-%m-%dT%H:%M}"))
    return found


def tree(raw: str | None) -> Node | None:
    """Return a document as a tree, or nothing if it is none or too large for one."""
    if raw is None:
        return None
    budget = [_MOST_NODES]
    try:
        return _node(parsed(raw), None, "", 0, budget)
    except (ValueError, RecursionError):
        return None


def pretty(raw: str | None) -> str:
    """Return a document with a line for each value, and every digit as it was."""
    if raw is None:
        return ""
    try:
        return written(parsed(raw), 2)
    except (ValueError, RecursionError):
        return raw


def _node(value: object, name: str | None, path: str, depth: int, budget: list[int]) -> Node:
    budget[0] -= 1
    if budget[0] < 0:
        raise ValueError("too large for a tree")
    if isinstance(value, dict):
        below = ((str(name), f"{path}.{name}" if path else str(name), each) for name, each in value.items())
        return _branch(
            name, path, "object", [_node(each, own, at, depth + 1, budget) for own, at, each in below], depth
        )
    if isinstance(value, list):
        children = [_node(each, str(at), f"{path}[{at}]", depth + 1, budget) for at, each in enumerate(value)]
        return _branch(name, path, "list", children, depth)
    if value == HIDDEN:
        return Node(name, path, "hidden", HIDDEN, (), False)
    kind = "number" if isinstance(value, Number) else "text" if isinstance(value, str) else "word"
    text = written(value)
    return Node(name, path, kind, text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…", (), False)


def _branch(name: str | None, path: str, kind: str, children: Sequence[Node], depth: int) -> Node:
    noun = "item" if kind == "list" else "field"
    text = f"{len(children):,} {noun}{'s' if len(children) != 1 else ''}"
    return Node(name, path, kind, text, tuple(children), depth < _OPEN_DEPTH)


def frames(traceback: str | None) -> list[Frame]:
    """Return a traceback with what libraries did folded."""
    found: list[Frame] = []
    kept: list[str] = []
    folded: list[str] = []
    inside = False

    def flush() -> None:
        if kept:
            found.append(Frame(False, "", tuple(kept)))
            kept.clear()
        if folded:
            frames_of = sum(1 for each in folded if _FRAME.match(each))
            title = f"{frames_of} frame{'s' if frames_of != 1 else ''} of libraries"
            found.append(Frame(True, title, tuple(folded)))
            folded.clear()

    for text in _lines(traceback):
        frame = _FRAME.match(text)
        library = _LIBRARY.search(frame["file"]) is not None if frame else inside and text.startswith("    ")
        if library != inside:
            flush()
        inside = library
        (folded if library else kept).append(text)
    flush()
    return found


def _lines(text: str | None) -> list[str]:
    # not splitlines: it swallows marks that a line may have in it
    found = (text or "").rstrip().replace("\r\n", "\n")
    return found.split("\n") if found else []


def culprit(traceback: str | None) -> str | None:
    """Return the innermost frame of the application: `shop/orders.py:41 in charge`."""
    own = None
    for text in _lines(traceback):
        frame = _FRAME.match(text)
        if frame and not _LIBRARY.search(frame["file"]):
            own = f"{frame['file']}:{frame['line']} in {frame['name']}"
    return own


def text_diff(before: str | None, after: str | None) -> list[tuple[str, str]]:
    """Return how two texts differ, as lines with `+`, `-` or a blank before each."""
    lines = difflib.unified_diff((before or "").splitlines(), (after or "").splitlines(), lineterm="", n=2)
    return [(each[:1], each[1:]) for each in lines if not each.startswith(("+++", "---", "@@"))]


def command(*words: object) -> str:
    """Return a command line that a shell takes as it is; what would steer a terminal is in it as an escape."""
    return "bartleby " + " ".join(_word(str(each)) for each in words)


def _word(text: str) -> str:
    if not _STEERING.search(text):
        return shlex.quote(text)
    escaped = text.replace("\\", r"\\").replace("'", r"\'")
    return "$'" + _STEERING.sub(lambda each: rf"\U{ord(each[0]):08x}", escaped) + "'"


def short(text: str | None, limit: int = 140) -> str:
    """Return the beginning of a text in one line."""
    return line(text, limit)


def without(text: str, kind: str | None) -> str:
    """Return what was said of an error without its type in front, where that stands there already."""
    return text.removeprefix(f"{kind}:").lstrip() or text if kind else text


def sentence(text: str) -> str:
    """Return a text that begins with a capital letter."""
    return text[:1].upper() + text[1:]


def progress(plan: Replay) -> Iterator[tuple[str, int, float, float]]:
    """Yield the parts of a plan's bar: state, items, where it begins and how long it is, of 100."""
    start = 0.0
    for name in ("done", "already_handled", "died_again", "skipped", "gone", "replayed", "waiting"):
        items = getattr(plan, name)
        if items and plan.items:
            wide = 100 * items / plan.items
            yield name, items, round(start, 2), round(wide, 2)
            start += wide


FILTERS = {
    "span": length,
    "seconds": seconds,
    "sentence": sentence,
    "clock": clock,
    "n": number,
    "ago": ago,
    "iso": iso,
    "utc": utc,
    "bars": bars,
    "tree": tree,
    "pretty": pretty,
    "frames": frames,
    "culprit": culprit,
    "exact": exact,
    "short": short,
    "progress": progress,
    "state": state,
    "without": without,
}
