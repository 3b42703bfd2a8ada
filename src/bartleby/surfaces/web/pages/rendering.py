"""How a page is made: templates, links that hold behind a prefix, what every page knows, and errors as pages."""

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psycopg
from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bartleby.errors import BartlebyError
from bartleby.evidence import term
from bartleby.principal import Permission, Principal
from bartleby.surfaces.web.context import House, house
from bartleby.surfaces.web.pages import naming, showing
from bartleby.surfaces.web.pages.assets import asset
from bartleby.surfaces.web.problems import note, plainly, problem_of
from bartleby.version import __version__

FLASH = "bartleby_told"
_FLASH_SECONDS = 60
_LONGEST_FLASH = 500
_WHOLE = "main#main"
_BROKEN, _AWAY = 500, 503
_TITLES = {403: "You may not do this", 404: "There is no such thing", 409: "Nothing was done", 422: "Look again"}

_templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent.parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=showing.visible,
)
_templates.filters.update(showing.FILTERS | naming.FILTERS)
_templates.globals.update(term=term, Permission=Permission, version=__version__)


def prefix(request: Request) -> str:
    """Return the path that the console is mounted at, without a slash at its end."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def local(request: Request, path: str, **parameters: object) -> str:
    """Return the address of a page of ours, wherever the console is mounted."""
    given = {name: value for name, value in parameters.items() if value is not None and value not in ("", [])}
    return f"{prefix(request)}{path}{f'?{urlencode(given, doseq=True)}' if given else ''}"


def absolute(request: Request, path: str) -> str:
    """Return the whole address of a page, for somebody who is elsewhere."""
    return f"{request.url.scheme}://{request.url.netloc}{local(request, path)}"


def page(request: Request, template: str, *, status: int = 200, **context: object) -> HTMLResponse:
    """Return a page."""
    told = _told(request)
    answer = HTMLResponse(_templates.get_template(template).render(_common(request, told), **context), status)
    if told is not None:
        answer.delete_cookie(FLASH, path=prefix(request) or "/")
    return answer


def go_to(
    request: Request, path: str, told: str = "", *, undo: bool = False, tone: str = "good", filter: str = ""
) -> RedirectResponse:
    """Go on to another page, which tells what was done, and offers to undo it."""
    answer = RedirectResponse(local(request, path, filter=filter), 303)
    if told:
        kept = {"text": told[:_LONGEST_FLASH], "tone": tone, "undo": request.state.request_id if undo else None}
        text = urlsafe_b64encode(json.dumps(kept).encode()).decode()
        secure = request.url.scheme == "https"
        answer.set_cookie(
            FLASH,
            text,
            max_age=_FLASH_SECONDS,
            path=prefix(request) or "/",
            httponly=True,
            samesite="lax",
            secure=secure,
        )
    return answer


class PageRoute(APIRoute):
    """A route whose errors are pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        answer = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await answer(request)
            except (BartlebyError, psycopg.Error, RequestValidationError) as error:
                return failure(request, error)

        return handler


def router() -> APIRouter:
    """Return a router for pages."""
    return APIRouter(route_class=PageRoute, include_in_schema=False, default_response_class=HTMLResponse)


def failure(request: Request, error: Exception) -> Response:
    """Return an error as a page, or to a form that is waiting for it as a notice in its place."""
    problem = problem_of(error)
    status = problem.status
    if status >= _BROKEN:
        note(request.state.request_id, problem, error)
    if status == _AWAY:
        text = _down_page(request, problem.detail, problem.hint, kind=problem.kind)
        return HTMLResponse(text, _AWAY, headers={"Retry-After": "5"})
    detail = plainly(error) if isinstance(error, RequestValidationError) else problem.detail
    context = {"error": detail, "hint": problem.hint}
    if "hx-request" in request.headers and request.method == "POST":
        text = _templates.get_template("notice.html").render(_common(request, None), **context)
        steer = {"HX-Retarget": "#notices", "HX-Reswap": "innerHTML", "HX-Reselect": ".notice"}
        return HTMLResponse(text, status, headers=steer)
    return page(request, "error.html", status=status, heading=_TITLES.get(status, problem.title), **context)


def error_page(request: Request, document: Mapping[str, object]) -> str:
    """Return a problem as a page, wherever it arose."""
    status, detail, hint = document["status"], str(document["detail"]), document.get("hint")
    if status == _AWAY:
        return _down_page(request, detail, hint, kind=str(document["type"]).rpartition(":")[2])
    heading = _TITLES.get(int(str(status)), str(document["title"]))
    context = {"error": detail, "hint": hint, "heading": heading}
    return _templates.get_template("error.html").render(_common(request, None), **context)


def login_page(request: Request, context: Mapping[str, object]) -> str:
    """Return the page that asks who it is."""
    return _templates.get_template("login.html").render(_common(request, None), **context)


def _down_page(request: Request, error: str, hint: object, *, kind: str) -> str:
    from bartleby.surfaces.web.live import last_pulse

    context = _common(request, None) | {"error": error, "hint": hint, "kind": kind, "pulse": last_pulse(request)}
    context["asked"] = request.method in {"GET", "HEAD"}
    return _templates.get_template("down.html").render(context)


def _common(request: Request, told: dict[str, Any] | None) -> dict[str, Any]:
    somebody: Principal | None = getattr(request.state, "principal", None)
    shared = house(request)
    environment = shared.settings.environment

    def link(path: str, **parameters: object) -> str:
        return local(request, path, **parameters)

    changes = _can_change(shared)

    def may(permission: Permission) -> bool:
        return somebody is not None and somebody.may(permission) and (changes or permission is Permission.READ)

    return {
        "link": link,
        "asset": lambda name: local(request, asset(name)),
        "may": may,
        "principal": somebody,
        "read_only": not changes,
        "sessions": getattr(request.state, "known_by", None) == "cookie",
        "environment": environment,
        "production": showing.production(environment),
        "path": request.url.path.removeprefix(prefix(request)) or "/",
        "here": f"/{request.url.path.lstrip('/')}" + (f"?{request.url.query}" if request.url.query else ""),
        "root": prefix(request),
        "now": datetime.now(UTC),
        "told": told,
        "request_id": getattr(request.state, "request_id", ""),
    }


def _can_change(shared: House) -> bool:
    try:
        return shared.operator is not None
    except (BartlebyError, psycopg.Error):
        return False


def _told(request: Request) -> dict[str, Any] | None:
    text = request.cookies.get(FLASH)
    # tabs share the cookie, and ask for parts of what they show all the time: those have no place for a notice
    if not text or request.headers.get("hx-target", _WHOLE) != _WHOLE:
        return None
    try:
        kept = json.loads(urlsafe_b64decode(text))
        return {"text": str(kept["text"]), "tone": str(kept["tone"]), "undo": kept.get("undo")}
    except (ValueError, KeyError, TypeError):
        return None
