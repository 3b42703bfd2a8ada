"""/replays: plans are proposed, looked at, let run by who may, and steered."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from pydantic import Field, Tag
from starlette.responses import Response

from bartleby.errors import InvalidPatch
from bartleby.evidence import Page
from bartleby.replays import Replay
from bartleby.surfaces import shapes
from bartleby.surfaces.desk import Desk
from bartleby.surfaces.desk.exact import document
from bartleby.surfaces.desk.replays import Replays
from bartleby.surfaces.web.api import nouns
from bartleby.surfaces.web.api.answering import LARGEST_ID, Limit, Number, ReplayId, answer, page, refusals, tagged
from bartleby.surfaces.web.api.asking import FILTER, IDS, Deed, FilterText, Flag, Ids, Name, new_router, told_by, tree
from bartleby.surfaces.web.api.doing import Writing
from bartleby.surfaces.web.context import AtDesk

router = new_router("replays", prefix="/replays")

Status = Literal["preview", "draft", "running", "paused", "settling", "finished", "cancelled", "aborted"]
AskedId = Annotated[int, Field(ge=1, le=LARGEST_ID)]
ItemState = Literal["waiting", "replayed", "done", "already_handled", "died_again", "gone", "skipped"]


class Proposal(Deed):
    """How letters are to live again."""

    to: Name | None = Field(None, description="another queue", examples=["billing-v2"])
    patch: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=100)] | None = Field(
        None,
        description="a JSON Patch (RFC 6902) of every payload; the originals are kept",
        examples=[[{"op": "replace", "path": "/country", "value": "AT"}]],
    )
    generation: Annotated[int, Field(strict=True, ge=0, le=LARGEST_ID)] | None = None
    rate: Annotated[float, Field(strict=True, gt=0, le=1_000_000)] | None = Field(None, description="items a second")
    window: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] | None = Field(
        None, description="how many are alive at once"
    )
    canary: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] | None = Field(
        None, description="so many go first; if too many of them die again, the rest is left alone"
    )
    tolerance: Annotated[float, Field(strict=True, ge=0, le=1)] | None = Field(None, description="how many is too many")
    preview: Flag = Field(False, description="only to be looked at, for an hour: it never runs")


class ProposalOfIds(Proposal):
    """Letters by the ids of their messages, and how they are to live again."""

    ids: Ids


class ProposalOfFilter(Proposal):
    """Letters that a filter finds now, and how they are to live again."""

    filter: FilterText
    everything: Flag = Field(False, description="an empty filter is meant")


Proposed = Annotated[
    Annotated[ProposalOfIds, Tag(IDS)] | Annotated[ProposalOfFilter, Tag(FILTER)],
    told_by("ids", tag=IDS, other=FILTER),
]


class Start(Deed):
    """Let a draft run, if it is the plan that was looked at."""

    hash: Annotated[str, Field(max_length=200)] | None = Field(
        None, description="`hash` of the plan as it was looked at"
    )
    accept_drift: Flag = Field(False, description="also if letters have changed since it was made")


class Approve(Deed):
    """Somebody else's plan, as it was looked at."""

    hash: Annotated[str, Field(min_length=1, max_length=200)] = Field(description="`hash` of the plan")


@router.post("", status_code=201, response_model=nouns.Plan, responses=refusals(404, 409), summary="Plan a replay")
def plan_replay(write: Writing, asked: Proposed) -> Response:
    """Freeze what a filter finds, or these ids, into a draft. Nothing is replayed yet."""
    patch = None if asked.patch is None else document(tree(write.body)["patch"], InvalidPatch)
    chosen = asked.model_dump(exclude={"patch"})
    return write(lambda desk: shapes.plan(desk.replays.plan(patch=patch, **chosen)), 201)


@router.get("", response_model=nouns.Plans, responses=refusals(paged=True), summary="List replays")
def list_replays(
    request: Request,
    desk: AtDesk,
    status: Annotated[list[Status] | None, Query(description="only these; previews only where asked for")] = None,
    limit: Limit = 50,
    after: Number = None,
) -> Response:
    """Return the plans, the newest first."""
    found = desk.replays.page(statuses=status, limit=limit, before_id=None if after is None else int(after))
    return page(request, found, [shapes.plan(each) for each in found])


