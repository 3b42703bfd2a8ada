"""The story of a message, in words. Pure: facts in, sentences out, and none of them can steer a terminal."""

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from bartleby.evidence import Attempt, DeadLetter
from bartleby.surfaces.cycles import LONGEST_PAYLOAD, Entry, Story, ahead, cycles, episodes, origin, waiting
from bartleby.surfaces.words import (
    LONGEST_ERROR,
    breaker,
    clock,
    error_line,
    here,
    length,
    line,
    pause,
    printable,
    relative,
    traceback_end,
    when,
)

_MOST_ATTEMPTS = 20
_FIRST_ATTEMPTS = 5
_LAST_LINES = 12
_AT_ONCE = timedelta(milliseconds=10)

_HAPPENED = {
    "failed": "failed",
    "rejected": "was rejected",
    "crashed": "took its worker along",
    "lost": "was lost with its worker",
    "released": "failed for trouble of the server",
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
    "elsewhere": "nothing",
    "untraced": "nothing",
}
_MARKS = {
    "ready": ("○", "bold", "ready: it waits for a worker"),
    "deferred": ("◷", "bold", "deferred"),
    "leased": ("▶", "bold", "leased"),
    "dead": ("†", "bold red", "dead: it will not be tried again by itself"),
    "discarded": ("⊘", "bold", "discarded: its evidence is kept until its retention is over"),
    "done": ("✓", "bold green", "done"),
    "elsewhere": ("↷", "dim", "it goes on in a queue that is not yours"),
    "untraced": ("·", "dim", "no trace"),
}
_STANDING = {
    "open": "nothing: single probes are sent by themselves, and when three in a row succeed everything goes on",
    "forced": "let the queue go on: bartleby queues breaker {queue} close --reason 'why it is safe'",
}


def heading(story: Story, now: datetime) -> list[str]:
    """Return a title, and the facts that do not change."""
    name = f" of queue {story.queue.name}" if story.queue else ""
    known = story.message or story.letter
    lines = [f"Message {story.message_id}{name} is {_state(story)}"]
    if known is not None:
        key = f", key {line(known.key, LONGEST_PAYLOAD)}" if known.key is not None else ""
        generation = f", generation {known.generation}" if known.generation is not None else ""
        lines.append(f"sent {when(known.created_at)} ({relative(known.created_at, now)}){key}{generation}")
        lines.append(f"payload {'was erased' if known.raw is None else line(known.raw, LONGEST_PAYLOAD)}")
    if story.letter is not None and story.letter.raw_edited is not None and story.message is None:
        lines.append(f"edited to {line(story.letter.raw_edited, LONGEST_PAYLOAD)}")
    return lines


def entries(story: Story, now: datetime, *, everything: bool = False, dated: bool = True) -> list[Entry]:
    """Return the timeline, oldest first; of very many attempts some are left out unless `everything` is wanted.

    Where a new day of this machine begins a line says so, unless whoever asks has other days (`dated=False`).
    """
    known = story.message or story.letter
    attempts = story.attempts
    first, last = (len(attempts), 0) if everything or len(attempts) <= _MOST_ATTEMPTS else _ends(attempts)
    chosen = [*attempts[:first], *attempts[len(attempts) - last :]]
    told = list(_attempts(story, chosen, now, everything=everything))
    sent = [Entry(known.created_at, "●", "", "sent", origin(story))] if known else []
    events = [*sent, *told, *episodes(story), *_resolved(story)]
    events.sort(key=lambda entry: entry.at or now)
    if left_out := len(attempts) - first - last:
        events.insert(
            events.index(told[first]), Entry(attempts[first].failed_at, "⋮", "dim", f"{left_out} more attempts (--all)")
        )
    return [*(_dated(events) if dated else events), _now(story, now)]


def last_words(story: Story, *, everything: bool = False) -> list[str]:
    """Return the traceback of the newest attempt that has one, its end unless all is wanted; none of what is done."""
    if story.state not in {"dead", "deferred"} or everything:
        return []
    for attempt in reversed(story.attempts):
        if attempt.traceback:
            return traceback_end(attempt.traceback, _LAST_LINES)
    return []


def advice(story: Story) -> list[str]:
    """Return what to do next: a sentence, and if it needs one a command."""
    queue = story.queue
    if story.letter is not None and story.state in {"dead", "discarded"}:
        plans = [plan for item, plan in ahead(story) if item.problem is None and plan.status != "draft"]
        if plans and story.letter.held_at is None:
            verb = "resume" if plans[0].status == "paused" else "watch"
            return [f"it is about to be replayed: bartleby replay {verb} {plans[0].id}"]
        return _advice_for(story.letter)
    if story.state in {"ready", "deferred"} and queue is not None and (queue.paused or queue.breaker in _STANDING):
        if queue.paused:
            return [f"let the queue go on: bartleby queues resume {queue.name}"]
        return [_STANDING[queue.breaker].format(queue=queue.name)]
    return [_NEXT[story.state]]


