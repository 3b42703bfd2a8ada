"""The story of a message, in words. Pure: facts in, sentences out, and none of them can steer a terminal."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from bartleby.message import Attempt, DeadLetter, LivingMessage, Queue
from bartleby.surfaces.cli.connecting import printable
from bartleby.surfaces.cli.times import clock, length, relative, when

_MOST_ATTEMPTS = 20
_FIRST_ATTEMPTS = 5
_LONGEST_ERROR = 240
_LONGEST_PAYLOAD = 200
_LAST_LINES = 12
_AT_ONCE = timedelta(milliseconds=10)

_HAPPENED = {
    "failed": "failed",
    "rejected": "was rejected",
    "crashed": "took its worker along",
    "lost": "was lost with its worker",
}
_MEANING = {
    "exhausted": "it had no attempts left",
    "terminal": "trying again is pointless",
    "unacceptable": "its payload cannot be handled",
    "crashed": "it killed its workers",
    "expired": "its time to be retried was over",
}
_NEXT = {
    "ready": "a worker takes it in its turn: bartleby work MODULE:APP",
    "deferred": "nothing: it is tried again by itself, if a worker runs",
    "leased": "nothing: it runs; if its worker died, the lease lapses and the message comes back",
    "done": "nothing",
    "untraced": "nothing",
}
_MARKS = {
    "ready": ("○", "bold", "ready: it waits for a worker"),
    "deferred": ("◷", "bold", "deferred"),
    "leased": ("▶", "bold", "leased"),
    "dead": ("†", "bold red", "dead: it will not be tried again by itself"),
    "done": ("✓", "bold green", "done"),
    "untraced": ("·", "dim", "no trace"),
}
_STANDING = {
    "open": "nothing: single probes are sent by themselves, and when three in a row succeed everything goes on",
    "forced": "let the queue go on: bartleby queues breaker {queue} close --reason 'why it is safe'",
}


@dataclass(frozen=True, slots=True)
class Story:
    """What is known of a message."""

    message_id: int
    message: LivingMessage | None
    letter: DeadLetter | None
    attempts: list[Attempt]
    queue: Queue | None

    @property
    def state(self) -> str:
        """Where it is: ready, leased, deferred, dead, done; or untraced, which is done or never committed."""
        if self.letter is not None and self.letter.status == "dead":
            return "dead"
        if self.message is not None:
            return self.message.state
        return "done" if self.letter is not None or self.attempts else "untraced"


@dataclass(frozen=True, slots=True)
class Entry:
    """One point of the timeline."""

    at: datetime | None
    mark: str
    style: str
    text: str
    details: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def time(self) -> str:
        """The time of day, or `now`."""
        return "now" if self.at is None else clock(self.at)


def heading(story: Story, now: datetime) -> list[str]:
    """Return a title, and the facts that do not change."""
    name = f" of queue {story.queue.name}" if story.queue else ""
    known = story.message or story.letter
    lines = [f"Message {story.message_id}{name} is {_state(story)}"]
    if known is not None:
        key = f", key {_line(known.key, _LONGEST_PAYLOAD)}" if known.key is not None else ""
        generation = f", generation {known.generation}" if known.generation is not None else ""
        lines.append(f"sent {when(known.created_at)} ({relative(known.created_at, now)}){key}{generation}")
        lines.append(f"payload {_line(known.raw, _LONGEST_PAYLOAD)}")
    return lines


def entries(story: Story, now: datetime, *, everything: bool = False) -> list[Entry]:
    """Return the timeline, oldest first; of very many attempts some are left out unless `everything` is wanted."""
    known = story.message or story.letter
    attempts = story.attempts
    first, last = (len(attempts), 0) if everything or len(attempts) <= _MOST_ATTEMPTS else _ends(attempts)
    chosen = [*attempts[:first], *attempts[len(attempts) - last :]]
    told = list(_attempts(story, chosen, now, everything=everything))
    events = [*([Entry(known.created_at, "●", "", "sent")] if known else []), *told, *_replays(story)]
    if story.letter is not None and story.letter.resolved_at is not None:
        events.append(Entry(story.letter.resolved_at, "✓", "green", "done, its dead letter is resolved"))
    events.sort(key=lambda entry: entry.at or now)
    if left_out := len(attempts) - first - last:
        events.insert(
            events.index(told[first]), Entry(attempts[first].failed_at, "⋮", "dim", f"{left_out} more attempts (--all)")
        )
    return [*_dated(events), _now(story, now)]


def last_words(story: Story, *, everything: bool = False) -> list[str]:
    """Return the traceback of the newest attempt that has one, its end unless all is wanted; none of what is done."""
    if story.state not in {"dead", "deferred"} or everything:
        return []
    for attempt in reversed(story.attempts):
        if attempt.traceback:
            lines = printable(attempt.traceback.rstrip()).splitlines()
            if len(lines) > _LAST_LINES:
                lines = [f"… {len(lines) - _LAST_LINES} more lines (--all)", *lines[-_LAST_LINES:]]
            return [line if len(line) <= _LONGEST_ERROR else f"{line[:_LONGEST_ERROR]}…" for line in lines]
    return []


def advice(story: Story) -> list[str]:
    """Return what to do next: a sentence, and if it needs one a command."""
    queue = story.queue
    if story.state == "dead":
        return [
            f"`bartleby groups{f' {queue.name}' if queue else ''}` shows what died of the same; when that is mended:",
            f"psql    select bartleby.replay(array[{story.message_id}], 'who', 'why it works now');",
            f"Python  client.replay([{story.message_id}], actor='who', reason='why it works now')",
        ]
    if story.state in {"ready", "deferred"} and queue is not None and (queue.paused or queue.breaker in _STANDING):
        if queue.paused:
            return [f"let the queue go on: bartleby queues resume {queue.name}"]
        return [_STANDING[queue.breaker].format(queue=queue.name)]
    return [_NEXT[story.state]]


def breaker(queue: Queue, now: datetime) -> str:
    """Return a sentence about a breaker that is not closed, else nothing."""
    if queue.breaker in {"closed", "off"}:
        return "breaker off" if queue.breaker == "off" else ""
    since = f" since {when(queue.breaker_since)} ({relative(queue.breaker_since, now)})" if queue.breaker_since else ""
    probe = ""
    if queue.breaker == "open":
        probe = "; a probe is out"
        if queue.next_probe_at is not None:
            due = queue.next_probe_at <= now
            probe = "; the next probe is due" if due else f"; next probe {relative(queue.next_probe_at, now)}"
    cause = f": {_line(queue.breaker_cause, _LONGEST_ERROR)}" if queue.breaker_cause else ""
    return f"breaker {queue.breaker}{since}{cause}{probe}"


def error_line(error_type: str | None, error: str | None) -> str:
    """Return an error as one line that fits into a table."""
    return _line(": ".join(filter(None, (error_type, error))) or "no error was given", _LONGEST_ERROR)


def _state(story: Story) -> str:
    letter = story.letter
    if story.state == "untraced":
        return "not here: it is done and never failed, or its sender rolled back"
    if letter is None:
        return story.state
    if letter.status == "dead":
        return f"dead: {letter.reason}, {_MEANING.get(letter.reason, 'see below')}"
    return f"{story.state}, replayed after it was dead" if story.message is not None else "done, after it was dead"


def _ends(attempts: list[Attempt]) -> tuple[int, int]:
    return min(_FIRST_ATTEMPTS, len(attempts)), _MOST_ATTEMPTS - _FIRST_ATTEMPTS


def _attempts(story: Story, attempts: list[Attempt], now: datetime, *, everything: bool) -> Iterator[Entry]:
    reasons = {cycle["cycle"]: cycle["reason"] for cycle in _cycles(story)}
    previous = None
    for attempt in attempts:
        error = error_line(attempt.error_type, attempt.error)
        text = f"attempt {attempt.attempt} {_HAPPENED.get(attempt.outcome, attempt.outcome)}"
        text = f"{text}: {'the same error' if error == previous else error}"
        previous = error
        trace = printable(attempt.traceback.rstrip()).splitlines() if everything and attempt.traceback else []
        yield Entry(
            attempt.failed_at,
            "†" if attempt.verdict == "dead" else "✗",
            "red" if attempt.verdict == "dead" else "yellow",
            text,
            (_decision(attempt, reasons, now),),
            (_worker(attempt), *trace),
        )


def _decision(attempt: Attempt, reasons: dict[int, str], now: datetime) -> str:
    rule = f" — {_line(attempt.rule, _LONGEST_ERROR)}" if attempt.rule else ""
    if attempt.verdict == "dead":
        reason = reasons.get(attempt.cycle)
        return f"→ dead{f', {reason}' if reason else ''}{rule}"
    if attempt.retry_at is None or attempt.retry_at - attempt.failed_at < _AT_ONCE:
        return f"→ try again at once{rule}"
    same_day = attempt.retry_at.astimezone().date() == attempt.failed_at.astimezone().date()
    at = clock(attempt.retry_at) if same_day else when(attempt.retry_at)
    if attempt.retry_at > now:
        return f"→ try again at {at}, {relative(attempt.retry_at, now)}{rule}"
    return f"→ try again at {at}, after {length(attempt.retry_at - attempt.failed_at)}{rule}"


def _worker(attempt: Attempt) -> str:
    version = f", version {_line(attempt.worker_version, _LONGEST_PAYLOAD)}" if attempt.worker_version else ""
    return f"by {_line(attempt.worker, _LONGEST_PAYLOAD)}{version}"


def _cycles(story: Story) -> list[dict[str, Any]]:
    letter = story.letter
    if letter is None:
        return []
    present = {"cycle": letter.cycle, "reason": letter.reason, "replayed_at": letter.replayed_at}
    return [
        *letter.failure_history,
        {**present, "replayed_by": letter.replayed_by, "replay_reason": letter.replay_reason},
    ]


def _replays(story: Story) -> Iterator[Entry]:
    for cycle in _cycles(story):
        at = cycle.get("replayed_at")
        if at is not None:
            moment = datetime.fromisoformat(at) if isinstance(at, str) else at
            text = _line(f"replayed by {cycle['replayed_by']}: {cycle['replay_reason']}", _LONGEST_ERROR)
            yield Entry(moment, "↻", "cyan", text, (f"cycle {cycle['cycle'] + 1}: attempts count from 1 again",))


def _dated(events: list[Entry]) -> Iterator[Entry]:
    day = None
    for entry in events:
        if entry.at is not None and (date := entry.at.astimezone().date()) != day:
            if day is not None:
                yield Entry(entry.at, " ", "dim", f"— {date:%A, %Y-%m-%d}")
            day = date
        yield entry


def _now(story: Story, now: datetime) -> Entry:
    message, queue = story.message, story.queue
    details = []
    if story.state in {"ready", "deferred"} and queue is not None:
        details = ["the queue is paused"] if queue.paused else []
        if queue.breaker in {"open", "forced"}:
            details.append(breaker(queue, now))
    if message is not None and message.solo and story.state != "dead":
        details.append("it runs alone: a worker died while it had this message")
    mark, style, text = _MARKS[story.state]
    if story.state == "leased" and message is not None and message.leased_until is not None:
        text = f"leased by {_line(message.worker, _LONGEST_PAYLOAD)}"
        until = f"until {clock(message.leased_until)} ({relative(message.leased_until, now)}) unless extended"
        details.insert(0, until)
    if story.state == "deferred" and message is not None and message.run_at is not None:
        due = f"{when(message.run_at)} ({relative(message.run_at, now)})"
        text = f"deferred until {due}" if message.run_at > now else f"due since {due}: it waits for a worker"
    return Entry(None, mark, style, text, tuple(details))


def _line(text: str | None, limit: int) -> str:
    # the first line, however long the text: 100,000 characters are possible
    line = " ".join(printable((text or "")[: 4 * limit]).split())
    return line if len(line) <= limit else f"{line[:limit]}…"
