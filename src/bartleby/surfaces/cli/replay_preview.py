"""What a replay plan would do, before it does it: short enough to be read at night, and exact."""

import json
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from bartleby.client import Runner
from bartleby.errors import UndecodablePayload
from bartleby.evidence import DeadLetter
from bartleby.message import MessageId, decode
from bartleby.replays import WILL_RUN, Change, Obstacle, Replay, Share
from bartleby.surfaces import shapes
from bartleby.surfaces.words import error_line, length, printable, relative, when

_SAMPLE = 5
_REASONS = 4
_CHANGES = 6
_LONGEST_VALUE = 60
_REPLAYED = (*sorted(WILL_RUN), "already_handled")
_WORDS = {
    "held": "on hold",
    "replayed": "already replayed",
    "resolved": "already resolved",
    "discarded": "discarded",
    "erased": "erased",
    "unknown": "unknown",
    "patch_fails": "not patched",
    "too_large": "too large",
    "invalid": "not what the handler takes",
    "no_queue": "without a queue",
    "newer": "newer",
}
_NOT_YET = ("draft", "preview")
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Preview:
    """A plan and what there is to know about its letters."""

    plan: Replay
    shares: list[Share]
    obstacles: list[Obstacle]
    sample: list[DeadLetter]
    changes: list[Change]
    blocked: list[str]
    unchecked: int = 0

    @classmethod
    def of(cls, client: Runner, plan: Replay, *, unchecked: int = 0) -> "Preview":
        """Look at a plan; `unchecked` of its letters have no handler that could say what it takes."""
        items = client.replay_items(plan.id, predictions=_REPLAYED, limit=_SAMPLE)
        sample = [each for item in items if (each := client.dead_letter(item.message_id)) is not None]
        changed = [MessageId(each.message_id) for each in sample] if plan.patch is not None else []
        changes = client.replay_changes(plan.id, changed) if changed else []
        shares, obstacles = client.replay_shares(plan.id), client.replay_obstacles(plan.id, limit=1000)
        blocked = [] if plan.over else _blocked(client, {each.queue for each in shares if each.prediction in _REPLAYED})
        return cls(plan, shares, obstacles, sample, changes, blocked, unchecked)

    def facts(self) -> dict[str, str]:
        """Return it in short lines, each with its name."""
        plan = self.plan
        planned, died = ("will", _died(self.shares)) if plan.status in _NOT_YET else ("was to", "")
        told = {
            "filter": "" if plan.filter is None else plan.filter or "every dead letter",
            "letters": f"{plan.items:,}, frozen {clock(plan.created_at)}{died}",
            f"{planned} run": _will_run(plan, self.shares),
            f"{planned} skip": _skipped(plan, self.obstacles),
            "unchecked": f"{self.unchecked:,}: no handler here says what it takes" if self.unchecked else "",
            "to": "" if plan.target is None else f"queue {plan.target}",
            "generation": "" if plan.generation is None else str(plan.generation),
            "canary": canary(plan),
            "pace": pace(plan),
            "waits": "; ".join(self.blocked),
        }
        return {name: text for name, text in told.items() if text}

    @property
    def queue(self) -> str | None:
        """The queue in which they will run, if it is one."""
        queues = {each.queue for each in self.shares if each.prediction in _REPLAYED}
        return queues.pop() if len(queues) == 1 else None

    def samples(self) -> list[str]:
        """Return a few of the letters that will run: by what they died of, or with what a patch changes."""
        if not self.changes:
            alike: dict[str, list[str]] = {}
            for letter in self.sample:
                alike.setdefault(error_line(letter.error_type, letter.error), []).append(str(letter.message_id))
            return [f"{', '.join(ids)}: {error}" for error, ids in alike.items()]
        died = {letter.message_id: error_line(letter.error_type, letter.error) for letter in self.sample}
        lines: list[str] = []
        for change in self.changes:
            lines.append(f"{change.message_id}: {died[change.message_id]}")
            lines += [f"    {each}" for each in changed(change)]
        return lines

    def document(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            **document(self.plan),
            "shares": [asdict(each) for each in self.shares],
            "obstacles": [asdict(each) for each in self.obstacles],
            "blocked": self.blocked,
            "unchecked": self.unchecked,
            "sample": [
                {"message_id": each.message_id, "queue": each.queue, "error_type": each.error_type, "error": each.error}
                for each in self.sample
            ],
            "changes": [
                {"message_id": each.message_id, "before": _decoded(each.raw_before), "after": _decoded(each.raw_after)}
                for each in self.changes
            ],
        }


def show(preview: Preview, *, before: Mapping[str, str] | None = None, err: bool = True) -> None:
    """Print a preview, with more facts before it."""
    facts = {**(before or {}), **preview.facts()}
    width = max(map(len, facts))
    for name, fact in facts.items():
        click.echo(printable(f"{name:{width}}  {fact}"), err=err)
    for number, line in enumerate(preview.samples() if preview.plan.status in _NOT_YET else ()):
        click.echo(printable(f"{'' if number else 'such as':{width}}  {line}"), err=err)


def document(plan: Replay) -> dict[str, Any]:
    """Return a plan for programs."""
    return shapes.plan(plan)


def clock(moment: datetime) -> str:
    """Return the time of day, and the date if it is not of today."""
    local = moment.astimezone()
    return local.strftime("%H:%M:%S") if local.date() == datetime.now().astimezone().date() else when(moment)


