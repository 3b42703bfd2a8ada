"""Signing in and out: a name and its password, or a token, for a session that a cookie knows.

Where the console only reads, it cannot write down a session: there the cookie is the token itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import escape
from typing import TYPE_CHECKING, Annotated, cast

from fastapi import APIRouter, Form, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from bartleby import hashing
from bartleby.errors import UnknownToken
from bartleby.surfaces.web.authenticating import COOKIE, Unrecognised
from bartleby.surfaces.web.context import house
from bartleby.surfaces.web.error_page import STYLE
from bartleby.surfaces.web.paths import LOGIN, link, local
from bartleby.surfaces.web.problems import Problem

if TYPE_CHECKING:
    from bartleby.credentials import Password, Token
    from bartleby.surfaces.web.arrival import Arrival

LoginPage = Callable[[Request, Mapping[str, object]], str]

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class Session:
    """What a cookie is to say, and for how long."""

    secret: str
    seconds: int


@router.get(LOGIN)
def login(request: Request, next: str = "") -> Response:  # noqa: A002 - what everybody calls it in an address
    """Ask who it is."""
    if not house(request).settings.authenticate:
        return RedirectResponse(local(next, link(request.scope, "/")), 303)
    return _page(request, next)


@router.post(LOGIN)
def sign_in(
    request: Request,
    secret: Annotated[str, Form()] = "",
    name: Annotated[str, Form()] = "",
    next: Annotated[str, Form()] = "",  # noqa: A002
) -> Response:
    """Open a session and go on."""
    try:
        session = opened(request, name.strip(), secret)
    except Unrecognised as error:
        return _page(request, next, error.problem, name)
    response = RedirectResponse(local(next, link(request.scope, "/")), 303)
    response.set_cookie(
        COOKIE,
        session.secret,
        max_age=session.seconds,
        path=link(request.scope, "") or "/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="lax",  # strict would ask whoever follows a link of an alert to sign in again
    )
    return response


@router.post("/logout")
def sign_out(request: Request) -> Response:
    """End the session."""
    shared, secret = house(request), request.cookies.get(COOKIE)
    if secret and shared.operator is not None:
        shared.operator.close_session(hashing.digest(secret), request_id=request.state.request_id)
    response = RedirectResponse(link(request.scope, LOGIN), 303)
    response.delete_cookie(COOKIE, path=link(request.scope, "") or "/", httponly=True, samesite="lax")
    return response


def opened(request: Request, name: str, secret: str) -> Session:
    """Return a new session of whoever has this token, or this name and password."""
    shared, arrival = house(request), cast("Arrival", request.state.arrival)
    found: Token | Password
    token = secret.strip()
    if hashing.is_token(token) or (not name and token.startswith(hashing.PREFIX)):
        secret = token  # a blank gets in when it is copied; those of a password are its own
        found = shared.recogniser.token(secret, arrival)
    else:
        found = shared.recogniser.password(name, secret, arrival)
    length = timedelta(hours=shared.settings.session_hours)
    if shared.operator is None:
        return Session(secret, int(length.total_seconds()))
    session = hashing.new_token()
    try:
        shared.operator.open_session(
            hashing.digest(session),
            name=found.name,
            role=found.role,
            queues=found.queues,
            until=datetime.now(UTC) + length,
            from_token=found.id,
            request_id=request.state.request_id,
        )
    except UnknownToken:  # revoked in between
        raise Unrecognised(Problem("unauthorized", 401, "it was revoked, or has expired")) from None
    return Session(session, int(length.total_seconds()))


def _page(request: Request, goal: str, problem: Problem | None = None, name: str = "") -> Response:
    context: dict[str, object] = {
        "next": local(goal, ""),
        "name": name,
        "problem": None if problem is None else problem.document(request.state.request_id),
        "passwords": house(request).operator is not None,
    }
    dressed = cast("LoginPage | None", getattr(request.app.state, "login_page", None))
    text = _plain(request, context) if dressed is None else dressed(request, context)
    headers = {} if problem is None else dict(problem.headers)
    return HTMLResponse(text, 200 if problem is None else problem.status, headers)


def _plain(request: Request, context: Mapping[str, object]) -> str:
    said = {name: escape(str(value)) for name, value in context.items()}
    problem = cast("Mapping[str, object] | None", context["problem"])
    told = "" if problem is None else f'<p role="alert">{escape(str(problem["detail"]))}</p>'
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Sign in - Bartleby</title>'
        '<meta name="viewport" content="width=device-width">'
        f'<style nonce="{escape(request.state.nonce)}">{STYLE}</style>'
        f'<main><h1>Sign in</h1>{told}<form method="post" action="{escape(link(request.scope, LOGIN))}">'
        f'<input type="hidden" name="next" value="{said["next"]}">'
        f'<p><label>Name <input name="name" value="{said["name"]}" autocomplete="username"></label></p>'
        "<p><label>Password, or a token without a name "
        '<input name="secret" type="password" autocomplete="current-password" required autofocus></label></p>'
        "<p><button>Sign in</button></p></form></main></html>"
    )
