"""/groups and /group-rules: of how many bugs the letters died, and what is said of each bug."""

from typing import Annotated, Any, Literal

from fastapi import Path, Query, Request
from pydantic import AwareDatetime, Field
from starlette.responses import Response

from bartleby.errors import InvalidArgument
from bartleby.surfaces.desk import Desk
from bartleby.surfaces.desk.exact import Exact, document
from bartleby.surfaces.web.api import nouns
from bartleby.surfaces.web.api.answering import LARGEST_ID, GroupId, Limit, answer, page, refusals, tagged
from bartleby.surfaces.web.api.asking import Deed, Id, ReasonAsked, new_router, tree
from bartleby.surfaces.web.api.doing import Writing
from bartleby.surfaces.web.context import AtDesk

router = new_router("groups")

State = Literal["open", "acknowledged", "muted", "resolved", "regressed"]
After = Annotated[
    str | None, Query(pattern=r"^[0-9]{1,18}/[0-9]{1,18}$", description="`next` of the page before", examples=["12/7"])
]
QueueAsked = Annotated[str | None, Query(min_length=1, max_length=100, description="of one queue")]


class Acknowledge(Deed):
    """Somebody is at it; the reason becomes the note of the group."""

    owner: Annotated[str, Field(max_length=200, examples=["ana"])] | None = None
    link: Annotated[str, Field(max_length=2000, examples=["https://tickets.example/42"])] | None = None


class Mute(Deed):
    """Not to be told of a group until then."""

    until: AwareDatetime = Field(examples=["2030-01-01T09:00:00+00:00"])


class Resolve(Deed):
    """The bug is fixed; with a version, seen from there on again it has regressed."""

    version: Annotated[str, Field(max_length=200, examples=["1.4.0"])] | None = None


class Split(Deed):
    """Letters with a value at a path get a group of their own."""

    path: str = Field(min_length=1, max_length=2000, examples=["payload.customer.country"])
    value: Any = Field(description="any JSON value, compared with every digit", examples=["AT"])
    title: Annotated[str, Field(max_length=500)] | None = None


class Merge(Deed):
    """Several groups become one."""

    groups: Annotated[list[Id], Field(min_length=1, max_length=100, examples=[[3, 4]])]
    into: Id = Field(examples=[2])


@router.get("/groups", response_model=nouns.Groups, responses=refusals(paged=True), summary="List groups")
def list_groups(
    request: Request,
    desk: AtDesk,
    *,
    queue: QueueAsked = None,
    state: Annotated[list[State] | None, Query(description="in these states, also without dead letters")] = None,
    everything: Annotated[bool, Query(description="also those without dead letters")] = False,
    limit: Limit = 100,
    after: After = None,
) -> Response:
    """Return the groups with most dead letters first."""
    dead, last = (after or "/").split("/")
    place = (int(dead), int(last)) if after else None
    found = desk.groups.page(queue, states=state, everything=everything, limit=limit, after=place)
    return page(request, found)


@router.get(
    "/groups/{group_id}", response_model=nouns.Group, responses=refusals(404, tagged=True), summary="Look at a group"
)
def get_group(request: Request, desk: AtDesk, group_id: GroupId) -> Response:
    """Return one group."""
    return tagged(request, desk.groups.one(group_id))


@router.get(
    "/groups/{group_id}/portrait", response_model=nouns.Portrait, responses=refusals(404), summary="All about a group"
)
def get_portrait(desk: AtDesk, group_id: GroupId) -> Response:
    """Return a group, what its letters share, which versions of workers they came from, and what was tried."""
    return answer(desk.groups.portrait(group_id))


@router.get(
    "/groups/{group_id}/shared-values",
    response_model=nouns.many(nouns.SharedValue),
    responses=refusals(404),
    summary="What its letters have in common",
)
def list_shared_values(desk: AtDesk, group_id: GroupId) -> Response:
    """Return which values the newest letters of a group share at which paths, without secrets."""
    return answer(desk.groups.shared(group_id))