@router.get("/{replay_id}", response_model=nouns.Plan, responses=refusals(404, tagged=True), summary="Look at a replay")
def get_replay(request: Request, desk: AtDesk, replay_id: ReplayId) -> Response:
    """Return a plan and how far it has come."""
    return tagged(request, shapes.plan(desk.replays.one(replay_id)))


@router.get(
    "/{replay_id}/preview", response_model=nouns.Preview, responses=refusals(404), summary="What it would do, or did"
)
def get_preview(desk: AtDesk, replay_id: ReplayId) -> Response:
    """Return a plan, how its items are spread, what stands in their way, and what its patch changes."""
    found = desk.replays.preview(replay_id)
    return answer({**shapes.members(found), "plan": shapes.plan(found.plan)})


@router.get(
    "/{replay_id}/items", response_model=nouns.Items, responses=refusals(404, paged=True), summary="List its items"
)
def list_replay_items(
    request: Request,
    desk: AtDesk,
    replay_id: ReplayId,
    *,
    state: Annotated[list[ItemState] | None, Query(description="only these")] = None,
    limit: Limit = 100,
    after: Number = None,
) -> Response:
    """Return items of a plan in the order of their ids."""
    found = desk.replays.items(replay_id, states=state, after=int(after or 0), limit=limit)
    more = str(found[-1].message_id) if len(found) == limit else None
    return page(request, Page(tuple(found), more))


@router.get(
    "/{replay_id}/changes",
    response_model=nouns.many(nouns.Change),
    responses=refusals(404),
    summary="What its patch changes",
)
def list_replay_changes(
    desk: AtDesk,
    replay_id: ReplayId,
    message_id: Annotated[list[AskedId], Query(min_length=1, max_length=100, description="of these items")],
) -> Response:
    """Return the payloads of items before and after the patch of their plan, without secrets."""
    return answer(desk.replays.changes(replay_id, message_id))


@router.post("/{replay_id}/start", response_model=nouns.Plan, responses=refusals(404, 409), summary="Start a replay")
def start_replay(write: Writing, replay_id: ReplayId, asked: Start) -> Response:
    """Let a draft run. An agent may do that only with a plan that a person has approved."""
    return write(
        _shown(
            lambda replays: replays.start(
                replay_id, reason=asked.reason, hash=asked.hash, accept_drift=asked.accept_drift
            )
        )
    )


@router.post("/{replay_id}/pause", response_model=nouns.Plan, responses=refusals(404, 409), summary="Pause a replay")
def pause_replay(write: Writing, replay_id: ReplayId, asked: Deed) -> Response:
    """Replay no more items until resumed."""
    return write(_shown(lambda replays: replays.pause(replay_id, reason=asked.reason)))


@router.post("/{replay_id}/resume", response_model=nouns.Plan, responses=refusals(404, 409), summary="Resume a replay")
def resume_replay(write: Writing, replay_id: ReplayId, asked: Deed) -> Response:
    """Go on with a paused plan."""
    return write(_shown(lambda replays: replays.resume(replay_id, reason=asked.reason)))


@router.post("/{replay_id}/cancel", response_model=nouns.Plan, responses=refusals(404, 409), summary="Cancel a replay")
def cancel_replay(write: Writing, replay_id: ReplayId, asked: Deed) -> Response:
    """Replay no more items of a plan, ever; what was replayed stays alive."""
    return write(_shown(lambda replays: replays.cancel(replay_id, reason=asked.reason)))


@router.post(
    "/{replay_id}/approve", response_model=nouns.Plan, responses=refusals(404, 409), summary="Approve a replay"
)
def approve_replay(write: Writing, replay_id: ReplayId, asked: Approve) -> Response:
    """Approve somebody else's plan as it was looked at."""
    return write(_shown(lambda replays: replays.approve(replay_id, asked.hash, reason=asked.reason)))


def _shown(act: Callable[[Replays], Replay]) -> Callable[[Desk], object]:
    return lambda desk: shapes.plan(act(desk.replays))
