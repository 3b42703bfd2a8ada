"""From nouns to what tools answer: every text of a stranger goes through `Quoting` here."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from bartleby import evidence, message, replays
from bartleby.surfaces import cycles, story
from bartleby.surfaces.desk.agents import approved
from bartleby.surfaces.desk.groups import Portrait
from bartleby.surfaces.desk.replays import Preview
from bartleby.surfaces.mcp import shapes
from bartleby.surfaces.mcp.untrusted import LONGEST, SHORT, Quoting
from bartleby.surfaces.words import length

_MOST_MOMENTS = 60
_MOST_SHARED, _MOST_TRIED = 20, 10
_AS_THEY_ARE = (
    *("hash", "status", "predictions", "target", "canary", "tolerance", "rate", "window", "approved_until"),
    *("created_at", "started_at", "finished_at", "waiting", "done", "already_handled", "died_again", "gone", "skipped"),
)
_MANY, _LONG_AGO = 100, timedelta(days=7)


class Portraits:
    """Nouns as agents get them."""

    def __init__(self, quoting: Quoting) -> None:
        self._quoting = quoting

    def line(self, letter: evidence.DeadLetter) -> shapes.LetterLine:
        """Return a letter in short."""
        quote = self._quoting
        return shapes.LetterLine(
            message_id=letter.message_id,
            queue=letter.queue,
            status=letter.status,
            group_id=letter.group_id,
            reason=letter.reason,
            attempts=letter.attempts,
            cycle=letter.cycle,
            on_hold=letter.held_at is not None,
            dead_at=letter.dead_at,
            key=quote.words(letter.key, SHORT),
            error_type=quote.words(letter.error_type, SHORT),
            error=quote.words(letter.error, 2 * SHORT),
        )

    def letter(self, letter: evidence.DeadLetter) -> shapes.Letter:
        """Return a letter with its evidence."""
        quote = self._quoting
        line = self.line(letter).model_dump()
        return shapes.Letter(
            **{**line, "error": quote.words(letter.error, LONGEST), "key": quote.words(letter.key)},
            crashes=letter.crashes,
            generation=letter.generation,
            created_at=letter.created_at,
            first_failed_at=letter.first_failed_at,
            replayed_at=letter.replayed_at,
            resolved_at=letter.resolved_at,
            erased=letter.raw is None,
            replay_id=letter.replay_id,
            payload=quote.document(letter.raw),
            edited_payload=quote.document(letter.raw_edited),
            headers=quote.document(letter.raw_headers),
            traceback=quote.end(letter.traceback),
            worker=quote.words(letter.worker, SHORT),
            worker_version=quote.words(letter.worker_version, SHORT),
            replayed_by=quote.words(letter.replayed_by, SHORT),
            replay_reason=quote.words(letter.replay_reason),
            hold_reason=quote.words(letter.hold_reason),
            discard_reason=quote.words(letter.discard_reason),
        )

    def group(self, group: evidence.Group) -> shapes.GroupLine:
        """Return a group in short."""
        quote = self._quoting
        return shapes.GroupLine(
            group_id=group.id,
            queue=group.queue,
            state=group.state,
            dead=group.dead,
            replayed=group.replayed,
            resolved=group.resolved,
            discarded=group.discarded,
            deaths_last_hour=group.deaths_last_hour,
            first_dead_at=group.first_dead_at,
            last_dead_at=group.last_dead_at,
            error_type=quote.words(group.error_type, SHORT),
            title=quote.words(group.title, SHORT),
            error=quote.words(group.error, 2 * SHORT),
            owner=quote.words(group.owner, SHORT),
            note=quote.words(group.note),
        )

    def portrait(self, found: Portrait) -> shapes.Group:
        """Return a group with what helps to find its cause."""
        quote, group = self._quoting, found.group
        return shapes.Group(
            **self.group(group).model_dump(),
            deaths_by_hour=group.deaths_by_hour,
            filter=f"group:{group.id}",
            shared=[
                shapes.Shared(
                    path=quote.said(each.path, SHORT),
                    value=quote.document(each.raw, SHORT) or quote.said(""),
                    letters=each.letters,
                    of=each.of,
                )
                for each in found.shared[:_MOST_SHARED]
            ],
            versions=[
                shapes.Version(
                    version=quote.words(each.version, SHORT),
                    letters=each.letters,
                    first_dead_at=each.first_dead_at,
                    last_dead_at=each.last_dead_at,
                )
                for each in found.versions[:_MOST_SHARED]
            ],
            tried=[
                shapes.Tried(
                    replay_id=each.replay_id,
                    status=each.status,
                    at=each.at,
                    letters=each.items,
                    waiting=each.waiting,
                    done=each.done,
                    died_again=each.died_again,
                    skipped=each.skipped,
                    actor=quote.said(each.actor, SHORT),
                    reason=quote.said(each.reason),
                )
                for each in found.replays[:_MOST_TRIED]
            ],
        )

    def queue(self, queue: message.Queue) -> shapes.QueueLine:
        """Return a queue."""
        return shapes.QueueLine(
            name=queue.name,
            ready=queue.ready,
            leased=queue.leased,
            deferred=queue.deferred,
            dead=queue.dead,
            oldest_ready_at=queue.oldest_ready_at,
            next_due_at=queue.next_due_at,
            paused=queue.paused,
            paused_until=queue.paused_until,
            breaker=queue.breaker,
            breaker_since=queue.breaker_since,
            breaker_cause=self._quoting.words(queue.breaker_cause),
        )

    def story(self, told: cycles.Story) -> shapes.Story:
        """Return the story of a message; its sentences have words of strangers in them."""
        quote, now, told = self._quoting, datetime.now(UTC), self._cleaned(told)
        title, *facts = story.heading(told, now)
        entries = story.entries(told, now)
        left_out = max(0, len(entries) - _MOST_MOMENTS)
        words = story.last_words(told)
        return shapes.Story(
            message_id=told.message_id,
            state=told.state,
            queue=None if told.queue is None else told.queue.name,
            facts=[quote.said(each) for each in (title, *facts)],
            timeline=[
                shapes.Moment(at=each.at, told=quote.said("\n".join((each.text, *each.details, *each.notes))))
                for each in entries[left_out:]
            ],
            last_words=quote.end("\n".join(words)) if words else None,
            for_a_person=story.advice(told),
            note=f"the first {left_out:,} points of the timeline are left out" if left_out else None,
        )

    def _cleaned(self, told: cycles.Story) -> cycles.Story:
        # its sentences quote texts and documents, and would leave what is left of an escape sequence in them
        return replace(
            told,
            letter=told.letter and self._quoting.noun(told.letter),
            message=told.message and self._quoting.noun(told.message),
            queue=told.queue and self._quoting.noun(told.queue),
            attempts=[self._quoting.noun(each) for each in told.attempts],
            items=[self._quoting.noun(each) for each in told.items],
            plans={number: self._quoting.noun(each) for number, each in told.plans.items()},
            deeds=[self._quoting.noun(each) for each in told.deeds],
        )


class PlanPortraits(Portraits):
    """Plans as agents get them."""

    def plan(self, preview: Preview, *, yours: bool, advice: str) -> shapes.Plan:
        """Return a plan and how far it has come."""
        return shapes.Plan(**self._plan(preview, yours=yours, advice=advice))

    def proposal(self, preview: Preview, sample: Sequence[evidence.DeadLetter], *, advice: str) -> shapes.Proposal:
        """Return a plan that was just proposed."""
        return shapes.Proposal(
            **self._plan(preview, yours=True, advice=advice),
            shares=[
                shapes.Share(
                    queue=each.queue,
                    prediction=each.prediction,
                    letters=each.items,
                    first_dead_at=each.first_dead_at,
                    last_dead_at=each.last_dead_at,
                )
                for each in preview.shares
            ],
            sample=[self.line(each) for each in sample],
            risk=risk(preview),
        )

    def _plan(self, preview: Preview, *, yours: bool, advice: str) -> dict[str, Any]:
        quote, plan = self._quoting, preview.plan
        return {
            **{name: getattr(plan, name) for name in _AS_THEY_ARE},
            "replay_id": plan.id,
            "yours": yours,
            "letters": plan.items,
            "will_run": to_replay(plan),
            "edits_payloads": plan.raw_patch is not None,
            "approved": approved(plan),
            "approved_by": quote.words(plan.approved_by, SHORT),
            "alive": plan.replayed,
            "actor": quote.said(plan.actor, SHORT),
            "reason": quote.said(plan.reason),
            "filter": quote.words(plan.filter),
            "cause": quote.words(plan.cause),
            "obstacles": [self._obstacle(each) for each in preview.obstacles],
            "relapses": [
                shapes.Relapse(
                    group_id=each.group_id,
                    letters=each.items,
                    error_type=quote.words(each.error_type, SHORT),
                    error=quote.words(each.error, 2 * SHORT),
                )
                for each in preview.relapses
            ],
            "next": advice,
        }

    def _obstacle(self, obstacle: replays.Obstacle) -> shapes.Obstacle:
        kind, _, told = obstacle.problem.partition(": ")
        return shapes.Obstacle(kind=kind, letters=obstacle.items, told=self._quoting.said(told, 2 * SHORT))


def to_replay(plan: replays.Replay) -> int:
    """Return how many letters a plan would replay."""
    return plan.will_run + plan.predictions.get("already_handled", 0)


def risk(preview: Preview) -> shapes.Risk:
    """Return what can go wrong with a plan. Only counts and times of ours are in it."""
    plan, count = preview.plan, to_replay(preview.plan)
    dead = [each.first_dead_at for each in preview.shares if each.first_dead_at is not None]
    age = datetime.now(UTC) - min(dead) if dead else timedelta()
    queues = {each.queue for each in preview.shares if each.prediction in replays.WILL_RUN}
    worries = [
        (plan.predictions.get("again", 0), "{:,} died again after an earlier replay: is the cause mended?"),
        (
            plan.predictions.get("already_handled", 0),
            "{:,} are marked as handled: handlers without `once` repeat them",
        ),
        (count if count > _MANY else 0, "{:,} letters are many at once"),
        (len(queues) if len(queues) > 1 else 0, "they run in {:,} queues"),
    ]
    why = [text.format(number) for number, text in worries if number]
    if age > _LONG_AGO:
        why.append(f"the oldest died {length(age)} ago: what it asks for may not be wanted any more")
    level: Literal["low", "medium", "high"] = (
        "low" if not why else "medium" if len(why) == 1 and count <= _MANY else "high"
    )
    effects = f"handlers run again for {count:,} letters, with all their effects: mails, payments, calls of others"
    return shapes.Risk(level=level, why=[effects, *why])
