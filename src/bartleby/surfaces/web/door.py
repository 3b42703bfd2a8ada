"""The door: every request gets an id, a principal and rules for its answer before anything else looks at it."""

import asyncio
import re
import secrets
from contextlib import AbstractAsyncContextManager, nullcontext
from http import HTTPStatus
from typing import cast
from urllib.parse import quote, urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bartleby.principal import Principal, Role
from bartleby.surfaces import words
from bartleby.surfaces.limits import BodyDigest, Buckets, Turn, Turns, arrived, limited, too_large
from bartleby.surfaces.web import security
from bartleby.surfaces.web.arrival import Arrival, Arrivals
from bartleby.surfaces.web.authenticating import Known, Unrecognised
from bartleby.surfaces.web.context import House
from bartleby.surfaces.web.paths import LOGIN, STREAM, is_api, is_open, link, route_of, without_host
from bartleby.surfaces.web.problems import Problem, answer, problem_of

_BY_COOKIES = frozenset({"cookie", "application", "proxy"})  # of ours, of the host's, of the proxy's
_REQUEST_ID = re.compile(r"[\w.:+/=-]{1,100}", re.ASCII)
_NOBODY = Problem(
    "unauthorized",
    401,
    "nobody knows who you are",
    "send `Authorization: Bearer TOKEN`; somebody who may makes one: bartleby tokens add NAME --role ROLE",
)