@router.get(
    "/groups/{group_id}/versions",
    response_model=nouns.many(nouns.GroupVersion),
    responses=refusals(404),
    summary="Versions of workers",
)
def list_group_versions(desk: AtDesk, group_id: GroupId) -> Response:
    """Return from which versions of workers its newest letters came."""
    return answer(desk.groups.versions(group_id))


@router.get(
    "/groups/{group_id}/replays",
    response_model=nouns.many(nouns.GroupReplay),
    responses=refusals(404),
    summary="What was tried",
)
def list_group_replays(desk: AtDesk, group_id: GroupId) -> Response:
    """Return what was tried with a group and what it came to, the newest first."""
    return answer(desk.groups.replays(group_id))


@router.post(
    "/groups/{group_id}/acknowledge", response_model=nouns.Group, responses=refusals(404, 409), summary="Acknowledge"
)
def acknowledge_group(write: Writing, group_id: GroupId, asked: Acknowledge) -> Response:
    """Say that somebody is at it."""
    return write.showing(
        lambda desk: desk.groups.acknowledge(group_id, reason=asked.reason, owner=asked.owner, link=asked.link),
        lambda desk: desk.groups.one(group_id),
    )


@router.post("/groups/{group_id}/mute", response_model=nouns.Group, responses=refusals(404, 409), summary="Mute")
def mute_group(write: Writing, group_id: GroupId, asked: Mute) -> Response:
    """Do not be told of a group until then; its letters are kept as ever."""
    return write.showing(
        lambda desk: desk.groups.mute(group_id, asked.until, reason=asked.reason),
        lambda desk: desk.groups.one(group_id),
    )


@router.post("/groups/{group_id}/resolve", response_model=nouns.Group, responses=refusals(404, 409), summary="Resolve")
def resolve_group(write: Writing, group_id: GroupId, asked: Resolve) -> Response:
    """Say that the bug is fixed."""
    return write.showing(
        lambda desk: desk.groups.resolve(group_id, reason=asked.reason, version=asked.version),
        lambda desk: desk.groups.one(group_id),
    )


@router.post("/groups/{group_id}/reopen", response_model=nouns.Group, responses=refusals(404, 409), summary="Reopen")
def reopen_group(write: Writing, group_id: GroupId, asked: Deed) -> Response:
    """Make a group open again, whatever was said of it."""
    return write.showing(
        lambda desk: desk.groups.reopen(group_id, reason=asked.reason), lambda desk: desk.groups.one(group_id)
    )


@router.post("/groups/{group_id}/split", response_model=nouns.Group, responses=refusals(404, 409), summary="Split")
def split_group(write: Writing, group_id: GroupId, asked: Split) -> Response:
    """Give letters with this value at this path a group of their own; the answer is that group."""
    value = Exact(document(tree(write.body)["value"], InvalidArgument, "value: "))

    def act(desk: Desk) -> object:
        return desk.groups.one(desk.groups.split(group_id, asked.path, value, reason=asked.reason, title=asked.title))

    return write(act)


@router.post("/groups/merge", response_model=nouns.Moved, responses=refusals(404, 409), summary="Merge groups")
def merge_groups(write: Writing, asked: Merge) -> Response:
    """Make several groups one, now and for what comes; the answer is how many letters moved."""
    return write(lambda desk: {"letters": desk.groups.merge(asked.groups, into=asked.into, reason=asked.reason)})


@router.get("/group-rules", response_model=nouns.many(nouns.Rule), responses=refusals(), summary="List rules of groups")
def list_group_rules(desk: AtDesk, queue: QueueAsked = None) -> Response:
    """Return the rules that merges and splits have made."""
    return answer(desk.groups.rules(queue))


@router.delete("/group-rules/{rule_id}", status_code=204, responses=refusals(404, 409), summary="Take back a rule")
def remove_group_rule(
    write: Writing,
    rule_id: Annotated[int, Path(ge=1, le=LARGEST_ID, description="the id of a rule")],
    reason: ReasonAsked,
) -> Response:
    """Take back a merge or a split: its letters return to where they would be without it."""
    return write(lambda desk: desk.groups.remove_rule(rule_id, reason=reason), 204)