def _advice_for(letter: DeadLetter) -> list[str]:
    number = letter.message_id
    if letter.held_at is not None:
        return ["it is on hold, and neither replayed nor discarded; to release it:",
                f"bartleby hold {number} --off --reason 'why it may go'"]  # fmt: skip
    if letter.status == "discarded":
        return ["to make it a dead letter again:", f"bartleby restore {number} --reason 'why it is needed'"]
    if letter.raw is None:
        return ["without its payload it cannot be replayed; when it is not needed any more:",
                f"bartleby discard {number} --reason 'why it is not needed'"]  # fmt: skip
    return [
        f"`bartleby groups show {letter.group_id}` shows what died of the same; when that is mended:",
        f"bartleby replay {number} --reason 'why it works now'",
        f"psql: select bartleby.replay(array[{number}], 'who', 'why it works now');",
    ]


def _state(story: Story) -> str:
    letter = story.letter
    if story.state == "untraced":
        return "not here: it is done and never failed, or its sender rolled back"
    if letter is None:
        return story.state
    if letter.status == "dead":
        held = ", and on hold" if letter.held_at is not None else ""
        return f"dead: {letter.reason}, {_MEANING.get(letter.reason, 'see below')}{held}"
    if letter.status == "discarded":
        return f"discarded, after it was dead: {letter.reason}"
    if story.elsewhere:
        return "replayed after it was dead, into a queue that is not yours"
    return f"{story.state}, replayed after it was dead" if story.message is not None else "done, after it was dead"


def _ends(attempts: Sequence[Attempt]) -> tuple[int, int]:
    return min(_FIRST_ATTEMPTS, len(attempts)), _MOST_ATTEMPTS - _FIRST_ATTEMPTS


def _attempts(story: Story, attempts: Sequence[Attempt], now: datetime, *, everything: bool) -> Iterator[Entry]:
    reasons = {cycle["cycle"]: cycle["reason"] for cycle in cycles(story)}
    previous = None
    for attempt in attempts:
        error = error_line(attempt.error_type, attempt.error)
        error_again = "the same error" if error == previous else error
        text = f"attempt {attempt.attempt} {_HAPPENED.get(attempt.outcome, attempt.outcome)}: {error_again}"
        if attempt.outcome == "expired":
            text = f"given up: {error_again}"
        previous = error
        trace = printable(attempt.traceback.rstrip()).splitlines() if everything and attempt.traceback else []
        yield Entry(
            attempt.failed_at,
            "†" if attempt.verdict == "dead" else "✗",
            "red" if attempt.verdict == "dead" else "yellow",
            text,
            (_decision(attempt, reasons, now),),
            (*trace,) if attempt.outcome == "expired" else (_worker(attempt), *trace),
        )


def _decision(attempt: Attempt, reasons: dict[int, str], now: datetime) -> str:
    rule = f" — {line(attempt.rule, LONGEST_ERROR)}" if attempt.rule else ""
    if attempt.verdict == "dead":
        reason = reasons.get(attempt.cycle)
        return f"→ dead{f', {reason}' if reason else ''}{rule}"
    if attempt.retry_at is None or attempt.retry_at - attempt.failed_at < _AT_ONCE:
        return f"→ try again at once{rule}"
    same_day = here(attempt.retry_at).date() == here(attempt.failed_at).date()
    at = clock(attempt.retry_at) if same_day else when(attempt.retry_at)
    if attempt.retry_at > now:
        return f"→ try again at {at}, {relative(attempt.retry_at, now)}{rule}"
    return f"→ try again at {at}, after {length(attempt.retry_at - attempt.failed_at)}{rule}"


def _worker(attempt: Attempt) -> str:
    version = f", version {line(attempt.worker_version, LONGEST_PAYLOAD)}" if attempt.worker_version else ""
    return f"by {line(attempt.worker, LONGEST_PAYLOAD)}{version}"


def _resolved(story: Story) -> Iterator[Entry]:
    if story.letter is not None and story.letter.resolved_at is not None:
        handled = any(item.state == "already_handled" and item.cycle == story.letter.cycle for item in story.items)
        details = ("it was handled before, so it did not run again",) if handled else ()
        yield Entry(story.letter.resolved_at, "✓", "green", "done, its dead letter is resolved", details)


def _dated(events: list[Entry]) -> Iterator[Entry]:
    day = None
    for entry in events:
        if entry.at is not None and (date := here(entry.at).date()) != day:
            if day is not None:
                yield Entry(entry.at, " ", "dim", f"— {date:%A, %Y-%m-%d}")
            day = date
        yield entry


def _now(story: Story, now: datetime) -> Entry:
    message, queue = story.message, story.queue
    details = []
    if story.state in {"ready", "deferred"} and queue is not None:
        details = [f"the queue is {pause(queue, now)}"] if queue.paused else []
        if queue.breaker in {"open", "forced"}:
            details.append(breaker(queue, now))
    details += waiting(story)
    if message is not None and message.solo and story.state != "dead":
        details.append("it runs alone: a worker died while it had this message")
    mark, style, text = _MARKS[story.state]
    if story.state == "leased" and message is not None and message.leased_until is not None:
        text = f"leased by {line(message.worker, LONGEST_PAYLOAD)}"
        until = f"until {clock(message.leased_until)} ({relative(message.leased_until, now)}) unless extended"
        details.insert(0, until)
    if story.state == "deferred" and message is not None and message.run_at is not None:
        due = f"{when(message.run_at)} ({relative(message.run_at, now)})"
        text = f"deferred until {due}" if message.run_at > now else f"due since {due}: it waits for a worker"
    return Entry(None, mark, style, text, tuple(details))
