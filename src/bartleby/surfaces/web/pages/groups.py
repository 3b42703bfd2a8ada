"""Groups: of how many bugs the letters died; and one group, with all that helps to find its cause."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import Form, Query, Request, Response
from fastapi.responses import HTMLResponse

from bartleby.documents import HIDDEN
from bartleby.errors import InvalidArgument
from bartleby.surfaces.web.context import AtDesk
from bartleby.surfaces.web.pages.editing import document
from bartleby.surfaces.web.pages.heaps import BY, heaps
from bartleby.surfaces.web.pages.naming import many
from bartleby.surfaces.web.pages.rendering import absolute, go_to, page, router
from bartleby.surfaces.web.pages.showing import command, hours
from bartleby.surfaces.web.pages.summary import summary
from bartleby.surfaces.web.pages.words import paths_in

STATES = ("open", "acknowledged", "muted", "resolved", "regressed")
_ORDERS = {
    "dead": lambda each: (-each.dead, each.id),
    "hour": lambda each: (-each.deaths_last_hour, -each.dead, each.id),
    "last": lambda each: -(each.last_dead_at.timestamp() if each.last_dead_at else 0),
    "first": lambda each: -(each.first_dead_at.timestamp() if each.first_dead_at else 0),
}
_MOST = 200
_SHOWN = 100
_MEMBERS = 10
_LONGEST_MUTE = 24 * 30

group_pages = router()

Reason = Annotated[str, Form(min_length=1, max_length=1000)]


@group_pages.get("/groups")
def groups(
    request: Request,
    desk: AtDesk,
    *,
    queue: str = "",
    state: Annotated[list[str] | None, Query()] = None,
    sort: str = "dead",
    by: str = "bug",
    everything: bool = False,
) -> HTMLResponse:
    """Show what the dead letters died of."""
    states = [each for each in state or () if each in STATES]
    if states or everything:
        found = desk.groups.every(queue or None, states=states or None, everything=everything, limit=_MOST)
    else:
        found = desk.groups.lively(queue or None, limit=_MOST)
    order = sort if sort in _ORDERS else "dead"
    kind = by if by in BY else "bug"
    return page(
        request,
        "groups.html",
        groups=sorted(found, key=_ORDERS[order])[:_SHOWN],
        newest=max((each.id for each in found), default=0),
        heaps=heaps(found, kind, order) if kind != "bug" else [],
        by=kind,
        ways=BY,
        queues=desk.queues.every(),
        queue=queue,
        chosen=states,
        states=STATES,
        sort=order,
        everything=everything,
        capped=len(found) > _SHOWN,
    )


@group_pages.get("/groups/new")
def new_groups(request: Request, desk: AtDesk, seen: int = 0, queue: str = "") -> HTMLResponse:
    """Tell how many groups there are that a page has not: they are not put into it while somebody reads."""
    found = [each for each in desk.groups.lively(queue or None, limit=_MOST) if each.id > seen]
    return page(request, "newer.html", count=len(found), noun="group")


@group_pages.get("/groups/{group_id}")
def group(request: Request, desk: AtDesk, group_id: int) -> HTMLResponse:
    """Show one group: where it dies, what its letters share, what was tried."""
    portrait = desk.groups.portrait(group_id)
    found = portrait.group
    members = desk.letters.page(f"group:{group_id} status:any", limit=_MEMBERS)
    example = next((each for each in members if each.status == "dead"), next(iter(members), None))
    return page(
        request,
        "group.html",
        group=found,
        portrait=portrait,
        members=members,
        shared=[each for each in portrait.shared if HIDDEN not in each.raw],
        example=example,
        hours=hours(found.deaths_by_hour, datetime.now(UTC)),
        queue=next((each for each in desk.queues.every() if each.name == found.queue), None),
        summary=summary(
            portrait, absolute(request, f"/groups/{group_id}"), example.traceback if example is not None else None
        ),
        rules=[each for each in desk.groups.rules(found.queue) if group_id in {each.from_group, each.to_group}],
        paths=paths_in([each.raw for each in members]),
        command=command,
    )


@group_pages.post("/groups/{group_id}/acknowledge")
def acknowledge(
    request: Request,
    desk: AtDesk,
    group_id: int,
    reason: Reason,
    link: Annotated[str, Form(max_length=500)] = "",
) -> Response:
    """Say that somebody is at it."""
    desk.groups.acknowledge(group_id, reason=reason, owner=desk.principal.name, link=link or None)
    return go_to(request, f"/groups/{group_id}", f"Acknowledged: {desk.principal.name} is at it.")


@group_pages.post("/groups/{group_id}/mute")
def mute(request: Request, desk: AtDesk, group_id: int, reason: Reason, hours: Annotated[float, Form()]) -> Response:
    """Do not be told of a group for some hours."""
    if not 0 < hours <= _LONGEST_MUTE:
        raise InvalidArgument("a group is muted for up to 30 days", hint="say how many hours")
    until = datetime.now(UTC) + timedelta(hours=hours)
    desk.groups.mute(group_id, until, reason=reason)
    return go_to(request, f"/groups/{group_id}", f"Muted until {until:%Y-%m-%d %H:%M} UTC.")


@group_pages.post("/groups/{group_id}/resolve")
def resolve(
    request: Request, desk: AtDesk, group_id: int, reason: Reason, version: Annotated[str, Form(max_length=200)] = ""
) -> Response:
    """Say that the bug is fixed."""
    desk.groups.resolve(group_id, reason=reason, version=version or None)
    return go_to(request, f"/groups/{group_id}", "Resolved. Should it come back, it is regressed, and that is told.")


@group_pages.post("/groups/{group_id}/reopen")
def reopen(request: Request, desk: AtDesk, group_id: int, reason: Reason) -> Response:
    """Make a group open again."""
    desk.groups.reopen(group_id, reason=reason)
    return go_to(request, f"/groups/{group_id}", "Open again.")


@group_pages.post("/groups/{group_id}/merge")
def merge(request: Request, desk: AtDesk, group_id: int, reason: Reason, into: Annotated[int, Form()]) -> Response:
    """Make a group part of another."""
    moved = desk.groups.merge([group_id], into=into, reason=reason)
    told = f"Group {group_id} is part of this one now; {many(moved, 'letter')} moved."
    return go_to(request, f"/groups/{into}", told)


@group_pages.post("/groups/{group_id}/split")
def split(
    request: Request,
    desk: AtDesk,
    group_id: int,
    *,
    reason: Reason,
    path: Annotated[str, Form(max_length=500)],
    value: Annotated[str, Form(max_length=10_000)],
) -> Response:
    """Give letters with one value a group of their own."""
    made = desk.groups.split(group_id, path, document(value, "the value"), reason=reason)
    return go_to(request, f"/groups/{made}", f"This was split from group {group_id}; letters of it move here.")


@group_pages.post("/groups/{group_id}/rules/{rule_id}/remove")
def remove_rule(request: Request, desk: AtDesk, group_id: int, rule_id: int, reason: Reason) -> Response:
    """Take back a merge or a split; its letters return to where they would be without it."""
    desk.groups.remove_rule(rule_id, reason=reason)
    return go_to(request, f"/groups/{group_id}", f"Rule {rule_id} is taken back; its letters return within a minute.")
