"""What an operator does in more than one call. Surfaces go through here, so that they cannot drift apart.

    operator = Operator(client, "ana")
    chosen = operator.choose("queue:billing age:>1d")   # frozen: what dies later does not join
    operator.discard(chosen, reason="test data")        # in chunks; what cannot be discarded is told, one by one

A bulk deed that is stopped, or that dies, has done whole chunks: doing it again does the rest, and tells of each letter
that was done before.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from bartleby.calls import Call
from bartleby.client import Runner
from bartleby.errors import InvalidArgument, InvalidPayload, UndecodablePayload, UnknownReplay
from bartleby.evidence import DeadLetter, Deed
from bartleby.failure import Recorder
from bartleby.handlers import Handler
from bartleby.message import MessageId
from bartleby.pacing import Stride, pause
from bartleby.replays import WILL_RUN, Advance, Change, Replay, ReplayItem
from bartleby.triage import discard, hold, restore

_MOST = 1_000_000
_CHUNK = 1000
_PAGE = 500
_KEPT = 1000
_LOOK = 0.2
_PROBLEM_LIMIT = 500


@dataclass(frozen=True, slots=True)
class Bulk:
    """What a bulk deed came to: `refusals` is how many letters were refused, `refused` the first of them and why."""

    asked: int
    changed: int
    refusals: int
    refused: tuple[Deed, ...]

    @property
    def stopped(self) -> bool:
        """Whether it was stopped before all were done."""
        return self.changed + self.refusals < self.asked


@dataclass(frozen=True, slots=True)
class Checked:
    """What handlers say about the payloads of a draft: the problem of each that was excluded.

    `unchecked` items have no handler here, or one that takes whatever payload comes.
    """

    checked: int
    unchecked: int
    problems: dict[MessageId, str]


def require_meant(filter: str, *, everything: bool) -> None:
    """Raise InvalidArgument for an empty filter, unless every letter is meant."""
    if not filter.strip() and not everything:
        raise InvalidArgument("an empty filter would mean every dead letter", hint="narrow it down, or say all")


class Operator:
    """Somebody who looks after dead letters; everything is done, and audited, in their name."""

    def __init__(self, client: Runner, actor: str, *, request_id: str | None = None) -> None:
        self.client = client
        self.actor = actor
        self.request_id = request_id

    def choose(self, filter: str, *, everything: bool = False, most: int = _MOST) -> list[MessageId]:
        """Return the ids of the letters that a filter finds now; an empty filter has to be meant."""
        require_meant(filter, everything=everything)
        found = self.client.letter_ids(filter, most=most + 1)
        if len(found) > most:
            raise InvalidArgument(
                f"the filter finds more than {most:,} letters, which is too many at once", hint="narrow the filter"
            )
        return found

    def letters(self, filter: str = "", *, sort: str = "newest") -> Iterator[DeadLetter]:
        """Return every letter that a filter finds, page by page: it may be millions."""
        after = None
        while True:
            page = self.client.dead_letters(filter, limit=_PAGE, after=after, sort=sort)
            yield from page
            if page.complete:
                return
            after = page.next

    def discard(
        self,
        ids: Sequence[int],
        *,
        reason: str,
        on_progress: Callable[[int, int], object] | None = None,
        stop: threading.Event | None = None,
    ) -> Bulk:
        """Give up on dead letters. `on_progress` is told how many of how many; `stop` ends it between two chunks."""
        call = partial(discard, actor=self.actor, reason=reason, request_id=self.request_id)
        return self._bulk(ids, call, on_progress, stop)

    def restore(
        self,
        ids: Sequence[int],
        *,
        reason: str,
        on_progress: Callable[[int, int], object] | None = None,
        stop: threading.Event | None = None,
    ) -> Bulk:
        """Make discarded letters dead again."""
        call = partial(restore, actor=self.actor, reason=reason, request_id=self.request_id)
        return self._bulk(ids, call, on_progress, stop)

    def hold(
        self,
        ids: Sequence[int],
        *,
        reason: str,
        on: bool = True,
        on_progress: Callable[[int, int], object] | None = None,
        stop: threading.Event | None = None,
    ) -> Bulk:
        """Keep letters from retention, discard and replay, or with `on=False` not any more."""
        call = partial(hold, actor=self.actor, reason=reason, on=on, request_id=self.request_id)
        return self._bulk(ids, call, on_progress, stop)

    def _bulk(
        self,
        ids: Sequence[int],
        call: Callable[[Sequence[int]], Call[list[Deed]]],
        on_progress: Callable[[int, int], object] | None,
        stop: threading.Event | None,
    ) -> Bulk:
        ids = list(dict.fromkeys(ids))
        changed, refusals = 0, 0
        refused: list[Deed] = []
        for start in range(0, len(ids), _CHUNK):
            if stop is not None and stop.is_set():
                break
            deeds = self.client.run(call(ids[start : start + _CHUNK]))
            against = [deed for deed in deeds if deed.refused]
            changed, refusals = changed + len(deeds) - len(against), refusals + len(against)
            refused += against[: _KEPT - len(refused)]
            if on_progress is not None:
                on_progress(start + len(deeds), len(ids))
        return Bulk(len(ids), changed, refusals, tuple(refused))

    def drive(
        self,
        replay_id: int,
        *,
        on_progress: Callable[[Replay], object] | None = None,
        on_step: Callable[[Advance], object] | None = None,
        stop: threading.Event | None = None,
        outcomes: bool = True,
    ) -> Replay:
        """Run a plan that was started, beside whoever else does, until it is over or paused; return what it came to.

        With `outcomes=False` until every item was replayed. `on_step` is told what each step here moved and what it
        waits for. `stop` ends the driving, not the plan: any worker goes on with it.
        """
        stop, stride = stop or threading.Event(), Stride()
        driven = {"running", "settling"} if outcomes else {"running"}
        plan = self.plan(replay_id)
        looked = time.monotonic()
        while plan.status in driven and not stop.is_set():
            items, began = stride.items, time.monotonic()
            step = next(iter(self.client.advance_replays(items, replay_id=replay_id)), None)
            stride.took(time.monotonic() - began)
            if step is not None and on_step is not None:
                on_step(step)
            if step is None or step.status != plan.status or time.monotonic() - looked > _LOOK:
                plan, looked = self.plan(replay_id), time.monotonic()
                if on_progress is not None:
                    on_progress(plan)
            if plan.status in driven:
                stop.wait(_LOOK if step is None else pause([step], items))
        plan = self.plan(replay_id)
        if on_progress is not None:
            on_progress(plan)
        return plan

    def plan(self, replay_id: int) -> Replay:
        """Return a plan, or say that there is none."""
        found = self.client.find_replay(replay_id)
        if found is None:
            raise UnknownReplay(f"there is no replay {replay_id}")
        return found

    def items(
        self, replay_id: int, *, states: Sequence[str] | None = None, predictions: Sequence[str] | None = None
    ) -> Iterator[list[ReplayItem]]:
        """Return the items of a plan, page by page."""
        after = 0
        while page := self.client.replay_items(
            replay_id, states=states, predictions=predictions, after=after, limit=_CHUNK
        ):
            yield page
            after = page[-1].message_id

    def check_patched(
        self,
        replay_id: int,
        handlers: Mapping[str, Handler],
        *,
        recorder: Recorder | None = None,
        on_progress: Callable[[int, int], object] | None = None,
    ) -> Checked:
        """Try the payloads of a draft, as patched, on what the handlers (`app.handlers`) take; exclude the misfits.

        `recorder` (`app.recorder()`) takes the application's secrets out of what is written about them.
        """
        plan, recorder = self.plan(replay_id), recorder or Recorder()
        seen, checked = 0, 0
        problems: dict[MessageId, str] = {}
        for page in self.items(replay_id, predictions=sorted(WILL_RUN)):
            wanted = {each.message_id: handlers.get(each.queue or "") for each in page}
            takers = {each: taker for each, taker in wanted.items() if taker is not None and taker.convert is not None}
            for change in self.client.replay_changes(replay_id, list(takers)):
                problem = _misfit(change, takers[change.message_id], recorder)
                if problem is not None:
                    problems[change.message_id] = problem
            seen, checked = seen + len(page), checked + len(takers)
            if on_progress is not None:
                on_progress(seen, plan.will_run)
        if problems:  # in one call, for each counts and hashes the whole plan
            self.client.exclude_items(
                replay_id,
                dict(problems.items()),
                actor=self.actor,
                reason="the payload is not what its handler takes",
                request_id=self.request_id,
            )
        return Checked(checked, seen - checked, problems)


def _misfit(change: Change, handler: Handler, recorder: Recorder) -> str | None:
    if handler.convert is None or change.raw_after is None:
        return None
    try:
        handler.convert(change.after)
    except Exception as error:  # noqa: BLE001 - a type of the user's may raise anything, as it would in the worker
        evidence = recorder.evidence(handler.queue, error)
        ours = isinstance(error, InvalidPayload | UndecodablePayload)
        return (evidence.error if ours else f"{evidence.error_type}: {evidence.error}")[:_PROBLEM_LIMIT]
    return None