def reasons(obstacles: Sequence[Obstacle], of: int) -> str:
    """Return why letters are skipped, in a line: `5 already replayed by ben: hotfix`."""
    counts, examples = Counter[str](), dict[str, list[str]]()
    for each in obstacles:
        kind, _, told = each.problem.partition(": ")
        counts[kind] += each.items
        examples.setdefault(kind, []).append(told)
    parts = []
    for kind, items in counts.most_common(_REASONS):
        told = examples[kind][0]
        joint = " " if told.startswith("by ") else ": for example " if len(examples[kind]) > 1 else ": "
        parts.append(f"{items:,} {_WORDS.get(kind, kind)}{joint}{_short(told, 100)}")
    rest = of - sum(items for _, items in counts.most_common(_REASONS))
    return "; ".join([*parts, f"{rest:,} for other reasons"] if rest > 0 else parts)


def canary(plan: Replay) -> str:
    """Return how a plan feels its way."""
    if plan.canary is None:
        return ""
    steps = f"{plan.canary:,} first, with one attempt each; then {2 * plan.canary:,}, {4 * plan.canary:,} …"
    return f"{steps}; stops by itself if more than {plan.tolerance:.0%} of a step die again"


def pace(plan: Replay) -> str:
    """Return how fast a plan may run, and how long that takes at least."""
    parts = []
    if plan.rate is not None:
        parts.append(f"{plan.rate:,g} a second: about {length(timedelta(seconds=to_replay(plan) / plan.rate))}")
    if plan.window is not None:
        parts.append(f"at most {plan.window:,} at once")
    return ", ".join(parts)


def changed(change: Change) -> list[str]:
    """Return what a patch does to a payload, a line for each place."""
    if change.problem is not None or change.raw_after is None:
        return [f"is not patched: {change.problem or 'its payload was erased'}"]
    try:
        lines = list(_differences("payload", change.before, change.after))
    except (UndecodablePayload, RecursionError) as error:
        return [f"cannot be shown: {error}"]
    if not lines:
        return ["is not changed by the patch"]
    rest = len(lines) - _CHANGES
    return lines if rest <= 1 else [*lines[:_CHANGES], f"and {rest} more"]


def _decoded(text: str | None) -> object:
    try:
        return None if text is None else decode(text)
    except UndecodablePayload:
        return text


def _differences(path: str, before: Any, after: Any) -> Iterator[str]:  # noqa: ANN401 - any JSON value
    if isinstance(before, dict) and isinstance(after, dict):
        for name in [*before, *(each for each in after if each not in before)]:
            yield from _differences(f"{path}.{name}", before.get(name, _ABSENT), after.get(name, _ABSENT))
    elif isinstance(before, list) and isinstance(after, list):
        for place in range(max(len(before), len(after))):
            old, new = ((each[place] if place < len(each) else _ABSENT) for each in (before, after))
            yield from _differences(f"{path}.{place}", old, new)
    elif before is _ABSENT:
        yield f"+ {path}: {_value(after)}"
    elif after is _ABSENT:
        yield f"- {path}: {_value(before)}"
    elif type(before) is not type(after) or before != after:
        yield f"~ {path}: {_value(before)} → {_value(after)}"


def _will_run(plan: Replay, shares: Sequence[Share]) -> str:
    queues = Counter[str]()
    for share in shares:
        if share.prediction in _REPLAYED:
            queues[share.queue or ""] += share.items
    count = to_replay(plan)
    if not count:
        return "none"
    text = f"{count:,}: {', '.join(f'{name} {items:,}' for name, items in queues.most_common())}"
    if again := plan.predictions.get("again"):
        text += f"; {again:,} of them died again after an earlier replay"
    if handled := plan.predictions.get("already_handled"):
        text += f"; {handled:,} of them are marked as handled, which a handler with `once` skips"
    return text


def _skipped(plan: Replay, obstacles: Sequence[Obstacle]) -> str:
    count = plan.items - to_replay(plan)
    return f"{count:,}: {reasons(obstacles, count)}" if count else ""


def to_replay(plan: Replay) -> int:
    """Return how many letters a plan would replay."""
    return sum(plan.predictions.get(each, 0) for each in _REPLAYED)


def _blocked(client: Runner, queues: Container[str | None]) -> list[str]:
    found = [each for each in client.queues() if each.name in queues]
    paused = [
        f"queue {each.name} is paused: it goes on after bartleby queues resume {each.name}"
        for each in found
        if each.paused
    ]
    broken = [
        f"the breaker of queue {each.name} is {each.breaker}: it goes on when that closes"
        for each in found
        if each.breaker not in {"closed", "off"}
    ]
    return paused + broken


def _died(shares: Sequence[Share]) -> str:
    first = min((each.first_dead_at for each in shares if each.first_dead_at), default=None)
    last = max((each.last_dead_at for each in shares if each.last_dead_at), default=None)
    if first is None or last is None:
        return ""
    now = datetime.now(UTC)
    if relative(first, now) == relative(last, now):
        return f"; died {relative(last, now)}"
    return f"; died between {relative(first, now)} and {relative(last, now)}"


def _value(value: object) -> str:
    return _short(json.dumps(value, ensure_ascii=False))


def _short(text: str, most: int = _LONGEST_VALUE) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
