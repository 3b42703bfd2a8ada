"""Now: one sentence about the state of things, the numbers that matter at 3 am, and what changed in the last hour."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import zip_longest

from fastapi import Request
from fastapi.responses import HTMLResponse

from bartleby.attendance import WorkerReport
from bartleby.errors import Forbidden
from bartleby.events import Sink
from bartleby.evidence import AuditLine, Group
from bartleby.message import Queue
from bartleby.surfaces.desk import Desk
from bartleby.surfaces.web.context import AtDesk
from bartleby.surfaces.web.pages.naming import headline, trend
from bartleby.surfaces.web.pages.rendering import page, router
from bartleby.surfaces.web.pages.showing import ago, sentence
from bartleby.surfaces.words import length

_HOUR = timedelta(hours=1)
_STUCK = timedelta(minutes=5)
_MOST_GROUPS = 200
_SHOWN = 8
_TOLD = 4
SINKS = "sink."
"""How queues of events begin: a relay sees to those, and no worker."""
_NOTES = frozenset({"session.open", "session.close", "agent.call"})

now_pages = router()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The state of things in one sentence, how bad that is, and where to go on."""

    tone: str
    text: str
    then: str
    path: str | None = None


@now_pages.get("/")
def now(request: Request, desk: AtDesk) -> HTMLResponse:
    """Show how things are now."""
    moment = datetime.now(UTC)
    queues, groups = desk.queues.every(), desk.groups.lively(limit=_MOST_GROUPS)
    work = [each for each in queues if not each.name.startswith(SINKS)]
    plans = desk.replays.every(statuses=["running", "paused", "settling", "draft"], limit=20)
    oldest = next(iter(desk.letters.page(limit=1, sort="oldest")), None)
    sinks, workers, deeds = _office(desk)
    hours = [sum(each) for each in zip_longest(*(group.deaths_by_hour for group in groups), fillvalue=0)]
    changed = [group for group in groups if group.last_dead_at and moment - group.last_dead_at < _HOUR]
    return page(
        request,
        "now.html",
        verdict=verdict(Sight(queues, groups, sinks, workers), moment),
        work=work,
        dead=sum(each.dead for each in queues),
        hours=hours or [0] * 24,
        last_hour=sum(each.deaths_last_hour for each in groups),
        oldest=oldest,
        stopped=[each for each in work if _stopped(each)],
        sinks=sinks,
        workers=workers,
        plans=plans,
        groups=sorted(changed, key=lambda each: -each.deaths_last_hour)[:_SHOWN],
        fresh={each.id for each in groups if each.first_dead_at and moment - each.first_dead_at < _HOUR},
        stops=_stopped,
        deeds=deeds,
        capped=len(groups) >= _MOST_GROUPS,
    )


@dataclass(frozen=True, slots=True)
class Sight:
    """What a verdict is made of; None is what somebody may not see."""

    queues: Sequence[Queue]
    groups: Sequence[Group]
    sinks: Sequence[Sink] | None = None
    workers: Sequence[WorkerReport] | None = None


def verdict(sight: Sight, now: datetime) -> Verdict:
    """Return one sentence about how things are; the worst comes first."""
    work = [each for each in sight.queues if not each.name.startswith(SINKS)]
    parts = [*_of_groups(sight.groups, now), *_of_queues(work, now), *_of_workers(work, sight), *_of_sinks(sight, now)]
    parts.sort(key=lambda each: each.tone != "bad")
    dead = sum(each.dead for each in sight.queues)
    if not parts and not dead:
        return Verdict("good", "All is calm: no dead letters.", "Nothing waits for you.")
    if not parts:
        letters = "1 dead letter waits" if dead == 1 else f"{dead:,} dead letters wait"
        return Verdict("note", f"{letters} for somebody{_since(sight.groups, now)}.", "See the groups.", "/groups")
    told = [each.text for each in parts[:_TOLD]]
    if len(parts) > _TOLD:
        told.append(f"and {len(parts) - _TOLD} more")
    return Verdict(parts[0].tone, f"{sentence('; '.join(told))}.", parts[0].then, parts[0].path)


def _since(groups: Sequence[Group], now: datetime) -> str:
    last = max((each.last_dead_at for each in groups if each.last_dead_at and each.dead), default=None)
    if last is None:
        return ""
    if now - last < _STUCK:
        return f"; the last died {ago(last, now).replace('now', 'just now')}"
    return ", and none are being added"


def _of_groups(groups: Sequence[Group], now: datetime) -> Iterator[Verdict]:
    growing = [each for each in groups if each.state != "muted" and trend(each, now) == "growing"]
    if growing:
        first = max(growing, key=lambda each: each.deaths_last_hour)
        text = "1 group is growing" if len(growing) == 1 else f"{len(growing)} groups are growing"
        yield Verdict("bad", text, f"Look first at “{headline(first)[:80]}” in {first.queue}.", f"/groups/{first.id}")
    back = [each for each in groups if each.state == "regressed"]
    if back:
        text = "1 bug that was resolved is back" if len(back) == 1 else f"{len(back)} bugs that were resolved are back"
        yield Verdict("bad", text, f"Look at group {back[0].id} in {back[0].queue}.", f"/groups/{back[0].id}")


def _of_queues(queues: Sequence[Queue], now: datetime) -> Iterator[Verdict]:
    for queue in queues:
        if queue.breaker in {"open", "forced", "half_open"}:
            since = f" since {queue.breaker_since.astimezone(UTC):%H:%M} UTC" if queue.breaker_since else ""
            yield Verdict(
                "bad", f"queue {queue.name} is stopped by its breaker{since}", "See why.", f"/queues/{queue.name}"
            )
        elif queue.paused:
            yield Verdict("warning", f"queue {queue.name} is paused", "Resume it.", f"/queues/{queue.name}")
        elif queue.oldest_ready_at and now - queue.oldest_ready_at > _STUCK:
            late = length(now - queue.oldest_ready_at)
            yield Verdict(
                "warning", f"queue {queue.name} is {late} behind", "Is a worker running?", f"/queues/{queue.name}"
            )


def _of_workers(queues: Sequence[Queue], sight: Sight) -> Iterator[Verdict]:
    ready = sum(each.ready for each in queues if not _stopped(each))
    if sight.workers is not None and ready and not any(each.state == "working" for each in sight.workers):
        wait = "1 message waits" if ready == 1 else f"{ready:,} messages wait"
        yield Verdict("bad", f"no worker is heard of, and {wait}", "See the workers.", "/workers")


def _of_sinks(sight: Sight, now: datetime) -> Iterator[Verdict]:
    for sink in sight.sinks or ():
        if sink.state == "degraded":
            yield Verdict("warning", f"sink {sink.name} takes nothing", "Events wait for it.", "/sinks")
        elif sink.state == "working" and sink.oldest_waiting_at and now - sink.oldest_waiting_at > _STUCK:
            late = length(now - sink.oldest_waiting_at)
            yield Verdict("warning", f"sink {sink.name} is {late} behind", "Is a relay running?", "/sinks")


def _stopped(queue: Queue) -> bool:
    return queue.paused or queue.breaker in {"open", "forced", "half_open"}


def _office(desk: Desk) -> tuple[list[Sink] | None, list[WorkerReport] | None, list[AuditLine] | None]:
    try:
        sinks, workers = desk.office.sinks(), desk.office.workers()
        return sinks, workers, [each for each in desk.office.audit(limit=30) if each.action not in _NOTES][:_SHOWN]
    except Forbidden:
        return None, None, None
