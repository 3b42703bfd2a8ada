"""Tokens: who may come in and how far, a new one whose secret is shown once, and those that are let in no more."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import Form, Request, Response
from fastapi.responses import HTMLResponse

from bartleby.errors import InvalidArgument
from bartleby.principal import Role
from bartleby.surfaces.desk import Desk
from bartleby.surfaces.desk.office import NewToken
from bartleby.surfaces.web.context import AtDesk
from bartleby.surfaces.web.pages.rendering import go_to, page, router
from bartleby.surfaces.web.pages.showing import command

_MEANS = {
    Role.READER: "looks, at payloads without their secrets",
    Role.AGENT: "looks, and proposes replays that a person lets run",
    Role.OPERATOR: "also replays, discards, steers, and sees whole payloads (audited)",
    Role.ADMIN: "also sets up queues and sinks, erases, and gives out tokens",
}
_LONGEST_DAYS = 3660
_SINKS = "sink."

token_pages = router()

Reason = Annotated[str, Form(min_length=1, max_length=1000)]


@token_pages.get("/tokens")
def tokens(request: Request, desk: AtDesk) -> HTMLResponse:
    """Show who may come in."""
    return _show(request, desk)


@token_pages.post("/tokens")
def add(
    request: Request,
    desk: AtDesk,
    *,
    name: Annotated[str, Form(min_length=1, max_length=200)],
    role: Annotated[str, Form()],
    days: Annotated[int, Form()],
    reason: Reason,
    queues: Annotated[list[str] | None, Form()] = None,
) -> HTMLResponse:
    """Let somebody in. The secret is in this answer and nowhere else, so the answer is no redirect."""
    if role not in set(Role):
        raise InvalidArgument(f"there is no role {role!r}", hint=", ".join(Role))
    if not 0 <= days <= _LONGEST_DAYS:
        raise InvalidArgument("a token lasts up to ten years", hint="0 days: until it is revoked")
    until = datetime.now(UTC) + timedelta(days=days) if days else None
    made = desk.office.new_token(name.strip(), role=Role(role), queues=queues or None, expires=until, reason=reason)
    answer = _show(request, desk, made, name.strip())
    answer.headers["Cache-Control"] = "no-store"
    return answer


@token_pages.post("/tokens/{token_id}/revoke")
def revoke(request: Request, desk: AtDesk, token_id: int, reason: Reason) -> Response:
    """Let a token, a password or a session in no more."""
    desk.office.revoke_token(token_id, reason=reason)
    return go_to(request, "/tokens", f"Token {token_id} opens nothing any more, and its sessions are over.")


def _show(request: Request, desk: Desk, made: NewToken | None = None, name: str = "") -> HTMLResponse:
    found = desk.office.tokens()
    return page(
        request,
        "tokens.html",
        tokens=[each for each in found if each.kind != "session"],
        open_sessions=[each for each in found if each.kind == "session"],
        queues=[each for each in desk.queues.every() if not each.name.startswith(_SINKS)],
        roles=_MEANS,
        made=made,
        made_name=name,
        command=command,
    )
