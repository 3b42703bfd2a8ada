"""What a story is made of, and the part of it that people made: replays, plans, edits, discards, holds, erasure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from bartleby.client import Runner
from bartleby.errors import BartlebyError, UndecodablePayload
from bartleby.evidence import Attempt, AuditLine, DeadLetter, ReplayId
from bartleby.message import LivingMessage, Queue, decode
from bartleby.replays import Replay, ReplayItem
from bartleby.surfaces.words import LONGEST_ERROR, clock, line

LONGEST_PAYLOAD = 200
_LONGEST_NAME = 80
_LOOKS = 3
_MOST_PLANS = 20

_DEEDS = {
    "letter.discard": ("⊘", "", "discarded"),
    "letter.restore": ("†", "", "restored: dead again"),
    "letter.hold": ("⚑", "", "put on hold"),
    "letter.release": ("⚐", "", "released from its hold"),
    "letter.erase": ("⌫", "", "payload, headers, key and error texts erased"),
}


@dataclass(frozen=True, slots=True)
class Story:
    """What is known of a message; `plans` are those that it is or was an item of.

    `elsewhere`: it lives on in a queue that is not theirs who ask.
    """

    message_id: int
    message: LivingMessage | None
    letter: DeadLetter | None
    attempts: Sequence[Attempt]
    queue: Queue | None
    items: Sequence[ReplayItem] = ()
    plans: Mapping[ReplayId, Replay] = field(default_factory=dict)
    deeds: Sequence[AuditLine] = ()
    elsewhere: bool = False

    @property
    def state(self) -> str:
        """Where it is: ready, leased, deferred, dead, discarded, done, elsewhere; or untraced: done or never sent."""
        if self.letter is not None and self.letter.status in {"dead", "discarded"}:
            return self.letter.status
        if self.message is not None:
            return self.message.state
        if self.elsewhere:
            return "elsewhere"
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


def gather(client: Runner, message_id: int) -> Story:
    """Return everything that is kept about a message; an error if there never was one with this id."""
    message, letter = None, None
    # It may move while we look: what is replayed is alive, so look again.
    for _ in range(_LOOKS):
        message, letter = client.find_message(message_id), client.dead_letter(message_id)
        if message is not None or letter is None or letter.status != "replayed":
            break
    attempts = client.attempts(message_id)
    queues = {queue.name: queue for queue in client.queues()}
    if message is None and letter is None and not attempts and message_id > (last := client.last_message_id()):
        raise BartlebyError(
            f"there is no message {message_id}, and there never was",
            hint=f"the newest message has the id {last}" if last else "no message was ever sent to this database",
        )
    known = message or letter or (attempts[-1] if attempts else None)
    queue = queues.get(known.queue) if known else None
    if letter is None:
        return Story(message_id, message, letter, attempts, queue)
    items = client.message_replays(message_id)[-_MOST_PLANS:]
    plans = {item.replay_id: plan for item in items if (plan := client.find_replay(item.replay_id))}
    deeds = client.message_deeds(message_id, letter.created_at)
    return Story(message_id, message, letter, attempts, queue, items, plans, deeds)


def cycles(story: Story) -> list[dict[str, Any]]:
    """Return the cycles of life that ended in death, the oldest first, with what opened the next."""
    letter = story.letter
    if letter is None:
        return []
    last = {
        "cycle": letter.cycle,
        "reason": letter.reason,
        "queue": letter.queue,
        "group_id": letter.group_id,
        "edited": letter.raw_edited if letter.replayed_at else None,
        "replay_id": letter.replay_id,
        "replayed_at": letter.replayed_at,
        "replayed_by": letter.replayed_by,
        "replay_reason": letter.replay_reason,
    }
    try:
        return [*letter.failure_history, last]
    except UndecodablePayload:
        return [last]


def episodes(story: Story) -> list[Entry]:
    """Return what people did with a message."""
    return [*_replays(story), *_plans(story), *_deeds(story)]


def origin(story: Story) -> tuple[str, ...]:
    """Return what a message is a copy of: what was rejected may be routed to another queue."""
    known = story.message or story.letter
    try:
        headers = decode(known.raw_headers) if known is not None and known.raw_headers else {}
    except UndecodablePayload:
        return ()
    number, queue = headers.get("original_message_id"), headers.get("original_queue")
    if not isinstance(number, int) or not isinstance(queue, str):
        return ()
    why = line(str(headers.get("rejection_message") or headers.get("rejection_reason") or ""), LONGEST_ERROR)
    return (f"a copy of message {number}, which died in queue {line(queue, _LONGEST_NAME)}{f': {why}' if why else ''}",)


def ahead(story: Story) -> list[tuple[ReplayItem, Replay]]:
    """Return the plans that a message waits in, with its item."""
    found = [(item, story.plans[item.replay_id]) for item in story.items if item.replay_id in story.plans]
    return [(item, plan) for item, plan in found if item.state == "waiting" and not plan.over]


def waiting(story: Story) -> list[str]:
    """Return what the plans that a message waits in are going to do with it."""
    found = []
    for item, plan in ahead(story):
        problem = f", but would skip it: {line(item.problem, LONGEST_ERROR)}" if item.problem else ""
        found.append(f"replay {plan.id} by {line(plan.actor, _LONGEST_NAME)} has it ({plan.status}){problem}")
    return found


def _replays(story: Story) -> Iterator[Entry]:
    told = cycles(story)
    for number, cycle in enumerate(told):
        at = cycle.get("replayed_at")
        if at is None:
            continue
        text = f"replay {cycle['replay_id']}" if cycle.get("replay_id") is not None else "replayed"
        if cycle.get("replayed_by") is not None:
            text = f"{text} by {cycle['replayed_by']}: {cycle['replay_reason']}"
        details = [f"cycle {cycle['cycle'] + 1}: attempts count from 1 again"]
        target = _next_queue(story, told[number + 1 :])
        if target is not None and target != cycle.get("queue"):
            details.append(
                f"in queue {line(target, _LONGEST_NAME)} instead of {line(cycle.get('queue'), _LONGEST_NAME)}"
            )
        if (edited := cycle.get("edited")) is not None:
            details.append(f"with another payload: {line(_json(edited), LONGEST_PAYLOAD)}")
        yield Entry(_moment(at), "↻", "cyan", line(text, LONGEST_ERROR), tuple(details))


def _next_queue(story: Story, later: list[dict[str, Any]]) -> str | None:
    if later:
        return later[0].get("queue")
    return story.message.queue if story.message is not None else None


def _plans(story: Story) -> Iterator[Entry]:
    for item in story.items:
        plan = story.plans.get(item.replay_id)
        name = f"replay {item.replay_id}"
        name = f"{name} by {line(plan.actor, _LONGEST_NAME)}" if plan else name
        if item.state == "skipped":
            yield Entry(item.settled_at, "↷", "", f"{name} skipped it: {line(item.problem, LONGEST_ERROR)}")
        elif item.state == "waiting" and plan is not None and plan.over:
            cause = (f"{line(plan.cause, LONGEST_ERROR)}",) if plan.cause else ()
            yield Entry(plan.finished_at or plan.created_at, "↷", "", f"{name} ended before its turn", cause)


def _deeds(story: Story) -> Iterator[Entry]:
    letter, told = story.letter, set()
    for deed in story.deeds:
        if deed.action in _DEEDS:
            told.add(deed.action)
            mark, style, words = _DEEDS[deed.action]
            reason = f": {line(deed.reason, LONGEST_ERROR)}" if deed.reason else ""
            yield Entry(deed.at, mark, style, f"{words}, by {line(deed.actor, _LONGEST_NAME)}{reason}")
    if letter is None:
        return
    # the audit may be older than what is looked at of it, and retention is not in it
    if letter.status == "discarded" and "letter.discard" not in told:
        yield Entry(letter.status_at, "⊘", "", _by("discarded", letter.discarded_by, letter.discard_reason))
    if letter.held_at is not None and "letter.hold" not in told:
        yield Entry(letter.held_at, "⚑", "", _by("put on hold", letter.held_by, letter.hold_reason))
    if letter.erased_at is not None and "letter.erase" not in told:
        yield Entry(letter.erased_at, "⌫", "", "payload erased: its retention was over")


def _by(words: str, actor: str | None, reason: str | None) -> str:
    return f"{words}, by {line(actor, _LONGEST_NAME)}: {line(reason, LONGEST_ERROR)}"


def _moment(at: object) -> datetime:
    return datetime.fromisoformat(at) if isinstance(at, str) else at  # type: ignore[return-value] # of our own making


def _json(value: object) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
