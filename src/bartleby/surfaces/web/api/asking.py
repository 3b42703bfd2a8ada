"""What the API is asked: the parts of request bodies. Unknown names are refused, and numbers are not texts."""

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, get_type_hints

from fastapi import APIRouter, Depends, Query, Request, params
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictBool

from bartleby import documents
from bartleby.errors import InvalidArgument
from bartleby.surfaces.web.api.answering import LARGEST_ID

Id = Annotated[int, Field(strict=True, ge=1, le=LARGEST_ID)]
Flag = StrictBool
Reason = Annotated[
    str,
    Field(min_length=1, max_length=2000, pattern=r"\S", description="why, for the audit", examples=["fixed in 1.4"]),
]
ReasonAsked = Annotated[str, Query(min_length=1, max_length=2000, pattern=r"\S", description="why, for the audit")]
"""Of a DELETE, which has no body."""
Force = Annotated[bool, Query(description="also if something would be lost")]
Ids = Annotated[
    list[Id], Field(min_length=1, max_length=10_000, description="ids of messages", examples=[[4711, 4712]])
]
FilterText = Annotated[str, Field(max_length=10_000, examples=["queue:billing type:KeyError"])]
IDS, FILTER = "(ids)", "(filter)"
"""Tags of two kinds of body; a tag is in brackets, so that it is left out where a mistake is pointed at."""
Name = Annotated[str, Field(min_length=1, max_length=100)]


class Asked(BaseModel):
    """A request body."""

    model_config = ConfigDict(extra="forbid")


class Deed(Asked):
    """Something that is done, and why."""

    reason: Reason


def told_by(name: str, *, tag: str, other: str) -> Discriminator:
    """Return what tells two kinds of body apart, so that mistakes in one are not told as if it were the other."""
    return Discriminator(lambda given: tag if isinstance(given, dict) and name in given else other)


async def no_other_parameters(request: Request) -> None:
    """Raise InvalidArgument for a parameter of the query that means nothing: a misspelt filter finds everything."""
    known = _parameters(request.scope["endpoint"])
    for name in request.query_params:
        if name not in known:
            hint = f"known: {', '.join(known)}" if known else "there are none here"
            raise InvalidArgument(f"unknown parameter {name!r}", hint=hint)


# The door has looked at it before; here it is only documented.
_TOKEN = HTTPBearer(
    scheme_name="token", description="bly_…, of `bartleby tokens add` or POST /tokens", auto_error=False
)


def new_router(*tags: str, prefix: str = "") -> APIRouter:
    """Return a router for a part of the API."""
    return APIRouter(
        prefix=f"/api/v1{prefix}",
        tags=[*tags],
        generate_unique_id_function=_name,
        dependencies=[Depends(_TOKEN), Depends(no_other_parameters)],
    )


def _name(route: APIRoute) -> str:
    return route.name


@cache
def _parameters(endpoint: Callable[..., object]) -> tuple[str, ...]:
    hints = get_type_hints(endpoint, include_extras=True)
    asked = {name: getattr(each, "__metadata__", ()) for name, each in hints.items()}
    return tuple(name for name, parts in asked.items() if any(isinstance(part, params.Query) for part in parts))


async def raw_body(request: Request) -> str:
    """Return the body as it was sent: what FastAPI makes of it has lost digits."""
    return (await request.body()).decode(errors="replace")


def tree(raw: str) -> Any:  # noqa: ANN401 - any JSON value
    """Return a body with every digit of its numbers."""
    try:
        return documents.parsed(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the body cannot be taken apart: {error}") from None
