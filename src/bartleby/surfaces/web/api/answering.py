"""Answers of the API: JSON with every digit that the database has, pages with a cursor, and tags of single things."""

import hashlib
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Path, Query, Request
from starlette.responses import Response

from bartleby.evidence import Page
from bartleby.surfaces import shapes
from bartleby.surfaces.web import problems

LARGEST_ID = 2**63 - 1
JSON = "application/json"

MessageId = Annotated[int, Path(ge=1, le=LARGEST_ID, description="the id of a message, and of its letter")]
GroupId = Annotated[int, Path(ge=1, le=LARGEST_ID, description="the id of a group")]
ReplayId = Annotated[int, Path(ge=1, le=LARGEST_ID, description="the id of a plan")]
QueueName = Annotated[str, Path(min_length=1, max_length=100, description="the name of a queue", examples=["billing"])]
SinkName = Annotated[str, Path(min_length=1, max_length=100, description="the name of a sink", examples=["bus"])]
Limit = Annotated[int, Query(ge=1, le=500, description="at most so many items")]
Number = Annotated[
    str | None,
    Query(pattern="^[0-9]{1,18}$", description="`next` of the page before", examples=["4711"]),
]
"""A cursor that is a number."""
Filter = Annotated[
    str,
    Query(
        max_length=10_000,
        description="which letters: the grammar of `bartleby dead`; without `status:` those that are dead",
        examples=["queue:billing type:KeyError age:<1h"],
    ),
]


def answer(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return nouns as JSON; None with 204 is no body."""
    if status == HTTPStatus.NO_CONTENT:
        return Response(None, status, headers)
    return Response(shapes.text(value), status, {"Cache-Control": "no-store", **(headers or {})}, JSON)


def page(request: Request, found: Page[Any], items: Sequence[object] | None = None) -> Response:
    """Return a page as JSON, with a link to the next one."""
    headers = {}
    if found.next is not None:
        asked = [each for each in request.query_params.multi_items() if each[0] != "after"]
        headers["Link"] = f'<?{urlencode([*asked, ("after", found.next)])}>; rel="next"'
    return answer({"items": list(found.items) if items is None else items, "next": found.next}, headers=headers)


def tagged(request: Request, value: object) -> Response:
    """Return one thing with its tag, or that it is still what the sender has."""
    text = shapes.text(value)
    tag = f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache", "Vary": "Authorization, Cookie"}
    known = {each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")}
    if tag in known or "*" in known:
        return Response(None, 304, headers)
    return Response(text, 200, headers, JSON)


def refusals(*statuses: int, tagged: bool = False, paged: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return what is documented of an endpoint beside its answer: its problems, and headers that it may have."""
    problem = {problems.MEDIA: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    made: dict[int | str, dict[str, Any]] = {
        400: {"description": "The body cannot be read", "content": problem},
        **problems.responses(*statuses),
    }
    text = {"schema": {"type": "string"}}
    if tagged:
        made[200] = {"headers": {"ETag": {"description": "what it is now, for If-None-Match", **text}}}
        made[304] = {"description": "It is still what you have", "headers": {"ETag": text}}
    if paged:
        made[200] = {"headers": {"Link": {"description": 'the next page, rel="next"; absent on the last', **text}}}
    return made
