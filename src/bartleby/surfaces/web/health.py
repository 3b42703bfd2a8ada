"""Whether the console lives, and whether it can use its database. For everybody, so it says no more."""

import asyncio
import time
from typing import Annotated, Literal

import psycopg
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from bartleby.errors import BartlebyError, NotInstalled
from bartleby.surfaces.web import problems
from bartleby.surfaces.web.context import House, house
from bartleby.surfaces.web.paths import HEALTH
from bartleby.version import __version__

router = APIRouter(tags=["health"])
_GOOD_FOR = 1.0


class Health(BaseModel):
    """How the console is."""

    status: Literal["ok", "database away", "not installed", "no rights"]
    version: str = Field(description="of the console")
    schema_version: str | None = Field(default=None, description="of the database; null if it is not known")


class _Looks:
    """What was seen a moment ago: anybody may ask, so one thread looks for all who do, and all the others are free."""

    def __init__(self) -> None:
        self._seen: tuple[float, Health] | None = None
        self._looking: asyncio.Task[Health] | None = None

    async def health(self, shared: House) -> Health:
        if self._seen is not None and time.monotonic() - self._seen[0] <= _GOOD_FOR:
            return self._seen[1]
        looking = self._looking
        if looking is None or looking.done() or looking.get_loop() is not asyncio.get_running_loop():
            looking = self._looking = asyncio.create_task(self._look(shared))
        return await asyncio.shield(looking)

    async def _look(self, shared: House) -> Health:
        found = await run_in_threadpool(_look, shared)
        self._seen = time.monotonic(), found
        return found


@router.get(
    HEALTH,
    operation_id="health",
    summary="Whether the console lives and reaches its database",
    responses={
        422: problems.responses()[422],
        503: {"model": Health, "description": "It lives, and the database cannot be used"},
    },
)
async def health(
    request: Request,
    response: Response,
    check: Annotated[
        Literal["database", "process"], Query(description="`process`: do not look at the database")
    ] = "database",
) -> Health:
    """Say how the console is; nobody has to say who they are for that."""
    if check == "process":
        return Health(status="ok", version=__version__)
    state = request.app.state
    if not hasattr(state, "looks"):
        state.looks = _Looks()
    looks: _Looks = state.looks
    seen = await looks.health(house(request))
    response.status_code = 200 if seen.status == "ok" else 503
    return seen


def _look(shared: House) -> Health:
    try:
        return Health(status="ok", version=__version__, schema_version=shared.reader.version())
    except NotInstalled:
        return Health(status="not installed", version=__version__)
    except psycopg.errors.InsufficientPrivilege:
        return Health(status="no rights", version=__version__)
    except (psycopg.Error, BartlebyError):
        return Health(status="database away", version=__version__)
