"""What a request is told when it fails: application/problem+json for programs, a page for people.

A problem has a `type` (urn:bartleby:unknown-queue), a `title`, its `status`, a `detail` in words, a `hint` where
something helps, and the `request_id` under which the audit and the log know the request. Of a filter it also has the
`position` of the mistake and the filter with a mark under it (`pointed`); of a malformed request the `errors`.
"""

import json
import logging
import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

import psycopg
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from bartleby import errors
from bartleby.documents import Redaction
from bartleby.surfaces.web.error_page import page
from bartleby.surfaces.web.hints import explained, hint
from bartleby.surfaces.web.paths import is_api

MEDIA = "application/problem+json"
STATUS: dict[type[Exception], int] = {
    errors.UnknownQueue: 404,
    errors.UnknownMessage: 404,
    errors.UnknownGroup: 404,
    errors.UnknownReplay: 404,
    errors.UnknownSink: 404,
    errors.UnknownToken: 404,
    errors.UnknownWorker: 404,
    errors.Forbidden: 403,
    psycopg.errors.InsufficientPrivilege: 403,
    errors.PlanDrifted: 409,
    errors.NeedsApproval: 409,
    errors.WrongState: 409,
    errors.QueueInUse: 409,
    errors.LeaseLost: 409,
    errors.PayloadTooLarge: 413,
    errors.InvalidQueueName: 422,
    errors.InvalidPolicy: 422,
    errors.InvalidMessage: 422,
    errors.InvalidArgument: 422,
    errors.InvalidFilter: 422,
    errors.InvalidPatch: 422,
    errors.InvalidSink: 422,
    errors.InvalidPayload: 422,
    errors.UndecodablePayload: 422,
    errors.KeyReused: 422,
    errors.NoConnection: 503,
    errors.NotInstalled: 503,
    errors.VersionMismatch: 503,
    psycopg.errors.QueryCanceled: 504,
    psycopg.errors.ReadOnlySqlTransaction: 503,
    psycopg.OperationalError: 503,
    psycopg.InterfaceError: 503,
}
"""Which status each error has; for a class that is not here the nearest above it counts, and else it is a 500."""

RETRY_SECONDS = 2
_DESCRIPTIONS = {
    401: "Nobody knows who you are",
    403: "You may not do this",
    404: "There is no such thing, or none that you may see",
    409: "Not in the state that it is in now",
    413: "Too large",
    422: "Something in the request cannot be used",
    429: "Too many requests",
    503: "The database cannot be reached, or is not of this version",
    504: "The database took too long",
}
SCHEMA: dict[str, Any] = {
    "title": "Problem",
    "type": "object",
    "required": ["type", "title", "status", "detail", "request_id"],
    "properties": {
        "type": {"type": "string", "examples": ["urn:bartleby:unknown-queue"]},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "hint": {"type": "string", "description": "what helps"},
        "request_id": {"type": "string", "description": "how the audit and the log call the request"},
        "position": {"type": "integer", "description": "where a filter is wrong, counted from 1"},
        "pointed": {"type": "string", "description": "the filter with a mark under the mistake"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"where": {"type": "string"}, "message": {"type": "string"}},
                "required": ["where", "message"],
            },
        },
    },
}
"""A problem, as OpenAPI knows it: #/components/schemas/Problem."""