class Door:
    """ASGI middleware around the whole site."""

    def __init__(self, app: ASGIApp, house: House) -> None:
        settings = house.settings
        self._app = app
        self._house = house
        self._arrivals = Arrivals(settings.proxy)
        self._changing = Turns(min(settings.operators, settings.readers // 2))
        self._looking = Turns(settings.readers - self._changing.each)  # whoever changes something looks as well
        self._writes = Buckets(settings.writes_per_minute, settings.writes_per_minute / 6)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it here."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # nothing here speaks anything else
            await send({"type": "websocket.close", "code": 1008})
            return
        words.speak_utc()
        scope = _under(scope, self._house.settings.prefix)
        head_only = scope["method"] == "HEAD" and route_of(scope) != STREAM
        if head_only:  # every GET that ends can be asked for its head
            scope["method"] = "GET"
        arrival, digest = self._arrivals.of(scope), BodyDigest()
        scope["scheme"] = arrival.scheme
        here = f"{arrival.scheme}://{Headers(scope=scope).get('host', '')}"
        sending = _Sending(send, _request_id(scope), here, head_only=head_only)
        scope["state"] = {
            **scope.get("state", {}),
            "request_id": sending.request_id,
            "nonce": sending.nonce,
            "principal": None,
            "arrival": arrival,
            "body": digest,
        }
        receive = limited(receive, self._house.settings.largest_body, digest)
        request = Request(scope, receive)
        try:
            if refused := await self._refusal(request, arrival):
                await refused(scope, receive, sending)
                return
            receive = receive if request.method in security.SAFE else await arrived(receive)
            async with self._turn(request, sending.turn) as sending.turn:
                await self._app(scope, receive, sending)
            if sending.status == HTTPStatus.FORBIDDEN and _is_audited(request):
                self._writes.take(request.state.principal.name)
        except Exception as error:
            if sending.status is not None:
                if head_only and isinstance(error, _Enough | ClientDisconnect):
                    return
                raise
            await answer(request, problem_of(error), error)(scope, receive, sending)

    async def _refusal(self, request: Request, arrival: Arrival) -> Response | None:
        settings, headers = self._house.settings, request.headers
        problem = security.wrong_host(settings, arrival) or security.secret_in_url(request.scope["query_string"])
        if problem is None and too_large(headers.get("content-length"), settings.largest_body):
            problem = Problem("content-too-large", 413, f"a request has at most {settings.largest_body:,} bytes")
        if problem is not None:
            return answer(request, problem)
        known = None
        try:
            if not is_open(request.scope):
                known = await run_in_threadpool(self._house.recogniser.recognise, request, arrival)
                if known is None:
                    return _stranger(request, _NOBODY)
                request.state.principal = known.principal
                request.state.known_by = known.by
        except Unrecognised as error:
            return _stranger(request, error.problem)
        problem = self._unsafe(request, arrival, known)
        return None if problem is None else answer(request, problem)

    def _turn(self, request: Request, own: Turn) -> AbstractAsyncContextManager[Turn]:
        principal = request.state.principal
        if principal is None or route_of(request.scope) == STREAM:  # neither keeps a connection to itself
            return nullcontext(own)
        return (self._looking if request.method in security.SAFE else self._changing).held(principal.name)

    def _unsafe(self, request: Request, arrival: Arrival, known: Known | None) -> Problem | None:
        name = arrival.address if known is None else known.principal.name
        if request.method in security.SAFE:
            return _too_many(self._writes.wait(name)) if _is_audited(request) else None
        if known is None or known.by != "bearer":
            with_cookie = known is not None and known.by in _BY_COOKIES and "cookie" in request.headers
            origins = self._house.settings.origins
            problem = security.cross_site(request.headers, arrival, origins, with_cookie=with_cookie)
            if problem is not None:
                return problem
        return _too_many(self._writes.take(name))


def _is_audited(request: Request) -> bool:
    # what an agent looks at in vain is a line of the audit, so it counts as a change
    principal = cast("Principal | None", request.state.principal)
    return principal is not None and principal.role is Role.AGENT and request.method in security.SAFE


def _too_many(wait: float) -> Problem | None:
    if not wait:
        return None
    seconds = {"Retry-After": str(int(wait) + 1)}
    return Problem("too-many-requests", 429, "too many changes in a minute; wait a moment", headers=seconds)


class _Enough(OSError):
    """Nobody wants to hear more of this answer."""


class _Sending:
    """Sends an answer with what every answer has, or only its head."""

    def __init__(self, send: Send, request_id: str, here: str, *, head_only: bool) -> None:
        self._send = send
        self._here = here
        self._head_only = head_only
        self.request_id = request_id
        self.nonce = secrets.token_urlsafe(16)
        self.status: int | None = None
        self.turn = Turn(asyncio.Semaphore())

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self.request_id
            security.protect(headers, self.nonce)
            if "location" in headers:
                headers["Location"] = without_host(headers["location"], self._here)
            await self._send(message)
            if self._head_only:
                await self._send({"type": "http.response.body", "body": b""})
        elif not self._head_only:
            self.turn.leave()  # whoever reads slowly works at nothing
            await self._send(message)
            if message.get("more_body"):
                await self.turn.take()
        elif message.get("more_body"):  # an export would read on and on
            raise _Enough


def _stranger(request: Request, problem: Problem) -> Response:
    if problem.status != _NOBODY.status:
        return answer(request, problem)
    headers = request.headers
    if is_api(request.scope):
        response = answer(request, problem)
        response.headers.append("WWW-Authenticate", 'Bearer realm="bartleby"')
        if headers.get("sec-fetch-mode", "navigate") == "navigate":
            # a script of a page would make its browser ask for a password
            response.headers.append("WWW-Authenticate", 'Basic realm="bartleby", charset="UTF-8"')
        return response
    login = f"{link(request.scope, LOGIN)}?next={quote(_wanted(request), safe='')}"
    if "hx-request" in headers or route_of(request.scope) == STREAM:
        response = answer(request, problem)
        if request.method not in security.SAFE:  # who only reads goes on reading what is there
            response.headers["HX-Redirect"] = login
        return response
    if "authorization" in headers:
        response = answer(request, problem)
        response.headers["WWW-Authenticate"] = 'Basic realm="bartleby", charset="UTF-8"'
        return response
    return RedirectResponse(login, 303)


def _wanted(request: Request) -> str:
    shown = urlsplit(request.headers.get("hx-current-url", ""))
    if shown.path:  # a part of a page was asked for, or a form was sent from it: they go on with the page
        return f"{shown.path}?{shown.query}" if shown.query else shown.path
    if request.method not in security.SAFE:
        return link(request.scope, "/")
    query = request.scope["query_string"].decode("latin-1")
    path = cast("str", request.scope["path"])
    return f"{path}?{query}" if query else path


def _under(scope: Scope, prefix: str) -> Scope:
    # A proxy has taken the prefix away, or has not; in both cases it is in front of every link.
    scope = dict(scope)
    if prefix:
        path = scope["path"]
        if path != prefix and not path.startswith(f"{prefix}/"):
            scope["path"] = prefix + path
        scope["root_path"] = prefix
    return scope


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    if _REQUEST_ID.fullmatch(given):
        return given
    return f"{'api' if is_api(scope) else 'web'}-{secrets.token_hex(6)}"
