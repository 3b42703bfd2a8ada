"""Queues: how each does, what stops it, and what steers it."""

from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from typing import Annotated

from fastapi import Form, Request, Response
from fastapi.responses import HTMLResponse

from bartleby.attendance import WorkerReport
from bartleby.errors import Forbidden, InvalidArgument
from bartleby.surfaces.desk import Desk
from bartleby.surfaces.web.context import AtDesk
from bartleby.surfaces.web.pages.rendering import go_to, page, router
from bartleby.surfaces.web.pages.showing import command, hours, sentence
from bartleby.surfaces.words import breaker

_NEWEST = 8
_WAITS = 8
_MOST_GROUPS = 200
_LONGEST_PAUSE = 60 * 24 * 30

queue_pages = router()

Reason = Annotated[str, Form(min_length=1, max_length=1000)]


@queue_pages.get("/queues")
def queues(request: Request, desk: AtDesk) -> HTMLResponse:
    """Show the queues."""
    return page(
        request,
        "queues.html",
        queues=sorted(desk.queues.every(), key=lambda each: (each.name.startswith("sink."), each.name)),
    )


@queue_pages.get("/queues/{name}")
def queue(request: Request, desk: AtDesk, name: str) -> HTMLResponse:
    """Show one queue: what waits, what stops it, and what died of what."""
    found = desk.queues.one(name)
    groups = desk.groups.every(name, limit=_MOST_GROUPS)
    by_hour = [sum(each) for each in zip_longest(*(group.deaths_by_hour for group in groups), fillvalue=0)]
    policy = desk.queues.policy(name)
    return page(
        request,
        "queue.html",
        queue=found,
        breaker=sentence(breaker(found, datetime.now(UTC))),
        groups=groups[:_NEWEST],
        hours=hours(by_hour or [0] * 24, datetime.now(UTC)),
        policy=policy,
        waits=[policy.delay(each) for each in range(1, min(policy.max_attempts, _WAITS + 1))],
        workers=_workers(desk, name),
        letters=desk.letters.page(f"queue:{name}", limit=_NEWEST),
        command=command,
    )


@queue_pages.post("/queues/{name}/pause")
def pause(
    request: Request,
    desk: AtDesk,
    name: str,
    *,
    reason: Reason,
    minutes: Annotated[float, Form()] = 0,
    back: Annotated[str, Form()] = "",
) -> Response:
    """Hand out nothing for some minutes, or until somebody resumes it."""
    if not 0 <= minutes <= _LONGEST_PAUSE:
        raise InvalidArgument("a pause that ends by itself lasts up to 30 days", hint="0 minutes: until it is resumed")
    until = datetime.now(UTC) + timedelta(minutes=minutes) if minutes else None
    desk.queues.pause(name, reason=reason, until=until)
    ends = f"until {until:%Y-%m-%d %H:%M} UTC, and goes on by itself then" if until else "until somebody resumes it"
    return go_to(request, _there(name, back), f"Queue {name} is paused {ends}.")


@queue_pages.post("/queues/{name}/{verb}")
def steer(
    request: Request, desk: AtDesk, name: str, verb: str, *, reason: Reason, back: Annotated[str, Form()] = ""
) -> Response:
    """Resume a queue, open or close its breaker."""
    deeds = {
        "resume": (desk.queues.resume, "hands out messages again"),
        "open-breaker": (desk.queues.open_breaker, "hands out nothing until its breaker is closed"),
        "close-breaker": (desk.queues.close_breaker, "goes on: its breaker is closed"),
    }
    if verb not in deeds:
        raise InvalidArgument(f"a queue cannot be told to {verb}")
    deed, told = deeds[verb]
    deed(name, reason=reason)
    return go_to(request, _there(name, back), f"Queue {name} {told}.")


def _there(name: str, back: str) -> str:
    return back if back.startswith("/groups/") and back.removeprefix("/groups/").isdigit() else f"/queues/{name}"


def _workers(desk: Desk, queue: str) -> list[WorkerReport] | None:
    """Return who works on a queue, or nothing for somebody who may not know."""
    try:
        return [each for each in desk.office.workers() if queue in each.queues]
    except Forbidden:
        return None
