"""The installation: workers, sinks, the audit, and the check-up."""

from typing import Annotated

from fastapi import Form, Request, Response
from fastapi.responses import HTMLResponse

from bartleby.errors import InvalidArgument
from bartleby.surfaces.web.context import AtDesk
from bartleby.surfaces.web.pages.rendering import go_to, page, router
from bartleby.surfaces.web.pages.showing import command

_LINES = 50
_RANKS = {"bad": 0, "warning": 1, "note": 2, "good": 3}

office_pages = router()

Reason = Annotated[str, Form(min_length=1, max_length=1000)]


@office_pages.get("/workers")
def workers(request: Request, desk: AtDesk) -> HTMLResponse:
    """Show who works, on what, and who has not been heard of."""
    return page(request, "workers.html", workers=desk.office.workers(), command=command)


@office_pages.post("/workers/drain")
def drain(request: Request, desk: AtDesk, name: Annotated[str, Form()], reason: Reason) -> Response:
    """Let a worker finish what it has, and take nothing more."""
    desk.office.drain_worker(name, reason=reason)
    return go_to(request, "/workers", f"Worker {name} finishes what it has and then stops.")


@office_pages.get("/sinks")
def sinks(request: Request, desk: AtDesk) -> HTMLResponse:
    """Show where events go, and how that does."""
    return page(request, "sinks.html", sinks=desk.office.sinks(), command=command)


@office_pages.post("/sinks/{name}/{verb}")
def steer(request: Request, desk: AtDesk, name: str, verb: str, reason: Reason) -> Response:
    """Pause a sink, or go on with it."""
    deeds = {
        "pause": (desk.office.pause_sink, "gets nothing for now; events wait for it"),
        "resume": (desk.office.resume_sink, "gets events again"),
    }
    if verb not in deeds:
        raise InvalidArgument(f"a sink cannot be told to {verb}")
    deed, told = deeds[verb]
    deed(name, reason=reason)
    return go_to(request, "/sinks", f"Sink {name} {told}.")


@office_pages.get("/audit")
def audit(
    request: Request,
    desk: AtDesk,
    *,
    actor: str = "",
    action: str = "",
    request_id: str = "",
    before: int | None = None,
) -> HTMLResponse:
    """Show who did what, the newest first."""
    lines = desk.office.audit(
        limit=_LINES,
        before_id=before,
        actor=actor or None,
        action=action or None,
        request_id=request_id or None,
    )
    return page(
        request,
        "audit.html",
        lines=lines,
        actor=actor,
        action=action,
        request_id=request_id,
        before=lines[-1].id if len(lines) == _LINES else None,
        anchor=desk.office.audit_anchor(),
        problems=None,
    )


@office_pages.post("/audit/verify")
def verify(request: Request, desk: AtDesk, anchor: Annotated[str, Form()] = "") -> HTMLResponse:
    """Read the whole audit, and say whether anybody has tampered with it."""
    problems = desk.office.verify_audit(anchor.strip() or None)
    return page(
        request,
        "audit.html",
        lines=desk.office.audit(limit=_LINES),
        actor="",
        action="",
        request_id="",
        before=None,
        anchor=desk.office.audit_anchor(),
        problems=problems,
    )


@office_pages.get("/doctor")
def doctor(request: Request, desk: AtDesk) -> HTMLResponse:
    """Show what a check-up finds, the worst first."""
    found = sorted(desk.office.doctor(), key=lambda each: _RANKS[each.status])
    return page(request, "doctor.html", findings=found, command=command)
