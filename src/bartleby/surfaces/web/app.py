"""The application: pools, doors, the API and the pages, put together."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from bartleby.config import Settings
from bartleby.documents import Redaction
from bartleby.surfaces.limits import Streams
from bartleby.surfaces.pools import Pools
from bartleby.surfaces.web import api, health, metrics, pages, problems, signing
from bartleby.surfaces.web.authenticating import Recogniser
from bartleby.surfaces.web.context import House
from bartleby.surfaces.web.door import Door
from bartleby.surfaces.web.settings import ConsoleSettings
from bartleby.version import __version__

_SUMMARY = "Queues, dead letters, groups, replays, sinks, workers and the audit of a Bartleby."


def console(dsn: str | None = None, settings: ConsoleSettings | None = None) -> "Site":
    """Return the console for a database (else BARTLEBY_DSN), to be mounted or served.

    It connects when it is asked something, so the database need not be there yet. Mounted in an application, its
    connections are closed with its `close()`; served by itself they are closed when it ends.
    """
    house = _house(Settings.load(dsn=dsn).with_database(), settings or ConsoleSettings())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        house.close()

    app = Site(
        title="Bartleby",
        version=__version__,
        summary=_SUMMARY,
        lifespan=lifespan,
        openapi_url="/api/v1/openapi.json",
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
        # not by include_router, which puts all of them together once more, at the first request
        routes=[*api.routes, *pages.routes, *health.router.routes, *metrics.router.routes, *signing.router.routes],
    )
    app.state.house = house
    app.state.error_page = pages.error_page
    app.state.login_page = pages.login_page
    problems.install(app)
    app.add_middleware(Door, house=house)
    return app


class Site(FastAPI):
    """The application; its OpenAPI document knows what a problem is."""

    def close(self) -> None:
        """Close its connections; they open again if it is asked something."""
        self.state.house.close()

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        document = super().openapi()
        document.setdefault("components", {}).setdefault("schemas", {})["Problem"] = problems.SCHEMA
        return document


def _house(settings: Settings, chosen: ConsoleSettings) -> House:
    pools = Pools.open(
        settings, program="console", readers=chosen.readers, operators=chosen.operators, pooled=chosen.pooled
    )
    return House(pools, Redaction(chosen.hidden), chosen, Recogniser(chosen, pools), Streams(chosen.streams))
