"""Replays at the desk: plans are proposed, looked at, let run by who may, and steered."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bartleby.client import Runner
from bartleby.errors import InvalidArgument, InvalidPatch, UnknownQueue, UnknownReplay
from bartleby.evidence import Page
from bartleby.operations import require_meant
from bartleby.plans import Patch, plan_replay
from bartleby.principal import Permission, Role
from bartleby.replays import Change, Obstacle, Relapse, Replay, ReplayItem, Share
from bartleby.surfaces.desk import agents, hiding
from bartleby.surfaces.desk.exact import MARK, document, exactly
from bartleby.surfaces.desk.seat import Seat

_SAMPLE = 5
_PART = 500
_MOST_AGAIN = 10_000
_MOST_LOOKED_INTO = 50


@dataclass(frozen=True, slots=True)
class Preview:
    """A plan with what is known of it before and while it runs."""

    plan: Replay
    shares: Sequence[Share]
    obstacles: Sequence[Obstacle]
    relapses: Sequence[Relapse]
    changes: Sequence[Change]


class Replays:
    """Plans, as one principal finds them."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def every(self, *, statuses: Sequence[str] | None = None, limit: int = 50) -> list[Replay]:
        """Return the plans, the newest first."""
        return list(self.page(statuses=statuses, limit=limit))

    def page(
        self, *, statuses: Sequence[str] | None = None, limit: int = 50, before_id: int | None = None
    ) -> Page[Replay]:
        """Return a page of the plans, the newest first; one that has few of theirs need not be the last."""
        if self._seat.principal.queues is not None:
            limit = min(limit, _MOST_LOOKED_INTO)
        found = self._seat.looking().replays(limit=limit, statuses=statuses, before_id=before_id)
        seen = tuple(self._shown(each) for each in found if self._seat.sees_plan(each))
        return Page(seen, str(found[-1].id) if len(found) == limit else None)

    def one(self, replay_id: int) -> Replay:
        """Return a plan and how far it has come."""
        return self._shown(self._whole(replay_id))

    def _whole(self, replay_id: int) -> Replay:
        plan = self._seat.looking().find_replay(replay_id)
        if plan is None or not self._seat.sees_plan(plan):
            raise UnknownReplay(f"there is no replay {replay_id}")
        return plan

    def preview(self, replay_id: int) -> Preview:
        """Return a plan, how its items are spread, what stands in their way, and what its patch changes."""
        plan, reader, hide = self.one(replay_id), self._seat.looking(), self._seat.redaction
        sample = reader.replay_items(replay_id, limit=_SAMPLE) if plan.raw_patch else []
        obstacles, relapses = reader.replay_obstacles(replay_id), reader.replay_relapses(replay_id)
        return Preview(
            plan,
            reader.replay_shares(replay_id),
            [replace(each, problem=hide.words(each.problem)) for each in obstacles],
            [replace(each, error=hiding.words(hide, each.error)) for each in relapses],
            self.changes(replay_id, [each.message_id for each in sample]),
        )

    def items(
        self, replay_id: int, *, states: Sequence[str] | None = None, after: int = 0, limit: int = 100
    ) -> list[ReplayItem]:
        """Return items of a plan in the order of their ids."""
        self._whole(replay_id)
        found = self._seat.looking().replay_items(replay_id, states=states, after=after, limit=limit)
        return [hiding.item(self._seat.redaction, each) for each in found]

    def changes(self, replay_id: int, message_ids: Sequence[int]) -> list[Change]:
        """Return the payloads of items before and after the patch of their plan, without secrets."""
        patch = self._whole(replay_id).raw_patch
        if not message_ids:
            return []
        found = self._seat.looking().replay_changes(replay_id, message_ids)
        return [hiding.change(self._seat.redaction, each, patch) for each in found]

    def plan(
        self,
        filter: str | None = None,
        *,
        ids: Sequence[int] | None = None,
        everything: bool = False,
        reason: str,
        to: str | None = None,
        patch: str | Patch | None = None,
        generation: int | None = None,
        rate: float | None = None,
        window: int | None = None,
        canary: int | None = None,
        tolerance: float | None = None,
        preview: bool = False,
    ) -> Replay:
        """Freeze what a filter finds, or these ids, into a draft and return it. Nothing is replayed yet.

        A patch as JSON text keeps every digit of its numbers.
        """
        seat, operator = self._seat, self._seat.doing(Permission.PROPOSE)
        if to is not None and not seat.principal.sees(to):
            raise UnknownQueue(f"there is no queue {to!r}")
        if filter is not None:
            require_meant(filter, everything=everything)
        if seat.principal.role is Role.AGENT:
            agents.check_proposal(seat, filter, ids)
        text = patch if patch is None or isinstance(patch, str) else document(list(patch), InvalidPatch)
        if text is not None:
            seat.refuse_telling(text)
        with seat.narrowed(filter or "") as narrow:
            call = plan_replay(
                None if filter is None else narrow,
                ids=None if ids is None else seat.visible(ids),
                everything=everything,
                to=to,
                patch=None if text is None else MARK,
                generation=generation,
                rate=rate,
                window=window,
                canary=canary,
                tolerance=tolerance,
                preview=preview,
                **seat.signed(reason),
            )
            made = operator.run(call if text is None else exactly(call, text))
        return self._found(operator, made)

    def again(self, replay_id: int, *, reason: str) -> Replay:
        """Freeze what a plan that is over has left dead into a new draft, with the same patch, target and pace."""
        plan = self._whole(replay_id)
        if not plan.over or not plan.waiting:
            raise InvalidArgument(f"replay {replay_id} has left nothing to be planned again")
        if plan.waiting > _MOST_AGAIN:
            raise InvalidArgument(f"{plan.waiting:,} letters are too many to name", hint="plan them by a filter")
        ids: list[int] = []
        while items := self.items(replay_id, states=["waiting"], after=ids[-1] if ids else 0, limit=_PART):
            ids += [each.message_id for each in items]
        return self.plan(
            ids=ids,
            reason=reason,
            to=plan.target,
            patch=plan.raw_patch,
            generation=plan.generation,
            rate=plan.rate,
            window=plan.window,
            canary=plan.canary if plan.canary and plan.canary < len(ids) else None,
            tolerance=plan.tolerance,
        )

    def start(
        self,
        replay_id: int,
        *,
        reason: str,
        hash: str | None = None,
        accept_drift: bool = False,
        allowance: agents.Allowance | None = None,
    ) -> Replay:
        """Let a draft run. An agent may do that with its own that a person has approved, or within its allowance."""
        seat, plan = self._seat, self.one(replay_id)
        if seat.principal.role is Role.AGENT:
            agents.start(seat, plan, reason=reason, hash=hash, allowance=allowance)
            return self.one(replay_id)
        operator = seat.doing(Permission.REPLAY)
        operator.start_replay(replay_id, hash=hash, accept_drift=accept_drift, **seat.signed(reason))
        return self._found(operator, replay_id)

    def pause(self, replay_id: int, *, reason: str) -> Replay:
        """Replay no more items until resumed."""
        operator = self._theirs(replay_id, Permission.REPLAY)
        operator.pause_replay(replay_id, **self._seat.signed(reason))
        return self._found(operator, replay_id)

    def resume(self, replay_id: int, *, reason: str) -> Replay:
        """Go on with a paused plan."""
        operator = self._theirs(replay_id, Permission.REPLAY)
        operator.resume_replay(replay_id, **self._seat.signed(reason))
        return self._found(operator, replay_id)

    def cancel(self, replay_id: int, *, reason: str) -> Replay:
        """Replay no more items of a plan, ever. Whoever proposed a draft may take it back, an agent any of its own."""
        plan, principal = self._whole(replay_id), self._seat.principal
        own = plan.actor == principal.name and (plan.status == "draft" or principal.role is Role.AGENT)
        operator = self._seat.doing(Permission.PROPOSE if own else Permission.REPLAY)
        operator.cancel_replay(replay_id, **self._seat.signed(reason))
        return self._found(operator, replay_id)

    def approve(self, replay_id: int, hash: str, *, reason: str) -> Replay:
        """Approve somebody else's plan as it was looked at."""
        operator = self._theirs(replay_id, Permission.APPROVE)
        operator.approve_replay(replay_id, hash, **self._seat.signed(reason))
        return self._found(operator, replay_id)

    def _theirs(self, replay_id: int, permission: Permission) -> Runner:
        operator = self._seat.doing(permission)
        self._whole(replay_id)
        return operator

    def _shown(self, plan: Replay) -> Replay:
        return hiding.plan(self._seat.redaction, plan)

    def _found(self, runner: Runner, replay_id: int) -> Replay:
        plan = runner.find_replay(replay_id)
        if plan is None:
            raise UnknownReplay(f"there is no replay {replay_id}")
        return self._shown(plan)
