"""What somebody who writes a request by hand is told beside a refusal: the remedy as a request, not as SQL."""

import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Match

from bartleby import errors

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_SQL = re.compile(r"\bselect |=>")
_OTHER_WORDS: dict[type[Exception], str] = {
    errors.UnknownQueue: "GET /api/v1/queues lists them; POST /api/v1/queues creates one",
    errors.InvalidFilter: "GET /api/v1/queues lists them",
    errors.NeedsApproval: "somebody else approves it: POST /api/v1/replays/ID/approve, with its hash",
    errors.UnknownSink: "GET /api/v1/sinks lists them",
    errors.UnknownWorker: "GET /api/v1/workers lists them; it has stopped, or never reported",
    errors.UnknownToken: "GET /api/v1/tokens lists them; it was revoked or has expired before",
    errors.QueueInUse: "?force=true deletes them and their dead letters",
}
_OF_FIELDS = {
    "reason": "every change says why, for the audit: `reason` in the body, of a DELETE in the query",
    "expected": "`expected` is how many the filter finds: GET /api/v1/dead-letters/count?filter=…",
}


def hint(request: Request, error: Exception) -> str | None:
    """Return what helps whoever wrote this request; None if there is nothing better than what the error says."""
    match error:
        case RequestValidationError():
            return _of_body(request, list(error.errors()))
        case HTTPException(status_code=HTTPStatus.NOT_FOUND):
            return "GET /api/v1/openapi.json says what there is"
        case errors.InvalidArgument() if error.hint == "narrow it down, or say all":
            return 'narrow it down, or say "everything": true'
        case errors.BartlebyError() if error.hint and _SQL.search(error.hint):
            return _OTHER_WORDS.get(type(error))
        case _:
            return None


def explained(request: Request, error: HTTPException) -> HTTPException:
    """Return an error of the routes in words: which path is not there, or what can be done with it."""
    path, headers = request.url.path, dict(error.headers or {})
    if error.status_code == HTTPStatus.NOT_FOUND and error.detail == HTTPStatus.NOT_FOUND.phrase:
        return HTTPException(error.status_code, f"there is nothing at {path}", headers)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = ", ".join(_allowed(request))
        said = f"{request.method} cannot be done with {path}; {allowed} can"
        return HTTPException(error.status_code, said, {**headers, "Allow": allowed})
    return error


def _of_body(request: Request, mistakes: list[Any]) -> str | None:
    places = [tuple(each.get("loc", ())) for each in mistakes]
    if any(place[:1] == ("body",) for place in places) and "json" not in request.headers.get("content-type", ""):
        return "a body is JSON, and says so: Content-Type: application/json (curl --json '{…}')"
    if any(place[-1:] == ("after",) for place in places):
        return "`after` is the `next` of the page before, and the rest of the query is as it was there"
    if any(str(each.get("type", "")).startswith(("datetime", "timezone")) for each in mistakes):
        return "a time has its zone with it: 2027-01-01T09:30:00Z"
    missing = {str(each["loc"][-1]) for each in mistakes if each.get("type") == "missing" and each.get("loc")}
    return next((said for name, said in _OF_FIELDS.items() if name in missing), None)


def _allowed(request: Request) -> Iterator[str]:
    for method in _METHODS:
        scope = {**request.scope, "method": method}
        if any(each.matches(scope)[0] is Match.FULL for each in request.app.router.routes):
            yield method