_PLAIN = {
    "missing": "it is missing",
    "string_too_short": "it is empty",
    "string_too_long": "it is too long",
    "int_parsing": "it has to be a whole number",
    "float_parsing": "it has to be a number",
    "bool_parsing": "it has to be true or false",
}
_WORDS = Redaction()
_log = logging.getLogger("bartleby.console")
_AWAY = "the database cannot be reached"
_ROLES = "the console's user of the database lacks a role: bartleby_reader looks, bartleby_operator also changes things"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and what helps."""

    kind: str
    status: int
    detail: str
    hint: str | None = None
    more: Mapping[str, object] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The kind in words."""
        return self.kind.replace("-", " ").capitalize()

    def document(self, request_id: str) -> dict[str, object]:
        """Return it as JSON has it."""
        said: dict[str, object] = {
            "type": f"urn:bartleby:{self.kind}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }
        if self.hint:
            said["hint"] = self.hint
        return {**said, **self.more, "request_id": request_id}


_UNEXPECTED = Problem("unexpected", 500, "something went wrong here, and it is not your request", "see the log")


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what FastAPI is to document of these statuses (`responses=`), with those that every endpoint has."""
    content = {MEDIA: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    wanted = sorted({401, 403, 422, 429, 503, 504, *statuses})
    return {each: {"description": _DESCRIPTIONS[each], "content": content} for each in wanted}


def install(app: FastAPI) -> None:
    """Let an application answer its errors as problems."""
    for kind in (errors.BartlebyError, psycopg.Error, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _handle)


async def _handle(request: Request, error: Exception) -> Response:
    api = is_api(request.scope)
    problem = problem_of(explained(request, error) if api and isinstance(error, HTTPException) else error)
    if api:
        problem = replace(problem, hint=hint(request, error) or problem.hint)
    if isinstance(error, errors.InvalidFilter) and error.position is not None:
        written = await _filter(request)
        more = {"position": error.position} | ({} if written is None else {"pointed": error.pointed(written)})
        problem = replace(problem, more=more)
    return answer(request, problem, error)


def problem_of(error: Exception) -> Problem:
    """Return an error as a problem."""
    match error:
        case RequestValidationError():
            found = list(_mistakes(error))
            said = "; ".join(f"{each['where']}: {each['message']}" for each in found[:3])
            return Problem("invalid-request", 422, said or "the request cannot be understood", more={"errors": found})
        case HTTPException():
            name = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-").replace("'", "")
            return Problem(name, error.status_code, str(error.detail), headers=dict(error.headers or {}))
        case errors.BartlebyError() if not isinstance(error, errors.NoConnection):
            return _ours(error)
        case psycopg.Error():
            return _of_the_database(error)
        case _:
            return _UNEXPECTED


def _ours(error: errors.BartlebyError) -> Problem:
    kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(error).__name__).lower()
    status = _status(error)
    return _UNEXPECTED if status is None else Problem(kind, status, str(error), error.hint, headers=_again(status))


def _of_the_database(error: psycopg.Error) -> Problem:
    status = _status(error)
    match error:
        case psycopg.errors.QueryCanceled():
            hint = "narrow it down: a queue, a status or a time makes it faster"
            return Problem("too-slow", 504, "the database took too long, and was stopped", hint)
        case psycopg.errors.InsufficientPrivilege():
            return Problem("insufficient-privilege", 403, error.diag.message_primary or "the database refused", _ROLES)
        case _ if status is not None:
            return Problem("no-connection", status, _AWAY, "try again: it recovers by itself", headers=_again(status))
        case _:
            return _UNEXPECTED


def _status(error: Exception) -> int | None:
    return next((STATUS[each] for each in type(error).__mro__ if each in STATUS), None)


def _again(status: int) -> dict[str, str]:
    return {"Retry-After": str(RETRY_SECONDS)} if status == HTTPStatus.SERVICE_UNAVAILABLE else {}


def answer(request: Request, problem: Problem, error: Exception | None = None) -> Response:
    """Return the answer to a request with a problem: a document for programs, a page for people."""
    request_id = getattr(request.state, "request_id", "")
    told = error is not None and getattr(request.state, "principal", None) is not None
    if problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR and error is not None:
        note(request_id, problem, error)
    document = problem.document(request_id)
    if told and problem.kind == "no-connection":
        # whoever is not known yet is not told where the database is
        document["detail"] = f"{_AWAY}: {' '.join(str(error).split())}"
    headers = {**problem.headers, "Cache-Control": "no-store"}
    if is_api(request.scope):
        return Response(json.dumps(document, ensure_ascii=False), problem.status, headers, MEDIA)
    return page(request, document, headers)


def note(request_id: str, problem: Problem, error: Exception) -> None:
    """Write down what went wrong here, for whoever looks by the id of the request."""
    # What the database adds to its sentence is the row that it was about. A traceback would say it again.
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    said = _WORDS.words(" ".join((primary or str(error)).split()))
    if problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        frames = "".join(traceback.format_tb(error.__traceback__))
        _log.error("%s: %s: %s\n%s", request_id, type(error).__name__, said, frames)
    else:
        _log.warning("%s: %s", request_id, said)


def _mistakes(error: RequestValidationError) -> Iterator[dict[str, str]]:
    # what was sent is not repeated: it may be a secret
    for each in error.errors():
        where = [part for part in map(str, each.get("loc", ())) if not part.startswith("(")]  # a tag of the API
        message = str(each.get("msg", "cannot be used"))
        if each.get("type") == "json_invalid":
            where, message = where[:1], f"no JSON at character {where[-1]}: {each.get('ctx', {}).get('error', message)}"
        yield {"where": ".".join(where), "message": message}


def plainly(error: RequestValidationError) -> str:
    """Return what is wrong with a form, for whoever has filled it in: `Reason: it is missing`."""
    said = []
    for each in error.errors():
        name = str([*each["loc"], ""][1]).replace("_", " ").capitalize()  # after `body`; the rest is a place in a list
        said.append(f"{name}: {_PLAIN.get(each['type'], each['msg'])}".removeprefix(": "))
    return "; ".join(dict.fromkeys(said))


async def _filter(request: Request) -> str | None:
    if "filter" in request.query_params:
        return request.query_params["filter"]
    try:
        body = json.loads(await request.body())
    except (ValueError, RuntimeError, RecursionError, ClientDisconnect):
        return None
    written = body.get("filter") if isinstance(body, dict) else None
    return written if isinstance(written, str) else None
